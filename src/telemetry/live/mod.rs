//! The live view: what each rank does, in the terminal, while it does it (`--live`).
//!
//! A [`RankSource`](look::RankSource) looks at the ranks, [`state`] keeps what is shown, [`draw`] draws it, and [`view`]
//! does so a few times a second.

mod draw;
mod keys;
mod lanes;
mod look;
mod panels;
mod player;
mod recording;
mod state;
mod view;
mod waited_for;

pub(crate) use look::{Look, RankLook, RankSource, Source};
pub(crate) use player::{Player, SPEEDS};
pub(crate) use view::LiveView;
