//! Limits of the system on cores, open files, threads and disks: checks them in advance, and explains errors that they cause.

use std::fmt::Display;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::thread;

use compare::remedy_of_path;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::{Error, Result, counted};

/// A limit of the system that the user can raise.
struct Limit {
    /// The text of the system's error, which libtorch repeats.
    words: &'static str,
    /// Returns details that the text lacks.
    why: fn() -> String,
    remedy: &'static str,
}

const FILES: Limit = Limit {
    words: "Too many open files",
    why: open_files,
    remedy: "raise the limit with ulimit -n, or use fewer ranks",
};

/// The error is the same if there is no room for a thread's stack.
const THREADS: Limit = Limit {
    words: "Resource temporarily unavailable",
    why: threads,
    remedy: "raise the limit (ulimit -u, ulimit -v), or use fewer ranks or workers",
};

/// The limits, in order. The first one whose text is part of an error applies.
const LIMITS: [Limit; 3] = [
    Limit {
        words: "Too many open files in system",
        why: || "the whole system has as many files open as fs.file-max allows".into(),
        remedy: "raise it with sysctl",
    },
    FILES,
    THREADS,
];

/// Errors of a disk, each with the remedy.
const DISKS: [(&str, &str); 4] = [
    ("No space left on device", "free some space, or use another disk"),
    ("Disk quota exceeded", "free some of your quota, or use another disk"),
    ("File too large", "raise the limit on file sizes (ulimit -f)"),
    ("Read-only file system", "use a folder that can be written to"),
];

/// Returns `error`, with the limit and the remedy added if the user can fix it and it does not contain the remedy yet.
#[doc(hidden)]
pub fn explain(error: impl Display) -> String {
    let error = error.to_string();
    let found = LIMITS.iter().find(|limit| error.contains(limit.words));
    // Libraries do not report why they cannot open a file.
    let found = found.or_else(|| (error.contains("to open ") && !can_open(1)).then_some(&FILES));
    let of_disk = DISKS.iter().find(|(words, _)| error.contains(words));
    let remedy = of_disk.map(|(_, remedy)| *remedy).or_else(|| remedy_of_path(&error));
    match (found, remedy) {
        (Some(limit), _) => limit.explain(error),
        (None, Some(remedy)) if !error.contains(remedy) => format!("{error}; {remedy}"),
        _ => error,
    }
}

/// Returns the error of an output of the run, `what`, that cannot be opened.
#[doc(hidden)]
pub fn output_refused(what: &str, error: &io::Error) -> Error {
    Error::usage(format!("{what}: {}", explain(error)))
}

/// Returns the error of an output of the run, `what`, that was open and cannot be written.
#[doc(hidden)]
pub fn output_failed(what: &str, error: &io::Error) -> Error {
    Error::Write { what: what.into(), reason: explain(error) }
}

/// Returns the error of a file, `what`, that cannot be written: a failure of the run if the disk is full; otherwise
/// wrong input, such as a path that nobody may write to.
#[doc(hidden)]
pub fn unwritable(what: String, error: &io::Error) -> Error {
    let reason = explain(error);
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
            Error::Write { what, reason }
        }
        _ => Error::unsupported(format!("{what}: {reason}")),
    }
}

impl Limit {
    /// Returns `error` with the limit and the remedy, unless it has them already.
    fn explain(&self, error: String) -> String {
        let Self { why, remedy, .. } = self;
        if error.contains(remedy) { error } else { format!("{error}: {}; {remedy}", why()) }
    }
}

/// Describes why `what`, a thread or a process, could not be started. The text has the system's reason, this process's
/// number of threads, the limits, and the remedy.
#[doc(hidden)]
pub fn not_started(what: &str, error: &io::Error) -> String {
    let told = format!("{what} cannot be started: {error}");
    match Errno::from_io_error(error) {
        Some(Errno::AGAIN | Errno::NOMEM) => THREADS.explain(told),
        Some(Errno::NOENT) if !Path::new("/dev/null").exists() => {
            format!("{told}: /dev/null is missing; mount /dev")
        }
        _ => told,
    }
}

/// Returns the number of CPU cores that this process may use.
#[doc(hidden)]
pub fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Checks that this process can open `count` more files and connections for `purpose`. Raises its soft limit to the
/// hard limit if necessary.
///
/// # Errors
/// [`Error::Input`] with the limit and the remedy.
pub(crate) fn require_files(count: usize, purpose: &str) -> Result<()> {
    if can_open(count) || (raise_soft_limit() && can_open(count)) {
        return Ok(());
    }
    let error = format!("{purpose} takes {count} more open files: {}", FILES.words);
    Err(Error::unsupported(FILES.explain(error)))
}

/// Returns whether this process can open `count` more files now.
pub(crate) fn can_open(count: usize) -> bool {
    let files: Result<Vec<OwnedFd>, Errno> =
        (0..count).map(|_| eventfd(0, EventfdFlags::CLOEXEC)).collect();
    !matches!(files, Err(Errno::MFILE | Errno::NFILE))
}

fn raise_soft_limit() -> bool {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    current != maximum && setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok()
}

fn open_files() -> String {
    let limit = match getrlimit(Resource::Nofile).current {
        Some(limit) => limit.to_string(),
        None => "any number of".into(),
    };
    format!("this process may have {limit} (ulimit -n)")
}

fn threads() -> String {
    let limits = [
        ("its user may have", getrlimit(Resource::Nproc).current, " (ulimit -u)"),
        ("it may reserve", getrlimit(Resource::As).current, " bytes of memory (ulimit -v)"),
        ("its container (pids.max)", number_in("/sys/fs/cgroup/pids.max"), ""),
        ("the system (kernel.threads-max)", number_in("/proc/sys/kernel/threads-max"), ""),
    ];
    let text =
        |(whose, limit, unit): (&str, Option<u64>, &str)| Some(format!("{whose} {}{unit}", limit?));
    let known: Vec<String> = limits.into_iter().filter_map(text).collect();
    let threads = line_in(STATUS, "Threads:").unwrap_or_else(|| "an unknown number of".into());
    let threads = format!("this process has {}", counted(threads, "thread"));
    if known.is_empty() { threads } else { format!("{threads}; {}", known.join(", ")) }
}

/// What the kernel says about this process.
pub(crate) const STATUS: &str = "/proc/self/status";

/// Returns what a file of the kernel says after `key`.
fn line_in(file: &str, key: &str) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    text.lines().find_map(|line| line.strip_prefix(key)).map(|value| value.trim().to_owned())
}

/// Returns the bytes that a file of the kernel counts after `key` in units of 1024 bytes, which it calls kB.
pub(crate) fn kilobytes_in(file: &str, key: &str) -> Option<u64> {
    let kilobytes: u64 = line_in(file, key)?.strip_suffix("kB")?.trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}

/// Returns the number in a file of the kernel.
pub(crate) fn number_in(file: &str) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_errors_are_explained_exactly_once() {
        for (error, told) in [
            ("a.csv: Too many open files (os error 24)", "(ulimit -n); raise the limit"),
            ("listen: Too many open files in system", "fs.file-max"),
            ("thread: Resource temporarily unavailable", "this process has "),
            ("(os error 28): No space left on device", "; free some space, or use another disk"),
            ("Disk quota exceeded", "; free some of your quota, "),
        ] {
            let explained = explain(error);
            assert!(explained.starts_with(error) && explained.contains(told), "{explained}");
            assert_eq!(explain(&explained), explained);
        }
        for (errno, remedy) in [
            (libc::ENOSPC, "(os error 28); free some space, or use another disk"),
            (libc::EFBIG, "(os error 27); raise the limit on file sizes (ulimit -f)"),
            (libc::EROFS, "(os error 30); use a folder that can be written to"),
            (libc::ENOENT, "No such file or directory (os error 2); check the path"),
        ] {
            let explained = explain(io::Error::from_raw_os_error(errno));
            assert!(explained.ends_with(remedy), "{explained}");
        }
        assert_eq!(explain("a.csv: No such file"), "a.csv: No such file");
        let started = not_started("rank 3's thread", &io::Error::from_raw_os_error(11));
        assert!(
            started.starts_with("rank 3's thread cannot be started: Resource temp"),
            "{started}"
        );
        assert!(started.contains(" threads; ") && explain(&started) == started, "{started}");
        let without_proc = not_started("a process", &io::Error::other("Is /proc mounted?"));
        assert_eq!(without_proc, "a process cannot be started: Is /proc mounted?");
    }

    #[test]
    fn open_files_beyond_the_limit_are_refused_in_advance() {
        let Some(limit) = getrlimit(Resource::Nofile).maximum else { return };
        let Ok(count) = usize::try_from(limit) else { return };
        if count > 1 << 21 {
            return println!("skipped: this process may open {limit} files");
        }
        require_files(3, "this test").unwrap();
        let error = require_files(count, "this test").unwrap_err().to_string();
        assert!(error.contains("this test takes ") && error.contains("(ulimit -n)"), "{error}");
    }
}
