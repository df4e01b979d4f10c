//! Tensors from a rank of this process to one of another, or from there.
//!
//! Messages of one tag between two ranks follow each other on a thread of their own, so that a rank that waits for one
//! of them does not keep another. First goes what is sent, for the other side to compare: Gloo would end the process at
//! a tensor of another length.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use crossbeam::channel::{Receiver, Sender, bounded, unbounded};
use tch::{Kind, Tensor};

use super::super::arguments::Dense;
use super::super::threaded::Side;
use super::super::{P2POp, kind_name};
use super::Network;
use crate::error::{Error, Result};
use crate::operation::At;

/// How long the description of a tensor may be.
const DESCRIPTION: usize = 256;

/// How many tags there are between two ranks, and how many ranks a process may have: Gloo's own tag has 16 bits for
/// both.
const TAGS: u64 = 256;
const RANKS: usize = 16;

/// The threads that carry messages, by direction, the two ranks and the tag.
#[derive(Debug, Default)]
pub(super) struct Couriers(Mutex<HashMap<Way, Sender<Job>>>);

type Way = (bool, usize, usize, u64);
type Job = Box<dyn FnOnce() + Send>;

impl Network {
    /// Begins to carry a message of the rank at place `me`, and tells in the channel how it ended.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for tags and ranks beyond what Gloo can tell apart, and when no thread can be started.
    pub(crate) fn carry(
        self: &Arc<Self>,
        op: &P2POp,
        me: usize,
        peer: usize,
        at: At,
    ) -> Result<Receiver<Result<()>>> {
        let (source, destination) = if op.is_send() { (me, peer) } else { (peer, me) };
        let local =
            |place: usize| place - self.layout().processes[self.layout().process_of(place)].start;
        if op.tag >= TAGS || local(source) >= RANKS || local(destination) >= RANKS {
            return Err(Error::Unsupported(format!(
                "between processes a message has a tag below {TAGS} and goes between the first {RANKS} ranks of \
                 each; this has tag {} from rank {source} to rank {destination}",
                op.tag
            )));
        }
        let tag = op.tag as usize * RANKS * RANKS + local(source) * RANKS + local(destination);
        let (ending, ended) = bounded(1);
        let (network, tensor, side) = (self.clone(), op.tensor.shallow_clone(), op.side);
        let rank = self.members()[me];
        self.run().begin_pending(rank);
        let job = Box::new(move || {
            let process = network.layout().process_of(peer);
            let result = match side {
                Side::Send => network.send(&tensor, rank, process, tag as u16, at),
                Side::Receive => {
                    network.receive(tensor, (source, destination), process, tag as u16, at)
                }
            };
            if let Err(error) = &result {
                // Its rank may never ask.
                network.run().report_at(rank, Some(at), Some(error), error.to_string());
            }
            let _ = ending.send(result);
            network.run().end_pending(rank);
        });
        if let Err(error) = self.couriers.give((op.is_send(), source, destination, op.tag), job) {
            self.run().end_pending(rank);
            return Err(error);
        }
        Ok(ended)
    }

    /// For `rank`, which waits for it.
    fn send(&self, tensor: &Tensor, rank: usize, process: usize, tag: u16, at: At) -> Result<()> {
        let dense = Dense::new(at.operation, tensor)?.handle();
        let mut description = describe(tensor).into_bytes();
        description.resize(DESCRIPTION, 0);
        let note = Tensor::f_from_slice(&description).map_err(Error::torch("from_slice"))?;
        self.wait_for(rank, at, self.gloo().send(&note, process, tag))?;
        self.wait_for(rank, at, self.gloo().send(&dense, process, tag))
    }

    fn receive(
        &self,
        mut tensor: Tensor,
        (source, destination): (usize, usize),
        process: usize,
        tag: u16,
        at: At,
    ) -> Result<()> {
        let rank = self.members()[destination];
        let note = Tensor::f_zeros([DESCRIPTION as i64], (Kind::Uint8, tch::Device::Cpu));
        let note = note.map_err(Error::torch("zeros"))?;
        self.wait_for(rank, at, self.gloo().recv(&note, process, tag))?;
        let sent = Vec::<u8>::try_from(note).map_err(Error::torch("reading a note"))?;
        let sent = String::from_utf8_lossy(&sent).trim_end_matches('\0').to_string();
        let expected = describe(&tensor);
        if sent != expected {
            let [source_rank, destination] =
                [source, destination].map(|place| self.members()[place]);
            return Err(Error::SendMismatch { source_rank, destination, sent, expected });
        }
        let dense = tensor.f_empty_like().map_err(Error::torch("empty_like"))?;
        let dense = dense.f_contiguous().map_err(Error::torch("contiguous"))?;
        self.wait_for(rank, at, self.gloo().recv(&dense, process, tag))?;
        tch::no_grad(|| tensor.f_copy_(&dense)).map(drop).map_err(Error::torch("copy_"))
    }
}

impl Couriers {
    fn give(&self, key: Way, job: Job) -> Result<()> {
        let mut couriers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let courier = match couriers.get(&key) {
            Some(courier) => courier,
            None => {
                let (jobs, received) = unbounded::<Job>();
                let thread = thread::Builder::new().name("courier".into());
                // It ends with the network.
                let work = move || received.into_iter().for_each(|job| job());
                thread.spawn(work).map_err(|error| {
                    Error::Unsupported(format!("a thread for messages cannot be started: {error}"))
                })?;
                couriers.entry(key).or_insert(jobs)
            }
        };
        let _ = courier.send(job); // it listens as long as this end lives
        Ok(())
    }
}

/// Kind and shape, cut to the length of a note.
fn describe(tensor: &Tensor) -> String {
    let mut text = format!("{} {:?}", kind_name(tensor.kind()), tensor.size());
    text.truncate(DESCRIPTION);
    text
}
