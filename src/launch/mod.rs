//! Starting the ranks: which device each gets, the threads they run on, how they meet, how they fail.

mod failure;
mod placement;
mod rank;
mod rendezvous;
mod signals;
mod spawn;

pub use crate::sync::{Fault, FaultKind, Stage, Stop, StopReason, install_panic_hook};
pub use failure::{RankFailure, SpawnError, StuckRank};
pub use placement::{BackendChoice, Nproc, Placement, place};
pub use rank::{Backend, Rank};
pub use signals::{exit_code, stop_on_signals};
pub use spawn::{Spawn, spawn};
