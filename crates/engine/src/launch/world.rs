//! The processes of one run: their rendezvous in a store, and the ranks of each process.
//!
//! A single process opens no store. Several processes connect to a `TCPStore` (c10d's), either that of torchrun's
//! agent or one that process 0 serves. There they exchange what they are. The keys belong to this run and to this
//! start of it: an agent's store outlives a restart, while process 0 serves a new one each time.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tch::Device;

use super::heartbeat_monitor::{HeartbeatMonitor, Server, Stay};
use super::host::{APART, HostLinks, OFF};
use super::messages::{MOST_RANKS, Process, node_of, ranks_on, shared_gpu};
use super::process_rendezvous::{
    HOW_TO_CHANGE_PORT, ProcessRendezvous, files_of_store, prefix, process_0_missing,
};
use super::{
    Launch, LaunchKind, MasterEndpoint, Placement, Processes, SharedMemory, clock_sync,
    restart_generation,
};
use crate::error::{Error, Result};
use crate::events::Clock;
use crate::ffi::store::{ALL_INTERFACES, NOT_HERE, PORT_IN_USE};
use crate::ffi::{TcpStore, cuda};
use crate::os::limits::require_files;
use crate::process_group::{Backend, Bootstrap, Network, ProcessMap, nccl_host_id};
use crate::runtime::{Instant, RunContext};

/// All processes of a run, as seen by one of them.
#[derive(Debug)]
pub(crate) struct ProcessWorld {
    pub(super) processes: Vec<Process>,
    /// The ranks of each process. Process 0, with rank 0, reads and writes files for all.
    pub(super) map: ProcessMap,
    /// Uses the prefix of this start of the run.
    store: TcpStore,
    serves: bool,
    /// How many machines there are.
    pub(super) nnodes: usize,
    /// This machine's number, from 0.
    pub(super) node_rank: usize,
    /// `GLOO_SOCKET_IFNAME`.
    pub(super) interfaces: Option<String>,
    /// The offset of this process's clock from that of process 0; `None` if clocks were not compared.
    pub(super) clock: Option<Clock>,
    pub(super) heartbeat_monitor: HeartbeatMonitor,
    /// The other processes of this host; an error says why they do not share memory. `None` with a backend that does not
    /// use it.
    pub(super) host: Option<std::result::Result<HostLinks, String>>,
}

impl ProcessWorld {
    /// Waits for the rendezvous with the other processes of `launch`. Returns when all have arrived; `None` if this
    /// is the only process. `options` holds the names and values that must be the same in all processes.
    ///
    /// # Errors
    /// [`Error::Input`] when the processes do not fit each other, [`Error::Store`] when the store cannot be
    /// reached or served, [`Error::PeersMissing`] when others do not arrive within `timeout`.
    pub(super) fn meet(
        launch: &Launch,
        placement: &Placement,
        timeout: Duration,
        interfaces: Option<String>,
        options: Vec<(String, String)>,
    ) -> Result<Option<Self>> {
        let Some(master) = &launch.master else { return Ok(None) };
        check_count(launch)?;
        let mine = launch.processes.index;
        let serves = mine == 0 && !master.agent_store;
        let store = open_store(launch, master, serves, timeout)?;
        let began = Instant::now();
        let start = generation(launch, master, &store, timeout)?;
        let of_start = store.under(&prefix(&launch.run_id, start));
        // An agent's store has the keys of earlier starts.
        let common = if master.agent_store { of_start.clone() } else { store.under("ddp-mp") };
        let store = of_start;
        let me = this_process(launch, placement, options);
        let rendezvous =
            ProcessRendezvous { store: &store, common, launch, me: &me, began, timeout, serves };
        let (processes, ranks) = rendezvous.meet()?;
        let map = ProcessMap { processes: ranks, mine };
        let machines = processes.iter().filter(|process| process.first_local == 0).count();
        let server = server(launch, master, &processes[0]);
        let heartbeat_monitor = HeartbeatMonitor::new(&store, server, &map)?;
        let host = match placement.backend {
            Backend::Gloo => {
                let wants = launch.shared_memory != SharedMemory::Off;
                Some(HostLinks::meet(&store, &map, wants, launch.has_agent, timeout)?)
            }
            _ => None,
        };
        let world = Self {
            nnodes: launch.nnodes.unwrap_or(machines),
            node_rank: launch.node_rank.unwrap_or_else(|| node_of(&processes, mine)),
            processes,
            map,
            store: store.clone(),
            serves,
            interfaces,
            clock: None,
            heartbeat_monitor,
            host,
        };
        if let Err(error) = world.check_shared_memory(launch.shared_memory) {
            let _ = rendezvous.end(&error); // the others find the same
            return Err(error);
        }
        Ok(Some(world))
    }

    /// Compares this process's clock with that of process 0, for a timeline of all. All must call it, and wait `timeout` at most.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Input`] when another process does not answer.
    pub(super) fn compare_clocks(self, timeout: Duration) -> Result<Self> {
        let clock = clock_sync::estimate_offset(&self.store, &self.map, timeout)?;
        Ok(Self { clock: Some(clock), ..self })
    }

    /// Returns how many ranks all processes have together.
    pub(super) fn world_size(&self) -> usize {
        self.map.processes.last().map_or(0, |last| last.end)
    }

    /// Returns how many ranks of this machine come before those of this process.
    pub(super) fn ranks_before_on_machine(&self) -> usize {
        ranks_on(&self.me().host, &self.processes[..self.map.mine])
    }

    /// Returns how many ranks there are on this machine.
    pub(super) fn ranks_on_machine(&self) -> usize {
        ranks_on(&self.me().host, &self.processes)
    }

    /// Returns what this process is.
    pub(super) fn me(&self) -> &Process {
        &self.processes[self.map.mine]
    }

    /// Returns a rank's device, with its process if that is another one: `CPU:0 on b, process 71`.
    pub(super) fn label(&self, rank: usize) -> String {
        let process = self.map.process_of(rank);
        let index = rank - self.map.processes[process].start;
        if process == self.map.mine {
            self.me().ranks[index].clone()
        } else {
            self.processes[process].label(index)
        }
    }

    /// Returns notes for the user: processes of one machine cannot share memory, or they share a GPU.
    pub(super) fn notes(&self) -> impl Iterator<Item = String> {
        let over_tcp = self.unshared().filter(|why| !why.ends_with(OFF)).map(|why| {
            format!(
                "processes of one machine exchange tensors over TCP, because they cannot share memory: {why}"
            )
        });
        let shared = shared_gpu(&self.processes, false).map(|(gpu, [one, other])| {
            format!("{one} and {other} share a GPU, {gpu}: its times show nothing about speed")
        });
        over_tcp.into_iter().chain(shared)
    }

    /// Checks that the processes share memory, if `--shared-memory=require` asks for it.
    fn check_shared_memory(&self, wanted: SharedMemory) -> Result<()> {
        let why_not = match &self.host {
            Some(Err(why)) => Some(why.clone()),
            _ => self.unshared(),
        };
        match (why_not, wanted) {
            (Some(why), SharedMemory::Require) => Err(Error::unsupported(format!(
                "--shared-memory=require: the processes cannot share memory: {why}; or use --shared-memory=auto"
            ))),
            _ => Ok(()),
        }
    }

    /// Returns why processes of one machine do not share memory; `None` if they do.
    fn unshared(&self) -> Option<String> {
        let host = self.host.as_ref()?;
        let host_of =
            |first: usize| host.as_ref().map_or(first, |links| links.memory.host_of(first));
        let machines = self.processes.iter().map(|process| &process.host);
        let hosts = machines.zip(self.map.processes.iter().map(|ranks| host_of(ranks.start)));
        let hosts: Vec<_> = BTreeSet::from_iter(hosts).into_iter().collect();
        let apart = hosts.windows(2).find(|hosts| hosts[0].0 == hosts[1].0)?;
        Some(host.as_ref().err().cloned().unwrap_or_else(|| format!("on {}, {APART}", apart[0].0)))
    }

    /// Creates what the ranks of this process need to join the world group.
    ///
    /// # Errors
    /// The errors of [`Bootstrap::between_processes`] and [`Network::connect`].
    pub(super) fn bootstrap(
        &self,
        run: &Arc<RunContext>,
        backend: Backend,
        members: Arc<[usize]>,
    ) -> Result<Bootstrap> {
        Bootstrap::between_processes(backend, run, members, |members| {
            let store = self.store.reconnect(run.cancel.tripped().clone())?.under("world");
            let memory = self.host().map(|host| &host.memory);
            let interfaces = self.interfaces.as_deref();
            Network::connect(store, run.clone(), members, self.map.clone(), interfaces, memory)
        })
    }

    /// Starts to exchange heartbeats with the other processes of `run`, and to watch those of this host.
    ///
    /// # Errors
    /// [`Error::Input`] when no thread can be started, and for a second run.
    pub(super) fn start(&self, run: &Arc<RunContext>) -> Result<()> {
        self.heartbeat_monitor.start(run)?;
        match self.host() {
            Some(host) => host.watch(run),
            None => Ok(()),
        }
    }

    /// Returns the other processes of this host, if they share memory.
    fn host(&self) -> Option<&HostLinks> {
        self.host.as_ref()?.as_ref().ok()
    }

    /// Ends this process's part in the run. A process that serves the store stays while others need it (see `stay`).
    pub(super) fn leave(&self, stay: Stay<'_>) {
        if let Some(host) = self.host() {
            host.leave();
        }
        self.heartbeat_monitor.leave(self.serves.then_some(stay));
    }
}

/// Checks that a run may have as many processes as the launcher says.
fn check_count(launch: &Launch) -> Result<()> {
    let count = launch.processes.count;
    if count <= MOST_RANKS {
        return Ok(());
    }
    Err(Error::usage(format!(
        "{count} processes exceed the maximum of {MOST_RANKS}; check what sets this number ({})",
        launch.reason
    )))
}

/// Opens the store in which the processes meet: serves it, or connects to it.
fn open_store(
    launch: &Launch,
    master: &MasterEndpoint,
    serves: bool,
    timeout: Duration,
) -> Result<TcpStore> {
    let (addr, port) = (&master.addr, master.port);
    if !serves {
        return TcpStore::connect(addr, port, timeout);
    }
    let files = files_of_store(launch.processes.count);
    require_files(files, "serving the store to all processes")?;
    TcpStore::serve(addr, port, timeout).map_err(|error| with_remedy(error, master))
}

/// Returns which start of the run this is. A store that outlives a restart has the keys of each.
fn generation(
    launch: &Launch,
    master: &MasterEndpoint,
    store: &TcpStore,
    timeout: Duration,
) -> Result<i64> {
    match launch.kind {
        LaunchKind::Torchrun if master.agent_store => {
            let Processes { index, count, .. } = launch.processes;
            let of_run = store.under(&format!("ddp-mp/{}", launch.run_id));
            let generation = restart_generation::agree(&of_run, index, count, timeout)?;
            generation.ok_or_else(|| process_0_missing(launch, timeout))
        }
        LaunchKind::Spawned => Ok(launch.restart_count as i64),
        _ => Ok(0),
    }
}

/// Returns what this process tells the others of itself.
fn this_process(launch: &Launch, placement: &Placement, options: Vec<(String, String)>) -> Process {
    let Placement { backend, devices, .. } = placement;
    let first_local = launch.processes.local_index * devices.len();
    Process {
        version: env!("CARGO_PKG_VERSION").into(),
        host: gethostname::gethostname().to_string_lossy().into_owned(),
        pid: std::process::id(),
        nonce: getrandom::u64().unwrap_or_default(), // only tells apart what looks alike
        backend: backend.name().into(),
        first_local,
        ranks: placement.labels(first_local),
        gpus: devices.iter().map(gpu_of).collect::<Option<_>>().unwrap_or_default(),
        nccl_host: nccl_host_id(),
        unshareable: backend.check_shared_gpu(false).err().map(|error| error.to_string()),
        options,
    }
}

/// Returns what serves the store, for errors. `process_0` is the first process.
fn server(launch: &Launch, master: &MasterEndpoint, process_0: &Process) -> Server {
    let (rank, who) = match process_0 {
        _ if launch.kind == LaunchKind::Spawned => {
            (None, "the process that has started the ranks, and serves the store,".into())
        }
        _ if master.agent_store => (None, "torchrun's agent, which serves the store,".into()),
        Process { host, pid, .. } => {
            let who = format!(
                "the process of rank 0 (on {host}, process {pid}), which serves the store,"
            );
            (Some(0), who)
        }
    };
    Server { rank, name: who }
}

/// Adds to the error of a taken port what to do. A wrong address is wrong input.
fn with_remedy(error: Error, MasterEndpoint { addr, from, .. }: &MasterEndpoint) -> Error {
    match error {
        Error::Store { address, doing, reason } if reason == PORT_IN_USE => {
            let reason = format!("{reason}; {HOW_TO_CHANGE_PORT}");
            Error::Store { address, doing, reason }
        }
        Error::Store { reason, .. } if [NOT_HERE, ALL_INTERFACES].contains(&&*reason) => {
            Error::usage(format!("{from}={addr}: {reason}"))
        }
        other => other,
    }
}

/// Returns the UUID of the device's GPU; `None` for the CPU.
fn gpu_of(device: &Device) -> Option<String> {
    match device {
        Device::Cuda(index) => cuda::uuid(*index),
        _ => None,
    }
}
