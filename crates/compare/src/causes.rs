//! Causes that can be read off two records: known mistakes of loops that train in parallel.

use crate::comparison::{Comparison, Difference, Parting, Stage, losses};
use crate::read::{Ranks, Record};
use crate::record::{StepFingerprint, TensorFingerprint};

/// Two numbers that are as near as this are the same here: up to rounding in float32.
const NEARLY: f64 = 2e-5;

impl Comparison<'_> {
    /// Names the cause of a difference whose first stage is `stage`, if the records show it.
    pub(crate) fn known_cause(
        &self,
        parting: &Parting,
        stage: Stage,
        found: &Difference,
    ) -> Option<String> {
        if parting.is_start {
            return None;
        }
        let lines = self.lines_of(parting.step, false);
        let is_on_all = found.ranks.len() == self.ranks_of(stage);
        match stage {
            Stage::Samples | Stage::Batch => self.repeats_epoch(parting.step),
            Stage::Loss if is_on_all => self.other_loss(lines),
            Stage::Backward | Stage::Gradients if is_on_all => self.other_scale(lines),
            Stage::Averages if is_on_all => {
                self.averages_nothing(lines).or_else(|| self.clips_otherwise(lines))
            }
            Stage::LearningRate => self.schedules_by_epoch(parting.step),
            _ => None,
        }
    }

    fn sides(&self) -> [(&'static str, &Record); 2] {
        let [a, b] = self.records;
        [("A", a), ("B", b)]
    }

    /// A sampler without `set_epoch` deals the samples of the first epoch in each.
    fn repeats_epoch(&self, step: u64) -> Option<String> {
        let repeats = |record: &Record| {
            let line = record.steps.get(&step)?.values().next()?;
            let earlier = record.steps.range(..step).filter_map(|(_, ranks)| ranks.get(&line.rank));
            let first = earlier.clone().find(|it| it.epoch == line.epoch - line.epoch.min(1))?;
            let begins_epoch = earlier.clone().all(|it| it.epoch < line.epoch);
            let data =
                |line: &StepFingerprint| (line.samples.clone(), hashes(line.batch.as_deref()));
            let is_known = line.samples.is_some() || line.batch.is_some();
            Some(begins_epoch && is_known && data(line) == data(first))
        };
        let sides = self.sides();
        let [of_a, of_b] = sides.map(|(_, record)| repeats(record) == Some(true));
        let (side, record) = if of_a == of_b { return None } else { sides[usize::from(of_b)] };
        let epoch = record.steps[&step].values().next()?.epoch;
        Some(format!(
            "{side} begins epoch {epoch} with the samples of the epoch before: call set_epoch on its sampler before each \
             epoch."
        ))
    }

    /// A sum instead of a mean, or a mean over each rank's own tokens instead of those of all ranks.
    fn other_loss(&self, [a, b]: [&Ranks; 2]) -> Option<String> {
        let mut ratios = Vec::new();
        for rank in 0..self.ranks_of(Stage::Loss) {
            let (Some(a), Some(b)) = losses(a.get(&rank)?, b.get(&rank)?).first().copied()? else {
                return None;
            };
            ratios.push(b / a);
        }
        let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
        let is_constant = ratios.iter().all(|ratio| (ratio - mean).abs() <= NEARLY * mean.abs());
        if is_constant && is_scale(mean) {
            return Some(format!(
                "B's loss is {} times A's: compare whether it is a sum or a mean, and over what.",
                number(mean)
            ));
        }
        let inverse = ratios.iter().map(|ratio| 1.0 / ratio).sum::<f64>() / ratios.len() as f64;
        let is_one = |mean: f64| (mean - 1.0).abs() <= NEARLY;
        (!is_constant && (is_one(mean) || is_one(inverse))).then(|| {
            let side = if is_one(mean) { "A" } else { "B" };
            format!(
                "The losses of the ranks differ by factors, and the mean of these is 1: {side} divides by what each rank has \
                 itself, such as its tokens, and the other run by what all ranks have. Divide by the count of all ranks, \
                 and multiply by the number of ranks, because DistributedDataParallel divides by it."
            )
        })
    }

    /// All gradients are multiplied by the same number.
    fn other_scale(&self, [a, b]: [&Ranks; 2]) -> Option<String> {
        let mut ratios = Vec::new();
        for rank in 0..self.ranks_of(Stage::Gradients) {
            for it in self.tensors_of(Stage::Gradients, a.get(&rank)?, b.get(&rank)?) {
                let (of_a, of_b) = (it.a.numbers.as_ref()?, it.b.numbers.as_ref()?);
                if of_a.norm > 0.0 {
                    ratios.push(of_b.norm / of_a.norm);
                }
            }
        }
        let mean = ratios.iter().sum::<f64>() / ratios.len().max(1) as f64;
        let is_constant = ratios.iter().all(|ratio| (ratio - mean).abs() <= NEARLY * mean.abs());
        (is_constant && is_scale(mean)).then(|| {
            format!(
                "All gradients of B are {} times those of A: compare what the loss is multiplied by, or divided by, before \
                 backward.",
                number(mean)
            )
        })
    }

    /// The ranks step with different gradients.
    fn averages_nothing(&self, lines: [&Ranks; 2]) -> Option<String> {
        let [of_a, of_b] = lines.map(|ranks| {
            let mut averages = ranks.values().map(|line| of_all(&line.averages));
            let first = averages.next().unwrap_or_default();
            averages.any(|other| other.iter().zip(&first).all(|(one, other)| one != other))
        });
        let side = if of_a == of_b { return None } else { ["A", "B"][usize::from(of_b)] };
        Some(format!(
            "In {side} each rank steps with gradients of its own: they are not averaged. Call the model that is wrapped in \
             DistributedDataParallel, not its `.module` or another function of it, and leave no_sync before the last backward."
        ))
    }

    /// One run clips the averages, the other something else.
    fn clips_otherwise(&self, lines: [&Ranks; 2]) -> Option<String> {
        let norm = |ranks: &Ranks| {
            let squares = ranks.get(&0)?.averages.iter().flatten().map(|it| {
                let numbers = it.numbers.as_ref()?;
                it.part.is_none().then(|| numbers.norm.powi(2))
            });
            Some(squares.sum::<Option<f64>>()?.sqrt())
        };
        let [a, b] = lines.map(norm);
        let (a, b) = (a?, b?);
        // Norms to which people clip.
        let is_one = |norm: f64| (norm - 1.0).abs() <= NEARLY;
        let is_clipped = |norm: f64| is_one(norm) || (is_scale(norm) && number(norm).len() <= 4);
        let (side, clipped, other) = match (is_clipped(a), is_clipped(b)) {
            (true, false) => ("A", a, b),
            (false, true) => ("B", b, a),
            _ => return None,
        };
        Some(format!(
            "In {side} all averages together have the norm {}, as after clipping, and in the other run {other:.4}: compare \
             whether both clip, and whether they do it after the average.",
            number(clipped)
        ))
    }

    /// A schedule that is stepped once an epoch, where the other one is stepped with each step.
    fn schedules_by_epoch(&self, step: u64) -> Option<String> {
        // Whether the rate changes within an epoch, in the steps up to the next epoch.
        let changes_within = |record: &Record| {
            let lines = || record.steps.values().filter_map(|ranks| ranks.values().next());
            let pairs = || {
                lines()
                    .zip(lines().skip(1))
                    .filter(|(_, next)| next.step <= step.saturating_add(100))
            };
            let changes = |is_within: bool| {
                let mut pairs =
                    pairs().filter(|(one, next)| (one.epoch == next.epoch) == is_within);
                pairs.any(|(one, next)| one.lr != next.lr)
            };
            (changes(true), changes(false))
        };
        let sides = self.sides().map(|(side, record)| (side, changes_within(record)));
        let by_epoch = |(_, (within, between)): &(&str, (bool, bool))| !*within && *between;
        let by_step = |(_, (within, _)): &(&str, (bool, bool))| *within;
        let [a, b] = &sides;
        let side = match () {
            () if by_epoch(a) && by_step(b) => a.0,
            () if by_epoch(b) && by_step(a) => b.0,
            () => return None,
        };
        Some(format!(
            "{side}'s learning rate changes between epochs only, and that of the other run with each step: compare where \
             scheduler.step() is called."
        ))
    }
}

/// Returns whether a number may be a factor that someone wrote: a whole one, one over it, or one with two decimals; but not 1.
fn is_scale(number: f64) -> bool {
    let is_near = |number: f64, other: f64| (number - other).abs() <= NEARLY * number.abs();
    // Larger ones are whole within the rounding of float32, whatever they are.
    let is_whole = |number: f64| number.abs() < 10_000.0 && is_near(number, number.round());
    let hundredths = 100.0 * number;
    let has_decimals = number.abs() < 10.0 && is_near(hundredths, hundredths.round());
    !is_near(number, 1.0)
        && number != 0.0
        && (is_whole(number) || is_whole(1.0 / number) || has_decimals)
}

/// Formats such a number.
fn number(number: f64) -> String {
    let rounded = (100.0 * number).round() / 100.0;
    if (rounded - number).abs() <= NEARLY * number.abs() {
        rounded.to_string()
    } else {
        format!("1/{}", (1.0 / number).round())
    }
}

fn hashes(tensors: Option<&[TensorFingerprint]>) -> Vec<u64> {
    tensors.unwrap_or_default().iter().map(|it| it.hash.0).collect()
}

fn of_all(tensors: &[Option<TensorFingerprint>]) -> Vec<Option<u64>> {
    tensors.iter().map(|it| it.as_ref().map(|it| it.hash.0)).collect()
}
