//! Collects the numbers of one weight in a run's first steps from all ranks.

use anyhow::Result;
use tch::{Device, Kind, Tensor};

use crate::events::{Event, Probe, ProbedStep, RankStep};
use crate::ffi::TorchResult;
use crate::trainer::{Callback, Step, TrainContext};

/// Tells the observers of rank 0 the numbers of one weight on all ranks, in the first steps.
#[derive(Debug, Default)]
pub(in crate::trainer) struct WeightProbe {
    /// The 64-bit hash of this rank's parameters before they were replaced by rank 0's.
    hash_before_broadcast: u64,
    /// Number of steps told so far.
    steps_told: u32,
    /// The probed parameter and its gradients; `None` before training and after the last probed step.
    probe: Option<GradProbe>,
    /// Flat index of the probed weight in that parameter: the one with the largest gradient in the first step.
    index: Option<usize>,
    /// This rank's numbers of the current step.
    numbers: Option<RankStep>,
}

/// A probe of the first parameter of a model.
#[derive(Debug)]
struct GradProbe {
    name: String,
    /// The parameter, with its current gradient.
    parameter: Tensor,
    /// This rank's own gradient before the last averaging.
    local: Tensor,
}

/// The name of the probe among the observers of gradients.
const PROBE: &str = "probe";
/// Number of steps that are probed.
const STEPS: u32 = 2;
/// Maximum number of samples listed per rank and step.
const MAX_SAMPLES: usize = 10;

impl WeightProbe {
    pub(in crate::trainer) fn new(hash_before_broadcast: u64) -> Self {
        Self { hash_before_broadcast, ..Self::default() }
    }
}

impl<M> Callback<M> for WeightProbe {
    /// Tells the start of training. A collective.
    fn on_train_start(&mut self, context: &mut TrainContext<M>) -> Result<()> {
        let ddp = &context.ddp;
        let hashes = (self.hash_before_broadcast, ddp.parameters_hash()?);
        let hashes = ddp.group().gather_object(&hashes, 0)?;
        if let Some(hashes) = hashes {
            let (epoch, step) = (context.state.epoch, context.state.step);
            let resumed = (step > 0).then_some(step);
            context.observers.tell(&Event::Probe(Probe::Begin { hashes, epoch, resumed }))?;
        }
        if let Some((name, parameter)) = ddp.trained_parameters().into_iter().next() {
            let local = parameter.f_detach().and_then(|tensor| tensor.f_zeros_like());
            let local = local.doing("zeros_like")?;
            let mut copy = local.shallow_clone();
            let observe = move |index, gradient: &mut Tensor| match index {
                0 => tch::no_grad(|| copy.f_copy_(gradient)).doing("copy_"),
                _ => Ok(()),
            };
            ddp.observe_gradients(PROBE, Box::new(observe));
            self.probe = Some(GradProbe { name, parameter, local });
        }
        Ok(())
    }

    /// Records this rank's numbers of a step, after gradients are averaged and before they are clipped or used.
    fn on_after_backward(&mut self, context: &mut TrainContext<M>, step: &mut Step) -> Result<()> {
        let Some(probe) = self.probe.as_ref().filter(|_| !step.is_skipped()) else { return Ok(()) };
        context.group().await_launched()?;
        let samples = context.samples(0, context.options.accumulate)?;
        let [local, averaged] = [&probe.local, &probe.parameter.grad()].map(values);
        let (local, averaged, before) = (local?, averaged?, values(&probe.parameter)?);
        // Weighted by samples, or what the criterion counts: the last batch of an epoch may have fewer.
        let mut loss_sum = 0.0;
        for (batch, loss) in step.losses.iter().enumerate() {
            let count = step.count_of(batch);
            if count > 0 {
                loss_sum += values(loss)?[0] * count as f64;
            }
        }
        let index = *self.index.get_or_insert_with(|| index_of_largest(&averaged));
        self.numbers = Some(RankStep {
            num_samples: samples.len(),
            count: step.count(),
            samples: samples.into_iter().take(MAX_SAMPLES).collect(),
            loss: loss_sum / step.count().max(1) as f64,
            local: local[index],
            averaged: averaged[index],
            stepped_by: averaged[index],
            before: before[index],
            after: before[index],
        });
        Ok(())
    }

    /// Tells the step that was just made, if it is one of the first. A collective in that case.
    fn on_step_end(&mut self, context: &mut TrainContext<M>, step: &Step) -> Result<()> {
        let ddp = &context.ddp;
        let (Some(probe), Some(index), Some(mut numbers)) =
            (&self.probe, self.index, self.numbers.take())
        else {
            return Ok(());
        };
        let group = ddp.group();
        group.synchronize()?;
        numbers.stepped_by = values(&probe.parameter.grad())?[index];
        numbers.after = values(&probe.parameter)?[index];
        if let Some(ranks) = group.gather_object(&numbers, 0)? {
            let step = ProbedStep {
                step: step.index,
                index: self.steps_told,
                lr: step.lr,
                parameter: probe.name.clone(),
                shape: probe.parameter.size(),
                weight: index,
                buckets: ddp.statistics().bucket_bytes.len(),
                ranks,
            };
            context.observers.tell(&Event::Probe(Probe::Step(step)))?;
        }
        self.steps_told += 1;
        if self.steps_told == STEPS {
            ddp.stop_observing(PROBE);
            self.probe = None;
        }
        Ok(())
    }

    /// Tells the end of training. A collective.
    fn on_train_end(&mut self, context: &mut TrainContext<M>) -> Result<()> {
        let hashes = context.group().gather_object(&context.ddp.parameters_hash()?, 0)?;
        match hashes {
            Some(hashes) => {
                let steps = context.state.step;
                context.observers.tell(&Event::Probe(Probe::End { steps, hashes }))
            }
            None => Ok(()),
        }
    }
}

/// Returns all values of a tensor, flattened.
fn values(tensor: &Tensor) -> crate::error::Result<Vec<f64>> {
    let read = || {
        let local = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?;
        Vec::<f64>::try_from(local.f_reshape([-1])?)
    };
    read().doing("reading values to probe")
}

/// Returns the index of the value with the largest magnitude; the first if several are equal.
fn index_of_largest(values: &[f64]) -> usize {
    let larger = |largest: usize, index: usize| {
        if values[index].abs() > values[largest].abs() { index } else { largest }
    };
    (0..values.len()).fold(0, larger)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn index_of_the_largest_is_the_first_one() {
        assert_eq!(index_of_largest(&[1.0, -3.0, 3.0]), 1);
        assert_eq!(index_of_largest(&[0.0, 0.0]), 0);
    }
}
