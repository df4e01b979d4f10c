//! Compares two records, step by step and within a step in the order of computation, up to the first difference.

use std::collections::BTreeMap;

use strum::{EnumIter, IntoEnumIterator, IntoStaticStr};

use super::read::{Lines, Ranks, Record};
use engine::error::{Error, Result};
use engine::events::{StepFingerprint, StepOfRank, TensorHash, TensorShape};

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

/// The ranks that differ in a stage; none if it is the same on all that both records have.
#[derive(Debug, Default)]
pub(super) struct Difference {
    /// Each rank with the names of A's tensors that differ, in the order of computation; of a batch's tensors for its stage.
    /// No names for stages without tensors.
    pub ranks: Vec<(usize, Vec<String>)>,
    /// The ranks of which one of the records has nothing to compare.
    pub unknown: Vec<usize>,
}

/// Two tensors of the records that belong together: the name of A's, and the places of both.
#[derive(Debug)]
pub(super) struct Pair {
    pub name: String,
    places: [usize; 2],
}

/// The place where two records part.
#[derive(Debug)]
pub(super) struct Parting {
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
    pub(super) fn first(&self) -> Option<(Stage, &Difference)> {
        let mut known = self.stages.iter().filter_map(|(stage, it)| Some((*stage, it.as_ref()?)));
        known.find(|(_, difference)| !difference.ranks.is_empty())
    }
}

/// What the comparison of two records found.
#[derive(Debug)]
pub(super) struct Comparison<'a> {
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
    pub parting: Option<Parting>,
}

impl<'a> Comparison<'a> {
    /// Compares the records A and B.
    ///
    /// # Errors
    /// [`Error::Input`] if the models differ, or if the records have no step and no start in common.
    pub(super) fn of([a, b]: [&'a Record; 2]) -> Result<Self> {
        let mut comparison = Self::of_models([a, b])?;
        let common = |of_a: &Lines, of_b: &Lines| -> Vec<u64> {
            of_a.keys().filter(|step| of_b.contains_key(step)).copied().collect()
        };
        let (starts, steps) = (common(&a.starts, &b.starts), common(&a.steps, &b.steps));
        if starts.is_empty() && steps.is_empty() {
            return Err(Error::mismatch(format!(
                "{} and {} have no step in common, so they cannot be compared; record the same steps (--record-every, \
                 --resume)",
                a.name, b.name
            )));
        }
        let start = starts.into_iter().take(1).map(|step| (step, true));
        for (step, is_start) in start.chain(steps.into_iter().map(|step| (step, false))) {
            let lines = [a, b].map(|it| &(if is_start { &it.starts } else { &it.steps })[&step]);
            let is_known =
                |stage: &Stage| !is_start || matches!(stage, Stage::Parameters | Stage::Buffers);
            let stages = Stage::iter().filter(is_known);
            let stages = stages.map(|stage| (stage, comparison.stage(stage, lines))).collect();
            let ranks = lines.into_iter().flat_map(BTreeMap::values);
            let stopped = ranks.filter(|line| !line.is_whole()).map(|line| line.rank).collect();
            let parting = Parting { step, is_start, stages, stopped };
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
        Ok(comparison)
    }

    /// Finds the tensors that belong together: by name, or by order if all shapes agree.
    fn of_models([a, b]: [&'a Record; 2]) -> Result<Self> {
        let (of_a, of_b) = (&a.header.parameters, &b.header.parameters);
        let mut parameters = pairs(of_a, of_b);
        let by_order = parameters.len() < of_a.len().max(of_b.len());
        let mut misfit = None;
        if by_order {
            parameters.clear();
            for (place, (one, other)) in of_a.iter().zip(of_b).enumerate() {
                if one.dtype != other.dtype || one.shape != other.shape {
                    misfit = Some(format!("{} has {one}, {} has {other}", a.name, b.name));
                    break;
                }
                parameters.push(Pair { name: one.name.clone(), places: [place; 2] });
            }
        }
        // The trained tensors of one record that the other has among those that it does not train.
        let frozen = |trained: &Record, other: &Record| {
            let frozen = |name: &String| other.header.buffers.iter().any(|it| it.name == *name);
            let mut names = trained.header.parameters.iter().map(|tensor| &tensor.name);
            let name = names.find(|name| frozen(name))?;
            Some(format!("{} trains `{name}`, and {} does not", trained.name, other.name))
        };
        let (len, theirs) = (of_a.len(), of_b.len());
        let unequal = format!("{} trains {len} parameters, {} trains {theirs}", a.name, b.name);
        let unequal = (len != theirs).then_some(unequal);
        if let Some(problem) = frozen(a, b).or_else(|| frozen(b, a)).or(misfit).or(unequal) {
            return Err(Error::mismatch(format!(
                "the models differ: {problem}; compare runs of the same model"
            )));
        }
        Ok(Self {
            records: [a, b],
            parameters,
            buffers: pairs(&a.header.buffers, &b.header.buffers),
            by_order,
            equal_steps: Vec::new(),
            has_equal_start: false,
            parting: None,
        })
    }

    /// Returns whether both have as many ranks. If not, only rank 0's averages, parameters and buffers and the learning rate
    /// are compared.
    pub(super) fn has_same_ranks(&self) -> bool {
        let [a, b] = self.records;
        a.header.world_size == b.header.world_size
    }

    /// Returns the step and the rank of the first difference; `None` if the runs are equal.
    pub(super) fn first(&self) -> Option<StepOfRank> {
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
    fn stage(&self, stage: Stage, [a, b]: [&Ranks; 2]) -> Option<Difference> {
        let ranks = if self.has_same_ranks() {
            self.records[0].header.world_size
        } else {
            usize::from(stage >= Stage::Averages) // what comes before is of one rank
        };
        let mut found = Difference::default();
        for rank in 0..ranks {
            let lines = a.get(&rank).zip(b.get(&rank));
            match lines.and_then(|(a, b)| self.stage_of_rank(stage, a, b)) {
                None => found.unknown.push(rank),
                Some(None) => {}
                Some(Some(tensors)) => found.ranks.push((rank, tensors)),
            }
        }
        (found.unknown.len() < ranks).then_some(found)
    }

    /// Compares one stage of a rank. Returns `None` if one of the records has nothing to compare.
    fn stage_of_rank(
        &self,
        stage: Stage,
        a: &StepFingerprint,
        b: &StepFingerprint,
    ) -> Option<Found> {
        let Self { parameters, buffers, .. } = self;
        match stage {
            Stage::Samples => Some((a.samples.as_ref()? != b.samples.as_ref()?).then(Vec::new)),
            Stage::Batch => batches(a, b),
            Stage::Loss if a.loss.is_empty() || b.loss.is_empty() => None,
            Stage::Loss => Some((a.loss != b.loss).then(Vec::new)),
            // Backward begins at the last parameter.
            Stage::Gradients => tensors(&a.gradients, &b.gradients, parameters.iter().rev()),
            Stage::Averages => tensors(&a.averages, &b.averages, parameters.iter().rev()),
            Stage::LearningRate => {
                // Only a parameter of float64 sees all of its digits.
                let is_float64 = |tensor: &TensorShape| tensor.dtype == "float64";
                let mut trained = self.records[0].header.parameters.iter();
                let is_seen = trained.any(is_float64) || a.lr as f32 != b.lr as f32;
                Some((is_seen && !is_close(a.lr, b.lr)).then(Vec::new))
            }
            Stage::Parameters => tensors(&a.parameters, &b.parameters, parameters.iter()),
            Stage::Buffers => tensors(&a.buffers, &b.buffers, buffers.iter()),
        }
    }
}

/// Pairs the tensors that both have, with the same name, dtype and shape.
fn pairs(of_a: &[TensorShape], of_b: &[TensorShape]) -> Vec<Pair> {
    let pair = |(place, tensor): (usize, &TensorShape)| {
        let theirs = of_b.iter().position(|other| other == tensor)?;
        Some(Pair { name: tensor.name.clone(), places: [place, theirs] })
    };
    of_a.iter().enumerate().filter_map(pair).collect()
}

/// What the comparison of one rank found: `None` if it is the same, else the names as in [`Difference::ranks`].
type Found = Option<Vec<String>>;

/// Compares the batches of a step. Each has inputs, targets, and further inputs.
fn batches(a: &StepFingerprint, b: &StepFingerprint) -> Option<Found> {
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
    let name = |tensor| match tensor {
        0 => "inputs".to_owned(),
        1 => "targets".to_owned(),
        more => format!("more_inputs.{}", more - 2),
    };
    Some(Some((0..tensors).filter(differ).map(name).collect()))
}

/// Returns whether two numbers are the same up to the rounding of a few operations in float64.
pub(super) fn is_close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-12 * a.abs().max(b.abs())
}

/// Compares the hashes of `pairs` of tensors that both records have. `None` if there are none.
fn tensors<'a>(
    a: &[Option<TensorHash>],
    b: &[Option<TensorHash>],
    pairs: impl Iterator<Item = &'a Pair>,
) -> Option<Found> {
    let is_same = |pair: &'a Pair| Some((pair, a[pair.places[0]]? == b[pair.places[1]]?));
    let known: Vec<(&Pair, bool)> = pairs.filter_map(is_same).collect();
    let differ = known.iter().filter(|(_, same)| !same).map(|(pair, _)| pair.name.clone());
    let differ: Vec<String> = differ.collect();
    (!known.is_empty()).then(|| Some(differ).filter(|differ| !differ.is_empty()))
}
