//! Parameters that a step does not use on this rank, or on any rank.

use tch::Tensor;

use super::layout::Layout;
use super::options::DdpOptions;
use crate::error::{Error, Result};
use crate::ffi::TorchResult;
use crate::process_group::{ProcessGroup, ReduceOp};

/// The parameters without a gradient in a step.
#[derive(Default)]
pub(super) struct UnusedParams {
    /// With `static_graph`: the parameters that have no gradient on this rank in any step.
    pub always: Option<Vec<usize>>,
    /// With `static_graph`: whether the ranks have agreed on the parameters that are unused everywhere in all steps.
    have_agreed: bool,
    /// Parameters without a gradient on any rank since `zero_grad`, as of the last step.
    pub undefined: Vec<usize>,
    /// Earlier gradients of the parameters that this rank does not use in this step, by index.
    kept: Vec<(usize, Tensor)>,
    /// The factor by which this step has multiplied the earlier gradients: see [`JoinOptions`](super::JoinOptions).
    pub multiplied_by: f64,
}

impl UnusedParams {
    /// Returns whether the ranks must agree on the parameters that this step does not use.
    pub(super) fn must_agree(&self, options: &DdpOptions) -> bool {
        options.find_unused_parameters || (options.static_graph && !self.have_agreed)
    }

    /// Prepares the reduction of the remaining buckets after backward. Parameters without a gradient contribute zeros,
    /// or their gradient from an earlier backward.
    ///
    /// # Errors
    /// [`Error::UnusedParameters`] if every parameter must have had a gradient on this rank, and one had none.
    pub(super) fn account(
        &mut self,
        layout: &mut Layout,
        options: &DdpOptions,
        group: &ProcessGroup,
    ) -> Result<()> {
        let must_agree = self.must_agree(options);
        if options.static_graph && self.always.is_none() {
            self.always = Some(unused(layout).collect());
        } else if !must_agree {
            let is_allowed =
                |index: &usize| self.always.iter().flatten().any(|known| known == index);
            let missing = unused(layout).filter(|index| !is_allowed(index));
            let name = |index: usize| layout.memory.parameters[index].name.as_str();
            let names: Vec<&str> = missing.map(name).collect();
            if !names.is_empty() {
                let rank = group.ranks()[group.rank()];
                return Err(Error::UnusedParameters { rank, names: names.join(", ") });
            }
        }
        if must_agree {
            let kept = unused(layout).filter(|&index| layout.states[index].has_gradient);
            let kept = kept.map(|index| {
                let gradient = layout.memory.parameters[index].gradient()?;
                let earlier = tch::no_grad(|| gradient.f_div_scalar(self.multiplied_by));
                Ok((index, earlier.doing("div")?))
            });
            self.kept = kept.collect::<Result<_>>()?;
        }
        layout.buckets.iter_mut().for_each(|bucket| bucket.pending = 0);
        Ok(())
    }

    /// Restores the gradient of an earlier backward for each parameter that no rank has used in this one; finds the
    /// parameters that no rank has used since `zero_grad`. Runs after the buckets, which some ranks may have reduced
    /// already.
    pub(super) fn restore_unused(
        &mut self,
        layout: &mut Layout,
        options: &DdpOptions,
        group: &ProcessGroup,
    ) -> Result<()> {
        if self.must_agree(options) {
            let unused = unused_on_all_ranks(layout, group)?;
            for (index, gradient) in self.kept.drain(..) {
                if unused[index] {
                    layout.memory.parameters[index].restore_gradient(&gradient)?;
                }
            }
            let states = layout.states.iter().enumerate();
            let without = states.filter(|&(index, state)| unused[index] && !state.has_gradient);
            self.undefined = without.map(|(index, _)| index).collect();
            for buffer in &layout.memory.buffers {
                buffer.layout.set_unused(&self.undefined);
            }
            self.have_agreed = options.static_graph;
        }
        for state in &mut layout.states {
            state.used = false;
            state.has_gradient = true;
        }
        for &index in &self.undefined {
            layout.states[index].has_gradient = false;
        }
        Ok(())
    }
}

/// Returns the indices of the parameters that had no gradient on this rank.
fn unused(layout: &Layout) -> impl Iterator<Item = usize> {
    let states = layout.states.iter().enumerate();
    states.filter(|(_, state)| !state.used).map(|(index, _)| index)
}

/// Returns for each parameter whether no rank had a gradient for it. A collective.
fn unused_on_all_ranks(layout: &Layout, group: &ProcessGroup) -> Result<Vec<bool>> {
    let used: Vec<i32> = layout.states.iter().map(|state| i32::from(state.used)).collect();
    let mut used = group.to_device(&Tensor::from_slice(&used))?;
    group.all_reduce(&mut used, ReduceOp::Max)?;
    let used = Vec::<i32>::try_from(group.to_host(&used)?);
    let used = used.doing("reading which parameters are used")?;
    Ok(used.into_iter().map(|used| used == 0).collect())
}
