//! How ranks publish what they call, and reduce what all have published.

#[path = "../../../../../src/process_group/local/element.rs"]
mod element;
#[path = "../../../../../src/process_group/local/exchange.rs"]
mod exchange;

pub(crate) use exchange::{Exchange, ExchangeSlot};

#[cfg(all(test, not(loom)))]
mod races;
