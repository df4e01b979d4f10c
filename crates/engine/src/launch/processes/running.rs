//! The processes of one start, or of several in a row that one process makes.

use std::process::{Child, ExitStatus};

use super::child_error::ChildError;
use super::held_output::OutputOfProcesses;
use crate::launch::signals::reason_of;
use crate::os;
use crate::runtime::StopReason;

/// The processes, by rank.
#[derive(Default)]
pub(crate) struct RunningProcesses {
    /// `None` for each process that has ended.
    pub children: Vec<Option<Child>>,
    /// The rank, process id and exit status of each process that has ended, the earliest first.
    pub ended: Vec<(usize, u32, ExitStatus)>,
    /// The error of the first process that failed, as this process describes it. `None` if that one left its own.
    pub first_error: Option<ChildError>,
    /// The output that they write while rank 0 has the terminal.
    pub output: Option<OutputOfProcesses>,
}

impl RunningProcesses {
    pub(crate) fn are_there(&self) -> bool {
        self.children.iter().any(Option::is_some)
    }

    pub(crate) fn send(&mut self, signal: i32) {
        for child in self.children.iter_mut().flatten() {
            // Fails only if the process has ended.
            let _ = os::send_signal(child, signal);
        }
    }

    /// Prints what the processes have written while rank 0 had the terminal. Call this when they have ended their start.
    pub(crate) fn print_output(&mut self) {
        self.output.take().into_iter().for_each(OutputOfProcesses::print);
    }

    /// Kills all processes.
    pub(crate) fn kill(&mut self) {
        for child in self.children.iter_mut().flatten() {
            // Fails only if the process has ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Returns why the run stopped before its last epoch. `None` if it did not, or if rank 0 failed.
    pub(crate) fn reason_of_rank_0(&self) -> Option<StopReason> {
        let rank_0 = self.ended.iter().find(|(rank, ..)| *rank == 0);
        rank_0.and_then(|(.., status)| status.code()).and_then(reason_of).flatten()
    }

    /// Records the processes that have ended.
    pub(crate) fn reap(&mut self) {
        for (rank, entry) in self.children.iter_mut().enumerate() {
            if let Some(child) = entry
                && let Ok(Some(status)) = child.try_wait()
            {
                self.ended.push((rank, child.id(), status));
                *entry = None;
            }
        }
    }

    /// Returns the first process that failed: its exit code means neither success nor a requested stop.
    pub(crate) fn first_failure(&self) -> Option<&(usize, u32, ExitStatus)> {
        self.ended.iter().find(|(.., status)| status.code().and_then(reason_of).is_none())
    }
}
