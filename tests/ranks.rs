//! What `spawn` promises, seen from a program that uses the library.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ddp_mp::{Backend, Error, Spawn, spawn};
use tch::{Device, Tensor};

use crate::harness::{TIMEOUT, in_parallel, repository};

#[test]
fn spawn_runs_each_rank_once_on_a_named_thread() {
    let sum = Arc::new(AtomicUsize::new(0));
    let captured = sum.clone();
    spawn(5, move |rank| {
        assert_eq!((rank.world_size(), rank.local_rank()), (5, rank.rank()));
        assert_eq!(rank.device(), Device::Cpu);
        let name = format!("rank{}", rank.rank());
        assert_eq!(std::thread::current().name(), Some(name.as_str()));
        captured.fetch_add(10usize.pow(rank.rank() as u32), Ordering::SeqCst);
        Ok(())
    })
    .unwrap();
    assert_eq!(sum.load(Ordering::SeqCst), 11_111);
    assert_eq!(Arc::strong_count(&sum), 1, "the function and all threads are gone");
}

#[test]
fn spawn_of_zero_ranks_returns_nothing() {
    assert!(spawn::<(), _>(0, |_| panic!("there is no rank")).unwrap().is_empty());
}

#[test]
fn spawn_returns_results_in_rank_order() {
    // The last rank ends first: each waits for the next one.
    let (tell, told): (Vec<_>, Vec<_>) = (0..4).map(|_| crossbeam::channel::bounded(1)).unzip();
    let returned = spawn(4, move |rank| {
        if let Some(next) = told.get(rank.rank() + 1) {
            next.recv()?;
        }
        tell[rank.rank()].send(())?;
        Ok((rank.rank(), Tensor::from(rank.rank() as i64 * 10)))
    })
    .unwrap();
    for (place, (rank, tensor)) in returned.iter().enumerate() {
        assert_eq!((*rank, tensor.int64_value(&[])), (place, place as i64 * 10));
    }
    assert_eq!(returned.len(), 4);

    // Of a run that fails nothing comes back, and nothing is left behind.
    let value = Arc::new(());
    let captured = value.clone();
    let error = spawn(3, move |rank| {
        anyhow::ensure!(rank.rank() != 1, "out of luck");
        Ok(captured.clone())
    })
    .unwrap_err();
    assert_eq!(error.failure.error, "out of luck");
    assert_eq!(Arc::strong_count(&value), 1);
}

#[test]
fn rank_thread_has_a_deep_stack_and_its_share_of_cores() {
    fn deep(level: usize) -> usize {
        let room = [level as u8; 1 << 20];
        let room = std::hint::black_box(&room);
        if level == 0 { usize::from(room[7]) } else { 1 + deep(level - 1) }
    }
    Spawn::new(2)
        .threads_per_rank(3)
        .run(|_| {
            assert_eq!(deep(40), 40, "40 MiB of stack");
            assert_eq!(tch::get_num_threads(), 3);
            Ok(())
        })
        .unwrap();
}

#[test]
fn first_failure_is_reported_without_its_echoes() {
    use anyhow::Context;
    type Echo = fn(ddp_mp::Result<()>) -> anyhow::Result<()>;
    let plain: Echo = |result| Ok(result?);
    let with_context: Echo = |result| result.context("while waiting").context("in the evening");
    let as_a_panic: Echo = |result| {
        result.unwrap();
        Ok(())
    };
    for echo in [plain, with_context, as_a_panic] {
        let error = spawn(3, move |rank| {
            let group = rank.init_process_group(Backend::Threaded)?;
            if rank.rank() == 1 {
                anyhow::bail!("the cause");
            }
            echo(group.barrier())
        })
        .unwrap_err();
        assert_eq!(error.to_string(), "rank 1 (CPU:1) failed in its function: the cause");
        assert!(error.also_failed.is_empty() && error.stuck.is_empty(), "{error}");
    }
}

#[test]
fn rank_that_ends_early_is_named() {
    // Before the rendezvous, before a collective, and as the host of the rendezvous.
    for (leaver, after_init) in [(1, false), (1, true), (0, false), (0, true)] {
        let error = Spawn::new(3)
            .timeout(TIMEOUT)
            .run(move |rank| {
                if rank.rank() == leaver && !after_init {
                    return Ok(());
                }
                let group = rank.init_process_group(Backend::Threaded)?;
                if rank.rank() == leaver {
                    return Ok(());
                }
                Ok(group.barrier()?)
            })
            .unwrap_err();
        assert_eq!(error.failure.rank, leaver);
        let message = error.to_string();
        assert!(
            message.contains(&format!("rank {leaver} (CPU:{leaver}) ended too early")),
            "{message}"
        );
        assert!(message.contains("every rank must make the same collective calls"), "{message}");
    }
}

#[test]
fn independent_failure_is_reported_after_the_first() {
    // Rank 0 never asks this crate for anything, so nothing tells it that it should stop.
    let (first_is_gone, first) = crossbeam::channel::bounded::<()>(0);
    let error = Spawn::new(3)
        .run::<(), _>(move |rank| match rank.rank() {
            0 => {
                let _ = first.recv(); // until rank 2 has been told, so the first is known
                anyhow::bail!("the second")
            }
            1 => anyhow::bail!("the first"),
            _ => {
                let result = rank.init_process_group(Backend::Threaded);
                assert!(matches!(result, Err(Error::Cancelled { by: 1, .. })), "{result:?}");
                let _ = first_is_gone.send(());
                anyhow::bail!("an echo in words of its own")
            }
        })
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "rank 1 (CPU:1) failed in its function: the first\n  \
         then rank 0 (CPU:0) failed in its function: the second"
    );
}

#[test]
fn swallowed_error_still_fails_the_run() {
    // Rank 1 comes when rank 0 has given up; what rank 0 makes of its error changes nothing.
    in_parallel(&[false, true], |&retry| {
        let (gave_up, wait) = crossbeam::channel::bounded::<()>(1);
        let error = Spawn::new(2)
            .timeout(Duration::from_secs(4)) // also of the rendezvous
            .run(move |rank| {
                let group = rank.init_process_group(Backend::Threaded)?;
                if rank.rank() == 1 {
                    let _ = wait.recv();
                    return Ok(group.barrier()?);
                }
                let result = group.barrier();
                assert!(matches!(result, Err(Error::Timeout { .. })), "{result:?}");
                let _ = gave_up.send(());
                if retry { Ok(group.barrier()?) } else { Ok(()) }
            })
            .unwrap_err();
        let message = error.to_string();
        assert_eq!(error.failure.rank, 1, "{message}");
        assert!(message.contains("rank 0 waited 4s in barrier #0 for rank 1"), "{message}");
        assert!(error.also_failed.is_empty(), "{message}");
    });
}

#[test]
fn different_backends_are_refused() {
    let error = spawn(2, |rank| {
        let backend = if rank.rank() == 0 { Backend::Threaded } else { Backend::Nccl };
        rank.init_process_group(backend)?;
        Ok(())
    })
    .unwrap_err();
    let message = error.failure.error;
    // Without NCCL, rank 1 finds that it is missing if it comes first.
    assert!(message.contains("nccl"), "{message}");
}

#[test]
fn second_process_group_is_refused() {
    spawn(2, |rank| {
        let group = rank.init_process_group(Backend::Threaded)?;
        let error = rank.init_process_group(Backend::Threaded).unwrap_err().to_string();
        assert!(error.contains("called twice"), "{error}");
        assert_eq!((group.rank(), group.world_size()), (rank.rank(), 2));
        assert_eq!(group.backend(), "threaded");
        drop(Rc::clone(&group));
        Ok(group.barrier()?)
    })
    .unwrap();
}

/// Says of a type whether it may go to another thread, and be shared with one.
struct Of<T: ?Sized>(std::marker::PhantomData<T>);

trait Neither {
    const SEND: bool = false;
    const SYNC: bool = false;
}

impl<T: ?Sized> Neither for Of<T> {}

// A constant of the type itself comes before one of a trait.
impl<T: ?Sized + Send> Of<T> {
    const SEND: bool = true;
}

impl<T: ?Sized + Sync> Of<T> {
    const SYNC: bool = true;
}

macro_rules! threads {
    ($($name:ident => $type:ty),* $(,)?) => {
        [$((stringify!($name), <Of<$type>>::SEND, <Of<$type>>::SYNC)),*]
    };
}

#[test]
fn documented_thread_rules_match_send_and_sync() {
    use ddp_mp::launch::{JoinedLaunch, Launch, Placement};
    use ddp_mp::prelude::*;
    use tch::nn::Linear;
    let types = threads![
        Rank => Rank,
        ProcessGroup => ProcessGroup,
        Work => Work,
        DistributedDataParallel => DistributedDataParallel<Linear>,
        Trainer => Trainer<Linear>,
        DataLoader => DataLoader,
        Autocast => Autocast,
        Sgd => Sgd,
        AdamW => AdamW,
        Spawn => Spawn,
        SpawnError => SpawnError,
        Error => ddp_mp::Error,
        Launch => Launch,
        JoinedLaunch => JoinedLaunch,
        Placement => Placement,
        StopRequest => ddp_mp::StopRequest,
        Dataset => dyn Dataset,
        TensorDataset => TensorDataset,
        TextDataset => TextDataset,
        Checkpoint => Checkpoint,
        CheckpointDir => CheckpointDir,
        Schedule => Schedule,
        ReduceOp => ReduceOp,
        Backend => Backend,
    ];
    let library = std::fs::read_to_string(repository("src/lib.rs")).unwrap();
    let section = library.split("//! # Threads").nth(1).unwrap().split("//! # ").next().unwrap();
    for (name, send, sync) in types {
        let row = section.lines().find(|line| line.contains(&format!("`{name}`")));
        let row = row.unwrap_or_else(|| panic!("lib.rs does not say where {name} may go"));
        let says = ["stays", "may move", "may be shared"].map(|word| row.contains(word));
        assert_eq!(says, [!send && !sync, send && !sync, send && sync], "{name}: {row}");
    }
}
