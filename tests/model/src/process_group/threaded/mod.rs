//! How ranks announce what they call, and reduce what all have announced.

#[path = "../../../../../src/process_group/threaded/element.rs"]
mod element;
#[path = "../../../../../src/process_group/threaded/meeting.rs"]
mod meeting;

pub(crate) use meeting::{Meeting, Seat};

#[cfg(all(test, not(loom)))]
mod races;
