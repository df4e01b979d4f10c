//! What ranks that share a model step together: the ranges of each dtype, and state in one rank's memory.

use std::rc::Rc;

use tch::{Kind, Tensor};

use super::parts::Group;
use super::{FlatBuffer, SharedModel};
use crate::error::Result;
use crate::process_group::join_shapes;

/// The ranges of one dtype, which the ranks of a shared model step in one collective.
#[derive(Debug)]
pub(super) struct SharedRanges {
    pub gradients: Vec<Tensor>,
    /// The lengths of the gradients, as the ranks compare them.
    pub shapes: Vec<i64>,
    /// For each gradient the index of its group, and of its range in the group's parts.
    pub ranges: Vec<(usize, usize)>,
}

impl SharedRanges {
    /// Returns the ranges of all `groups` by dtype.
    pub(super) fn of(groups: &[Group]) -> Vec<Self> {
        let mut by_dtype: Vec<(Kind, Vec<(usize, usize)>)> = Vec::new();
        for (index, group) in groups.iter().enumerate() {
            let dtype = group.parts.parameters[0].kind();
            let ranges = (0..group.parts.len()).map(|range| (index, range));
            match by_dtype.iter_mut().find(|(known, _)| *known == dtype) {
                Some((_, same)) => same.extend(ranges),
                None => by_dtype.push((dtype, ranges.collect())),
            }
        }
        let with_tensors = |(_, ranges): (Kind, Vec<(usize, usize)>)| {
            let parts = || ranges.iter().map(|&(group, range)| (&groups[group].parts, range));
            let gradients = parts().map(|(parts, range)| parts.gradients[range].shallow_clone());
            // A gradient that moves from step to step has no length before the first backward.
            let shapes = join_shapes(parts().map(|(parts, range)| parts.parameters[range].size()));
            Self { gradients: gradients.collect(), shapes, ranges }
        };
        by_dtype.into_iter().map(with_tensors).collect()
    }
}

/// Returns this rank's side of the model, if the ranks share one.
pub(super) fn shared_model(buffers: &[FlatBuffer]) -> Option<Rc<SharedModel>> {
    buffers.first().and_then(|buffer| buffer.layout.now().shared.clone())
}

/// Calls `make`, and returns its `count` lists, which have a tensor for each buffer. Ranks that share a model get the
/// lists of one rank. This is a collective then.
pub(super) fn on_one_rank(
    buffers: &[FlatBuffer],
    count: usize,
    make: impl FnOnce() -> Result<Vec<Vec<Tensor>>>,
) -> Result<Vec<Vec<Tensor>>> {
    let Some(shared) = shared_model(buffers).filter(|_| count > 0) else { return make() };
    let make = || Ok(make()?.into_iter().flatten().collect());
    let mut tensors = shared.group.share_tensors(make)?.into_iter();
    Ok((0..count).map(|_| tensors.by_ref().take(buffers.len()).collect()).collect())
}
