//! The live view: what each rank does, in the terminal, while it does it (`--live`).
//!
//! A [`RankSource`](snapshot::RankSource) takes snapshots of the ranks, [`state`] keeps what is shown, [`draw`] draws it,
//! and [`view`] does so a few times a second.

mod draw;
mod keys;
mod lanes;
mod panels;
mod snapshot;
mod state;
mod view;
mod waited_for;

pub(crate) use snapshot::{RankSnapshot, RankSource, RunSnapshot, Source};
pub(crate) use view::LiveView;
