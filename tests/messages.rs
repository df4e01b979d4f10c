//! What goes from one rank to one other, and objects.

use std::collections::BTreeMap;
use std::time::Duration;

use ddp_mp::{Backend, Error, P2POp, Spawn, SpawnError};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use crate::harness::{TIMEOUT, ranks, try_ranks};

const KINDS: [Kind; 11] = [
    Kind::Double,
    Kind::Float,
    Kind::Half,
    Kind::BFloat16,
    Kind::Int64,
    Kind::Int,
    Kind::Int16,
    Kind::Int8,
    Kind::Uint8,
    Kind::Bool,
    Kind::ComplexFloat,
];

fn numbers(rank: usize, len: i64, kind: Kind) -> Tensor {
    let base = Tensor::arange(len, (Kind::Int64, Device::Cpu)).remainder(5);
    ((base + 1) * (rank as i64 + 1)).to_kind(kind)
}

fn one(value: i64) -> Tensor {
    Tensor::from_slice(&[value])
}

#[test]
fn every_dtype_is_sent_between_every_pair_of_ranks() {
    for world_size in 2..=4usize {
        ranks(world_size, move |rank, group| {
            let me = rank.rank();
            for kind in KINDS {
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

#[test]
fn messages_keep_their_order_within_a_tag() {
    ranks(2, |rank, group| {
        if rank.rank() == 0 {
            let sent: Vec<_> =
                (0..20).map(|i| group.isend(&one(i), 1, i as u64 % 2)).collect::<Result<_, _>>()?;
            // Nobody has received yet, or somebody has: either is fine, and all end.
            for work in sent {
                work.wait()?;
            }
        } else {
            let mut tensor = one(-1);
            for i in (1..20).step_by(2).chain((0..20).step_by(2)) {
                group.recv(&mut tensor, Some(0), i as u64 % 2)?;
                assert_eq!(tensor.int64_value(&[0]), i);
            }
        }
        Ok(())
    });
}

#[test]
fn recv_from_any_source_returns_the_sender() {
    let seen = ranks(4, |rank, group| {
        let mut seen = Vec::new();
        if rank.rank() > 0 {
            group.send(&one(rank.rank() as i64 * 10), 0, 3)?;
            return Ok(seen);
        }
        for _ in 1..4 {
            let mut tensor = one(0);
            let source = group.recv(&mut tensor, None, 3)?;
            assert_eq!(tensor.int64_value(&[0]), source as i64 * 10);
            seen.push(source);
        }
        seen.sort_unstable();
        Ok(seen)
    });
    assert_eq!(seen[0], [1, 2, 3]);
}

#[test]
fn strided_and_transposed_tensors_are_sent() {
    ranks(2, |rank, group| {
        let whole = numbers(rank.rank(), 24, Kind::Float).view([4, 6]);
        if rank.rank() == 0 {
            group.send(&whole.transpose(0, 1), 1, 0)?;
            group.send(&whole.slice(1, 0, 6, 2), 1, 0)?;
        } else {
            let expected = numbers(0, 24, Kind::Float).view([4, 6]);
            let mut received = Tensor::zeros([6, 4], (Kind::Float, Device::Cpu));
            group.recv(&mut received, Some(0), 0)?;
            assert!(received.equal(&expected.transpose(0, 1)));
            let before = whole.copy();
            group.recv(&mut whole.slice(1, 1, 6, 2), Some(0), 0)?;
            assert!(whole.slice(1, 1, 6, 2).equal(&expected.slice(1, 0, 6, 2)));
            assert!(whole.slice(1, 0, 6, 2).equal(&before.slice(1, 0, 6, 2)), "gaps");
        }
        Ok(())
    });
}

#[test]
fn batch_isend_irecv_exchanges_between_all_ranks() {
    for world_size in 1..=5usize {
        ranks(world_size, move |rank, group| {
            let me = rank.rank();
            let others: Vec<usize> = (0..world_size).filter(|&other| other != me).collect();
            let mut received: Vec<Tensor> = others.iter().map(|_| one(-1)).collect();
            let mine: Vec<Tensor> = others.iter().map(|&to| one((me * 10 + to) as i64)).collect();
            // Each rank in an order of its own.
            let sends = others.iter().zip(&mine).map(|(&to, t)| P2POp::isend(t, to, 0));
            let receives =
                others.iter().zip(&mut received).map(|(&from, t)| P2POp::irecv(t, Some(from), 0));
            let ops: Vec<P2POp> = if me % 2 == 0 {
                sends.chain(receives).collect()
            } else {
                receives.chain(sends).collect()
            };
            for work in group.batch_isend_irecv(&ops)? {
                work.wait()?;
            }
            for (from, tensor) in others.iter().zip(&received) {
                assert_eq!(tensor.int64_value(&[0]), (from * 10 + me) as i64);
            }
            Ok(())
        });
    }
}

#[test]
fn posted_receive_is_completed_by_the_send() {
    ranks(2, |rank, group| {
        if rank.rank() == 0 {
            let mut tensor = one(0);
            let received = group.irecv(&mut tensor, Some(1), 0)?;
            assert!(!received.is_completed(), "rank 1 waits for the barrier");
            group.barrier()?;
            // The sender has done the work by the time it comes here.
            group.barrier()?;
            assert!(received.is_completed());
            assert_eq!(tensor.int64_value(&[0]), 5);
            received.wait()?;
        } else {
            group.barrier()?;
            group.send(&one(5), 0, 0)?;
            group.barrier()?;
        }
        Ok(())
    });
}

/// What `f` ends with on ranks that wait for two seconds at most, also for each other on a busy machine.
fn failing(
    world_size: usize,
    f: impl Fn(&ddp_mp::Rank, &ddp_mp::ProcessGroup) -> ddp_mp::Result<()> + Send + Sync + 'static,
) -> Box<SpawnError> {
    Spawn::new(world_size)
        .timeout(Duration::from_secs(2))
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
    // Both send first: each waits for the other.
    let error = failing(2, |rank, group| group.send(&one(1), 1 - rank.rank(), 0));
    let message = error.to_string();
    assert!(message.contains("waited 2s in send #0 for rank"), "{message}");
    assert!(message.contains("last seen: send #0"), "{message}");

    // The other has ended.
    let error = failing(2, |rank, group| match rank.rank() {
        0 => group.recv(&mut one(0), Some(1), 0).map(drop),
        _ => Ok(()),
    });
    let message = error.to_string();
    assert!(message.contains("rank 1 (CPU:1) ended too early"), "{message}");
    assert!(message.contains("while rank 0 was still waiting in recv #0"), "{message}");

    // The other is in something else.
    let error = failing(2, |rank, group| match rank.rank() {
        0 => group.recv(&mut one(0), Some(1), 0).map(drop),
        _ => group.barrier(),
    });
    // Both wait, each for the other: whoever noticed first says so.
    let message = error.to_string();
    assert!(message.contains("last seen: recv #0") || message.contains("last seen: barrier #0"));

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
fn random_messages_with_random_delays_arrive() {
    ranks(3, |rank, group| {
        let (left, right) = ((rank.rank() + 2) % 3, (rank.rank() + 1) % 3);
        let mut pause = 12345 + rank.rank() as u64;
        for i in 0..2000i64 {
            pause = pause.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            for _ in 0..(pause >> 52) {
                std::hint::spin_loop();
            }
            let (mut from_left, mut from_right) = (one(-1), one(-1));
            let received = group.irecv(&mut from_left, Some(left), 0)?;
            let sent = group.isend(&one(i * 10 + rank.rank() as i64), right, 0)?;
            let sent_left = group.isend(&one(-i), left, 1)?;
            group.recv(&mut from_right, Some(right), 1)?;
            for work in [sent, sent_left, received] {
                work.wait()?;
            }
            assert_eq!(from_left.int64_value(&[0]), i * 10 + left as i64);
            assert_eq!(from_right.int64_value(&[0]), -i);
            if i % 100 == 0 {
                group.barrier()?;
            }
        }
        Ok(())
    });
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Thing {
    Nothing,
    Named { name: String, values: Vec<f64> },
    Many(BTreeMap<i64, Option<Thing>>),
}

fn thing(rank: usize) -> Thing {
    match rank % 3 {
        0 => Thing::Nothing,
        1 => Thing::Named { name: "é".repeat(rank), values: vec![f64::INFINITY, -0.0, 1e-300] },
        _ => Thing::Many((0..50).map(|i| (i - 25, (i % 2 == 0).then(|| thing(1)))).collect()),
    }
}

#[test]
fn objects_of_every_shape_are_exchanged() {
    for world_size in 1..=5usize {
        ranks(world_size, move |rank, group| {
            let me = rank.rank();
            let all: Vec<Thing> = (0..world_size).map(thing).collect();
            assert_eq!(group.all_gather_object(&thing(me))?, all);
            for root in 0..world_size {
                let mut list = if me == root { all.clone() } else { vec![thing(1); me] };
                group.broadcast_object_list(&mut list, root)?;
                assert_eq!(list, all);
                let gathered = group.gather_object(&thing(me), root)?;
                assert_eq!(gathered, (me == root).then(|| all.clone()));
                let mine = group.scatter_object_list((me == root).then_some(&all[..]), root)?;
                assert_eq!(mine, all[me]);
            }
            let mut none: Vec<Thing> = if me == 0 { vec![] } else { all.clone() };
            group.broadcast_object_list(&mut none, 0)?;
            assert_eq!(none, []);
            if me > 0 {
                group.send_object_list(&all, 0)?;
            } else {
                for from in 1..world_size {
                    assert_eq!(group.recv_object_list::<Thing>(from)?, all);
                }
            }
            Ok(())
        });
    }
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
