//! The rendezvous of the processes of each host. A process tries to connect to all others through Unix sockets, which reach
//! those of its host. It passes its memory on. A process proves that it shares the host by the number that the others read
//! in its memory.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{APART, HostLinks, OFF, Peer};
use crate::error::{Error, Result, escaped_line};
use crate::ffi::TcpStore;
use crate::ffi::store::Gathered;
use crate::os::affinity::CpuList;
use crate::os::limits::require_files;
use crate::os::shared_memory::{self, SharedRegion};
use crate::process_group::{Host, ProcessMap};
use crate::runtime::{Deadline, Instant};

/// What a process offers the others.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Offer {
    /// The name of its socket, in the system's list of names without files.
    socket: String,
    /// A number that another process must send: it has read the store.
    token: u64,
    /// The number that stands in its memory.
    mark: u64,
    /// The CPUs that it may use.
    cpus: String,
}

/// What a process has found out; an error is text for the user.
type Finding<T> = std::result::Result<T, String>;

/// The listener of this process, its memory, and its offer.
struct Own {
    region: SharedRegion,
    listener: UnixListener,
    offer: Offer,
}

/// The longest wait for the answer of a process that is about to send it.
const ANSWER: Duration = Duration::from_secs(10);

/// The size of a greeting: a token, and the index of the process that greets.
const GREETING: usize = 16;

impl HostLinks {
    /// Connects this process of `map` with the others of its host. All processes of `store` must call this. `wants` is
    /// whether this one may share memory; `has_agent`, whether torchrun's agent supervises it. If one cannot share memory, or
    /// none shares a host with another, returns the reason, the same in all.
    ///
    /// Processes of one host share memory if they are neighbours in rank order.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Input`] for a message that no process of the run sends.
    pub(in crate::launch) fn meet(
        store: &TcpStore,
        map: &ProcessMap,
        wants: bool,
        has_agent: bool,
        timeout: Duration,
    ) -> Result<Finding<Self>> {
        let (ranks, mine) = (&map.processes, map.mine);
        let meeting = Meeting { store, mine, count: map.len(), timeout };
        let own = if wants { Own::open() } else { Err(OFF.into()) };
        let (own, offers) = match meeting.exchange("offer", own, |own| own.offer.clone())? {
            Ok(exchanged) => exchanged,
            Err(why) => return Ok(Err(why)),
        };
        // Connecting does not wait for the other process: it accepts once all have connected.
        let connected = own.connect_to(&offers[..mine], mine);
        let indexes = |it: &BTreeMap<usize, _>| it.keys().copied().collect::<Vec<usize>>();
        let (mut connected, reached) = match meeting.exchange("connected", connected, indexes)? {
            Ok(exchanged) => exchanged,
            Err(why) => return Ok(Err(why)),
        };
        let hosts = hosts(&reached);
        if hosts.len() == meeting.count {
            return Ok(Err(format!("each is alone on its machine, or {APART}")));
        }
        let here = hosts.iter().find(|it| it.contains(&mine)).cloned().unwrap_or_default();
        connected.retain(|process, _| here.contains(process));
        let linked = own.link(connected, &offers, mine, here.clone());
        let linked = match meeting.exchange("linked", linked, |_| ())? {
            Ok((linked, _)) => linked,
            Err(why) => return Ok(Err(why)),
        };
        let cpus = offers[here.clone()].iter();
        let cpus = cpus.flat_map(|it| it.cpus.parse::<CpuList>().unwrap_or_default().0);
        let cores = CpuList::new(cpus).0.len().max(1);
        let mut peers = Vec::new();
        let mut regions = Vec::new();
        for (process, link) in linked.into_iter().enumerate() {
            let Some((socket, file, region)) = link else { continue };
            let (ranks, is_cut_off) = (ranks[process].clone(), AtomicBool::default());
            peers.push(Arc::new(Peer { ranks, socket, process: file, is_cut_off }));
            regions.push(region);
        }
        let index = mine - here.start;
        regions.insert(index, own.region);
        let of_host = |host: &Range<usize>| ranks[host.start].start..ranks[host.end - 1].end;
        let hosts = hosts.iter().map(of_host).collect();
        let memory = Host::new(regions.into(), &ranks[here], index, cores, hosts);
        Ok(Ok(Self { memory: Arc::new(memory), peers, has_agent, watch: Mutex::default() }))
    }
}

/// The exchanges of a rendezvous in the store.
struct Meeting<'a> {
    store: &'a TcpStore,
    mine: usize,
    count: usize,
    timeout: Duration,
}

impl Meeting<'_> {
    /// Publishes a part of what this process has found. Returns the finding, and the parts of all. If one has found an
    /// error, returns the first, with the number of its process.
    fn exchange<F, T>(
        &self,
        what: &str,
        finding: Finding<F>,
        part: impl FnOnce(&F) -> T,
    ) -> Result<Finding<(F, Vec<T>)>>
    where
        T: Serialize + DeserializeOwned,
    {
        let Self { store, mine, count, timeout } = *self;
        let hangs = |missing: Vec<usize>| {
            Error::mismatch(format!(
                "process {} has met the others, but has not answered for {timeout:?} since: it hangs, or has ended; \
                 look at its output",
                missing[0]
            ))
        };
        let key = format!("host/{what}");
        let own = finding.as_ref().map(part).map_err(String::clone);
        let parts = Gathered::of(store, &key, [mine, count], &own, timeout, hangs, Gathered::All)?;
        let named = |(process, part): (usize, Finding<T>)| {
            part.map_err(|why| format!("process {process}: {}", escaped_line(&why)))
        };
        let parts: Finding<Vec<T>> = parts.into_iter().enumerate().map(named).collect();
        Ok(parts.and_then(|parts| Ok((finding?, parts))))
    }
}

/// Returns the processes of each host, given those before it that each process has reached.
fn hosts(reached: &[Vec<usize>]) -> Vec<Range<usize>> {
    let mut hosts: Vec<Range<usize>> = Vec::new();
    for (process, reached) in reached.iter().enumerate() {
        match hosts.last_mut() {
            Some(host) if host.clone().all(|other| reached.contains(&other)) => {
                host.end = process + 1;
            }
            _ => hosts.push(process..process + 1),
        }
    }
    hosts
}

impl Own {
    /// Creates this process's memory and its listener.
    fn open() -> Finding<Self> {
        let open = || -> io::Result<Self> {
            let random = || getrandom::u64().map_err(|error| io::Error::other(error.to_string()));
            let region = SharedRegion::create()?;
            let offer = Offer {
                socket: format!("ddp-mp-{:016x}{:016x}", random()?, random()?),
                token: random()?,
                mark: random()?,
                cpus: CpuList::of_this_thread()?.to_string(),
            };
            region.mark().store(offer.mark, Ordering::Relaxed);
            let listener = UnixListener::bind_addr(&address(&offer.socket)?)?;
            listener.set_nonblocking(true)?;
            Ok(Self { region, listener, offer })
        };
        open().map_err(|error| error.to_string())
    }

    /// Connects to those of the processes of `offers` that this one reaches, and sends them its memory. Returns the
    /// connections by the indexes of the processes.
    fn connect_to(&self, offers: &[Offer], mine: usize) -> Finding<BTreeMap<usize, Connected>> {
        let mut connected = BTreeMap::new();
        for (process, offer) in offers.iter().enumerate() {
            let socket = match shared_memory::connect(&offer.socket) {
                Ok(socket) => socket,
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => continue, // another host
                Err(error) => return Err(error.to_string()),
            };
            // The memory goes to processes of this user only, and another user may have taken the name of the socket.
            let sent = shared_memory::peer(&socket).and_then(|peer| {
                self.region.send(&socket, &greeting(offer.token, mine))?;
                Ok(peer)
            });
            let name = |error| format!("at the socket of process {process}, {error}");
            connected.insert(process, (socket, sent.map_err(name)?));
        }
        Ok(connected)
    }

    /// Completes the connections: accepts those of the processes of this host, `here`, that come after `mine`, and answers
    /// them. `connected` are those to the processes before. All processes have connected.
    fn link(
        &self,
        connected: BTreeMap<usize, Connected>,
        offers: &[Offer],
        mine: usize,
        here: Range<usize>,
    ) -> Finding<Vec<Option<Linked>>> {
        require_files(8 + 4 * here.len(), "the memory that processes share")
            .map_err(|error| error.to_string())?;
        let began = Instant::now();
        let mut links: Vec<Option<Linked>> = offers.iter().map(|_| None).collect();
        let after = mine + 1..here.end;
        while links[after.clone()].iter().any(Option::is_none) {
            let accepted = self.listener.accept();
            let (socket, _) = accepted.map_err(|error| match error.kind() {
                ErrorKind::WouldBlock => "a connection is missing".into(),
                _ => error.to_string(),
            })?;
            if began.elapsed() >= ANSWER {
                return Err("other programs connect to the socket too often; end them".into());
            }
            if let Some((process, linked)) = self.answer(socket, mine, &after)? {
                links[process] = Some(linked);
            }
        }
        for (process, connection) in connected {
            links[process] = Some(await_answer(connection, offers[process].token)?);
        }
        for (link, offer) in links.iter().zip(offers) {
            if link.as_ref().is_some_and(|(.., it)| it.mark().load(Ordering::Relaxed) != offer.mark)
            {
                return Err("the memory that arrived does not belong to the other process".into());
            }
        }
        Ok(links)
    }

    /// Answers a program that has connected, if it is one of the processes `after` this one. Returns its index and what
    /// links it; `None` for a program of another user, or one that has sent something else, or nothing.
    fn answer(
        &self,
        socket: UnixStream,
        mine: usize,
        after: &Range<usize>,
    ) -> Finding<Option<(usize, Linked)>> {
        let Ok(peer) = shared_memory::peer(&socket) else { return Ok(None) };
        // A process of the run has greeted before.
        let greeted = socket.set_nonblocking(true);
        let greeted = greeted.and_then(|()| receive(&socket, self.offer.token)).ok();
        let Some((process, file)) = greeted.filter(|(process, _)| after.contains(process)) else {
            return Ok(None);
        };
        let region = SharedRegion::open(file).map_err(|error| error.to_string())?;
        let answer = greeting(self.offer.token, mine);
        self.region.send(&socket, &answer).map_err(|error| error.to_string())?;
        Ok(Some((process, (socket, peer, region))))
    }
}

/// Waits for the answer of a process to which this one has connected. `token` is that of its offer.
fn await_answer((socket, peer): Connected, token: u64) -> Finding<Linked> {
    let deadline = Deadline::after(ANSWER);
    let answered = loop {
        let answered = socket.set_read_timeout(Some(ANSWER));
        match answered.and_then(|()| receive(&socket, token)) {
            Err(error) if error.kind() == ErrorKind::WouldBlock && !deadline.is_over() => {}
            answered => break answered,
        }
    };
    let region = answered.and_then(|(_, file)| SharedRegion::open(file));
    Ok((socket, peer, region.map_err(|error| error.to_string())?))
}

/// Returns the message of process `mine` that goes with its memory, with a token that both processes know.
fn greeting(token: u64, mine: usize) -> Vec<u8> {
    [token, mine as u64].map(u64::to_le_bytes).concat()
}

/// Receives a [`greeting`] with `token`. Returns the index of the process that has sent it, and its memory.
fn receive(socket: &UnixStream, token: u64) -> io::Result<(usize, OwnedFd)> {
    let mut greeting = [0; GREETING];
    let has_token = |it: &[u8]| it[..8] == token.to_le_bytes();
    let file = SharedRegion::receive(socket, &mut greeting, has_token)?;
    let (_, process) = greeting.split_at(8);
    let process = process.try_into().map(u64::from_le_bytes).ok();
    Ok((process.and_then(|it| it.try_into().ok()).unwrap_or(usize::MAX), file))
}

/// A connection to another process of this user, and that process.
type Connected = (UnixStream, Option<OwnedFd>);

/// Such a connection, with the memory of the other process.
type Linked = (UnixStream, Option<OwnedFd>, SharedRegion);

/// Returns the address of a socket that has no file.
fn address(name: &str) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(name)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::thread;

    use rustix::process::Uid;
    use rustix::thread::set_thread_res_uid;
    use tch::{Device, Kind};

    use super::*;
    use crate::ffi::store::from_json;

    const TIMEOUT: Duration = Duration::from_secs(60);

    /// Lets as many processes meet as `wants` has elements. `between` is called when the first has made its offer.
    fn meet(wants: &[bool], between: impl FnOnce(&TcpStore)) -> Vec<Finding<HostLinks>> {
        let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT).unwrap();
        let processes: Vec<Range<usize>> =
            (0..wants.len()).map(|process| process..process + 1).collect();
        thread::scope(|scope| {
            let start = |mine: usize| {
                let (store, map) = (&store, ProcessMap { processes: processes.clone(), mine });
                scope.spawn(move || {
                    HostLinks::meet(store, &map, wants[mine], false, TIMEOUT).unwrap()
                })
            };
            let first = start(0);
            store.get("host/offer/0", TIMEOUT).unwrap();
            between(&store);
            let others: Vec<_> = (1..wants.len()).map(start).collect();
            let all = std::iter::once(first).chain(others);
            all.map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn processes_share_memory_despite_strangers_on_the_socket() {
        let mut strangers = Vec::new();
        let links = meet(&[true; 3], |store| {
            let offer = offer_of(store, 0);
            for message in [&b""[..], b"GET / HTTP/1.0\r\n\r\n", &[0; GREETING]] {
                let mut stranger =
                    UnixStream::connect_addr(&address(&offer.socket).unwrap()).unwrap();
                stranger.write_all(message).unwrap();
                strangers.push(stranger);
            }
        });
        let links: Vec<HostLinks> = links.into_iter().map(Result::unwrap).collect();
        assert!(links.iter().all(|links| links.peers.len() == 2 && links.memory.host_of(2) == 0));
        let zeros = links[1].memory.zeros(1000, Kind::Float).unwrap();
        assert_eq!((zeros.numel(), zeros.kind(), zeros.device()), (1000, Kind::Float, Device::Cpu));
        assert_eq!(zeros.abs().sum(Kind::Float).double_value(&[]), 0.0);
    }

    /// Runs `f` on a thread of another user. Returns `None` if this user may not become that one: only root may.
    fn as_another_user<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let nobody = Uid::from_raw(65534);
        let work = move || set_thread_res_uid(None, nobody, nobody).ok().map(|()| f());
        thread::scope(|scope| scope.spawn(work).join().unwrap())
    }

    /// Returns an offer of the other processes of the run, as anyone reads it in the store.
    fn offer_of(store: &TcpStore, process: usize) -> Offer {
        let offer = store.get(&format!("host/offer/{process}"), TIMEOUT).unwrap().unwrap();
        from_json::<Finding<Offer>>("offer", &offer).unwrap().unwrap()
    }

    #[test]
    fn another_user_who_takes_the_name_of_a_socket_gets_no_memory() {
        // Anyone reads the name in the store. It is free on each host but the one of the process that has offered it.
        let name = format!("ddp-mp-test-{}", std::process::id());
        let offer = Offer { socket: name.clone(), ..Offer::default() };
        let listen = move || UnixListener::bind_addr(&address(&name).unwrap()).unwrap();
        let Some(thief) = as_another_user(listen) else { return };
        let own = Own::open().unwrap();
        let why = own.connect_to(std::slice::from_ref(&offer), 1).map(drop).unwrap_err();
        assert_eq!(why, "at the socket of process 0, a process of user 65534 listens");
        let mut received = Vec::new();
        thief.accept().unwrap().0.read_to_end(&mut received).unwrap();
        assert_eq!(received, b"", "a greeting, and the memory with it");
    }

    #[test]
    fn memory_of_another_user_is_not_accepted() {
        let mut strangers = None;
        let links = meet(&[true; 2], |store| {
            let Offer { socket, token, .. } = offer_of(store, 0);
            strangers = as_another_user(move || {
                let stranger = shared_memory::connect(&socket).unwrap();
                let region = SharedRegion::create().unwrap();
                region.send(&stranger, &greeting(token, 1)).unwrap();
                stranger
            });
        });
        assert!(links.iter().all(Result::is_ok), "{links:?}");
    }

    #[test]
    fn neighbours_that_reach_each_other_are_a_host() {
        let hosts =
            |reached: &[&[usize]]| hosts(&reached.iter().map(|it| it.to_vec()).collect::<Vec<_>>());
        assert_eq!(hosts(&[&[], &[0], &[0, 1], &[]]), [0..3, 3..4]);
        assert_eq!(hosts(&[&[], &[0], &[], &[2], &[2, 3]]), [0..2, 2..5]);
        assert_eq!(hosts(&[&[], &[], &[1]]), [0..1, 1..3]);
        // Alternating between two hosts, as `srun --distribution=cyclic` places them.
        assert_eq!(hosts(&[&[], &[], &[0], &[1]]), [0..1, 1..2, 2..3, 3..4]);
        // One reaches only a part of its host.
        assert_eq!(hosts(&[&[], &[0], &[1]]), [0..2, 2..3]);
    }

    #[test]
    fn one_process_without_shared_memory_is_named_by_all() {
        for why in meet(&[true, false, true], |_| {}) {
            let why = why.expect_err("one does not take part");
            assert!(why.contains("--shared-memory=off"), "{why}");
        }
    }
}
