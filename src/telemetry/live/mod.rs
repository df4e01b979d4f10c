//! The live view: what each rank does, in the terminal, while it does it (`--live`).
//!
//! [`snapshot`] is what is known of the ranks at one moment, [`state`] keeps what is shown, [`draw`] draws it, and [`view`]
//! does so a few times a second.

mod draw;
mod keys;
mod lanes;
mod snapshot;
mod state;
mod view;

pub(crate) use snapshot::{RankSnapshot, RunSnapshot, Source};
pub(crate) use view::LiveView;
