//! [`Criterion`]: what a run minimizes and measures.

use std::fmt;
use std::sync::{Arc, OnceLock};

use tch::{TchError, Tensor};

use super::Loss;
use crate::data::Batch;
use crate::error::{Error, Result};
use crate::ffi::{TorchResult, fork_rng, leave_out_resize_warnings};
use crate::runtime::panics;

/// What a run minimizes and measures: a built-in [`Loss`] or your own loss, with metrics, and a count of what a batch
/// has.
///
/// ```
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
    metrics: Vec<NamedMetric>,
    count: Option<Arc<Count>>,
    /// The note on a loss of the user.
    note: Note,
}

#[derive(Clone)]
struct NamedMetric {
    name: &'static str,
    measure: Arc<Metric>,
    note: Note,
}

/// A note on a closure that compares each output with each target. It is `None` if the closure does not, and unset until a
/// batch shows which.
type Note = Arc<OnceLock<Option<String>>>;

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
pub struct LossParts(Vec<(&'static str, Tensor)>);

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
        Self::of(LossFunction::BuiltIn(loss))
    }
}

impl Criterion {
    /// Creates a criterion with your own loss: the mean over the samples of a batch, as one number, or several numbers
    /// with names. The first is trained on, and always shown as `loss`. Validation shows the others by their names.
    pub fn own<L: Into<LossParts>>(
        loss: impl Fn(&Tensor, &Tensor) -> L + Send + Sync + 'static,
    ) -> Self {
        let loss = Arc::new(move |output: &Tensor, targets: &Tensor| loss(output, targets).into());
        Self::of(LossFunction::Own(loss))
    }

    fn of(loss: LossFunction) -> Self {
        Self { loss, metrics: Vec::new(), count: None, note: Note::default() }
    }

    /// Adds a metric, which validation shows as `name`: the mean over the samples of a batch, as one number. Validation
    /// shows its mean over the samples of all ranks.
    #[must_use]
    pub fn metric(
        mut self,
        name: &'static str,
        metric: impl Fn(&Tensor, &Tensor) -> Tensor + Send + Sync + 'static,
    ) -> Self {
        self.metrics.push(NamedMetric { name, measure: Arc::new(metric), note: Note::default() });
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
    pub(crate) fn has_own_loss(&self) -> bool {
        matches!(self.loss, LossFunction::Own(_))
    }

    /// Returns whether there are metrics besides the loss.
    pub(crate) fn has_metrics(&self) -> bool {
        !self.metrics.is_empty()
    }

    /// Returns these metrics and this count with the loss of `other`.
    pub(crate) fn with_loss_of(self, other: Self) -> Self {
        Self { loss: other.loss, note: other.note, ..self }
    }

    /// Returns whether this is the built-in cross-entropy, whose targets are classes.
    pub(super) fn classifies(&self) -> bool {
        matches!(self.loss, LossFunction::BuiltIn(Loss::CrossEntropy))
    }

    /// Returns whether validation has numbers with names.
    pub(super) fn has_names(&self) -> bool {
        self.has_own_loss() || self.has_metrics()
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
        let Measured { loss, .. } = self.loss_with_parts(output, batch)?;
        if !loss.requires_grad() {
            return Err(Error::usage(
                "the loss has no gradient; compute it from the model's output, without detach and outside of no_grad"
                    .into(),
            ));
        }
        Ok(loss)
    }

    /// Returns the loss of a batch with its parts and all metrics. An empty batch has the loss alone, which is 0.
    pub(super) fn measure(&self, output: &Tensor, batch: &Batch) -> Result<Measured> {
        let mut measured = self.loss_with_parts(output, batch)?;
        for NamedMetric { name, measure, note } in self.metrics.iter().filter(|_| !batch.is_empty())
        {
            let what = format!("the metric `{name}`");
            let of = |output: &Tensor, targets: &Tensor| {
                let value = panics::in_closure(&what, || measure(output, targets))?;
                one_number(value, || what.clone())
            };
            let value = of(output, &batch.targets)?;
            look_for_broadcast(note, &what, &of, [output, &batch.targets], &value);
            measured.named.push((name, value));
        }
        Ok(measured)
    }

    fn loss_with_parts(&self, output: &Tensor, batch: &Batch) -> Result<Measured> {
        let loss = match &self.loss {
            LossFunction::BuiltIn(loss) => loss.of(output, &batch.targets)?,
            // A mean over nothing is no number.
            LossFunction::Own(_) if batch.is_empty() => {
                let zero = output.f_sum(output.kind()).and_then(|sum| sum.f_mul_scalar(0.0));
                zero.doing("the loss of no samples")?
            }
            LossFunction::Own(loss) => {
                let of = |output: &Tensor, targets: &Tensor| {
                    panics::in_closure("the loss", || loss(output, targets))?.check()
                };
                let measured = of(output, &batch.targets)?;
                if !measured.named.is_empty() {
                    self.check_names(measured.name, &measured.named)?;
                }
                let of = |output: &Tensor, targets: &Tensor| Ok(of(output, targets)?.loss);
                let tensors = [output, &batch.targets];
                look_for_broadcast(&self.note, "the loss", &of, tensors, &measured.loss);
                return Ok(measured);
            }
        };
        Ok(Measured { name: LOSS, loss, named: Vec::new() })
    }

    /// Returns the notes on the loss and on the metrics that there are.
    pub(super) fn notes(&self) -> impl Iterator<Item = &str> {
        let of_metrics = self.metrics.iter().map(|metric| &metric.note);
        [&self.note].into_iter().chain(of_metrics).filter_map(|note| note.get()?.as_deref())
    }

    /// Checks that each metric has another name. The names of the loss's parts are known only later.
    pub(super) fn check(&self) -> Result<()> {
        self.check_names(LOSS, &[])
    }

    /// Checks that each metric, and each further part of the loss, has another name. `loss` is the name of the first part.
    fn check_names(&self, loss: &'static str, parts: &[(&'static str, Tensor)]) -> Result<()> {
        let of_metrics = self.metrics.iter().map(|metric| metric.name);
        let mut taken = vec![loss];
        if self.classifies() {
            taken.extend(["accuracy", "bits_per_token"]);
        }
        for name in parts.iter().map(|(name, _)| *name).chain(of_metrics) {
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

impl fmt::Debug for Criterion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let loss: &dyn fmt::Debug = match &self.loss {
            LossFunction::BuiltIn(loss) => loss,
            LossFunction::Own(_) => &"own",
        };
        let metrics: Vec<_> = self.metrics.iter().map(|metric| metric.name).collect();
        f.debug_struct("Criterion")
            .field("loss", loss)
            .field("metrics", &metrics)
            .field("has_count", &self.has_count())
            .finish()
    }
}

/// A loss, and what is measured with it.
#[derive(Debug)]
pub(super) struct Measured {
    name: &'static str,
    pub loss: Tensor,
    /// The further parts of the loss, and the metrics, by their names.
    pub named: Vec<(&'static str, Tensor)>,
}

impl LossParts {
    /// Checks that each part is one number, and gives it no dimensions.
    pub(super) fn check(self) -> Result<Measured> {
        let has_names = self.0.len() > 1;
        let what = |name| if has_names { format!("the loss `{name}`") } else { "the loss".into() };
        let check = |(name, value)| Ok((name, one_number(value, || what(name))?));
        let mut parts = self.0.into_iter().map(check);
        let Some(first) = parts.next() else {
            return Err(Error::usage(
                "the loss has no parts; return at least the one that is trained on".into(),
            ));
        };
        let (name, loss) = first?;
        Ok(Measured { name, loss, named: parts.collect::<Result<_>>()? })
    }
}

/// Finds out whether `of`, a closure that `what` names, compares each output with each target, because libtorch repeats
/// tensors of shapes such as `[50, 1]` and `[50]`. It gave `value` for these tensors.
fn look_for_broadcast(
    note: &Note,
    what: &str,
    of: &dyn Fn(&Tensor, &Tensor) -> Result<Tensor>,
    [output, targets]: [&Tensor; 2],
    value: &Tensor,
) {
    let may = output.size() != targets.size()
        && output.numel() == targets.numel()
        && targets.numel() > 1
        && output.is_floating_point()
        && targets.is_floating_point();
    if !may {
        return;
    }
    if note.get().is_none() {
        // The random numbers of the run stay the same.
        let look = || tch::no_grad(|| is_broadcast(of, output, targets, value));
        if let Ok(Ok(Some(is_broadcast))) = fork_rng(0, look) {
            let text = is_broadcast.then(|| {
                format!(
                    "warning: {what} compares each output of a batch with each target, because the model returns the \
                     shape {:?} and the targets have {:?}; give both one shape, as with output.view_as(targets)",
                    output.size(),
                    targets.size()
                )
            });
            let _ = note.set(text); // another rank may have been first
        }
    }
    if note.get().is_some_and(Option::is_some) {
        leave_out_resize_warnings();
    }
}

/// Returns whether `of` has the same `value` for targets in another order, and another one for tensors of one shape. Returns
/// `None` if all outputs or all targets of the batch are equal.
fn is_broadcast(
    of: &dyn Fn(&Tensor, &Tensor) -> Result<Tensor>,
    output: &Tensor,
    targets: &Tensor,
    value: &Tensor,
) -> Result<Option<bool>, TchError> {
    let turned = targets.f_roll([1], [0])?;
    if turned.f_equal(targets)? || output.f_roll([1], [0])?.f_equal(output)? {
        return Ok(None);
    }
    let paired = output.f_reshape(targets.size())?;
    let (Ok(turned), Ok(paired)) = (of(output, &turned), of(&paired, targets)) else {
        return Ok(Some(false));
    };
    let value = value.f_double_value(&[])?;
    let is_same = |other: &Tensor| -> Result<bool, TchError> {
        Ok((other.f_double_value(&[])? - value).abs() <= value.abs() * 1e-5)
    };
    Ok(Some(is_same(&turned)? && !is_same(&paired)?))
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
