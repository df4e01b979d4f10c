//! The samples that the sampler dealt to the ranks of a run, for its report.

use serde::Serialize;

use engine::data::{DistributedSampler, batches_of_all};
use engine::error::Result;

/// The most samples that a report lists.
const MAX_LISTED_SAMPLES: usize = 200_000;

/// The samples of each rank.
#[derive(Debug, Serialize)]
pub struct DealtSamples {
    /// Number of samples in the data set.
    dataset: usize,
    batch_size: usize,
    /// Whether all samples that ranks used are listed.
    complete: bool,
    pub epochs: Vec<EpochSamples>,
}

#[derive(Debug, Serialize)]
pub struct EpochSamples {
    epoch: u64,
    /// The samples of each rank, in order.
    pub ranks: Vec<Vec<usize>>,
}

/// How a run deals samples to its ranks.
#[derive(Debug)]
pub struct Dealing {
    /// That of each rank.
    pub samplers: Vec<DistributedSampler>,
    /// Number of samples in the data set.
    pub dataset: usize,
    /// Samples per batch.
    pub batch_size: usize,
    /// Batches per step.
    pub accumulate: u64,
    /// Whether the last batch of an epoch is left out if it is not full.
    pub drop_last_batch: bool,
}

impl Dealing {
    /// Returns the samples of each rank in `steps` steps, from sample `samples_seen` of epoch `epoch` on.
    ///
    /// # Errors
    /// Those of [`DistributedSampler::indices_from`].
    #[doc(hidden)] // for the tests of who makes it
    pub fn deal(
        &self,
        mut epoch: u64,
        samples_seen: usize,
        mut steps: u64,
    ) -> Result<DealtSamples> {
        let Self { samplers, dataset, batch_size: batch, accumulate, drop_last_batch } = self;
        let (dataset, batch) = (*dataset, *batch);
        let mut listed =
            DealtSamples { dataset, batch_size: batch, complete: true, epochs: Vec::new() };
        let (mut seen, mut room) = (samples_seen, MAX_LISTED_SAMPLES / samplers.len().max(1));
        while steps > 0 && listed.complete {
            let batches = batches_of_all(&samplers[0], seen, batch, *drop_last_batch);
            let now = (batches as u64).div_ceil(*accumulate).min(steps);
            if now == 0 && seen == 0 {
                break; // an epoch without steps
            }
            let most = (now * *accumulate).min(batches as u64) as usize * batch;
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
}
