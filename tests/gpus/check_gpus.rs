//! `env --check-gpus`: each fault is named on the line of its GPU or pair, with NCCL's switch that makes it pass.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{self, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::harness::{TIMEOUT, in_parallel_by, output, run_command, send, without_launcher};
use crate::libraries::all_but;
use crate::machine::{Log, is_running, on_gpus, parsed, run_without_survivors, simulate, succeed};

/// The checks of a machine with so many GPUs.
fn checks(gpus: usize, fault: &str) -> Command {
    let mut command = on_gpus(gpus, &["env", "--check-gpus"]);
    command.env("SIM_FAULT", fault);
    command
}

/// Returns the lines without what was measured, and checks that something was.
fn without_speeds(stdout: &str) -> Vec<String> {
    let lines = stdout.lines().map(|line| {
        let Some((check, speeds)) = line.split_once(" right, ") else { return line.to_owned() };
        let numbers: Vec<f64> = speeds.split(' ').filter_map(|word| word.parse().ok()).collect();
        assert!(!numbers.is_empty() && numbers.iter().all(|it| it.is_finite()), "{line}");
        format!("{check} right")
    });
    lines.collect()
}

/// The lines of a machine on which all is right.
fn right(gpus: usize) -> Vec<String> {
    let pairs = || (0..gpus).flat_map(|first| (first + 1..gpus).map(move |other| (first, other)));
    let products = (0..gpus).map(|gpu| format!("GPU {gpu} (Simulated GPU {gpu}): product right"));
    let copies = pairs().flat_map(|(a, b)| [(a, b), (b, a)]);
    let copies = copies.map(|(from, to)| format!("GPU {from} -> {to}: copy right"));
    let reduces = pairs().map(|(a, b)| format!("GPUs {a} and {b}: all_reduce right"));
    products.chain(copies).chain(reduces).collect()
}

/// A check is a process of the same program, with the same options: so it is in a program with `App`.
#[test]
fn checks_pass_on_machines_without_a_fault() {
    let mut with_app = Command::new(env!("CARGO_BIN_EXE_app-program"));
    without_launcher(with_app.args(["env", "--check-gpus", "--width=8"]));
    simulate(&mut with_app, 3);
    for (gpus, command) in [(1, checks(1, "")), (3, with_app)] {
        let what = format!("{command:?}");
        let (code, stdout, stderr) = run_without_survivors(command, &what);
        assert_eq!((code, &*stderr), (Some(0), ""), "{what}: {stdout}");
        let mut expected = right(gpus);
        if gpus == 1 {
            expected.push("there is one GPU, and no pair to check".into());
        }
        assert_eq!(without_speeds(&stdout), expected, "{what}");
    }
}

const DIES: &str = "dies: its process was killed by SIGABRT";
const NO_SWITCH: &str = "; no switch of NCCL helps; NCCL_DEBUG=INFO says more";

/// Each with the place of its line in [`right`], and what that says.
const FAULTS: [(&str, usize, &str); 7] = [
    ("hang:gpu=1", 1, "hangs (5 s)"),
    ("wrong:work=aten::mm,gpu=1", 1, "has wrong values (1 of 65536)"),
    ("wrong:work=copy to another GPU,gpu=1", 3, "has wrong values (1 of 16777216)"),
    ("crash:work=copy to another GPU,gpu=1", 3, DIES),
    ("hang:work=ncclAllReduce,unless=NCCL_P2P_DISABLE", 4, "hangs (5 s)"),
    ("wrong:work=ncclAllReduce,gpu=1,unless=NCCL_SHM_DISABLE", 4, "has wrong values (1 of 2)"),
    ("crash:work=ncclAllReduce", 4, DIES),
];

/// On two GPUs each fault changes the lines that it should, and no others.
#[test]
fn faults_are_named_on_their_lines() {
    in_parallel_by(2, &FAULTS, |&(fault, place, problem)| {
        let remedy = match (place, fault.split_once("unless=")) {
            (1, _) => "; look at nvidia-smi -q and dmesg".into(),
            (3, _) => "; look at nvidia-smi topo -p2p r, at IOMMU and at ACS".into(),
            (_, Some((_, switch))) => format!("; it passes with {switch}=1"),
            _ => NO_SWITCH.into(),
        };
        let mut expected = right(2);
        let check = expected[place].strip_suffix("right").unwrap();
        expected[place] = format!("{check}{problem}{remedy}");
        if place == 1 {
            expected.truncate(2);
            expected.push("pairs with a GPU that did not pass are not checked".into());
        }
        let (code, stdout, stderr) = run_without_survivors(checks(2, fault), fault);
        assert_eq!(code, Some(1), "{fault}: {stdout}{stderr}");
        assert_eq!(without_speeds(&stdout), expected, "{fault}: {stderr}");
    });
}

/// Faults of NCCL's own: a rank that does not join, and an error, which NCCL tells in the all-reduce or after it.
#[test]
fn failures_of_nccl_are_named() {
    let reason = "remote process exited or there was a network error";
    for (fault, begins) in [
        ("init:rank=1,call=0", &["hangs while connecting with NCCL (10 s)"][..]),
        (
            "remote:rank=1,call=1",
            &[
                "fails: rank 1 (GPU:1) failed in all_reduce #0: ",
                "fails: rank 1 (GPU:1) failed in synchronize #1: ",
            ],
        ),
    ] {
        let mut command = checks(2, "");
        command.env("SIM_NCCL_FAULT", fault);
        let (code, stdout, stderr) = run_without_survivors(command, fault);
        assert_eq!(code, Some(1), "{fault}: {stdout}{stderr}");
        let line = stdout.lines().last().unwrap();
        let problem = line.strip_prefix("GPUs 0 and 1: all_reduce ").unwrap();
        let is_told = begins.iter().any(|begin| problem.starts_with(begin));
        assert!(is_told && problem.ends_with(NO_SWITCH), "{line}");
        assert_eq!(line.contains(reason), problem.starts_with("fails"), "{line}");
    }
}

/// The first pair finds the switch, with which the other pairs are tried first. One that is set is not tried at all.
#[test]
fn switch_that_has_helped_is_tried_first() {
    let processes = |fault: &str, set: Option<&str>| {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("log");
        let mut command = checks(3, fault);
        command.env("SIM_LOG", &file).envs(set.map(|set| (set, "1")));
        let (_, stdout, stderr) = run_command(command);
        let helped = "; it passes with NCCL_SHM_DISABLE=1";
        let lines = stdout.lines().filter(|line| line.ends_with(helped));
        assert_eq!(lines.count(), if fault.is_empty() { 0 } else { 3 }, "{stdout}{stderr}");
        Log::read(&file).contexts().len()
    };
    let fault = "crash:work=ncclAllReduce,unless=NCCL_SHM_DISABLE";
    let right = processes("", None);
    assert_eq!(processes(fault, None), right + 3 + 1 + 1);
    assert_eq!(processes(fault, Some("NCCL_IB_DISABLE")), right + 2 + 1 + 1);
}

#[test]
fn json_has_an_object_for_each_check() {
    let mut command = checks(2, "crash:work=ncclAllReduce,unless=NCCL_P2P_DISABLE");
    command.arg("--log-format=json");
    let (code, stdout, stderr) = run_command(command);
    assert_eq!(code, Some(1), "{stdout}{stderr}");
    let events = parsed(&stdout);
    let of = |key: &str| json!(events.iter().map(|event| &event[key]).collect::<Vec<_>>());
    assert_eq!(of("event"), json!(["product", "product", "copy", "copy", "all_reduce"]));
    assert_eq!(of("result"), json!(["right", "right", "right", "right", "dies"]));
    assert_eq!(of("gpus"), json!([[0], [1], [0, 1], [1, 0], [0, 1]]));
    assert!(events[0]["tflops"].is_f64() && events[2]["gb_per_s"].is_f64(), "{stdout}");
    assert_eq!(events[4]["problem"], DIES);
    assert_eq!(events[4]["passes_with"], json!(["NCCL_P2P_DISABLE"]));
}

#[test]
fn missing_nccl_leaves_the_copies() {
    let folder = tempfile::tempdir().unwrap();
    all_but("libnccl", folder.path());
    let mut command = checks(2, "");
    command.env("LD_LIBRARY_PATH", folder.path());
    let mut lines = without_speeds(&succeed(command).0);
    let last = lines.pop().unwrap();
    assert_eq!(lines, right(2)[..4]);
    let told = "all_reduce is not checked: backend nccl: libnccl was not found";
    assert!(last.starts_with(told), "{last}");
}

#[test]
fn interrupt_ends_the_process_of_a_check() {
    let token = format!("{} interrupt", process::id());
    let mut command = checks(2, "hang:gpu=1");
    command.env("DDP_MP_TEST", &token).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("GPU 0 ") && is_running(&token), "{line}");
    send("INT", child.id());
    let status = output(child).status;
    assert!(status.signal() == Some(2) || status.code() == Some(130), "{status}");
    let began = Instant::now();
    while is_running(&token) {
        assert!(began.elapsed() < TIMEOUT, "a process is left behind");
        thread::sleep(Duration::from_millis(10));
    }
}
