//! Which sample goes to which rank, in PyTorch's order bit for bit.

use rand_mt::Mt;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Deals the samples of a data set to the ranks.
///
/// Follows `torch.utils.data.DistributedSampler`: shuffle all samples with a generator seeded with
/// `seed + epoch`, the same on every rank; repeat samples from the front until every rank gets as many
/// (or drop the rest); then rank `r` of `R` takes every `R`-th, starting at `r`. Where PyTorch lets you
/// forget `set_epoch` and then trains every epoch in the same order, here an order can only be had for
/// an epoch.
///
/// ```
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
    /// The share of `rank` in `len` samples dealt to `num_replicas` ranks; shuffled, with seed 0, and
    /// padded.
    ///
    /// # Errors
    /// [`Error::Input`] without samples, without ranks, when there is no such rank, or with more samples
    /// than can be counted.
    pub fn new(len: usize, num_replicas: usize, rank: usize) -> Result<Self> {
        if len == 0 {
            return Err(Error::Input("the data set has no samples".into()));
        }
        if rank >= num_replicas {
            return Err(Error::Input(format!(
                "there is no rank {rank} among {num_replicas} ranks; ranks count from 0"
            )));
        }
        if len
            .checked_next_multiple_of(num_replicas)
            .is_none_or(|total| total > isize::MAX as usize)
        {
            return Err(Error::Input(format!(
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

    /// Whether to shuffle.
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.shuffle = shuffle;
        self
    }

    /// The share of `rank` in the same samples.
    pub(crate) fn of_rank(&self, rank: usize) -> Self {
        Self { rank, ..self.clone() }
    }

    /// How many ranks there are.
    pub(super) fn num_replicas(&self) -> usize {
        self.num_replicas
    }

    /// What the shuffle starts from; the same on every rank. As in PyTorch, its lower 32 bits count.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Whether to drop the samples that don't go round, instead of dealing some twice.
    ///
    /// # Errors
    /// [`Error::Input`] with fewer samples than ranks: nobody would get any. (PyTorch lets that
    /// through, and trains on nothing.)
    pub fn drop_last(mut self, drop_last: bool) -> Result<Self> {
        if drop_last && self.len < self.num_replicas {
            return Err(Error::Input(format!(
                "drop_last leaves nothing of {} samples for {} ranks; use fewer ranks, or don't drop",
                self.len, self.num_replicas
            )));
        }
        self.drop_last = drop_last;
        Ok(self)
    }

    /// Deals every sample once and none twice, in their own order: some ranks get one more than others, or none.
    /// For validation, where what is repeated would count twice.
    #[must_use]
    pub fn uneven(self) -> Self {
        Self { shuffle: false, ..self.without_padding() }
    }

    /// Deals every sample once and none twice: some ranks get one more than others, or none. For training that averages
    /// over samples: [`DistributedDataParallel::backward_weighted`](crate::DistributedDataParallel::backward_weighted).
    #[must_use]
    pub fn without_padding(self) -> Self {
        Self { uneven: true, drop_last: false, ..self }
    }

    /// How many samples the data set has.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// How many samples each rank gets in an epoch.
    pub fn num_samples(&self) -> usize {
        self.num_samples_from(0)
    }

    /// How many of them are left when all ranks together have had the first `start` of the epoch.
    pub fn num_samples_from(&self, start: usize) -> usize {
        let left = self.len.saturating_sub(start);
        if self.uneven {
            return left.saturating_sub(self.rank).div_ceil(self.num_replicas);
        }
        if self.drop_last { left / self.num_replicas } else { left.div_ceil(self.num_replicas) }
    }

    /// How many samples all ranks together get in an epoch.
    pub fn total_size(&self) -> usize {
        self.num_samples() * self.num_replicas
    }

    /// This rank's samples in `epoch`, in order.
    ///
    /// # Errors
    /// [`Error::Input`] when there is no memory for the order.
    pub fn indices(&self, epoch: u64) -> Result<Vec<usize>> {
        self.indices_from(epoch, 0)
    }

    /// This rank's samples in `epoch`, when all ranks together have had the first `start`.
    ///
    /// Samples are dealt in turn, so what any number of ranks has had after any number of steps is the beginning
    /// of the epoch's order, and any other number of ranks can go on with the rest. With the same number it goes
    /// on as [`indices`](Self::indices) would have.
    ///
    /// # Errors
    /// As [`indices`](Self::indices).
    pub fn indices_from(&self, epoch: u64, start: usize) -> Result<Vec<usize>> {
        self.deal(self.order(epoch)?.as_deref(), start)
    }

    /// Returns the order in which the samples of `epoch` are dealt, the same for all ranks; `None` for their own.
    pub(crate) fn order(&self, epoch: u64) -> Result<Option<Vec<usize>>> {
        self.shuffle.then(|| randperm(self.len, self.seed.wrapping_add(epoch))).transpose()
    }

    /// Returns [`indices_from`](Self::indices_from) of an epoch with this order.
    pub(crate) fn deal(&self, order: Option<&[usize]>, start: usize) -> Result<Vec<usize>> {
        let count = self.num_samples_from(start);
        let mut mine = empty(count)?;
        // PyTorch's padding repeats the whole order from its front, as often as it takes.
        let first = start + self.rank;
        let dealt =
            (first..).step_by(self.num_replicas).take(count).map(|position| position % self.len);
        match order {
            Some(order) => mine.extend(dealt.map(|i| order[i])),
            None => mine.extend(dealt),
        }
        Ok(mine)
    }
}

/// `torch.randperm(n, generator=g)` on a CPU after `g.manual_seed(seed)`.
pub(super) fn randperm(n: usize, seed: u64) -> Result<Vec<usize>> {
    // From here on PyTorch draws 64 bits for each place, so that every order can come out.
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

/// Room for `n` indices, if there is any.
fn empty(n: usize) -> Result<Vec<usize>> {
    let mut indices = Vec::new();
    indices.try_reserve_exact(n).map_err(|_| {
        Error::Input(format!(
            "the order of {n} samples does not fit into this machine's memory; use fewer samples"
        ))
    })?;
    Ok(indices)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sample_is_dealt_and_none_twice_before_the_padding() {
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
    fn whoever_goes_on_gets_what_is_left_and_all_of_it() {
        for (len, before, now, drop_last) in cases() {
            let deal = |ranks, start| -> Vec<Vec<usize>> {
                let of = |rank| {
                    let sampler = DistributedSampler::new(len, ranks, rank)?;
                    sampler.drop_last(drop_last)?.indices_from(1, start)
                };
                (0..ranks).map(|rank| of(rank).unwrap()).collect()
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
                let dealt = (0..left[0].len()).flat_map(|i| left.iter().map(move |of| &of[i]));
                let mut all: Vec<usize> = seen.chain(dealt.take(len - start)).copied().collect();
                let missing = if drop_last { (len - start) % now } else { 0 };
                assert_eq!(all.len(), len - missing);
                all.sort_unstable();
                all.dedup();
                assert_eq!(all.len(), len - missing, "none twice");
            }
        }
    }

    /// Samples, ranks before, ranks now, and whether to drop what does not go round.
    fn cases() -> impl Iterator<Item = (usize, usize, usize, bool)> {
        let ranks = || 1..5;
        (5..24).flat_map(move |len| {
            ranks().flat_map(move |before| {
                ranks().flat_map(move |now| [false, true].map(|drop| (len, before, now, drop)))
            })
        })
    }

    #[test]
    fn another_epoch_is_another_order() {
        let sampler = DistributedSampler::new(100, 2, 0).unwrap();
        let indices = |epoch| sampler.indices(epoch).unwrap();
        assert_ne!(indices(0), indices(1));
        assert_eq!(indices(1), sampler.clone().seed(1).indices(0).unwrap());
    }

    #[test]
    fn what_cannot_be_dealt_is_refused() {
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
