//! Calls of NCCL's that fail on one rank: it is named with NCCL's words, and nobody waits for it.

use std::rc::Rc;
use std::time::Duration;

use ddp_mp::ffi::cuda;
use ddp_mp::launch::{JoinLaunchOptions, detect};
use ddp_mp::{Backend, ProcessGroup, ReduceOp, os};
use serde_json::Value;
use tch::{Kind, Tensor};

use crate::harness::{free_port, join, run_command};
use crate::machine::{in_parallel_by, on_gpus, run_without_survivors, simulate};
use crate::shared::{faults, scene};

const RANKS: usize = 3;
const RUN: [&str; 4] = ["--model=mlp", "--num-samples=400", "--max-epochs=2", "--log-format=json"];

/// A fault that the simulated NCCL injects into launch number `launch` of `rank`, counted from 1.
#[derive(Debug, Clone, Copy)]
struct Case {
    kind: &'static str,
    rank: usize,
    launch: usize,
    spawn: &'static str,
}

/// Launches of the broadcast at the beginning, of the first step, and of one in the midst of training.
const LAUNCHES: [usize; 3] = [1, 4, 9];

impl Case {
    /// Runs the program with the fault, and returns its failure event and stderr.
    fn run(&self) -> (Value, String) {
        self.run_on_gpus_with_delay(0)
    }

    /// Does the same on GPUs that sleep for `delay_us` microseconds before each piece of work, so that the host is ahead.
    fn run_on_gpus_with_delay(&self, delay_us: usize) -> (Value, String) {
        let Self { kind, rank, launch, spawn } = self;
        let args = [&RUN[..], &["--timeout=1h", "--grace-period=2s", spawn]].concat();
        let mut command = on_gpus(RANKS, &args);
        let fault = format!("{kind}:rank={rank},call={launch}");
        command.env("SIM_NCCL_FAULT", &fault).env("SIM_DELAY_MAIN_US", delay_us.to_string());
        let output = run_without_survivors(command, &format!("{self:?}"));
        (faults::failure(&fault, &output, *rank, "GPU"), output.2)
    }
}

/// Returns a fault of this kind for every launch and rank, of threads and of processes.
fn cases(kind: &'static str) -> Vec<Case> {
    let of = |spawn| {
        LAUNCHES
            .into_iter()
            .flat_map(move |launch| (0..RANKS).map(move |rank| Case { kind, rank, launch, spawn }))
    };
    of("--spawn=threads").chain(of("--spawn=processes")).collect()
}

#[track_caller]
fn is_named(kind: &'static str, words: &str) {
    in_parallel_by(2, &cases(kind), |case| {
        let (failure, stderr) = case.run();
        let error = failure["error"].as_str().unwrap();
        assert!(error.contains(words), "{case:?}: {stderr}");
    });
}

#[test]
fn lost_connection_names_its_rank() {
    is_named("remote", "remote process exited or there was a network error");
}

#[test]
fn failed_system_call_names_its_rank() {
    is_named("system", "unhandled system error");
}

/// All ranks wait in NCCL then, which does not say for whom.
#[test]
fn rank_that_never_connects_ends_in_a_timeout() {
    for spawn in ["--spawn=threads", "--spawn=processes"] {
        let args = [&RUN[..], &["--timeout=3s", "--grace-period=1s", spawn]].concat();
        let mut command = on_gpus(RANKS, &args);
        command.env("SIM_NCCL_FAULT", "init:rank=1,call=1");
        let (code, stdout, stderr) = run_command(command);
        assert_eq!(code, Some(1), "{spawn}: {stderr}");
        let told = "waited 3s in init for NCCL to connect all ranks";
        assert!(stderr.contains(told) && stdout.contains(told), "{spawn}: {stdout}{stderr}");
    }
}

/// The others have launched their part and wait on their GPUs: they are told, and abort.
#[test]
fn failed_launch_on_one_rank_names_it() {
    is_named("launch", "unhandled cuda error");
}

/// Rank 0 broadcasts the checkpoint, then copies its model to the GPU. libtorch blocks the copy until the broadcast ends.
#[test]
fn failure_behind_a_blocked_host_names_its_rank() {
    let case = Case { kind: "system", rank: 0, launch: 4, spawn: "--spawn=processes" };
    let (failure, stderr) = case.run_on_gpus_with_delay(20_000);
    assert_eq!(failure["operation"], "broadcast", "{stderr}");
    assert!(failure["error"].as_str().unwrap().contains("unhandled system error"), "{stderr}");
}

/// Reads a sum on the host without [`ProcessGroup::synchronize`]. The sum never ends, so this blocks.
fn read_at_once(group: &Rc<ProcessGroup>) -> anyhow::Result<()> {
    let mut sum = Tensor::zeros([1], (Kind::Float, group.device()));
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    sum.double_value(&[0]);
    anyhow::bail!("the sum has ended")
}

/// The processes of the scenes. Does nothing unless a test of this file has started it.
#[test]
fn child() {
    let Some((name, options)) = scene::mine() else { return };
    let cuda = cuda::load();
    let launch = detect(&|_| None, &options, cuda.usable()).unwrap();
    let timeout = Duration::from_secs(if name == "late" { 2 } else { 3600 });
    let join = JoinLaunchOptions { timeout, ..JoinLaunchOptions::default() };
    let spawn = launch.join(&cuda, join).unwrap().spawn();
    let spawn = spawn.timeout(timeout).grace_period(Duration::from_millis(100));
    let result = spawn.run(move |rank| {
        let group = rank.init_process_group(Backend::Nccl)?;
        if name == "late" && rank.rank() == 1 {
            loop {
                group.synchronize()?; // ends when rank 0 fails
            }
        }
        read_at_once(&group)
    });
    println!("{}", result.unwrap_err());
    os::exit(0); // the thread of rank 0 is still blocked
}

/// Plays the scene `name` with two processes of one rank each, and returns what they print.
fn play(name: &str, fault: &str) -> String {
    let port = free_port();
    let start = |process: usize| {
        let mut command = scene::process("nccl_faults::child", name, process, &[1, 1], port);
        simulate(&mut command, 2).env("CUDA_VISIBLE_DEVICES", process.to_string());
        command.env("SIM_NCCL_FAULT", fault).env("SIM_DELAY_MAIN_US", "20000");
        command.spawn().unwrap()
    };
    let outputs = join([0, 1].map(start).into());
    outputs.iter().map(|output| String::from_utf8_lossy(&output.stdout)).collect()
}

#[test]
fn failure_of_a_blocked_rank_is_reported() {
    let said = play("fails", "remote:rank=0,call=1");
    let error =
        "rank 0 (GPU:0) failed in all_reduce #0: a collective failed: remote process exited";
    assert!(said.contains(error), "{said}");
}

#[test]
fn timeout_of_a_blocked_rank_names_the_missing_rank() {
    let said = play("late", "");
    assert!(said.contains("rank 0 waited 2s in all_reduce #0 for rank 1"), "{said}");
}
