//! The network between the processes of a group, over libtorch's Gloo and a store.
//!
//! The `gloo` backend moves its tensors through it. Between processes, `nccl` uses it to compare calls and to exchange
//! requests to stop. [`messages`] carries tensors from one rank to another. Read [`connection`] next.

mod chain;
mod common;
mod connection;
mod header;
mod lost;
mod messages;
mod process_map;
mod split_sizes;

pub(super) use chain::{Chain, ChainMessages};
pub(super) use common::{Buffers, Room};
pub(crate) use connection::Network;
pub(super) use lost::connection_lost;
pub(crate) use process_map::ProcessMap;
pub(super) use split_sizes::{SplitSizes, transfers};
