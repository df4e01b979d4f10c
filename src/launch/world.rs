//! The processes of one run: how they meet in a store, and which ranks each of them has.
//!
//! One process alone needs none of this, and opens nothing. Several meet in a `TCPStore` of c10d's, the one of
//! torchrun's agent or one that process 0 serves, and tell each other what they are. The keys are those of this run and
//! of this start of it: an agent's store outlives a restart.

use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::channel::{Sender, bounded};
use serde::{Deserialize, Serialize};

use super::watch::Watch;
use super::{Backend, Launch, LaunchKind, Placement};
use crate::error::{Error, Result};
use crate::process_group::{Invitation, Layout, Network, rank_label};
use crate::sync::Run;
use crate::torch::TcpStore;

/// What a process tells the others about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Process {
    version: String,
    host: String,
    pid: u32,
    backend: String,
    /// The number of its first rank among those of its machine.
    first_local: usize,
    /// `CPU:0` for each of its ranks.
    ranks: Vec<String>,
}

/// All processes of a run, as one of them knows them.
#[derive(Debug)]
pub struct World {
    processes: Vec<Process>,
    mine: usize,
    /// Under this run's prefix.
    store: TcpStore,
    serves: bool,
    nnodes: usize,
    /// `GLOO_SOCKET_IFNAME`.
    interfaces: Option<String>,
    watch: Watch,
    /// Nobody ever closes this: requests of the run's end must not be given up.
    _open: Sender<Infallible>,
}

impl World {
    /// Meets the other processes of `launch`; `None` if this is the only one. Returns when all are there.
    ///
    /// # Errors
    /// [`Error::Input`] when the processes do not fit each other, [`Error::Store`] when the store cannot be reached
    /// or served, [`Error::Absent`] when others don't come within `timeout`.
    pub fn meet(
        launch: &Launch,
        placement: &Placement,
        timeout: Duration,
        interfaces: Option<String>,
    ) -> Result<Option<Self>> {
        let (Some(master), mine) = (&launch.master, launch.processes.index) else {
            return Ok(None);
        };
        let (open, never) = bounded(0);
        let serves = mine == 0 && !master.agent_store;
        let (addr, port) = (&master.addr, master.port);
        let store = match serves {
            true => TcpStore::serve(addr, port, timeout, never)?,
            false => TcpStore::connect(addr, port, timeout, never)?,
        };
        let store = store.under(&prefix(&launch.run_id, launch.restart_count));
        let first_local = launch.processes.local_index * placement.devices.len();
        let me = Process {
            version: env!("CARGO_PKG_VERSION").into(),
            host: gethostname::gethostname().to_string_lossy().into_owned(),
            pid: std::process::id(),
            backend: placement.backend.name().into(),
            first_local,
            ranks: (placement.devices.iter().zip(first_local..))
                .map(|(device, local_rank)| rank_label(*device, local_rank))
                .collect(),
        };
        let count = launch.processes.count;
        let processes = match tell(&store, &me, mine, count, timeout) {
            Err(Error::Absent { missing, count, waited, there }) if serves => {
                part(&store, &missing, &there, count)?;
                return Err(Error::Absent { missing, count, waited, there });
            }
            told => told?,
        };
        if let Some((number, other)) = processes
            .iter()
            .enumerate()
            .find(|(_, it)| it.version != me.version || it.backend != me.backend)
        {
            return Err(Error::Input(format!(
                "process {number} on {} is ddp-mp {} with backend {}, process {mine} on {} is {} with {}; start the \
                 same program with the same options everywhere",
                other.host, other.version, other.backend, me.host, me.version, me.backend
            )));
        }
        let machines = processes.iter().filter(|process| process.first_local == 0).count();
        let nnodes = launch.nnodes.unwrap_or(machines);
        let server = match &processes[0] {
            _ if launch.kind == LaunchKind::Spawned => {
                "the process that has started the ranks, and serves the store,".into()
            }
            _ if master.agent_store => "torchrun's agent, which serves the store,".into(),
            Process { host, pid, .. } => {
                format!("the process of rank 0 (on {host}, process {pid}), which serves the store,")
            }
        };
        let watch = Watch::new(&store, server, mine, &ranks(&processes))?;
        Ok(Some(Self { processes, mine, store, serves, nnodes, interfaces, watch, _open: open }))
    }

    /// How many ranks all processes have together.
    pub fn world_size(&self) -> usize {
        self.processes.iter().map(|process| process.ranks.len()).sum()
    }

    /// The ranks of this process.
    pub fn ranks_here(&self) -> Range<usize> {
        ranks(&self.processes)[self.mine].clone()
    }

    /// How many machines there are.
    pub fn nnodes(&self) -> usize {
        self.nnodes
    }

    /// The number of this process's first rank among those of its machine.
    pub(super) fn first_local(&self) -> usize {
        self.processes[self.mine].first_local
    }

    /// How many ranks there are on this machine.
    pub(super) fn ranks_of_machine(&self) -> usize {
        let host = &self.processes[self.mine].host;
        self.processes.iter().filter(|it| it.host == *host).map(|it| it.ranks.len()).sum()
    }

    /// Whether this is the process of rank 0, which writes and reads for all.
    pub fn is_first(&self) -> bool {
        self.mine == 0
    }

    /// A rank's device, and its process if that is another one: `CPU:0 on b, process 71`.
    pub(super) fn label(&self, rank: usize) -> String {
        let all = ranks(&self.processes);
        let Some(process) = all.iter().position(|ranks| ranks.contains(&rank)) else {
            return "of no process".into();
        };
        let Process { host, pid, ranks, .. } = &self.processes[process];
        let label = &ranks[rank - all[process].start];
        if process == self.mine {
            label.clone()
        } else {
            format!("{label} on {host}, process {pid}")
        }
    }

    /// What the ranks of this process need to join the group of all.
    ///
    /// # Errors
    /// Those of [`Network::connect`], and [`Error::Input`] for a backend that stays within a process.
    pub(super) fn invitation(&self, run: &Arc<Run>, backend: Backend) -> Result<Invitation> {
        if backend == Backend::Threaded {
            return Err(Error::Input(
                "backend threaded is for the ranks of one process; use gloo or nccl for several"
                    .into(),
            ));
        }
        let store = self.store.reconnect(run.cancel.tripped().clone())?.under("world");
        let members = (0..self.world_size()).collect::<Vec<_>>().into();
        let layout = Layout { processes: ranks(&self.processes), mine: self.mine };
        let interfaces = self.interfaces.as_deref();
        let network =
            Network::connect(store, run.clone(), Arc::clone(&members), layout, interfaces)?;
        Invitation::across(run, members, network, backend == Backend::Nccl)
    }

    pub(super) fn watch(&self) -> &Watch {
        &self.watch
    }

    /// The end, which the others may still read from the store: who serves it stays until all have left, or do not
    /// answer any more, at most for `timeout`.
    pub fn leave(&self, timeout: Duration) {
        self.watch.leave(self.serves.then_some(timeout));
    }
}

/// The places of the ranks of each process among all.
fn ranks(processes: &[Process]) -> Vec<Range<usize>> {
    let mut next = 0;
    let mut take = |count: usize| {
        next += count;
        next - count..next
    };
    processes.iter().map(|process| take(process.ranks.len())).collect()
}

/// Tells the others what this process is, and hears what they are.
fn tell(
    store: &TcpStore,
    me: &Process,
    mine: usize,
    count: usize,
    timeout: Duration,
) -> Result<Vec<Process>> {
    let key = |process: usize| format!("process/{process}");
    if store.add(&format!("came/{mine}"), 1)? > 1 {
        return Err(Error::Input(format!(
            "two processes say that they are number {mine} of {count}; give each its own --node-rank (or RANK)"
        )));
    }
    let unreadable =
        |error: serde_json::Error| Error::Input(format!("what a process tells: {error}"));
    store.set(&key(mine), &serde_json::to_vec(me).map_err(unreadable)?)?;
    let keys: Vec<String> = (0..count).map(key).collect();
    let came = |process: &String| -> Result<Option<Process>> {
        if !store.check(std::slice::from_ref(process))? {
            return Ok(None);
        }
        let told = store.get(process, Duration::from_secs(1))?.unwrap_or_default();
        serde_json::from_slice(&told).map(Some).map_err(unreadable)
    };
    let began = Instant::now();
    let arrived = loop {
        let left = timeout.saturating_sub(began.elapsed());
        if store.wait(&keys, left.min(SLICE))? {
            break true;
        }
        if let Some(told) = store.get(ABSENT, Duration::ZERO)? {
            let told = serde_json::from_slice(&told).map_err(unreadable)?;
            let (missing, there): (String, String) = told;
            store.add(HEARD, 1)?;
            return Err(Error::Absent { missing, count, waited: began.elapsed(), there });
        }
        if left <= SLICE {
            break false;
        }
    };
    let all = keys.iter().map(came).collect::<Result<Vec<_>>>()?;
    if arrived && let Some(all) = all.iter().cloned().collect::<Option<Vec<_>>>() {
        let too_many = all.iter().any(|process| process.ranks.len() > MOST_RANKS);
        return match too_many {
            true => Err(Error::Input("a process says that it has too many ranks".into())),
            false => Ok(all),
        };
    }
    let numbered = || all.iter().enumerate();
    let missing = numbered().filter(|(_, it)| it.is_none()).map(|(number, _)| number.to_string());
    let there = numbered().filter_map(|(number, it)| {
        it.as_ref().map(|it| format!("{number} (on {}, process {})", it.host, it.pid))
    });
    Err(Error::Absent {
        missing: missing.collect::<Vec<_>>().join(", "),
        count,
        waited: timeout,
        there: there.collect::<Vec<_>>().join(", "),
    })
}

/// What the keys of one start of a run begin with.
pub(super) fn prefix(run_id: &str, restart_count: usize) -> String {
    format!("ddp-mp/{run_id}/{restart_count}")
}

/// Tells those who still wait for `process` that it will not come.
pub(super) fn tell_absent(store: &TcpStore, process: usize) -> Result<()> {
    let told = (process.to_string(), "all others, or on their way");
    store.set(ABSENT, &serde_json::to_vec(&told).unwrap_or_default())
}

/// Tells those who are there who is not, before the store goes with this process.
fn part(store: &TcpStore, missing: &str, there: &str, count: usize) -> Result<()> {
    let text = serde_json::to_vec(&(missing, there)).unwrap_or_default();
    store.set(ABSENT, &text)?;
    let others = count - missing.split(", ").count() - 1;
    let began = Instant::now();
    while store.add(HEARD, 0)? < others as i64 && began.elapsed() < 3 * SLICE {
        thread::park_timeout(SLICE / 50); // the store has no event for it
    }
    Ok(())
}

/// How long to wait before looking whether it is in vain.
const SLICE: Duration = Duration::from_secs(1);

/// Who is missing, as the process that serves the store has found; and how many have heard of it.
const ABSENT: &str = "absent";
const HEARD: &str = "heard";

/// More than any process has.
const MOST_RANKS: usize = 1 << 16;
