//! A large reduction between processes: a chain, in which each process goes on from the partial result of the one before.
//! So every sum has the order of the ranks, as among threads. The last process has the results, and sends them back.
//!
//! The elements travel in pieces. While a process adds its ranks to one piece, the next process adds its own to the piece
//! before. Each element crosses a link once in each direction.
//!
//! ```text
//!  process 0          process 1          process 2
//!  ranks 0, 1         rank 2             ranks 3, 4, 5
//!  r0 + r1  ------->  ... + r2  ------>  ... + r3 + r4 + r5
//!  result   <-------  result   <-------  result
//! ```

use std::collections::VecDeque;
use std::ops::Range;

use crossbeam::channel::Receiver;
use tch::Tensor;

use super::connection::Network;
use super::process_map::ProcessMap;
use super::split_sizes::padded;
use super::{Buffers, Room};
use crate::error::{Error, Result};
use crate::ffi::{GlooCall, TorchResult};
use crate::operation::Operation;
use crate::process_group::call::Call;
use crate::process_group::dtype::num_bytes;
use crate::process_group::local::{Kinds, Reduction, wide_kind};
use crate::process_group::reduce_op::ReduceOp;
use crate::process_group::traffic::Traffic;
use crate::runtime::Deadline;

/// The most bytes of all ranks' inputs for which a reduction travels whole: each process sends the tensors of its ranks to all
/// that need them, in one exchange.
const WHOLE_MAX_BYTES: usize = 64 << 10;

/// A piece has at least this many bytes, because each costs a few wake-ups.
const PIECE_MIN_BYTES: usize = 2 << 20;

/// There are at most this many pieces.
const MAX_PIECES: usize = 8;

/// The plan of one reduction, as one process sees it. All numbers are elements of the inputs in sequence, but for those that
/// are named bytes.
#[derive(Debug, Clone)]
pub(crate) struct Chain {
    numel: usize,
    piece_numel: usize,
    /// The results that this process gets: all before this number. They have come from the next process, or are its own.
    results: usize,
    /// The results that it sends to the process before: all before this number.
    sent_back: usize,
    /// The number of steps from a piece's addition here to the step in which its results are here.
    lag: usize,
    is_first: bool,
    is_last: bool,
    /// The number of ranks in all processes.
    ranks: usize,
    /// The sizes of an element in bytes: of a partial result, of a result, and of what this process makes, which is one of
    /// these.
    partial_bytes: usize,
    result_bytes: usize,
    made_bytes: usize,
}

impl Chain {
    /// Returns the plan of `call`, whose tensors have `numel` elements each. `None` if its tensors travel whole.
    pub(crate) fn of(call: &Call, numel: usize, process_map: &ProcessMap) -> Option<Self> {
        call.operation.collective().filter(|collective| collective.reduces)?;
        let (len, mine) = (process_map.len(), process_map.mine);
        let ranks = process_map.processes[len - 1].end;
        let is_scattered = call.operation == Operation::ReduceScatter;
        let all = if is_scattered { numel * ranks } else { numel };
        let is_small = num_bytes(call.kind, all) * ranks <= WHOLE_MAX_BYTES;
        let sends_least_whole = len == 2 || call.operation != Operation::AllReduce;
        if is_small || (ranks == len && sends_least_whole) {
            return None;
        }
        let root = process_map.process_of(call.root());
        let needed_up_to = |process: usize| match call.operation {
            Operation::ReduceScatter => numel * process_map.processes[process].end,
            Operation::Reduce if process < root => 0,
            _ => all,
        };
        let (partial_bytes, result_bytes) =
            (num_bytes(wide_kind(call.kind), 1), num_bytes(call.kind, 1));
        let piece_numel = (PIECE_MIN_BYTES / result_bytes).max(all.div_ceil(MAX_PIECES));
        let is_last = mine == len - 1;
        Some(Self {
            numel: all,
            piece_numel: piece_numel.next_multiple_of(64),
            results: if is_last { all } else { needed_up_to(mine) },
            sent_back: if mine == 0 { 0 } else { needed_up_to(mine - 1) },
            // The last process has a result after one step. Each one before has two more: a piece may be under way for as
            // long as another is added.
            lag: 1 + 2 * (len - 1 - mine),
            is_first: mine == 0,
            is_last,
            ranks,
            partial_bytes,
            result_bytes,
            made_bytes: if is_last { result_bytes } else { partial_bytes },
        })
    }

    fn pieces(&self) -> usize {
        self.numel.div_ceil(self.piece_numel)
    }

    /// Returns the number of steps.
    pub(crate) fn steps(&self) -> usize {
        self.pieces() + self.lag
    }

    /// Returns the elements to which this process adds its ranks in `step`.
    pub(crate) fn added_in(&self, step: usize) -> Range<usize> {
        self.piece(step, self.numel)
    }

    /// Returns the elements whose results are in this process in `step`.
    pub(crate) fn results_in(&self, step: usize) -> Range<usize> {
        step.checked_sub(self.lag).map_or(0..0, |piece| self.piece(piece, self.results))
    }

    /// Returns the elements of a piece that are before `end`.
    fn piece(&self, index: usize, end: usize) -> Range<usize> {
        let start = index * self.piece_numel;
        start.min(end)..(start + self.piece_numel).min(end)
    }

    /// Returns the room for what this process makes, and for what it receives.
    pub(crate) fn room(&self) -> Room {
        let received = if self.is_last { 0 } else { self.results * self.result_bytes };
        Room { send: self.numel * self.made_bytes, receive: self.results_begin() + received }
    }

    /// Returns where this process writes what it makes of the element `at`: its partial result, or the result if it is the
    /// last.
    pub(crate) fn made(&self, buffers: Buffers, at: usize) -> *mut u8 {
        buffers.send.wrapping_add(at * self.made_bytes)
    }

    /// Returns where the result of the element `at` is once it is here.
    pub(crate) fn result(&self, buffers: Buffers, at: usize) -> *mut u8 {
        if self.is_last {
            self.made(buffers, at)
        } else {
            buffers.receive.wrapping_add(self.results_begin() + at * self.result_bytes)
        }
    }

    /// Returns the reduction of this process's ranks, `own`, from the element `at` on, as a part of the whole. It goes on from
    /// the partial result of the process before. Only the last process writes results, and divides an average.
    pub(crate) fn continued<'a>(
        &self,
        own: Reduction<'a>,
        buffers: Buffers,
        at: usize,
    ) -> Reduction<'a> {
        let before = || buffers.receive.wrapping_add(at * self.partial_bytes);
        let partial = (!self.is_first).then(before);
        let last = Reduction { partial, addends: self.ranks, ..own };
        if self.is_last {
            return last;
        }
        let kinds = Kinds { to: wide_kind(own.kinds.from), ..own.kinds };
        let op = if own.op == ReduceOp::Avg { ReduceOp::Sum } else { own.op };
        Reduction { kinds, op, ..last }
    }

    /// Returns the byte of the receive buffer at which the results of the next process begin.
    fn results_begin(&self) -> usize {
        if self.is_first { 0 } else { padded(self.numel * self.partial_bytes) }
    }

    /// Returns the bytes that cross to and from other processes.
    pub(crate) fn traffic(&self) -> Traffic {
        let partials = (self.numel * self.partial_bytes) as u64;
        let results = |numel: usize| (numel * self.result_bytes) as u64;
        let (to_next, from_next) =
            if self.is_last { (0, 0) } else { (partials, results(self.results)) };
        let from_previous = if self.is_first { 0 } else { partials };
        Traffic { sent: to_next + results(self.sent_back), received: from_previous + from_next }
    }
}

/// The messages of a chain that have been started.
#[derive(Default)]
pub(crate) struct ChainMessages {
    /// The deadline of the whole call; `None` before the first step.
    deadline: Option<Deadline>,
    partials: VecDeque<Receiver<Result<()>>>,
    results: VecDeque<Receiver<Result<()>>>,
    sent: Vec<Receiver<Result<()>>>,
}

impl Network {
    /// Sends what the ranks of this process have made in the step before `step`. Returns once all has arrived that these
    /// ranks need in `step`, in the last step also once all is sent. Called by the process's first rank.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Cancelled`], [`Error::ConnectionLost`].
    ///
    /// [`Error::Timeout`]: crate::Error::Timeout
    /// [`Error::Cancelled`]: crate::Error::Cancelled
    /// [`Error::ConnectionLost`]: crate::Error::ConnectionLost
    pub(crate) fn advance(
        &self,
        call: &Call,
        chain: &Chain,
        step: usize,
        messages: &mut ChainMessages,
    ) -> Result<()> {
        let of_call = || Deadline::after(self.timeout(call));
        let deadline = *messages.deadline.get_or_insert_with(of_call);
        let moved = self.move_pieces(chain, step, messages, deadline);
        self.or_abort(call, deadline, moved)
    }

    fn move_pieces(
        &self,
        chain: &Chain,
        step: usize,
        messages: &mut ChainMessages,
        deadline: Deadline,
    ) -> Result<()> {
        use Operation::{Recv, Send};
        let (previous, next) = (self.map.mine.wrapping_sub(1), self.map.mine + 1);
        let [send, receive] = self.staging.parts();
        let partial = |piece: Range<usize>| {
            piece.start * chain.partial_bytes..piece.end * chain.partial_bytes
        };
        let result = |piece: Range<usize>, begin: usize| {
            begin + piece.start * chain.result_bytes..begin + piece.end * chain.result_bytes
        };
        let begin = chain.results_begin();
        if step == 0 {
            // All that will arrive has its place already.
            for index in 0..chain.pieces() {
                if !chain.is_first {
                    let bytes = partial(chain.piece(index, chain.numel));
                    messages.partials.push_back(self.start(Recv, previous, receive, bytes)?);
                }
                let bytes = result(chain.piece(index, chain.results), begin);
                if !chain.is_last && !bytes.is_empty() {
                    messages.results.push_back(self.start(Recv, next, receive, bytes)?);
                }
            }
        }
        let made = step.checked_sub(1).map_or(0..0, |made| chain.added_in(made));
        if !chain.is_last && !made.is_empty() {
            messages.sent.push(self.start(Send, next, send, partial(made))?);
        }
        if !chain.is_first && !chain.added_in(step).is_empty() {
            self.wait_for_next(&mut messages.partials, deadline)?;
        }
        let arrives = chain.results_in(step);
        if !chain.is_last && !arrives.is_empty() {
            self.wait_for_next(&mut messages.results, deadline)?;
        }
        let returns = arrives.start..arrives.end.min(chain.sent_back);
        if !returns.is_empty() {
            let (from, begin) = if chain.is_last { (send, 0) } else { (receive, begin) };
            messages.sent.push(self.start(Send, previous, from, result(returns, begin))?);
        }
        if step + 1 == chain.steps() {
            messages.sent.iter().try_for_each(|sent| self.wait(sent, deadline))?;
        }
        Ok(())
    }

    /// Starts to send or receive the `bytes` of a buffer.
    fn start(
        &self,
        operation: Operation,
        peer: usize,
        buffer: &Tensor,
        bytes: Range<usize>,
    ) -> Result<Receiver<Result<()>>> {
        let piece = buffer.f_narrow(0, bytes.start as i64, bytes.len() as i64).doing("narrow")?;
        let tensor = [&piece];
        let call = match operation {
            Operation::Send => GlooCall { peer, inputs: &tensor, ..GlooCall::default() },
            _ => GlooCall { peer, outputs: &tensor, ..GlooCall::default() },
        };
        self.gloo()?.start(operation, call)
    }

    fn wait_for_next(
        &self,
        messages: &mut VecDeque<Receiver<Result<()>>>,
        deadline: Deadline,
    ) -> Result<()> {
        let missing = || Error::Internal("a chain waits for more than is sent".into());
        self.wait(&messages.pop_front().ok_or_else(missing)?, deadline)
    }
}
