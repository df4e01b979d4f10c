//! The `threaded` backend: ranks that are threads read and write each other's tensors directly.
//!
//! It serves CPU tensors, and CUDA tensors of ranks that share one GPU. Every collective has the same steps:
//!
//! 1. announce: each rank writes its call and the addresses of its tensors into its own slot;
//! 2. exchange: after a barrier every rank can read every call, so all ranks find the same mismatches, or none;
//! 3. work: each rank writes its own results and reads from the others. In `all_reduce` each rank reduces one slice, in
//!    rank order, and writes it to all ranks. Every element is read once and written once per rank;
//! 4. leave together: a second barrier holds every rank until no other rank uses its memory.
//!
//! The elements of a small `all_reduce` are part of the announcement. Each rank reduces them all into its own tensors. No
//! rank uses another's tensors then, so the second barrier is not needed.
//!
//! Each rank computes on a CUDA stream of its own. On a GPU that ranks share, a collective is on the device's default
//! stream, which they have in common: it begins after all that the ranks have launched by the exchange, and what they
//! launch after they have left begins after it. The host waits for no GPU.
//!
//! With very many tensors, the first rank alone looks for conflicts, and one more barrier publishes its verdict. Only
//! the barriers before the work can be cancelled or time out. During the work no rank waits for another.

mod kernels;

use std::sync::Arc;

use tch::Tensor;

use super::Traffic;
use super::backend::{BackendType, Devices, Join, RankBackend, Reach};
use super::call::Call;
use super::local::{CallSlot, CommonStream, Extras, Memory, ReductionScratch, Shared};
use super::network::Network;
use crate::error::Result;
use crate::ffi::TorchResult;
use crate::operation::{OpId, Operation};

pub(super) const BACKEND: BackendType = BackendType {
    name: "threaded",
    devices: Devices::CpuOrSharedGpu,
    reach: Reach::WithinProcess,
    is_stream_ordered: false,
    check_library: || Ok(()),
    check_shared_gpu: |_| Ok(()),
    reduces_in_place: true,
    check_reduction: |_, _, _| Ok(()),
    prepare,
};

fn prepare(shared: &Arc<Shared>, _: Option<&Arc<Network>>) -> Result<Join> {
    let shared = shared.clone();
    Ok(Arc::new(move |rank, device| {
        Ok(Box::new(ThreadedBackend::join(shared.slot(rank), CommonStream::of(device)?)?))
    }))
}

/// The most bytes that all ranks together announce as elements of an all_reduce. One rank announces at most
/// [`input_copies::MAX_BYTES`](super::local), so this limit matters from five ranks on.
const MAX_CONTENTS: usize = 2 << 10;

/// One rank's side of the backend.
pub(super) struct ThreadedBackend {
    slot: CallSlot,
    /// The stream of the collectives; `None` on the CPU.
    stream: Option<CommonStream>,
    /// Memory of all ranks' tensors in this collective. Reused, to avoid allocating.
    memory: Memory,
    /// Lists for the work, reused likewise.
    addresses: ReductionScratch,
}

impl ThreadedBackend {
    /// Joins the group. Returns once all ranks have joined.
    pub(super) fn join(slot: CallSlot, stream: Option<CommonStream>) -> Result<Self> {
        let at = OpId { operation: Operation::Init, sequence: 0 };
        slot.barrier().wait(slot.rank(), at)?;
        let (memory, addresses) = (Memory::default(), ReductionScratch::default());
        Ok(Self { slot, stream, memory, addresses })
    }

    /// Runs this rank's part of a collective whose tensors one exchange can move.
    fn run_whole(&mut self, call: &Call) -> Result<()> {
        if let Some(stream) = &self.stream {
            stream.wait_for_rank()?;
        }
        let done = self.exchange_and_work(call);
        // After an error too: other ranks may still use this one's tensors, which it may free.
        if let Some(stream) = &self.stream {
            stream.let_rank_wait()?;
        }
        done
    }

    fn exchange_and_work(&mut self, call: &Call) -> Result<()> {
        let extras = self.extras();
        let Self { slot, stream, memory, addresses } = self;
        slot.exchange_calls(0, call, extras, Some(memory))?;
        if matches!(call.operation, Operation::Barrier | Operation::NewGroup) {
            return Ok(()); // the exchange is the barrier
        }
        if slot.announced().has_contents {
            // SAFETY: the exchange establishes all that this function requires.
            unsafe {
                kernels::reduce_contents(call, slot.announced(), slot.published(), addresses)?;
            }
            return Ok(());
        }
        // All tensors stay valid: their owners are in this collective, hold them, and leave it together.
        slot.and_leave_together(call, || {
            // SAFETY: the exchange and the common exit establish all that `kernels::run` requires.
            let mut work =
                || unsafe { kernels::run(call, slot.rank(), slot.published(), addresses) };
            match stream {
                Some(stream) => stream.with(work),
                None => work(),
            }
        })
    }

    /// Returns what the ranks announce besides their calls.
    fn extras(&self) -> Extras {
        // Each rank reads the elements of all, so the limit is for all together.
        let members = self.slot.barrier().members().len();
        let contents = if members > 1 { MAX_CONTENTS / members } else { 0 };
        Extras { device: true, contents }
    }
}

impl RankBackend for ThreadedBackend {
    fn run(&mut self, call: &Call) -> Result<()> {
        let extras = self.extras();
        let Some((most, numel)) = self.slot.pieces(call, extras)? else {
            return self.run_whole(call);
        };
        for start in (0..numel).step_by(most) {
            let outputs = cut(call.outputs, start, most)?;
            let inputs =
                if call.is_in_place() { None } else { Some(cut(call.inputs, start, most)?) };
            let inputs = inputs.as_deref().unwrap_or(&outputs);
            self.run_whole(&Call { inputs, outputs: &outputs, ..*call })?;
        }
        Ok(())
    }

    fn traffic(&self, call: &Call) -> Traffic {
        let members = self.slot.barrier().members().len();
        kernels::traffic(call, self.slot.announced(), self.slot.rank(), members)
    }

    fn synchronize(&mut self, _: &dyn Fn()) -> Result<()> {
        // CPU work is complete on return. CUDA work of this backend waits only for work that other ranks have launched.
        self.slot.check()
    }
}

/// Returns at most `len` elements of each of `tensors`, from `start` on.
fn cut(tensors: &[Tensor], start: usize, len: usize) -> Result<Vec<Tensor>> {
    let cut = |tensor: &Tensor| {
        let start = start.min(tensor.numel());
        let len = len.min(tensor.numel() - start);
        let piece = || tensor.f_view([-1])?.f_narrow(0, start as i64, len as i64);
        tch::no_grad(piece).doing("cutting a tensor into pieces")
    };
    tensors.iter().map(cut).collect()
}
