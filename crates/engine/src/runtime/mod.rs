//! The state that the ranks of one run share, and their waits for each other.
//!
//! **Invariant:** every wait here ends: done, cancelled, or past its deadline. The wait at the end of a shared-memory
//! collective (`process_group::local::Barrier::wait_to_leave`) ends because the other ranks only compute there.

mod cancel;
mod clock;
mod failure;
mod fault;
mod flight_recorder;
mod loss_record;
mod op_entry;
pub mod panics;
mod peer_status;
pub(crate) mod primitives;
mod remote_snapshots;
mod run;
#[cfg(not(loom))]
mod running_clock;
mod simulated_cluster;
mod stop;
mod watchdog;

pub(crate) use cancel::{CancelToken, Notify};
pub(crate) use clock::Instant;
pub use clock::{Deadline, MAX_WAIT};
pub(crate) use failure::Failure;
pub use failure::RankFailure;
pub use fault::{Fault, FaultKind, FlipPlace};
pub use flight_recorder::OpTotals;
pub(crate) use flight_recorder::{
    CallSite, FlightRecorder, MOST_ENTRIES, OpStart, SpanId, format_call_site,
};
pub(crate) use loss_record::{LossRecord, RecordedLosses};
pub use op_entry::{OpEntry, SourceLine};
pub use panics::install_panic_hook;
pub use peer_status::HEARTBEAT_INTERVAL;
pub(crate) use peer_status::{PeerHeartbeat, PeerStatus, RankStatus};
pub(crate) use remote_snapshots::RemoteSnapshots;
pub(crate) use run::{Activity, Peers, RunContext};
pub use simulated_cluster::SimulatedCluster;
pub(crate) use stop::StopMessage;
pub use stop::{StopReason, StopRequest};
pub(crate) use watchdog::{LaunchedWork, Watchdog};
