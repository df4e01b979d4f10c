//! Properties that hold for whatever sizes: shards of samples, slices and splits of tensors.

use ddp_mp::{DistributedSampler, ReduceOp};
use proptest::collection::vec;
use proptest::prelude::*;
use tch::{Kind, Tensor};

use crate::harness::ranks;

fn numbers(rank: usize, len: i64) -> Tensor {
    Tensor::arange(len, (Kind::Int64, tch::Device::Cpu)) * 7 + rank as i64 * 1000
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// The shards of an epoch are equally long; together they hold every sample, and as few twice as can be.
    #[test]
    fn shards_hold_every_sample_equally_often(
        len in 1usize..3000,
        world_size in 1usize..40,
        shuffle: bool,
        seed: u64,
        epoch in 0u64..1000,
    ) {
        let shards: Vec<Vec<usize>> = (0..world_size)
            .map(|rank| {
                let sampler = DistributedSampler::new(len, world_size, rank).unwrap();
                sampler.shuffle(shuffle).seed(seed).indices(epoch).unwrap()
            })
            .collect();
        let share = len.div_ceil(world_size);
        prop_assert!(shards.iter().all(|shard| shard.len() == share));
        let mut times = vec![0; len];
        shards.iter().flatten().for_each(|&sample| times[sample] += 1);
        let (least, most) = (share * world_size / len, (share * world_size).div_ceil(len));
        prop_assert!(times.iter().all(|&times| (least..=most).contains(&times)));
    }

    /// With `drop_last` nothing is dealt twice, and less than one sample a rank is dropped.
    #[test]
    fn drop_last_shards_are_disjoint(
        world_size in 1usize..40,
        more in 0usize..3000,
        seed: u64,
    ) {
        let len = world_size + more;
        let mut times = vec![0; len];
        for rank in 0..world_size {
            let sampler = DistributedSampler::new(len, world_size, rank).unwrap();
            let sampler = sampler.seed(seed).drop_last(true).unwrap();
            sampler.indices(0).unwrap().into_iter().for_each(|sample| times[sample] += 1);
        }
        prop_assert!(times.iter().all(|&times| times <= 1));
        prop_assert!(times.iter().filter(|&&times| times == 0).count() < world_size);
    }

    /// all_reduce is reduce_scatter and then all_gather, and each rank's part is what arithmetic says.
    #[test]
    fn all_reduce_equals_reduce_scatter_and_all_gather(world_size in 1usize..5, part in 0i64..700) {
        let results = ranks(world_size, move |rank, group| {
            let whole = numbers(rank.rank(), part * world_size as i64);
            let mut mine = whole.narrow(0, 0, part).zeros_like();
            group.reduce_scatter_single(&mut mine, &whole, ReduceOp::Sum)?;
            let mut gathered = whole.zeros_like();
            group.all_gather_single(&mut gathered, &mine)?;
            let mut reduced = whole.copy();
            group.all_reduce(&mut reduced, ReduceOp::Sum)?;
            Ok((Vec::<i64>::try_from(gathered)?, Vec::<i64>::try_from(reduced)?))
        });
        let sum = |i: i64| (0..world_size as i64).map(|rank| i * 7 + rank * 1000).sum::<i64>();
        let expected: Vec<i64> = (0..part * world_size as i64).map(sum).collect();
        for (gathered, reduced) in results {
            prop_assert_eq!(&gathered, &expected);
            prop_assert_eq!(&reduced, &expected);
        }
    }

    /// Rows go where the splits say, whatever they are, and come in the order of the ranks.
    #[test]
    fn all_to_all_rows_follow_the_split_sizes(
        world_size in 1usize..5,
        splits in vec(0i64..20, 16),
        columns in 1i64..4,
    ) {
        let rows = move |from: usize, to: usize| splits[from * 4 + to];
        let expected = rows.clone();
        let results = ranks(world_size, move |rank, group| {
            let me = rank.rank();
            let sent: Vec<i64> = (0..world_size).map(|to| rows(me, to)).collect();
            let received: Vec<i64> = (0..world_size).map(|from| rows(from, me)).collect();
            let input = numbers(me, sent.iter().sum::<i64>() * columns).view([-1, columns]);
            let mut output = Tensor::zeros([received.iter().sum::<i64>(), columns], (Kind::Int64, input.device()));
            group.all_to_all_single(&mut output, &input, Some(&received), Some(&sent))?;
            Ok(Vec::<i64>::try_from(output.flatten(0, -1))?)
        });
        for (me, output) in results.iter().enumerate() {
            let from_each = (0..world_size).flat_map(|from| {
                let start: i64 = (0..me).map(|to| expected(from, to)).sum();
                let end = start + expected(from, me);
                (start * columns..end * columns).map(move |i| i * 7 + from as i64 * 1000)
            });
            prop_assert_eq!(output, &from_each.collect::<Vec<i64>>());
        }
    }
}
