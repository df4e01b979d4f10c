//! The `gloo` backend: CPU ranks of several processes, on one machine or more.
//!
//! If all processes share the memory of one host, their ranks work as those of `threaded` (`local::host`). Otherwise hosts
//! exchange tensors over TCP, with libtorch's Gloo. The ranks of a host share its memory, and one copy crosses the network
//! for all of them:
//!
//! 1. announce: the ranks of the host compare their calls;
//! 2. pack: each rank reduces its slice of their tensors, or copies its own, into the send buffer;
//! 3. exchange: the first rank of each host sends and receives ([`Network`]), while the others wait;
//! 4. unpack: each rank takes its results.
//!
//! Below, "process" means a host, or a process that shares no memory.
//!
//! A large all_reduce of three processes or more goes out in slices: each process reduces one slice of all, and then all exchange the results.
//! Parts of several processes are added in process order, so the same run gives the same bits each time. With one rank
//! per process these are the bits of `threaded`. With more, each process first reduces the tensors of its own ranks.
//! Sums and products of float16 and bfloat16 then travel in float32, and are narrowed once, at the end.

mod packer;

use std::sync::Arc;

use tch::{Device, Tensor};

use super::backend::{BackendType, Devices, Join, RankBackend, Reach};
use super::call::Call;
use super::local::{CallSlot, Extras, Memory, Shared, my_slice};
use super::network::{Network, Room, SplitSizes};
use super::threaded::ThreadedBackend;
use super::{Traffic, num_bytes};
use crate::error::{Error, Result};
use crate::operation::{OpId, Operation};
use packer::{Packer, size_between, sources};

pub(super) const BACKEND: BackendType = BackendType {
    name: "gloo",
    devices: Devices::Cpu,
    reach: Reach::BetweenProcesses,
    is_stream_ordered: false,
    check_library: || Ok(()),
    check_shared_gpu: |_| Ok(()),
    reduces_in_place: false,
    check_reduction: |_, _, _| Ok(()),
    prepare,
};

fn prepare(shared: &Arc<Shared>, network: Option<&Arc<Network>>) -> Result<Join> {
    let alone = || Error::unsupported("backend gloo is for ranks of several processes".into());
    let (shared, network) = (shared.clone(), network.cloned().ok_or_else(alone)?);
    Ok(Arc::new(move |rank, device| {
        if device != Device::Cpu {
            return Err(Error::unsupported(
                "backend gloo is for ranks on the CPU; use nccl for GPUs of several processes"
                    .into(),
            ));
        }
        let slot = match network.on_host() {
            Some(group) => CallSlot::of_host(group, rank),
            None => shared.slot(rank),
        };
        match network.map.len() {
            1 => Ok(Box::new(ThreadedBackend::join(slot, None)?)),
            _ => Ok(Box::new(GlooBackend::join(slot, network.clone())?)),
        }
    }))
}

/// An all_reduce of up to this many bytes for all processes together is sent whole: one exchange instead of two. A larger
/// one goes out in slices, unless there are two processes, which send as many bytes in either way.
const DIRECT_MAX_BYTES: usize = 64 << 10;

/// One rank's side of the backend.
struct GlooBackend {
    slot: CallSlot,
    memory: Memory,
    packer: Packer,
    /// Bytes that the last call sent and received.
    traffic: Traffic,
}

impl GlooBackend {
    /// Joins the group with this `slot`. Returns once all ranks of this process have joined.
    fn join(slot: CallSlot, network: Arc<Network>) -> Result<Self> {
        let at = OpId { operation: Operation::Init, sequence: 0 };
        slot.barrier().wait(slot.rank(), at)?;
        let packer = Packer::new(network);
        Ok(Self { slot, memory: Memory::default(), packer, traffic: Traffic::default() })
    }

    /// Returns whether this rank uses the network for all ranks of its process.
    fn is_first(&self) -> bool {
        self.slot.rank() == 0
    }

    /// Runs this rank's part of `work`, which waits for no other rank. Returns when all ranks have finished theirs.
    fn on_local_ranks(
        &mut self,
        call: &Call,
        work: impl FnOnce(&mut Packer, &CallSlot),
    ) -> Result<()> {
        let Self { slot, packer, .. } = self;
        slot.and_leave_together(call, || {
            work(packer, slot);
            Ok(())
        })
    }

    /// Adds up this process's slice of a tensor of `numel` elements, of which `sources` has the parts. Exchanges the sums
    /// with the other processes. Returns the address of the sum of each slice.
    fn exchange_sums(
        &mut self,
        call: &Call,
        network: &Network,
        parts: &SplitSizes,
        sources: &[*mut u8],
        numel: usize,
    ) -> Result<Vec<*mut u8>> {
        let (process_map, buffers) = (&network.map, self.packer.buffers);
        let mine = process_map.mine;
        let slice = my_slice(numel, mine, process_map.len());
        let part = my_slice(slice.len(), self.slot.rank(), process_map.here().len());
        let offset = num_bytes(process_map.partial_kind(call), part.start);
        let (_, begin) = SplitSizes::offsets(&parts.to, mine);
        let sums = SplitSizes::results(call, numel, process_map);
        let (offsets, _) = SplitSizes::offsets(&sums.to, mine);
        let base = buffers.send.wrapping_add(begin + num_bytes(call.kind, part.start));
        self.on_local_ranks(call, |packer, _| {
            let to = offsets.iter().map(|offset| base.wrapping_add(*offset));
            // SAFETY: each rank of the process reads and writes its part of the slice.
            unsafe { packer.add_up(call, sources, offset, part.len(), to) };
        })?;
        self.slot.on_leader(call.at(), || network.send_parts(call, &sums, begin))?;
        self.traffic += sums.traffic(process_map);
        Ok(self::sources(buffers, mine, &sums, begin))
    }
}

impl RankBackend for GlooBackend {
    fn run(&mut self, call: &Call) -> Result<()> {
        let network = self.packer.network.clone();
        let process_map = &network.map;
        let numel = call.inputs.first().or(call.outputs.first()).map_or(0, Tensor::numel);
        let sliced = call.operation == Operation::AllReduce
            && process_map.len() > 2
            && num_bytes(call.kind, numel) * process_map.len() > DIRECT_MAX_BYTES;
        let mut parts = SplitSizes::of(call, numel, process_map, sliced);
        let end = |sizes: &[usize]| SplitSizes::offsets(sizes, process_map.mine).1;
        let room = |parts: &SplitSizes| {
            let (sent, received) = (end(&parts.to), end(&parts.from));
            // The results go out from behind the slices, because other ranks may still read the slices.
            Room { send: sent + received, receive: sent.max(received) }
        };
        if self.is_first() && !call.operation.has_own_sizes() {
            self.slot.check()?;
            network.reserve(room(&parts))?;
        }
        let extras = Extras { device: true, contents: 0 };
        let first = process_map.here().start;
        self.slot.exchange_calls(first, call, extras, Some(&mut self.memory))?;
        if call.operation.has_own_sizes() {
            let size = size_between(&self.slot, process_map, call);
            parts = SplitSizes::of_transfers(call, process_map, size);
            self.slot.on_leader(call.at(), || network.reserve(room(&parts)))?;
        }
        self.packer.buffers = self.slot.report_failure(network.buffers(room(&parts)))?;
        self.on_local_ranks(call, |packer, slot| {
            // SAFETY: the ranks have exchanged this call and leave together; there is room.
            unsafe { packer.pack(slot, process_map, call, &parts, sliced) }
        })?;
        let describe = || self.slot.call_text();
        self.slot.on_leader(call.at(), || network.exchange(call, &parts, 0, describe))?;
        self.slot.report_failure(network.take_over())?;
        self.traffic = parts.traffic(process_map);
        let (buffers, mine) = (self.packer.buffers, process_map.mine);
        let mut sources = sources(buffers, mine, &parts, 0);
        if call.operation == Operation::AllReduce && !sliced {
            sources[mine] = buffers.send; // the part to another process, which is the same
        }
        if sliced {
            sources = self.exchange_sums(call, &network, &parts, &sources, numel)?;
        }
        self.on_local_ranks(call, |packer, slot| {
            // SAFETY: all parts have arrived, and no rank writes there until all have left.
            unsafe { packer.unpack(slot, process_map, call, &sources, sliced) }
        })?;
        if !self.is_first() {
            self.traffic = Traffic::default(); // counted on the first rank only
        }
        Ok(())
    }

    /// Returns the bytes that crossed between the processes.
    fn traffic(&self, _: &Call) -> Traffic {
        self.traffic
    }

    fn synchronize(&mut self, _: &dyn Fn()) -> Result<()> {
        self.slot.check()
    }
}
