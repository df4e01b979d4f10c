//! Groups of some of the ranks, operations that go on while the rank does something else, and groups whose
//! run has failed.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam::channel::bounded;
use ddp_mp::{Backend, Error, P2POp, ReduceOp, Spawn, spawn};
use tch::Tensor;

use crate::harness::{TIMEOUT, ranks, try_ranks, without_lines};
use crate::shared::groups::asynchronous;

fn one(value: i64) -> Tensor {
    Tensor::from_slice(&[value])
}

#[test]
fn every_subset_of_ranks_can_form_a_group() {
    for world_size in 1..=4usize {
        ranks(world_size, move |rank, group| {
            let me = rank.rank();
            for subset in 1..1usize << world_size {
                let members: Vec<usize> =
                    (0..world_size).filter(|r| subset >> r & 1 == 1).collect();
                // In whatever order they are named.
                let named: Vec<usize> = members.iter().rev().copied().collect();
                let Some(part) = group.new_group(&named)? else {
                    assert!(!members.contains(&me));
                    continue;
                };
                assert_eq!(part.ranks(), members);
                assert_eq!(part.ranks()[part.rank()], me);
                assert_eq!((part.world_size(), part.backend()), (members.len(), "threaded"));
                let mut tensor = one(1 << me);
                part.all_reduce(&mut tensor, ReduceOp::Sum)?;
                assert_eq!(tensor.int64_value(&[0]), subset as i64);
                let last = members.len() - 1;
                let mut tensor = one(me as i64);
                part.broadcast(&mut tensor, last)?;
                assert_eq!(tensor.int64_value(&[0]), members[last] as i64);
                let all = part.all_gather_object(&me)?;
                assert_eq!(all, members);
                if last > 0 && part.rank() == 0 {
                    part.send(&one(77), last, 0)?;
                } else if last > 0 && part.rank() == last {
                    let mut tensor = one(0);
                    assert_eq!(part.recv(&mut tensor, None, 0)?, 0);
                    assert_eq!(tensor.int64_value(&[0]), 77);
                }
            }
            Ok(())
        });
    }
}

#[test]
fn nested_groups_reduce_over_their_members() {
    ranks(5, |rank, group| {
        let Some(outer) = group.new_group(&[1, 2, 4])? else {
            group.barrier()?;
            return Ok(());
        };
        let inner = outer.new_group(&[0, 2])?;
        for round in 0..200 {
            let mut tensor = one(round + rank.rank() as i64);
            outer.all_reduce(&mut tensor, ReduceOp::Sum)?;
            assert_eq!(tensor.int64_value(&[0]), 3 * round + 7);
            if let Some(inner) = &inner {
                assert_eq!(inner.ranks(), [1, 4]);
                let mut tensor = one(round + rank.rank() as i64);
                inner.all_reduce(&mut tensor, ReduceOp::Sum)?;
                assert_eq!(tensor.int64_value(&[0]), 2 * round + 5);
            }
        }
        group.barrier()?;
        Ok(())
    });
}

#[test]
fn group_errors_name_global_ranks() {
    let error = try_ranks(4, |rank, group| {
        let part = group.new_group(&[1, 3])?;
        if let Some(part) = part {
            if rank.rank() == 3 {
                part.barrier()?;
            } else {
                part.all_reduce(&mut one(1), ReduceOp::Sum)?;
            }
        }
        Ok(())
    })
    .unwrap_err();
    let expected = "collective #0 differs between ranks: rank 1 called all_reduce(sum) of int64 [1]; \
                    rank 3 called barrier";
    let told = without_lines(&error.failure.error, file!());
    assert!(told.starts_with(expected), "{error}");
    assert_eq!(error.failure.rank, 3);
    assert!(
        error.to_string().starts_with("ranks 1 (CPU:1) and 3 (CPU:3) failed in barrier #0: "),
        "{error}"
    );
}

#[test]
fn invalid_groups_are_refused() {
    ranks(2, |_, group| {
        let told = |ranks: &[usize]| group.new_group(ranks).unwrap_err().to_string();
        assert!(told(&[]).contains("new_group: [] is empty or names a rank twice"));
        assert!(told(&[0, 0]).contains("[0, 0] is empty or names a rank twice"));
        assert!(told(&[2]).contains("a member is rank 2, but the group has ranks 0 to 1"));
        Ok(())
    });
    ranks(3, |_, group| {
        if let Some(part) = group.new_group(&[1, 2])? {
            let error = part.broadcast(&mut one(1), 2).unwrap_err().to_string();
            assert!(error.ends_with("0 to 1, which are ranks [1, 2] of the run"), "{error}");
        }
        Ok(())
    });
    let error = try_ranks(2, |rank, group| {
        let part = group.new_group(&[rank.rank()])?;
        assert!(part.is_none(), "they do not agree");
        Ok(())
    })
    .unwrap_err();
    let expected = "collective #0 differs between ranks: rank 0 called new_group of ranks [0]; \
                    rank 1 called new_group of ranks [1]";
    let told = without_lines(&error.failure.error, file!());
    assert!(told.starts_with(expected), "{error}");
}

#[test]
fn async_and_direct_calls_keep_their_order() {
    for world_size in 1..=4usize {
        ranks(world_size, move |rank, group| {
            let n = world_size as i64;
            let tensor = one(1);
            let mut expected = 1;
            for round in 0..200 {
                let mut same = tensor.shallow_clone();
                // What is asynchronous differs from rank to rank; the order does not.
                let mut sum =
                    move |group: &ddp_mp::ProcessGroup| group.all_reduce(&mut same, ReduceOp::Sum);
                if (round + rank.rank()) % 3 == 0 {
                    sum(&group)?;
                } else {
                    drop(group.async_op(sum)?);
                }
                expected = expected * n % 1009;
                let mut same = tensor.shallow_clone();
                let work = group.async_op(move |group| {
                    let _ = same.remainder_(1009);
                    group.barrier()
                })?;
                if round % 7 == 0 {
                    work.wait()?;
                    assert_eq!(tensor.int64_value(&[0]), expected);
                }
            }
            group.barrier()?;
            assert_eq!(tensor.int64_value(&[0]), expected);
            Ok(())
        });
    }
}

#[test]
fn every_operation_has_an_async_form() {
    for world_size in 1..=3usize {
        ranks(world_size, |_, group| asynchronous(&group));
    }
}

#[test]
fn pending_operations_complete_before_the_rank_ends() {
    let done = Arc::new(AtomicUsize::new(0));
    let counted = done.clone();
    spawn(3, move |rank| {
        let group = rank.init_process_group(Backend::Threaded)?;
        let part = group.new_group(&[0, 1, 2])?.expect("all are in it");
        for _ in 0..100 {
            for group in [&*group, &part] {
                let done = counted.clone();
                drop(group.async_op(move |group| {
                    group.barrier()?;
                    done.fetch_add(1, Ordering::SeqCst);
                    Ok(())
                })?);
            }
        }
        Ok(())
    })
    .unwrap();
    assert_eq!(done.load(Ordering::SeqCst), 600);
}

#[test]
fn async_failure_ends_the_run_without_a_wait() {
    for panics in [false, true] {
        let error = try_ranks(3, move |rank, group| {
            let me = rank.rank();
            drop(group.async_op(move |group| {
                if me == 1 {
                    assert!(!panics, "on purpose");
                    return Err(Error::usage("the cause".into()));
                }
                group.barrier()
            })?);
            if me == 2 {
                group.barrier()?;
            }
            Ok(())
        })
        .unwrap_err();
        let cause = if panics { "panicked" } else { "the cause" };
        let expected = format!("rank 1 (CPU:1) failed in its function: {cause}");
        assert!(error.to_string().starts_with(&expected), "{error}");
        assert!(!panics || error.to_string().ends_with("on purpose"), "{error}");
    }
}

#[test]
fn async_operation_can_start_another() {
    ranks(2, |_, group| {
        let work = group.async_op(|group| {
            group.async_op(|group| group.barrier())?.wait()?;
            group.barrier()
        })?;
        work.wait()?;
        Ok(())
    });
}

#[test]
fn group_of_a_failed_run_refuses_every_call_with_the_cause() {
    let refusals = Arc::new(AtomicUsize::new(0));
    let counted = refusals.clone();
    let error = spawn(3, move |rank| {
        let group = rank.init_process_group(Backend::Threaded)?;
        let part = group.new_group(&[0, 2])?;
        group.barrier()?; // both have their group now
        if rank.rank() == 1 {
            anyhow::bail!("the cause");
        }
        group.barrier().unwrap_err(); // returns when the run has failed
        let mut tensor = one(1);
        let part = part.expect("it is a member");
        let pair = [P2POp::isend(&one(1), 1 - part.rank(), 0)];
        let results = [
            group.barrier(),
            group.all_reduce(&mut tensor, ReduceOp::Sum),
            part.broadcast(&mut tensor, 0),
            group.all_gather_object(&1).map(drop),
            part.send(&one(1), 1 - part.rank(), 0),
            part.recv(&mut one(1), None, 0).map(drop),
            part.batch_isend_irecv(&pair).map(drop),
            group.new_group(&[0]).map(drop),
            group.async_op(|group| group.barrier()).map(drop),
            group.synchronize(),
        ];
        for result in results {
            let text = match result {
                Err(error @ Error::Cancelled { by: 1, .. }) => error.to_string(),
                other => panic!("{other:?}"),
            };
            assert_eq!(text, "stopped, because rank 1 failed: the cause");
            counted.fetch_add(1, Ordering::SeqCst);
        }
        Ok(())
    })
    .unwrap_err();
    assert_eq!(error.to_string(), "rank 1 (CPU:1) failed in its function: the cause");
    assert_eq!(refusals.load(Ordering::SeqCst), 20);
}

#[test]
fn group_can_be_created_in_an_async_operation() {
    spawn(2, |rank| {
        let group = rank.init_process_group(Backend::Threaded)?;
        drop(group.async_op(|group| {
            let part = group.new_group(&[0, 1])?.expect("both are in it");
            // Its own thread goes on when this one has dropped it.
            drop(part.async_op(|part| (0..200).try_for_each(|_| part.barrier()))?);
            Ok(())
        })?);
        Ok(())
    })
    .unwrap();
}

#[test]
fn messages_and_objects_bypass_queued_operations() {
    ranks(2, |rank, group| {
        if rank.rank() == 0 {
            let mut tensor = one(1);
            let work = group.async_op(move |group| group.all_reduce(&mut tensor, ReduceOp::Sum))?;
            assert_eq!(group.recv_object_list::<String>(1)?, ["first"]);
            group.send(&one(5), 1, 0)?;
            work.wait()?;
        } else {
            group.send_object_list(&["first"], 0)?;
            group.recv(&mut one(0), Some(0), 0)?;
            group.all_reduce(&mut one(1), ReduceOp::Sum)?;
        }
        Ok(())
    });
}

#[test]
fn timeout_in_a_chain_of_waits_blames_its_last_rank() {
    let (release, held) = bounded::<()>(1);
    let error = Spawn::new(3)
        .timeout(Duration::from_secs(4)) // also of the rendezvous, on a busy machine
        .run(move |rank| {
            let group = rank.init_process_group(Backend::Threaded)?;
            match rank.rank() {
                0 => {
                    let received = group.recv(&mut one(0), Some(1), 0);
                    release.send(())?;
                    received?;
                }
                1 => drop(group.recv(&mut one(0), Some(2), 0)?),
                _ => {
                    group.enter_step(7)?;
                    held.recv_timeout(TIMEOUT)?; // it does something else
                }
            }
            Ok(())
        })
        .unwrap_err();
    assert_eq!(error.failure.rank, 2, "{error}");
    assert!(error.failure.error.contains("rank 2 (last seen: step #7)"), "{error}");
}

#[test]
fn invalid_splits_are_refused_before_any_group_exists() {
    ranks(4, |rank, group| {
        if rank.rank() == 2 {
            for size in [0, 3, 5] {
                let error = group.new_subgroups(size).unwrap_err().to_string();
                let expected = format!("new_group: 4 ranks cannot be split into groups of {size}");
                assert!(error.starts_with(&expected), "{error}");
            }
            let told = |lists: &[&[usize]]| {
                group.new_subgroups_by_enumeration(lists).unwrap_err().to_string()
            };
            let twice = told(&[&[0, 1], &[3], &[2, 1]]);
            assert_eq!(twice, "new_group: rank 1 is in list 0 and in list 2; name it once");
            assert!(told(&[&[0, 1], &[4]]).contains("a member is rank 4"));
            assert!(told(&[&[0, 1], &[]]).contains("is empty or names a rank twice"));
            assert!(told(&[&[1, 1]]).contains("is empty or names a rank twice"));
        }
        group.barrier()?; // nobody has been in a collective meanwhile
        Ok(())
    });
}

#[test]
fn failure_ends_wait_timeout_and_every_later_wait() {
    for message in [false, true] {
        let (open, opened) = bounded(1);
        let error = try_ranks(2, move |rank, group| {
            if rank.rank() == 1 {
                opened.recv()?;
                anyhow::bail!("the cause");
            }
            let mut tensor = one(0);
            let mut work = if message {
                group.irecv(&mut tensor, Some(1), 0)?
            } else {
                group.async_op(|group| group.barrier())?
            };
            assert!(!work.wait_timeout(Duration::from_millis(1))?);
            open.send(())?;
            let long = Duration::from_secs(1000);
            for _ in 0..2 {
                let error = work.wait_timeout(long).unwrap_err();
                assert!(matches!(error, Error::Cancelled { by: 1, .. }), "{error}");
            }
            assert!(matches!(work.wait(), Err(Error::Cancelled { by: 1, .. })));
            Ok(())
        })
        .unwrap_err();
        assert_eq!(error.failure.error, "the cause");
    }
}
