//! Operating-system calls that the standard library lacks: signals, limits, CPUs of threads, the terminal, faults of mapped
//! memory, and the exit.

pub(crate) mod affinity;
mod bus_error;
mod held_output;
pub(crate) mod limits;
mod memory;
mod openmp;
mod process;
pub(crate) mod shared_memory;
mod signal_cleanup;
pub(crate) mod terminal;

pub(crate) use bus_error::{WatchedMapping, watch_mapping};
pub(crate) use held_output::{HeldOutput, Stream};
pub(crate) use limits::cores;
pub(crate) use memory::gigabytes;
pub use memory::{peak_memory, total_memory};
pub use openmp::{BeforeMain, set_up_openmp};
pub(crate) use openmp::{binding_note, is_run_by_linker, limit_spinning_in_main};
pub use process::{
    check_working_directory, exit, hold_user_signals, ignore_file_size_signal, release_user_signals,
};
pub(crate) use process::{
    hold_signals_of_user, is_ignored, release_signals, send_signal, tie_to_this_process,
    wait_for_end,
};
pub(crate) use signal_cleanup::{Ended, TemporaryFolder, TiedChild, text_in};
