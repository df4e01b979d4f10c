//! The `threaded` backend: ranks that are threads read and write each other's tensors directly.
//!
//! For CPU tensors, and for CUDA tensors of ranks that share one GPU. Every collective has the same
//! shape:
//!
//! 1. announce: each rank writes what it calls, and where its tensor lies, into its own slot;
//! 2. meet: from here on every rank knows every call, so all find the same differences, or none;
//! 3. work: in `all_reduce` each rank reduces one slice over all ranks and writes it to all, so every
//!    element is read once and written once per rank, and summed by one rank in the order of the ranks;
//! 4. meet again: nobody leaves while another still works on its memory.
//!
//! Only the first meeting can be cancelled or time out; between the two no rank waits for anything.

use std::cell::UnsafeCell;
use std::sync::Arc;

use crossbeam::utils::CachePadded;
use tch::{Device, Kind, Tensor};

use super::element;
use super::{Backend, Call, ReduceOp, device_name, kind_name, num_bytes};
use crate::error::{Error, Result};
use crate::operation::Operation;
use crate::sync::{Barrier, Run};
use crate::torch::cuda;

/// What all ranks of the group share. Rank 0 makes it and hands it to the others.
pub(crate) struct Shared {
    run: Arc<Run>,
    barrier: Barrier,
    slots: Box<[CachePadded<Slot>]>,
}

/// A rank's announcements, for every other collective.
///
/// Two, because a rank that is through with one collective may announce the next while a slow rank
/// still reads the last; it cannot come to the one after that before the slow rank has moved on.
struct Slot([UnsafeCell<Announced>; 2]);

// SAFETY: a slot is written by its own rank only, before that rank enters the barrier of the call, and
// read by others only after they have passed that barrier and before they enter the next one; the
// alternation of the two cells keeps the next write away from those reads. The pointers in it are
// followed under the rules of `Threaded::meet`.
unsafe impl Sync for Slot {}
// SAFETY: as above; the pointers are plain data.
unsafe impl Send for Slot {}

/// One rank's call: everything that must be equal on all ranks, and where its tensor lies.
#[derive(Clone)]
struct Announced {
    operation: Operation,
    reduce_op: Option<ReduceOp>,
    src: usize,
    kind: Kind,
    device: Device,
    /// The CUDA stream that the rank's work goes to; 0 on a CPU. Equal, so the work is in order.
    stream: usize,
    shape: Vec<i64>,
    data: *mut u8,
}

impl Shared {
    pub(crate) fn new(run: Arc<Run>) -> Self {
        let nothing = || {
            UnsafeCell::new(Announced {
                operation: Operation::Function,
                reduce_op: None,
                src: 0,
                kind: Kind::Uint8,
                device: Device::Cpu,
                stream: 0,
                shape: Vec::with_capacity(8),
                data: std::ptr::null_mut(),
            })
        };
        let slots = run.activity.iter().map(|_| CachePadded::new(Slot([nothing(), nothing()])));
        Self { slots: slots.collect(), barrier: Barrier::new(run.clone()), run }
    }
}

/// One rank's side of the backend.
pub(crate) struct Threaded {
    rank: usize,
    shared: Arc<Shared>,
    /// Which of the two announcements is next. Turns with every meeting, so that it is the same on all
    /// ranks (a count of calls is not: a call may fail before it comes to meet).
    parity: usize,
    /// Where the tensors of this collective lie; kept to be filled again without allocating.
    tensors: Vec<*mut u8>,
    /// The ranks in the order of their tensors in memory, likewise.
    by_place: Vec<usize>,
}

impl Threaded {
    /// Joins the group; returns once all ranks have.
    pub(crate) fn join(rank: usize, shared: Arc<Shared>) -> Result<Self> {
        shared.barrier.wait(rank)?;
        let tensors = Vec::with_capacity(shared.slots.len());
        Ok(Self { rank, shared, parity: 0, tensors, by_place: Vec::new() })
    }

    /// Steps 1 and 2: announces this rank's call, waits for the others' and compares.
    ///
    /// On success all tensors have the same kind, shape and device, no two overlap, and they stay where
    /// they are until every rank has dropped its [`Threaded::way_out`]: their owners are in this
    /// collective and hold them.
    fn meet(
        &mut self,
        call: &Call,
        args: Option<(&Tensor, Option<ReduceOp>, usize)>,
    ) -> Result<()> {
        let parity = self.parity;
        // SAFETY: our own slot, before the barrier (see `Slot`).
        let mine = unsafe { &mut *self.shared.slots[self.rank].0[parity].get() };
        mine.operation = call.operation;
        mine.shape.clear();
        if let Some((tensor, reduce_op, src)) = args {
            (mine.reduce_op, mine.src) = (reduce_op, src);
            (mine.kind, mine.device) = (tensor.kind(), tensor.device());
            mine.stream = match mine.device {
                Device::Cuda(index) => cuda::current_stream(index)? as usize,
                _ => 0,
            };
            mine.shape.extend_from_slice(&tensor.size());
            mine.data = tensor.data_ptr().cast();
        } else {
            (mine.reduce_op, mine.src, mine.kind) = (None, 0, Kind::Uint8);
            (mine.device, mine.stream, mine.data) = (Device::Cpu, 0, std::ptr::null_mut());
        }

        let shared = &self.shared;
        shared.barrier.wait(self.rank)?;
        self.parity = 1 - parity;

        // SAFETY: after the barrier of this call and before the next (see `Slot`).
        let call_of = |rank: usize| unsafe { &*shared.slots[rank].0[parity].get() };
        let calls = || (0..shared.slots.len()).map(call_of);
        if calls().skip(1).any(|other| !other.agrees_with(call_of(0))) {
            let (calls, odd) = describe(calls());
            return Err(Error::Mismatch { sequence: call.sequence, calls, odd });
        }
        self.tensors.clear();
        self.tensors.extend(calls().map(|announced| announced.data));
        let bytes = call_of(0).num_bytes();
        self.check_overlap(bytes)
    }

    /// Step 4, when this is dropped: also when the work in between has panicked.
    fn way_out(&self) -> WayOut<'_> {
        WayOut { barrier: &self.shared.barrier, rank: self.rank }
    }

    /// All ranks see the same pointers, so all come to the same answer.
    fn check_overlap(&mut self, bytes: usize) -> Result<()> {
        let start = |rank: usize| self.tensors[rank] as usize;
        self.by_place.clear();
        self.by_place.extend(0..self.tensors.len());
        self.by_place.sort_unstable_by_key(|&rank| start(rank));
        let overlap = |pair: &&[usize]| bytes > 0 && start(pair[1]) - start(pair[0]) < bytes;
        let Some(pair) = self.by_place.windows(2).find(overlap) else { return Ok(()) };
        let (first, second) = (pair[0].min(pair[1]), pair[0].max(pair[1]));
        Err(Error::SharedMemory { first, second })
    }

    /// The elements that this rank reduces: equal parts, in whole cache lines.
    fn my_slice(&self, numel: usize) -> std::ops::Range<usize> {
        let part = numel.div_ceil(self.tensors.len()).next_multiple_of(64);
        let start = (part * self.rank).min(numel);
        start..(start + part).min(numel)
    }

    fn reduce_on_cpu(&self, tensor: &Tensor, op: ReduceOp) {
        let slice = self.my_slice(tensor.numel());
        // SAFETY: between `meet` and the way out all pointers are to tensors of this kind and shape that do
        // not overlap, and each rank touches the elements of its own slice only.
        unsafe { element::reduce(tensor.kind(), &self.tensors, slice, op) }
    }

    /// The same with libtorch's kernels, for GPUs. All ranks launch into one stream, so everything that
    /// was launched before a barrier is done before anything that is launched after it.
    fn reduce_by_kernels(&self, tensor: &Tensor, op: ReduceOp) -> Result<()> {
        let (kind, device) = (tensor.kind(), tensor.device());
        let slice = self.my_slice(tensor.numel());
        if slice.is_empty() {
            return Ok(());
        }
        let wide = if matches!(kind, Kind::Half | Kind::BFloat16) { Kind::Float } else { kind };
        let offset = num_bytes(kind, slice.start);
        let len = slice.len() as i64;
        // SAFETY: as in `reduce_on_cpu`; the views are dropped before the way out.
        let view = |&data: &*mut u8| unsafe {
            Tensor::f_from_blob(data.add(offset), &[len], &[1], kind, device)
        };
        let reduce = || -> Result<(), tch::TchError> {
            let views = self.tensors.iter().map(view).collect::<Result<Vec<_>, _>>()?;
            let term = |view: &Tensor| -> Result<Tensor, tch::TchError> {
                let term = view.f_to_kind(wide)?;
                match op {
                    ReduceOp::PremulSum(factor) => term.f_mul_scalar(factor),
                    ReduceOp::Sum | ReduceOp::Avg => Ok(term),
                }
            };
            let mut sum = Tensor::f_zeros([len], (wide, device))?;
            sum.f_copy_(&term(&views[0])?)?;
            for view in &views[1..] {
                let _ = sum.f_add_(&term(view)?)?;
            }
            if op == ReduceOp::Avg {
                let _ = sum.f_div_scalar_(self.tensors.len() as f64)?;
            }
            for mut view in views {
                view.f_copy_(&sum)?;
            }
            Ok(())
        };
        tch::no_grad(reduce).map_err(Error::torch("all_reduce"))
    }
}

impl Backend for Threaded {
    fn name(&self) -> &'static str {
        "threaded"
    }

    fn all_reduce(&mut self, call: &Call, tensor: &Tensor, op: ReduceOp) -> Result<()> {
        self.meet(call, Some((tensor, Some(op), 0)))?;
        let _way_out = self.way_out();
        match tensor.device() {
            Device::Cpu => {
                self.reduce_on_cpu(tensor, op);
                Ok(())
            }
            _ => self.reduce_by_kernels(tensor, op),
        }
    }

    fn broadcast(&mut self, call: &Call, tensor: &Tensor, src: usize) -> Result<()> {
        self.meet(call, Some((tensor, None, src)))?;
        let _way_out = self.way_out();
        let (from, to) = (self.tensors[src], self.tensors[self.rank]);
        match tensor.device() {
            _ if src == self.rank => Ok(()),
            Device::Cpu => {
                let bytes = num_bytes(tensor.kind(), tensor.numel());
                // SAFETY: between `meet` and the way out both are live tensors of `bytes` bytes that do not
                // overlap; only this rank writes to `to`, and nobody writes to `from`.
                unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
                Ok(())
            }
            device => {
                let numel = tensor.numel() as i64;
                // SAFETY: as above; the views are dropped before the way out.
                let view = |data: *mut u8| unsafe {
                    Tensor::f_from_blob(data, &[numel], &[1], tensor.kind(), device)
                };
                tch::no_grad(|| view(to)?.f_copy_(&view(from)?)).map_err(Error::torch("broadcast"))
            }
        }
    }

    fn barrier(&mut self, call: &Call) -> Result<()> {
        self.meet(call, None)
    }

    fn synchronize(&mut self) -> Result<()> {
        // CPU work is done when it returns, and no CUDA work of this backend waits for another rank.
        self.shared.run.check(self.rank)
    }

    fn shut_down(&mut self) {}
}

/// Meets all ranks again when it is dropped.
struct WayOut<'a> {
    barrier: &'a Barrier,
    rank: usize,
}

impl Drop for WayOut<'_> {
    fn drop(&mut self) {
        self.barrier.wait_to_leave(self.rank);
    }
}

impl Announced {
    fn agrees_with(&self, other: &Announced) -> bool {
        self.operation == other.operation
            && self.reduce_op == other.reduce_op
            && self.src == other.src
            && self.kind == other.kind
            && self.device == other.device
            && self.stream == other.stream
            && self.shape == other.shape
    }

    /// How many bytes lie at `data`; none for a barrier.
    fn num_bytes(&self) -> usize {
        if self.data.is_null() {
            return 0;
        }
        num_bytes(self.kind, self.shape.iter().map(|&n| n as usize).product())
    }

    fn describe(&self) -> String {
        let Announced { operation, kind, device, shape, .. } = self;
        let call = match (operation, self.reduce_op) {
            (Operation::Barrier, _) => return operation.to_string(),
            (_, Some(op)) => format!("{operation}({op})"),
            (_, None) => format!("{operation}(src {})", self.src),
        };
        let place = match device {
            Device::Cpu => String::new(),
            device => format!(" on {}, stream {:#x}", device_name(*device), self.stream),
        };
        format!("{call} of {} {shape:?}{place}", kind_name(*kind))
    }
}

/// "rank 0 called all_reduce(sum) of float32 [4]; ranks 1, 2 called barrier", and the first rank of the
/// smallest of these groups, of equal ones the last: that is where the mistake is likely to be.
fn describe<'a>(calls: impl Iterator<Item = &'a Announced>) -> (String, usize) {
    let mut groups: Vec<(String, Vec<usize>)> = Vec::new();
    for (rank, call) in calls.enumerate() {
        let text = call.describe();
        match groups.iter_mut().find(|(known, _)| *known == text) {
            Some((_, ranks)) => ranks.push(rank),
            None => groups.push((text, vec![rank])),
        }
    }
    let named = groups.iter().map(|(text, ranks)| {
        let numbers: Vec<String> = ranks.iter().map(ToString::to_string).collect();
        format!(
            "rank{} {} called {text}",
            if ranks.len() > 1 { "s" } else { "" },
            numbers.join(", ")
        )
    });
    let odd = groups.iter().rev().min_by_key(|(_, ranks)| ranks.len());
    (named.collect::<Vec<_>>().join("; "), odd.map_or(0, |(_, ranks)| ranks[0]))
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    /// The kernels that GPUs use give the same bits on CPU tensors as the loops that CPUs use: sums in
    /// the same order, in the same precision.
    #[test]
    fn both_ways_to_reduce_agree() {
        let kinds =
            [Kind::Double, Kind::Float, Kind::Half, Kind::BFloat16, Kind::Int64, Kind::Uint8];
        let ops = [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::PremulSum(1. / 3.)];
        let run = Arc::new(Run::new(3, Duration::from_secs(60), None));
        let shared = Arc::new(Shared::new(run));
        thread::scope(|scope| {
            for rank in 0..3 {
                let shared = shared.clone();
                scope.spawn(move || {
                    let mut sequence = 0;
                    let mut group = Threaded::join(rank, shared).unwrap();
                    let mut reduce = |tensor: &Tensor, op, by_kernels| {
                        let call = Call { operation: Operation::AllReduce, sequence };
                        sequence += 1;
                        group.meet(&call, Some((tensor, Some(op), 0))).unwrap();
                        let _way_out = group.way_out();
                        if by_kernels {
                            group.reduce_by_kernels(tensor, op).unwrap();
                        } else {
                            group.reduce_on_cpu(tensor, op);
                        }
                    };
                    for kind in kinds {
                        for op in ops.into_iter().filter(|op| op.check_kind(kind).is_ok()) {
                            for len in [0, 1, 63, 64, 65, 1000, 5000] {
                                let index = Tensor::arange(len, (Kind::Double, Device::Cpu));
                                let mine = (index * (0.37 + rank as f64)).to_kind(kind);
                                let (by_loops, by_kernels) = (mine.copy(), mine.copy());
                                reduce(&by_loops, op, false);
                                reduce(&by_kernels, op, true);
                                assert!(by_loops.equal(&by_kernels), "{kind:?} {op} {len}");
                            }
                        }
                    }
                });
            }
        });
    }
}
