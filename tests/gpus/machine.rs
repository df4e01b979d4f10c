//! A machine with simulated GPUs, and runs of the program on it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::{env, fs, process};

use serde_json::Value;

use crate::harness::{as_torchrun, free_port, join, program, run_command, run_command_to};
pub(crate) use crate::harness::{events as parsed, in_parallel, in_parallel_by};

/// Returns the folder with the libraries that simulate GPUs.
pub(crate) fn libraries() -> PathBuf {
    let folder = env::var_os("SIMULATED_GPUS").map(PathBuf::from).unwrap_or_default();
    assert!(
        folder.join("libcuda.so.1").exists(),
        "SIMULATED_GPUS={folder:?} is no folder with the libraries that simulate GPUs: use `make test-gpus`"
    );
    folder
}

/// Gives `command` a machine with this many simulated GPUs.
pub(crate) fn simulate(command: &mut Command, gpus: usize) -> &mut Command {
    command.env("SIM_GPUS", gpus.to_string()).env("LD_LIBRARY_PATH", libraries());
    command.env_remove("CUDA_VISIBLE_DEVICES")
}

/// The settings of an NCCL that lets several ranks have one GPU.
pub(crate) const SHARES_GPUS: [(&str, &str); 2] =
    [("SIM_NCCL_VERSION", "23007"), ("NCCL_MULTI_RANK_GPU_ENABLE", "1")];

/// Returns the program on a machine with this many simulated GPUs.
pub(crate) fn on_gpus(gpus: usize, args: &[&str]) -> Command {
    let mut command = program(args);
    simulate(&mut command, gpus);
    command
}

/// Runs a command that must succeed, and returns stdout and stderr.
#[track_caller]
pub(crate) fn succeed(command: Command) -> (String, String) {
    run_command_to(0, command)
}

/// Runs a command whose input is wrong: it must end with 2, and print nothing but a message, which it returns.
#[track_caller]
pub(crate) fn refused(command: Command) -> String {
    let (stdout, stderr) = run_command_to(2, command);
    assert_eq!(stdout, "", "{stderr}");
    stderr
}

/// Runs `count` processes as torchrun starts them, each of them `command` of its number.
pub(crate) fn under_torchrun(count: usize, command: impl Fn(usize) -> Command) -> Vec<Output> {
    let port = free_port();
    let start = |process| {
        let mut command = command(process);
        as_torchrun(&mut command, process, count, port);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    join((0..count).map(start).collect())
}

/// Runs a command that writes JSON and must succeed, and returns its events.
#[track_caller]
pub(crate) fn events(command: Command) -> Vec<Value> {
    parsed(&succeed(command).0)
}

/// Returns the events of a run on simulated GPUs, one for each rank.
#[track_caller]
pub(crate) fn gpu_events(gpus: usize, args: &[&str]) -> Vec<Value> {
    events(on_gpus(gpus, &[args, &["--log-format=json"]].concat()))
}

/// Returns the events of the same run on CPU ranks.
#[track_caller]
pub(crate) fn cpu_events(ranks: usize, args: &[&str]) -> Vec<Value> {
    let ranks = format!("--nproc-per-node={ranks}");
    events(program(&[args, &["--log-format=json", &ranks]].concat()))
}

/// The keys of an event that depend on time, on the machine, or on how the backend moves bytes.
const DIFFERENT: &str = "backend backward_us bytes_received_by_rank bytes_sent_by_rank collective_seconds_by_rank \
    communication_us data_wait_seconds_by_rank device straggler overlapped path peak_memory_bytes samples_per_second \
    seconds tokens_per_second us_per_step";

/// Returns what is to be the same on every device: losses, steps, hashes. Sorted, since ranks print as they finish.
pub(crate) fn results(events: &[Value]) -> Vec<String> {
    let of_event = |event: &Value| {
        let mut kept = event.as_object().unwrap().clone();
        kept.retain(|key, _| DIFFERENT.split(' ').all(|different| different != key));
        Value::Object(kept).to_string()
    };
    let mut results: Vec<String> = events.iter().map(of_event).collect();
    results.sort();
    results
}

/// Returns the last event, with the hash of the parameters.
pub(crate) fn end(events: &[Value]) -> &Value {
    let end = events.last().unwrap();
    assert_eq!(end["event"], "end", "{events:?}");
    end
}

/// Runs `command` for the test case `case`, and returns its exit code, stdout and stderr. Panics if a process that it
/// started outlives it.
#[track_caller]
pub(crate) fn run_without_survivors(
    mut command: Command,
    case: &str,
) -> (Option<i32>, String, String) {
    let token = format!("{} {case}", process::id());
    command.env("DDP_MP_TEST", &token);
    let output = run_command(command);
    assert!(!is_running(&token), "{case} leaves a process behind");
    output
}

/// Returns whether a process has `DDP_MP_TEST=token` in its environment.
pub(crate) fn is_running(token: &str) -> bool {
    let variable = format!("DDP_MP_TEST={token}");
    let mut processes = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().path());
    processes.any(|process| {
        let environment = fs::read(process.join("environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|it| it == variable.as_bytes())
    })
}

/// The log of a run: what its processes have asked of the simulated GPUs, as `(process, gpu, event: detail)`.
pub(crate) struct Log(Vec<(String, usize, String)>);

impl Log {
    /// Reads what commands with the variable SIM_LOG have written.
    pub(crate) fn read(file: &Path) -> Self {
        let of_line = |line: &str| {
            let words: Vec<&str> = line.splitn(3, ' ').collect();
            (words[0].to_owned(), words[1].parse().unwrap(), words[2].to_owned())
        };
        Self(fs::read_to_string(file).unwrap().lines().map(of_line).collect())
    }

    /// How often each of so many GPUs has an event that begins with this.
    pub(crate) fn counts(&self, event: &str, gpus: usize) -> Vec<usize> {
        let is_it = |gpu, it: &(String, usize, String)| it.1 == gpu && it.2.starts_with(event);
        (0..gpus).map(|gpu| self.0.iter().filter(|it| is_it(gpu, it)).count()).collect()
    }

    /// The GPUs on which each process has a context.
    pub(crate) fn contexts(&self) -> Vec<Vec<usize>> {
        let mut gpus = BTreeMap::<&str, Vec<usize>>::new();
        for (process, gpu, _) in self.0.iter().filter(|it| it.2.starts_with("context")) {
            gpus.entry(process).or_default().push(*gpu);
        }
        gpus.into_values().collect()
    }

    /// The waits of a host in libtorch behind a collective, with what it waited for.
    pub(crate) fn waits_behind_nccl(&self) -> Vec<&str> {
        self.0.iter().filter_map(|it| it.2.strip_prefix("host waits behind NCCL: ")).collect()
    }
}
