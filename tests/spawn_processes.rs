//! `--spawn=processes`: what threads come to, one report of a failure, and nobody left behind.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Instant;

use rustix::process::{ioctl_tiocsctty, setsid};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::stdio::stdin;
use serde_json::Value;
use wait_timeout::ChildExt;

use crate::harness::{
    TIMEOUT, in_the_environment_of, last_event, output, program, read_until, run, run_command,
    run_refused, send, some_of, without_progress, words,
};

const PROCESSES: &str = "--spawn=processes";

/// What a run of `args` writes as JSON, event by event; its exit code and stderr. Nobody is left who could write.
pub(crate) fn events(args: &[&str]) -> (Option<i32>, Vec<Value>, String) {
    let (code, stdout, stderr) = run(&[args, &["--log-format=json"]].concat());
    (code, stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect(), stderr)
}

#[test]
fn processes_have_the_bits_of_threads() {
    let all = [
        &["--nproc-per-node=3", "--model=mlp", "--hidden=300,300", "--bucket-cap-mb=0.2"][..],
        &["--nproc-per-node=1"],
    ];
    for args in some_of(all, 1) {
        let ways = [&["--spawn=threads"][..], &[PROCESSES], &[PROCESSES, "--shared-memory=off"]];
        let [threads, processes, over_tcp] = ways.map(|spawn| {
            let (code, events, stderr) = events(&[args, spawn].concat());
            assert_eq!(code, Some(0), "{stderr}");
            assert_eq!(stderr.lines().count(), 1, "{stderr}"); // where the ranks run
            events
        });
        let hash = |events: &[Value]| events.last().unwrap()["parameters_hash"].clone();
        assert!(hash(&threads).is_string());
        assert_eq!(hash(&processes), hash(&threads), "{args:?}");
        assert_eq!(hash(&over_tcp), hash(&threads), "{args:?}");
        assert_eq!(processes.len(), threads.len(), "{args:?}");
        assert_eq!(processes[0]["nnodes"], 1);
    }
}

/// The file of such a process is the linker, which knows nothing of the program by itself.
#[test]
fn program_started_through_the_linker_runs() {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let files = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    let linker = files.into_iter().find(|file| file.contains("/ld-linux")).expect("it is loaded");
    let training =
        ["--nproc-per-node=2", "--max-epochs=1", "--num-samples=256", "--log-format=json"];
    let hash = |stdout: &str| last_event(stdout)["parameters_hash"].to_string();
    let trained = hash(&run(&training).1);
    for more in [&["--spawn=threads"][..], &[PROCESSES]] {
        let args = [&training[..], more].concat();
        let direct = program(&args);
        let mut command = Command::new(linker);
        command.arg(direct.get_program()).args(&args).stdin(Stdio::null());
        let (code, stdout, stderr) = run_command(in_the_environment_of(&direct, command));
        assert_eq!(code, Some(0), "{args:?}: {stderr}");
        assert_eq!(hash(&stdout), trained, "{args:?}: {stdout}");
    }
}

#[test]
fn wrong_input_is_reported_once_and_not_restarted() {
    const NOWHERE: &str = "/nowhere: No such file";
    let all = [
        ("--nproc-per-node=2 --dataset=csv:/nowhere --spawn=processes --max-restarts=3", NOWHERE),
        ("--nproc-per-node=3 --num-samples=2 --spawn=processes", "3 ranks for 2 samples"),
        ("--nproc-per-node=2 --dataset=csv:/nowhere --max-restarts=3", NOWHERE),
        ("--nproc-per-node=2 --backend=threaded --spawn=processes", "stays within one process"),
        ("--nproc-per-node=2 --nnodes=2 --spawn=processes", "not set: --node-rank;"),
        (
            "--nnodes=2 --node-rank=0 --master-addr=127.0.0.1 --spawn=processes",
            "for one machine without a launcher, and this is process 0 of 2",
        ),
    ];
    for (args, told) in some_of(all, 3) {
        let stderr = run_refused(&words(args));
        assert_eq!(stderr.matches(told).count(), 1, "{stderr}");
        assert!(!args.contains("restarts") || !stderr.contains("restart"), "{stderr}");
    }
}

/// A run that would go on for long, whose ranks have met; the lines it writes after that of its start.
pub(crate) fn long_run(args: &[&str]) -> (Child, BufReader<ChildStdout>) {
    let long = ["--max-epochs=1000000", "--grace-period=1m", "--log-format=json"];
    let mut command = program(&[&long, args].concat());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    assert!(line.contains("start"), "{line}");
    (child, stdout)
}

/// The processes that `parent` has started.
pub(crate) fn processes_of(parent: &Child) -> impl Iterator<Item = u32> {
    let processes = fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.unwrap().file_name().to_str()?.parse::<u32>().ok());
    let parent = parent.id().to_string();
    processes.filter(move |pid| {
        // The parent's number is the second after the name, which is in parentheses.
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let of_child = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1));
        of_child == Some(&parent)
    })
}

/// The process that `parent` has started for `rank`, if it is there.
pub(crate) fn process_of(parent: &Child, rank: usize) -> Option<u32> {
    processes_of(parent).find(|pid| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let start = format!("DDP_MP_SPAWNED={{\"rank\":[{rank},");
        environment.split(|&byte| byte == 0).any(|variable| variable.starts_with(start.as_bytes()))
    })
}

/// All that is written until nobody is left who could write.
pub(crate) fn rest(mut stdout: BufReader<ChildStdout>) -> String {
    let (done, ended) = channel();
    let read = move || {
        let mut text = String::new();
        stdout.read_to_string(&mut text).unwrap();
        let _ = done.send(text);
    };
    thread::Builder::new().spawn(read).unwrap();
    ended.recv_timeout(TIMEOUT).expect("all processes end")
}

/// Its exit code and stderr.
pub(crate) fn end(child: Child) -> (Option<i32>, String) {
    let output = output(child);
    (output.status.code(), without_progress(&String::from_utf8(output.stderr).unwrap()))
}

#[test]
fn children_end_when_their_parent_is_killed() {
    let (mut child, stdout) = long_run(&[PROCESSES, "--nproc-per-node=3"]);
    assert!((0..3).all(|rank| process_of(&child, rank).is_some()));
    child.kill().unwrap();
    // All of them could write: the end is there when the last of them has ended.
    rest(stdout);
    assert_eq!(end(child).0, None);
}

/// A window is closed, or a connection ends: the run gets SIGHUP, and whatever it prints from then on fails.
#[test]
fn run_whose_terminal_is_gone_stops_and_saves() {
    for spawn in some_of(["--spawn=threads", PROCESSES, "--max-restarts=1"], 2) {
        let folder = tempfile::tempdir().unwrap();
        let dir = format!("--checkpoint-dir={}", folder.path().display());
        let args = ["--nproc-per-node=2", "--max-epochs=1000000", &dir, spawn];
        let terminal =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&terminal).unwrap();
        unlockpt(&terminal).unwrap();
        let name = ptsname(&terminal, Vec::new()).unwrap();
        let end =
            || File::options().read(true).write(true).open(OsStr::from_bytes(name.as_bytes()));
        let mut command = program(&args);
        command.stdin(end().unwrap()).stdout(end().unwrap()).stderr(end().unwrap());
        // SAFETY: between fork and exec this makes two system calls.
        unsafe {
            command.pre_exec(|| {
                setsid()?;
                Ok(ioctl_tiocsctty(stdin())?)
            })
        };
        let mut child = command.spawn().unwrap();
        drop(command); // with its ends of the terminal
        let mut terminal = BufReader::new(File::from(terminal));
        read_until("| Epoch: 1 |", &mut terminal);
        drop(terminal);
        let ended = child.wait_timeout(TIMEOUT).unwrap();
        child.kill().unwrap();
        assert_eq!(ended.expect("it ends").code(), Some(129), "{spawn}");
        let latest = fs::read_to_string(folder.path().join("latest")).unwrap();
        let steps: u64 = latest.trim().strip_prefix("step-").unwrap().parse().unwrap();
        assert!(steps > 128, "{spawn}: {latest}");
    }
}

#[test]
fn signal_during_the_start_is_not_lost() {
    let args = [PROCESSES, "--nproc-per-node=2", "--max-epochs=1000000", "--log-format=json"];
    let mut command = program(&args);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Nothing but the list of processes tells that one has been started and knows nothing of signals yet.
    let began = Instant::now();
    while process_of(&child, 0).is_none() {
        assert!(began.elapsed() < TIMEOUT);
        thread::yield_now();
    }
    send("INT", child.id());
    let last = rest(BufReader::new(child.stdout.take().unwrap())).lines().last().map(str::to_owned);
    let (code, stderr) = end(child);
    assert_eq!(code, Some(130), "{stderr}");
    let event: Value = serde_json::from_str(&last.unwrap()).unwrap();
    assert_eq!(event["stopped"], "SIGINT");
}

/// Lines of several processes that share stderr would mix if they came in pieces.
#[test]
fn stderr_lines_are_written_in_one_piece() {
    for more in ["--inject-fault=error:rank=1,at=step,step=3", "--dataset=csv:/nowhere"] {
        let (here, there) = UnixDatagram::pair().unwrap();
        let mut command = program(&[PROCESSES, "--nproc-per-node=2", more]);
        // Each write is a message of its own.
        command.stdout(Stdio::null()).stderr(OwnedFd::from(there));
        let mut child = command.spawn().unwrap();
        drop(command);
        assert!(child.wait_timeout(TIMEOUT).unwrap().is_some());
        here.set_nonblocking(true).unwrap();
        let (mut count, mut message) = (0, [0; 1 << 12]);
        while let Ok(len) = here.recv(&mut message) {
            let text = str::from_utf8(&message[..len]).unwrap();
            assert!(text.starts_with("ddp-mp: ") && text.ends_with('\n'), "{more}: {text:?}");
            count += 1;
        }
        assert!(count > 0, "{more}");
    }
}

/// A test that fails must not leave programs behind, which would slow the others.
#[test]
fn program_of_a_test_ends_with_the_thread_that_starts_it() {
    let start = || program(&["--max-epochs=1000000"]).stdout(Stdio::null()).spawn().unwrap();
    let mut child = thread::Builder::new().spawn(start).unwrap().join().unwrap();
    let status = child.wait_timeout(TIMEOUT).unwrap();
    let _ = child.kill();
    assert_eq!(status.and_then(|status| status.signal()), Some(9));
}
