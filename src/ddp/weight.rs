//! Gradients weighted by the number of samples behind them.

use std::panic::Location;

use tch::Tensor;

use super::DistributedDataParallel;
use super::backward::{self, Averaged, BackwardOptions};
use super::layout::ParamSlot;
use super::reducer::State;
use crate::error::{Error, Result};
use crate::optim::GradState;
use crate::process_group::check_weight;

/// The number of samples behind the gradients of this rank.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Weight {
    /// Those of all batches since the last backward that averaged.
    pub samples: f64,
    /// Those of the first of these batches that has any. Its loss is taken as it is, and each other one is multiplied
    /// by how many samples it has for each of these.
    unit: f64,
    /// Whether this backward has a weight: without, it must not average those that have.
    is_called: bool,
}

impl Weight {
    /// Returns what the loss of a batch of so many samples is multiplied by.
    fn factor(&self, samples: f64) -> f64 {
        match self.unit {
            _ if samples == 0.0 => 0.0, // it counts for nothing, also as the first
            0.0 => 1.0,
            unit => samples / unit,
        }
    }

    /// Takes a batch of so many samples into account.
    fn add(&mut self, samples: f64) {
        (self.samples, self.is_called) = (self.samples + samples, true);
        if self.unit == 0.0 {
            self.unit = samples;
        }
    }

    /// A step of so many samples, whose losses are multiplied already.
    fn whole(samples: f64) -> Self {
        Self { samples, unit: samples, is_called: true }
    }

    /// Makes `gradients` of all batches their mean over the samples: zeros without samples, whatever they were.
    pub(super) fn apply(self, gradients: &mut Tensor) -> Result<()> {
        let settle = || match self.unit / self.samples {
            _ if self.samples == 0.0 => gradients.f_zero_().map(drop),
            1.0 => Ok(()),
            share => gradients.f_mul_scalar_(share).map(drop),
        };
        tch::no_grad(settle).map_err(Error::torch("weighting gradients"))
    }
}

impl State {
    /// Refuses weights that cannot be.
    fn check_weight(&self, samples: f64, averages: bool) -> Result<()> {
        let rank = self.group.ranks()[self.group.rank()];
        check_weight(samples, rank)
            .map_err(|error| Error::Input(format!("backward_weighted: {error}")))?;
        if let Some(hook) = self.comm_hook.as_ref().filter(|hook| !hook.weighs()) {
            return Err(Error::Input(format!(
                "backward_weighted: the communication hook `{}` does not support weights; use GradBucket::weight and \
                 implement CommHook::weighs in it, or use backward",
                hook.name()
            )));
        }
        let mut places = self.layout.flats.iter().map(|flat| flat.places.gradients());
        if !averages && self.weight.is_none() && places.any(|it| it == GradState::Averaged) {
            return Err(Error::Input(
                "backward_weighted: within no_sync it cannot add to gradients that an earlier step has averaged; \
                 call zero_grad before the first batch of a step"
                    .into(),
            ));
        }
        Ok(())
    }
}

/// Returns `loss`, the mean over so many samples, as the weights of the `models` need it, and takes these samples into
/// account.
///
/// # Errors
/// [`Error::Input`]; no weight has changed then.
pub(super) fn weigh(loss: &Tensor, models: &[&dyn Averaged], samples: f64) -> Result<Tensor> {
    let mut factor = None;
    for model in models {
        let check = |state: &mut State| {
            state.check_weight(samples, model.averages())?;
            Ok(state.weight.unwrap_or_default().factor(samples))
        };
        let of_model = model.reducer().with_state(check)?;
        if *factor.get_or_insert(of_model) != of_model {
            return Err(Error::Input(
                "backward: one loss cannot have a weight for models that have added up different batches within \
                 no_sync; call backward for each model alone, or with all of them in every batch"
                    .into(),
            ));
        }
    }
    for model in models {
        model.reducer().with_state(|state| {
            let weight = state.weight.get_or_insert_default();
            weight.add(samples);
            // Without any samples in the step all gradients become zeros in the end.
            if samples > 0.0 || (model.averages() && weight.samples == 0.0) {
                return Ok(());
            }
            state.layout.members.iter_mut().try_for_each(ParamSlot::keep_gradient)
        })?;
    }
    match factor {
        None | Some(1.0) => Ok(loss.shallow_clone()),
        Some(factor) => loss.f_mul_scalar(factor).map_err(Error::torch("weighting the loss")),
    }
}

impl State {
    /// Begins a backward, whose hooks may be called from now on.
    ///
    /// # Errors
    /// [`Error::Input`] if it averages gradients of which some have weights and the last ones none.
    pub(super) fn enter_autograd(&mut self, averages: bool) -> Result<()> {
        if let Some(Weight { samples, is_called: false, .. }) = self.weight
            && averages
        {
            return Err(Error::Input(format!(
                "backward: this step has {samples} samples from backward_weighted; call backward_weighted for its \
                 last batch too"
            )));
        }
        self.group.set_weight(self.weight.map(|weight| weight.unit));
        self.is_in_autograd = true;
        Ok(())
    }

    /// No hooks are called any more.
    pub(super) fn leave_autograd(&mut self) {
        self.group.set_weight(None);
        if let Some(weight) = &mut self.weight {
            weight.is_called = false;
        }
        self.layout.members.iter_mut().for_each(|member| member.before = None);
        self.is_in_autograd = false;
    }
}

impl<M> DistributedDataParallel<M> {
    /// Computes the gradients of `loss`, the mean loss of so many `samples`, and averages them over the samples of all
    /// ranks, where [`backward`](Self::backward) averages over the ranks. A collective, that all ranks must call.
    ///
    /// With batches of different size the mean of the ranks' means is not the mean over all samples: a sample in a
    /// small batch counts more than one in a large batch. Here each rank's gradient is weighted by its number of
    /// samples, so that N ranks give the result of one rank on all samples, up to rounding. With equal numbers of
    /// samples the gradients are those of `backward`, to the bit. PyTorch has no such method.
    ///
    /// Within [`no_sync`](Self::no_sync) the samples add up over the batches, which also may differ in size; every
    /// batch's `loss` is its own mean, and is not divided by the number of batches. Gradients that a plain `backward`
    /// adds within `no_sync` count as if its loss were part of that of the first batch with samples.
    ///
    /// A rank without samples passes 0; the gradients of that batch are ignored, also those that are not finite. Within
    /// [`join`](Self::join) a rank that has run out has 0 samples, whatever
    /// [`divide_by_initial_world_size`](super::JoinOptions::divide_by_initial_world_size) says.
    ///
    /// # Errors
    /// Those of [`backward`](Self::backward). [`Error::Input`] if `samples` is negative or not finite, if all ranks
    /// together have none, if a communication hook does not [weigh](super::CommHook::weighs), and within `no_sync` if
    /// the averaged gradients of a step before are still there. [`Error::Mismatch`] if another rank calls `backward`.
    ///
    /// ```
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, DdpOptions, DistributedDataParallel, spawn};
    /// use tch::{Kind, Tensor, nn};
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let vs = nn::VarStore::new(rank.device());
    ///     let weight = vs.root().var("weight", &[1], nn::Init::Const(1.0));
    ///     let mut ddp = DistributedDataParallel::new((), &vs, group, DdpOptions::default())?;
    ///     let batch = if rank.rank() == 0 { vec![1f32, 1.0, 1.0] } else { vec![5.0] };
    ///     let loss = (&weight * Tensor::from_slice(&batch)).mean(Kind::Float);
    ///     ddp.backward_weighted(&loss, batch.len() as f64)?;
    ///     // The mean of 1, 1, 1 and 5; the mean of the ranks' means is 3.
    ///     assert_eq!(weight.grad().double_value(&[0]), 2.0);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[track_caller]
    pub fn backward_weighted(&mut self, loss: &Tensor, samples: f64) -> Result<()> {
        let options = BackwardOptions { samples: Some(samples), ..BackwardOptions::default() };
        backward::run(loss, &[self], options, Location::caller())
    }

    /// As [`backward_weighted`](Self::backward_weighted) of one batch of a step of `samples` samples: `loss` is divided
    /// by that, and multiplied by how many samples the batch has.
    #[track_caller]
    pub(crate) fn backward_part(&mut self, loss: &Tensor, samples: f64) -> Result<()> {
        let averages = self.no_sync.get() == 0;
        self.reducer.with_state(|state| {
            state.check_weight(samples, averages)?;
            state.weight = Some(Weight::whole(samples));
            Ok::<(), Error>(())
        })?;
        backward::run(loss, &[self], BackwardOptions::default(), Location::caller())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_batches_are_taken_as_they_are() {
        let mut weight = Weight::default();
        let mut factors = |samples: &[f64]| -> Vec<f64> {
            weight = Weight::default();
            let mut add = |&samples: &f64| {
                let factor = weight.factor(samples);
                weight.add(samples);
                factor
            };
            samples.iter().map(&mut add).collect()
        };
        assert_eq!(factors(&[7.0; 3]), [1.0; 3]);
        assert_eq!(factors(&[0.0, 4.0, 1.0, 0.0]), [0.0, 1.0, 0.25, 0.0]);
        assert_eq!((weight.samples, weight.unit), (5.0, 4.0));
    }
}
