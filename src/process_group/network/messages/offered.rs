//! An offer of another process in the mailbox of the rank that it is for.

use std::sync::Arc;

use tch::Tensor;

use super::frame::Frame;
use super::link::{Expected, Link};
use crate::ffi::TorchResult;
use crate::process_group::local::{Completion, Incoming, Outcome};

/// An offer in a mailbox.
#[derive(Debug)]
pub(super) struct Offered {
    pub link: Arc<Link>,
    pub id: u64,
    pub source: usize,
    pub destination: usize,
    pub inline: Option<Tensor>,
}

impl Incoming for Offered {
    fn accept(self: Box<Self>, mut into: Tensor, delivery: Arc<Completion>) {
        let Self { link, id, source, destination, inline } = *self;
        let rank = link.context.members[destination];
        if let Some(tensor) = inline {
            let copied = tch::no_grad(|| into.f_copy_(&tensor).map(drop));
            return match copied.doing("copy_") {
                Ok(()) => {
                    link.reply(Frame::Taken { id });
                    delivery.complete(Outcome::From(source));
                }
                Err(error) => {
                    link.context.run.report(rank, Some(&error), error.to_string());
                    delivery.complete(Outcome::Reported);
                }
            };
        }
        delivery.carried_by(link.clone());
        link.expect(id, Expected { into, source, rank, delivery });
    }

    fn refuse(self: Box<Self>, expected: &str) {
        self.link.reply(Frame::Refused { id: self.id, expected: expected.into() });
    }
}
