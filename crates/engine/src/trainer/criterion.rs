//! [`Criterion`]: what a run minimizes and measures.

use std::sync::Arc;

use tch::Tensor;

use super::Loss;
use crate::data::Batch;
use crate::error::{Error, Result, opaque_debug};
use crate::ffi::TorchResult;
use crate::runtime::panics;

/// What a run minimizes and measures: a built-in [`Loss`] or your own loss, with metrics, and a count of what a batch
/// has.
///
/// ```
/// # use ddp_mp_engine as ddp_mp;
/// use ddp_mp::prelude::*;
///
/// // The error, and a penalty that is trained on with it.
/// let criterion = Criterion::own(|output: &Tensor, targets: &Tensor| {
///     let error = output.mse_loss(targets, Reduction::Mean);
///     let size = output.square().mean(Kind::Float);
///     [("loss", &error + &size * 0.01), ("error", error), ("size", size)]
/// })
/// .metric("absolute error", |output, targets| (output - targets).abs().mean(Kind::Float));
/// # let _ = criterion;
/// ```
///
/// Closures get the model's output and the targets of a batch, and run with mixed precision if it is on. They must be
/// the same on all ranks.
#[derive(Clone)]
pub struct Criterion {
    loss: LossFunction,
    /// The metrics with their names.
    metrics: Vec<(&'static str, Arc<Metric>)>,
    count: Option<Arc<Count>>,
}

#[derive(Clone)]
enum LossFunction {
    BuiltIn(Loss),
    Own(Arc<OwnLoss>),
}

type OwnLoss = dyn Fn(&Tensor, &Tensor) -> LossParts + Send + Sync;
type Metric = dyn Fn(&Tensor, &Tensor) -> Tensor + Send + Sync;
type Count = dyn Fn(&Batch) -> usize + Send + Sync;

/// A loss, and the named parts of it to be shown. Made from a tensor, or from several with names, of which the first is
/// trained on.
#[derive(Debug)]
pub struct LossParts(pub(super) Vec<(&'static str, Tensor)>);

impl From<Tensor> for LossParts {
    fn from(loss: Tensor) -> Self {
        Self(vec![(LOSS, loss)])
    }
}

impl<const N: usize> From<[(&'static str, Tensor); N]> for LossParts {
    fn from(parts: [(&'static str, Tensor); N]) -> Self {
        Self(parts.into())
    }
}

/// The name of the loss itself.
const LOSS: &str = "loss";

impl From<Loss> for Criterion {
    fn from(loss: Loss) -> Self {
        Self { loss: LossFunction::BuiltIn(loss), metrics: Vec::new(), count: None }
    }
}

impl Criterion {
    /// Creates a criterion with your own loss: the mean over the samples of a batch, as one number, or several numbers
    /// with names. The first is trained on, and always shown as `loss`. Validation shows the others by their names.
    pub fn own<L: Into<LossParts>>(
        loss: impl Fn(&Tensor, &Tensor) -> L + Send + Sync + 'static,
    ) -> Self {
        let loss = Arc::new(move |output: &Tensor, targets: &Tensor| loss(output, targets).into());
        Self { loss: LossFunction::Own(loss), metrics: Vec::new(), count: None }
    }

    /// Adds a metric, which validation shows as `name`: the mean over the samples of a batch, as one number. Validation
    /// shows its mean over the samples of all ranks.
    #[must_use]
    pub fn metric(
        mut self,
        name: &'static str,
        metric: impl Fn(&Tensor, &Tensor) -> Tensor + Send + Sync + 'static,
    ) -> Self {
        self.metrics.push((name, Arc::new(metric)));
        self
    }

    /// Sets what a batch counts as in place of its number of samples, such as its tokens without padding. The means over
    /// an epoch, over a validation and of [`exact_mean`](super::TrainerOptions::exact_mean) weigh each batch by this
    /// count. Rates show it as tokens per second.
    #[must_use]
    pub fn count(mut self, count: impl Fn(&Batch) -> usize + Send + Sync + 'static) -> Self {
        self.count = Some(Arc::new(count));
        self
    }

    /// Returns whether the loss is a closure of the user.
    #[doc(hidden)]
    pub fn has_own_loss(&self) -> bool {
        matches!(self.loss, LossFunction::Own(_))
    }

    /// Returns whether there are metrics besides the loss.
    #[doc(hidden)]
    pub fn has_metrics(&self) -> bool {
        !self.metrics.is_empty()
    }

    /// Returns these metrics and this count with the loss of `other`.
    #[doc(hidden)]
    pub fn with_loss_of(self, other: Self) -> Self {
        Self { loss: other.loss, ..self }
    }

    /// Returns whether this is the built-in cross-entropy, whose targets are classes.
    pub(super) fn classifies(&self) -> bool {
        matches!(self.loss, LossFunction::BuiltIn(Loss::CrossEntropy))
    }

    /// Returns whether batches count as something else than their samples.
    pub(super) fn has_count(&self) -> bool {
        self.count.is_some()
    }

    /// Returns the mean loss of a batch as a tensor without dimensions, for backward; 0 for an empty batch.
    pub(super) fn loss(&self, output: &Tensor, batch: &Batch) -> Result<Tensor> {
        if let LossFunction::BuiltIn(loss) = &self.loss {
            return loss.of(output, &batch.targets);
        }
        let loss = self.loss_with_parts(output, batch)?.into_loss();
        if !loss.requires_grad() {
            return Err(Error::usage(
                "the loss has no gradient; compute it from the model's output, without detach and outside of no_grad"
                    .into(),
            ));
        }
        Ok(loss)
    }

    /// Returns the loss of a batch with its parts and all metrics. An empty batch has the loss alone, which is 0.
    pub(super) fn measure(&self, output: &Tensor, batch: &Batch) -> Result<LossParts> {
        let mut measured = self.loss_with_parts(output, batch)?;
        for (name, measure) in self.metrics.iter().filter(|_| !batch.is_empty()) {
            let what = format!("the metric `{name}`");
            let value = panics::in_closure(&what, || measure(output, &batch.targets))?;
            measured.0.push((*name, one_number(value, || what)?));
        }
        Ok(measured)
    }

    fn loss_with_parts(&self, output: &Tensor, batch: &Batch) -> Result<LossParts> {
        match &self.loss {
            LossFunction::BuiltIn(loss) => Ok(loss.of(output, &batch.targets)?.into()),
            // A mean over nothing is no number.
            LossFunction::Own(_) if batch.is_empty() => {
                let zero = output.f_sum(output.kind()).and_then(|sum| sum.f_mul_scalar(0.0));
                Ok(zero.doing("the loss of no samples")?.into())
            }
            LossFunction::Own(loss) => {
                let parts = panics::in_closure("the loss", || loss(output, &batch.targets))?;
                let parts = parts.check()?;
                if parts.0.len() > 1 {
                    self.check_names(parts.0.iter().map(|(name, _)| *name))?;
                }
                Ok(parts)
            }
        }
    }

    /// Checks that each metric has another name. The names of the loss's parts are known only later.
    pub(super) fn check(&self) -> Result<()> {
        self.check_names(std::iter::once(LOSS))
    }

    /// Checks that each metric, and each of the `parts` of the loss but the first, has another name.
    fn check_names(&self, parts: impl Iterator<Item = &'static str>) -> Result<()> {
        let mut names = parts.chain(self.metrics.iter().map(|(name, _)| *name));
        let mut taken: Vec<&str> = names.next().into_iter().collect();
        if self.classifies() {
            taken.extend(["accuracy", "bits_per_token"]);
        }
        for name in names {
            if name == LOSS {
                return Err(Error::usage(format!(
                    "a part of the loss or a metric has the name `{LOSS}`, under which the first part is shown; give it \
                     another name"
                )));
            }
            if taken.contains(&name) {
                return Err(Error::usage(format!(
                    "the name `{name}` is there twice, among the loss, its parts and the metrics; give each another \
                     name"
                )));
            }
            taken.push(name);
        }
        Ok(())
    }

    /// Returns what `batch` counts as: its samples, or what the closure says.
    pub(super) fn count_of(&self, batch: &Batch) -> Result<usize> {
        let Some(count) = self.count.as_ref().filter(|_| !batch.is_empty()) else {
            return Ok(batch.len());
        };
        let counted = panics::in_closure("the count", || count(batch))?;
        if counted == 0 {
            return Err(Error::usage(format!(
                "the count of a batch of {} samples is 0; return at least 1, or leave such samples out of the data set",
                batch.len()
            )));
        }
        Ok(counted)
    }
}

opaque_debug!(Criterion);

impl LossParts {
    /// Returns the part that is trained on. The parts must be [checked](Self::check).
    pub(super) fn into_loss(mut self) -> Tensor {
        self.0.swap_remove(0).1
    }

    /// Checks that there is a part and each is one number, and gives it no dimensions.
    pub(super) fn check(self) -> Result<Self> {
        if self.0.is_empty() {
            return Err(Error::usage(
                "the loss has no parts; return at least the one that is trained on".into(),
            ));
        }
        let has_names = self.0.len() > 1;
        let what = |name| if has_names { format!("the loss `{name}`") } else { "the loss".into() };
        let check = |(name, value)| Ok((name, one_number(value, || what(name))?));
        self.0.into_iter().map(check).collect::<Result<_>>().map(Self)
    }
}

/// Returns `value` without dimensions. Its shape is checked and its value is not: to read that would wait for the
/// device. `what` names what has returned it.
fn one_number(value: Tensor, what: impl FnOnce() -> String) -> Result<Tensor> {
    if value.dim() == 0 {
        return Ok(value);
    }
    let size = value.size();
    if size.iter().any(|&size| size != 1) {
        return Err(Error::usage(format!(
            "{} has shape {size:?}; return one number, such as its mean",
            what()
        )));
    }
    value.f_squeeze().doing("squeeze")
}
