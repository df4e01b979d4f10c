//! Averaging of gradients weighted by their numbers of samples.

use std::panic::Location;

use tch::Tensor;

use super::DistributedDataParallel;
use super::backward::{self, Averaged, BackwardOptions};
use super::layout::ParamSlot;
use super::reducer::State;
use crate::error::{Error, Result};
use crate::optim::GradState;
use crate::process_group::check_weight;

/// The number of samples in the gradients of this rank.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Weight {
    /// The samples of all batches since the last backward that averaged.
    pub samples: f64,
    /// The samples of the first of these batches that has any. Its loss is not scaled. Each other loss is multiplied by
    /// the ratio of its samples to this number.
    unit: f64,
    /// Whether this backward has a weight. A backward without one must not average gradients that have weights.
    is_called: bool,
}

impl Weight {
    /// Returns the factor for the loss of a batch of `samples` samples.
    fn factor(&self, samples: f64) -> f64 {
        match self.unit {
            _ if samples == 0.0 => 0.0, // no weight, even as the first batch
            0.0 => 1.0,
            unit => samples / unit,
        }
    }

    /// Adds a batch of `samples` samples.
    fn add(&mut self, samples: f64) {
        (self.samples, self.is_called) = (self.samples + samples, true);
        if self.unit == 0.0 {
            self.unit = samples;
        }
    }

    /// Returns the weight of a whole step of `samples` samples, whose losses are already multiplied.
    fn whole(samples: f64) -> Self {
        Self { samples, unit: samples, is_called: true }
    }

    /// Scales the `gradients` of all batches to their mean over the samples. Sets them to zero without samples, even if
    /// they are not finite.
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
    /// Returns an error if a backward with this weight is not possible.
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

/// Returns `loss`, the mean over `samples` samples, scaled for the weights of the `models`. Adds the samples to the
/// weights.
///
/// # Errors
/// [`Error::Input`]; the weights are then unchanged.
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
            // Without any samples in the step all gradients become zeros in `apply`.
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
    /// Starts a backward; from now on hooks may be called.
    ///
    /// # Errors
    /// [`Error::Input`] if it averages gradients with weights but has no weight itself.
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

    /// Ends a backward's autograd; from now on no hooks are called.
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
    /// Computes the gradients of `loss`, the mean loss of `samples` samples, and averages them over the samples of all
    /// ranks. [`backward`](Self::backward) averages over the ranks instead. A collective that all ranks must call.
    ///
    /// With batches of different sizes the mean of the ranks' means is not the mean over all samples. A sample in a
    /// small batch would count more than one in a large batch. Here each rank's gradient is weighted by its number of
    /// samples. N ranks then give the result of one rank on all samples, up to rounding. With equal numbers of samples
    /// the gradients are those of `backward`, to the bit. PyTorch has no such method.
    ///
    /// Within [`no_sync`](Self::no_sync) the samples add up over the batches, which may also differ in size. Every
    /// batch's `loss` is its own mean, not divided by the number of batches. Gradients that a plain `backward` adds
    /// within `no_sync` count as part of the loss of the first batch with samples.
    ///
    /// A rank without samples passes 0. The gradients of that batch are ignored, even if they are not finite. Within
    /// [`join`](Self::join) a rank that has run out has 0 samples, whatever
    /// [`divide_by_initial_world_size`](super::JoinOptions::divide_by_initial_world_size) says.
    ///
    /// # Errors
    /// Those of [`backward`](Self::backward). [`Error::Input`] if `samples` is negative or not finite, if all ranks
    /// together have none, or if a communication hook does not [weigh](super::CommHook::weighs). Also within `no_sync`
    /// while the averaged gradients of an earlier step remain. [`Error::Mismatch`] if another rank calls `backward`.
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

    /// Runs [`backward_weighted`](Self::backward_weighted) for one batch of a step of `samples` samples. The caller has
    /// divided `loss` by `samples` and multiplied it by the batch's number of samples.
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
