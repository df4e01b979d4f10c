//! The order of the parameters in the buckets, which follows the order of ready gradients after the first step.

use tch::Tensor;

use super::layout::{Layout, default_order};
use super::options::DdpOptions;
use crate::error::Result;
use crate::ffi::TorchResult;
use crate::process_group::ProcessGroup;

/// The order in which gradients become ready in the first iteration, until the buckets follow it.
#[derive(Debug)]
pub(super) struct BucketOrder {
    /// The indices of the parameters in that order; `None` once the buckets follow it.
    ready: Option<Vec<usize>>,
}

impl BucketOrder {
    /// Returns the order of a model of `count` parameters before its first step.
    pub(super) fn new(count: usize) -> Self {
        Self { ready: Some(Vec::with_capacity(count)) }
    }

    /// Returns whether the buckets have their final order.
    pub(super) fn is_final(&self) -> bool {
        self.ready.is_none()
    }

    /// Begins a backward.
    pub(super) fn begin(&mut self) {
        if let Some(ready) = &mut self.ready {
            ready.clear();
        }
    }

    /// Adds a parameter whose gradient is ready.
    pub(super) fn push(&mut self, index: usize) {
        if let Some(ready) = &mut self.ready {
            ready.push(index);
        }
    }

    /// Rebuilds the buckets on all ranks after the first iteration, in the order of rank 0's ready gradients.
    pub(super) fn rebuild_buckets(
        &mut self,
        layout: &mut Layout,
        options: &DdpOptions,
        group: &ProcessGroup,
    ) -> Result<()> {
        let Some(mut order) = self.ready.take() else { return Ok(()) };
        if options.find_unused_parameters || layout.buckets.len() == 1 {
            // Some parameters may be missing, or one bucket gains nothing.
            return Ok(());
        }
        if order.len() < layout.states.len() {
            // This rank has run out of inputs, or some parameters are never used.
            order = default_order(layout.states.len());
        }
        let mine: Vec<i64> = order.iter().map(|&index| index as i64).collect();
        let mut agreed = group.to_device(&Tensor::from_slice(&mine))?;
        group.broadcast(&mut agreed, 0)?;
        let agreed = Vec::<i64>::try_from(group.to_host(&agreed)?);
        let agreed = agreed.doing("reading rank 0's order")?;
        order = agreed.into_iter().map(|index| index as usize).collect();
        layout.fill_buckets(&order, options)
    }
}
