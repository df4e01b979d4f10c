//! Groups of some of the ranks, and operations that go on beside the rank.

use crossbeam::channel::bounded;
use std::time::Duration;

use ddp_mp::{ProcessGroup, ReduceOp};
use tch::{Kind, Tensor};

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

/// Calls every operation in its asynchronous form.
pub(crate) fn asynchronous(group: &ProcessGroup) -> anyhow::Result<()> {
    let (me, world_size, device) = (group.rank(), group.world_size(), group.device());
    let of = move |rank: usize| Tensor::from_slice(&[rank as f32 + 1., 5.]).to_device(device);
    let list = move || (0..world_size).map(of).collect::<Vec<_>>();
    let sum = (1..world_size).fold(of(0), |sum, r| sum + of(r));
    let (sender, results) = bounded(16);
    let keep = move |tensors: Vec<Tensor>| sender.send(tensors).unwrap();
    let work = group.async_op(move |group| {
        let mut tensor = of(me);
        group.all_reduce(&mut tensor, ReduceOp::Sum)?;
        let mut reduced = of(me);
        group.reduce(&mut reduced, 0, ReduceOp::Max)?;
        let mut broadcast = of(me);
        group.broadcast(&mut broadcast, world_size - 1)?;
        keep(vec![tensor, reduced, broadcast]);
        let (mut gathered, mut all) = (list(), list());
        group.all_gather(&mut gathered, &of(me))?;
        let mut whole = Tensor::zeros([world_size as i64 * 2], (Kind::Float, device));
        group.all_gather_single(&mut whole, &of(me))?;
        group.gather(&of(me), (me == 0).then_some(&mut all[..]), 0)?;
        keep(vec![Tensor::stack(&gathered, 0), whole.copy(), Tensor::stack(&all, 0)]);
        let (mut mine, parts) = (of(9), list());
        group.scatter(&mut mine, (me == 0).then_some(&parts[..]), 0)?;
        let mut part = of(9);
        group.reduce_scatter(&mut part, &parts, ReduceOp::Sum)?;
        let mut part_of_whole = of(9);
        group.reduce_scatter_single(&mut part_of_whole, &whole, ReduceOp::Sum)?;
        keep(vec![mine, part, part_of_whole]);
        let mut exchanged = list();
        group.all_to_all(&mut exchanged, &list())?;
        let mut single = whole.zeros_like();
        group.all_to_all_single(&mut single, &whole, None, None)?;
        group.monitored_barrier(Duration::from_secs(60))?;
        assert_eq!(group.all_gather_object(&me)?.len(), world_size);
        keep(vec![Tensor::stack(&exchanged, 0), single]);
        Ok(())
    })?;
    work.wait()?;
    let all = Tensor::stack(&list(), 0);
    let n = world_size as f64;
    let expected = vec![
        vec![sum, of(if me == 0 { world_size - 1 } else { me }), of(world_size - 1)],
        vec![all.shallow_clone(), all.flatten(0, 1), all.shallow_clone()],
        vec![of(me), of(me) * n, of(me) * n],
        vec![
            Tensor::stack(&(0..world_size).map(|_| of(me)).collect::<Vec<_>>(), 0),
            of(me).repeat([world_size as i64]),
        ],
    ];
    for expected in expected {
        let found = results.recv()?;
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            assert!(found.equal(expected), "{found:?} is not {expected:?}");
        }
    }
    Ok(())
}
