//! The thread that watches a group's connections while other threads serve them. It ends the connections with the run, and
//! fails the run if a rank cannot end.

use std::convert::Infallible;
use std::sync::Arc;

use crossbeam::channel::{Receiver, select_biased};

use super::context::MessageContext;
use super::link::Link;
use super::stoppable_reader::STOP_POLL_INTERVAL;

/// Watches `links` until `ended` closes or the run fails. If the run fails, ends every link and all of its messages.
pub(super) fn run(context: &MessageContext, links: &[Arc<Link>], ended: &Receiver<Infallible>) {
    loop {
        select_biased! {
            recv(context.run.cancel.tripped()) -> _ => {
                return links.iter().for_each(|link| link.close("given up, because the run ends"));
            }
            recv(ended) -> _ => return,
            default(STOP_POLL_INTERVAL) => links.iter().for_each(|link| link.check_deadlines()),
        }
    }
}
