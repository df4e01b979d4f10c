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
//! A large all_reduce goes out in slices: each process reduces one slice of all, and then all exchange the results.
//! Parts of several processes are added in process order, so the same run gives the same bits each time. With one rank
//! per process these are the bits of `threaded`. With more, each process first reduces the tensors of its own ranks.
//! Sums and products of float16 and bfloat16 then travel in float32, and are narrowed once, at the end.

mod packer;

use std::sync::Arc;

use tch::{Device, Kind, Tensor};

use super::backend::{BackendType, Devices, Join, RankBackend, Reach};
use super::call::Call;
use super::local::{CallSlot, Extras, Memory, Shared, my_slice};
use super::network::{InFlight, Network, ProcessMap, Room, SplitSizes};
use super::threaded::ThreadedBackend;
use super::{ReduceOp, Traffic, num_bytes};
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

/// An all_reduce of up to this many bytes for all processes together is sent whole: one exchange instead of two.
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

    /// Runs the exchange of this process's ranks. It checks that their calls agree and their tensors do not overlap.
    fn exchange_local(&mut self, call: &Call) -> Result<()> {
        let first = self.packer.network.map.here().start;
        let extras = Extras { device: true, contents: 0 };
        self.slot.exchange_calls(first, call, extras, Some(&mut self.memory))
    }

    /// Finds the buffers that the first rank has reserved, between the barrier after that and one before the next time.
    fn locate_buffers(&mut self, room: Room) -> Result<()> {
        self.packer.buffers = self.slot.report_failure(self.packer.network.buffers(room))?;
        Ok(())
    }

    /// Runs `exchange` on the first rank. All ranks return once it is done, and know what it has received.
    fn exchange_remote(
        &self,
        call: &Call,
        exchange: impl FnOnce(&Network) -> Result<()>,
    ) -> Result<()> {
        let network = &self.packer.network;
        self.slot.on_leader(call.at(), || exchange(network))?;
        self.slot.report_failure(network.take_over())
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

    /// Returns whether Gloo's own all_reduce can do the sum: with two processes it is the fastest, and adds in rank
    /// order.
    fn supports_direct(&self, call: &Call) -> bool {
        let sums = matches!(call.op(), ReduceOp::Sum | ReduceOp::PremulSum(_));
        let kind = matches!(call.kind, Kind::Float | Kind::Double);
        sums && kind && self.packer.network.map.len() == 2
    }

    /// Returns whether the call is an all_reduce above [`DIRECT_MAX_BYTES`], which goes out in slices.
    fn is_sliced(&self, call: &Call, numel: usize) -> bool {
        let processes = self.packer.network.map.len();
        call.operation == Operation::AllReduce
            && num_bytes(call.kind, numel) * processes > DIRECT_MAX_BYTES
    }

    /// Runs a large all_reduce between two processes with Gloo's own all_reduce.
    fn all_reduce_direct(&mut self, call: &Call, numel: usize) -> Result<()> {
        let network = self.packer.network.clone();
        let process_map = &network.map;
        if process_map.here().len() == 1 {
            let in_flight = self.add_up_in_place(call)?;
            return self.slot.report_failure(network.finish(&in_flight.started));
        }
        let size = num_bytes(call.kind, numel);
        let room = Room { send: size, receive: 0 };
        if self.is_first() {
            self.slot.check()?;
            network.reserve(room)?;
        }
        self.exchange_local(call)?;
        self.locate_buffers(room)?;
        // A single part, addressed to no process in particular.
        let alone = ProcessMap { processes: vec![process_map.here()], mine: 0 };
        let whole = SplitSizes { to: vec![size], from: vec![size], largest: None };
        self.on_local_ranks(call, |packer, slot| {
            // SAFETY: the ranks have exchanged this call and leave together; there is room.
            unsafe { packer.pack(slot, &alone, call, &whole, true) }
        })?;
        self.exchange_remote(call, |network| {
            let staged = network.staging_tensor(call.kind, size)?;
            network.finish(&network.add_up(call, &staged, || self.slot.call_text())?)
        })?;
        let sum = self.packer.buffers.send;
        self.on_local_ranks(call, |packer, slot| {
            // SAFETY: the sum has arrived, and no rank writes there until all have left.
            unsafe { packer.unpack(slot, &alone, call, &[sum], true) }
        })?;
        let traffic = if self.is_first() { size as u64 } else { 0 };
        self.traffic = Traffic { sent: traffic, received: traffic };
        Ok(())
    }

    /// Starts a large all_reduce between two processes of one rank each. Gloo reduces the rank's tensor in place, and
    /// the caller need not wait for the result.
    fn add_up_in_place(&mut self, call: &Call) -> Result<InFlight> {
        self.slot.check()?;
        self.exchange_local(call)?;
        let tensor = &call.outputs[0];
        if let ReduceOp::PremulSum(_) = call.op() {
            // SAFETY: an all_reduce has one tensor for input and output, which only this rank touches.
            self.on_local_ranks(call, |packer, _| unsafe { packer.multiply(call, tensor) })?;
        }
        let network = &self.packer.network;
        let started =
            self.slot.report_failure(network.add_up(call, tensor, || self.slot.call_text()))?;
        let in_flight = InFlight { network: network.clone(), started };
        let size = num_bytes(call.kind, tensor.numel()) as u64;
        self.traffic = Traffic { sent: size, received: size };
        Ok(in_flight)
    }
}

impl RankBackend for GlooBackend {
    fn run(&mut self, call: &Call) -> Result<()> {
        let network = self.packer.network.clone();
        let process_map = &network.map;
        let numel = call.inputs.first().or(call.outputs.first()).map_or(0, Tensor::numel);
        let sliced = self.is_sliced(call, numel);
        if sliced && self.supports_direct(call) {
            return self.all_reduce_direct(call, numel);
        }
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
        self.exchange_local(call)?;
        if call.operation.has_own_sizes() {
            let size = size_between(&self.slot, process_map, call);
            parts = SplitSizes::of_transfers(call, process_map, size);
            self.slot.on_leader(call.at(), || network.reserve(room(&parts)))?;
        }
        self.locate_buffers(room(&parts))?;
        self.on_local_ranks(call, |packer, slot| {
            // SAFETY: the ranks have exchanged this call and leave together; there is room.
            unsafe { packer.pack(slot, process_map, call, &parts, sliced) }
        })?;
        self.exchange_remote(call, |network| {
            network.exchange(call, &parts, 0, || self.slot.call_text())
        })?;
        self.traffic = parts.traffic(process_map);
        let (buffers, mine) = (self.packer.buffers, process_map.mine);
        let mut sources = sources(buffers, mine, &parts, 0);
        if sliced {
            let slice = my_slice(numel, mine, process_map.len());
            let part = my_slice(slice.len(), self.slot.rank(), process_map.here().len());
            let offset = num_bytes(process_map.partial_kind(call), part.start);
            let (begin, sums) = (end(&parts.to), SplitSizes::results(call, numel, process_map));
            let (offsets, _) = SplitSizes::offsets(&sums.to, mine);
            let result = begin + num_bytes(call.kind, part.start);
            let base = buffers.send.wrapping_add(result);
            self.on_local_ranks(call, |packer, _| {
                let to = offsets.iter().map(|offset| base.wrapping_add(*offset));
                // SAFETY: each rank of the process reads and writes its part of the slice.
                unsafe { packer.add_up(call, &sources, offset, part.len(), to) };
            })?;
            self.slot.on_leader(call.at(), || network.send_parts(call, &sums, begin))?;
            self.traffic += sums.traffic(process_map);
            sources = self::sources(buffers, mine, &sums, begin);
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

    fn start(&mut self, call: &Call) -> Result<Option<InFlight>> {
        let alone = self.packer.network.map.here().len() == 1;
        let numel = call.inputs.first().map_or(0, Tensor::numel);
        if alone && self.is_sliced(call, numel) && self.supports_direct(call) {
            return Ok(Some(self.add_up_in_place(call)?));
        }
        self.run(call).map(|()| None)
    }

    /// Returns the bytes that crossed between the processes.
    fn traffic(&self, _: &Call) -> Traffic {
        self.traffic
    }

    fn synchronize(&mut self, _: &dyn Fn()) -> Result<()> {
        self.slot.check()
    }
}
