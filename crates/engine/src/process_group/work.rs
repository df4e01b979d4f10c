//! The handle of an asynchronous operation.

use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::{Receiver, RecvTimeoutError};

#[cfg(doc)]
use super::ProcessGroup;
use super::local::{CommonStream, Completion, MessageEnd, Shared};
use super::network::{Network, connection_lost};
use crate::error::{Error, Result, opaque_debug};
use crate::ffi::cuda;
use crate::operation::OpId;
use crate::runtime::{Deadline, Peers, RunContext};

/// An operation that was started and may still run. Follows `torch.distributed.Work`.
///
/// Leave its tensors alone until [`Work::wait`] has returned. Dropping the handle does not stop the operation; if
/// the operation fails, the run still ends.
#[must_use = "the operation is over when `wait` has returned"]
pub struct Work {
    state: State,
    run: Arc<RunContext>,
    /// The rank's number in the run.
    rank: usize,
    /// Makes `Work` `!Send`: only the thread that started the operation is woken.
    _not_send: PhantomData<Rc<()>>,
}

pub(super) enum State {
    /// Queued on a communication thread, which will send the result.
    Queued(Receiver<Result<()>>),
    /// A message in the mailbox of `destination`, or on its way to another process.
    Posted {
        posted: Arc<Completion>,
        shared: Arc<Shared>,
        destination: usize,
        /// The possible peers, by their numbers in the run.
        peers: Vec<usize>,
        /// The network to peers in other processes. `None` if no peer can be in another process.
        network: Option<Arc<Network>>,
        at: OpId,
        /// The stream that copies the message, if its tensor is on a GPU.
        stream: Option<CommonStream>,
    },
    /// Launched on a GPU. Done when the rank's stream has passed this event.
    Launched(cuda::CudaEvent),
    /// Done without an error.
    Done,
    /// Failed; the error has already been reported.
    Failed,
}

opaque_debug!(Work);

impl Work {
    pub(super) fn new(state: State, run: Arc<RunContext>, rank: usize) -> Self {
        Self { state, run, rank, _not_send: PhantomData }
    }

    /// Returns whether the operation is over, successfully or not. Does not wait.
    pub fn is_completed(&self) -> bool {
        match &self.state {
            State::Queued(result) => !result.is_empty(),
            State::Posted { posted, .. } => posted.is_completed(),
            // `ProcessGroup::synchronize` reports a device error.
            State::Launched(mark) => mark.is_done().unwrap_or(true),
            State::Done | State::Failed => true,
        }
    }

    /// Waits until the operation is over and its results can be used.
    ///
    /// On a GPU with `nccl`, this returns at once, as in PyTorch: everything launched from here on runs after the
    /// operation. Before you read a result on the host, call [`ProcessGroup::synchronize`].
    ///
    /// # Errors
    /// The error of the operation itself; [`Error::Cancelled`] if another rank failed.
    pub fn wait(self) -> Result<()> {
        self.wait_for_source().map(drop)
    }

    /// Waits for at most `timeout`. Returns whether the operation is over and its results can be used.
    ///
    /// Follows c10d's `Work.wait(timeout)`, which raises an error where this returns `false`. After `false`,
    /// nothing has changed: the operation goes on, the run has not failed, and the tensors must still be left
    /// alone. You can call this or [`Work::wait`] again. A collective still ends by the timeout of the run
    /// ([`Spawn::timeout`](crate::Spawn::timeout)); for a message, that timeout starts again with each call. With
    /// `nccl`, the host waits here for the GPU, as in PyTorch.
    ///
    /// # Errors
    /// The errors of [`Work::wait`]. The operation is over then, and another wait returns [`Error::Cancelled`].
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # fn main() -> anyhow::Result<()> {
    /// use std::time::Duration;
    ///
    /// use ddp_mp::{Backend, spawn};
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     if rank.rank() == 0 {
    ///         let mut work = group.async_op(|group| group.barrier())?;
    ///         while !work.wait_timeout(Duration::from_millis(1))? {
    ///             // ... something else ...
    ///         }
    ///     } else {
    ///         group.barrier()?;
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn wait_timeout(&mut self, timeout: Duration) -> Result<bool> {
        let ended = self.wait_at_most(Some(timeout));
        match &ended {
            Ok(None) => {}
            Ok(Some(_)) => self.state = State::Done,
            Err(_) => self.state = State::Failed,
        }
        ended.map(|ended| ended.is_some())
    }

    /// Waits like [`Work::wait`]. For a message, returns the rank of the group that sent it; `None` for other
    /// operations.
    pub(super) fn wait_for_source(self) -> Result<Option<usize>> {
        self.wait_at_most(None).map(Option::flatten)
    }

    /// Waits for at most `limit`; without a limit, until the operation ends, as every operation does. Returns
    /// `None` if `limit` has passed first, `Some(None)` if the operation is over, and `Some(Some(rank))` if it was
    /// a message that `rank` of the group sent.
    fn wait_at_most(&self, limit: Option<Duration>) -> Result<Option<Option<usize>>> {
        match &self.state {
            State::Queued(result) => Ok(self.wait_for_result(result, limit)?.then_some(None)),
            State::Posted { posted, shared, destination, peers, network, at, stream } => {
                let peers = Peers { ranks: peers, are_elsewhere: network.is_some(), limit };
                let is_done = || posted.is_completed();
                let messages = network.as_ref().and_then(|network| network.messages.as_ref());
                let cut = || messages.inspect(|messages| messages.cut()).is_some();
                let withdraw = || shared.mail.cancel(posted, *destination, cut);
                if !self.run.wait_for_peers(self.rank, peers, *at, is_done, withdraw)? {
                    return Ok(None);
                }
                match posted.outcome() {
                    Some(MessageEnd::From(source)) => {
                        if let Some(stream) = &stream {
                            stream.let_rank_wait()?;
                        }
                        Ok(Some(Some(*source)))
                    }
                    Some(MessageEnd::Lost { ranks, reason }) => {
                        self.run.check(self.rank)?;
                        let (ranks, reason) = (ranks.clone(), reason.clone());
                        let error = connection_lost(&self.run, *at, self.rank, ranks, reason);
                        self.run.report(self.rank, Some(&error), error.to_string());
                        Err(error)
                    }
                    // The transfer failed, which has been reported.
                    Some(MessageEnd::Reported) | None => {
                        self.run.check(self.rank).map(|()| Some(None))
                    }
                }
            }
            State::Launched(mark) => match limit {
                Some(limit) => {
                    let is_over = self.run.poll_at_most(self.rank, limit, || mark.is_done())?;
                    Ok(is_over.then_some(None))
                }
                None => self.run.check(self.rank).map(|()| Some(None)),
            },
            State::Failed => self.run.check(self.rank).map(|()| Some(None)),
            State::Done => Ok(Some(None)),
        }
    }

    /// Waits for at most `limit` for the result of a communication thread. Returns whether it has come.
    fn wait_for_result(
        &self,
        result: &Receiver<Result<()>>,
        limit: Option<Duration>,
    ) -> Result<bool> {
        let received = match limit {
            Some(limit) => Deadline::after(limit).recv(result),
            None => result.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match received {
            Ok(result) => result.map(|()| true),
            Err(RecvTimeoutError::Timeout) => Ok(false),
            Err(RecvTimeoutError::Disconnected) => {
                self.run.check(self.rank)?;
                let error = Error::Internal(format!(
                    "rank {}: the thread of its asynchronous operation ended without a result",
                    self.rank
                ));
                self.run.report(self.rank, Some(&error), error.to_string());
                Err(error)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crossbeam::channel::bounded;

    use super::*;

    #[test]
    fn lost_communication_thread_is_a_failure_of_its_rank() {
        let run = Arc::new(RunContext::new(4, Duration::from_secs(60), None));
        let (ended_tx, ended_rx) = bounded(1);
        let work = Work::new(State::Queued(ended_rx), run.clone(), 3);
        drop(ended_tx);
        let error = work.wait().unwrap_err();
        assert!(error.to_string().starts_with("rank 3: the thread of its"), "{error}");
        let told: Vec<_> =
            run.failures().iter().map(|failure| (failure.rank, failure.error.clone())).collect();
        assert_eq!(told, [(3, error.to_string())]);
        assert_eq!(run.cancel.cancelled_by(), Some(3));
    }
}
