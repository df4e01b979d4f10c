//! The first steps of a run as all ranks have them: what `--explain` tells.

use tch::nn::ModuleT;
use tch::{Device, Kind, Tensor};

use super::Trainer;
use crate::checkpoint::TrainerState;
use crate::data::Batch;
use crate::ddp::{GradProbe, Strategy};
use crate::error::{Error, Result};
use crate::telemetry::{Narrator, RankStep, Step};

/// What is looked at while the first steps are made.
#[derive(Debug)]
pub(super) struct Explainer {
    /// On rank 0, which tells for all.
    narrator: Option<Narrator>,
    /// 64 bits over what this rank had for parameters before they were rank 0's.
    built: u64,
    /// How many steps have been told.
    told: u32,
    /// As long as there are steps to tell.
    watched: Option<GradProbe>,
    /// The number of it that is told: the one with the largest gradient in the first step.
    place: Option<usize>,
    /// What this rank has had of the step so far.
    seen: Option<RankStep>,
}

/// So many steps are told.
const STEPS: u32 = 2;
/// So many samples of each.
const SAMPLES: usize = 10;

impl<M: ModuleT> Trainer<M> {
    /// Has `narrator` tell how the ranks come to train one model, with the numbers of the first two steps. `built` is
    /// the [`parameters_hash`](crate::parameters_hash) of the model before it was wrapped. On all ranks alike; rank 0
    /// alone needs a narrator. The results are the same.
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

    /// Training begins. A collective, if it is explained.
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

    /// The gradients of a step are averaged, and nothing has been made of them yet.
    pub(super) fn capture_gradients(&mut self, losses: &[Tensor], batches: &[Batch]) -> Result<()> {
        let Some(Explainer { watched: Some(watched), .. }) = &self.explaining else {
            return Ok(());
        };
        self.ddp.group().synchronize()?;
        let samples = self.samples(0, self.accumulate)?;
        let [local, averaged] = [&watched.local, &watched.parameter.grad()].map(numbers);
        let (local, averaged, before) = (local?, averaged?, numbers(&watched.parameter)?);
        // The mean over all samples, of which the last batch of an epoch may have fewer.
        let of_batch = |(loss, batch): (&Tensor, &Batch)| match batch.len() {
            0 => Ok(0.0), // whose mean is no number
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

    /// The step has been made. A collective, if it is to be told.
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

    /// Training is over. A collective, if it is explained.
    pub(super) fn end_explaining(&self) -> Result<()> {
        let Some(explaining) = &self.explaining else { return Ok(()) };
        let hashes = self.ddp.group().gather_object(&self.ddp.parameters_hash()?, 0)?;
        if let (Some(narrator), Some(hashes)) = (&explaining.narrator, hashes) {
            narrator.end(self.state.step, &hashes);
        }
        Ok(())
    }
}

/// All numbers of a tensor, one after the other.
fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    let read = || {
        let local = tensor.f_detach()?.f_to_device(Device::Cpu)?.f_to_kind(Kind::Double)?;
        Vec::<f64>::try_from(local.f_reshape([-1])?)
    };
    read().map_err(Error::torch("reading what is explained"))
}

/// Where the number is that is furthest from zero; the first of several.
fn largest(numbers: &[f64]) -> usize {
    let mut place = 0;
    for (at, number) in numbers.iter().enumerate() {
        if number.abs() > numbers[place].abs() {
            place = at;
        }
    }
    place
}

/// `[1][3]`: where in a tensor of this shape its so manieth number is.
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
