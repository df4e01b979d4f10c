//! The connection between the processes of a group. The first rank of each process makes one exchange at a time. Processes
//! of one host that share memory count as one process here.
//!
//! Each exchange begins with headers of a fixed size: the call, and the size of each part. Gloo itself compares
//! nothing, and a message of unexpected length would end the process. Small parts travel inside the header.

use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crossbeam::channel::{Receiver, select_biased};
use tch::Tensor;
use zerocopy::little_endian::U64;

use super::common::{Buffers, Common, Room};
use super::header::{
    ExchangeHeader, HEADER_BYTES, HEADER_FIXED_BYTES, HEADER_INT_BYTES, HEADER_MAX_DATA_BYTES,
    StagingBuffers, WireLosses,
};
use super::lost;
use super::messages::{MessageListener, Messages};
use super::process_map::ProcessMap;
use super::split_sizes::{SplitSizes, padded};
use crate::error::{Error, Result};
use crate::ffi::{GlooCall, GlooGroup, TcpStore, TorchResult};
use crate::operation::Operation;
use crate::process_group::call::Call;
use crate::process_group::dtype::num_bytes;
use crate::process_group::local::{self, Host, HostGroup, InMemory, Mailboxes};
use crate::runtime::{Deadline, LossRecord, RunContext, StopRequest, format_call_site};

/// More than this many bytes may not fit into a socket. Gloo's all_to_all begins to send before it asks for what it
/// receives. Its request waits behind such a part, and the parts of two processes cross one after the other. With more
/// processes it is used all the same, because it ends at once if any of them is lost.
const SOCKET_BYTES: usize = 64 << 10;

/// The state of a group of several processes that the ranks of one process share.
pub(crate) struct Network {
    /// The connection to the other processes of `map`. `None` if there are none, or if another process of this host has it.
    gloo: Option<GlooGroup>,
    /// The group's ranks on this host, if they are in several processes that share memory.
    on_host: Option<Arc<HostGroup>>,
    /// The store that the processes share, under the group's prefix.
    pub(crate) store: TcpStore,
    run: Arc<RunContext>,
    members: Arc<[usize]>,
    /// The processes that exchange tensors. If processes share memory, those of a host count as one.
    pub(crate) map: ProcessMap,
    /// All processes.
    pub(crate) processes: ProcessMap,
    /// `GLOO_SOCKET_IFNAME`.
    interfaces: Option<String>,
    /// Rank 0's decision to stop, which every header carries.
    stop: Arc<OnceLock<Arc<StopRequest>>>,
    /// The memory of this host's processes, if they share it.
    host: Option<Arc<Host>>,
    common: Common,
    pub(super) staging: StagingBuffers,
    /// The listener to which other processes connect for messages. `None` once `messages` has it, or without messages.
    listener: Option<MessageListener>,
    /// The messages between the processes. `None` if something else carries them.
    pub(crate) messages: Option<Messages>,
}

impl Network {
    /// Connects `processes`, whose ranks are `members` of `run`. All of them must call this, with an unused prefix of
    /// `store`. Returns when all are connected.
    ///
    /// # Errors
    /// [`Error::Timeout`] that names the first ranks of the missing processes, and the errors of [`GlooGroup::new`].
    pub(crate) fn connect(
        store: TcpStore,
        run: Arc<RunContext>,
        members: Arc<[usize]>,
        processes: ProcessMap,
        interfaces: Option<&str>,
        host: Option<&Arc<Host>>,
    ) -> Result<Self> {
        let timeout = run.timeout;
        // Before the rendezvous, so that no process has to wait for it afterwards.
        let listener = Some(MessageListener::open(&store, processes.mine, interfaces)?);
        let stop = Arc::<OnceLock<_>>::default();
        let joined = match host {
            Some(host) => HostGroup::join(host, &store, &run, &members, &processes, stop.clone())?,
            None => None,
        };
        let (map, on_host) = joined.unwrap_or_else(|| (processes.clone(), None));
        let on_host = on_host.map(Arc::new);
        let first = |process: &usize| members[map.processes[*process].start];
        let absent = |missing: Vec<usize>| {
            let ranks = missing.iter().map(first).collect();
            run.timeout_error(first(&map.mine), ranks)
        };
        let exchanges = map.len() > 1 && on_host.as_ref().is_none_or(|group| group.has_first());
        let connect = || GlooGroup::new(&store, map.mine, map.len(), timeout, interfaces, absent);
        let gloo = exchanges.then(connect).transpose()?;
        let common = Common::new(on_host.as_deref())?;
        let staging = StagingBuffers::new(map.len())?;
        let interfaces = interfaces.map(String::from);
        Ok(Self {
            gloo,
            on_host,
            host: host.cloned(),
            store,
            run,
            members,
            map,
            processes,
            interfaces,
            stop,
            common,
            staging,
            listener,
            messages: None,
        })
    }

    /// Returns this network with messages from other processes, which go to `mail`.
    ///
    /// # Errors
    /// [`Error::Input`] if it already has messages.
    pub(crate) fn with_messages_to(mut self, mail: &Arc<Mailboxes>) -> Result<Self> {
        let taken = || Error::unsupported("this network already carries messages".into());
        let listener = self.listener.take().ok_or_else(taken)?;
        let messages = Messages::new(
            self.run.clone(),
            self.store.clone(),
            self.members.clone(),
            self.processes.clone(),
            listener,
            mail,
        );
        self.messages = Some(messages);
        Ok(self)
    }

    /// Returns this network without messages, if something else carries them. No process can connect for messages.
    pub(crate) fn without_messages(self) -> Self {
        Self { listener: None, ..self }
    }

    /// Connects the processes that have any of `ranks` as a sub-group. `ranks` are ascending group ranks.
    pub(crate) fn subgroup(
        &self,
        ranks: &[usize],
        name: &str,
        members: Arc<[usize]>,
    ) -> Result<Self> {
        let members_in = |of_process: &Range<usize>| {
            ranks.partition_point(|&rank| rank < of_process.start)
                ..ranks.partition_point(|&rank| rank < of_process.end)
        };
        let parts = self.processes.processes.iter().map(members_in).enumerate();
        let there: Vec<(usize, Range<usize>)> =
            parts.filter(|(_, part)| !part.is_empty()).collect();
        let is_mine = |(process, _): &(usize, _)| *process == self.processes.mine;
        let mine = there.iter().position(is_mine).unwrap_or(0);
        let map = ProcessMap { processes: there.into_iter().map(|(_, part)| part).collect(), mine };
        let (store, run) = (self.store.under(name), self.run.clone());
        Self::connect(store, run, members, map, self.interfaces.as_deref(), self.host.as_ref())
    }

    /// Returns the group's ranks on this host, if they are in several processes that share memory.
    pub(crate) fn on_host(&self) -> Option<&Arc<HostGroup>> {
        self.on_host.as_ref()
    }

    /// Synchronizes `stop` with that of the first process in every exchange from now on.
    pub(crate) fn share_stop(&self, stop: &Arc<StopRequest>) {
        self.stop.get_or_init(|| stop.clone());
    }

    /// Returns whether the processes exchange requests to stop.
    pub(crate) fn shares_stop(&self) -> bool {
        self.stop.get().is_some()
    }

    /// Exchanges the state of [`StopRequest`] between processes when no collective of this backend does. The process's
    /// first rank calls this; all processes must call it, with the same number.
    pub(crate) fn exchange_stop(&self, sequence: u64) -> Result<()> {
        let call = Call { sequence, ..Call::bare(Operation::Synchronize) };
        self.compare(&call, || call.operation.to_string())
    }

    /// Compares the processes' calls when no collective of this backend does. Called by the process's first rank.
    ///
    /// # Errors
    /// The errors of [`Network::exchange`].
    pub(crate) fn compare(&self, call: &Call, describe: impl Fn() -> String) -> Result<()> {
        let no_payload = SplitSizes::of(&Call::bare(Operation::Barrier), 0, &self.map);
        self.exchange(call, &no_payload, describe)
    }

    /// Makes `room` in the buffers. Called by the process's first rank, before the others' barrier.
    pub(crate) fn reserve(&self, room: Room) -> Result<()> {
        let on_host = self.on_host.as_deref();
        self.staging.reserve(room, on_host.map(HostGroup::host))?;
        match on_host {
            Some(group) => self.common.set_buffers(group, self.staging.parts()),
            None => Ok(()),
        }
    }

    /// Returns where the buffers begin, which have this `room`. They stay there until the next call of
    /// [`Network::reserve`].
    ///
    /// # Errors
    /// [`Error::Input`] if another process of the host has written invalid offsets.
    pub(crate) fn buffers(&self, room: Room) -> Result<Buffers> {
        match &self.on_host {
            Some(group) if !group.has_first() => self.common.buffers(group, room),
            _ => {
                let [send, receive] = self.staging.parts().each_ref().map(Tensor::data_ptr);
                Ok(Buffers { send: send.cast(), receive: receive.cast() })
            }
        }
    }

    /// Takes over what the first rank of the host has received besides tensors: rank 0's decision to stop. Ranks of other
    /// processes of the host call it after an exchange, before they leave the call.
    ///
    /// # Errors
    /// [`Error::Input`] if another process of the host has written something else.
    pub(crate) fn take_over(&self) -> Result<()> {
        let other = self.on_host.as_ref().is_some_and(|group| !group.has_first());
        if let Some(stop) = self.stop.get().filter(|_| other) {
            stop.merge(true, self.common.stop()?);
        }
        Ok(())
    }

    /// Exchanges the parts in the send buffer, in the layout of [`SplitSizes::offsets`]. Returns when all parts have
    /// arrived. Called by the process's first rank. `describe` returns its call as text, for a mismatch.
    ///
    /// # Errors
    /// [`Error::Mismatch`], [`Error::Timeout`], [`Error::Cancelled`], [`Error::ConnectionLost`].
    pub(crate) fn exchange(
        &self,
        call: &Call,
        parts: &SplitSizes,
        describe: impl Fn() -> String,
    ) -> Result<()> {
        let inline = parts.largest.is_some_and(|largest| largest <= HEADER_MAX_DATA_BYTES);
        let (send, receive) = (self.offsets(&parts.to), self.offsets(&parts.from));
        self.write_headers(call, parts, inline.then_some(&send[..]));
        let equal = vec![HEADER_BYTES as i64; self.map.len()];
        let [mine, theirs] = &self.staging.headers;
        let headers = GlooCall {
            inputs: &[mine],
            outputs: &[theirs],
            input_splits: &equal,
            output_splits: &equal,
            ..GlooCall::default()
        };
        self.call_gloo(call, &[(Operation::AllToAll, headers)])?;
        self.read_headers(call, parts, inline.then_some(&receive[..]), describe)?;
        if inline { Ok(()) } else { self.send_parts(call, parts) }
    }

    /// Exchanges the parts of a call whose headers have been read.
    fn send_parts(&self, call: &Call, parts: &SplitSizes) -> Result<()> {
        let splits = |sizes: &[usize]| -> Vec<i64> {
            let sent_size = |(process, &size): (usize, &usize)| {
                if process == self.map.mine { 0 } else { padded(size) as i64 }
            };
            sizes.iter().enumerate().map(sent_size).collect()
        };
        let (to, from) = (splits(&parts.to), splits(&parts.from));
        let cut = |tensor: &Tensor, sizes: &[i64]| {
            tensor.f_narrow(0, 0, sizes.iter().sum()).doing("narrow")
        };
        let [send, receive] = self.staging.parts();
        let (send, receive) = (cut(send, &to)?, cut(receive, &from)?);
        let (inputs, outputs) = (&[&send], &[&receive]);
        let is_large = send.numel().min(receive.numel()) > SOCKET_BYTES;
        let mut others = self.others();
        if is_large && let (Some(peer), None) = (others.next(), others.next()) {
            let receive = GlooCall { peer, outputs, ..GlooCall::default() };
            let send = GlooCall { peer, inputs, ..GlooCall::default() };
            return self.call_gloo(call, &[(Operation::Recv, receive), (Operation::Send, send)]);
        }
        let (input_splits, output_splits) = (&to, &from);
        let parts =
            GlooCall { inputs, outputs, input_splits, output_splits, ..GlooCall::default() };
        self.call_gloo(call, &[(Operation::AllToAll, parts)])
    }

    fn offsets(&self, sizes: &[usize]) -> Vec<usize> {
        SplitSizes::offsets(sizes, self.map.mine).0
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        let mine = self.map.mine;
        (0..self.map.len()).filter(move |&process| process != mine)
    }

    fn write_headers(&self, call: &Call, parts: &SplitSizes, inline: Option<&[usize]>) {
        let message = self.stop.get().map(|stop| stop.message()).unwrap_or_default();
        let (sequence, fingerprint) = (call.sequence, call.fingerprint());
        let losses = self.own_losses();
        let headers: *mut u8 = self.staging.headers[0].data_ptr().cast();
        let send: *mut u8 = self.staging.parts()[0].data_ptr().cast();
        for process in self.others() {
            let size = parts.to[process];
            let header = ExchangeHeader { sequence, fingerprint, size: size as u64, stop: message }
                .to_bytes();
            // SAFETY: the tensor has a header for each process, which no other rank touches now. A part that fits into
            // the header lies where it was packed.
            unsafe {
                let header_at = headers.add(process * HEADER_BYTES);
                header_at.cast::<[u8; HEADER_INT_BYTES]>().write(header);
                header_at.add(HEADER_INT_BYTES).cast::<WireLosses>().write(losses);
                if let Some(offsets) = inline {
                    let part = send.add(offsets[process]);
                    part.copy_to_nonoverlapping(header_at.add(HEADER_FIXED_BYTES), size);
                }
            }
        }
    }

    /// Returns where the losses of the group rank `rank` are: see [`ProcessGroup::loss_record`].
    ///
    /// [`ProcessGroup::loss_record`]: crate::ProcessGroup::loss_record
    pub(crate) fn loss_record(&self, rank: usize) -> Result<InMemory<LossRecord>> {
        let on_host = self.on_host.as_ref().map(|group| group.losses(rank)).transpose()?;
        let received = || InMemory::of(self.run.loss_records[self.members[rank]].clone());
        Ok(on_host.flatten().unwrap_or_else(received))
    }

    /// Returns the losses of the ranks that this one uses the network for.
    fn own_losses(&self) -> WireLosses {
        let mut losses = WireLosses::default();
        for (rank, losses) in self.map.here().zip(&mut losses) {
            let newest = self.loss_record(rank).map_or([0; 3], |record| record.newest());
            *losses = newest.map(U64::new);
        }
        losses
    }

    fn read_headers(
        &self,
        call: &Call,
        parts: &SplitSizes,
        inline: Option<&[usize]>,
        describe: impl Fn() -> String,
    ) -> Result<()> {
        let headers: *mut u8 = self.staging.headers[1].data_ptr().cast();
        let receive: *mut u8 = self.staging.parts()[1].data_ptr().cast();
        let fingerprint = call.fingerprint();
        // The first process whose part has an unexpected size, and the processes with another call.
        let (mut uneven, mut different) = (None, Vec::new());
        for process in self.others() {
            // SAFETY: the tensor has a header for each process, and Gloo has finished with it.
            let (header_at, header, losses) = unsafe {
                let header_at = headers.add(process * HEADER_BYTES);
                let losses = header_at.add(HEADER_INT_BYTES).cast::<WireLosses>().read();
                (header_at, header_at.cast::<[u8; HEADER_INT_BYTES]>().read(), losses)
            };
            let header = ExchangeHeader::from_bytes(process, &header)?;
            if [header.sequence, header.fingerprint] != [call.sequence, fingerprint] {
                different.push(process);
            } else if header.size != parts.from[process] as u64 {
                uneven.get_or_insert((process, header.size as usize));
            }
            let fits = different.is_empty() && uneven.is_none();
            for (rank, losses) in self.map.processes[process].clone().zip(losses) {
                self.run.loss_records[self.members[rank]].receive(losses.map(U64::get));
            }
            if let Some(stop) = self.stop.get() {
                stop.merge(process == 0, header.stop);
            }
            if let Some(offsets) = inline.filter(|_| fits) {
                // SAFETY: the part has the expected size, for which there is room; no other rank uses the room now.
                unsafe {
                    let part = receive.add(offsets[process]);
                    part.copy_from_nonoverlapping(
                        header_at.add(HEADER_FIXED_BYTES),
                        parts.from[process],
                    );
                }
            }
        }
        if let Some(stop) = self.stop.get() {
            self.common.set_stop(stop.message());
        }
        match uneven {
            _ if !different.is_empty() => Err(self.mismatch(call, &describe(), &different)?),
            Some((process, sent)) => Err(self.sizes_differ(call, process, sent, parts)),
            None => Ok(()),
        }
    }

    /// Starts Gloo operations for `call`. Waits on the process's first rank until all have ended, the run is cancelled or
    /// the timeout has passed. If there are several, all are with one process.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Cancelled`], [`Error::ConnectionLost`].
    fn call_gloo(&self, call: &Call, operations: &[(Operation, GlooCall<'_>)]) -> Result<()> {
        let (gloo, deadline) = (self.gloo()?, Deadline::after(self.timeout(call)));
        // A connection that is closed already may fail the start.
        let start = |(operation, arguments): &(_, _)| gloo.start(*operation, *arguments);
        let started: Result<Vec<_>> = operations.iter().map(start).collect();
        let ended = started.and_then(|all| all.iter().try_for_each(|one| self.wait(one, deadline)));
        self.or_abort(call, deadline, ended)
    }

    /// Returns the connection to the other processes, which the first rank of each uses.
    pub(super) fn gloo(&self) -> Result<&GlooGroup> {
        let unconnected = || Error::Internal("another process uses the network".into());
        self.gloo.as_ref().ok_or_else(unconnected)
    }

    /// Returns for how long `call` may wait for other processes.
    pub(super) fn timeout(&self, call: &Call) -> Duration {
        call.timeout.unwrap_or(self.run.timeout).min(self.run.timeout)
    }

    /// Does nothing if the operations of `call` have `ended` well. Otherwise aborts all operations of Gloo, and returns the
    /// reason: the deadline, a cancelled run, or a lost connection.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Cancelled`], [`Error::ConnectionLost`].
    pub(super) fn or_abort(
        &self,
        call: &Call,
        deadline: Deadline,
        ended: Result<()>,
    ) -> Result<()> {
        let reason = match ended {
            Ok(()) => return Ok(()),
            Err(Error::Gloo { reason, .. }) => reason,
            Err(other) => other.to_string(),
        };
        // After the abort nothing uses the buffers any more, and the other processes notice it.
        let _ = self.gloo()?.abort();
        let (at, waiting) = (call.at(), self.members[self.map.here().start]);
        let elsewhere = self.others().flat_map(|process| self.map.processes[process].clone());
        let ranks = elsewhere.map(|rank| self.members[rank]).collect();
        Err(if deadline.is_over() {
            lost::timed_out(&self.run, at, waiting, ranks, self.timeout(call))
        } else {
            lost::connection_lost(&self.run, at, waiting, ranks, reason)
        })
    }

    /// Waits until an operation has `ended`, the run is cancelled or the deadline is over.
    pub(super) fn wait(&self, ended: &Receiver<Result<()>>, deadline: Deadline) -> Result<()> {
        let failed = |reason: &str| Error::Gloo { doing: "wait", reason: reason.into() };
        loop {
            select_biased! {
                recv(ended) -> result => return result.unwrap_or_else(|_| Err(failed("Gloo's thread has ended"))),
                recv(self.run.cancel.tripped()) -> _ => return Err(failed("")),
                default(deadline.left()) => if deadline.is_over() {
                    return Err(failed(""));
                },
            }
        }
    }

    /// Returns the error of a collective in which `process` sends `sent` bytes and this process expects another
    /// number. Each call is valid by itself, so the other process does not see the error.
    fn sizes_differ(&self, call: &Call, process: usize, sent: usize, parts: &SplitSizes) -> Error {
        let numel = |bytes| bytes / num_bytes(call.kind, 1);
        let ranks = |process: usize| &self.members[self.map.processes[process].clone()];
        let here = ranks(self.map.mine);
        let line = format_call_site(call.call_site.filter(|_| here.len() == 1));
        let numbers = [sent, parts.from[process]].map(numel);
        local::sizes_differ(call.at(), (ranks(process), String::new()), (here, line), numbers)
    }

    /// Returns the error when the processes `different` make another call than this one.
    fn mismatch(&self, call: &Call, mine: &str, different: &[usize]) -> Result<Error> {
        let parts = self.map.processes.iter().map(|ranks| &self.members[ranks.clone()]);
        let is_different = |process: usize| different.contains(&process);
        local::mismatch_in_store(
            &self.store,
            call.sequence,
            self.map.mine,
            mine,
            parts,
            is_different,
        )
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;
    use std::time::Duration;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(60);

    /// No test waits for this long: a wait that nothing else ends hangs.
    const EVER: Duration = Duration::from_secs(24 * 60 * 60);

    /// Connects two processes of one rank each, which are threads here, and runs `process` in both.
    #[allow(clippy::disallowed_methods)]
    fn in_two_processes(process: impl Fn(usize, &RunContext, Network) + Sync) {
        let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT).unwrap();
        let one = |mine: usize| {
            let map = ProcessMap { processes: vec![0..1, 1..2], mine };
            let run = Arc::new(RunContext::new(2, EVER, None));
            let (store, members) = (store.under("group"), Arc::new([0, 1]));
            let network = Network::connect(store, run.clone(), members, map, None, None).unwrap();
            process(mine, &run, network);
        };
        thread::scope(|scope| {
            let threads = [0, 1].map(|mine| scope.spawn(move || one(mine)));
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }

    fn receive(network: &Network) -> Error {
        let tensor = Tensor::from_slice(&[0i64]);
        let recv = GlooCall { peer: 1, outputs: &[&tensor], ..GlooCall::default() };
        let call = Call::bare(Operation::Recv);
        network.call_gloo(&call, &[(Operation::Recv, recv)]).unwrap_err()
    }

    #[test]
    #[allow(clippy::disallowed_methods)]
    fn cancelled_wait_returns_before_the_operation() {
        let both = Barrier::new(2);
        in_two_processes(|mine, run, network| {
            // Neither process sends, so the first one waits.
            let cancelled = (mine == 0).then(|| {
                thread::scope(|scope| {
                    scope.spawn(|| {
                        thread::sleep(Duration::from_millis(200));
                        run.report(1, None, "it ends the run".into());
                    });
                    receive(&network)
                })
            });
            both.wait(); // a process that has gone would end the wait, too
            if let Some(cancelled) = cancelled {
                assert!(matches!(cancelled, Error::Cancelled { .. }), "{cancelled}");
            }
        });
    }

    /// The first call may begin before the connection is closed; the second one cannot.
    #[test]
    fn call_after_the_other_process_has_gone_names_its_rank() {
        let gone = Barrier::new(2);
        in_two_processes(|mine, _, network| {
            if mine == 1 {
                drop(network);
                gone.wait();
                return;
            }
            gone.wait();
            for _ in 0..2 {
                let error = receive(&network);
                assert!(matches!(error, Error::ConnectionLost { .. }), "{error}");
                assert!(error.to_string().contains("rank 1"), "{error}");
            }
        });
    }
}
