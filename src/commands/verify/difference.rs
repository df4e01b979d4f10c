//! How far two trainings differ, how far rounding can have taken them apart, and the table of it.

use std::io::{self, Write};

use serde::Serialize;
use tch::Device;

use super::{ParamValues, RunResult, Variant};
use crate::config::{Config, StrategyKind};
use crate::error::{Error, Result};
use crate::launch::Placement;

/// So few tensors are told of one by one.
const FEW: usize = 4;

/// How far rounding can have taken two runs apart.
///
/// A step rounds each number of size `largest` once, and the way that a step takes it is a sum of `samples` numbers,
/// each made of sums of `width`, in which every addition rounds. That is 2^-24 of the size at most, in each of two runs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bound {
    pub steps: u64,
    /// In the batch of a step, over all ranks.
    pub samples: usize,
    /// The most numbers that go into one that a layer computes.
    pub width: usize,
    /// The largest number of the model.
    pub largest: f32,
    /// How far the run has taken the number that it took farthest.
    pub way: f32,
}

impl Bound {
    /// For runs beside this one.
    ///
    /// # Errors
    /// [`Error::Input`] where it has not come to numbers.
    pub(super) fn of(reference: &RunResult, steps: u64, samples: usize) -> Result<Self> {
        let RunResult { before, after, .. } = reference;
        let all = |tensors: &[ParamValues]| -> Vec<f32> {
            tensors.iter().flat_map(|tensor| tensor.values.iter().copied()).collect()
        };
        let (before, values) = (all(before), all(after));
        if let Some(value) = values.iter().find(|value| !value.is_finite()) {
            return Err(Error::Input(format!(
                "after {steps} steps on one rank a parameter is {value}, and nothing can be compared with it; use \
                 a smaller --lr or --max-grad-norm"
            )));
        }
        let ways = values.iter().zip(before).map(|(after, before)| (after - before).abs());
        Ok(Self {
            steps,
            samples,
            width: after.iter().map(|tensor| tensor.width).max().unwrap_or(1),
            largest: values.iter().map(|value| value.abs()).fold(0.0, f32::max),
            way: ways.fold(0.0, f32::max),
        })
    }

    /// The number itself.
    fn value(&self) -> f64 {
        let Self { steps, samples, width, largest, way } = *self;
        let terms = (samples + width) as f64;
        f64::from(f32::EPSILON) * (steps as f64 * f64::from(largest) + terms * f64::from(way))
    }
}

/// One tensor of both.
#[derive(Debug, Clone, Serialize)]
struct Difference {
    name: String,
    difference: f64,
    equal_bits: bool,
}

/// One way against the reference: a row of the table.
#[derive(Debug, Serialize)]
pub(super) struct Comparison {
    strategy: StrategyKind,
    backend: &'static str,
    device: &'static str,
    world_size: usize,
    batch_size: usize,
    accumulate: usize,
    steps: u64,
    /// The largest of all, and where.
    difference: f64,
    parameter: String,
    bound: f64,
    equal_bits: bool,
    /// Whether all ranks had the same bits in the end.
    pub replicas_equal: bool,
    pub ok: bool,
    /// If not: the first step, from 0, after which it is not.
    pub first_step: Option<u64>,
    parameters: Vec<Difference>,
}

impl Comparison {
    /// What `way` came to on `placement`, against the one rank.
    pub(super) fn new(
        placement: &Placement,
        way: Variant,
        reference: &RunResult,
        trained: &RunResult,
        bound: Bound,
    ) -> Self {
        let pairs = reference.after.iter().zip(&trained.after);
        let parameters: Vec<Difference> = pairs.map(|(a, b)| difference(a, b)).collect();
        // `total_cmp` has what is no number above all others.
        let largest = parameters.iter().max_by(|a, b| a.difference.total_cmp(&b.difference));
        let (parameter, largest) =
            largest.map_or_else(Default::default, |it| (it.name.clone(), it.difference));
        let replicas_equal = trained.replicas_equal;
        Self {
            strategy: way.strategy,
            backend: placement.backend.name(),
            device: if placement.devices[0] == Device::Cpu { "CPU" } else { "GPU" },
            world_size: way.ranks,
            batch_size: way.batch_size,
            accumulate: way.accumulate,
            steps: bound.steps,
            difference: largest,
            parameter,
            bound: bound.value(),
            equal_bits: parameters.iter().all(|it| it.equal_bits),
            replicas_equal,
            ok: largest <= bound.value() && replicas_equal,
            first_step: None,
            parameters,
        }
    }

    /// "ddp, threaded, CPU: 2 x 16 x 2".
    fn name(&self) -> String {
        let Self { backend, device, world_size, batch_size, accumulate, .. } = self;
        let what = match self.strategy {
            _ if *world_size == 1 => format!("1 rank, {device}"),
            StrategyKind::Ddp => format!("ddp, {backend}, {device}"),
            StrategyKind::Dp => format!("dp, {backend}, {device}"),
        };
        let batches =
            if *accumulate == 1 { String::new() } else { format!(" x {accumulate} batches") };
        format!("{what}: {world_size} x {batch_size}{batches}")
    }

    /// The row of the table, and one for each tensor if there are few or `per_parameter`, else for those beyond the
    /// bound.
    pub(super) fn write(&self, per_parameter: bool, out: &mut dyn Write) -> io::Result<()> {
        let bits = |equal| if equal { "equal" } else { "differ" };
        let verdict = match self {
            Self { replicas_equal: false, .. } => "the ranks differ from each other",
            Self { ok: false, .. } => "TOO FAR",
            _ => "ok",
        };
        let since = self.first_step.map_or(String::new(), |step| format!(", from step {step} on"));
        let (name, bits_of_all) = (self.name(), bits(self.equal_bits));
        let (difference, parameter) = (self.difference, &self.parameter);
        writeln!(
            out,
            " {name:<40}{difference:>9.1e}  {bits_of_all:<8}{parameter:<17}{verdict}{since}"
        )?;
        let all = per_parameter || self.parameters.len() <= FEW;
        // What is no number is beyond it, too.
        let is_shown =
            |it: &&Difference| all || it.difference.is_nan() || it.difference > self.bound;
        self.parameters.iter().filter(is_shown).try_for_each(|it| {
            let Difference { name, difference, equal_bits } = it;
            writeln!(out, "   {name:<38}{difference:>9.1e}  {}", bits(*equal_bits))
        })
    }
}

/// How far the values of a tensor are apart; not a number, where one of them is none.
fn difference(a: &ParamValues, b: &ParamValues) -> Difference {
    let pairs = || a.values.iter().zip(&b.values);
    let apart = pairs().map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs());
    Difference {
        name: a.name.clone(),
        difference: apart.max_by(f64::total_cmp).unwrap_or_default(),
        equal_bits: pairs().all(|(a, b)| a.to_bits() == b.to_bits()),
    }
}

/// What is compared with what, and the bound in numbers.
pub(super) fn write_head(
    config: &Config,
    ranks: usize,
    bound: &Bound,
    out: &mut dyn Write,
) -> io::Result<()> {
    let Bound { steps, samples, width, largest, way } = bound;
    let (model, batch) = (config.model.name(), config.batch_size);
    writeln!(
        out,
        "# {model}, {steps} steps: {ranks} ranks with batch {batch} against 1 rank with batch {samples}\n\
         # bound: {:.1e} = 2^-23 ({steps} steps x {largest:.2}, the largest number of the model,\n\
         #   + ({samples} samples + {width} inputs of a layer) x {way:.4}, the longest way of one)\n\
         #{:<40}{:>10}  {:<8}largest in",
        bound.value(),
        "ranks x batch",
        "difference",
        "bits"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::Backend;

    fn trained(before: [f32; 2], after: [f32; 2]) -> RunResult {
        let values = |values: [f32; 2]| {
            vec![ParamValues { name: "weight".into(), values: values.into(), width: 2 }]
        };
        RunResult { before: values(before), after: values(after), replicas_equal: true }
    }

    fn compared(trained: &RunResult) -> Comparison {
        let reference = self::trained([1.0, 0.0], [1.5, -2.0]);
        let bound = Bound::of(&reference, 10, 6).unwrap();
        // By hand: 2^-23 (10 x 2 + (6 + 2) x 2).
        assert!((bound.value() - 36.0 / f64::from(1 << 23)).abs() < 1e-12);
        let placement = Placement {
            backend: Backend::Threaded,
            devices: vec![Device::Cpu; 2],
            gpu_count: 0,
            threads_per_rank: 1,
            note: None,
        };
        let way = Variant { strategy: StrategyKind::Ddp, ranks: 2, batch_size: 3, accumulate: 1 };
        Comparison::new(&placement, way, &reference, trained, bound)
    }

    #[test]
    fn what_is_beyond_the_bound_or_no_number_or_not_the_same_on_all_ranks_is_not_ok() {
        let equal = trained([1.0, 0.0], [1.5, -2.0]);
        assert!(compared(&equal).ok && compared(&equal).equal_bits);
        let near = compared(&trained([1.0, 0.0], [1.5, -2.000_004]));
        assert!(near.ok && !near.equal_bits && near.difference > 3e-6);
        assert!(!compared(&trained([1.0, 0.0], [1.5, -2.000_005])).ok);
        assert!(!compared(&trained([1.0, 0.0], [f32::NAN, -2.0])).ok);
        assert!(!compared(&RunResult { replicas_equal: false, ..equal }).ok);
    }

    #[test]
    fn a_reference_that_is_no_number_is_refused() {
        let error = Bound::of(&trained([1.0, 0.0], [1.0, f32::INFINITY]), 10, 6).unwrap_err();
        assert!(error.to_string().contains("after 10 steps on one rank a parameter is inf"));
    }
}
