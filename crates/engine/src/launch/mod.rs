//! Starting the ranks: launcher detection, device placement, the threads or processes of the ranks, their
//! rendezvous and their failures.

mod binding;
mod clock_sync;
mod error_file;
mod failure;
mod heartbeat;
mod heartbeat_monitor;
mod host;
mod joined_launch;
mod launchers;
mod messages;
mod placement;
mod process_rendezvous;
mod processes;
mod rank;
mod rank_thread;
mod restart_generation;
mod restarts;
mod signals;
mod spawn;
mod stall;
mod world;

pub use crate::runtime::{
    Fault, FaultKind, FlipPlace, RankFailure, StopReason, StopRequest, install_panic_hook,
};
pub use binding::BindChoice;
pub use binding::Binding;
pub(crate) use binding::LocalRanks;
pub use error_file::write_error_file;
pub use failure::{SpawnError, StuckRank};
pub use host::SharedMemory;
pub use joined_launch::{JoinLaunchOptions, JoinedLaunch};
pub use launchers::{
    Launch, LaunchChoice, LaunchKind, LaunchOptions, MasterEndpoint, Processes, detect,
};
pub use placement::{BackendChoice, NodeSlice, Nproc, Placement, place};
pub use processes::SpawnChoice;
pub use processes::{
    ChildError, Children, ErrorKind, ProcessesEnd, SpawnProcesses, how_ended, this_program,
};
pub use rank::Rank;
pub use restarts::Restarts;
pub use signals::{await_termination, end_at_signals_in};
pub use signals::{exit_code, status_signal, stop_on_signals};
pub use spawn::{Spawn, spawn};
use world::ProcessWorld;
