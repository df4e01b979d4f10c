//! A libtorch of another version than the program was built for is refused before any rank starts; and what libtorch
//! chooses once in a process is chosen by then.

use std::env;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ddp_mp::{Spawn, spawn};
use tempfile::TempDir;

use crate::harness::{as_torchrun, free_port, program, repository, run_command, run_command_to};

/// Set in processes that have the library of `other_libtorch`.
const MARK: &str = "DDP_MP_TEST_OTHER_LIBTORCH";

/// Builds the library that changes the version. It lies in the folder until that is dropped.
fn other_libtorch() -> (TempDir, PathBuf) {
    preloaded("version")
}

/// Builds a library for `LD_PRELOAD` of `other_libtorch/`.
fn preloaded(name: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join(format!("{name}.so"));
    let source = repository(&format!("tests/other_libtorch/{name}.cpp"));
    let compiler = env::var("CXX").unwrap_or_else(|_| "c++".into());
    let mut words = compiler.split_whitespace();
    let mut command = Command::new(words.next().unwrap());
    command.args(words).args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source);
    assert!(command.status().unwrap().success());
    (folder, library)
}

fn expected() -> String {
    let built = ddp_mp::ffi::version();
    format!(" is 2.1.0, but this program was built for {built}; install ")
}

#[test]
fn the_program_refuses_another_libtorch() {
    let (_folder, library) = other_libtorch();
    for args in [&["--max-steps=1"][..], &["--spawn=processes", "--nproc-per-node=2"], &["env"]] {
        let mut command = program(args);
        command.env("LD_PRELOAD", &library);
        let (code, stdout, stderr) = run_command(command);
        assert_eq!((code, stdout.as_str()), (Some(2), ""), "{args:?}: {stderr}");
        assert!(stderr.starts_with("ddp-mp: the libtorch in /"), "{args:?}: {stderr}");
        assert!(stderr.contains(&expected()), "{args:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{args:?}: {stderr}");
    }
}

/// In a process of its own, because the library holds for a whole process.
#[test]
fn spawn_refuses_another_libtorch() {
    if env::var_os(MARK).is_some() {
        let started = Arc::new(AtomicBool::new(false));
        let starts = started.clone();
        let ranks = spawn(2, move |_| {
            starts.store(true, Ordering::Relaxed);
            Ok(())
        });
        let joined = Spawn::from_env().unwrap_err(); // as a process of torchrun
        for error in [ranks.unwrap_err().to_string(), joined.to_string()] {
            assert!(error.contains(&expected()), "{error}");
        }
        assert!(!started.load(Ordering::Relaxed), "a rank has started");
        return;
    }
    spawn(2, |_| Ok(())).unwrap();
    let (_folder, library) = other_libtorch();
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["libtorch::spawn_refuses_another_libtorch", "--exact"]);
    as_torchrun(&mut command, 0, 2, free_port());
    command.env("LD_PRELOAD", &library).env(MARK, "1");
    let (stdout, _) = run_command_to(0, command);
    assert!(stdout.contains("1 passed"), "{stdout}");
}

/// MKL chooses the kernels of tanh in the first call, without a lock: two ranks at once could get different ones.
#[test]
#[cfg(target_arch = "x86_64")] // libtorch has no MKL elsewhere
fn kernels_are_chosen_before_the_ranks_start() {
    let (_folder, library) = preloaded("first_kernel");
    for spawn in ["--spawn=threads", "--spawn=processes"] {
        let args = ["--model=mlp", "--activation=tanh", "--nproc-per-node=2", "--max-steps=2"];
        let mut command = program(&[&args[..], &[spawn]].concat());
        command.env("LD_PRELOAD", &library);
        let (_, stderr) = run_command_to(0, command);
        let first = "MKL has chosen its kernels on thread ";
        let threads: Vec<&str> =
            stderr.lines().filter_map(|line| line.split(first).nth(1)).collect();
        assert!(!threads.is_empty(), "{spawn}: {stderr}");
        assert!(threads.iter().all(|thread| !thread.starts_with("rank")), "{spawn}: {stderr}");
    }
}
