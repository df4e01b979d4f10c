//! Limits of the system on open files and threads: making sure that they suffice, and what to say when one is reached.

use std::fs::{self, File};
use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::{Error, Result};

/// The system's words for a process, or a system, that may open no more files; libtorch repeats them.
const FILES: &str = "Too many open files";

/// The system's words for a thread or process that cannot be started; libtorch repeats them.
const THREADS: &str = "Resource temporarily unavailable";

/// Adds the limit and the remedy to an error about open files or threads. Returns all other errors as they are.
pub(crate) fn explain(error: &str) -> String {
    if error.contains("ulimit ") {
        return error.into(); // explained where it happened
    }
    let why = match () {
        () if error.contains("Too many open files in system") => {
            "the whole system has as many files open as fs.file-max allows; raise it with sysctl"
                .into()
        }
        () if error.contains(FILES) => of_files(),
        // Libraries do not say why.
        () if error.contains("to open ") && !can_open(1) => of_files(),
        () if error.contains(THREADS) => of_threads(),
        () => return error.into(),
    };
    format!("{error}: {why}")
}

/// Describes why `what`, a thread or a process, could not be started: the system's reason, how many threads this
/// process has, the limits, and the remedy.
pub(crate) fn not_started(what: &str, error: &io::Error) -> String {
    format!("{what} cannot be started: {error}: {}", of_threads())
}

/// Makes sure that this process can open `count` more files and connections for `purpose`. Raises its soft limit to the
/// hard one if need be.
///
/// # Errors
/// [`Error::Input`] with the limit and the remedy.
pub(crate) fn require_files(count: usize, purpose: &str) -> Result<()> {
    if can_open(count) || (raise_soft_limit() && can_open(count)) {
        return Ok(());
    }
    Err(Error::Input(format!("{purpose} takes {count} more open files: {FILES}: {}", of_files())))
}

/// Whether this process can open so many more files now.
pub(crate) fn can_open(count: usize) -> bool {
    let files: Result<Vec<File>, io::Error> = (0..count).map(|_| File::open("/dev/null")).collect();
    files.is_ok()
}

fn raise_soft_limit() -> bool {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    current != maximum && setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok()
}

fn of_files() -> String {
    let limit = match getrlimit(Resource::Nofile).current {
        Some(limit) => limit.to_string(),
        None => "any number of".into(),
    };
    format!(
        "this process may have {limit} (ulimit -n); raise the limit with ulimit -n, or use fewer ranks"
    )
}

fn of_threads() -> String {
    let mut known = Vec::new();
    if let Some(limit) = getrlimit(Resource::Nproc).current {
        known.push(format!("its user may have {limit} (ulimit -u)"));
    }
    for (file, whose) in [
        ("/sys/fs/cgroup/pids.max", "its container (pids.max)"),
        ("/proc/sys/kernel/threads-max", "the system (kernel.threads-max)"),
    ] {
        if let Some(limit) = number_in(file) {
            known.push(format!("{whose} {limit}"));
        }
    }
    if let Some(limit) = getrlimit(Resource::As).current {
        known.push(format!("its memory is limited to {limit} bytes (ulimit -v)"));
    }
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let threads = status.lines().find_map(|line| line.strip_prefix("Threads:"));
    let threads = threads.map_or("an unknown number of", str::trim);
    let known = known.join(", ");
    format!(
        "this process has {threads} threads; {known}; raise the limit (ulimit -u), or use fewer ranks or workers"
    )
}

fn number_in(file: &str) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_explained_once_and_nothing_else_is() {
        for (error, told) in [
            ("a.csv: Too many open files (os error 24)", "(ulimit -n); raise the limit"),
            ("listen: Too many open files in system", "fs.file-max"),
            ("thread: Resource temporarily unavailable", "this process has "),
        ] {
            let explained = explain(error);
            assert!(explained.starts_with(error) && explained.contains(told), "{explained}");
        }
        let explained = explain("a.csv: Too many open files (os error 24)");
        assert_eq!(explain(&explained), explained);
        assert_eq!(explain("a.csv: No such file"), "a.csv: No such file");
        let started = not_started("rank 3's thread", &io::Error::from_raw_os_error(11));
        assert!(
            started.starts_with("rank 3's thread cannot be started: Resource temp"),
            "{started}"
        );
        assert!(started.contains(" threads; ") && explain(&started) == started, "{started}");
    }

    #[test]
    fn more_files_than_the_limit_are_refused_beforehand() {
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
