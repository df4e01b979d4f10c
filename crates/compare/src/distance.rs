//! How far the tensors of two runs are from each other, and whether that is rounding or a mistake.
//!
//! Rounding begins in the last digits and grows a little at each operation, in all that follows. A mistake is a jump: what goes
//! into a tensor is nearly the same in both runs, and the tensor is not. The constants are chosen so that
//! `tests/interop/close_or_far.py` tells its right runs from its wrong ones.

use std::collections::{BTreeMap, BTreeSet};

use strum::IntoEnumIterator;

use crate::PART;
use crate::comparison::{Compared, Comparison, Stage, has_other_batches, losses};
use crate::read::Ranks;
use crate::record::{StepFingerprint, TensorFingerprint};

/// A tensor that is this many times as far as all that goes into it is a jump.
const JUMP: f64 = 30.0;

/// A tensor that is nearer than this many units of rounding is no jump, whatever was before it.
const FEWEST_UNITS: f64 = 64.0;

/// The least distance that the digits of a record show.
const DIGITS: f64 = 1e-9;

/// Rounding that turns an activation such as ReLU on or off changes a gradient by as much, without being a mistake.
const SWITCHED: f64 = 0.05;

/// Tensors with smaller values than others of their sort are compared with this part of the others' root mean square: a gradient
/// that is 0, but for rounding, is not far from another one.
const FLOOR: f64 = 0.1;

/// A tensor that is this far from another one, relative to its own norm, has nothing of it but the size.
const UNRELATED: f64 = 0.1;

/// Runs whose parameters are this far from each other at the end are not close, however they came there.
const APART: f64 = 1.0;

/// Parts of the names of optimizers that make steps of a size that the gradient does not decide. Where a gradient is nothing but
/// rounding, as that of the bias before a batch norm or of an attention's keys, rounding decides their steps.
const NORMALIZING: [&str; 5] = ["ada", "lamb", "lion", "rms", "sign"];

/// What the distances of two runs say.
#[derive(Debug, Default)]
pub(crate) struct Verdict {
    /// The largest distance.
    pub largest: f64,
    /// The first place at which the distance is over the tolerance.
    pub first_over: Option<u64>,
    /// The largest distance of a parameter after each step.
    pub growth: Vec<(u64, f64)>,
    /// The first jump, if a distance is over the tolerance.
    pub far: Option<Far>,
}

/// A tensor that is far, while all before it are close.
#[derive(Debug, Clone)]
pub(crate) struct Far {
    pub step: u64,
    pub is_start: bool,
    pub stage: Stage,
    /// The name of the tensor; empty for a loss.
    pub name: String,
    pub distance: f64,
    /// The largest distance of what was computed before.
    pub before: f64,
    /// The distance from which on it is far.
    pub limit: f64,
}

impl Verdict {
    /// Follows the distances of two runs through `places`: each step, and whether it is the state before it.
    pub(crate) fn of(comparison: &Comparison<'_>, places: &[(u64, bool)], rtol: f64) -> Self {
        let mut walk = Walk::new(comparison, rtol);
        for &(step, is_start) in places {
            walk.follow(step, is_start);
        }
        let Walk { mut verdict, jump, .. } = walk;
        verdict.far = jump.filter(|_| verdict.first_over.is_some());
        verdict
    }

    /// Returns whether the runs have nothing in common at the end, although nothing has jumped.
    pub(crate) fn has_grown_apart(&self) -> bool {
        self.far.is_none() && self.growth.last().is_some_and(|(_, distance)| *distance > APART)
    }

    /// Returns the factor by which the distance of the parameters grows in a step; `None` if there are too few steps.
    pub(crate) fn factor_of_a_step(&self) -> Option<f64> {
        let grown = || self.growth.iter().filter(|(_, distance)| *distance > 0.0);
        let (first, last) = (grown().next()?, grown().next_back()?);
        let steps = last.0.checked_sub(first.0).filter(|steps| *steps >= 10)?;
        Some((last.1 / first.1).powf(1.0 / steps as f64))
    }
}

/// What is known on the way through two runs.
struct Walk<'a> {
    comparison: &'a Comparison<'a>,
    rtol: f64,
    verdict: Verdict,
    jump: Option<Far>,
    /// The largest distance of the model before the step.
    state: f64,
    /// The unit of rounding of the parameters.
    unit: f64,
    /// Whether the optimizer is [`NORMALIZING`].
    normalizes: bool,
    /// The places of the parameters in A's lines.
    places: BTreeMap<&'a str, usize>,
    /// The parameters of one dimension.
    vectors: BTreeSet<&'a str>,
    /// The lines of A about the step before, or the start.
    before: Option<&'a Ranks>,
    /// The last distance of each parameter, and the largest of its averages so far.
    of_parameters: BTreeMap<&'a str, [f64; 2]>,
    /// The parameters that rounding alone has made far, with their distances.
    by_rounding: BTreeMap<String, f64>,
    largest_loss: f64,
}

impl<'a> Walk<'a> {
    fn new(comparison: &'a Comparison<'a>, rtol: f64) -> Self {
        let header = &comparison.records[0].header;
        let optimizer = header.options.get("optimizer").and_then(|it| it.as_str()).unwrap_or("");
        let optimizer = optimizer.to_lowercase();
        let normalizes = NORMALIZING.iter().any(|part| optimizer.contains(part));
        let vectors = header.parameters.iter().filter(|it| it.shape.len() <= 1);
        Self {
            comparison,
            rtol,
            verdict: Verdict::default(),
            jump: None,
            state: 0.0,
            unit: comparison.unit_of_parameters(),
            normalizes,
            places: header
                .parameters
                .iter()
                .zip(0..)
                .map(|(it, place)| (&*it.name, place))
                .collect(),
            vectors: vectors.map(|it| &*it.name).collect(),
            before: None,
            of_parameters: BTreeMap::new(),
            by_rounding: BTreeMap::new(),
            largest_loss: 0.0,
        }
    }

    /// Follows the distances through a step, in the order of computation.
    fn follow(&mut self, step: u64, is_start: bool) {
        let comparison = self.comparison;
        let [of_a, of_b] = comparison.lines_of(step, is_start);
        // The largest distance of what each rank has computed so far.
        let mut levels = vec![self.state; comparison.records[0].header.world_size];
        let mut state = 0.0f64;
        for stage in Stage::iter() {
            if stage == Stage::Averages {
                // All ranks are in them.
                let level = levels.iter().copied().fold(0.0, f64::max);
                levels.fill(level);
            }
            let ranks = comparison.ranks_of(stage);
            for (rank, level) in levels.iter_mut().enumerate().take(ranks) {
                let Some((a, b)) = of_a.get(&rank).zip(of_b.get(&rank)) else { continue };
                for point in self.points(stage, a, b, *level) {
                    let before = point.level.unwrap_or(*level);
                    if let Some(limit) = point.limit(before)
                        && self.jump.is_none()
                    {
                        let Point { name, distance, .. } = point;
                        let name = name.to_owned();
                        let far = Far { step, is_start, stage, name, distance, before, limit };
                        self.jump = Some(far);
                    }
                    *level = level.max(point.distance);
                    if point.distance > self.rtol {
                        self.verdict.first_over.get_or_insert(step);
                    }
                    if stage >= Stage::Parameters {
                        state = state.max(point.distance);
                    }
                }
                self.verdict.largest = self.verdict.largest.max(*level);
            }
            if stage == Stage::Parameters && !is_start {
                self.verdict.growth.push((step, state));
            }
        }
        self.state = state;
        self.before = Some(of_a);
    }

    /// Returns the distances of a stage on one rank, in the order of computation, without those that rounding alone decides.
    /// `level` is the largest distance of what goes into the stage.
    fn points(
        &mut self,
        stage: Stage,
        a: &'a StepFingerprint,
        b: &'a StepFingerprint,
        level: f64,
    ) -> Vec<Point<'a>> {
        // If all before is equal to the bit, both round alike, and the parameters say how much.
        let computes_alike = level == 0.0 && a.computes_in == b.computes_in;
        let in_dtypes = [a.computes_in.as_deref(), b.computes_in.as_deref()];
        let of_dtypes = in_dtypes.into_iter().flatten().map(unit).fold(self.unit, f64::max);
        let unit = if computes_alike { self.unit } else { of_dtypes };
        let least = (FEWEST_UNITS * unit).max(DIGITS);
        let point =
            |name, distance| Point { name, distance, level: None, least, most_switched: 0.0 };
        match stage {
            Stage::Loss => {
                let mut points = Vec::new();
                for (a, b) in losses(a, b) {
                    let distance = self.distance_of_losses(a, b);
                    points.push(point("", distance));
                }
                points
            }
            // Other samples or rates are a mistake, however small the difference.
            Stage::Samples => match (&a.samples, &b.samples) {
                (Some(a), Some(b)) if a != b => vec![point("", f64::INFINITY)],
                _ => Vec::new(),
            },
            Stage::LearningRate if self.comparison.rates_differ(a, b) => {
                vec![point("", f64::INFINITY)]
            }
            Stage::Batch | Stage::Outputs | Stage::Backward if has_other_batches(a, b) => {
                Vec::new()
            }
            _ => self.points_of_tensors(stage, a, b, level, least),
        }
    }

    fn distance_of_losses(&mut self, a: Option<f64>, b: Option<f64>) -> f64 {
        match (a, b) {
            (Some(a), Some(b)) => {
                self.largest_loss = self.largest_loss.max(a.abs()).max(b.abs());
                let scale = a.abs().max(b.abs()).max(FLOOR * self.largest_loss);
                if a == b { 0.0 } else { (a - b).abs() / scale }
            }
            (None, None) => 0.0,
            _ => f64::INFINITY,
        }
    }

    fn points_of_tensors(
        &mut self,
        stage: Stage,
        a: &'a StepFingerprint,
        b: &'a StepFingerprint,
        level: f64,
        least: f64,
    ) -> Vec<Point<'a>> {
        let compared = self.comparison.tensors_of(stage, a, b);
        let distances = Distances::of(stage, &compared);
        let is_gradient = matches!(stage, Stage::Backward | Stage::Gradients | Stage::Averages);
        let mut most_switched = if is_gradient && level > 0.0 { SWITCHED } else { 0.0 };
        if stage == Stage::Buffers {
            // Running means of what such parameters have shifted.
            most_switched = JUMP * self.by_rounding.values().copied().fold(0.0, f64::max);
        }
        let noise = if stage == Stage::Parameters { self.noise(a, b) } else { BTreeSet::new() };
        let mut points = Vec::new();
        for (place, Compared { name, .. }) in compared.iter().enumerate() {
            let Some(distance) = distances.scaled[place] else { continue };
            let mut point = Point { name, distance, level: None, least, most_switched };
            match stage {
                Stage::Averages => {
                    let own = distances.own[place].unwrap_or(0.0);
                    let [_, largest] = self.of_parameters.entry(name).or_default();
                    *largest = largest.max(own);
                }
                Stage::Parameters => {
                    point.least = (FEWEST_UNITS * self.unit).max(DIGITS);
                    point.level = self.level_of_parameter(&compared[place], a, level);
                    self.of_parameters.entry(name).or_default()[0] = distance;
                }
                _ => {}
            }
            let is_by_rounding = match stage {
                Stage::Outputs => self.has_parameter_by_rounding(name),
                Stage::Gradients | Stage::Averages => distances.is_noise(place),
                Stage::Parameters => {
                    noise.contains(name)
                        || (level > 0.0 && self.normalizes && self.vectors.contains(name))
                }
                _ => false,
            };
            if !is_by_rounding {
                points.push(point);
            } else if stage == Stage::Parameters && point.limit(level).is_some() {
                self.by_rounding.insert((*name).to_owned(), distance);
            }
        }
        points
    }

    /// Returns the distance of what goes into a parameter: the last one of the parameter, and that of its averages as far as they
    /// change it. `None` if that is not known, or if the optimizer does not decide it by the gradient.
    fn level_of_parameter(
        &self,
        parameter: &Compared<'_>,
        a: &StepFingerprint,
        level: f64,
    ) -> Option<f64> {
        if self.normalizes || level == 0.0 {
            return None;
        }
        let place = *self.places.get(parameter.name)?;
        let before = self.before?.get(&a.rank)?.parameters.get(place)?.as_ref()?;
        let change = relative(before, parameter.a, 0.0)?;
        let [last, of_averages] = self.of_parameters.get(parameter.name).copied()?;
        Some(last.max(change * of_averages.max(level)))
    }

    /// Returns the parameters whose averaged gradients are nothing but rounding.
    fn noise(&self, a: &'a StepFingerprint, b: &'a StepFingerprint) -> BTreeSet<&'a str> {
        let averages = self.comparison.tensors_of(Stage::Averages, a, b);
        let distances = Distances::of(Stage::Averages, &averages);
        let places = (0..averages.len()).filter(|&place| distances.is_noise(place));
        places.map(|place| averages[place].name).collect()
    }

    /// Returns whether rounding alone has made a parameter of this module far.
    fn has_parameter_by_rounding(&self, module: &str) -> bool {
        let mut parameters = self.by_rounding.keys();
        parameters.any(|name| name.rsplit_once('.').map_or("", |(owner, _)| owner) == module)
    }
}

/// The distance of a tensor, or of a loss.
struct Point<'a> {
    name: &'a str,
    distance: f64,
    /// The distance of what goes into it, if that is known better than for all tensors of the stage.
    level: Option<f64>,
    /// The distance up to which it is no jump.
    least: f64,
    /// Likewise, if what goes into it is not equal: a larger one, for what rounding may switch.
    most_switched: f64,
}

impl Point<'_> {
    /// Returns the limit that the distance is over, if it is a jump after `level`.
    fn limit(&self, level: f64) -> Option<f64> {
        let limit = (JUMP * level).max(self.least).max(self.most_switched);
        (self.distance > limit).then_some(limit)
    }
}

/// The distances of tensors of one stage on one rank, relative to their norms. `None` where they are not known.
pub(crate) struct Distances {
    /// To the norm of the tensor itself.
    own: Vec<Option<f64>>,
    /// To that, or to the norm of others of the stage if that is much larger.
    pub scaled: Vec<Option<f64>>,
}

impl Distances {
    pub(crate) fn of(stage: Stage, compared: &[Compared<'_>]) -> Self {
        let has_floor = matches!(
            stage,
            Stage::Backward | Stage::Gradients | Stage::Averages | Stage::Parameters
        );
        let mean_square = if has_floor { mean_square(compared) } else { 0.0 };
        let mut distances = Self { own: Vec::new(), scaled: Vec::new() };
        for it in compared {
            let Compared { a, b, numel, .. } = it;
            if it.is_unlike {
                distances.own.push(Some(f64::INFINITY));
                distances.scaled.push(Some(f64::INFINITY));
                continue;
            }
            let elements = elements(a, *numel) as f64;
            distances.own.push(relative(a, b, 0.0));
            distances.scaled.push(relative(a, b, FLOOR * (mean_square * elements).sqrt()));
        }
        distances
    }

    /// Returns whether the tensor at `place` is small, and nothing but rounding.
    fn is_noise(&self, place: usize) -> bool {
        let [own, scaled] = [&self.own, &self.scaled].map(|it| it[place].unwrap_or(0.0));
        own > UNRELATED && scaled < UNRELATED * own
    }
}

/// Returns the mean of the squares of all tensors, of the run that has the smaller one.
fn mean_square(compared: &[Compared<'_>]) -> f64 {
    let (mut a, mut b, mut count) = (0.0, 0.0, 0.0);
    for compared in compared {
        if let (Some(of_a), Some(of_b)) = (&compared.a.numbers, &compared.b.numbers) {
            a += of_a.norm.powi(2);
            b += of_b.norm.powi(2);
            count += elements(compared.a, compared.numel) as f64;
        }
    }
    if count > 0.0 { f64::min(a, b) / count } else { 0.0 }
}

/// Returns how many elements a fingerprint is of.
fn elements(tensor: &TensorFingerprint, numel: usize) -> usize {
    if tensor.part.is_some() { PART } else { numel }
}

/// Returns the distance of two tensors relative to the larger norm, or to `floor` if that is larger; `None` if it is not known.
fn relative(a: &TensorFingerprint, b: &TensorFingerprint, floor: f64) -> Option<f64> {
    if a.part != b.part {
        return None;
    }
    if a.hash == b.hash {
        return Some(0.0);
    }
    let (Some(of_a), Some(of_b)) = (&a.numbers, &b.numbers) else { return Some(f64::INFINITY) };
    if of_a.nonfinite != of_b.nonfinite {
        return Some(f64::INFINITY);
    }
    let scale = of_a.norm.max(of_b.norm).max(floor);
    if scale == 0.0 {
        return Some(0.0); // zeros of another dtype
    }
    let distance = of_a.distance(of_b) / scale;
    Some(if distance.is_nan() { f64::INFINITY } else { distance })
}

impl Comparison<'_> {
    /// Returns the unit of rounding of the parameters.
    fn unit_of_parameters(&self) -> f64 {
        let trained = self.records.iter().flat_map(|it| &it.header.parameters);
        trained.map(|tensor| unit(&tensor.dtype)).fold(0.0, f64::max)
    }
}

/// Returns half the distance of 1 from the next number of a dtype.
fn unit(dtype: &str) -> f64 {
    let exponent = match dtype {
        "float64" => -53,
        "float16" | "tfloat32" => -11,
        "bfloat16" => -8,
        _ => -24,
    };
    2.0f64.powi(exponent)
}
