//! The processes of one host: how they come to share memory, and how each notices at once what happens to the others.

mod rendezvous;
mod watch;

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::Mutex;
use serde_with::SerializeDisplay;
use strum::{Display, EnumString, VariantNames};

use crate::process_group::Host;
use watch::HostWatch;

/// Whether processes of one host exchange tensors through memory, or over TCP.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Display, EnumString, VariantNames, SerializeDisplay,
)]
#[strum(serialize_all = "lowercase")]
pub enum SharedMemory {
    /// Through memory on each host, if all processes can share it.
    #[default]
    Auto,
    /// Over TCP.
    Off,
    /// Through memory; it is an error if a process cannot share it.
    Require,
}

/// The reason of a process that must not share memory.
pub(super) const OFF: &str = "--shared-memory=off";

/// Why processes of one machine may not find each other.
pub(super) const APART: &str = "a rank of another machine is between them, or they are in containers with separate networks; \
                                start the processes of a machine one after another (srun --distribution=block), in one \
                                container";

/// This process's connections to the others of its host.
#[derive(Debug)]
pub(super) struct HostLinks {
    /// The memory that the processes share.
    pub memory: Arc<Host>,
    peers: Vec<Arc<Peer>>,
    /// Whether torchrun's agent supervises the processes.
    has_agent: bool,
    watch: Mutex<Option<HostWatch>>,
}

/// The connection to another process. It shows at once when that process ends.
#[derive(Debug)]
struct Peer {
    ranks: Range<usize>,
    socket: UnixStream,
    /// The process itself: a child that it has forked may keep its end of the socket. `None` where the system has no such
    /// file.
    process: Option<OwnedFd>,
    /// Whether it has not taken a message: then it gets no other.
    is_cut_off: AtomicBool,
}
