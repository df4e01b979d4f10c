//! Limits of the system on open files and threads: each is named with its value and the remedy, and nothing is left.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::harness::{
    in_the_environment_of, last_event, program, program_under, run_command, run_command_to,
    runs_every_case, some_of,
};

/// Whether the program can be loaded at all under `limit`.
fn can_be_loaded(limit: &str) -> bool {
    run_command(program_under(limit, &["--version"])).0 == Some(0)
}

/// Runs `args` under `limit`: all goes well, or the limit is named as `remedy`. Returns whether it is.
fn is_named(limit: &str, args: &[&str], remedy: &str) -> bool {
    let (code, stdout, stderr) = run_command(program_under(limit, args));
    let what = format!("{limit} {args:?}: exit code {code:?}\n{stdout}{stderr}");
    assert!(!stderr.contains("panicked"), "{what}");
    if code == Some(0) {
        return false;
    }
    assert!(code == Some(1) || code == Some(2), "{what}");
    assert!(stderr.contains(remedy), "{what}");
    for wrong in ["the network is down", "did not come", "waited", "check that rank 0 is running"] {
        assert!(!stderr.contains(wrong), "{what}");
    }
    true
}

#[test]
fn open_file_limit_is_named_in_the_error() {
    let folder = tempfile::tempdir().unwrap();
    let mut named = 0;
    let limits = some_of([8, 10, 12, 14, 16, 18, 20, 24, 28, 36, 48], 2);
    for (number, files) in limits.into_iter().enumerate() {
        let limit = format!("ulimit -n {files}");
        if !can_be_loaded(&limit) {
            println!("skipped: the program cannot be loaded with {files} open files");
            continue;
        }
        let dir = format!("--checkpoint-dir={}", folder.path().join(number.to_string()).display());
        let remedy = format!("this process may have {files} (ulimit -n); raise the limit");
        for args in [
            &["--nproc-per-node=2", "--num-workers=1", &dir][..],
            &["--nproc-per-node=3", "--spawn=processes", "--timeout=1h", "--grace-period=1m"],
        ] {
            named += usize::from(is_named(&limit, args, &remedy));
        }
    }
    assert!(named > if runs_every_case() { 3 } else { 1 }, "{named} runs have met a limit");
}

/// Nobody's number, so that no other process counts.
const USER: u32 = 54_321;

fn processes_of_user() -> Vec<String> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let of_user = entries.filter(|it| it.metadata().is_ok_and(|found| found.uid() == USER));
    let command = |path: &Path| fs::read_to_string(path.join("cmdline")).unwrap_or_default();
    of_user.map(|it| command(&it.path()).replace('\0', " ")).filter(|it| !it.is_empty()).collect()
}

#[test]
fn thread_limit_is_named_and_no_process_is_left() {
    let limit = |count: u32| {
        let user = format!("setpriv --reuid={USER} --regid={USER} --clear-groups");
        format!("exec {user} prlimit --nproc={count} \"$0\" \"$@\"")
    };
    if !can_be_loaded(&limit(100)) {
        return println!(
            "skipped: no other user can run the program (root, setpriv and prlimit needed)"
        );
    }
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let mut named = 0;
    for count in some_of((1..=12).chain([15, 20, 30]), 2) {
        let dir = format!("--checkpoint-dir={}", folder.path().join(count.to_string()).display());
        for args in [
            &["--nproc-per-node=8", "--num-workers=1", &dir][..],
            &["--nproc-per-node=3", "--spawn=processes", "--timeout=1h", "--grace-period=1m"],
        ] {
            named += usize::from(is_named(&limit(count), args, "ulimit -u"));
            assert_eq!(processes_of_user(), [""; 0], "{count} {args:?}");
        }
    }
    assert!(named > if runs_every_case() { 5 } else { 1 }, "{named} runs have met a limit");
}

#[test]
fn address_space_limit_is_named_in_the_error() {
    // Each rank's stack takes 64 MiB of addresses, and all of them 4 GiB more than there are.
    let named = "it may reserve 16384000000 bytes of memory (ulimit -v)";
    assert!(is_named("ulimit -v 16000000", &["--nproc-per-node=300"], named));
}

/// 70 GB are enough for the memory of one process, and not for that of both.
#[test]
fn address_space_for_one_memory_is_named_as_the_reason_for_tcp() {
    let args = ["--nproc-per-node=2", "--spawn=processes", "--max-epochs=1"];
    let (_, stderr) = run_command_to(0, program_under("ulimit -v 70000000", &args));
    let why = "64 GiB of addresses are not available; raise the limit (ulimit -v unlimited)";
    assert!(stderr.contains(why) && !stderr.contains("a connection is missing"), "{stderr}");
}

/// A system without devices or processes is no system with low limits.
#[test]
fn system_without_dev_or_proc_is_not_taken_for_one_with_limits() {
    let mut unshare = Command::new("unshare");
    unshare.args(["--user", "--map-root-user", "--mount", "true"]);
    if !unshare.status().is_ok_and(|it| it.success()) {
        return println!("skipped: this user may not mount");
    }
    let program = program(&["--nproc-per-node=2", "--spawn=processes", "--max-epochs=1"]);
    for setup in ["mount -t tmpfs none /dev", "mount -t tmpfs none /proc"] {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c"]);
        command.arg(format!("{setup} && exec \"$0\" \"$@\""));
        command.arg(program.get_program()).args(program.get_args()).stdin(Stdio::null());
        let (code, stdout, stderr) = run_command(in_the_environment_of(&program, command));
        assert!(
            code == Some(0) || stderr.contains("/dev/") || stderr.contains("/proc"),
            "{stderr}"
        );
        assert!(code != Some(0) || stdout.contains("Epoch: 0"), "{setup}: {stdout}{stderr}");
        for wrong in ["ulimit", "Too many open files", "panicked"] {
            assert!(!stderr.contains(wrong), "{setup}: {stderr}");
        }
    }
}

/// The kernel would end a process whose memory is larger than the limit on files.
#[test]
fn file_size_limit_makes_processes_use_tcp() {
    let limit = "ulimit -f 10000"; // in units of 512 bytes
    let args = ["--nproc-per-node=2", "--spawn=processes", "--max-epochs=1", "--log-format=json"];
    let hash = |limit| {
        let (stdout, stderr) = run_command_to(0, program_under(limit, &args));
        (last_event(&stdout)["parameters_hash"].to_string(), stderr)
    };
    let (through_memory, quiet) = hash("true");
    let (over_tcp, stderr) = hash(limit);
    assert_ne!(through_memory, "null");
    assert_eq!(through_memory, over_tcp);
    let note = "ddp-mp: processes of one machine exchange tensors over TCP, because they cannot share memory: process 0: the limit \
                on file sizes is 5000 KiB; raise it (ulimit -f unlimited)\n";
    assert!(!quiet.contains("TCP") && stderr.matches(note).count() == 1, "{quiet}{stderr}");
    let required = [&args[..], &["--shared-memory=require"]].concat();
    let (_, stderr) = run_command_to(2, program_under(limit, &required));
    assert!(
        stderr.contains("--shared-memory=require: the processes cannot share memory"),
        "{stderr}"
    );
}
