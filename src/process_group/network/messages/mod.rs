//! Messages between processes: tensors from a rank of this process to a rank of another, and back.
//!
//! They have connections of their own beside Gloo's. Gloo's distinguish only few senders and tags, end the process at a
//! tensor of unexpected length, and cannot receive from any source. Read [`link`] next.

mod context;
mod frame;
mod link;
mod open;
mod reader;

use std::convert::Infallible;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam::channel::{Receiver, Sender, bounded, select_biased};
use parking_lot::Mutex;
use tch::Tensor;

use super::process_map::ProcessMap;
use crate::error::{Error, Result};
use crate::ffi::TcpStore;
use crate::operation::OpId;
use crate::process_group::contiguous::Contiguous;
use crate::process_group::dtype::{dtype_name, plain_kind};
use crate::process_group::local::{Completion, Mailboxes};
use crate::runtime::RunContext;
use context::{MessageContext, Pending, Serving};
use link::{Link, Sent};
pub(super) use open::MessageListener;
use reader::{CLOSE_TIMEOUT, STOP_POLL_INTERVAL};

/// The messages of a group between this process and others. Dropping it ends the connections once all messages have
/// gone, or at once if the run has failed. It does not wait for the receiving ranks.
pub(crate) struct Messages(Arc<Connections>);

/// The state that lives until the last message has gone. Dropping it ends the connections after all queued data is
/// written, or at once if the run has failed.
struct Connections {
    context: Arc<MessageContext>,
    /// One per process; the one to this process is never used.
    links: Vec<Arc<Link>>,
    listener: Arc<TcpListener>,
    /// Whether a thread accepts connections.
    accepts: Mutex<bool>,
    /// Closes when all messages have gone, and no more can be sent.
    sent: Receiver<Infallible>,
    /// Closes when all queued data has been written.
    written: Receiver<Infallible>,
    /// Carries no value; it closes with these connections.
    ended: Receiver<Infallible>,
    _open: Sender<Infallible>,
}

impl Messages {
    /// Creates the messages for the ranks of `process_map`, which are `members` of `run`. Ranks of this process receive from
    /// `mail`. Other processes connect through `listener`, and publish their own address in `store`.
    pub(super) fn new(
        run: Arc<RunContext>,
        store: TcpStore,
        members: Arc<[usize]>,
        process_map: ProcessMap,
        listener: MessageListener,
        mail: &Arc<Mailboxes>,
    ) -> Self {
        let (sending_tx, sent_rx) = bounded(0);
        let (writing_tx, written_rx) = bounded(0);
        let (open_tx, ended_rx) = bounded(0);
        let MessageListener { listener, token } = listener;
        let processes = process_map.len();
        let context = Arc::new(MessageContext {
            run,
            store,
            members,
            process_map,
            token,
            mail: Arc::downgrade(mail),
            closing: AtomicBool::default(),
            sending: Mutex::new(Some(sending_tx)),
            writing: Mutex::new(Some(writing_tx)),
        });
        let connections = Connections {
            links: (0..processes).map(|process| Link::new(process, context.clone())).collect(),
            context,
            listener: Arc::new(listener),
            accepts: Mutex::new(false),
            sent: sent_rx,
            written: written_rx,
            ended: ended_rx,
            _open: open_tx,
        };
        Self(Arc::new(connections))
    }

    /// Starts a send of `tensor` from the group rank `source` to the group rank `destination` of another process. Once it
    /// is [completed](Completion::is_completed), the receiver has accepted the tensor.
    ///
    /// # Errors
    /// [`Error::Input`] for a dtype that is more than its bytes (a quantized one), and if no thread can be
    /// started.
    pub(crate) fn send(
        &self,
        tensor: &Tensor,
        source: usize,
        destination: usize,
        tag: u64,
        at: OpId,
    ) -> Result<Arc<Completion>> {
        let Connections { context, links, .. } = &*self.0;
        let link = &links[context.process_map.process_of(destination)];
        let name = dtype_name(tensor.kind());
        if plain_kind(name).is_none() {
            return Err(Error::unsupported(format!(
                "{}: rank {} cannot send a {name} tensor to rank {} in another process; send its int_repr, scale and \
                 zero point, or convert it to a float dtype",
                at.operation, context.members[source], context.members[destination]
            )));
        }
        let posted = Completion::new();
        posted.carried_by(link.clone());
        let tensor = Contiguous::new(at.operation, tensor)?.handle();
        let rank = context.members[source];
        let message = Sent {
            tensor,
            source,
            destination,
            rank,
            at,
            delivery: posted.clone(),
            pending: None,
            is_writing: false,
            outcome: None,
        };
        link.send(message, tag);
        // If the link cannot start, nothing else would end this send.
        let started = self.0.listen().and_then(|()| open::start(link));
        started.inspect_err(|error| link.close(&error.to_string()))?;
        Ok(posted)
    }

    /// Accepts messages for a posted receive: from the group rank `source`, or from any rank if `None`. If the process
    /// of `source` has gone without sending, the receive ends.
    ///
    /// # Errors
    /// [`Error::Input`] if no thread can be started.
    pub(crate) fn expect(&self, source: Option<usize>) -> Result<()> {
        let Connections { context, links, .. } = &*self.0;
        self.0.listen()?;
        let Some(source) = source else { return Ok(()) };
        let link = &links[context.process_map.process_of(source)];
        open::start(link)?;
        link.fail_receives();
        Ok(())
    }
}

impl Connections {
    fn listen(&self) -> Result<()> {
        let mut accepts = self.accepts.lock();
        if *accepts {
            return Ok(());
        }
        let context = self.context.clone();
        let links = self.links.clone();
        let ended = self.ended.clone();
        self.context.thread(move |_| watch(&context, &links, &ended))?;
        *accepts = true;
        let context = self.context.clone();
        let links = self.links.clone();
        let listener = self.listener.clone();
        self.context.thread(move |_| open::accept(&context, &links, &listener))
    }
}

impl Drop for Messages {
    fn drop(&mut self) {
        let Connections { context, links, .. } = &*self.0;
        drop(context.sending.lock().take());
        let mut senders: Vec<usize> = links.iter().flat_map(|link| link.senders()).collect();
        senders.sort_unstable();
        senders.dedup();
        if senders.is_empty() || context.run.cancel.cancelled_by().is_some() {
            return;
        }
        // The receiver may first need this rank for something else, so a separate thread waits for it. The senders end
        // after that thread, because the process may end with them.
        let pending: Vec<Pending> =
            senders.into_iter().map(|rank| Pending::new(&context.run, rank, None)).collect();
        let (connections, cancelled) = (self.0.clone(), context.run.cancel.tripped().clone());
        let stay = move |_: &Serving| {
            select_biased! {
                recv(connections.sent) -> _ => {}
                recv(cancelled) -> _ => {}
            }
            drop(connections);
            drop(pending);
        };
        if let Err(error) = context.thread(stay) {
            context.run.report(context.first_rank(), Some(&error), error.to_string());
        }
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        self.context.closing.store(true, Ordering::Release);
        // Wakes the thread that accepts connections, without one: there may be no file left to open.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        let cancelled = self.context.run.cancel.tripped();
        for link in &self.links {
            link.finish();
        }
        drop(self.context.writing.lock().take());
        select_biased! {
            recv(self.written) -> _ => {}
            recv(cancelled) -> _ => {}
            default(CLOSE_TIMEOUT) => {}
        }
    }
}

/// Watches `links` while other threads serve them, until `ended` closes or the run fails. If the run fails, ends every
/// link and all of its messages. Fails the run if a rank cannot end.
fn watch(context: &MessageContext, links: &[Arc<Link>], ended: &Receiver<Infallible>) {
    loop {
        select_biased! {
            recv(context.run.cancel.tripped()) -> _ => {
                return links.iter().for_each(|link| link.close("cancelled, because the run ends"));
            }
            recv(ended) -> _ => return,
            default(STOP_POLL_INTERVAL) => links.iter().for_each(|link| link.check_deadlines()),
        }
    }
}

#[cfg(test)]
mod tests;
