//! The exchange of the ranks' calls, and the reduction of their tensors.

#[path = "../../../../../crates/engine/src/process_group/local/barrier.rs"]
mod barrier;
#[path = "../../../../../crates/engine/src/process_group/local/element.rs"]
mod element;
#[path = "../../../../../crates/engine/src/process_group/local/exchange.rs"]
mod exchange;

pub(crate) use barrier::Barrier;
pub(crate) use exchange::{Exchange, ExchangeSlot};

#[cfg(all(test, not(loom)))]
mod races;
