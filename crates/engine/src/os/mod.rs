//! Operating-system calls that the standard library lacks: signals, limits, CPUs of threads, the terminal, faults of mapped
//! memory, and the exit.

pub(crate) mod affinity;
mod bus_error;
mod held_output;
pub mod limits;
mod memory;
mod openmp;
mod process;
pub(crate) mod shared_memory;
mod signal_cleanup;
pub mod terminal;

pub use affinity::CpuList;
pub(crate) use bus_error::{WatchedMapping, watch_mapping};
pub use held_output::{HeldOutput, Stream};
pub use limits::cores;
pub use memory::gigabytes;
pub use memory::{peak_memory, total_memory};
pub use openmp::binding_note;
pub use openmp::{BeforeMain, set_up_openmp};
pub use openmp::{is_run_by_linker, limit_spinning_in_main};
pub use process::{
    check_working_directory, exit, hold_signals_of_user, hold_user_signals,
    ignore_file_size_signal, release_user_signals, tie_to_this_process, wait_for_end,
};
pub(crate) use process::{is_ignored, release_signals, send_signal, wake_parent};
pub use signal_cleanup::{Ended, TemporaryFolder, TiedChild, text_in};
