//! `--explain`: collects the numbers of a run's first steps from all ranks.

use tch::nn::ModuleT;
use tch::{Device, Kind, Tensor};

use super::Trainer;
use crate::checkpoint::TrainerState;
use crate::data::Batch;
use crate::ddp::{GradProbe, Strategy};
use crate::error::{Error, Result};
use crate::telemetry::{Narrator, RankStep, Step};

/// The state of `--explain` during the first steps.
#[derive(Debug)]
pub(super) struct Explainer {
    /// The narrator for all ranks; `Some` on rank 0 only.
    narrator: Option<Narrator>,
    /// The 64-bit hash of this rank's parameters before they were replaced by rank 0's.
    built: u64,
    /// Number of steps explained so far.
    told: u32,
    /// The probed parameter and its gradients; `None` before training and after the last explained step.
    watched: Option<GradProbe>,
    /// Index of the explained value in that parameter: the one with the largest gradient in the first step.
    place: Option<usize>,
    /// This rank's numbers of the current step.
    seen: Option<RankStep>,
}

/// Number of steps that are explained.
const STEPS: u32 = 2;
/// Maximum number of samples listed per rank and step.
const SAMPLES: usize = 10;

impl<M: ModuleT> Trainer<M> {
    /// Makes `narrator` explain how the ranks train one model, with the numbers of the first two steps. `built` is the
    /// [`parameters_hash`](crate::parameters_hash) of the model before it was wrapped. Call on all ranks alike; rank 0
    /// alone needs a narrator. The results of training are the same.
    ///
    /// # Errors
    /// [`Error::Input`] with [`DataParallel`](crate::DataParallel), which trains in another way.
    pub fn explain(self, built: u64, narrator: Option<Narrator>) -> Result<Self> {
        if matches!(self.ddp, Strategy::Dp(_)) {
            let text = "explain shows DistributedDataParallel, and this is DataParallel; use \
                        DistributedDataParallel, or leave explain out";
            return Err(Error::Input(text.into()));
        }
        let (told, watched, place, seen) = Default::default();
        let explaining = Explainer { narrator, built, told, watched, place, seen };
        Ok(Self { explaining: Some(explaining), ..self })
    }

    /// Explains the start of training. A collective if `--explain` is on.
    pub(super) fn begin_explaining(&mut self) -> Result<()> {
        let (Some(explaining), Strategy::Ddp(ddp)) = (&mut self.explaining, &self.ddp) else {
            return Ok(());
        };
        let hashes = (explaining.built, ddp.parameters_hash()?);
        let hashes = ddp.group().gather_object(&hashes, 0)?;
        if let (Some(narrator), Some(hashes)) = (&explaining.narrator, hashes) {
            let resumed = (self.state.step > 0).then_some(self.state.step);
            narrator.begin(&hashes, self.state.epoch, resumed);
        }
        explaining.watched = Some(ddp.start_probe()?);
        Ok(())
    }

    /// Records this rank's numbers of a step, after gradients are averaged and before they are clipped or used.
    pub(super) fn capture_gradients(&mut self, losses: &[Tensor], batches: &[Batch]) -> Result<()> {
        let Some(Explainer { watched: Some(watched), .. }) = &self.explaining else {
            return Ok(());
        };
        self.ddp.group().synchronize()?;
        let samples = self.samples(0, self.accumulate)?;
        let [local, averaged] = [&watched.local, &watched.parameter.grad()].map(numbers);
        let (local, averaged, before) = (local?, averaged?, numbers(&watched.parameter)?);
        // Weighted by samples: the last batch of an epoch may have fewer.
        let of_batch = |(loss, batch): (&Tensor, &Batch)| match batch.len() {
            0 => Ok(0.0), // an empty batch adds nothing
            count => Ok(numbers(loss)?[0] * count as f64),
        };
        let sums = losses.iter().zip(batches).map(of_batch).collect::<Result<Vec<_>>>()?;
        let Some(explaining) = &mut self.explaining else { return Ok(()) };
        let place = *explaining.place.get_or_insert_with(|| largest(&averaged));
        explaining.seen = Some(RankStep {
            num_samples: samples.len(),
            samples: samples.into_iter().take(SAMPLES).collect(),
            loss: sums.iter().sum::<f64>()
                / batches.iter().map(Batch::len).sum::<usize>().max(1) as f64,
            local: local[place],
            averaged: averaged[place],
            stepped_by: averaged[place],
            before: before[place],
            after: before[place],
        });
        Ok(())
    }

    /// Explains the step that was just made, if it is one of the first two. A collective in that case.
    pub(super) fn explain_step(&mut self) -> Result<()> {
        let (Some(explaining), Strategy::Ddp(ddp)) = (&mut self.explaining, &self.ddp) else {
            return Ok(());
        };
        let Explainer { narrator, told, watched, place, seen, .. } = explaining;
        let (Some(of_ranks), Some(place), Some(mut mine)) = (&watched, *place, seen.take()) else {
            return Ok(());
        };
        let group = ddp.group();
        group.synchronize()?;
        mine.stepped_by = numbers(&of_ranks.parameter.grad())?[place];
        mine.after = numbers(&of_ranks.parameter)?[place];
        if let (Some(ranks), Some(narrator)) = (group.gather_object(&mine, 0)?, narrator) {
            let TrainerState { step, epoch, .. } = self.state;
            let step = Step {
                step,
                lr: self.schedule.lr(epoch, step),
                weight: format!("{}{}", of_ranks.name, indices(place, &of_ranks.parameter.size())),
                buckets: ddp.statistics().bucket_bytes.len(),
                ranks,
            };
            if *told == 0 { narrator.first_step(&step) } else { narrator.second_step(&step) }
        }
        *told += 1;
        if *told == STEPS {
            ddp.stop_probe();
            *watched = None;
        }
        Ok(())
    }

    /// Explains the end of training. A collective if `--explain` is on.
    pub(super) fn end_explaining(&self) -> Result<()> {
        let Some(explaining) = &self.explaining else { return Ok(()) };
        let hashes = self.ddp.group().gather_object(&self.ddp.parameters_hash()?, 0)?;
        if let (Some(narrator), Some(hashes)) = (&explaining.narrator, hashes) {
            narrator.end(self.state.step, &hashes);
        }
        Ok(())
    }
}

/// Returns all values of a tensor, flattened.
fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    let read = || {
        let local = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?;
        Vec::<f64>::try_from(local.f_reshape([-1])?)
    };
    read().map_err(Error::torch("reading what is explained"))
}

/// Returns the index of the value with the largest magnitude; the first if several are equal.
fn largest(numbers: &[f64]) -> usize {
    let mut place = 0;
    for (at, number) in numbers.iter().enumerate() {
        if number.abs() > numbers[place].abs() {
            place = at;
        }
    }
    place
}

/// Formats the flat index `place` of a tensor of this shape as indices, such as `[1][3]`.
fn indices(mut place: usize, shape: &[i64]) -> String {
    let mut text = String::new();
    for size in shape.iter().rev().map(|size| *size as usize) {
        text = format!("[{}]{text}", place % size);
        place /= size;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_named_by_its_place_in_the_tensor() {
        assert_eq!(indices(7, &[1, 20]), "[0][7]");
        assert_eq!(indices(23, &[2, 3, 4]), "[1][2][3]");
        assert_eq!(indices(0, &[]), "");
        assert_eq!(largest(&[1.0, -3.0, 3.0]), 1);
        assert_eq!(largest(&[0.0, 0.0]), 0);
    }
}
