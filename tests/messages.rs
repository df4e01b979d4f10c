//! What goes from one rank to one other, and objects.

use std::thread;
use std::time::Duration;

use ddp_mp::process_group::DTYPES;
use ddp_mp::{Backend, Error, P2POp, ProcessGroup, Rank, Spawn, SpawnError};
use tch::{Device, Kind, Tensor};

use crate::harness::{TIMEOUT, ranks, try_ranks};
use crate::shared::kinds::numbers;

fn one(value: i64) -> Tensor {
    Tensor::from_slice(&[value])
}

#[test]
fn every_dtype_is_sent_between_every_pair_of_ranks() {
    for world_size in 2..=4usize {
        ranks(world_size, move |rank, group| {
            let me = rank.rank();
            for kind in DTYPES.into_iter().chain([Kind::ComplexFloat]) {
                for (len, from, to) in (0..world_size * world_size)
                    .map(|i| (i as i64 * 7 % 70, i / world_size, i % world_size))
                    .filter(|(_, from, to)| from != to)
                {
                    if me == from {
                        group.send(&numbers(from, len, kind), to, 0)?;
                    } else if me == to {
                        let mut tensor = numbers(to, len, kind);
                        assert_eq!(group.recv(&mut tensor, Some(from), 0)?, from);
                        assert!(tensor.equal(&numbers(from, len, kind)), "{kind:?} {len}");
                    }
                }
            }
            Ok(())
        });
    }
}

/// What `f` ends with on ranks, which must fail.
fn failing(
    world_size: usize,
    f: impl Fn(&Rank, &ProcessGroup) -> ddp_mp::Result<()> + Send + Sync + 'static,
) -> Box<SpawnError> {
    failing_within(TIMEOUT, world_size, f)
}

/// As [`failing`], on ranks that wait for this long at most, also for each other at the start.
fn failing_within(
    timeout: Duration,
    world_size: usize,
    f: impl Fn(&Rank, &ProcessGroup) -> ddp_mp::Result<()> + Send + Sync + 'static,
) -> Box<SpawnError> {
    Spawn::new(world_size)
        .timeout(timeout)
        .grace_period(TIMEOUT)
        .run(move |rank| {
            let group = rank.init_process_group(Backend::Threaded)?;
            Ok(f(rank, &group)?)
        })
        .unwrap_err()
}

#[test]
fn tensor_mismatch_is_reported_to_both_ranks() {
    for (kind, len) in [(Kind::Float, 4), (Kind::Int64, 3)] {
        let error = failing(2, move |rank, group| {
            let mut tensor = numbers(0, 4, Kind::Int64);
            let result = if rank.rank() == 0 {
                group.send(&numbers(0, len, kind), 1, 0)
            } else {
                group.recv(&mut tensor, Some(0), 0).map(drop)
            };
            let text = result.as_ref().unwrap_err().to_string();
            assert!(text.contains("rank 1 expects int64 [4] from rank 0, which sends"), "{text}");
            result
        });
        assert_eq!(error.failure.rank, 1);
        assert!(
            error.to_string().starts_with("ranks 0 (CPU:0) and 1 (CPU:1) failed in "),
            "{error}"
        );
        assert!(error.also_failed.is_empty(), "{error}");
    }
}

#[test]
fn wait_for_a_missing_message_names_the_other_rank() {
    const LIMIT: Duration = Duration::from_secs(4);
    thread::scope(|scope| {
        // Both send first: each waits for the other.
        scope.spawn(|| {
            let sends = |rank: &Rank, group: &ProcessGroup| group.send(&one(1), 1 - rank.rank(), 0);
            let message = failing_within(LIMIT, 2, sends).to_string();
            assert!(message.contains("waited 4s in send #0 for rank"), "{message}");
            assert!(message.contains("last seen: send #0"), "{message}");
        });
        // The other is in something else.
        scope.spawn(|| {
            let error = failing_within(LIMIT, 2, |rank, group| match rank.rank() {
                0 => group.recv(&mut one(0), Some(1), 0).map(drop),
                _ => group.barrier(),
            });
            // Both wait, each for the other: whoever noticed first says so.
            let message = error.to_string();
            let is_seen = |at: &str| message.contains(&format!("last seen: {at} #0"));
            assert!(is_seen("recv") || is_seen("barrier"), "{message}");
        });
    });

    // The other has ended.
    let error = failing(2, |rank, group| match rank.rank() {
        0 => group.recv(&mut one(0), Some(1), 0).map(drop),
        _ => Ok(()),
    });
    let message = error.to_string();
    assert!(message.contains("rank 1 (CPU:1) ended too early"), "{message}");
    assert!(message.contains("while rank 0 was still waiting in recv #0"), "{message}");

    // Another one fails.
    let error = failing(3, |rank, group| match rank.rank() {
        2 => Err(Error::usage("the cause".into())),
        1 => group.recv(&mut one(0), None, 0).map(drop),
        _ => group.irecv(&mut one(0), Some(1), 0)?.wait(),
    });
    assert_eq!(error.to_string(), "rank 2 (CPU:2) failed in its function: the cause");
}

#[test]
fn message_is_received_after_its_sender_finished() {
    let (has_ended, ended) = crossbeam::channel::bounded::<()>(0);
    let has_ended = std::sync::Mutex::new(Some(has_ended));
    ranks(2, move |rank, group| {
        if rank.rank() == 0 {
            drop(group.isend(&one(9), 1, 0)?);
            drop(has_ended.lock().unwrap().take());
        } else {
            ended.recv().unwrap_err(); // the other end is gone
            // The other function returns; whether it has by now, the message is there.
            let mut tensor = one(0);
            group.recv(&mut tensor, Some(0), 0)?;
            assert_eq!(tensor.int64_value(&[0]), 9);
        }
        Ok(())
    });
}

#[test]
fn cancelled_receive_is_never_written_to() {
    for wait in [0, 1000, 5000, 20000] {
        let error = Spawn::new(3)
            .timeout(TIMEOUT)
            .run(move |rank| {
                let group = rank.init_process_group(Backend::Threaded)?;
                // Transposed, so that the copy takes a while.
                let tensor = Tensor::ones([2000, 2000], (Kind::Int, Device::Cpu));
                let mut target = Tensor::zeros([2000, 2000], (Kind::Int, Device::Cpu));
                group.barrier()?;
                match rank.rank() {
                    0 => {
                        let result = group.recv(&mut target, Some(1), 0);
                        let (now, all) = (target.sum(Kind::Int64).int64_value(&[]), 4_000_000);
                        assert_eq!(now, if result.is_ok() { all } else { 0 });
                        result?;
                    }
                    1 => group.send(&tensor.transpose(0, 1), 0, 0)?,
                    _ => {
                        std::thread::sleep(Duration::from_micros(wait)); // to hit different moments
                        anyhow::bail!("the cause");
                    }
                }
                Ok(())
            })
            .unwrap_err();
        assert_eq!(error.failure.error, "the cause");
    }
}

#[test]
fn invalid_messages_are_refused() {
    ranks(2, |rank, group| {
        let me = rank.rank();
        let told = |result: ddp_mp::Result<()>| result.unwrap_err().to_string();
        assert!(told(group.send(&one(1), me, 0)).contains("is this rank itself"));
        assert!(told(group.send(&one(1), 2, 0)).contains("dst is rank 2, but the group has"));
        let error = told(group.recv(&mut one(1), Some(7), 0).map(drop));
        assert!(error.contains("recv: src is rank 7"), "{error}");
        assert!(told(group.send(&Tensor::new(), 1 - me, 0)).contains("undefined"));
        // Nothing of a batch is started if one of it is wrong.
        let ops = [P2POp::isend(&one(1), 1 - me, 0), P2POp::isend(&one(1), 9, 0)];
        assert!(group.batch_isend_irecv(&ops).is_err());
        group.barrier()?;
        Ok(())
    });
    ranks(1, |_, group| {
        let error = group.recv(&mut one(1), None, 0).unwrap_err().to_string();
        assert!(error.contains("nobody else in the group"), "{error}");
        Ok(())
    });
}

#[test]
fn objects_of_another_type_are_refused() {
    let error = try_ranks(2, |rank, group| {
        if rank.rank() == 0 {
            group.broadcast_object_list(&mut vec!["text".to_string(); 2], 0)?;
        } else {
            group.broadcast_object_list(&mut Vec::<(u8, u8)>::new(), 0)?;
        }
        Ok(())
    })
    .unwrap_err();
    let message = error.to_string();
    assert!(message.contains("rank 1 (CPU:1)"), "{message}");
    assert!(message.contains("the received object is not of the type"), "{message}");

    ranks(1, |_, group| {
        let error = group.scatter_object_list(Some(&[1, 2]), 0).unwrap_err().to_string();
        assert!(error.contains("an object for each of 1 ranks"), "{error}");
        assert!(group.scatter_object_list::<i32>(None, 0).is_err());
        Ok(())
    });
}
