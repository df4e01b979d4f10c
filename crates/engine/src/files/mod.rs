//! Files that the user names. They are opened without waiting, read up to a limit, and written in whole rows.

mod append;
mod home;
mod place;
mod read;
mod whole;

pub use append::{Appender, LinesBefore, lines_before};
pub(crate) use compare::{GZIP, HTML, RECOGNIZED_BY, SAFETENSORS, kind_of, name_of_kind};
pub use compare::{mistaken, open_regular};
pub use home::expand_home;
pub use place::Place;
pub use read::read_stream;
pub(crate) use read::{read_regular, refuse_special};
pub use whole::{WholeFile, check_file_name};

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::runtime::Deadline;

/// Returns the path of a process's file: `a.json` of a single process, `a.0.json` and so on of several. A device, such as
/// `/dev/null`, and the process's own `/dev/stdout` are the same for all.
pub fn process_path(path: &Path, [process, count]: [usize; 2]) -> PathBuf {
    let is_shared = || {
        let place = Place::of(path);
        place.is_device() || place.is_of_this_process()
    };
    if count == 1 || path.file_name().is_none() || is_shared() {
        return path.into();
    }
    compare::numbered_path(path, process)
}

/// Waits until `file` is ready for `events`. Returns `false` after `patience`.
fn wait_for(file: impl AsFd, events: PollFlags, patience: Duration) -> io::Result<bool> {
    let deadline = Deadline::after(patience);
    loop {
        let left = deadline.left();
        let timeout =
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&file, events)], Some(&timeout)) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(0) if !deadline.is_over() => {} // the process was suspended
            Ok(ready) => return Ok(ready > 0),
            Err(error) => return Err(error.into()),
        }
    }
}
