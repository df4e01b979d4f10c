//! Compares two records, step by step and within a step in the order of computation: up to the first hash that differs, and up
//! to the first tensor that is far.

use std::collections::BTreeMap;

use strum::{EnumIter, IntoEnumIterator, IntoStaticStr};

use crate::diff::Refused;
use crate::distance::{Distances, Verdict};
use crate::read::{Lines, Ranks, Record};
use crate::record::{ModuleTensor, StepFingerprint, StepOfRank, TensorFingerprint, TensorShape};

/// A part of a step. The order is that of computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub(crate) enum Stage {
    Samples,
    Batch,
    /// What modules return.
    Outputs,
    Loss,
    /// The gradients of what modules return.
    Backward,
    Gradients,
    Averages,
    #[strum(serialize = "lr")]
    LearningRate,
    Parameters,
    Buffers,
}

impl Stage {
    /// Returns whether only runs with `--record-modules` have it.
    pub(crate) fn is_of_modules(self) -> bool {
        matches!(self, Self::Outputs | Self::Backward)
    }
}

/// The ranks that differ in a stage; none if it is the same on all that both records have.
#[derive(Debug, Default)]
pub(crate) struct Difference {
    /// Each rank with the names of A's tensors that differ, in the order of computation; of a batch's tensors for its stage.
    /// No names for stages without tensors.
    pub ranks: Vec<(usize, Vec<String>)>,
    /// The ranks of which one of the records has nothing to compare.
    pub unknown: Vec<usize>,
}

/// Two tensors of the records that belong together: the name of A's, and the places of both.
#[derive(Debug)]
pub(crate) struct Pair {
    pub name: String,
    places: [usize; 2],
    /// The elements of the tensor.
    numel: usize,
}

/// A tensor of a step that both records have.
pub(crate) struct Compared<'a> {
    pub name: &'a str,
    pub a: &'a TensorFingerprint,
    pub b: &'a TensorFingerprint,
    /// The elements of the tensor, which may be more than those of the fingerprint.
    pub numel: usize,
    /// Whether the runs have it in other shapes, or one has none. The fingerprints do not say more then.
    pub is_unlike: bool,
}

impl Compared<'_> {
    /// Returns whether the hashes differ; `None` if they are of other parts.
    fn differs(&self) -> Option<bool> {
        if self.is_unlike {
            return Some(true);
        }
        (self.a.part == self.b.part).then(|| self.a.hash != self.b.hash)
    }
}

/// The place where two records part.
#[derive(Debug)]
pub(crate) struct Parting {
    /// The step; the state before it if `is_start`.
    pub step: u64,
    pub is_start: bool,
    /// What the comparison of each stage of that step found; `None` if one of the records has nothing to compare.
    pub stages: BTreeMap<Stage, Option<Difference>>,
    /// The ranks that did not end the step in one of the runs.
    pub stopped: Vec<usize>,
}

impl Parting {
    /// Returns the first stage that differs.
    pub(crate) fn first(&self) -> Option<(Stage, &Difference)> {
        let mut known = self.stages.iter().filter_map(|(stage, it)| Some((*stage, it.as_ref()?)));
        known.find(|(_, difference)| !difference.ranks.is_empty())
    }
}

/// What the comparison of two records found.
#[derive(Debug)]
pub(crate) struct Comparison<'a> {
    /// A and B.
    pub records: [&'a Record; 2],
    pub parameters: Vec<Pair>,
    pub buffers: Vec<Pair>,
    /// Whether the names differ, so that the parameters belong together by their order.
    pub by_order: bool,
    /// The common steps before the parting.
    pub equal_steps: Vec<u64>,
    /// Whether both runs have recorded their start, and it is equal.
    pub has_equal_start: bool,
    /// The first place at which hashes differ.
    pub parting: Option<Parting>,
    /// What the distances say.
    pub verdict: Verdict,
    /// The place at which a tensor is far for the first time, if the verdict names one. Only what is far is in it.
    pub far: Option<Parting>,
}

impl<'a> Comparison<'a> {
    /// Compares the records A and B. What is farther than `rtol`, relative to the norm, may be far.
    ///
    /// # Errors
    /// If the models differ, or if the records have no step and no start in common.
    pub(crate) fn of([a, b]: [&'a Record; 2], rtol: f64) -> Result<Self, Refused> {
        let mut comparison = Self::of_models([a, b])?;
        let common = |of_a: &Lines, of_b: &Lines| -> Vec<u64> {
            of_a.keys().filter(|step| of_b.contains_key(step)).copied().collect()
        };
        let (starts, steps) = (common(&a.starts, &b.starts), common(&a.steps, &b.steps));
        if starts.is_empty() && steps.is_empty() {
            return Err(Refused::new(format!(
                "{} and {} have no step in common, so they cannot be compared; record the same steps (--record-every, \
                 --resume)",
                a.name, b.name
            )));
        }
        let start = starts.into_iter().take(1).map(|step| (step, true));
        let places: Vec<(u64, bool)> =
            start.chain(steps.into_iter().map(|step| (step, false))).collect();
        for &(step, is_start) in &places {
            let differs = |compared: &[Compared<'_>]| {
                compared.iter().map(Compared::differs).collect::<Vec<_>>()
            };
            let parting = comparison.parting_at(step, is_start, &differs, &|a, b| a != b);
            if parting.first().is_some() {
                comparison.parting = Some(parting);
                break;
            }
            // Of a step that is not whole, a rank that has come further may show the difference.
            if is_start {
                comparison.has_equal_start = true;
            } else if parting.stopped.is_empty() {
                comparison.equal_steps.push(step);
            }
        }
        if comparison.parting.is_some() {
            comparison.verdict = Verdict::of(&comparison, &places, rtol);
        }
        if let Some(far) = &comparison.verdict.far {
            let limit = far.limit;
            let is_far = |compared: &[Compared<'_>]| {
                let distances = Distances::of(far.stage, compared);
                let distances = distances.scaled.into_iter();
                distances.map(|it| it.map(|it| it > limit)).collect::<Vec<_>>()
            };
            let is_loss_far = |a: Option<f64>, b: Option<f64>| match (a, b) {
                (Some(a), Some(b)) => (a - b).abs() > limit * a.abs().max(b.abs()),
                _ => a != b,
            };
            let (step, is_start, first) = (far.step, far.is_start, far.stage);
            let mut parting = comparison.parting_at(step, is_start, &is_far, &is_loss_far);
            // What comes before has not jumped.
            for (stage, found) in &mut parting.stages {
                if *stage < first && found.is_some() {
                    *found = Some(Difference::default());
                }
            }
            comparison.far = Some(parting);
        }
        Ok(comparison)
    }

    /// Compares all stages of a step. `differ` says which tensors of a stage differ, `losses_differ` whether two losses do.
    fn parting_at(
        &self,
        step: u64,
        is_start: bool,
        differ: &dyn Fn(&[Compared<'_>]) -> Vec<Option<bool>>,
        losses_differ: &dyn Fn(Option<f64>, Option<f64>) -> bool,
    ) -> Parting {
        let lines = self.lines_of(step, is_start);
        let is_known =
            |stage: &Stage| !is_start || matches!(stage, Stage::Parameters | Stage::Buffers);
        let stages = Stage::iter().filter(is_known);
        let stages = stages.map(|stage| (stage, self.stage(stage, lines, differ, losses_differ)));
        let stages = stages.collect();
        let ranks = lines.into_iter().flat_map(BTreeMap::values);
        let stopped = ranks.filter(|line| !line.is_whole()).map(|line| line.rank).collect();
        Parting { step, is_start, stages, stopped }
    }

    /// Returns the lines of both records about a step, or about the state before it.
    pub(crate) fn lines_of(&self, step: u64, is_start: bool) -> [&'a Ranks; 2] {
        self.records.map(|it| &(if is_start { &it.starts } else { &it.steps })[&step])
    }

    /// Finds the tensors that belong together: by name, or by order if all shapes agree.
    fn of_models([a, b]: [&'a Record; 2]) -> Result<Self, Refused> {
        let differ = |problem: String| {
            Refused::new(format!(
                "the models differ: {problem}; compare runs of the same model, or say how the names differ (--rename)"
            ))
        };
        if a.header.whole != b.header.whole {
            let whole = if a.header.whole { a } else { b };
            return Err(Refused::new(format!(
                "only {} has whole tensors; record both runs with --record-whole (in Python: whole=True), or both without",
                whole.name
            )));
        }
        // The trained tensors of one record that the other has among those that it does not train.
        let frozen = |trained: &Record, other: &Record| {
            let frozen = |name: &String| other.header.buffers.iter().any(|it| it.name == *name);
            let mut names = trained.header.parameters.iter().map(|tensor| &tensor.name);
            let name = names.find(|name| frozen(name))?;
            Some(format!("{} trains `{name}`, and {} does not", trained.name, other.name))
        };
        if let Some(problem) = frozen(a, b).or_else(|| frozen(b, a)) {
            return Err(differ(problem));
        }
        let (of_a, of_b) = (&a.header.parameters, &b.header.parameters);
        let mut parameters = pairs(of_a, of_b);
        let by_order = parameters.len() < of_a.len().max(of_b.len());
        if by_order {
            parameters.clear();
            for (place, (one, other)) in of_a.iter().zip(of_b).enumerate() {
                if one.shape != other.shape {
                    let problem = format!("{} has {one}, {} has {other}", a.name, b.name);
                    return Err(differ(problem));
                }
                let (name, numel) = (one.name.clone(), numel(&one.shape));
                parameters.push(Pair { name, places: [place; 2], numel });
            }
            let (len, theirs) = (of_a.len(), of_b.len());
            if len != theirs {
                let (more, rest) =
                    if len > theirs { (a, &of_a[theirs..]) } else { (b, &of_b[len..]) };
                return Err(differ(format!(
                    "{} trains {len} parameters, {} trains {theirs}, and {} comes only in {}",
                    a.name, b.name, rest[0], more.name
                )));
            }
        }
        Ok(Self {
            records: [a, b],
            parameters,
            buffers: pairs(&a.header.buffers, &b.header.buffers),
            by_order,
            equal_steps: Vec::new(),
            has_equal_start: false,
            parting: None,
            verdict: Verdict::default(),
            far: None,
        })
    }

    /// Returns whether both have as many ranks. If not, only rank 0's averages, parameters and buffers and the learning rate
    /// are compared.
    pub(crate) fn has_same_ranks(&self) -> bool {
        let [a, b] = self.records;
        a.header.world_size == b.header.world_size
    }

    /// Returns how many ranks are compared in a stage: the first ones.
    pub(crate) fn ranks_of(&self, stage: Stage) -> usize {
        if self.has_same_ranks() {
            self.records[0].header.world_size
        } else {
            usize::from(stage >= Stage::Averages) // what comes before is of one rank
        }
    }

    /// Returns the step and the rank of the first difference; `None` if the runs are equal.
    pub(crate) fn first(&self) -> Option<StepOfRank> {
        if let Some(parting) = &self.parting {
            let rank = parting.first().and_then(|(_, it)| it.ranks.first()).map_or(0, |it| it.0);
            return Some(StepOfRank { step: parting.step, rank });
        }
        let failed = self.records.map(Record::failure);
        let [of_a, of_b] = failed.map(|at| at.map(|at| at.step));
        let first = failed.into_iter().flatten().min_by_key(|at| at.step);
        first.filter(|_| of_a != of_b)
    }

    /// Compares one stage of a step. Returns `None` if one of the records has nothing to compare.
    fn stage(
        &self,
        stage: Stage,
        [a, b]: [&Ranks; 2],
        differ: &dyn Fn(&[Compared<'_>]) -> Vec<Option<bool>>,
        losses_differ: &dyn Fn(Option<f64>, Option<f64>) -> bool,
    ) -> Option<Difference> {
        let ranks = self.ranks_of(stage);
        let mut found = Difference::default();
        for rank in 0..ranks {
            let lines = a.get(&rank).zip(b.get(&rank));
            let of_rank = lines.and_then(|(a, b)| match stage {
                Stage::Samples => Some((a.samples.as_ref()? != b.samples.as_ref()?).then(Vec::new)),
                Stage::Batch if has_other_batches(a, b) => Some(Some(Vec::new())),
                Stage::Loss if a.loss.is_empty() || b.loss.is_empty() => None,
                Stage::Loss => {
                    let mut losses = losses(a, b).into_iter();
                    Some(losses.any(|(a, b)| losses_differ(a, b)).then(Vec::new))
                }
                Stage::LearningRate => Some(self.rates_differ(a, b).then(Vec::new)),
                // One batch of another size makes other outputs.
                _ if stage.is_of_modules() && has_other_batches(a, b) => None,
                _ => self.tensors(stage, a, b, differ),
            });
            match of_rank {
                None => found.unknown.push(rank),
                Some(None) => {}
                Some(Some(tensors)) => found.ranks.push((rank, tensors)),
            }
        }
        (found.unknown.len() < ranks).then_some(found)
    }

    /// Compares the tensors of a stage on one rank. Returns `None` if none can be compared.
    fn tensors(
        &self,
        stage: Stage,
        a: &StepFingerprint,
        b: &StepFingerprint,
        differ: &dyn Fn(&[Compared<'_>]) -> Vec<Option<bool>>,
    ) -> Option<Found> {
        let compared = self.tensors_of(stage, a, b);
        let differ = differ(&compared);
        let known =
            compared.iter().zip(&differ).filter_map(|(it, differs)| Some((it, (*differs)?)));
        let known: Vec<(&Compared<'_>, bool)> = known.collect();
        let mut names: Vec<String> = Vec::new();
        for (compared, differs) in &known {
            if *differs && names.last().is_none_or(|last| last != compared.name) {
                names.push(compared.name.to_owned());
            }
        }
        (!known.is_empty()).then(|| Some(names).filter(|names| !names.is_empty()))
    }

    /// Returns how many modules of A have returned something, and how many of these are in B, too, in the first common step;
    /// `None` if a record has none.
    pub(crate) fn modules(&self) -> Option<[usize; 2]> {
        let [a, b] = self.records.map(|record| &record.steps);
        let (step, of_a) = a.iter().find(|(step, _)| b.contains_key(*step))?;
        let (a, b) = (of_a.values().next()?, b[step].values().next()?);
        if a.outputs.is_empty() || b.outputs.is_empty() {
            return None;
        }
        Some([a.outputs.len(), self.tensors_of(Stage::Outputs, a, b).len()])
    }

    /// Returns whether the learning rates differ in what a parameter sees.
    pub(crate) fn rates_differ(&self, a: &StepFingerprint, b: &StepFingerprint) -> bool {
        // Only a parameter of float64 sees all of its digits.
        let is_float64 = |tensor: &TensorShape| tensor.dtype == "float64";
        let mut trained = self.records[0].header.parameters.iter();
        let is_seen = trained.any(is_float64) || a.lr as f32 != b.lr as f32;
        is_seen && !is_close(a.lr, b.lr)
    }

    /// Returns the tensors of a stage that both ranks have, in the order of computation; none for stages without tensors.
    pub(crate) fn tensors_of<'b>(
        &'b self,
        stage: Stage,
        a: &'b StepFingerprint,
        b: &'b StepFingerprint,
    ) -> Vec<Compared<'b>> {
        let Self { parameters, buffers, .. } = self;
        // Backward begins at the last parameter.
        match stage {
            Stage::Samples | Stage::Loss | Stage::LearningRate => Vec::new(),
            Stage::Batch => batches(a, b),
            Stage::Outputs => modules(&a.outputs, &b.outputs),
            Stage::Backward => modules(&a.output_gradients, &b.output_gradients),
            Stage::Gradients | Stage::Averages => {
                let [of_a, of_b] = [a, b].map(|line| match stage {
                    Stage::Gradients => &line.gradients,
                    _ => &line.averages,
                });
                let are_known = [of_a, of_b].map(|it| it.iter().any(Option::is_some)) == [true; 2];
                let shows_missing = are_known && a.is_whole() && b.is_whole();
                paired(of_a, of_b, parameters.iter().rev(), shows_missing)
            }
            Stage::Parameters => paired(&a.parameters, &b.parameters, parameters.iter(), false),
            Stage::Buffers => paired(&a.buffers, &b.buffers, buffers.iter(), false),
        }
    }
}

/// What the comparison of one rank found: `None` if it is the same, else the names as in [`Difference::ranks`].
type Found = Option<Vec<String>>;

fn numel(shape: &[i64]) -> usize {
    let sizes = shape.iter().map(|&size| usize::try_from(size).unwrap_or(0));
    sizes.fold(1, usize::saturating_mul)
}

/// Pairs the tensors that both have, with the same name and shape.
fn pairs(of_a: &[TensorShape], of_b: &[TensorShape]) -> Vec<Pair> {
    let theirs: BTreeMap<(&str, &[i64]), usize> = of_b
        .iter()
        .enumerate()
        .map(|(place, tensor)| ((&*tensor.name, &*tensor.shape), place))
        .collect();
    let pair = |(place, tensor): (usize, &TensorShape)| {
        let theirs = *theirs.get(&(&*tensor.name, &*tensor.shape))?;
        let numel = numel(&tensor.shape);
        Some(Pair { name: tensor.name.clone(), places: [place, theirs], numel })
    };
    of_a.iter().enumerate().filter_map(pair).collect()
}

/// Returns the tensors of `pairs` that both records have; if it `shows_missing`, also those that one has.
fn paired<'a>(
    a: &'a [Option<TensorFingerprint>],
    b: &'a [Option<TensorFingerprint>],
    pairs: impl Iterator<Item = &'a Pair>,
    shows_missing: bool,
) -> Vec<Compared<'a>> {
    let compared = |pair: &'a Pair| {
        let [of_a, of_b] = pair.places;
        let (a, b) = (a.get(of_a)?.as_ref(), b.get(of_b)?.as_ref());
        let is_unlike = shows_missing && a.is_some() != b.is_some();
        let (a, b) = if is_unlike { (a.or(b)?, b.or(a)?) } else { (a?, b?) };
        let (name, numel) = (&*pair.name, pair.numel);
        Some(Compared { name, a, b, numel, is_unlike })
    };
    pairs.filter_map(compared).collect()
}

/// Returns the losses that belong together: of each batch, or the means if a run has split its batch into others.
pub(crate) fn losses(a: &StepFingerprint, b: &StepFingerprint) -> Vec<(Option<f64>, Option<f64>)> {
    let mean = |losses: &[Option<f64>]| {
        let sum: f64 = losses.iter().map(|loss| loss.unwrap_or(f64::NAN)).sum();
        Some(sum / losses.len() as f64).filter(|mean| mean.is_finite())
    };
    if a.loss.len() == b.loss.len() {
        a.loss.iter().copied().zip(b.loss.iter().copied()).collect()
    } else if a.loss.is_empty() || b.loss.is_empty() {
        Vec::new()
    } else {
        vec![(mean(&a.loss), mean(&b.loss))]
    }
}

/// Returns whether one rank has other batches than the other, so that their tensors cannot be compared one by one.
pub(crate) fn has_other_batches(a: &StepFingerprint, b: &StepFingerprint) -> bool {
    let of = |line: &StepFingerprint| line.batch.as_ref().map(Vec::len);
    let has_losses = !a.loss.is_empty() && !b.loss.is_empty();
    of(a).zip(of(b)).is_some_and(|(a, b)| a != b) || (has_losses && a.loss.len() != b.loss.len())
}

/// Returns the tensors of the batches of a step. Each batch has inputs, targets, and further inputs.
fn batches<'a>(a: &'a StepFingerprint, b: &'a StepFingerprint) -> Vec<Compared<'a>> {
    const NAMES: [&str; 6] =
        ["inputs", "targets", "more_inputs.0", "more_inputs.1", "more_inputs.2", "more_inputs.3"];
    let (Some(of_a), Some(of_b)) = (&a.batch, &b.batch) else { return Vec::new() };
    let tensors = (of_a.len() / a.loss.len().max(b.loss.len()).max(1)).max(1);
    let mut compared: Vec<(usize, Compared<'_>)> = Vec::new();
    for (place, (a, b)) in of_a.iter().zip(of_b).enumerate() {
        let tensor = place % tensors;
        let name = NAMES.get(tensor).copied().unwrap_or("more_inputs");
        let compared_tensor = Compared { name, a, b, numel: usize::MAX, is_unlike: false };
        compared.push((tensor, compared_tensor));
    }
    compared.sort_by_key(|(tensor, _)| *tensor);
    compared.into_iter().map(|(_, compared)| compared).collect()
}

/// Returns the tensors of modules that belong together: by the name of the module, and how often it has been called before;
/// by order if no name is in both, and all shapes agree.
fn modules<'a>(of_a: &'a [ModuleTensor], of_b: &'a [ModuleTensor]) -> Vec<Compared<'a>> {
    let compared = |a: &'a ModuleTensor, b: &'a ModuleTensor| Compared {
        name: &a.module,
        a: &a.tensor,
        b: &b.tensor,
        numel: numel(&a.shape),
        is_unlike: numel(&a.shape) != numel(&b.shape),
    };
    let mut theirs: BTreeMap<&str, Vec<&ModuleTensor>> = BTreeMap::new();
    for tensor in of_b.iter().rev() {
        theirs.entry(&tensor.module).or_default().push(tensor);
    }
    let mut found = Vec::new();
    for a in of_a {
        let b = theirs.get_mut(&*a.module).and_then(Vec::pop);
        found.extend(b.map(|b| compared(a, b)));
    }
    let shapes = |tensors: &'a [ModuleTensor]| tensors.iter().map(|tensor| &tensor.shape);
    if found.is_empty() && shapes(of_a).eq(shapes(of_b)) {
        found.extend(of_a.iter().zip(of_b).map(|(a, b)| compared(a, b)));
    }
    found
}

/// Returns whether two numbers are the same up to the rounding of a few operations in float64.
pub(crate) fn is_close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-12 * a.abs().max(b.abs())
}
