//! How a bucket of gradients is averaged. The model is wrapped with one way, or a communication hook is registered.

use super::comm_hooks::{CommHook, GradBucket, average};
use super::reduce_path::ReducePath;
use crate::error::Result;
use crate::optim::{Bucket, ParamMemory};
use crate::process_group::ProcessGroup;

/// How and where the gradients of a bucket are averaged over the ranks.
pub(super) struct Averaging {
    pub path: ReducePath,
    how: How,
}

/// A way to average.
enum How {
    /// Each gradient where it is: ranks that read each other's memory.
    InPlace,
    /// All in one tensor. Ranks that partition the optimizer may get only their partitions of the averages.
    Flat,
    /// As the user's communication hook does it.
    Hook(Box<dyn CommHook>),
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
            Self { path: ReducePath::ByRank, how: How::InPlace }
        } else {
            Self { path: ReducePath::new(group)?, how: How::Flat }
        })
    }

    /// Returns the way with a communication hook.
    pub(super) fn with_hook(group: &ProcessGroup, hook: Box<dyn CommHook>) -> Result<Self> {
        Ok(Self { path: ReducePath::new(group)?, how: How::Hook(hook) })
    }

    /// Averages the gradients of `bucket`. Returns whether this rank has done its part: if not, another thread reduces until
    /// [`ReducePath::wait`].
    pub(super) fn reduce(
        &mut self,
        bucket: &mut Bucket,
        parameters: &[ParamMemory],
        group: &ProcessGroup,
        turn: BucketTurn,
    ) -> Result<bool> {
        let Self { path, how } = self;
        if let How::InPlace = how {
            group.all_reduce_list(&bucket.gradients, &bucket.shapes, average(group))?;
            return Ok(true);
        }
        let mut gradients = bucket.concat_gradients(parameters)?;
        let BucketTurn { index, is_last, scatters, overlaps } = turn;
        if let How::Hook(hook) = how {
            path.run(group, |group| {
                let mut reduced = GradBucket {
                    index,
                    is_last,
                    gradients: &mut gradients,
                    parameters: &bucket.parameters,
                };
                hook.reduce(&mut reduced, group)?;
                // A hook may have replaced the tensor, as a Python hook would return a new one.
                bucket.copy_back(&gradients, parameters)
            })?;
            return Ok(true);
        }
        // A single bucket cannot overlap with anything.
        let is_alone = is_last && index == 0;
        if let ReducePath::OnThread(works) = path
            && overlaps
            && !is_alone
        {
            works.push(if scatters {
                group.reduce_scatter_async(&gradients, average(group))?
            } else {
                group.all_reduce_async(&gradients, average(group))?
            });
            return Ok(false);
        }
        path.run(group, |group| {
            if scatters {
                group.reduce_scatter_in_place(&gradients, average(group))
            } else {
                group.all_reduce(&mut gradients, average(group))
            }
        })?;
        Ok(true)
    }

    /// Returns the communication hook, if there is one.
    pub(super) fn hook(&self) -> Option<&dyn CommHook> {
        if let How::Hook(hook) = &self.how { Some(&**hook) } else { None }
    }
}
