//! The `gloo` backend: CPU ranks of several processes, on one machine or more.
//!
//! The ranks of one process share its memory, as with `threaded`. One copy crosses the network for all of them:
//!
//! 1. announce: the ranks of the process compare their calls;
//! 2. pack: each rank reduces its slice of their tensors, or copies its own, into the send buffer;
//! 3. exchange: the first rank of each process sends and receives ([`Network`]), while the others wait;
//! 4. unpack: each rank takes its results.
//!
//! A large all_reduce goes out in slices: each process reduces one slice of all, and then all exchange the results.
//! Parts of several processes are added in process order, so the same run gives the same bits each time. With one rank
//! per process these are the bits of `threaded`. With more, each process first reduces the tensors of its own ranks.
//! Sums and products of float16 and bfloat16 then travel in float32, and are narrowed once, at the end.

mod header;
mod in_flight;
mod lost;
mod messages;
mod network;
mod split_sizes;
mod staging;
mod work;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use tch::{Kind, Tensor};

use super::threaded::{self, CollectiveFingerprint, ExchangeSlot, Memory, Shared, my_slice};
use super::{Backend, Call, P2POp, ReduceOp, Traffic, mismatch, num_bytes, weights};
use crate::error::{Error, Result};
use crate::operation::{OpId, Operation};
use crate::runtime::RunContext;
pub(crate) use in_flight::InFlight;
pub(crate) use lost::connection_lost;
pub(crate) use messages::Letter;
pub(crate) use network::Network;
pub(crate) use split_sizes::ProcessMap;
use split_sizes::SplitSizes;
use work::{Work, sources};

/// An all_reduce of up to this many bytes for all processes together is sent whole: one exchange instead of two.
const DIRECT_MAX_BYTES: usize = 64 << 10;

/// One rank's side of the backend.
pub(super) struct Hierarchical {
    seat: ExchangeSlot<CollectiveFingerprint>,
    memory: Memory,
    run: Arc<RunContext>,
    work: Work,
    /// Bytes that the last call sent and received.
    traffic: Traffic,
}

impl Hierarchical {
    /// Joins the group as group rank `rank`. Returns once all ranks of this process have joined.
    pub(super) fn join(shared: &Shared, network: Arc<Network>, rank: usize) -> Result<Self> {
        let seat = shared.seat(rank);
        let at = OpId { operation: Operation::Init, sequence: 0 };
        seat.barrier().wait(seat.rank(), at)?;
        let work = Work::new(network);
        let (run, memory, traffic) = (shared.run().clone(), Memory::default(), Traffic::default());
        Ok(Self { seat, memory, run, work, traffic })
    }

    /// Returns whether this rank uses the network for all ranks of its process.
    fn is_first(&self) -> bool {
        self.seat.rank() == 0
    }

    /// Returns this rank's number in the run.
    fn global_rank(&self) -> usize {
        self.seat.barrier().members()[self.seat.rank()]
    }

    /// Runs the exchange of this process's ranks. It checks that their calls agree and their tensors do not overlap.
    fn exchange_local(&mut self, call: &Call) -> Result<()> {
        let first = self.work.network.layout().here().start;
        threaded::exchange(&mut self.seat, first, call, true, Some(&mut self.memory))
    }

    /// Sets the mean weight of this process's ranks, which goes to other processes. Call it after the local exchange.
    fn set_weight(&self, call: &Call) {
        if call.weight.is_some() && self.is_first() {
            self.work.network.set_weight(work::mean_here(&self.seat));
        }
    }

    /// Returns the calls of this process's ranks as text that other processes can read.
    fn describe(&self) -> String {
        mismatch::to_text(self.seat.published())
    }

    /// Runs `work` on the process's first rank. All ranks of the process return once it is done.
    fn on_leader(&self, call: &Call, work: impl FnOnce(&Network) -> Result<()>) -> Result<()> {
        if self.is_first() {
            self.report_failure(work(&self.work.network))?;
        }
        // No timeout: the first rank's work has one.
        self.seat.barrier().wait_at_most(self.seat.rank(), call.at(), Duration::MAX)
    }

    /// Reports an error to the other ranks of this process, which wait for this rank without a timeout.
    fn report_failure<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result {
            self.run.check(self.global_rank())?; // not if another failure caused it
            self.run.report(self.global_rank(), Some(error), error.to_string());
        }
        result
    }

    /// Runs this rank's part of `work`, which waits for no other rank. Returns when all ranks have finished theirs.
    fn on_local_ranks(
        &mut self,
        work: impl FnOnce(&mut Work, &ExchangeSlot<CollectiveFingerprint>),
    ) {
        let Self { seat, work: mine, .. } = self;
        seat.and_leave_together(|| work(mine, seat));
    }

    /// Returns whether Gloo's own all_reduce can do the sum: with two processes it is the fastest, and adds in rank
    /// order.
    fn supports_direct(&self, call: &Call) -> bool {
        let sums = matches!(call.op(), ReduceOp::Sum | ReduceOp::PremulSum(_));
        let kind = matches!(call.kind, Kind::Float | Kind::Double);
        sums && kind && self.work.network.layout().len() == 2
    }

    /// Returns whether the call is an all_reduce above [`DIRECT_MAX_BYTES`], which goes out in slices.
    fn is_sliced(&self, call: &Call, numel: usize) -> bool {
        let processes = self.work.network.layout().len();
        call.operation == Operation::AllReduce
            && num_bytes(call.kind, numel) * processes > DIRECT_MAX_BYTES
    }

    /// Runs a large all_reduce between two processes with Gloo's own all_reduce.
    fn all_reduce_direct(&mut self, call: &Call, numel: usize) -> Result<()> {
        let network = self.work.network.clone();
        let layout = network.layout();
        if layout.here().len() == 1 {
            let in_flight = self.add_up_in_place(call)?;
            return self.report_failure(in_flight.wait());
        }
        let size = num_bytes(call.kind, numel);
        if self.is_first() {
            self.run.check(self.global_rank())?;
            network.reserve(size, 0)?;
        }
        self.exchange_local(call)?;
        self.set_weight(call);
        // A single part, addressed to no process in particular.
        let alone = ProcessMap { processes: vec![layout.here()], mine: 0 };
        let whole = SplitSizes { to: vec![size], from: vec![size], largest: None };
        self.on_local_ranks(|work, seat| {
            // SAFETY: the ranks have exchanged this call and leave together; there is room.
            unsafe { work.pack(seat, &alone, call, &whole, true) }
        });
        self.on_leader(call, |network| {
            let room = network.staging_tensor(call.kind, size)?;
            network.finish(&network.add_up(call, &room, || self.describe())?)
        })?;
        let sum = self.work.network.places().0;
        self.on_local_ranks(|work, seat| {
            // SAFETY: the sum has arrived, and no rank writes there until all have left.
            unsafe { work.unpack(seat, &alone, call, &[sum], true) }
        });
        let traffic = if self.is_first() { size as u64 } else { 0 };
        self.traffic = Traffic { sent: traffic, received: traffic };
        Ok(())
    }

    /// Starts a large all_reduce between two processes of one rank each. Gloo reduces the rank's tensor in place, and
    /// the caller need not wait for the result.
    fn add_up_in_place(&mut self, call: &Call) -> Result<InFlight> {
        self.run.check(self.global_rank())?;
        self.exchange_local(call)?;
        let tensor = &call.outputs[0];
        self.set_weight(call);
        if let ReduceOp::PremulSum(_) = call.op() {
            // SAFETY: an all_reduce has one tensor for input and output, which only this rank touches.
            self.on_local_ranks(|work, _| unsafe { work.multiply(call, tensor) });
        }
        let network = &self.work.network;
        let started = self.report_failure(network.add_up(call, tensor, || self.describe()))?;
        let in_flight = InFlight::new(network.clone(), started);
        let size = num_bytes(call.kind, tensor.numel()) as u64;
        self.traffic = Traffic { sent: size, received: size };
        Ok(in_flight)
    }

    /// Returns the sizes of an all_to_all, in which every rank may choose how much it sends and expects.
    fn parts_of_all_to_all(&self, call: &Call) -> SplitSizes {
        let layout = self.work.network.layout();
        let size = |places: &[threaded::Place], range: &Range<usize>| -> usize {
            places[range.clone()].iter().map(|place| num_bytes(call.kind, place.numel)).sum()
        };
        let of = |tensors: &dyn Fn(&CollectiveFingerprint) -> usize| {
            self.seat.published().map(tensors).sum()
        };
        let each = |inputs: bool| {
            let part = |range: &Range<usize>| {
                of(&|it: &CollectiveFingerprint| {
                    size(if inputs { &it.inputs } else { &it.outputs }, range)
                })
            };
            layout.processes.iter().map(part).collect()
        };
        SplitSizes { to: each(true), from: each(false), largest: None }
    }
}

impl Backend for Hierarchical {
    fn name(&self) -> &'static str {
        "gloo"
    }

    fn is_stream_ordered(&self) -> bool {
        false
    }

    fn run(&mut self, call: &Call) -> Result<()> {
        let network = self.work.network.clone();
        let layout = network.layout();
        let numel = call.inputs.first().or(call.outputs.first()).map_or(0, Tensor::numel);
        let sliced = self.is_sliced(call, numel);
        if sliced && self.supports_direct(call) {
            return self.all_reduce_direct(call, numel);
        }
        let mut parts = SplitSizes::of(call, numel, layout, sliced);
        let end = |sizes: &[usize]| SplitSizes::places(sizes, layout.mine).1;
        let room = |network: &Network, parts: &SplitSizes| {
            let (sent, received) = (end(&parts.to), end(&parts.from));
            // The results go out from behind the slices, because other ranks may still read the slices.
            network.reserve(sent + received, sent.max(received))
        };
        if self.is_first() && call.operation != Operation::AllToAll {
            self.run.check(self.global_rank())?;
            room(&self.work.network, &parts)?;
        }
        self.exchange_local(call)?;
        self.set_weight(call);
        if call.operation == Operation::AllToAll {
            parts = self.parts_of_all_to_all(call);
            self.on_leader(call, |network| room(network, &parts))?;
        }
        self.on_local_ranks(|work, seat| {
            // SAFETY: the ranks have exchanged this call and leave together; there is room.
            unsafe { work.pack(seat, layout, call, &parts, sliced) }
        });
        self.on_leader(call, |network| network.exchange(call, &parts, 0, || self.describe()))?;
        self.traffic = parts.traffic(layout);
        let mut sources = sources(&self.work.network, &parts, 0);
        if sliced {
            let slice = my_slice(numel, layout.mine, layout.len());
            let mine = my_slice(slice.len(), self.seat.rank(), layout.here().len());
            let offset = num_bytes(layout.partial_kind(call), mine.start);
            let (begin, sums) = (end(&parts.to), SplitSizes::results(call, numel, layout));
            let (places, _) = SplitSizes::places(&sums.to, layout.mine);
            let result = begin + num_bytes(call.kind, mine.start);
            let base = self.work.network.places().0.wrapping_add(result);
            self.on_local_ranks(|work, _| {
                let to = places.iter().map(|place| base.wrapping_add(*place));
                // SAFETY: each rank of the process reads and writes its part of the slice.
                unsafe { work.add_up(call, &sources, offset, mine.len(), to) };
            });
            self.on_leader(call, |network| network.send_parts(call, &sums, begin))?;
            self.traffic += sums.traffic(layout);
            sources = self::sources(&self.work.network, &sums, begin);
        }
        self.on_local_ranks(|work, seat| {
            // SAFETY: all parts have arrived, and no rank writes there until all have left.
            unsafe { work.unpack(seat, layout, call, &sources, sliced) }
        });
        if !self.is_first() {
            self.traffic = Traffic::default(); // counted on the first rank only
        }
        Ok(())
    }

    fn start(&mut self, call: &Call) -> Result<Option<InFlight>> {
        let alone = self.work.network.layout().here().len() == 1;
        let numel = call.inputs.first().map_or(0, Tensor::numel);
        if alone && self.is_sliced(call, numel) && self.supports_direct(call) {
            return self.add_up_in_place(call).map(Some);
        }
        self.run(call).map(|()| None)
    }

    fn point_to_point(&mut self, _: &[P2POp]) -> Result<()> {
        Err(Error::Unsupported("backend gloo launches no messages".into()))
    }

    /// Returns the bytes that crossed between the processes.
    fn traffic(&self, _: &Call) -> Traffic {
        self.traffic
    }

    fn mean_weight(&self) -> f64 {
        weights::mean(self.work.network.weights())
    }

    fn synchronize(&mut self, _: &dyn Fn()) -> Result<()> {
        self.run.check(self.global_rank())
    }

    fn shut_down(&mut self) {}
}
