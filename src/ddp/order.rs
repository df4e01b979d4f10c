//! The order of the parameters in the buckets, which follows the order of ready gradients after the first step.

use tch::{Device, Kind, Tensor};

use super::DdpOptions;
use super::reducer::State;
use crate::error::{Error, Result};

impl State {
    /// Rebuilds the buckets on all ranks after the first iteration, in the order of rank 0's ready gradients.
    pub(super) fn rebuild_buckets(&mut self, options: &DdpOptions) -> Result<()> {
        let Some(mut order) = self.ready_order.take() else { return Ok(()) };
        if options.find_unused_parameters || self.layout.buckets.len() == 1 {
            return Ok(()); // some parameters may be missing, or one bucket gains nothing
        }
        if order.len() < self.layout.members.len() {
            // This rank has run out of inputs, or some parameters are never used.
            order = self.layout.default_order();
        }
        let mine: Vec<i64> = order.iter().map(|&index| index as i64).collect();
        let mut agreed = Tensor::from_slice(&mine).to_device(self.group.device());
        self.group.broadcast(&mut agreed, 0)?;
        self.group.synchronize()?;
        let agreed = Vec::<i64>::try_from(agreed.to_device(Device::Cpu).to_kind(Kind::Int64));
        let agreed = agreed.map_err(Error::torch("reading rank 0's order"))?;
        order = agreed.into_iter().map(|index| index as usize).collect();
        self.layout.fill_buckets(&order, options)
    }

    /// Returns the names of all parameters in bucket order. Empty before the first step, after which the buckets are
    /// rebuilt.
    pub(super) fn order(&self) -> Vec<String> {
        if self.ready_order.is_some() {
            return Vec::new();
        }
        let parameters = self.layout.buckets.iter().flat_map(|bucket| &bucket.parameters);
        parameters.map(|it| it.name.clone()).collect()
    }

    /// Rebuilds the buckets in the order of `names`; later steps keep this order.
    ///
    /// # Errors
    /// [`Error::Input`] when these are not the parameters of the model.
    pub(super) fn set_order(&mut self, names: &[String], options: &DdpOptions) -> Result<()> {
        let place =
            |name: &String| self.layout.members.iter().position(|member| member.name == *name);
        let order: Vec<usize> = names.iter().filter_map(place).collect();
        let mut each = order.clone();
        each.sort_unstable();
        each.dedup();
        if names.len() != each.len() || each.len() != self.layout.members.len() {
            return Err(Error::Input(
                "the state of the communication hook is that of a model with other parameters"
                    .into(),
            ));
        }
        self.layout.fill_buckets(&order, options)?;
        self.ready_order = None;
        Ok(())
    }
}
