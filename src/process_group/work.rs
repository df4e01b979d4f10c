//! The handle of an operation that goes on while its rank does something else.

use std::fmt;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::{Receiver, RecvTimeoutError};

use super::Network;
#[cfg(doc)]
use super::ProcessGroup;
use super::gloo::connection_lost;
use super::threaded::{Outcome, PostedOp, Shared};
use crate::error::{Error, Result};
use crate::ffi::cuda;
use crate::operation::OpId;
use crate::runtime::{Peers, RunContext};

/// An operation that was started and may not be over. Follows `torch.distributed.Work`.
///
/// Leave its tensors alone until [`Work::wait`] has returned. Dropping it does not stop it, and if it fails
/// the run ends all the same.
#[must_use = "the operation is over when `wait` has returned"]
pub struct Work {
    state: State,
    run: Arc<RunContext>,
    /// The rank in the run.
    rank: usize,
    /// It is waited for on the thread that started it, which is the one that is woken.
    stays_here: PhantomData<Rc<()>>,
}

pub(super) enum State {
    /// A communication thread will send how it ended.
    Queued(Receiver<Result<()>>),
    /// A message in the letter box of `destination`, or on its way to another process.
    Posted { posted: PostedOp, shared: Arc<Shared>, destination: usize, side: OtherSide, at: OpId },
    /// Launched on a GPU, up to this mark of the rank's stream.
    Launched(cuda::Event),
    /// It is over, and went well.
    Done,
    /// It has failed, which has been told.
    Failed,
}

/// Who can be the other side of a message.
pub(super) struct OtherSide {
    /// By their numbers in the run.
    pub ranks: Vec<usize>,
    /// The way to those in other processes, if they can be.
    pub network: Option<Arc<Network>>,
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("is_completed", &self.is_completed()).finish_non_exhaustive()
    }
}

impl Work {
    pub(super) fn new(state: State, run: Arc<RunContext>, rank: usize) -> Self {
        Self { state, run, rank, stays_here: PhantomData }
    }

    /// Whether the operation is over, well or not. Does not wait.
    pub fn is_completed(&self) -> bool {
        match &self.state {
            State::Queued(result) => !result.is_empty(),
            State::Posted { posted, .. } => posted.is_completed(),
            // An error of the device shows in `ProcessGroup::synchronize`.
            State::Launched(mark) => mark.is_done().unwrap_or(true),
            State::Done | State::Failed => true,
        }
    }

    /// Returns when the operation is over and its results can be used.
    ///
    /// On a GPU with `nccl` that is at once, as in PyTorch: whatever is launched from here on runs after it.
    /// Before you read a result on the host, call [`ProcessGroup::synchronize`].
    ///
    /// # Errors
    /// What the operation itself would have returned; [`Error::Cancelled`] when another rank failed.
    pub fn wait(self) -> Result<()> {
        self.wait_for_source().map(drop)
    }

    /// Waits no longer than `timeout`; returns whether the operation is over and its results can be used.
    ///
    /// Follows c10d's `Work.wait(timeout)`, which raises an error where this returns false. After false nothing has
    /// changed: the operation goes on, the run has not failed, the tensors must still be left alone, and this or
    /// [`Work::wait`] can be called again. A collective still ends by the timeout of the run
    /// ([`Spawn::timeout`](crate::Spawn::timeout)); for a message that timeout begins anew with each call. With `nccl`
    /// the host waits here for the GPU, as in PyTorch.
    ///
    /// # Errors
    /// As [`Work::wait`]; the operation is over then, and to wait again is [`Error::Cancelled`].
    ///
    /// ```
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

    /// As [`Work::wait`]; for a message returns the rank of the group that sent it.
    pub(super) fn wait_for_source(self) -> Result<Option<usize>> {
        self.wait_at_most(None).map(Option::flatten)
    }

    /// The rank of the group that sent a message, or none of another operation, once it is over; `None` if it is not
    /// when `limit` has passed. Without a limit every operation ends.
    fn wait_at_most(&self, limit: Option<Duration>) -> Result<Option<Option<usize>>> {
        match &self.state {
            State::Queued(result) => {
                let received = match limit {
                    Some(limit) => result.recv_timeout(limit),
                    None => result.recv().map_err(|_| RecvTimeoutError::Disconnected),
                };
                match received {
                    Ok(result) => result.map(|()| Some(None)),
                    Err(RecvTimeoutError::Timeout) => Ok(None),
                    Err(RecvTimeoutError::Disconnected) => {
                        self.run.check(self.rank)?;
                        let error = Error::Abandoned { rank: self.rank };
                        self.run.report(self.rank, Some(&error), error.to_string());
                        Err(error)
                    }
                }
            }
            State::Posted { posted, shared, destination, side, at } => {
                let OtherSide { ranks, network } = side;
                let peers = Peers { ranks, are_elsewhere: network.is_some(), limit };
                let is_done = || posted.is_completed();
                let withdraw = || shared.mail().cancel(posted, *destination);
                if !self.run.wait_for_peers(self.rank, peers, *at, is_done, withdraw)? {
                    return Ok(None);
                }
                match posted.outcome() {
                    Some(Outcome::From(source)) => Ok(Some(Some(*source))),
                    Some(Outcome::Lost { ranks, reason }) => {
                        self.run.check(self.rank)?;
                        let (ranks, reason) = (ranks.clone(), reason.clone());
                        let error = connection_lost(&self.run, *at, self.rank, ranks, reason);
                        self.run.report(self.rank, Some(&error), error.to_string());
                        Err(error)
                    }
                    // The two sides did not fit, which has been reported.
                    Some(Outcome::Reported) | None => {
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
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crossbeam::channel::bounded;

    use super::*;

    #[test]
    fn an_operation_whose_thread_is_gone_fails_in_the_name_of_its_rank() {
        let run = Arc::new(RunContext::new(4, Duration::from_secs(60), None));
        let (ending, ended) = bounded(1);
        let work = Work::new(State::Queued(ended), run.clone(), 3);
        drop(ending);
        let error = work.wait().unwrap_err();
        assert!(matches!(error, Error::Abandoned { rank: 3 }), "{error}");
        let told: Vec<_> = run.failures().iter().map(|it| (it.rank, it.error.clone())).collect();
        assert_eq!(told, [(3, error.to_string())]);
        assert_eq!(run.cancel.cancelled_by(), Some(3));
    }
}
