//! The samples that the sampler dealt to the ranks of a run, for its report.

use serde::Serialize;

use crate::checkpoint::TrainerState;
use crate::config::Config;
use crate::data::{DistributedSampler, batches_of_all};
use crate::error::Result;

/// The most samples that a report lists.
const MAX_LISTED_SAMPLES: usize = 200_000;

/// The samples of each rank.
#[derive(Debug, Serialize)]
pub(super) struct DealtSamples {
    /// Number of samples in the data set.
    dataset: usize,
    batch_size: usize,
    /// Whether all samples that ranks used are listed.
    complete: bool,
    epochs: Vec<EpochSamples>,
}

#[derive(Debug, Serialize)]
struct EpochSamples {
    epoch: u64,
    /// The samples of each rank, in order.
    ranks: Vec<Vec<usize>>,
}

/// Returns the samples that the sampler dealt to each rank in `steps` steps, from the state `first` on.
pub(super) fn dealt_samples(
    config: &Config,
    dataset: usize,
    world_size: usize,
    first: &TrainerState,
    mut steps: u64,
) -> Result<DealtSamples> {
    let batch = config.training.batch_size;
    let sampler = |rank| config.sampler(dataset, world_size, rank);
    let samplers = (0..world_size).map(sampler).collect::<Result<Vec<DistributedSampler>>>()?;
    let mut listed =
        DealtSamples { dataset, batch_size: batch, complete: true, epochs: Vec::new() };
    let (mut epoch, mut seen, mut room) =
        (first.epoch, first.samples_seen, MAX_LISTED_SAMPLES / world_size);
    while steps > 0 && listed.complete {
        let batches = batches_of_all(&samplers[0], seen, batch, config.data.drop_last_batch);
        let now = (batches as u64).div_ceil(config.ddp.grad_accum_steps).min(steps);
        if now == 0 && seen == 0 {
            break; // an epoch without steps
        }
        let most = (now * config.ddp.grad_accum_steps).min(batches as u64) as usize * batch;
        let rank_samples = |sampler: &DistributedSampler| -> Result<Vec<usize>> {
            let mut indices = sampler.indices_from(epoch, seen)?;
            indices.truncate(most.min(room));
            Ok(indices)
        };
        if now > 0 {
            let ranks = samplers.iter().map(rank_samples).collect::<Result<Vec<_>>>()?;
            let longest = most.min(samplers[0].num_samples_from(seen));
            listed.complete = longest <= room;
            room -= longest.min(room);
            listed.epochs.push(EpochSamples { epoch, ranks });
        }
        steps -= now;
        (epoch, seen) = (epoch + 1, 0);
    }
    Ok(listed)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tch::Device;

    use super::*;
    use crate::data::{DataLoader, Targets, TensorDataset};

    /// Returns the samples of all steps, by epoch and rank, as the loaders of a run deal them.
    fn trained(config: &Config, samples: usize, ranks: usize) -> Vec<Vec<Vec<usize>>> {
        let data =
            Arc::new(TensorDataset::random(samples as i64, 1, Targets::Values(1), 0).unwrap());
        let loader = |rank| {
            let sampler = config.sampler(samples, ranks, rank).unwrap();
            let loader =
                DataLoader::new(data.clone(), sampler, config.training.batch_size, Device::Cpu);
            let loader = loader.unwrap().drop_last(config.data.drop_last_batch);
            loader.in_step(config.ddp.exact_mean)
        };
        let rank_samples = |rank, epoch| {
            let loader = loader(rank);
            let batches = loader.num_batches();
            let steps = batches.div_ceil(config.ddp.grad_accum_steps as usize) as u64;
            assert_eq!(steps, config.steps_per_epoch(ranks), "{samples} on {ranks}: {config}");
            loader.samples(epoch, 0, 0, batches).unwrap()
        };
        let epoch_samples = |epoch| {
            let all: Vec<Vec<usize>> = (0..ranks).map(|rank| rank_samples(rank, epoch)).collect();
            let loader = loader(0);
            let dealt = loader.dealt_in(0, loader.num_batches());
            let total = all.iter().map(Vec::len).sum::<usize>();
            assert!(dealt.is_none_or(|dealt| dealt == total), "{dealt:?} {total}: {config}");
            all
        };
        (0..config.training.max_epochs).map(epoch_samples).collect()
    }

    #[test]
    fn listed_samples_are_those_trained_on() {
        const FLAGS: [[bool; 3]; 8] = [
            [false, false, false],
            [true, false, false],
            [false, true, false],
            [false, false, true],
            [true, false, true],
            [false, true, true],
            [true, true, false],
            [true, true, true],
        ];
        for [drop_last, exact_mean, drop_last_batch] in FLAGS {
            for (samples, ranks, accumulate) in
                [(31, 2, 1), (32, 2, 1), (33, 2, 3), (31, 3, 2), (50, 3, 1), (16, 1, 1)]
            {
                let mut config = Config::default();
                (config.training.max_epochs, config.training.batch_size) = (2, 8);
                (config.ddp.grad_accum_steps, config.ddp.exact_mean) = (accumulate, exact_mean);
                config.data.num_samples = Some(samples as i64);
                (config.data.drop_last, config.data.drop_last_batch) = (drop_last, drop_last_batch);
                let expected = trained(&config, samples, ranks);
                let steps = config.steps(ranks);
                let start = TrainerState::default();
                let listed = dealt_samples(&config, samples, ranks, &start, steps).unwrap();
                let listed: Vec<Vec<Vec<usize>>> =
                    listed.epochs.into_iter().map(|epoch| epoch.ranks).collect();
                assert_eq!(listed, expected, "{samples} on {ranks} ranks: {config}");
            }
        }
    }
}
