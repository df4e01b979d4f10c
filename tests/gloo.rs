//! The `gloo` backend, with several processes' worth of ranks in this one: what they reduce, and in which precision.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crossbeam::channel::bounded;
use ddp_mp::ffi::cuda::Cuda;
use ddp_mp::launch::{JoinLaunchOptions, Launch, LaunchOptions, Nproc, SharedMemory, detect};
use ddp_mp::process_group::DTYPES;
use ddp_mp::{Backend, ProcessGroup, Rank, ReduceOp, SpawnError};
use proptest::prelude::*;
use proptest::sample::Index;
use tch::{Device, Kind, Tensor};

use crate::harness::{TIMEOUT, free_port, ranks, shared_memory, some_of};

/// Runs `f` on ranks of several processes, `counts` of them each, and returns what each process ended with. The
/// processes are threads of this one that share nothing but a store and the network.
pub(crate) fn try_processes<T: Send + 'static>(
    counts: &[usize],
    timeout: Duration,
    f: impl Fn(&Rank, Rc<ProcessGroup>) -> anyhow::Result<T> + Send + Sync + 'static,
) -> Vec<Result<Vec<T>, Box<SpawnError>>> {
    let (port, f) = (free_port(), Arc::new(f));
    let process = |(process, &count): (usize, &usize)| {
        let options = JoinLaunchOptions { timeout: TIMEOUT, ..JoinLaunchOptions::default() };
        let launch = launch(counts.len(), process, count, port);
        let spawn = launch.join(&Cuda::default(), options).unwrap().spawn().threads_per_rank(1);
        let f = f.clone();
        spawn.timeout(timeout).grace_period(TIMEOUT).run(move |rank| {
            let group = rank.init_process_group(Backend::Gloo)?;
            f(rank, group)
        })
    };
    thread::scope(|scope| {
        let start = |it| scope.spawn(move || process(it));
        let threads: Vec<_> = counts.iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// How process `process` of `processes` is started, with `count` ranks.
fn launch(processes: usize, process: usize, count: usize, port: u16) -> Launch {
    let options = LaunchOptions {
        nnodes: Some(processes),
        node_rank: Some(process),
        master_addr: Some("127.0.0.1".into()),
        master_port: Some(port),
        nproc: Nproc::Count(count),
        shared_memory: shared_memory(),
        ..LaunchOptions::default()
    };
    detect(&|_| None, &options, 0).unwrap()
}

/// As [`try_processes`], for ranks that must not fail: what each has returned, in their order.
pub(crate) fn processes<T: Send + 'static>(
    counts: &[usize],
    f: impl Fn(&Rank, Rc<ProcessGroup>) -> anyhow::Result<T> + Send + Sync + 'static,
) -> Vec<T> {
    let ended = try_processes(counts, TIMEOUT, f);
    let well = |it: Result<Vec<T>, _>| it.unwrap_or_else(|error| panic!("{counts:?}: {error}"));
    ended.into_iter().flat_map(well).collect()
}

const OPS: [ReduceOp; 6] = [
    ReduceOp::Sum,
    ReduceOp::Avg,
    ReduceOp::PremulSum(0.25),
    ReduceOp::Product,
    ReduceOp::Min,
    ReduceOp::Max,
];

/// Numbers whose sums and products have other last bits in another order.
fn rough(rank: usize, len: i64, kind: Kind) -> Tensor {
    let index = Tensor::arange(len, (Kind::Double, Device::Cpu));
    ((index + 1.0) * (0.37 + rank as f64)).sin().to_kind(kind)
}

/// Returns a hash of what each rank has of each reduction.
fn reductions(rank: &Rank, group: &ProcessGroup) -> anyhow::Result<Vec<(String, u64)>> {
    let (me, count) = (rank.rank(), rank.world_size());
    let mut all = Vec::new();
    // In a header, in one exchange, in a chain of one piece, and of several.
    let lens = [7, 3000, 50_001, 1_300_001];
    for (kind, len) in [Kind::Half, Kind::BFloat16, Kind::Float, Kind::Double]
        .into_iter()
        .flat_map(|kind| lens.map(|len| (kind, len)))
        .filter(|&(kind, len)| len < 1_000_000 || matches!(kind, Kind::Float | Kind::Half))
    {
        let mut keep = |name: &str, op, tensor: &Tensor| {
            let bytes = Vec::<u8>::try_from(tensor.view_dtype(Kind::Uint8)).unwrap();
            let mut hash = DefaultHasher::new();
            bytes.hash(&mut hash);
            all.push((format!("{name} {op} {kind:?} {len}"), hash.finish()));
        };
        let mine = rough(me, len, kind);
        for op in OPS.into_iter().filter(|op| len < 1_000_000 || *op == ReduceOp::Avg) {
            let mut tensor = mine.copy();
            group.all_reduce(&mut tensor, op)?;
            keep("all_reduce", op, &tensor);
            for root in 0..count {
                let mut tensor = mine.copy();
                group.reduce(&mut tensor, root, op)?;
                keep(&format!("reduce to {root}"), op, &tensor);
            }
            let list: Vec<Tensor> = (0..count).map(|to| mine.roll([to as i64], [0])).collect();
            let mut tensor = mine.zeros_like();
            group.reduce_scatter(&mut tensor, &list, op)?;
            keep("reduce_scatter", op, &tensor);
        }
        // Whose sum is beyond float16, and whose average is not.
        let mut tensor = Tensor::full([len], 40000., (kind, Device::Cpu));
        group.all_reduce(&mut tensor, ReduceOp::Avg)?;
        keep("large", ReduceOp::Avg, &tensor);
    }
    Ok(all)
}

const LAYOUTS: [&[usize]; 5] = [&[1, 1], &[1, 1, 2], &[3, 1], &[1, 1, 1, 1], &[2, 2]];

#[test]
fn reductions_have_the_bits_of_threads_in_every_layout() {
    for counts in some_of(LAYOUTS, 3) {
        let threads = ranks(counts.iter().sum(), |rank, group| reductions(rank, &group));
        let across = processes(counts, |rank, group| reductions(rank, &group));
        for (rank, (threads, across)) in threads.iter().zip(&across).enumerate() {
            for ((name, expected), (_, found)) in threads.iter().zip(across) {
                assert_eq!(found, expected, "{counts:?}, rank {rank}: {name}");
            }
        }
    }
}

fn one(value: i64) -> Tensor {
    Tensor::from_slice(&[value])
}

/// A message of a random order: its ranks, its tag, and how many numbers it has.
#[derive(Debug, Clone)]
struct Message {
    from: usize,
    to: usize,
    tag: u64,
    len: i64,
    /// Whether it is received from anybody.
    is_from_anybody: bool,
}

/// Tags from both ends; what is received from anybody has one of its own.
const TAGS: [u64; 4] = [0, 1, u64::MAX - 2, u64::MAX];

fn message(world_size: usize) -> impl Strategy<Value = Message> {
    // Nothing, little, the most that goes along with an offer, one more, and much.
    let len = prop::sample::select(vec![0, 1, 100, 8192, 8193, 200_000]);
    (0..world_size, 1..world_size, prop::sample::select(&TAGS[..]), len).prop_map(
        move |(from, step, tag, len)| {
            let to = (from + step) % world_size;
            Message { from, to, tag, len, is_from_anybody: tag == TAGS[2] }
        },
    )
}

/// What message `number` of the order is filled with.
fn filled(message: &Message, number: usize) -> Tensor {
    Tensor::full(
        [message.len],
        number as i64 * 100 + message.from as i64,
        (Kind::Int64, Device::Cpu),
    )
}

/// Every rank sends its messages in the order of the list and expects those for it in that order, but begins the one
/// and the other in turns that `turns` decides, and waits for them in the order of `waits`.
fn exchange(
    (me, group): (usize, &ProcessGroup),
    messages: &[Message],
    turns: &[bool],
    waits: &[Index],
) -> anyhow::Result<()> {
    let numbered = || messages.iter().enumerate();
    let mut sends = numbered().filter(|(_, it)| it.from == me).peekable();
    let mut receives = numbered().filter(|(_, it)| it.to == me).peekable();
    let (mut turns, mut works, mut received) = (turns.iter().cycle(), Vec::new(), Vec::new());
    while sends.peek().is_some() || receives.peek().is_some() {
        if *turns.next().unwrap() {
            let Some((number, message)) = sends.next() else { continue };
            works.push(group.isend(&filled(message, number), message.to, message.tag)?);
        } else {
            let Some((number, message)) = receives.next() else { continue };
            let mut into = Tensor::full([message.len], -1, (Kind::Int64, Device::Cpu));
            if message.is_from_anybody {
                received.push((number, message, into));
                continue;
            }
            works.push(group.irecv(&mut into, Some(message.from), message.tag)?);
            received.push((number, message, into));
        }
    }
    // Of one length only, because who comes first is not known.
    for (_, message, into) in received.iter_mut().filter(|(_, it, _)| it.is_from_anybody) {
        let from = group.recv(into, None, message.tag)?;
        assert_eq!(into.int64_value(&[0]) % 100, from as i64);
    }
    for wait in waits.iter().cycle().take(works.len()) {
        let work = works.swap_remove(wait.index(works.len()));
        work.wait()?;
    }
    for (number, message, into) in received.iter().filter(|(_, it, _)| !it.is_from_anybody) {
        assert!(into.equal(&filled(message, *number)), "{message:?}");
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    /// Messages of one source, destination and tag arrive in their order, whatever the others do.
    #[test]
    fn messages_in_random_order_all_arrive(
        (counts, mut messages) in prop::sample::select(vec![
            vec![1, 1], vec![2, 2], vec![1, 3, 2],
        ]).prop_flat_map(|counts: Vec<usize>| {
            let world_size = counts.iter().sum();
            (Just(counts), prop::collection::vec(message(world_size), 0..60))
        }),
        turns: [Vec<bool>; 6],
        waits in prop::collection::vec(any::<Index>(), 1..20),
    ) {
        messages.iter_mut().filter(|it| it.is_from_anybody).for_each(|it| it.len = 300);
        processes(&counts, move |rank, group| {
            let me = rank.rank();
            let turns = [&turns[me][..], &[true, false]].concat();
            exchange((me, &group), &messages, &turns, &waits)?;
            // The same again, in the other direction, on connections that are there.
            let back = |it: &Message| Message { from: it.to, to: it.from, ..it.clone() };
            let back: Vec<Message> = messages.iter().map(back).collect();
            exchange((me, &group), &back, &turns, &waits)
        });
    }
}

#[test]
fn large_and_strided_messages_cross_without_deadlock() {
    processes(&[2, 1], |rank, group| {
        let me = rank.rank();
        let other = if me == 2 { 0 } else { 2 };
        let tensor = |rank: usize| {
            let numbers = Tensor::arange(3_000_000, (Kind::Float, Device::Cpu)) + rank as i64;
            numbers.view([1000, 3000])
        };
        if me == 1 {
            return Ok(());
        }
        let received = Tensor::zeros([3000, 2000], (Kind::Float, Device::Cpu));
        let mut into = received.slice(1, 0, 2000, 2);
        let sent = group.isend(&tensor(me).transpose(0, 1), other, 0)?;
        group.irecv(&mut into, Some(other), 0)?.wait()?;
        sent.wait()?;
        assert!(into.equal(&tensor(other).transpose(0, 1)));
        assert_eq!(received.slice(1, 1, 2000, 2).abs().max().double_value(&[]), 0.);
        Ok(())
    });
}

/// What the first process ends with.
fn failing(
    counts: &[usize],
    timeout: Duration,
    f: impl Fn(usize, &ProcessGroup) -> ddp_mp::Result<()> + Send + Sync + 'static,
) -> Vec<String> {
    let ended = try_processes(counts, timeout, move |rank, group| Ok(f(rank.rank(), &group)?));
    ended.into_iter().map(|it| it.unwrap_err().to_string()).collect()
}

#[test]
fn tensor_mismatch_is_reported_in_both_processes() {
    for len in [4, 100_000] {
        let told = failing(&[1, 2], TIMEOUT, move |me, group| match me {
            0 => group.send(&Tensor::zeros([len], (Kind::Float, Device::Cpu)), 2, 5),
            1 => group.recv(&mut one(0), Some(2), 6).map(drop),
            _ => group.recv(&mut one(0), Some(0), 5).map(drop),
        });
        for told in told {
            let expected =
                format!("rank 2 expects int64 [1] from rank 0, which sends float32 [{len}]");
            assert!(told.contains(&expected), "{told}");
        }
    }
}

/// Long: it waits for time-outs, which also limit the rendezvous on a busy machine.
#[test]
fn wait_for_a_missing_message_ends_with_the_cause() {
    // A send without a receiver, and a receive without a sender; each with a small and a large message. The limit also
    // applies to the rendezvous, which takes more than a second on a busy machine. So the limit is 10 seconds, and the
    // cases run at the same time.
    let ends_after_the_limit = |len, sends| {
        let told = failing(&[1, 1], Duration::from_secs(10), move |me, group| {
            let mut tensor = Tensor::zeros([len], (Kind::Float, Device::Cpu));
            match me {
                0 if sends => group.send(&tensor, 1, 0),
                0 => group.recv(&mut tensor, Some(1), 0).map(drop),
                _ => group.recv(&mut tensor, Some(0), 1).map(drop),
            }
        });
        assert!(told[0].contains("waited 10s in"), "{told:?}");
    };
    thread::scope(|scope| {
        for (len, sends) in [(1, true), (1, false), (100_000, true), (100_000, false)] {
            scope.spawn(move || ends_after_the_limit(len, sends));
        }
    });
    // The other process has ended.
    let told = try_processes(&[1, 1], TIMEOUT, |rank, group| match rank.rank() {
        0 => Ok(group.recv(&mut one(0), Some(1), 0).map(drop)?),
        _ => Ok(()),
    });
    let told = told.into_iter().next().unwrap().unwrap_err().to_string();
    assert!(told.contains("the connection to rank 1"), "{told}");
    assert!(told.contains("is lost"), "{told}");
    // What was sent is asked for by nobody, and its rank does not wait for it.
    let told = try_processes(&[1, 1], TIMEOUT, |rank, group| {
        if rank.rank() == 0 {
            let tensor = Tensor::zeros([100_000], (Kind::Float, Device::Cpu));
            drop(group.isend(&tensor, 1, 0)?);
        }
        Ok(())
    });
    let told = told.into_iter().next().unwrap().unwrap_err().to_string();
    assert!(told.contains("send #0"), "{told}");
    // Another one fails.
    let told = failing(&[1, 2], TIMEOUT, |me, group| match me {
        2 => Err(ddp_mp::Error::usage("the cause".into())),
        1 => group.recv(&mut one(0), None, 0).map(drop),
        _ => group.irecv(&mut one(0), Some(1), 0)?.wait(),
    });
    for told in told {
        assert!(told.contains("rank 2") && told.contains("the cause"), "{told}");
    }
}

#[test]
fn message_is_received_after_its_sender_finished() {
    for _ in 0..5 {
        processes(&[1, 1, 1], |rank, group| {
            match rank.rank() {
                0 => {
                    // Which comes when rank 2 has ended, or does not know that yet.
                    let mut tensor = one(0);
                    group.recv(&mut tensor, Some(1), 0)?;
                    for expected in [7, 8] {
                        group.recv(&mut tensor, Some(2), 0)?;
                        assert_eq!(tensor.int64_value(&[0]), expected);
                    }
                }
                1 => group.send(&one(1), 0, 0)?,
                _ => [7, 8].into_iter().try_for_each(|it| group.isend(&one(it), 0, 0).map(drop))?,
            }
            Ok(())
        });
    }
}

/// The timeout is for a rank that waits, and the sender does not.
/// Long: it waits for longer than a time-out, which also limits the rendezvous on a busy machine.
#[test]
fn late_receive_succeeds_while_its_sender_computes() {
    const LIMIT: Duration = Duration::from_secs(8);
    let (has_taken, taken) = crossbeam::channel::bounded(1);
    let ended = try_processes(&[1, 1], LIMIT, move |rank, group| {
        let mut tensor = Tensor::ones([100_000], (Kind::Float, Device::Cpu));
        if rank.rank() == 0 {
            let sent = group.isend(&tensor, 1, 0)?;
            taken.recv_timeout(TIMEOUT)?;
            sent.wait()?;
        } else {
            thread::sleep(LIMIT + LIMIT / 2); // its own work
            group.recv(&mut tensor, Some(0), 0)?;
            has_taken.send(())?;
        }
        Ok(())
    });
    ended.into_iter().for_each(|it| drop(it.unwrap()));
}

/// Nobody waits for the receiver, which needs the sender for something else first.
#[test]
fn message_of_a_dropped_subgroup_is_received() {
    for (counts, len) in [(&[1, 1, 1][..], 1), (&[1, 1, 1], 100_000), (&[2, 1], 100_000)] {
        processes(counts, move |rank, group| {
            let part = group.new_group(&[0, 2])?;
            let mut tensor =
                Tensor::full([len], rank.rank() as i64 + 5, (Kind::Int64, Device::Cpu));
            if rank.rank() == 0 {
                let part = part.expect("it is in it");
                drop(part.isend(&tensor, 1, 0)?);
                drop(part);
                group.barrier()?;
            } else {
                group.barrier()?;
                if let Some(part) = part {
                    part.recv(&mut tensor, Some(0), 0)?;
                    assert_eq!(tensor.int64_value(&[len - 1]), 5);
                }
            }
            Ok(())
        });
    }
}

/// What its group has left ends with the run.
#[test]
fn unreceived_message_of_a_dropped_subgroup_blocks_no_rank() {
    let told = failing(&[1, 1, 1], TIMEOUT, |me, group| {
        let part = group.new_group(&[0, 2])?;
        if me == 0 {
            let part = part.expect("it is in it");
            drop(part.isend(&Tensor::ones([100_000], (Kind::Float, Device::Cpu)), 1, 0)?);
        }
        group.barrier()?;
        if me == 1 { Err(ddp_mp::Error::usage("the cause".into())) } else { group.barrier() }
    });
    for told in told {
        assert!(told.contains("rank 1") && told.contains("the cause"), "{told}");
    }
}

/// A user's "for ever", which is added to a point in time. `src: runtime::clock` has every other wait.
#[test]
fn longest_durations_do_not_overflow() {
    const EVER: Duration = Duration::MAX;
    let ended = try_processes(&[1, 1], EVER, |rank, group| {
        group.monitored_barrier(EVER)?;
        let (mut tensor, other) = (one(rank.rank() as i64), 1 - rank.rank());
        let mut sent = group.isend(&one(7), other, 0)?;
        assert_eq!(group.recv(&mut tensor, Some(other), 0)?, other);
        assert!(sent.wait_timeout(EVER)?);
        let mut met = group.async_op(|group| group.barrier())?;
        assert!(met.wait_timeout(EVER)?);
        Ok(())
    });
    ended.into_iter().for_each(|it| drop(it.unwrap()));
}

/// Gloo's own timeout, which is the one of the run, may end a call first.
/// Long: it waits for that timeout.
#[test]
fn call_that_gloo_ends_has_timed_out() {
    if shared_memory() != SharedMemory::Off {
        return; // without Gloo; `make test-all` runs this over TCP too
    }
    let (ended_tx, ended_rx) = bounded::<()>(0);
    let ended_tx = Mutex::new(Some(ended_tx));
    let ended = try_processes(&[1, 1], Duration::from_secs(8), move |rank, group| {
        if rank.rank() == 1 {
            let _ = ended_rx.recv(); // until the other rank has dropped its end
            return Ok(());
        }
        let ended_tx = ended_tx.lock().unwrap().take();
        let result = group.monitored_barrier(TIMEOUT);
        drop(ended_tx);
        Ok(result?)
    });
    let told = ended.into_iter().next().unwrap().unwrap_err().to_string();
    assert!(told.contains("rank 0 waited 8s in barrier #0 for rank 1"), "{told}");
}

/// Only the receiver's process sees the difference; the others have called what fits for them.
#[test]
fn all_to_all_size_mismatch_names_the_two_ranks() {
    for (counts, from, to, expected) in [
        (&[1, 1, 1][..], 0, 1, "in all_to_all rank 0 sends 5 elements to rank 1, which expects 6"),
        (&[1, 1, 1], 2, 0, "in all_to_all rank 2 sends 5 elements to rank 0, which expects 6"),
        (&[1, 2], 0, 1, "in all_to_all rank 0 sends 6 elements to ranks 1 and 2, which expect 7"),
        (&[2, 1], 1, 2, "in all_to_all ranks 0 and 1 send 6 elements to rank 2, which expects 7"),
        (&[1, 3, 1], 4, 2, "in all_to_all rank 4 sends 7 elements to ranks 1-3, which expect 8"),
    ] {
        // In shared memory every rank sees all sizes.
        let of_ranks =
            format!("in all_to_all rank {from} sends 5 elements to rank {to}, which expects 6");
        let expected = if shared_memory() == SharedMemory::Off { expected } else { &of_ranks };
        let ended = try_processes(counts, TIMEOUT, move |rank, group| {
            let (me, count) = (rank.rank(), rank.world_size());
            let sizes = |mine: bool, other: usize, size: i64| -> Vec<i64> {
                let size = |rank| if mine && rank == other { size } else { 1 };
                (0..count).map(size).collect()
            };
            let (sent, expected) = (sizes(me == from, to, 5), sizes(me == to, from, 6));
            let tensor = |sizes: &[i64]| {
                Tensor::zeros([sizes.iter().sum::<i64>()], (Kind::Float, Device::Cpu))
            };
            let mut output = tensor(&expected);
            group.all_to_all_single(&mut output, &tensor(&sent), Some(&expected), Some(&sent))?;
            Ok(())
        });
        for it in ended {
            let error = it.unwrap_err();
            assert!(error.to_string().contains(expected), "{counts:?}: {error}");
            let tied = &error.failure.tied;
            let is_of_the_pair =
                [from, to].iter().all(|it| tied.iter().any(|(rank, _)| rank == it));
            let others = counts.len() > 2 && counts.iter().all(|it| *it == 1) && tied.len() != 2;
            assert!(is_of_the_pair && !others, "{counts:?}: {error}");
        }
    }
}

/// Their memory does not have their elements as they are.
#[test]
fn conjugated_and_negated_messages_are_resolved() {
    processes(&[1, 1], |rank, group| {
        // With the offer, and when the receiver is ready.
        for len in [5, 100_000] {
            let numbers = Tensor::arange(len, (Kind::Float, Device::Cpu)) + 1.;
            let numbers = Tensor::complex(&numbers, &(&numbers * 2.));
            if rank.rank() == 0 {
                group.send(&numbers, 1, 0)?;
                group.send(&numbers.conj(), 1, 0)?;
                group.send(&numbers.internal_neg_view(), 1, 0)?;
                continue;
            }
            let conjugated = numbers.zeros_like().conj();
            let negated = numbers.zeros_like().internal_neg_view();
            assert!(conjugated.is_conj() && negated.is_neg());
            for expected in [&numbers, &numbers.conj(), &numbers.neg()] {
                let into = if expected.is_conj() { &negated } else { &conjugated };
                group.recv(&mut into.shallow_clone(), Some(0), 0)?;
                let [found, expected] =
                    [into, expected].map(|it| it.resolve_conj().resolve_neg().view_as_real());
                assert!(found.equal(&expected), "{len}");
            }
        }
        Ok(())
    });
}

#[test]
fn quantized_dtypes_are_refused_and_the_connection_stays() {
    let plain = [
        Kind::Bool,
        Kind::ComplexHalf,
        Kind::ComplexDouble,
        Kind::Float8e5m2,
        Kind::Float8e4m3fn,
        Kind::Float8e5m2fnuz,
        Kind::Float8e4m3fnuz,
    ];
    let kinds = DTYPES.into_iter().chain(plain).collect::<Vec<_>>();
    processes(&[1, 1], move |rank, group| {
        for (kind, name) in
            [(Kind::QInt8, "qint8"), (Kind::QUInt8, "quint8"), (Kind::QInt32, "qint32")]
        {
            for len in [3, 100_000] {
                let numbers = Tensor::ones([len], (Kind::Float, Device::Cpu));
                if rank.rank() == 0 {
                    let quantized = numbers.quantize_per_tensor(0.5, 0, kind);
                    let error = group.send(&quantized, 1, 0).unwrap_err();
                    assert!(matches!(error, ddp_mp::Error::Input { .. }), "{error}");
                    let expected =
                        format!("send: rank 0 cannot send a {name} tensor to rank 1 in another");
                    assert!(error.to_string().starts_with(&expected), "{error}");
                }
            }
        }
        for &kind in &kinds {
            for len in [3, 100_000] {
                let bytes = kind.elt_size_in_bytes() as i64 * len;
                let sent = Tensor::ones([bytes], (Kind::Uint8, Device::Cpu)).view_dtype(kind);
                if rank.rank() == 0 {
                    group.send(&sent, 1, 0)?;
                } else {
                    let mut into = sent.view_dtype(Kind::Uint8).zeros_like().view_dtype(kind);
                    group.recv(&mut into, Some(0), 0)?;
                    let [found, sent] = [&into, &sent].map(|it| it.view_dtype(Kind::Uint8));
                    assert!(found.equal(&sent), "{kind:?} {len}");
                }
            }
        }
        Ok(())
    });
}
