//! Compares two records, step by step and within a step in the order of computation, up to the first difference.

use std::collections::BTreeMap;

use strum::{EnumIter, IntoEnumIterator, IntoStaticStr};

use super::read::Record;
use crate::error::{Error, Result};
use crate::telemetry::{RecordedStep, RecordedTensor, StepOfRank, TensorHash};

/// A part of a step. The order is that of computation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub(super) enum Stage {
    Samples,
    Batch,
    Loss,
    Gradients,
    Averages,
    #[strum(serialize = "lr")]
    LearningRate,
    Parameters,
    Buffers,
}

/// What a comparison of one stage found.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Outcome {
    /// One of the records has nothing to compare.
    Unknown,
    Same,
    Differs(Difference),
}

/// The ranks that differ in a stage.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Difference {
    pub ranks: Vec<RankDifference>,
    /// The ranks of which one of the records has nothing to compare.
    pub unknown: Vec<usize>,
}

/// What differs on one rank.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RankDifference {
    pub rank: usize,
    /// Indices of A's tensors that differ, in the order of computation; of a batch's tensors for its stage. Empty for stages
    /// without tensors.
    pub tensors: Vec<usize>,
}

/// The tensors of two records that belong together: indices of A and of B.
#[derive(Debug)]
pub(super) struct Pairs {
    pub parameters: Vec<(usize, usize)>,
    pub buffers: Vec<(usize, usize)>,
    /// Whether the names differ, so that the parameters belong together by their order.
    pub by_order: bool,
    /// Whether a parameter is float64, and so sees all digits of the learning rate.
    pub have_float64: bool,
}

/// The place where two records part.
#[derive(Debug)]
pub(super) struct Parting {
    /// The step; the state before it if `is_start`.
    pub step: u64,
    pub is_start: bool,
    /// What the comparison of each stage of that step found.
    pub stages: BTreeMap<Stage, Outcome>,
    /// The ranks that did not end the step in one of the runs.
    pub stopped: Vec<usize>,
}

impl Parting {
    /// Returns the first stage that differs.
    pub(super) fn first(&self) -> Option<(Stage, &Difference)> {
        self.stages.iter().find_map(|(stage, outcome)| match outcome {
            Outcome::Differs(difference) => Some((*stage, difference)),
            _ => None,
        })
    }
}

/// What the comparison of two records found.
#[derive(Debug)]
pub(super) struct Comparison {
    pub pairs: Pairs,
    /// The common steps before the parting.
    pub equal_steps: Vec<u64>,
    /// Whether both runs have recorded their start, and it is equal.
    pub has_equal_start: bool,
    pub parting: Option<Parting>,
    /// Where the runs failed; `None` for a run that did not.
    pub failed: SidesOf<Option<StepOfRank>>,
    /// The steps that only A has and that only B has.
    pub only_in: SidesOf<usize>,
    /// Whether both have as many ranks. If not, only rank 0's averages, parameters and buffers and the learning rate are
    /// compared.
    pub has_same_ranks: bool,
}

/// One value for each record.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::commands) struct SidesOf<T> {
    pub a: T,
    pub b: T,
}

impl<T> SidesOf<T> {
    /// Returns the values of both, A's first.
    pub(in crate::commands) fn both(&self) -> [&T; 2] {
        [&self.a, &self.b]
    }
}

/// Compares `a` and `b`.
///
/// # Errors
/// [`Error::Input`] if the models differ, or if the records have no step and no start in common.
pub(super) fn compare(a: &Record, b: &Record) -> Result<Comparison> {
    let pairs = pair_tensors(a, b)?;
    let has_same_ranks = a.header.world_size == b.header.world_size;
    let ranks = if has_same_ranks { a.header.world_size } else { 1 };
    let common: Vec<u64> =
        a.steps.keys().filter(|step| b.steps.contains_key(step)).copied().collect();
    let mut comparison = Comparison {
        equal_steps: Vec::new(),
        has_equal_start: false,
        parting: None,
        failed: SidesOf { a: failure(a), b: failure(b) },
        only_in: SidesOf { a: a.steps.len() - common.len(), b: b.steps.len() - common.len() },
        has_same_ranks,
        pairs,
    };
    let starts: Vec<u64> =
        a.starts.keys().filter(|step| b.starts.contains_key(step)).copied().collect();
    if common.is_empty() && starts.is_empty() {
        return Err(Error::mismatch(format!(
            "{} and {} have no step in common, so they cannot be compared; record the same steps (--record-every, \
             --resume)",
            a.name, b.name
        )));
    }
    let pairs = &comparison.pairs;
    let differs = |stages: &BTreeMap<Stage, Outcome>| {
        stages.values().any(|outcome| matches!(outcome, Outcome::Differs(_)))
    };
    if let Some(&step) = starts.first() {
        let stages = stages_of_start(a, b, step, ranks, pairs);
        if differs(&stages) {
            let stopped = Vec::new();
            comparison.parting = Some(Parting { step, is_start: true, stages, stopped });
            return Ok(comparison);
        }
        comparison.has_equal_start = true;
    }
    for step in common {
        let (of_a, of_b) = (&a.steps[&step], &b.steps[&step]);
        let stages: BTreeMap<Stage, Outcome> = Stage::iter()
            .map(|stage| (stage, compare_stage(stage, of_a, of_b, ranks, has_same_ranks, pairs)))
            .collect();
        let lines = of_a.values().chain(of_b.values());
        let stopped: Vec<usize> =
            lines.filter(|line| !line.is_whole()).map(|line| line.rank).collect();
        if differs(&stages) {
            comparison.parting = Some(Parting { step, is_start: false, stages, stopped });
            break;
        }
        // Of a step that is not whole, a rank that has come further may show the difference.
        if stopped.is_empty() {
            comparison.equal_steps.push(step);
        }
    }
    Ok(comparison)
}

/// Returns the place where the run of `record` failed; `None` if it did not, or not in a recorded step.
fn failure(record: &Record) -> Option<StepOfRank> {
    if record.failed.is_some() {
        return record.failed;
    }
    let lines = || record.steps.values().flat_map(BTreeMap::values);
    if let Some(failed) = lines().find(|line| line.failed) {
        return Some(StepOfRank { step: failed.step, rank: failed.rank });
    }
    // A rank that is killed has no line of its step. The others stop in it, or in the step before, which that rank has
    // ended.
    let stopped = lines().rfind(|line| line.stopped)?.step;
    let is_step_before = record.steps[&stopped].values().any(RecordedStep::is_whole);
    let has_stopped = |rank: usize| lines().any(|line| line.stopped && line.rank == rank);
    let rank = (0..record.header.world_size).find(|&rank| !has_stopped(rank))?;
    Some(StepOfRank { step: stopped + u64::from(is_step_before), rank })
}

/// Finds the tensors that belong together: by name, or by order if all shapes agree.
fn pair_tensors(a: &Record, b: &Record) -> Result<Pairs> {
    let (of_a, of_b) = (&a.header.parameters, &b.header.parameters);
    let fits = |one: &RecordedTensor, other: &RecordedTensor| {
        one.dtype == other.dtype && one.shape == other.shape
    };
    let by_name = |of_a: &[RecordedTensor], of_b: &[RecordedTensor]| -> Vec<(usize, usize)> {
        let find =
            |tensor: &RecordedTensor| of_b.iter().position(|other| other.name == tensor.name);
        of_a.iter().enumerate().filter_map(|(i, tensor)| Some((i, find(tensor)?))).collect()
    };
    let mut parameters = by_name(of_a, of_b);
    let is_whole = parameters.len() == of_a.len() && parameters.len() == of_b.len();
    if !is_whole {
        parameters = (0..of_a.len().min(of_b.len())).map(|i| (i, i)).collect();
    }
    let misfit = parameters.iter().find(|(i, j)| !fits(&of_a[*i], &of_b[*j]));
    // The trained tensors of one record that the other has among those that it does not train.
    let frozen = |trained: &Record, other: &Record| {
        let is_frozen =
            |it: &&RecordedTensor| other.header.buffers.iter().any(|frozen| frozen.name == it.name);
        let tensor = trained.header.parameters.iter().find(is_frozen)?;
        Some(format!("{} trains `{}`, and {} does not", trained.name, tensor.name, other.name))
    };
    let misfit =
        misfit.map(|(i, j)| format!("{} has {}, {} has {}", a.name, of_a[*i], b.name, of_b[*j]));
    let unequal = || {
        let counts = (of_a.len(), of_b.len());
        let text =
            format!("{} trains {} parameters, {} trains {}", a.name, counts.0, b.name, counts.1);
        (counts.0 != counts.1).then_some(text)
    };
    if let Some(problem) = frozen(a, b).or_else(|| frozen(b, a)).or(misfit).or_else(unequal) {
        return Err(Error::mismatch(format!(
            "the models differ: {problem}; compare runs of the same model"
        )));
    }
    let mut buffers = by_name(&a.header.buffers, &b.header.buffers);
    buffers.retain(|(i, j)| fits(&a.header.buffers[*i], &b.header.buffers[*j]));
    let have_float64 = of_a.iter().any(|tensor| tensor.dtype == "float64");
    Ok(Pairs { parameters, buffers, by_order: !is_whole, have_float64 })
}

/// Compares the states before step `step`.
fn stages_of_start(
    a: &Record,
    b: &Record,
    step: u64,
    ranks: usize,
    pairs: &Pairs,
) -> BTreeMap<Stage, Outcome> {
    let (of_a, of_b) = (&a.starts[&step], &b.starts[&step]);
    let compare = |stage| {
        let outcome = each_rank(ranks, |rank| {
            let (a, b) = (of_a.get(&rank)?, of_b.get(&rank)?);
            match stage {
                Stage::Parameters => tensors(&a.parameters, &b.parameters, pairs.parameters.iter()),
                _ => tensors(&a.buffers, &b.buffers, pairs.buffers.iter()),
            }
        });
        (stage, outcome)
    };
    [Stage::Parameters, Stage::Buffers].map(compare).into()
}

/// Compares one stage of a step.
fn compare_stage(
    stage: Stage,
    a: &BTreeMap<usize, RecordedStep>,
    b: &BTreeMap<usize, RecordedStep>,
    ranks: usize,
    has_same_ranks: bool,
    pairs: &Pairs,
) -> Outcome {
    let is_of_one_rank =
        matches!(stage, Stage::Samples | Stage::Batch | Stage::Loss | Stage::Gradients);
    if is_of_one_rank && !has_same_ranks {
        return Outcome::Unknown;
    }
    each_rank(ranks, |rank| {
        let (a, b) = (a.get(&rank)?, b.get(&rank)?);
        match stage {
            Stage::Samples => values(a.samples.as_ref()?, b.samples.as_ref()?),
            Stage::Batch => batches(a, b),
            Stage::Loss if a.loss.is_empty() || b.loss.is_empty() => None,
            Stage::Loss => values(&a.loss, &b.loss),
            // Backward begins at the last parameter.
            Stage::Gradients => tensors(&a.gradients, &b.gradients, pairs.parameters.iter().rev()),
            Stage::Averages => tensors(&a.averages, &b.averages, pairs.parameters.iter().rev()),
            Stage::LearningRate => {
                let is_seen = pairs.have_float64 || a.lr as f32 != b.lr as f32;
                Some((is_seen && !is_close(a.lr, b.lr)).then(Vec::new))
            }
            Stage::Parameters => tensors(&a.parameters, &b.parameters, pairs.parameters.iter()),
            Stage::Buffers => tensors(&a.buffers, &b.buffers, pairs.buffers.iter()),
        }
    })
}

/// What the comparison of one rank found: `None` if it is the same, else as [`RankDifference::tensors`].
type Found = Option<Vec<usize>>;

/// Calls `compare` for each rank. It returns `None` where one of the records has nothing to compare.
fn each_rank(ranks: usize, compare: impl Fn(usize) -> Option<Found>) -> Outcome {
    let (mut differ, mut unknown) = (Vec::new(), Vec::new());
    for rank in 0..ranks {
        match compare(rank) {
            None => unknown.push(rank),
            Some(None) => (),
            Some(Some(tensors)) => differ.push(RankDifference { rank, tensors }),
        }
    }
    match (differ.is_empty(), unknown.len() == ranks) {
        (_, true) => Outcome::Unknown,
        (true, _) => Outcome::Same,
        (false, _) => Outcome::Differs(Difference { ranks: differ, unknown }),
    }
}

fn values<T: PartialEq>(a: &T, b: &T) -> Option<Found> {
    Some((a != b).then(Vec::new))
}

/// Compares the batches of a step. Each has inputs, targets, and further inputs.
fn batches(a: &RecordedStep, b: &RecordedStep) -> Option<Found> {
    let (of_a, of_b) = (a.batch.as_ref()?, b.batch.as_ref()?);
    if of_a == of_b {
        return Some(None);
    }
    let batches = a.loss.len().max(b.loss.len()).max(1);
    let tensors = of_a.len() / batches;
    if of_a.len() != of_b.len() || tensors * batches != of_a.len() {
        return Some(Some(Vec::new()));
    }
    let differ =
        |tensor: &usize| (*tensor..of_a.len()).step_by(tensors).any(|i| of_a[i] != of_b[i]);
    Some(Some((0..tensors).filter(differ).collect()))
}

/// Returns whether two numbers are the same up to the rounding of a few operations in float64.
pub(super) fn is_close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-12 * a.abs().max(b.abs())
}

/// Compares the hashes of `pairs` of tensors that both records have. `None` if there are none.
fn tensors<'a>(
    a: &[Option<TensorHash>],
    b: &[Option<TensorHash>],
    pairs: impl Iterator<Item = &'a (usize, usize)>,
) -> Option<Found> {
    let both: Vec<(usize, bool)> = pairs.filter_map(|&(i, j)| Some((i, a[i]? == b[j]?))).collect();
    if both.is_empty() {
        return None;
    }
    let differ: Vec<usize> = both.iter().filter(|(_, same)| !same).map(|(i, _)| *i).collect();
    Some((!differ.is_empty()).then_some(differ))
}
