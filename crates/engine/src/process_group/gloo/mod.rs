//! The `gloo` backend: CPU ranks of several processes, on one machine or more.
//!
//! If all processes share the memory of one host, their ranks work as those of `threaded` (`local::host`). Otherwise hosts
//! exchange tensors over TCP, with libtorch's Gloo. The ranks of a host share its memory, and one copy crosses the network
//! for all of them:
//!
//! 1. announce: the ranks of the host compare their calls;
//! 2. pack: each rank copies its tensors into the send buffer;
//! 3. exchange: the first rank of each host sends and receives ([`Network`]), while the others wait;
//! 4. unpack: each rank takes its results.
//!
//! Below, "process" means a host, or a process that shares no memory.
//!
//! A small reduction sends the tensors of all ranks, and each receiver adds them in the order of the ranks, as threads do. In
//! a large one each process goes on from the partial result of the process before ([`Chain`]). Both ways give the bits of
//! threads, however many ranks a process has. A partial result of float16 or bfloat16 is float32, and the last process
//! narrows it.

mod packer;

use std::sync::Arc;

use tch::{Device, Tensor};

use super::Traffic;
use super::backend::{BackendType, Devices, Join, RankBackend, Reach};
use super::call::Call;
use super::local::{CallSlot, Extras, Memory, Shared};
use super::network::{Chain, ChainMessages, Network, SplitSizes};
use super::threaded::ThreadedBackend;
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

    /// Takes part in a reduction that goes from process to process. The ranks have exchanged the call.
    fn reduce_in_chain(&mut self, call: &Call, network: &Network, chain: &Chain) -> Result<()> {
        let mut messages = ChainMessages::default();
        let compare = || network.compare(call, || self.slot.call_text());
        self.slot.on_leader(call.at(), compare)?;
        self.slot.report_failure(network.take_over())?;
        for step in 0..chain.steps() {
            let mut advance = || network.advance(call, chain, step, &mut messages);
            if chain.added_in(step).is_empty() && chain.results_in(step).is_empty() {
                // Only messages move.
                if self.is_first() {
                    self.slot.report_failure(advance())?;
                }
                continue;
            }
            self.slot.on_leader(call.at(), advance)?;
            self.on_local_ranks(call, |packer, slot| {
                // SAFETY: the ranks have exchanged this call and leave together. What they need is here.
                unsafe { packer.step_in_chain(slot, &network.map, call, chain, step) }
            })?;
        }
        self.traffic = chain.traffic();
        Ok(())
    }

    /// Exchanges the tensors of all ranks, and unpacks this rank's results. The ranks have exchanged the call.
    fn move_whole(&mut self, call: &Call, network: &Network, parts: &SplitSizes) -> Result<()> {
        let process_map = &network.map;
        self.on_local_ranks(call, |packer, slot| {
            // SAFETY: the ranks have exchanged this call and leave together; there is room.
            unsafe { packer.pack(slot, process_map, call, parts) }
        })?;
        let describe = || self.slot.call_text();
        self.slot.on_leader(call.at(), || network.exchange(call, parts, describe))?;
        self.slot.report_failure(network.take_over())?;
        self.traffic = parts.traffic(process_map);
        let (buffers, mine) = (self.packer.buffers, process_map.mine);
        let mut sources = sources(buffers, mine, parts);
        if call.operation == Operation::AllReduce {
            sources[mine] = buffers.send; // the part to another process, which is the same
        }
        self.on_local_ranks(call, |packer, slot| {
            // SAFETY: all parts have arrived, and no rank writes there until all have left.
            unsafe { packer.unpack(slot, process_map, call, &sources) }
        })
    }
}

impl RankBackend for GlooBackend {
    fn run(&mut self, call: &Call) -> Result<()> {
        let network = self.packer.network.clone();
        let process_map = &network.map;
        let numel = call.inputs.first().or(call.outputs.first()).map_or(0, Tensor::numel);
        let chain = Chain::of(call, numel, process_map);
        let mut parts = SplitSizes::of(call, numel, process_map);
        let room = |parts: &SplitSizes| {
            chain.as_ref().map_or_else(|| parts.room(process_map), Chain::room)
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
        match &chain {
            Some(chain) => self.reduce_in_chain(call, &network, chain)?,
            None => self.move_whole(call, &network, &parts)?,
        }
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
