//! Starting the ranks: which device each gets, the threads they run on, how they meet, how they fail.

mod failure;
mod panics;
mod placement;
mod rank;
mod rendezvous;
mod spawn;

pub use crate::sync::{Fault, FaultKind, Stage};
pub use failure::{RankFailure, SpawnError, StuckRank};
pub use panics::install_panic_hook;
pub use placement::{BackendChoice, Nproc, Placement, place};
pub use rank::{Backend, Rank};
pub use spawn::{Spawn, spawn};
