//! Joining a launch: how this process was started, where its ranks run, and the other processes of the run.

use std::env::var_os;
use std::net::{IpAddr, ToSocketAddrs};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::heartbeat_monitor::Stay;
use super::{
    BackendChoice, Binding, Launch, LaunchKind, LaunchOptions, LocalRanks, MasterEndpoint,
    NodeSlice, Nproc, Placement, ProcessWorld, Processes, Spawn, detect, place, write_error_file,
};
#[cfg(doc)]
use crate::error::Error;
use crate::error::{Result, Shown};
use crate::ffi::cuda::Cuda;
use crate::ffi::{check_interfaces, check_version};
use crate::os::affinity::CpuList;
use crate::os::binding_note;
use crate::os::cores;
use crate::process_group::{Backend, Bootstrap, RankIdentity};
use crate::runtime::{MAX_WAIT, RunContext};

/// The settings with which a process joins its launch. The default is that of [`Spawn::from_env`].
#[derive(Debug, Clone)]
pub struct JoinLaunchOptions {
    /// The backend that the user asks for.
    pub backend: BackendChoice,
    /// How long to wait for the other processes.
    pub timeout: Duration,
    /// How long the other processes may take to exit after a failure.
    pub grace_period: Duration,
    /// Names and values that must be the same in all processes.
    pub shared_options: Vec<(String, String)>,
    /// Whether the processes compare their clocks, so that what they record shares one clock. The same in all processes.
    pub compare_clocks: bool,
}

impl Default for JoinLaunchOptions {
    fn default() -> Self {
        Self {
            backend: BackendChoice::Auto,
            timeout: Spawn::TIMEOUT,
            grace_period: Spawn::GRACE_PERIOD,
            shared_options: Vec::new(),
            compare_clocks: false,
        }
    }
}

/// A launch that this process has joined: how it was started, where its ranks run, and the other processes.
///
/// `Send` and `Sync`: ranks may share it.
#[derive(Debug, Clone)]
pub struct JoinedLaunch {
    /// How this process was started.
    pub launch: Launch,
    /// Where its ranks run.
    pub placement: Placement,
    /// All processes, if there are several.
    pub(crate) world: Option<Arc<ProcessWorld>>,
    /// How long the other ranks and processes may take to exit after a failure.
    pub(super) grace_period: Duration,
}

impl Launch {
    /// Detects from the environment and `options` how this process was started.
    ///
    /// # Errors
    /// The errors of [`detect`].
    pub fn from_env(options: &LaunchOptions, cuda: &Cuda) -> Result<Self> {
        let variable = |name: &str| Some(var_os(name)?.to_string_lossy().into_owned());
        detect(&variable, options, cuda.usable())
    }

    /// Returns this process's part of a machine on which it may use `cores` CPU cores.
    pub fn share(&self, cores: usize) -> NodeSlice {
        let Processes { count, local_index, local_count, .. } = self.processes;
        NodeSlice {
            index: local_index,
            count: local_count,
            cores: self.cores.unwrap_or(cores / local_count).clamp(1, cores.max(1)),
            is_alone: count == 1,
            threads_per_rank: self.threads_per_rank,
        }
    }

    /// Decides where the ranks of this process run.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) when the requested devices or backend are not available; the
    /// text says what to do.
    pub fn place(&self, backend: BackendChoice, cuda: &Cuda) -> Result<Placement> {
        let placement = place(self.nproc, backend, cuda, &self.share(cores()))?
            .in_processes(self.processes.count, backend)?;
        placement.backend.check_library()?;
        placement.check_threads()?;
        self.binding(&placement)?;
        Ok(placement)
    }

    /// Decides which CPUs each rank of `placement` gets. The other processes of the machine have as many ranks each.
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) when the ranks cannot be bound as the user asks.
    #[doc(hidden)]
    pub fn binding(&self, placement: &Placement) -> Result<Binding> {
        let Processes { local_index, local_count, .. } = self.processes;
        let count = placement.devices.len();
        // A variable of the launcher may be any number.
        let before = local_index.saturating_mul(count);
        self.bind.binding(&LocalRanks::new(placement, before, local_count.saturating_mul(count)))
    }

    /// Places the ranks of this process, and waits for the rendezvous with the other processes, if there are any.
    ///
    /// # Errors
    /// The errors of [`Launch::place`]; [`Error::Input`] when the processes do not fit each other, or the machine
    /// lacks the network interface of `GLOO_SOCKET_IFNAME`; [`Error::Store`] when the store cannot be reached or served;
    /// [`Error::PeersMissing`] when others do not arrive within the timeout.
    pub fn join(self, cuda: &Cuda, options: JoinLaunchOptions) -> Result<JoinedLaunch> {
        check_version()?; // ahead of the store
        let mut placement = self.place(options.backend, cuda)?;
        let is_restart = self.parent.is_some() && self.restart_count > 0;
        if self.kind == LaunchKind::Spawned || is_restart {
            placement.note = None; // the parent process, or an earlier start, has printed it
        }
        let interfaces =
            var_os("GLOO_SOCKET_IFNAME").map(|value| value.to_string_lossy().into_owned());
        let timeout = options.timeout;
        let shared = options.shared_options;
        let world = match ProcessWorld::meet(&self, &placement, timeout, interfaces, shared)? {
            Some(world) if options.compare_clocks => Some(world.compare_clocks(timeout)?),
            world => world,
        };
        let world = world.map(Arc::new);
        let grace_period = options.grace_period.min(MAX_WAIT);
        let joined_launch = JoinedLaunch { launch: self, placement, world, grace_period };
        let world = joined_launch.world.as_ref();
        if let Some(interfaces) = world.and_then(|world| world.interfaces.as_deref()) {
            joined_launch.before_ranks(|| check_interfaces(interfaces))?;
        }
        Ok(joined_launch)
    }

    /// Returns a warning if this process is to serve the store under a name that resolves to a loopback address, as a
    /// line in Debian's `/etc/hosts` may cause: no other machine can connect. All processes may be on this one.
    pub fn warning(&self) -> Option<String> {
        let MasterEndpoint { addr, from, port, agent_store } = self.master.as_ref()?;
        let others = self.processes.index == 0 && self.nnodes.is_some_and(|nnodes| nnodes > 1);
        if *agent_store || !others || addr.parse::<IpAddr>().is_ok() {
            return None;
        }
        let found = (&addr[..], *port).to_socket_addrs().ok()?.next()?.ip();
        found.is_loopback().then(|| {
            format!(
                "{from}={addr} is the loopback address {found} here; if there are other machines, use one they can \
                 reach"
            )
        })
    }

    /// Writes `error` to the launcher's error file, if the launcher reads one, as torchrun does.
    ///
    /// # Errors
    /// When the file cannot be written; the text names it.
    pub fn report_failure(&self, error: &str) -> std::result::Result<(), String> {
        let Some(file) = &self.error_file else { return Ok(()) };
        write_error_file(file, error)
            .map_err(|unwritable| format!("{} cannot be written: {unwritable}", file.shown()))
    }
}

impl JoinedLaunch {
    /// Creates the launch of a process that starts the ranks of `placement` without others.
    pub(super) fn alone(placement: Placement) -> Self {
        let nproc = Nproc::Count(placement.devices.len());
        let launch = Launch::local(nproc, "a function call".into());
        Self { launch, placement, world: None, grace_period: Spawn::GRACE_PERIOD }
    }

    /// Returns this process's number, and how many processes there are.
    pub fn process(&self) -> [usize; 2] {
        self.world.as_ref().map_or([0, 1], |world| [world.map.mine, world.map.len()])
    }

    /// Returns how many ranks all processes have together.
    pub fn world_size(&self) -> usize {
        self.world.as_ref().map_or(self.placement.devices.len(), |world| world.world_size())
    }

    /// Returns the ranks of this process.
    pub fn ranks_here(&self) -> Range<usize> {
        self.world.as_ref().map_or(0..self.placement.devices.len(), |world| world.map.here())
    }

    /// Returns this machine's number, from 0.
    pub(super) fn node_rank(&self) -> usize {
        self.world.as_ref().map_or(0, |world| world.node_rank)
    }

    /// Returns the rank with this index among those of this process.
    pub(super) fn identity(&self, index: usize) -> RankIdentity {
        let first_local = self.world.as_ref().map_or(0, |world| world.me().first_local);
        RankIdentity {
            rank: self.ranks_here().start + index,
            local_rank: first_local + index,
            device: self.placement.devices[index],
            label: self.label(self.ranks_here().start + index).into(),
        }
    }

    /// Returns the device of any rank, for the user; with its process if that is another one.
    pub(super) fn label(&self, rank: usize) -> String {
        match &self.world {
            Some(world) => world.label(rank),
            None => self.placement.label(rank, 0),
        }
    }

    /// Returns the CPUs of each rank of this process; none if the ranks are not bound.
    pub(super) fn cpus(&self) -> Result<Vec<CpuList>> {
        let count = self.placement.devices.len();
        if count == 0 {
            return Ok(Vec::new());
        }
        let world = self.world.as_ref();
        let before = world.map_or(0, |world| world.ranks_before_on_machine());
        let on_machine = world.map_or(count, |world| world.ranks_on_machine());
        let ranks = LocalRanks::new(&self.placement, before, on_machine);
        Ok(match self.launch.bind.binding(&ranks)? {
            Binding::Bound(cpus) => cpus,
            Binding::Unbound(_) => Vec::new(),
        })
    }

    /// Creates what the ranks of this process need to join the group of all ranks.
    ///
    /// # Errors
    /// The errors of [`Bootstrap`] and of the connections to other processes.
    pub(super) fn bootstrap(&self, run: &Arc<RunContext>, backend: Backend) -> Result<Bootstrap> {
        let members = (0..self.world_size()).collect();
        match &self.world {
            Some(world) => world.bootstrap(run, backend, members),
            None => Bootstrap::within_process(backend, run, members),
        }
    }

    /// Returns how many machines there are.
    pub fn nnodes(&self) -> usize {
        self.world.as_ref().map_or(1, |world| world.nnodes)
    }

    /// Returns whether this is the process of rank 0, which reads and writes files for all.
    pub fn is_first(&self) -> bool {
        self.world.as_ref().is_none_or(|world| world.map.mine == 0)
    }

    /// Returns whether `--spawn=processes` has started this process.
    pub fn is_spawned(&self) -> bool {
        self.launch.kind == LaunchKind::Spawned
    }

    /// Returns notes for the user about the ranks, one per line; the process of rank 0 prints them.
    pub fn notes(&self) -> Vec<String> {
        let mut notes: Vec<String> = self.placement.note.iter().cloned().collect();
        notes.extend(binding_note());
        if let Some(world) = &self.world {
            let (ranks, processes) = (world.world_size(), world.map.len());
            let counts = format!("{ranks} ranks in {processes} processes");
            notes.extend((!self.is_spawned()).then_some(counts));
            notes.extend(world.notes());
        }
        notes
    }

    /// Runs `work` for this process, before its ranks start. If `work` fails, the other processes get the reason, as for
    /// a rank that fails; the processes of `--spawn=processes` get it from their parent process. The process that serves
    /// the store stays for that, at most for the grace period.
    ///
    /// # Errors
    /// The errors of `work`.
    pub fn before_ranks<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        work().inspect_err(|error| {
            let Some(world) = self.world.as_ref().filter(|_| !self.is_spawned()) else { return };
            // If this write fails, the others notice the failure as they would a killed process.
            let _ = world.heartbeat_monitor.report_failed_start(&error.to_string());
            let patience = self.grace_period;
            world.leave(Stay { patience, failed: true, asked_to_end: &|| false });
        })
    }

    /// Keeps the connections to the other processes until this process ends: stopping the store's server would take half a
    /// second.
    #[doc(hidden)] // for the program, which ends then
    pub fn stay_connected(&self) {
        std::mem::forget(self.world.clone());
    }

    /// Returns the ranks of this process, ready to start.
    pub fn spawn(&self) -> Spawn {
        Spawn::of(self.clone())
    }
}
