//! Validation: loss and accuracy on samples that the model is not trained on.

use std::f64::consts::LN_2;

use anyhow::Result;
use tch::{Device, Kind, Tensor};

use crate::data::{Batch, DataLoader};
use crate::error::Error;
use crate::ffi::TorchResult;
use crate::models::Forward;
use crate::operation::Operation;
use crate::process_group::{ProcessGroup, ReduceOp};
use crate::records::ValidationMetrics;
use crate::trainer::find_non_finite::closure_error;
use crate::trainer::{Callback, Epoch, LossParts, TrainContext};

/// Validates after some of the epochs.
#[derive(Debug)]
pub(in crate::trainer) struct Validation {
    pub loader: DataLoader,
    /// Epochs between validations.
    pub every: u64,
}

impl<M: Forward> Callback<M> for Validation {
    /// Validates if due, or if this was the last epoch. A collective in that case.
    ///
    /// # Errors
    /// [`Error::NonFinite`](crate::Error::NonFinite) when the loss is not finite.
    fn on_epoch_end(&mut self, context: &mut TrainContext<M>, epoch: &mut Epoch) -> Result<()> {
        let epochs = context.state.epoch;
        if epochs.is_multiple_of(self.every) || epochs >= context.max_epochs {
            epoch.validation = Some(self.validate(context, epoch.epoch)?);
        }
        Ok(())
    }
}

impl Validation {
    /// Validates after the epoch `epoch`. A collective.
    fn validate<M: Forward>(
        &self,
        context: &mut TrainContext<M>,
        epoch: u64,
    ) -> Result<ValidationMetrics> {
        context.group().enter_phase(Operation::Validation, epoch);
        let sums = self.sums_of_batches(context)?;
        let has_names = context.criterion.has_own_loss() || context.criterion.has_metrics();
        let (names, totals) = sums.of_all_ranks(context.group(), has_names)?;
        let loss = totals[0] / totals[2];
        if !loss.is_finite() {
            return Err(context.nonfinite_validation(loss)?.into());
        }
        let means = totals[3..].iter().map(|sum| sum / totals[2]);
        let classifies = context.criterion.classifies();
        let is_text = classifies && context.tokens_per_sample.get().is_some_and(Option::is_some);
        let state = &mut context.state;
        let metrics = ValidationMetrics {
            step: state.step,
            epoch,
            loss,
            bits_per_token: is_text.then_some(loss / LN_2),
            accuracy: classifies.then(|| totals[1] / totals[2]),
            metrics: names.into_iter().zip(means).collect(),
            best: state.best.as_ref().is_none_or(|best| loss < best.loss),
        };
        state.validations_since_best += 1;
        if metrics.best {
            state.best = Some(metrics.clone());
            state.validations_since_best = 0;
        }
        context.group().end_phase();
        Ok(metrics)
    }

    /// Returns the sums over the batches of this rank.
    fn sums_of_batches<M: Forward>(&self, context: &mut TrainContext<M>) -> Result<Sums> {
        let device = context.group().device();
        let classifies = context.criterion.classifies();
        let mut sums = Sums::default();
        for (index, batch) in self.loader.epoch(0)?.enumerate() {
            let batch = batch?;
            let _autocast = context.autocast()?;
            let added = tch::no_grad(|| -> crate::error::Result<()> {
                let output = context.forward(&batch, false);
                let count = context.criterion.count_of(&batch)?;
                let measured = context.criterion.measure(&output, &batch)?;
                if count == 0 {
                    return Ok(());
                }
                let names = measured.0[1..].iter().map(|(name, _)| *name).collect();
                let totals = batch_totals(&batch, &output, &measured, classifies, count, device);
                sums.add(names, totals.doing(DOING)?)
            });
            added.map_err(|error| {
                closure_error(error, &self.loader.samples(0, 0, index, 1).unwrap_or_default())
            })?;
        }
        Ok(sums)
    }
}

/// The sums over this rank's batches, in float64 on the device.
#[derive(Default)]
struct Sums {
    /// The names of all sums but the first three.
    names: Vec<&'static str>,
    /// The sum of [`batch_totals`]. `None` before the first batch that counts.
    totals: Option<Tensor>,
}

impl Sums {
    /// Adds the `totals` of a batch.
    fn add(&mut self, names: Vec<&'static str>, totals: Tensor) -> crate::error::Result<()> {
        let Some(sums) = &mut self.totals else {
            (self.names, self.totals) = (names, Some(totals));
            return Ok(());
        };
        if self.names != names {
            return Err(differ(&self.names, &names));
        }
        sums.f_add_(&totals).map(drop).doing(DOING)
    }

    /// Returns the names, and the sums over all ranks. Without `has_names` no rank has names. A collective.
    fn of_all_ranks(
        self,
        group: &ProcessGroup,
        has_names: bool,
    ) -> crate::error::Result<(Vec<String>, Vec<f64>)> {
        // A rank without samples knows no names.
        let owned = |_: &Tensor| self.names.iter().map(|&name| String::from(name)).collect();
        let mine: Option<Vec<String>> = self.totals.as_ref().map(owned);
        let all = if has_names { group.all_gather_object(&mine)? } else { vec![mine] };
        let mut all = all.into_iter().flatten();
        let names = all.next().unwrap_or_default();
        if let Some(other) = all.find(|other| *other != names) {
            return Err(differ(&names, &other));
        }
        let zeros = || Tensor::f_zeros([3 + names.len() as i64], (Kind::Double, group.device()));
        let mut totals = self.totals.map_or_else(zeros, Ok).doing(DOING)?;
        group.all_reduce(&mut totals, ReduceOp::Sum)?;
        group.synchronize()?;
        Ok((names, Vec::<f64>::try_from(totals).doing(DOING)?))
    }
}

fn differ<T: AsRef<str>>(some: &[T], others: &[T]) -> Error {
    let list = |names: &[T]| names.iter().map(T::as_ref).collect::<Vec<_>>().join(", ");
    Error::mismatch(format!(
        "the loss has other parts in one batch than in another: {} and {}; return the same parts for every batch",
        list(some),
        list(others)
    ))
}

/// Returns the sum of a batch's losses, the number of correct predictions (0 unless the model classifies), `count`, what
/// the batch counts as, and the sums of what has a name, in float64 on `device`.
fn batch_totals(
    batch: &Batch,
    output: &Tensor,
    measured: &LossParts,
    classifies: bool,
    count: usize,
    device: Device,
) -> Result<Tensor, tch::TchError> {
    let count = count as f64;
    // A metric may be a number of the CPU.
    let weighed =
        |value: &Tensor| value.f_to_device(device)?.f_to_kind(Kind::Double)?.f_mul_scalar(count);
    let totals = measured.0.iter().map(|(_, value)| weighed(value));
    let mut totals = totals.collect::<Result<Vec<_>, _>>()?;
    let correct = if classifies {
        let correct = output.f_argmax(-1, false)?.f_eq_tensor(&batch.targets)?;
        // A sequence counts with the part of its tokens that are correct.
        let correct = correct
            .f_sum(Kind::Double)?
            .f_div_scalar(batch.tokens_per_sample().unwrap_or(1) as f64)?;
        // As the loss, it is weighed by what the batch counts as, usually its samples.
        match batch.len() as f64 {
            len if len == count => correct,
            len => correct.f_mul_scalar(count / len)?,
        }
    } else {
        totals[0].f_zeros_like()?
    };
    let all = totals[0].f_full_like(count)?;
    totals.splice(1..1, [correct, all]);
    Tensor::f_stack(&totals, 0)
}

/// The action that the errors of libtorch name.
const DOING: &str = "validation";
