//! How a bucket of gradients is averaged. The model is wrapped with one way, or a communication hook is registered.

use std::fmt;
use std::time::Duration;

use tch::Tensor;

use super::comm_hooks::{CommHook, GradBucket, average};
use super::layout::Bucket;
use super::reduce_path::ReducePath;
use crate::error::Result;
use crate::optim::{BucketMemory, ParamMemory};
use crate::process_group::ProcessGroup;

/// A way to average the gradients of a bucket over the ranks.
pub(super) enum Averaging {
    /// Each gradient where it is: ranks that read each other's memory.
    InPlace,
    /// All in one tensor. Ranks that partition the optimizer may get only their partitions of the averages.
    Flat(ReducePath),
    /// As the user's communication hook does it.
    Hook(ReducePath, Box<dyn CommHook>),
}

impl fmt::Debug for Averaging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InPlace => "InPlace",
            Self::Flat(_) => "Flat",
            Self::Hook(_, hook) => hook.name(),
        })
    }
}

/// The bucket that a reduction handles, and how.
#[derive(Debug, Clone, Copy)]
pub(super) struct BucketTurn {
    pub index: usize,
    /// Whether it is the last bucket of the step.
    pub is_last: bool,
    /// Whether each rank gets only its own partition of the averages.
    pub scatters: bool,
    /// Whether the rank computes meanwhile.
    pub overlaps: bool,
}

impl Averaging {
    /// Returns the way for the ranks of `group`, which may partition the optimizer.
    pub(super) fn new(group: &ProcessGroup, is_partitioned: bool) -> Result<Self> {
        Ok(if group.reduces_in_place() && !is_partitioned {
            Self::InPlace
        } else {
            Self::Flat(ReducePath::new(group)?)
        })
    }

    /// Returns the way with a communication hook.
    pub(super) fn with_hook(group: &ProcessGroup, hook: Box<dyn CommHook>) -> Result<Self> {
        Ok(Self::Hook(ReducePath::new(group)?, hook))
    }

    /// Averages the gradients of `bucket`. Returns whether this rank has done its part: if not, another thread reduces until
    /// [`wait`](Self::wait).
    pub(super) fn reduce(
        &mut self,
        bucket: &mut Bucket,
        parameters: &[ParamMemory],
        group: &ProcessGroup,
        turn: BucketTurn,
    ) -> Result<bool> {
        match self {
            Self::InPlace => {
                let BucketMemory { gradients, shapes, .. } = &bucket.memory;
                group.all_reduce_list(gradients, shapes, average(group))?;
                Ok(true)
            }
            Self::Flat(path) => {
                reduce_flat(path, bucket.concat_gradients(parameters)?, group, turn)
            }
            Self::Hook(path, hook) => {
                let mut gradients = bucket.concat_gradients(parameters)?;
                path.run(group, |group| {
                    let mut reduced = GradBucket {
                        index: turn.index,
                        is_last: turn.is_last,
                        gradients: &mut gradients,
                        parameters: &bucket.memory.parameters,
                    };
                    hook.reduce(&mut reduced, group)?;
                    // A hook may have replaced the tensor, as a Python hook would return a new one.
                    bucket.copy_back(&gradients, parameters)
                })?;
                Ok(true)
            }
        }
    }

    /// Returns whether to reduce during backward by default.
    pub(super) fn overlaps(&self) -> bool {
        self.path().is_some_and(ReducePath::overlaps)
    }

    /// Waits for the reductions that other threads and GPUs make. Returns how long the rank itself has waited.
    pub(super) fn wait(&mut self, group: &ProcessGroup) -> Result<Duration> {
        self.path_mut().map_or(Ok(Duration::ZERO), |path| path.wait(group))
    }

    /// Runs `work` where buckets are reduced, after all that this rank has launched so far.
    pub(super) fn run(
        &mut self,
        group: &ProcessGroup,
        work: impl FnOnce(&ProcessGroup) -> Result<()>,
    ) -> Result<()> {
        match self.path_mut() {
            Some(path) => path.run(group, work),
            None => work(group),
        }
    }

    /// Returns the communication hook, if there is one.
    pub(super) fn hook(&self) -> Option<&dyn CommHook> {
        if let Self::Hook(_, hook) = self { Some(&**hook) } else { None }
    }

    fn path(&self) -> Option<&ReducePath> {
        match self {
            Self::InPlace => None,
            Self::Flat(path) | Self::Hook(path, _) => Some(path),
        }
    }

    fn path_mut(&mut self) -> Option<&mut ReducePath> {
        match self {
            Self::InPlace => None,
            Self::Flat(path) | Self::Hook(path, _) => Some(path),
        }
    }
}

/// Averages `gradients`: all on every rank, or each rank's partition on that rank.
fn reduce_flat(
    path: &mut ReducePath,
    mut gradients: Tensor,
    group: &ProcessGroup,
    turn: BucketTurn,
) -> Result<bool> {
    // A single bucket cannot overlap with anything.
    let is_alone = turn.is_last && turn.index == 0;
    if let Some(works) = path.works().filter(|_| turn.overlaps && !is_alone) {
        works.push(if turn.scatters {
            group.reduce_scatter_async(&gradients, average(group))?
        } else {
            group.all_reduce_async(&gradients, average(group))?
        });
        return Ok(false);
    }
    path.run(group, |group| {
        if turn.scatters {
            group.reduce_scatter_in_place(&gradients, average(group))
        } else {
            group.all_reduce(&mut gradients, average(group))
        }
    })?;
    Ok(true)
}
