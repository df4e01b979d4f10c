//! Backward passes through one or several wrapped models, with the averaging of their gradients.

use std::panic::Location;

use tch::Tensor;

use super::model_order::Turn;
use super::reducer::Reducer;
use crate::error::{Error, Result};
use crate::ffi;
use crate::ffi::TorchResult;
use crate::operation::Operation;
use crate::runtime::CallSite;

/// Options of a backward pass. Follows the arguments of `Tensor.backward`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct BackwardOptions {
    /// Keep the graph for another backward. That one averages too. In PyTorch it averages only after another forward,
    /// and otherwise leaves the ranks with different gradients.
    pub retain_graph: bool,
    /// The number of samples in this rank's loss, to average over the samples of all ranks: see
    /// [`backward_weighted`](super::DistributedDataParallel::backward_weighted). `None` averages over the ranks.
    pub samples: Option<f64>,
}

/// A model whose gradients [`backward`] averages: a [`DistributedDataParallel`](super::DistributedDataParallel) of any
/// module.
pub trait Averaged: sealed::Sealed {}

/// The parts of a wrapped model that a backward uses. Only this crate implements it.
pub(super) mod sealed {
    use super::{Reducer, Result};

    pub trait Sealed {
        #[doc(hidden)]
        fn reducer(&self) -> &Reducer;

        /// Returns whether gradients are averaged, which they are outside of `no_sync`.
        #[doc(hidden)]
        fn averages(&self) -> bool;

        /// Copies rank 0's buffers to all ranks if the model's options require it.
        #[doc(hidden)]
        fn broadcast_buffers(&self) -> Result<()>;
    }
}

/// Computes the gradients of a `loss` that depends on several models and averages them over all ranks. For example, a
/// generator's loss also depends on the discriminator's parameters. A collective: every rank must pass the same models
/// in the same order.
///
/// In PyTorch `loss.backward()` finds these models by itself. Here the caller passes them, because the ranks reduce
/// their buckets in this order, whichever gradients are complete first. Communication overlaps most with backward if
/// the models are in the order in which backward reaches them. A model within
/// [`no_sync`](super::Replica::no_sync) adds up gradients on its rank, while the others average.
///
/// ```
/// # fn main() -> anyhow::Result<()> {
/// use ddp_mp::{Backend, DdpOptions, DistributedDataParallel, ddp, spawn};
/// use tch::{Kind, Tensor, nn};
///
/// spawn(2, |rank| {
///     let group = rank.init_process_group(Backend::Threaded)?;
///     let wrap = |init| {
///         let vs = nn::VarStore::new(rank.device());
///         let weight = vs.root().var("weight", &[1], nn::Init::Const(init));
///         let model = DistributedDataParallel::new((), &vs, group.clone(), DdpOptions::default());
///         Ok::<_, ddp_mp::Error>((weight, model?))
///     };
///     let ((g, mut generator), (d, mut discriminator)) = (wrap(3.0)?, wrap(5.0)?);
///     let noise = Tensor::from(rank.rank() as f32 + 1.0); // 1 and 2
///     let loss = (&d * (&g * noise)).sum(Kind::Float);
///     ddp::backward(&loss, &mut [&mut discriminator, &mut generator], Default::default())?;
///     assert_eq!(g.grad().double_value(&[0]), 1.5 * 5.0);
///     assert_eq!(d.grad().double_value(&[0]), 1.5 * 3.0);
///     Ok(())
/// })?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// The errors of [`DistributedDataParallel::backward`](super::DistributedDataParallel::backward);
/// [`Error::InvalidInput`] if there is no model; [`Error::Unsupported`] if there are several models and one is within
/// [`join`](super::DistributedDataParallel::join). With [`samples`](BackwardOptions::samples) the errors of
/// [`backward_weighted`](super::DistributedDataParallel::backward_weighted), and [`Error::InvalidInput`] if the models
/// have added up batches of different samples within `no_sync`.
#[track_caller]
pub fn backward(
    loss: &Tensor,
    models: &mut [&mut dyn Averaged],
    options: BackwardOptions,
) -> Result<()> {
    let models: Vec<&dyn Averaged> = models.iter().map(|model| &**model).collect();
    run(loss, &models, options, Location::caller())
}

/// Runs [`backward`], called at `call_site`.
pub(super) fn run(
    loss: &Tensor,
    models: &[&dyn Averaged],
    options: BackwardOptions,
    call_site: CallSite,
) -> Result<()> {
    let Some(first) = models.first() else {
        return Err(Error::InvalidInput(
            "backward has no model to average; name at least one".into(),
        ));
    };
    if models.len() > 1 && models.iter().any(|model| model.reducer().state().joining.is_some()) {
        return Err(Error::Unsupported(
            "backward cannot average several models within join: a rank that has run out of inputs takes part in \
             the steps of one model; give every rank the same number of batches"
                .into(),
        ));
    }
    let weighted = options.samples.map(|samples| weigh(loss, models, samples)).transpose()?;
    let loss = weighted.as_ref().unwrap_or(loss);
    first.reducer().group().next_phase(Operation::Backward);
    let result = run_all(loss, models, options, call_site);
    if result.is_err() {
        models.iter().for_each(|model| model.reducer().give_up());
    }
    result?;
    models.iter().filter(|model| model.averages()).try_for_each(|model| model.broadcast_buffers())
}

fn run_all(
    loss: &Tensor,
    models: &[&dyn Averaged],
    options: BackwardOptions,
    call_site: CallSite,
) -> Result<()> {
    let all = || models.iter().map(|model| model.reducer());
    let averaged = || models.iter().filter(|model| model.averages()).map(|model| model.reducer());
    let mut turns = Turn::order_of(models.len());
    // Once a model reduces after backward, all later models do too, so that the order is the same on all ranks.
    let mut overlaps = true;
    for model in models {
        let (reducer, averages) = (model.reducer(), model.averages());
        overlaps &= !averages || reducer.overlaps();
        let turn = if averages { turns.following() } else { Turn::default() };
        reducer.state().begin(averages, overlaps, turn, call_site)?;
    }
    let backward = ffi::run_backward(loss, options.retain_graph);
    // A hook's error takes precedence: it is the cause if backward failed too.
    all().try_for_each(Reducer::end_of_autograd)?;
    backward?;
    all().try_for_each(|reducer| reducer.state().take_gradients())?;
    averaged().try_for_each(Reducer::reduce_rest)?;
    averaged().try_for_each(Reducer::finish)
}

/// Returns `loss`, the mean over `samples` samples, scaled for the weights of the `models`. Adds the samples to the
/// weights.
///
/// # Errors
/// [`Error::InvalidInput`]; the weights are then unchanged.
fn weigh(loss: &Tensor, models: &[&dyn Averaged], samples: f64) -> Result<Tensor> {
    let mut weight = None;
    for model in models {
        let factor = model.reducer().loss_factor(samples, model.averages())?;
        if weight.replace(factor).is_some_and(|other| other != factor) {
            return Err(Error::InvalidInput(
                "backward: one loss cannot have a weight for models that have added up different batches within \
                 no_sync; call backward for each model alone, or with all of them in every batch"
                    .into(),
            ));
        }
    }
    for model in models {
        model.reducer().state().add_samples(samples, model.averages())?;
    }
    match weight {
        Some(factor) if factor != 1.0 => loss.f_mul_scalar(factor).doing("weighting the loss"),
        _ => Ok(loss.shallow_clone()),
    }
}
