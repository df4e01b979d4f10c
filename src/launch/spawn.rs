//! `spawn`: a thread for each rank, and what happens when one of them fails.

mod supervisor;

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle, ScopedJoinHandle};
use std::time::Duration;

use crossbeam::channel::{Receiver, never};
use tch::Device;

use super::rank_thread::RankThread;
use super::stall::Notifier;
use super::{
    Backend, Joining, Launch, LaunchKind, LaunchOptions, Placement, ProcessWorld, Rank, SpawnError,
};
use crate::ffi;
use crate::runtime::{Fault, History, LONGEST, Stop};
use crate::telemetry::{LogFormat, Printer};

/// Runs `f` on `world_size` CPU ranks and returns their results in rank order: [`Spawn`] with its defaults.
///
/// ```
/// # fn main() -> anyhow::Result<()> {
/// let squares = ddp_mp::spawn(4, |rank| Ok(rank.rank() * rank.rank()))?;
/// assert_eq!(squares, [0, 1, 4, 9]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// As [`Spawn::run`].
pub fn spawn<T, F>(world_size: usize, f: F) -> Result<Vec<T>, Box<SpawnError>>
where
    T: Send + 'static,
    F: Fn(&Rank) -> anyhow::Result<T> + Send + Sync + 'static,
{
    Spawn::new(world_size).run(f)
}

/// Runs `f` on `world_size` CPU ranks as [`spawn`] does, and lets `f` and what it returns borrow from the caller.
///
/// ```
/// # fn main() -> anyhow::Result<()> {
/// let names = vec!["a".to_string(), "b".to_string()];
/// let borrowed: Vec<&str> = ddp_mp::spawn_scoped(2, |rank| Ok(names[rank.rank()].as_str()))?;
/// assert_eq!(borrowed, ["a", "b"]);
/// # Ok(())
/// # }
/// ```
///
/// # The price
/// The two differ in one case: another rank has failed, and a rank does not come back within the grace period, because it
/// computes or waits for something that is not of this crate. A thread cannot be killed.
///
/// * [`spawn`] returns the error and leaves the thread behind. That is why what it uses must be `'static`: the thread may
///   still use it.
/// * `spawn_scoped` cannot return while a thread may still use what it borrows, and waiting might never end. So
///   the failure is written to stderr and the process ends with exit code 1, without running destructors. PyTorch kills
///   the process of such a rank.
///
/// A program that must go on after every failure uses [`spawn`] and shares its data in an `Arc`.
///
/// # Errors
/// As [`Spawn::run_scoped`].
pub fn spawn_scoped<T, F>(world_size: usize, f: F) -> Result<Vec<T>, Box<SpawnError>>
where
    T: Send,
    F: Fn(&Rank) -> anyhow::Result<T> + Sync,
{
    Spawn::new(world_size).run_scoped(f)
}

/// The ranks of this process before they start: how many, on which devices, and how long they wait for each other.
///
/// [`Spawn::new`] has ranks on the CPU, [`Spawn::on`] one for each device, and [`Spawn::from_env`] those that the launcher
/// asks for. [`Spawn::run`] starts them and returns when all have ended.
///
/// ```
/// # fn main() -> anyhow::Result<()> {
/// use std::time::Duration;
///
/// use ddp_mp::prelude::*;
///
/// let sums = Spawn::new(2).timeout(Duration::from_secs(60)).run(|rank| {
///     let group = rank.init_process_group(rank.backend())?;
///     let mut tensor = Tensor::from_slice(&[rank.rank() as f32 + 1.0]);
///     group.all_reduce(&mut tensor, ReduceOp::Sum)?;
///     Ok(tensor.double_value(&[0]))
/// })?;
/// assert_eq!(sums, [3.0, 3.0]);
/// # Ok(())
/// # }
/// ```
///
/// Follows `torch.multiprocessing.spawn`, with threads in the place of processes:
///
/// * Nothing is pickled: `f` is shared, and what it captures exists once.
/// * The first rank that returns an error or panics ends the run. A thread cannot be killed, so the
///   others are asked to stop: every wait of this crate returns
///   [`Error::Cancelled`](crate::Error::Cancelled) at once, and they end at their next `?`. A rank that computes goes on until
///   its next collective. The error names each rank that does not come back within the grace period. The thread of such a
///   rank is left behind, so exit the process then; or use [`Spawn::run_scoped`], which does.
/// * What takes the process down (a segmentation fault, `abort`, the out-of-memory killer) takes all
///   ranks down. In exchange no rank can be orphaned.
/// * What `f` returns on each rank is handed to the caller, where PyTorch drops it.
#[derive(Debug, Clone)]
pub struct Spawn {
    devices: Vec<Device>,
    backend: Backend,
    threads_per_rank: usize,
    timeout: Duration,
    grace_period: Duration,
    fault: Option<Fault>,
    check_collectives: bool,
    world: Option<Arc<ProcessWorld>>,
    stall_warning: Duration,
    asks: Receiver<()>,
    tell: Notifier,
    stop: Option<Arc<Stop>>,
    trace: Option<PathBuf>,
    history: Option<Arc<OnceLock<History>>>,
    /// Where a failure is left for the launcher.
    launch: Option<Arc<Launch>>,
}

impl Spawn {
    /// `world_size` ranks on the CPU.
    pub fn new(world_size: usize) -> Self {
        Self::on(vec![Device::Cpu; world_size])
    }

    /// One rank for each of `devices`. Before GPUs can be used, [`cuda::load`](ffi::cuda::load) must
    /// have been called.
    pub fn on(devices: Vec<Device>) -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Self {
            threads_per_rank: (cores / devices.len().max(1)).max(1),
            backend: backend_of(&devices),
            devices,
            timeout: Self::TIMEOUT,
            grace_period: Self::GRACE_PERIOD,
            fault: None,
            check_collectives: false,
            world: None,
            stall_warning: Self::STALL_WARNING,
            asks: never(),
            tell: Notifier::new(|text| Printer::new(LogFormat::Text).info(text)),
            stop: None,
            trace: None,
            history: None,
            launch: None,
        }
    }

    /// The ranks of `placement`.
    pub fn at(placement: &Placement) -> Self {
        let Placement { devices, backend, threads_per_rank, .. } = placement;
        Self { backend: *backend, ..Self::on(devices.clone()) }.threads_per_rank(*threads_per_rank)
    }

    /// The ranks of this process as its launcher wants them: torchrun, Slurm's srun, mpirun, Kubeflow on Kubernetes, or a
    /// person who sets torchrun's flags as variables on each machine (`PET_NNODES=2 PET_NODE_RANK=0 MASTER_ADDR=node0`).
    /// Without a launcher there is a rank for each visible GPU, or one for each CPU core where no GPU is visible.
    ///
    /// The processes of the launch meet here, for at most [`Spawn::TIMEOUT`]. Notes go to stderr. If a rank fails, torchrun
    /// shows the reason. Use [`Rank::backend`] for the process group:
    ///
    /// ```no_run
    /// use ddp_mp::prelude::*;
    ///
    /// fn main() -> anyhow::Result<()> {
    ///     let sums = Spawn::from_env()?.run(|rank| {
    ///         let group = rank.init_process_group(rank.backend())?;
    ///         let mut tensor = Tensor::ones([1], (Kind::Float, rank.device()));
    ///         group.all_reduce(&mut tensor, ReduceOp::Sum)?; // as many as there are ranks in all processes
    ///         Ok(tensor.double_value(&[0]))
    ///     })?;
    ///     println!("{sums:?}"); // of the ranks of this process
    ///     Ok(())
    /// }
    /// ```
    ///
    /// A launch has one run: put all that the ranks do in one function. Call it first in `main`: it looks for GPUs ([`cuda::load`](ffi::cuda::load)), which libtorch does once. For other
    /// settings use [`Launch::from_env`](super::Launch::from_env) and [`Launch::join`](super::Launch::join).
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) when the variables contradict each other or the processes do not fit each
    /// other; [`Error::Store`](crate::Error::Store) and [`Error::PeersMissing`](crate::Error::PeersMissing) when the processes do not
    /// meet.
    pub fn from_env() -> crate::Result<Self> {
        let cuda = ffi::cuda::load();
        let launch = Arc::new(Launch::from_env(&LaunchOptions::default(), &cuda)?);
        let printer = Printer::new(LogFormat::Text);
        let note = |text: &str| printer.info(text);
        let joining = Joining { note: &note, ..Joining::default() };
        let launched = Launch::clone(&launch).join(&cuda, joining).inspect_err(|error| {
            leave_failure(&launch, &error.to_string(), note);
        })?;
        if launched.is_first() {
            launched.notes().iter().for_each(|text| note(text));
        }
        Ok(Self { launch: Some(launch), ..launched.spawn() })
    }

    /// Returns the name of the launcher that [`Spawn::from_env`] has found, such as `torchrun`; `None` without one.
    pub fn launcher(&self) -> Option<&'static str> {
        let kind = self.launch.as_ref()?.kind;
        (kind != LaunchKind::Local).then(|| kind.name())
    }

    /// Returns how many ranks there will be, in all processes.
    pub fn world_size(&self) -> usize {
        self.world.as_ref().map_or(self.devices.len(), |world| world.world_size())
    }

    /// How long a rank waits for the others, unless told otherwise: PyTorch's 10 minutes for NCCL.
    pub const TIMEOUT: Duration = Duration::from_secs(600);

    /// After how long in a collective who is missing is told, unless told otherwise.
    pub const STALL_WARNING: Duration = Duration::from_secs(10);

    /// How long ranks get to come back after a failure, unless told otherwise: PyTorch's 30 seconds.
    pub const GRACE_PERIOD: Duration = Duration::from_secs(30);

    /// How many threads libtorch uses in each rank; otherwise the cores, divided by the ranks.
    pub fn threads_per_rank(mut self, threads: usize) -> Self {
        self.threads_per_rank = threads;
        self
    }

    /// How long a rank waits in a collective for the others before that is an error; at most a hundred
    /// years.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout.min(LONGEST);
        self
    }

    /// How long the others get to come back after one rank has failed; at most a hundred years.
    pub fn grace_period(mut self, grace_period: Duration) -> Self {
        self.grace_period = grace_period.min(LONGEST);
        self
    }

    /// After how long in a collective `tell` hears who is missing there, once, instead of after
    /// [`Spawn::STALL_WARNING`] stderr. It may have several lines.
    pub fn stall_warning(
        mut self,
        limit: Duration,
        tell: impl Fn(&str) + Send + Sync + 'static,
    ) -> Self {
        self.stall_warning = limit.min(LONGEST);
        self.tell = Notifier::new(tell);
        self
    }

    /// Has whoever is told of stalls hear what each rank does, whenever something arrives in `asks`.
    pub fn dump_status_on(mut self, asks: Receiver<()>) -> Self {
        self.asks = asks;
        self
    }

    /// Writes what each rank has done, and when, to the file `path` for Perfetto and chrome://tracing, when all have
    /// ended, well or not; several processes write a file each. Whoever is told of stalls hears if that fails. Training
    /// steps are seen that begin with [`ProcessGroup::enter_step`](crate::ProcessGroup::enter_step).
    pub fn trace(self, path: impl Into<PathBuf>) -> Self {
        Self { trace: Some(path.into()), ..self }
    }

    /// Keeps more of what the ranks do, and leaves it in `history` when all have ended.
    pub(crate) fn history(self, history: Option<Arc<OnceLock<History>>>) -> Self {
        Self { history, ..self }
    }

    /// Makes the ranks part of a run of several processes, in which they come after those of the processes before.
    pub fn world(mut self, world: Option<Arc<ProcessWorld>>) -> Self {
        self.world = world;
        self
    }

    /// Lets the signals that ask `stop` also end the time for which this process serves the store to others.
    pub(crate) fn stop(self, stop: Arc<Stop>) -> Self {
        Self { stop: Some(stop), ..self }
    }

    /// Makes one rank fail, to see what happens.
    pub fn fault(mut self, fault: Option<Fault>) -> Self {
        self.fault = fault;
        self
    }

    /// Compares what the ranks call at every collective also with `nccl`, where that costs a little: a
    /// difference is then an error that says who called what, instead of a hang or worse. Other backends
    /// always do.
    pub fn check_collectives(mut self, check: bool) -> Self {
        self.check_collectives = check;
        self
    }

    /// Starts the ranks, runs `f` on each, and waits until all have ended. Returns the results of `f` from the ranks of
    /// this process, in rank order.
    ///
    /// # Errors
    /// The first failure of a rank, and which ranks did not come back; see [`Spawn`].
    pub fn run<T, F>(self, f: F) -> Result<Vec<T>, Box<SpawnError>>
    where
        T: Send + 'static,
        F: Fn(&Rank) -> anyhow::Result<T> + Send + Sync + 'static,
    {
        let f = Arc::new(f);
        let start = |builder: thread::Builder, rank: RankThread<T>| {
            let f = f.clone();
            builder.spawn(move || rank.main(&*f))
        };
        self.supervise(start, |thread: JoinHandle<()>| drop(thread.join()))
    }

    /// As [`Spawn::run`], but `f` and what it returns may borrow from the caller; see [`spawn_scoped`], also for what
    /// that costs.
    ///
    /// # Errors
    /// The first failure of a rank; see [`Spawn`]. If a rank does not come back within the grace period, it does not
    /// return: the failure is written to stderr, and the process ends with exit code 1.
    pub fn run_scoped<T, F>(self, f: F) -> Result<Vec<T>, Box<SpawnError>>
    where
        T: Send,
        F: Fn(&Rank) -> anyhow::Result<T> + Sync,
    {
        let f = &f;
        thread::scope(|scope| {
            let start = |builder: thread::Builder, rank: RankThread<T>| {
                builder.spawn_scoped(scope, move || rank.main(f))
            };
            let result =
                self.supervise(start, |thread: ScopedJoinHandle<'_, ()>| drop(thread.join()));
            if let Err(error) = &result
                && !error.stuck.is_empty()
            {
                // To return is to wait for its thread for ever, and to leave that behind is unsound.
                Printer::new(LogFormat::Text).info(&error.to_string());
                ffi::exit(1);
            }
            result
        })
    }
}

/// The backend that suits ranks on these devices of one process.
fn backend_of(devices: &[Device]) -> Backend {
    let mut gpus: Vec<usize> = devices
        .iter()
        .filter_map(|device| if let Device::Cuda(index) = device { Some(*index) } else { None })
        .collect();
    gpus.sort_unstable();
    gpus.dedup();
    let has_own = !devices.is_empty() && gpus.len() == devices.len();
    if has_own { Backend::Nccl } else { Backend::Threaded }
}

/// Leaves `error` for the launcher, and says so if that is not possible.
fn leave_failure(launch: &Launch, error: &str, note: impl Fn(&str)) {
    if let Err(unwritable) = launch.report_failure(error) {
        note(&unwritable);
    }
}
