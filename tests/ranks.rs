//! What `spawn` promises, seen from a program that uses the library.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ddp_mp::{Backend, Error, ReduceOp, Spawn, spawn};
use tch::{Device, Kind, Tensor};

use crate::harness::{TIMEOUT, repository};

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
    let alive = Arc::new(());
    let captured = alive.clone();
    let error = Spawn::new(4)
        .timeout(TIMEOUT)
        .run(move |rank| {
            let _alive = &captured;
            let group = rank.init_process_group(Backend::Threaded)?;
            group.barrier()?;
            anyhow::ensure!(rank.rank() != 2, "out of luck");
            let result = group.barrier();
            assert!(matches!(result, Err(Error::Cancelled { by: 2, .. })), "{result:?}");
            Ok(result?)
        })
        .unwrap_err();
    assert_eq!((error.failure.rank, error.failure.device.as_str()), (2, "CPU:2"));
    assert_eq!(error.to_string(), "rank 2 (CPU:2) failed in its function: out of luck");
    assert!(error.also_failed.is_empty() && error.stuck.is_empty());
    assert_eq!(Arc::strong_count(&alive), 1, "no thread is left");
}

#[test]
fn echo_with_context_or_as_a_panic_is_not_reported() {
    use anyhow::Context;
    type Echo = fn(ddp_mp::Result<()>) -> anyhow::Result<()>;
    let with_context: Echo = |result| result.context("while waiting").context("in the evening");
    let as_a_panic: Echo = |result| {
        result.unwrap();
        Ok(())
    };
    for echo in [with_context, as_a_panic] {
        let error = spawn(3, move |rank| {
            let group = rank.init_process_group(Backend::Threaded)?;
            if rank.rank() == 1 {
                anyhow::bail!("the cause");
            }
            echo(group.barrier())
        })
        .unwrap_err();
        assert_eq!(error.to_string(), "rank 1 (CPU:1) failed in its function: the cause");
        assert!(error.also_failed.is_empty(), "{error}");
    }
}

#[test]
fn panic_is_a_failure_without_frames() {
    let error = spawn(3, |rank| {
        let group = rank.init_process_group(Backend::Threaded)?;
        if rank.rank() == 1 {
            let two = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
            let _ = two.matmul(&two); // tch panics where libtorch refuses
        }
        Ok(group.barrier()?)
    })
    .unwrap_err();
    assert_eq!(error.failure.rank, 1);
    let message = &error.failure.error;
    assert!(
        message.contains("mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"),
        "{message}"
    );
    assert!(!message.contains('\n') && !message.contains("frame #"), "{message}");
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
fn late_rank_is_named_with_its_last_operation() {
    let (wake, sleep) = crossbeam::channel::bounded::<()>(0);
    let error = Spawn::new(3)
        .timeout(Duration::from_secs(1))
        .grace_period(TIMEOUT)
        .run(move |rank| {
            let group = rank.init_process_group(Backend::Threaded)?;
            group.barrier()?;
            group.enter_step(7)?;
            if rank.rank() == 2 {
                // Until the others have given up.
                let _ = sleep.recv();
            } else {
                let result = group.all_reduce(&mut Tensor::from(1f32), ReduceOp::Sum);
                let _ = wake.try_send(());
                return Ok(result?);
            }
            Ok(group.barrier()?)
        })
        .unwrap_err();
    let message = error.to_string();
    assert!(message.starts_with("rank 2 (CPU:2) failed in step #7: rank "), "{message}");
    assert!(
        message.contains("waited 1s in all_reduce #1 for rank 2 (last seen: step #7)"),
        "{message}"
    );
    assert!(error.stuck.is_empty(), "it came back: {message}");
}

#[test]
fn stuck_rank_is_named_after_the_grace_period() {
    let (release, stuck) = crossbeam::channel::bounded::<()>(0);
    let error = Spawn::new(2)
        .grace_period(Duration::from_millis(100))
        .run(move |rank| {
            let group = rank.init_process_group(Backend::Threaded)?;
            if rank.rank() == 0 {
                anyhow::bail!("the cause");
            }
            group.enter_step(3)?;
            let _ = stuck.recv(); // not one of our waits: nothing can wake it but the test
            Ok(())
        })
        .unwrap_err();
    drop(release);
    assert_eq!(error.failure.error, "the cause");
    assert_eq!(error.stuck.len(), 1);
    let message = error.to_string();
    assert!(
        message.ends_with("rank 1 (CPU:1) did not come back within 100ms; last seen: step #3"),
        "{message}"
    );
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
    for retry in [false, true] {
        let (gave_up, wait) = crossbeam::channel::bounded::<()>(1);
        let error = Spawn::new(2)
            .timeout(Duration::from_secs(2))
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
        assert!(message.contains("rank 0 waited 2s in barrier #0 for rank 1"), "{message}");
        assert!(error.also_failed.is_empty(), "{message}");
    }
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

#[test]
fn longest_timeouts_do_not_overflow() {
    Spawn::new(2)
        .timeout(Duration::MAX)
        .grace_period(Duration::MAX)
        .run(|rank| Ok(rank.init_process_group(Backend::Threaded)?.barrier()?))
        .unwrap();
}

#[test]
fn nccl_without_a_gpu_is_an_error() {
    let error = spawn(2, |rank| {
        rank.init_process_group(Backend::Nccl)?;
        Ok(())
    })
    .unwrap_err();
    let message = error.failure.error;
    assert!(
        message.contains("libnccl was not found") || message.contains("needs a GPU for each rank"),
        "{message}"
    );
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
