//! Messages between processes: tensors from a rank of this process to a rank of another, and back.
//!
//! They have connections of their own beside Gloo's. Gloo's distinguish only few senders and tags, end the process at a
//! tensor of unexpected length, and cannot receive from any source. Read [`link`] next.

mod frame;
mod guard;
mod keeper;
mod link;
mod open;
mod pending;
mod reader;
mod transfer;

use std::convert::Infallible;
use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use crossbeam::channel::{Receiver, Sender, bounded};
use tch::Tensor;

use super::super::arguments::Dense;
use super::super::threaded::{Mailboxes, PostedOp};
use super::super::{dtype_name, plain_kind};
use super::ProcessMap;
use crate::error::{Error, Result};
use crate::ffi::TcpStore;
use crate::operation::OpId;
use crate::os::limits::not_started;
use crate::runtime::RunContext;
use guard::Serving;
use link::{Link, Sent};
pub(super) use open::Door;
use pending::Pending;

/// Longest wait, when connections end, for queued data to be written and for the other process to read it.
const GRACE: Duration = Duration::from_secs(10);

/// The messages of a group between this process and others. Dropping it ends the connections once all messages have
/// gone, or at once if the run has failed. It does not wait for the receiving ranks.
pub(crate) struct Messages(Arc<Connections>);

/// The state that lives until the last message has gone. Dropping it ends the connections after all queued data is
/// written, or at once if the run has failed.
struct Connections {
    post: Arc<Post>,
    /// One per process; the one to this process is never used.
    links: Vec<Arc<Link>>,
    /// `None` once a thread accepts connections.
    listener: Mutex<Option<TcpListener>>,
    address: SocketAddr,
    /// Closes when all messages have gone, and no more can be sent.
    sent: Receiver<Infallible>,
    /// Closes when all queued data has been written.
    written: Receiver<Infallible>,
    /// Carries no value; it closes with these connections.
    ended: Receiver<Infallible>,
    _open: Sender<Infallible>,
}

/// A message to a rank of another process.
pub(crate) struct Letter<'a> {
    pub tensor: &'a Tensor,
    /// Group ranks of the sender and the receiver.
    pub source: usize,
    pub destination: usize,
    pub tag: u64,
    pub at: OpId,
}

/// The state that the threads of all connections share.
pub(super) struct Post {
    run: Arc<RunContext>,
    store: TcpStore,
    members: Arc<[usize]>,
    layout: ProcessMap,
    token: u64,
    /// The mailboxes in which the ranks of this process receive. They end with the group.
    mail: Weak<Mailboxes>,
    closing: AtomicBool,
    /// Held by every message that has not gone. `None` once no more can be sent.
    sending: Mutex<Option<Sender<Infallible>>>,
    /// Held by every thread that writes. `None` once the connections end.
    writing: Mutex<Option<Sender<Infallible>>>,
}

impl Post {
    fn first_rank(&self) -> usize {
        self.members[self.layout.here().start]
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    fn writing(&self) -> Option<Sender<Infallible>> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns a guard for a message that `rank` has sent.
    fn pending(&self, rank: usize) -> Pending {
        let sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Pending::new(&self.run, rank, sending)
    }

    /// Starts a thread, which `top -H` shows by name. If it panics, the rank that it serves then fails.
    fn thread(self: &Arc<Self>, work: impl FnOnce(&Serving) + Send + 'static) -> Result<()> {
        let post = self.clone();
        let work = move || guard::run(&post.run, post.first_rank(), work);
        let thread = thread::Builder::new().name("ddp-mp message".into()).spawn(work);
        thread
            .map(drop)
            .map_err(|error| Error::Unsupported(not_started("a thread for messages", &error)))
    }
}

impl Messages {
    /// Creates the messages for the ranks of `layout`, which are `members` of `run`. Ranks of this process receive from
    /// `mail`. Other processes connect through `door`, and publish their own address in `store`.
    pub(super) fn new(
        (run, store): (Arc<RunContext>, TcpStore),
        members: Arc<[usize]>,
        layout: ProcessMap,
        door: Door,
        mail: &Arc<Mailboxes>,
    ) -> Self {
        let [(sending, sent), (writing, written), (open, ended)] = [0; 3].map(bounded);
        let Door { listener, address, token } = door;
        let (mail, processes) = (Arc::downgrade(mail), layout.len());
        let [sending, writing] = [sending, writing].map(|it| Mutex::new(Some(it)));
        let closing = AtomicBool::default();
        let post = Post { run, store, members, layout, token, mail, closing, sending, writing };
        let post = Arc::new(post);
        let links = (0..processes).map(|process| Link::new(process, post.clone())).collect();
        let listener = Mutex::new(Some(listener));
        let connections =
            Connections { post, links, listener, address, sent, written, ended, _open: open };
        Self(Arc::new(connections))
    }

    /// Starts a send. Once it is [completed](PostedOp::is_completed), the receiver has accepted the tensor.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a dtype that is more than its bytes (a quantized one), and if no thread can be
    /// started.
    pub(crate) fn send(&self, letter: &Letter) -> Result<PostedOp> {
        let &Letter { tensor, source, destination, tag, at } = letter;
        let Connections { post, links, .. } = &*self.0;
        let link = &links[post.layout.process_of(destination)];
        let name = dtype_name(tensor.kind());
        if plain_kind(name).is_none() {
            return Err(Error::Unsupported(format!(
                "{}: rank {} cannot send a {name} tensor to rank {} in another process; send its int_repr, scale and zero \
                 point, or convert it to a float kind",
                at.operation, post.members[source], post.members[destination]
            )));
        }
        let (posted, delivery) = PostedOp::new();
        delivery.carried_by(link.clone());
        let tensor = Dense::new(at.operation, tensor)?.handle();
        let rank = post.members[source];
        link.send(Sent { tensor, source, destination, rank, at, delivery, pending: None }, tag);
        // If the link cannot start, nothing else would end this send.
        let started = self.0.listen().and_then(|()| link.start());
        started.inspect_err(|error| link.close(&error.to_string()))?;
        Ok(posted)
    }

    /// Accepts messages for a posted receive: from the group rank `source`, or from any rank if `None`. If the process
    /// of `source` has gone without sending, the receive ends.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if no thread can be started.
    pub(crate) fn expect(&self, source: Option<usize>) -> Result<()> {
        let Connections { post, links, .. } = &*self.0;
        self.0.listen()?;
        let Some(source) = source else { return Ok(()) };
        let link = &links[post.layout.process_of(source)];
        link.start()?;
        link.fail_receives();
        Ok(())
    }
}

impl Connections {
    fn listen(&self) -> Result<()> {
        let mut listener = self.listener.lock().unwrap_or_else(PoisonError::into_inner);
        if listener.is_none() {
            return Ok(());
        }
        let of_links = || (self.post.clone(), self.links.clone());
        let ((post, links), ended) = (of_links(), self.ended.clone());
        self.post.thread(move |_| keeper::run(&post, &links, &ended))?;
        let Some(listener) = listener.take() else { return Ok(()) };
        let (post, links) = of_links();
        self.post.thread(move |_| open::accept(&post, &links, &listener))
    }
}

impl fmt::Debug for Messages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Messages").field("address", &self.0.address).finish_non_exhaustive()
    }
}

impl Drop for Messages {
    fn drop(&mut self) {
        let Connections { post, links, .. } = &*self.0;
        drop(post.sending.lock().unwrap_or_else(PoisonError::into_inner).take());
        let mut senders: Vec<usize> = links.iter().flat_map(|link| link.senders()).collect();
        senders.sort_unstable();
        senders.dedup();
        if senders.is_empty() || post.run.cancel.cancelled_by().is_some() {
            return;
        }
        // The receiver may first need this rank for something else, so a separate thread waits for it. The senders end
        // after that thread, because the process may end with them.
        let pending: Vec<Pending> =
            senders.into_iter().map(|rank| Pending::new(&post.run, rank, None)).collect();
        let (connections, cancelled) = (self.0.clone(), post.run.cancel.tripped().clone());
        let stay = move |_: &Serving| {
            crossbeam::channel::select_biased! {
                recv(connections.sent) -> _ => {}
                recv(cancelled) -> _ => {}
            }
            drop(connections);
            drop(pending);
        };
        if let Err(error) = post.thread(stay) {
            post.run.report(post.first_rank(), Some(&error), error.to_string());
        }
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        self.post.closing.store(true, Ordering::Release);
        if self.listener.lock().unwrap_or_else(PoisonError::into_inner).is_none() {
            open::knock(self.address);
        }
        let cancelled = self.post.run.cancel.tripped();
        for link in &self.links {
            link.finish();
        }
        drop(self.post.writing.lock().unwrap_or_else(PoisonError::into_inner).take());
        crossbeam::channel::select_biased! {
            recv(self.written) -> _ => {}
            recv(cancelled) -> _ => {}
            default(GRACE) => {}
        }
    }
}
