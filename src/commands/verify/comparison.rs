//! The difference between two trainings, the bound on what rounding explains, and the table of both.

use std::io::{self, Write};

use serde::Serialize;
use tch::{Device, Kind, Tensor};

use super::Variant;
use crate::config::Config;
use engine::error::{Error, Result};
use engine::ffi::TorchResult;
use engine::launch::Placement;

/// Up to this many tensors are always listed one by one.
const MAX_ALWAYS_LISTED: usize = 4;

/// The values of one tensor.
#[derive(Debug)]
pub(super) struct ParamValues {
    name: String,
    values: Vec<f32>,
    /// The number of inputs of each number that a layer computes with this tensor.
    width: usize,
}

/// Returns copies of all float32 tensors. Counters are left out.
pub(super) fn values(tensors: &[(String, Tensor)]) -> Result<Vec<ParamValues>> {
    let copy = |(name, tensor): &(String, Tensor)| {
        let flat = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_flatten(0, -1)?;
        let width = tensor.size().iter().skip(1).product::<i64>() as usize;
        Ok(ParamValues { name: name.clone(), values: Vec::<f32>::try_from(flat)?, width })
    };
    let floats = tensors.iter().filter(|(_, tensor)| tensor.kind() == Kind::Float);
    floats.map(copy).collect::<Result<_, _>>().doing("reading the parameters")
}

/// The tensors before and after training.
#[derive(Debug)]
pub(super) struct RunResult {
    pub before: Vec<ParamValues>,
    pub after: Vec<ParamValues>,
    pub replicas_equal: bool,
}

/// The largest difference between two runs that rounding explains.
///
/// A step rounds each number of size `largest` once. Its update is a sum of `terms` numbers, each made of sums of
/// `width` numbers, and every addition rounds. A rounding is at most 2^-24 of the size, in each of the two runs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bound {
    pub steps: u64,
    /// Samples in the batch of a step, over all ranks; of texts their tokens.
    pub terms: usize,
    /// The most inputs of one number that a layer computes.
    pub width: usize,
    /// The largest absolute value in the model after training.
    pub largest: f32,
    /// The largest change of a number over the run.
    pub max_update: f32,
}

impl Bound {
    /// Returns the bound for runs that are compared with `reference`.
    ///
    /// # Errors
    /// [`Error::Input`] if a value of `reference` is not finite.
    pub(super) fn of(reference: &RunResult, steps: u64, terms: usize) -> Result<Self> {
        let RunResult { before, after, .. } = reference;
        fn all(tensors: &[ParamValues]) -> impl Iterator<Item = f32> {
            tensors.iter().flat_map(|tensor| tensor.values.iter().copied())
        }
        if let Some(value) = all(after).find(|value| !value.is_finite()) {
            return Err(Error::usage(format!(
                "after {steps} steps on one rank a parameter is {value}, and nothing can be compared with it; use \
                 a smaller --lr or --max-grad-norm"
            )));
        }
        let updates = all(after).zip(all(before)).map(|(after, before)| (after - before).abs());
        Ok(Self {
            steps,
            terms,
            width: after.iter().map(|tensor| tensor.width).max().unwrap_or(1),
            largest: all(after).map(f32::abs).fold(0.0, f32::max),
            max_update: updates.fold(0.0, f32::max),
        })
    }

    /// Returns the bound as a number.
    fn value(&self) -> f64 {
        let Self { steps, terms, width, largest, max_update } = *self;
        let terms = (terms + width) as f64;
        f64::from(f32::EPSILON)
            * (steps as f64 * f64::from(largest) + terms * f64::from(max_update))
    }

    /// Returns what is compared with what, the bound in numbers, and the titles of the table.
    pub(super) fn head(&self, config: &Config, ranks: usize) -> String {
        let Self { steps, terms, width, largest, max_update } = self;
        let samples = ranks * config.training.batch_size;
        let of_sum = if config.tokens_per_sample() > 1 { "tokens" } else { "samples" };
        let (model, batch) = (config.model_name(), config.training.batch_size);
        format!(
            "# {model}, {steps} steps: {ranks} ranks with batch {batch} compared with 1 rank with batch {samples}\n\
             # bound: {:.1e} = 2^-23 ({steps} steps x {largest:.2}, the largest parameter,\n\
             #   + ({terms} {of_sum} + {width} inputs of a layer) x {max_update:.4}, the largest change of a parameter)\n\
             #{:<40}{:>10}  {:<8}largest in",
            self.value(),
            "ranks x batch",
            "difference",
            "bits"
        )
    }
}

/// The difference of one tensor between the two runs.
#[derive(Debug, Clone, Default, Serialize)]
struct Difference {
    name: String,
    difference: f64,
    equal_bits: bool,
}

/// One way compared with the reference: a row of the table.
#[derive(Debug, Serialize)]
pub(super) struct Comparison {
    #[serde(flatten)]
    variant: Variant,
    backend: &'static str,
    device: &'static str,
    steps: u64,
    /// The largest difference of all tensors. `parameter` is the tensor that has it.
    difference: f64,
    parameter: String,
    bound: f64,
    equal_bits: bool,
    /// Whether all ranks had the same bits at the end.
    pub replicas_equal: bool,
    pub ok: bool,
    /// The first step, from 0, after which the comparison fails. `None` if it is ok.
    pub first_step: Option<u64>,
    parameters: Vec<Difference>,
}

impl Comparison {
    /// Compares the result of `variant` on `placement` with the reference.
    pub(super) fn new(
        placement: &Placement,
        variant: Variant,
        reference: &RunResult,
        trained: &RunResult,
        bound: Bound,
    ) -> Self {
        let pairs = reference.after.iter().zip(&trained.after);
        let parameters: Vec<Difference> = pairs.map(|(a, b)| difference(a, b)).collect();
        // `total_cmp` orders NaN above all other numbers.
        let largest = parameters.iter().max_by(|a, b| a.difference.total_cmp(&b.difference));
        let Difference { name: parameter, difference, .. } = largest.cloned().unwrap_or_default();
        let replicas_equal = trained.replicas_equal;
        Self {
            variant,
            backend: placement.backend.name(),
            device: if placement.devices[0] == Device::Cpu { "CPU" } else { "GPU" },
            steps: bound.steps,
            difference,
            parameter,
            bound: bound.value(),
            equal_bits: parameters.iter().all(|tensor| tensor.equal_bits),
            replicas_equal,
            ok: difference <= bound.value() && replicas_equal,
            first_step: None,
            parameters,
        }
    }

    /// Writes the row of the table, such as "ddp, threaded, CPU: 2 x 16 x 2 batches". Adds one for each tensor if there are
    /// few or `per_parameter`, otherwise for tensors beyond the bound.
    pub(super) fn write(&self, per_parameter: bool, out: &mut dyn Write) -> io::Result<()> {
        let Self { backend, device, difference, parameter, parameters, .. } = self;
        let Variant { strategy, world_size, batch_size, grad_accum_steps: count } = self.variant;
        let alone = world_size == 1;
        let what = if alone { "1 rank".into() } else { format!("{strategy}, {backend}") };
        let batches = if count == 1 { String::new() } else { format!(" x {count} batches") };
        let name = format!("{what}, {device}: {world_size} x {batch_size}{batches}");
        let bits = |equal| if equal { "equal" } else { "differ" };
        let verdict = match (self.replicas_equal, self.ok) {
            (false, _) => "the ranks differ from each other",
            (true, false) => "TOO FAR",
            (true, true) => "ok",
        };
        let since = self.first_step.map_or(String::new(), |step| format!(", from step {step} on"));
        let all_bits = bits(self.equal_bits);
        let row = format!(" {name:<40}{difference:>9.1e}  {all_bits:<8}{parameter:<15}  {verdict}");
        writeln!(out, "{row}{since}")?;
        let all = per_parameter || parameters.len() <= MAX_ALWAYS_LISTED;
        for Difference { name, difference, equal_bits } in parameters {
            // NaN is beyond the bound, too.
            if all || difference.is_nan() || *difference > self.bound {
                writeln!(out, "   {name:<38}{difference:>9.1e}  {}", bits(*equal_bits))?;
            }
        }
        Ok(())
    }
}

/// Returns how far the values of a tensor are apart; NaN where a value is NaN.
fn difference(a: &ParamValues, b: &ParamValues) -> Difference {
    let pairs = || a.values.iter().zip(&b.values);
    let distances = pairs().map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs());
    Difference {
        name: a.name.clone(),
        difference: distances.max_by(f64::total_cmp).unwrap_or_default(),
        equal_bits: pairs().all(|(a, b)| a.to_bits() == b.to_bits()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::StrategyKind;
    use engine::process_group::Backend;

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
        let strategy = StrategyKind::Ddp;
        let variant = Variant { strategy, world_size: 2, batch_size: 3, grad_accum_steps: 1 };
        Comparison::new(&placement, variant, &reference, trained, bound)
    }

    #[test]
    fn difference_beyond_the_bound_nan_or_divergence_is_not_ok() {
        let equal = trained([1.0, 0.0], [1.5, -2.0]);
        assert!(compared(&equal).ok && compared(&equal).equal_bits);
        let near = compared(&trained([1.0, 0.0], [1.5, -2.000_004]));
        assert!(near.ok && !near.equal_bits && near.difference > 3e-6);
        assert!(!compared(&trained([1.0, 0.0], [1.5, -2.000_005])).ok);
        assert!(!compared(&trained([1.0, 0.0], [f32::NAN, -2.0])).ok);
        assert!(!compared(&RunResult { replicas_equal: false, ..equal }).ok);
    }

    #[test]
    fn nonfinite_reference_is_refused() {
        let error = Bound::of(&trained([1.0, 0.0], [1.0, f32::INFINITY]), 10, 6).unwrap_err();
        assert!(error.to_string().contains("after 10 steps on one rank a parameter is inf"));
    }
}
