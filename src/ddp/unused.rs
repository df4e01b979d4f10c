//! Parameters that a step does not use on this rank, or on any rank.

use tch::{Device, Tensor};

use super::DdpOptions;
use super::layout::ParamSlot;
use super::reducer::State;
use crate::error::{Error, Result};
use crate::process_group::ReduceOp;

impl State {
    /// Prepares the reduction of the remaining buckets after backward. Parameters without a gradient contribute zeros,
    /// or their gradient from an earlier backward.
    ///
    /// # Errors
    /// [`Error::UnusedParameters`] if every parameter must have had a gradient on this rank, and one had none.
    pub(super) fn account_for_unused(&mut self, options: &DdpOptions) -> Result<()> {
        let agrees = self.syncs_unused(options);
        if options.static_graph && self.always_unused.is_none() {
            self.always_unused = Some(self.unused().map(|(index, _)| index).collect());
        } else if !agrees {
            self.refuse_unused()?;
        }
        if agrees {
            let kept = self.unused().filter(|(_, member)| member.has_gradient);
            let kept = kept.map(|(index, member)| Ok((index, member.copy_gradient()?)));
            self.kept = kept.collect::<Result<_>>()?;
        }
        let allows_unused = options.find_unused_parameters || options.static_graph;
        let skips = options.skip_all_reduce_unused_params && allows_unused;
        for (number, bucket) in self.layout.buckets.iter_mut().enumerate() {
            bucket.pending = 0;
            let mut members = self.layout.members.iter().filter(|it| it.bucket == number);
            bucket.is_skipped = skips && members.all(|member| !member.used);
        }
        Ok(())
    }

    /// Restores the gradient of an earlier backward for each parameter that no rank has used in this one; removes the
    /// gradient if no rank has used the parameter since `zero_grad`. Runs after the buckets, which some ranks may have
    /// reduced already.
    pub(super) fn settle_unused(&mut self, options: &DdpOptions) -> Result<()> {
        let agrees = self.syncs_unused(options);
        if agrees {
            let unused = self.all_reduce_used_mask()?;
            for (index, gradient) in self.kept.drain(..) {
                if unused[index] {
                    self.layout.members[index].restore_gradient(&gradient)?;
                }
            }
            let members = self.layout.members.iter().enumerate();
            let without = members.filter(|&(index, it)| unused[index] && !it.has_gradient);
            self.undefined = without.map(|(index, _)| index).collect();
            for flat in &self.layout.flats {
                flat.places.set_unused(&self.undefined);
            }
            self.has_agreed = options.static_graph;
        }
        for member in &mut self.layout.members {
            (member.used, member.has_gradient) = (false, true);
        }
        for &index in &self.undefined {
            self.layout.members[index].has_gradient = false;
        }
        Ok(())
    }

    /// Returns an error unless every parameter had a gradient on this rank.
    fn refuse_unused(&self) -> Result<()> {
        let allowed =
            |index: &usize| self.always_unused.iter().flatten().any(|known| known == index);
        let missing = self.unused().filter(|(index, _)| !allowed(index));
        let names: Vec<&str> = missing.map(|(_, member)| member.name.as_str()).collect();
        if names.is_empty() {
            return Ok(());
        }
        let rank = self.group.ranks()[self.group.rank()];
        Err(Error::UnusedParameters { rank, names: names.join(", ") })
    }

    /// Returns whether the ranks must agree on the parameters that this step does not use.
    pub(super) fn syncs_unused(&self, options: &DdpOptions) -> bool {
        options.find_unused_parameters || (options.static_graph && !self.has_agreed)
    }

    /// Returns the parameters that had no gradient on this rank.
    fn unused(&self) -> impl Iterator<Item = (usize, &ParamSlot)> {
        self.layout.members.iter().enumerate().filter(|(_, member)| !member.used)
    }

    /// Returns for each parameter whether no rank had a gradient for it.
    fn all_reduce_used_mask(&self) -> Result<Vec<bool>> {
        let used = self.layout.members.iter().map(|member| i32::from(member.used));
        let used: Vec<i32> = used.collect();
        let mut used = Tensor::from_slice(&used).to_device(self.group.device());
        self.group.all_reduce(&mut used, ReduceOp::Max)?;
        self.group.synchronize()?;
        let used = Vec::<i32>::try_from(used.to_device(Device::Cpu));
        let used = used.map_err(Error::torch("reading which parameters are used"))?;
        Ok(used.into_iter().map(|used| used == 0).collect())
    }
}
