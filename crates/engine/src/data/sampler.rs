//! Deals samples to ranks, in exactly PyTorch's order.

use std::ops::Range;

use rand_mt::Mt;

use crate::error::{Error, Result};

/// Deals the samples of a data set to the ranks.
///
/// Follows `torch.utils.data.DistributedSampler`. All ranks shuffle all samples with a generator seeded with
/// `seed + epoch`. Samples are repeated from the front until all ranks get the same number, or the rest is
/// dropped. Rank `r` of `R` then takes every `R`-th sample, starting at `r`. There is no `set_epoch` to forget:
/// every method that returns an order takes the epoch.
///
/// ```
/// # use ddp_mp_engine as ddp_mp;
/// # fn main() -> ddp_mp::Result<()> {
/// use ddp_mp::DistributedSampler;
///
/// // 10 samples for 4 ranks: two of them are dealt twice.
/// let expected = [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]];
/// for (rank, expected) in expected.into_iter().enumerate() {
///     let sampler = DistributedSampler::new(10, 4, rank)?.shuffle(false);
///     assert_eq!(sampler.indices(0)?, expected);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct DistributedSampler {
    len: usize,
    num_replicas: usize,
    rank: usize,
    shuffle: bool,
    seed: u64,
    drop_last: bool,
    uneven: bool,
}

impl DistributedSampler {
    /// Creates the sampler of `rank` for `len` samples and `num_replicas` ranks. It shuffles, with seed 0, and pads.
    ///
    /// # Errors
    /// [`Error::Input`] if there are no samples, no ranks, or no such rank, or if the padded number of samples
    /// exceeds `isize::MAX`.
    pub fn new(len: usize, num_replicas: usize, rank: usize) -> Result<Self> {
        if len == 0 {
            return Err(Error::usage("the data set has no samples".into()));
        }
        if rank >= num_replicas {
            return Err(Error::usage(format!(
                "there is no rank {rank} among {num_replicas} ranks; ranks count from 0"
            )));
        }
        if len
            .checked_next_multiple_of(num_replicas)
            .is_none_or(|total| total > isize::MAX as usize)
        {
            return Err(Error::usage(format!(
                "{len} samples for {num_replicas} ranks are more than can be counted; use fewer"
            )));
        }
        Ok(Self {
            len,
            num_replicas,
            rank,
            shuffle: true,
            seed: 0,
            drop_last: false,
            uneven: false,
        })
    }

    /// Sets whether to shuffle.
    pub fn shuffle(self, shuffle: bool) -> Self {
        Self { shuffle, ..self }
    }

    /// Returns the sampler of `rank` for the same samples.
    #[doc(hidden)]
    pub fn for_rank(&self, rank: usize) -> Self {
        Self { rank, ..self.clone() }
    }

    /// Returns the number of ranks.
    pub(super) fn num_replicas(&self) -> usize {
        self.num_replicas
    }

    /// Sets the seed of the shuffle, which must be the same on every rank. As in PyTorch, only its lower 32 bits count.
    pub fn seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// Sets whether to drop the samples that cannot be divided evenly, instead of dealing some twice.
    ///
    /// # Errors
    /// [`Error::Input`] with fewer samples than ranks: no rank would get any. (PyTorch accepts this and trains
    /// on nothing.)
    pub fn drop_last(self, drop_last: bool) -> Result<Self> {
        if drop_last && self.len < self.num_replicas {
            return Err(Error::usage(format!(
                "drop_last leaves nothing of {} samples for {} ranks; use fewer ranks, or don't drop",
                self.len, self.num_replicas
            )));
        }
        Ok(Self { drop_last, ..self })
    }

    /// Deals every sample exactly once, unshuffled. Some ranks get one sample more than others, or none. For
    /// validation, where a repeated sample would count twice.
    #[must_use]
    pub fn uneven(self) -> Self {
        Self { shuffle: false, ..self.without_padding() }
    }

    /// Deals every sample exactly once. Some ranks get one sample more than others, or none. For training that averages
    /// over samples: [`TrainerOptions::exact_mean`](crate::trainer::TrainerOptions::exact_mean).
    #[must_use]
    pub fn without_padding(self) -> Self {
        Self { uneven: true, drop_last: false, ..self }
    }

    /// Returns the number of samples in the data set.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns the number of samples that this rank gets in an epoch.
    pub fn num_samples(&self) -> usize {
        self.num_samples_from(0)
    }

    /// Returns the number of this rank's samples left after all ranks together have had the first `start` of an epoch.
    pub fn num_samples_from(&self, start: usize) -> usize {
        let left = self.len.saturating_sub(start);
        if self.uneven {
            return left.saturating_sub(self.rank).div_ceil(self.num_replicas);
        }
        if self.drop_last { left / self.num_replicas } else { left.div_ceil(self.num_replicas) }
    }

    /// Returns the number of samples that all ranks together get after the first `start` of an epoch.
    pub(super) fn dealt_from(&self, start: usize) -> usize {
        if self.uneven {
            return self.len.saturating_sub(start);
        }
        self.num_samples_from(start) * self.num_replicas
    }

    /// Returns this rank's samples in `epoch`, in order.
    ///
    /// # Errors
    /// [`Error::Input`] if there is no memory for the order.
    pub fn indices(&self, epoch: u64) -> Result<Vec<usize>> {
        self.indices_from(epoch, 0)
    }

    /// Returns this rank's samples in `epoch` after all ranks together have had the first `start`.
    ///
    /// Samples are dealt in turn, so after any number of steps the ranks have had the beginning of the epoch's order.
    /// A run with another number of ranks can continue with the rest. With the same number of ranks, the samples are
    /// the remaining ones of [`indices`](Self::indices).
    ///
    /// # Errors
    /// As [`indices`](Self::indices).
    pub fn indices_from(&self, epoch: u64, start: usize) -> Result<Vec<usize>> {
        self.deal(self.order(epoch)?.as_deref(), start)
    }

    /// Returns the order in which the samples of `epoch` are dealt, the same for all ranks. `None` without shuffling.
    #[doc(hidden)]
    pub fn order(&self, epoch: u64) -> Result<Option<Vec<usize>>> {
        self.shuffle.then(|| randperm(self.len, self.seed.wrapping_add(epoch))).transpose()
    }

    /// Returns [`indices_from`](Self::indices_from) for an epoch with this order.
    #[doc(hidden)]
    pub fn deal(&self, order: Option<&[usize]>, start: usize) -> Result<Vec<usize>> {
        self.deal_some(order, start, 0..self.num_samples_from(start))
    }

    /// Returns the samples at `places` among those of [`deal`](Self::deal).
    pub(super) fn deal_some(
        &self,
        order: Option<&[usize]>,
        start: usize,
        places: Range<usize>,
    ) -> Result<Vec<usize>> {
        let mut mine = empty(places.len())?;
        // PyTorch's padding repeats the whole order from the front.
        let first = start + self.rank;
        let dealt = places.map(|place| (first + place * self.num_replicas) % self.len);
        match order {
            Some(order) => mine.extend(dealt.map(|i| order[i])),
            None => mine.extend(dealt),
        }
        Ok(mine)
    }
}

/// Returns what `torch.randperm(n, generator=g)` returns on a CPU after `g.manual_seed(seed)`.
pub(super) fn randperm(n: usize, seed: u64) -> Result<Vec<usize>> {
    // From this size on PyTorch draws 64 bits per position, so that every order is possible.
    const LARGE: usize = u32::MAX as usize / 20;
    // PyTorch's generator takes a 64-bit seed and uses the lower half.
    let mut generator = Mt::new(seed as u32);
    let mut draw = || {
        if n < LARGE {
            u64::from(generator.next_u32())
        } else {
            u64::from(generator.next_u32()) << 32 | u64::from(generator.next_u32())
        }
    };
    let mut order = empty(n)?;
    order.extend(0..n);
    for i in 0..n.saturating_sub(1) {
        let left = (n - i) as u64;
        order.swap(i, i + (draw() % left) as usize);
    }
    Ok(order)
}

/// Allocates an empty vector with room for `n` indices.
fn empty(n: usize) -> Result<Vec<usize>> {
    let mut indices = Vec::new();
    indices.try_reserve_exact(n).map_err(|_| {
        Error::usage(format!(
            "the order of {n} samples does not fit into this machine's memory; use fewer samples"
        ))
    })?;
    Ok(indices)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_hold_every_sample_once_before_the_padding() {
        for len in 1..40 {
            for ranks in 1..8 {
                let shards: Vec<Vec<usize>> = (0..ranks)
                    .map(|rank| {
                        DistributedSampler::new(len, ranks, rank).unwrap().indices(3).unwrap()
                    })
                    .collect();
                assert!(shards.iter().all(|shard| shard.len() == len.div_ceil(ranks)));
                // Dealt in turn: the i-th sample of the order went to rank i % ranks.
                let order = |i: usize| shards[i % ranks][i / ranks];
                let mut first_round: Vec<usize> = (0..len).map(order).collect();
                let padding: Vec<usize> = (len..len.div_ceil(ranks) * ranks).map(order).collect();
                assert!(padding.iter().enumerate().all(|(i, &p)| p == first_round[i % len]));
                first_round.sort_unstable();
                assert_eq!(first_round, (0..len).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn resumed_shards_hold_exactly_the_remaining_samples() {
        for (len, before, now, drop_last) in cases() {
            let deal = |ranks, start| -> Vec<Vec<usize>> {
                let samples_of = |rank| {
                    let sampler = DistributedSampler::new(len, ranks, rank)?;
                    sampler.drop_last(drop_last)?.indices_from(1, start)
                };
                (0..ranks).map(|rank| samples_of(rank).unwrap()).collect()
            };
            let whole = deal(before, 0);
            for had in 0..whole[0].len() {
                let start = had * before;
                let left = deal(now, start);
                if now == before {
                    let rest = whole.iter().map(|share| share[had..].to_vec());
                    assert_eq!(left, rest.collect::<Vec<_>>());
                }
                let seen = whole.iter().flat_map(|share| &share[..had]);
                let dealt =
                    (0..left[0].len()).flat_map(|i| left.iter().map(move |share| &share[i]));
                let mut all: Vec<usize> = seen.chain(dealt.take(len - start)).copied().collect();
                let missing = if drop_last { (len - start) % now } else { 0 };
                assert_eq!(all.len(), len - missing);
                all.sort_unstable();
                all.dedup();
                assert_eq!(all.len(), len - missing, "none twice");
            }
        }
    }

    #[test]
    fn all_ranks_together_get_the_samples_that_are_dealt() {
        for (len, start) in (5..24).flat_map(|len| (0..=len).map(move |start| (len, start))) {
            let padded = |rank| DistributedSampler::new(len, 3, rank).unwrap();
            let each = [
                [0, 1, 2].map(padded),
                [0, 1, 2].map(|rank| padded(rank).drop_last(true).unwrap()),
                [0, 1, 2].map(|rank| padded(rank).without_padding()),
            ];
            for samplers in each {
                let together: usize = samplers.iter().map(|it| it.num_samples_from(start)).sum();
                assert_eq!(samplers[0].dealt_from(start), together, "{samplers:?}, from {start}");
            }
        }
    }

    /// Returns tuples of samples, ranks before, ranks now, and `drop_last`.
    fn cases() -> impl Iterator<Item = (usize, usize, usize, bool)> {
        let ranks = || 1..5;
        (5..24).flat_map(move |len| {
            ranks().flat_map(move |before| {
                ranks().flat_map(move |now| [false, true].map(|drop| (len, before, now, drop)))
            })
        })
    }

    #[test]
    fn epoch_changes_the_order() {
        let sampler = DistributedSampler::new(100, 2, 0).unwrap();
        let indices = |epoch| sampler.indices(epoch).unwrap();
        assert_ne!(indices(0), indices(1));
        assert_eq!(indices(1), sampler.clone().seed(1).indices(0).unwrap());
    }

    #[test]
    fn invalid_sampler_arguments_are_refused() {
        let error = |result: Result<DistributedSampler>| result.unwrap_err().to_string();
        assert!(error(DistributedSampler::new(0, 1, 0)).contains("no samples"));
        assert!(error(DistributedSampler::new(5, 2, 2)).contains("no rank 2 among 2"));
        assert!(error(DistributedSampler::new(5, 0, 0)).contains("no rank 0 among 0"));
        assert!(
            error(DistributedSampler::new(usize::MAX, 2, 0))
                .contains("are more than can be counted")
        );
        let huge = DistributedSampler::new(1 << 60, 1, 0).unwrap();
        assert!(
            huge.indices(0)
                .unwrap_err()
                .to_string()
                .contains("does not fit into this machine's memory")
        );
        let few = DistributedSampler::new(3, 4, 0).unwrap();
        assert!(few.clone().drop_last(false).is_ok());
        assert!(error(few.drop_last(true)).contains("nothing of 3 samples for 4 ranks"));
    }
}
