//! Validation: loss and accuracy on samples that the model is not trained on. Ends a run that makes no progress.

use std::collections::BTreeMap;
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
use crate::runtime::StopReason;
use crate::trainer::find_non_finite::closure_error;
use crate::trainer::{Callback, Epoch, TrainContext};

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
    /// [`Error::NonFinite`](crate::Error::NonFinite) when the loss is not finite. The rank that has the samples names them.
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
        let device = context.group().device();
        // The sum of the losses, the number of correct predictions, and what all batches count as.
        let mut totals = Tensor::f_zeros([3], (Kind::Double, device)).doing(DOING)?;
        let classifies = context.criterion.classifies();
        let mut named = NamedSums::default();
        for (index, batch) in self.loader.epoch(0)?.enumerate() {
            let batch = batch?;
            let _autocast = context.options.amp.autocast(device)?;
            let batch_totals = tch::no_grad(|| -> crate::error::Result<Tensor> {
                let output = context.forward(&batch, false);
                let count = context.criterion.count_of(&batch)?;
                let measured = context.criterion.measure(&output, &batch)?;
                named.add(&measured.named, count, device)?;
                batch_totals(&batch, &output, &measured.loss, classifies, count).doing(DOING)
            });
            let batch_totals = batch_totals.map_err(|error| {
                closure_error(error, &self.loader.samples(0, 0, index, 1).unwrap_or_default())
            })?;
            let _ = totals.f_add_(&batch_totals).doing(DOING)?;
        }
        let group = context.group();
        group.all_reduce(&mut totals, ReduceOp::Sum)?;
        group.synchronize()?;
        let totals = Vec::<f64>::try_from(totals).doing(DOING)?;
        let loss = totals[0] / totals[2];
        if !loss.is_finite() {
            return Err(context.nonfinite_validation(&self.loader, loss)?.into());
        }
        let metrics = if context.criterion.has_names() {
            named.means(group, totals[2])?
        } else {
            BTreeMap::new()
        };
        let is_text = classifies && context.tokens_per_sample.get().is_some_and(Option::is_some);
        let state = &mut context.state;
        let best = state.best.as_ref().is_none_or(|best| loss < best.loss);
        let accuracy = classifies.then(|| totals[1] / totals[2]);
        let bits_per_token = is_text.then(|| loss / LN_2);
        let metrics = ValidationMetrics {
            step: state.step,
            epoch,
            loss,
            bits_per_token,
            accuracy,
            metrics,
            best,
        };
        state.validations_since_best += 1;
        if best {
            state.best = Some(metrics.clone());
            state.validations_since_best = 0;
        }
        context.group().end_phase();
        Ok(metrics)
    }
}

/// The sums over this rank's batches of what has a name, which are kept on the device.
#[derive(Default)]
struct NamedSums {
    /// `None` before the first batch with samples.
    names: Option<Vec<&'static str>>,
    sums: Vec<Tensor>,
}

impl NamedSums {
    /// Adds the values of a batch that counts as `count`. One that counts nothing has none.
    fn add(
        &mut self,
        values: &[(&'static str, Tensor)],
        count: usize,
        device: Device,
    ) -> crate::error::Result<()> {
        if count == 0 {
            return Ok(());
        }
        let names: Vec<_> = values.iter().map(|(name, _)| *name).collect();
        let known = self.names.get_or_insert_with(|| names.clone());
        if *known != names {
            return Err(differ(known, &names));
        }
        for (index, (_, value)) in values.iter().enumerate() {
            // A metric may be a number of the CPU.
            let weigh =
                || value.f_to_device(device)?.f_to_kind(Kind::Double)?.f_mul_scalar(count as f64);
            let value = weigh().doing(DOING)?;
            match self.sums.get_mut(index) {
                Some(sum) => sum.f_add_(&value).map(drop).doing(DOING)?,
                None => self.sums.push(value),
            }
        }
        Ok(())
    }

    /// Returns the means over all ranks' batches, which together count as `count`. A collective.
    fn means(
        self,
        group: &ProcessGroup,
        count: f64,
    ) -> crate::error::Result<BTreeMap<String, f64>> {
        // A rank without samples knows no names.
        let owned = |names: Vec<&str>| names.into_iter().map(String::from).collect();
        let mine: Option<Vec<String>> = self.names.map(owned);
        let names: Vec<_> = group.all_gather_object(&mine)?.into_iter().flatten().collect();
        let Some(all) = names.first() else { return Ok(BTreeMap::new()) };
        if let Some(other) = names.iter().find(|names| *names != all) {
            return Err(differ(all, other));
        }
        let mut sums = if self.sums.is_empty() {
            Tensor::f_zeros([all.len() as i64], (Kind::Double, group.device()))
        } else {
            Tensor::f_stack(&self.sums, 0)
        }
        .doing(DOING)?;
        group.all_reduce(&mut sums, ReduceOp::Sum)?;
        let sums = Vec::<f64>::try_from(group.to_host(&sums)?).doing(DOING)?;
        Ok(all.iter().cloned().zip(sums.into_iter().map(|sum| sum / count)).collect())
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

/// Returns the sum of a batch's losses, the number of correct predictions (0 unless the model classifies), and
/// `count`, what the batch counts as, in float64 of shape `[3]`. `loss` is the mean loss.
fn batch_totals(
    batch: &Batch,
    output: &Tensor,
    loss: &Tensor,
    classifies: bool,
    count: usize,
) -> Result<Tensor, tch::TchError> {
    let count = count as f64;
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
        Tensor::f_zeros_like(loss)?
    };
    let sum = loss.f_to_kind(Kind::Double)?.f_mul_scalar(count)?;
    let count = sum.f_full_like(count)?;
    Tensor::f_stack(&[sum, correct.f_to_kind(Kind::Double)?, count], 0)
}

/// The action that the errors of libtorch name.
const DOING: &str = "validation";

/// The most validations in a row that may not improve on the best one. All ranks see the same loss, so all decide
/// alike.
#[derive(Debug)]
pub(in crate::trainer) struct EarlyStopping {
    pub patience: u64,
}

impl EarlyStopping {
    fn check<M>(&self, context: &mut TrainContext<M>) {
        if context.state.validations_since_best as u64 >= self.patience {
            context.ended_by.get_or_insert(StopReason::NoProgress);
        }
    }
}

impl<M> Callback<M> for EarlyStopping {
    /// A resumed run may have no patience left.
    fn on_train_start(&mut self, context: &mut TrainContext<M>) -> Result<()> {
        self.check(context);
        Ok(())
    }

    fn on_epoch_end(&mut self, context: &mut TrainContext<M>, _: &mut Epoch) -> Result<()> {
        self.check(context);
        Ok(())
    }
}
