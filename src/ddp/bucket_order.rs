//! The order of the parameters in the buckets, which follows the order of ready gradients after the first step.

use super::layout::{Layout, default_order};
use super::options::DdpOptions;
use crate::error::Result;
use crate::process_group::ProcessGroup;

/// Rebuilds the buckets on all ranks after the first iteration, in the order in which rank 0's gradients became ready.
/// `order` is that of this rank.
pub(super) fn rebuild_buckets(
    mut order: Vec<usize>,
    layout: &mut Layout,
    options: &DdpOptions,
    group: &ProcessGroup,
) -> Result<()> {
    if options.find_unused_parameters || layout.buckets.len() == 1 {
        // Some parameters may be missing, or one bucket gains nothing.
        return Ok(());
    }
    if order.len() < layout.states.len() {
        // This rank has run out of inputs, or some parameters are never used.
        order = default_order(layout.states.len());
    }
    group.broadcast_object_list(&mut order, 0)?;
    layout.fill_buckets(&order, options)
}
