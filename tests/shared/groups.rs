//! Groups of some of the ranks, and operations that go on beside the rank.

use std::time::Duration;

use ddp_mp::{ProcessGroup, ReduceOp};
use tch::Tensor;

use super::kinds;

/// Reduces in groups of some of the ranks.
pub(crate) fn compare(group: &ProcessGroup) {
    let (me, count) = (group.rank(), group.world_size());
    let device = group.device();
    let even: Vec<usize> = (0..count).step_by(2).collect();
    let odd: Vec<usize> = (1..count).step_by(2).collect();
    let mine = match (group.new_group(&even).unwrap(), group.new_group(&odd).unwrap()) {
        (Some(group), None) | (None, Some(group)) => group,
        other => panic!("{other:?}"),
    };
    let expected = if me.is_multiple_of(2) { even } else { odd };
    assert_eq!(mine.ranks(), expected);
    let mut tensor = Tensor::from_slice(&[me as i64; 50_000]).to_device(device);
    mine.all_reduce(&mut tensor, ReduceOp::Sum).unwrap();
    assert_eq!(tensor.int64_value(&[0]), expected.iter().sum::<usize>() as i64);
    let halves = group.new_subgroups_by_enumeration(&[&[count - 1, 0], &[1]]).unwrap();
    let expected: Option<&[usize]> = match me {
        1 => Some(&[1]),
        _ if me == 0 || me == count - 1 => Some(&[0, count - 1]),
        _ => None,
    };
    assert_eq!(halves.as_ref().map(|it| it.ranks()), expected);
    let pair = group.new_subgroups(2).unwrap();
    let mut sum = Tensor::from_slice(&[me as i64]).to_device(device);
    pair.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    assert_eq!(sum.int64_value(&[0]), (me / 2 * 4 + 1) as i64);
    // Two that are in one process need no network.
    if let Some(pair) = group.new_group(&[0, 1]).unwrap() {
        pair.broadcast(&mut tensor, 1).unwrap();
        assert_eq!(tensor.int64_value(&[0]), (1..count).step_by(2).sum::<usize>() as i64);
    }
}

/// Calls every operation in its asynchronous form. `surface` waits for results.
pub(crate) fn asynchronous(group: &ProcessGroup) -> anyhow::Result<()> {
    let world_size = group.world_size();
    let work = group.async_op(move |group| {
        kinds::are_reduced(group)?;
        kinds::go_where_they_should(group)?;
        group.monitored_barrier(Duration::from_secs(60))?;
        assert_eq!(group.all_gather_object(&1)?, vec![1; world_size]);
        Ok(())
    })?;
    Ok(work.wait()?)
}
