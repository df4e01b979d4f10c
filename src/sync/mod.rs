//! What the ranks of one run share, and how they wait for each other.
//!
//! **Invariant:** every wait here ends: done, cancelled, or past its deadline. The one on the way out of a
//! shared-memory collective ([`Barrier::wait_to_leave`]) ends because what it waits for is plain work.

mod barrier;
mod cancel;
mod deadline;
mod fault;
mod history;
pub(crate) mod panics;
pub(crate) mod primitives;
mod run;
mod seen;
mod stop;
mod timeline;

pub(crate) use barrier::Barrier;
pub(crate) use cancel::CancelToken;
pub(crate) use deadline::{LONGEST, deadline};
pub use fault::{Fault, FaultKind, Stage};
pub(crate) use history::{Clock, History, OfRank};
pub use panics::install_panic_hook;
pub(crate) use run::{Activity, Elsewhere, Failure, Peers, Run};
pub(crate) use seen::{Seen, Sightings};
pub(crate) use stop::News;
pub use stop::{Stop, StopReason};
pub(crate) use timeline::{Begin, Mark, Place, Record, Timeline, at_line};
