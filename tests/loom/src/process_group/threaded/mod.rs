//! How ranks publish what they call, and reduce what all have published.

#[path = "../../../../../src/process_group/threaded/element.rs"]
mod element;
#[path = "../../../../../src/process_group/threaded/exchange.rs"]
mod exchange;

pub(crate) use exchange::{Exchange, ExchangeSlot};

#[cfg(all(test, not(loom)))]
mod races;
