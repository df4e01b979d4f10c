//! Temporary folders and child processes that do not outlive this process when a signal ends it.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;
use std::{io, thread};

use parking_lot::{Condvar, Mutex};
use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP};
use signal_hook::iterator::Signals;
use signal_hook::low_level;

use super::process::{is_ignored, tie_to_this_process, wait_for_end};

/// How long a child process may take to end after the signal. Then it is killed.
const TERM_TIMEOUT: Duration = Duration::from_secs(5);

/// What a signal that ends this process ends or removes before.
#[derive(Debug)]
struct Cleanup {
    /// The signal, once it has arrived.
    signal: Option<i32>,
    /// The process groups of the child processes that have not ended.
    groups: Vec<Pid>,
    /// The temporary folders, also those that are removed already.
    folders: Vec<PathBuf>,
    /// Whether a thread waits for the signals.
    is_watched: bool,
}

/// The cleanup of this process: a signal is for the whole process.
static CLEANUP: Mutex<Cleanup> = Mutex::new(Cleanup {
    signal: None,
    groups: Vec::new(),
    folders: Vec::new(),
    is_watched: false,
});

/// Notifies of the end of a child process.
static CHILD_ENDED: Condvar = Condvar::new();

/// Changes the cleanup, which SIGINT, SIGTERM and SIGHUP make from now on. Does not return where one of them is ending the
/// process.
///
/// # Errors
/// When the system refuses.
fn change<T>(change: impl FnOnce(&mut Cleanup) -> io::Result<T>) -> io::Result<T> {
    let mut cleanup = CLEANUP.lock();
    if !cleanup.is_watched {
        watch()?;
        cleanup.is_watched = true;
    }
    let result = change(&mut cleanup);
    let is_ending = cleanup.signal.is_some();
    drop(cleanup);
    CHILD_ENDED.notify_all();
    if !is_ending {
        return result;
    }
    loop {
        thread::park();
    }
}

/// Makes the signals clean up from now on, before they end the process. Those that this process ignores, as under nohup,
/// stay ignored.
fn watch() -> io::Result<()> {
    let ends = |signal: &i32| !is_ignored(*signal);
    let all = [SIGINT, SIGQUIT, SIGTERM, SIGHUP, SIGTSTP];
    let mut signals = Signals::new(all.into_iter().filter(ends))?;
    let clean_up = move || {
        let send = |groups: &[Pid], signal| {
            for group in groups {
                let _ = kill_process_group(*group, signal); // fails only if it has ended
            }
        };
        let signal = loop {
            match signals.forever().next() {
                Some(SIGTSTP) => {
                    let cleanup = CLEANUP.lock();
                    send(&cleanup.groups, Signal::STOP);
                    let _ = low_level::emulate_default_handler(SIGTSTP); // returns when this process goes on
                    send(&cleanup.groups, Signal::CONT);
                }
                Some(signal) => break signal,
                None => return,
            }
        };
        let mut cleanup = CLEANUP.lock();
        cleanup.signal = Some(signal);
        send(&cleanup.groups, Signal::from_named_raw(signal).unwrap_or(Signal::TERM));
        CHILD_ENDED.wait_while_for(
            &mut cleanup,
            |cleanup| !cleanup.groups.is_empty(),
            TERM_TIMEOUT,
        );
        send(&cleanup.groups, Signal::KILL);
        for folder in &cleanup.folders {
            let _ = fs::remove_dir_all(folder); // an error could not be reported any more
        }
        low_level::exit(128 + signal);
    };
    thread::Builder::new().name("signals".into()).spawn(clean_up).map(drop)
}

/// A folder that is removed in the end, also when SIGINT, SIGTERM or SIGHUP ends the process.
#[derive(Debug)]
#[doc(hidden)]
pub struct TemporaryFolder {
    path: PathBuf,
    is_kept: bool,
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        if !self.is_kept {
            let _ = fs::remove_dir_all(&self.path); // an error could not be reported
        }
    }
}

impl TemporaryFolder {
    /// Creates a folder where the system has its temporary files.
    ///
    /// # Errors
    /// When the system refuses.
    #[doc(hidden)]
    pub fn new() -> io::Result<Self> {
        Self::created_by(|| Ok(tempfile::tempdir()?.keep()))
    }

    /// Takes over the folder that `create` makes and returns. No signal comes in between.
    ///
    /// # Errors
    /// Those of `create`, and when the system refuses.
    #[doc(hidden)]
    pub fn created_by(create: impl FnOnce() -> io::Result<PathBuf>) -> io::Result<Self> {
        change(|cleanup| {
            let path = create()?;
            cleanup.folders.push(path.clone());
            Ok(Self { path, is_kept: false })
        })
    }

    /// Leaves the folder there.
    ///
    /// # Errors
    /// When the system refuses.
    #[doc(hidden)]
    pub fn keep(mut self) -> io::Result<()> {
        self.is_kept = true;
        change(|cleanup| {
            cleanup.folders.retain(|folder| *folder != self.path);
            Ok(())
        })
    }

    /// Returns the path of the folder.
    #[doc(hidden)]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// A child process that ends with this process. Its stderr is a file: what the process has started may outlive it, and
/// would keep a pipe open.
#[derive(Debug)]
#[doc(hidden)]
pub struct TiedChild {
    /// `None` once it has been waited for.
    child: Option<Child>,
    group: Pid,
    stderr: File,
}

/// The end of a [`TiedChild`].
#[derive(Debug)]
#[doc(hidden)]
pub struct Ended {
    /// How it has ended.
    pub status: ExitStatus,
    /// What it has written to stderr.
    pub stderr: String,
}

impl Drop for TiedChild {
    /// Kills a process that nobody has waited for.
    fn drop(&mut self) {
        if self.child.is_some() {
            let _ = self.end();
        }
    }
}

impl TiedChild {
    /// Starts `command` without input, in a process group of its own. The SIGINT, SIGTERM or SIGHUP that ends this process
    /// goes to that group, too. The thread that calls this must live until this process ends.
    ///
    /// # Errors
    /// When the system refuses.
    #[doc(hidden)]
    pub fn spawn(command: &mut Command) -> io::Result<Self> {
        let stderr = tempfile::tempfile()?;
        command.stdin(Stdio::null()).stderr(stderr.try_clone()?);
        tie_to_this_process(command.process_group(0), &[]);
        change(|cleanup| {
            let child = command.spawn()?;
            let group = Pid::from_child(&child);
            cleanup.groups.push(group);
            Ok(Self { child: Some(child), group, stderr })
        })
    }

    /// Waits for the end. What the process has started in its group, and has not waited for, ends with it.
    ///
    /// # Errors
    /// When the system refuses.
    #[doc(hidden)]
    pub fn wait(mut self) -> io::Result<Ended> {
        if let Some(child) = &self.child {
            wait_for_end(child.id());
        }
        let status = self.end()?;
        Ok(Ended { status, stderr: text_in(&self.stderr)? })
    }

    /// Kills what is left of the process group, and takes the status of the process.
    fn end(&mut self) -> io::Result<ExitStatus> {
        let mut child = self.child.take().ok_or(io::ErrorKind::NotFound)?;
        change(|cleanup| {
            let _ = kill_process_group(self.group, Signal::KILL); // fails if nobody is left
            cleanup.groups.retain(|running| *running != self.group);
            child.wait()
        })
    }
}

/// Returns the text of `file`, to which others may go on writing.
#[doc(hidden)]
pub fn text_in(file: &File) -> io::Result<String> {
    let mut bytes = vec![0; file.metadata()?.len() as usize];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `setsid` leaves the process group, so that nobody kills it.
    #[test]
    fn output_is_whole_though_another_process_keeps_it_open() {
        let script = "setsid sleep 1000 & echo $!; echo why >&2; exit 3";
        let stdout = tempfile::tempfile().unwrap();
        let mut shell = Command::new("sh");
        shell.args(["-c", script]).stdout(stdout.try_clone().unwrap());
        let ended = TiedChild::spawn(&mut shell).unwrap().wait().unwrap();
        let kept = text_in(&stdout).unwrap().trim().parse().unwrap();
        assert_eq!((ended.status.code(), &*ended.stderr), (Some(3), "why\n"));
        rustix::process::kill_process(Pid::from_raw(kept).unwrap(), Signal::KILL).unwrap();
    }
}
