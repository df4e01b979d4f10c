//! Calls of NCCL's that fail on one rank: it is named with NCCL's words, and nobody waits for it.

use std::thread;
use std::time::Duration;

use ddp_mp::ffi::cuda;
use ddp_mp::launch::{JoinLaunchOptions, detect};
use ddp_mp::{Backend, ProcessGroup, ReduceOp, os};
use tch::{Kind, Tensor};

use crate::harness::{free_port, join, run_command_to};
use crate::machine::{Log, in_parallel, on_gpus, run_without_survivors, simulate};
use crate::shared::{faults, scene};

const RANKS: usize = 3;
const RUN: [&str; 4] = ["--model=mlp", "--num-samples=400", "--max-epochs=2", "--log-format=json"];

/// Launches of the broadcast at the beginning, of the first step, and of one in the midst of training; counted from 1.
const LAUNCHES: [usize; 3] = [1, 4, 9];

/// With the fault `launch` the others have launched their part and wait on their GPUs: they are told, and abort.
#[test]
fn failed_call_names_its_rank() {
    let kinds = [
        ("remote", "remote process exited or there was a network error"),
        ("system", "unhandled system error"),
        ("launch", "unhandled cuda error"),
    ];
    let mut cases = Vec::new();
    // Each kind at each launch, each time of another rank.
    for (number, (kind, words)) in kinds.into_iter().enumerate() {
        for (place, launch) in LAUNCHES.into_iter().enumerate() {
            let rank = (number + place) % RANKS;
            let fault = format!("{kind}:rank={rank},call={launch}");
            cases.push(("--spawn=threads", rank, fault.clone(), words));
            cases.push(("--spawn=processes", rank, fault, words));
        }
    }
    in_parallel(&cases, |(spawn, rank, fault, words)| {
        let args = [&RUN[..], &["--timeout=1h", "--grace-period=2s", spawn]].concat();
        let mut command = on_gpus(RANKS, &args);
        command.env("SIM_NCCL_FAULT", fault);
        let what = format!("{fault} {spawn}");
        let output = run_without_survivors(command, &what);
        let failure = faults::failure(&what, &output, *rank, "GPU");
        assert!(failure["error"].as_str().unwrap().contains(words), "{what}: {}", output.2);
    });
}

/// All ranks wait in NCCL then, which does not say for whom.
#[test]
fn rank_that_never_connects_ends_in_a_timeout() {
    let mut command = on_gpus(RANKS, &[&RUN[..], &["--timeout=10s", "--grace-period=1s"]].concat());
    command.env("SIM_NCCL_FAULT", "init:rank=1,call=0");
    let (stdout, stderr) = run_command_to(1, command);
    let told = "waited 10s in init for NCCL to connect all ranks";
    assert!(stderr.contains(told) && stdout.contains(told), "{stdout}{stderr}");
}

/// Sums over the group, and reads the sum on the host without [`ProcessGroup::synchronize`].
fn read_at_once(group: &ProcessGroup) -> anyhow::Result<f64> {
    let mut sum = Tensor::ones([1], (Kind::Float, group.device()));
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    Ok(sum.double_value(&[0]))
}

/// A rank's part in a scene. Rank 0 blocks in libtorch, if it reads a sum that never ends.
fn part(scene: &str, group: &ProcessGroup) -> anyhow::Result<f64> {
    match (scene, group.rank()) {
        // Rank 1 waits for rank 0 in the next launch. NCCL fails on one of them, or on a rank that does not block.
        ("fails", 1) => {
            let mut sum = Tensor::ones([1], (Kind::Float, group.device()));
            loop {
                group.all_reduce(&mut sum, ReduceOp::Sum)?;
                thread::sleep(Duration::from_millis(100)); // its GPU must not fall behind: it ends all work at the abort
            }
        }
        // Rank 1 does not come, and waits for the end of the run.
        ("late", 1) => loop {
            group.synchronize()?;
        },
        // All are longer at something else than a collective may take.
        ("healthy", _) => {
            read_at_once(group)?;
            thread::sleep(2 * TIMEOUT + Duration::from_secs(3));
            read_at_once(group)
        }
        _ => read_at_once(group),
    }
}

/// The timeout of the scenes in which one passes.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The processes of the scenes. Does nothing unless a test of this file has started it.
#[test]
fn child() {
    let Some((scene, options)) = scene::mine() else { return };
    let cuda = cuda::load();
    let launch = detect(&|_| None, &options, cuda.usable()).unwrap();
    let spawn = launch.join(&cuda, JoinLaunchOptions::default()).unwrap().spawn();
    let timeout = if scene == "fails" { Duration::from_secs(3600) } else { TIMEOUT };
    let spawn = spawn.timeout(timeout).grace_period(Duration::from_secs(60));
    match spawn.run(move |rank| part(&scene, &*rank.init_process_group(Backend::Nccl)?)) {
        Ok(sums) => println!("the sums are {sums:?}"),
        Err(error) => println!("{error}"),
    }
    os::exit(0); // the thread of rank 0 would still be blocked if the watchdog did not abort
}

/// Plays the scene `name` with processes of so many `ranks`, and returns what they print, and the log of their GPUs.
fn play(name: &str, ranks: &[usize], fault: &str) -> (String, Log) {
    let folder = tempfile::tempdir().unwrap();
    let (file, port) = (folder.path().join("log"), free_port());
    let start = |process: usize| {
        let mut command = scene::process("nccl_faults::child", name, process, ranks, port);
        let gpus = if ranks.len() == 1 { "0,1" } else { ["0", "1"][process] };
        simulate(&mut command, 2).env("CUDA_VISIBLE_DEVICES", gpus);
        command.env("SIM_NCCL_FAULT", fault).env("SIM_DELAY_MAIN_US", "20000");
        command.env("SIM_LOG", &file).spawn().unwrap()
    };
    let outputs = join((0..ranks.len()).map(start).collect());
    let said: String =
        outputs.iter().map(|output| String::from_utf8_lossy(&output.stdout)).collect();
    assert!(!said.contains("did not come back"), "{ranks:?}: {said}");
    (said, Log::read(&file))
}

#[test]
fn failure_while_a_rank_is_blocked_names_the_failed_rank() {
    for (ranks, failed) in [(&[1, 1][..], 1), (&[2], 0), (&[2], 1)] {
        let (said, _) = play("fails", ranks, &format!("remote:rank={failed},call=1"));
        let named = format!("rank {failed} (GPU:");
        let line = said.lines().find(|line| line.contains(" failed in all_reduce #"));
        let (named, why) = (|line: &&str| line.starts_with(&named), "remote process exited");
        assert!(line.filter(named).is_some_and(|line| line.contains(why)), "{ranks:?}: {said}");
        assert!(line.unwrap().contains("NCCL's last error in this process: "), "{said}");
    }
}

#[test]
fn timeout_of_a_blocked_rank_names_the_missing_rank() {
    let (said, _) = play("late", &[1, 1], "");
    assert!(said.contains("rank 0 waited 10s in all_reduce #0 for rank 1 (last seen"), "{said}");
}

/// The waits of its host are in the log: otherwise the tests that look for such waits would see nothing.
#[test]
fn rank_may_compute_longer_than_the_timeout() {
    let (said, log) = play("healthy", &[2], "");
    assert_eq!(said.matches("2.0").count(), 2, "{said}");
    assert!(!log.waits_behind_nccl().is_empty());
}
