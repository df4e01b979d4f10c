//! `spawn`: a thread for each rank, and the handling of a rank's failure.

mod stopping;
mod supervisor;
mod watching;

use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::{Receiver, never};
use tch::Device;

use super::{
    BindChoice, JoinLaunchOptions, JoinedLaunch, Launch, LaunchKind, LaunchOptions, NodeSlice,
    Placement, Rank, SpawnError,
};
use crate::error::Result;
use crate::events::{Observer, Observers};
use crate::ffi;
use crate::os;
use crate::process_group::{Backend, SimulatedCluster};
use crate::runtime::{Fault, MAX_WAIT, StopRequest};

/// Runs `f` on `world_size` CPU ranks and returns their results in rank order: [`Spawn`] with its defaults.
///
/// ```
/// # use ddp_mp_engine as ddp_mp;
/// # fn main() -> anyhow::Result<()> {
/// let squares = ddp_mp::spawn(4, |rank| Ok(rank.rank() * rank.rank()))?;
/// assert_eq!(squares, [0, 1, 4, 9]);
/// # Ok(())
/// # }
/// ```
///
/// Before ranks start, this has libtorch leave out kernels of cuDNN whose sums vary, in the whole process, as
/// `torch.backends.cudnn.deterministic` does.
///
/// # Errors
/// The errors of [`Spawn::run`].
pub fn spawn<T, F>(world_size: usize, f: F) -> Result<Vec<T>, Box<SpawnError>>
where
    T: Send + 'static,
    F: Fn(&Rank) -> anyhow::Result<T> + Send + Sync + 'static,
{
    Spawn::new(world_size).run(f)
}

/// The ranks of this process before they start: their number, their devices, and their timeouts.
///
/// [`Spawn::new`] has ranks on the CPU, [`Spawn::on`] one for each device, and [`Spawn::from_env`] those that the
/// launcher asks for. [`Spawn::run`] starts them and returns when all have ended.
///
/// ```
/// # use ddp_mp_engine as ddp_mp;
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
/// Follows `torch.multiprocessing.spawn`, with threads instead of processes:
///
/// * Nothing is pickled: `f` is shared, and what it captures exists once.
/// * The first rank that returns an error or panics ends the run. A thread cannot be killed, so the others are
///   asked to stop: every wait of this crate returns [`Error::Cancelled`](crate::Error::Cancelled) at once, and
///   they end at their next `?`. A rank that computes continues until its next collective. The error names each
///   rank that does not come back within the grace period. The thread of such a rank keeps running, so exit the
///   process then.
/// * A crash of the process (a segmentation fault, `abort`, the out-of-memory killer) ends all ranks. In exchange,
///   no rank can be orphaned.
/// * The caller gets the result of `f` from each rank; PyTorch drops it.
#[derive(Debug, Clone)]
pub struct Spawn {
    joined_launch: JoinedLaunch,
    timeout: Duration,
    fault: Option<Fault>,
    check_collectives: bool,
    simulated_cluster: Option<SimulatedCluster>,
    stall_warning: Duration,
    status_requests: Receiver<()>,
    observers: Observers,
    stop: Option<Arc<StopRequest>>,
    /// Whether the launcher gets the reason of a failure from here.
    leaves_error: bool,
}

/// The function of the ranks. A thread of a rank that does not come back keeps it, so it borrows nothing.
type RankFunction<T> = Arc<dyn Fn(&Rank) -> anyhow::Result<T> + Send + Sync>;

impl Spawn {
    /// Creates `world_size` ranks on the CPU.
    pub fn new(world_size: usize) -> Self {
        Self::on(vec![Device::Cpu; world_size])
    }

    /// Creates one rank for each of `devices`. Before GPUs can be used, [`cuda::load`](ffi::cuda::load) must have
    /// been called.
    pub fn on(devices: Vec<Device>) -> Self {
        let gpu_count = devices.iter().filter(|device| **device != Device::Cpu).count();
        Self::at(&Placement {
            backend: Backend::for_threads(&devices),
            gpu_count,
            threads_per_rank: NodeSlice::all(os::cores()).threads(devices.len(), gpu_count > 0),
            devices,
            note: None,
        })
    }

    /// Creates the ranks of `placement`.
    pub fn at(placement: &Placement) -> Self {
        Self::of(JoinedLaunch::alone(placement.clone()))
    }

    /// Creates the ranks of this process of a launch.
    pub(super) fn of(joined_launch: JoinedLaunch) -> Self {
        Self {
            joined_launch,
            timeout: Self::TIMEOUT,
            fault: None,
            check_collectives: false,
            simulated_cluster: None,
            stall_warning: Self::STALL_WARNING,
            status_requests: never(),
            observers: Observers::default(),
            stop: None,
            leaves_error: false,
        }
    }

    /// Creates the ranks of this process as its launcher asks: torchrun, Slurm's srun, mpirun, or Kubeflow on
    /// Kubernetes. A person can set torchrun's flags as variables on each machine instead
    /// (`PET_NNODES=2 PET_NODE_RANK=0 MASTER_ADDR=node0`). Without a launcher there is one rank for each visible
    /// GPU. If no GPU is visible, there is one for each CPU core.
    ///
    /// Waits for the other processes of the launch, for at most [`Spawn::TIMEOUT`]. Notes go to stderr. If a rank
    /// fails, torchrun shows the reason. Use [`Rank::backend`] for the process group:
    ///
    /// ```no_run
    /// # use ddp_mp_engine as ddp_mp;
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
    /// A launch has one run: put all the ranks' work in one function. Call this first in `main`: it looks for GPUs
    /// ([`cuda::load`](ffi::cuda::load)), which libtorch does once. For other settings use
    /// [`Launch::from_env`](super::Launch::from_env) and [`Launch::join`](super::Launch::join).
    ///
    /// # Errors
    /// [`Error::Input`](crate::Error::Input) when the variables contradict each other or the processes do
    /// not fit each other; [`Error::Store`](crate::Error::Store) and
    /// [`Error::PeersMissing`](crate::Error::PeersMissing) when the rendezvous of the processes fails.
    pub fn from_env() -> Result<Self> {
        let cuda = ffi::cuda::load();
        let launch = Launch::from_env(&LaunchOptions::default(), &cuda)?;
        let observers = Observers::default();
        launch.warning().iter().for_each(|text| observers.note(text));
        let joined_launch = launch.clone().join(&cuda, JoinLaunchOptions::default());
        let joined_launch = joined_launch.inspect_err(|error| {
            leave_error(&launch, &error.to_string(), &observers);
        })?;
        if joined_launch.is_first() {
            joined_launch.notes().iter().for_each(|text| observers.note(text));
        }
        Ok(Self { leaves_error: true, ..joined_launch.spawn() })
    }

    /// Returns the name of the launcher that [`Spawn::from_env`] has found, such as `torchrun`; `None` without one.
    pub fn launcher(&self) -> Option<&'static str> {
        let kind = self.joined_launch.launch.kind;
        (kind != LaunchKind::Local).then(|| kind.name())
    }

    /// Returns the index of this process, and how many processes there are.
    pub fn process(&self) -> [usize; 2] {
        self.joined_launch.process()
    }

    /// Returns how many ranks there will be, in all processes.
    pub fn world_size(&self) -> usize {
        self.joined_launch.world_size()
    }

    /// Default of [`Spawn::timeout`]: PyTorch's 10 minutes for NCCL.
    pub const TIMEOUT: Duration = Duration::from_secs(600);

    /// Default of [`Spawn::stall_warning`]: the time in a collective after which the missing ranks are reported.
    pub const STALL_WARNING: Duration = Duration::from_secs(10);

    /// Default of [`Spawn::grace_period`]: PyTorch's 30 seconds.
    pub const GRACE_PERIOD: Duration = Duration::from_secs(30);

    /// Sets how many threads libtorch uses in each rank. [`Placement::threads_per_rank`] says what the default is.
    pub fn threads_per_rank(mut self, threads: usize) -> Self {
        self.joined_launch.placement.threads_per_rank = threads;
        self
    }

    /// Sets the CPUs to which each rank is bound, before it allocates anything. A rank that cannot be bound as `core`
    /// asks fails.
    pub fn bind(mut self, bind: BindChoice) -> Self {
        self.joined_launch.launch.bind = bind;
        self
    }

    /// Sets the timeout: how long a rank waits in a collective for the others before that is an error; at most a
    /// hundred years.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout.min(MAX_WAIT);
        self
    }

    /// Sets how long the other ranks get to come back after one has failed; at most a hundred years.
    pub fn grace_period(mut self, grace_period: Duration) -> Self {
        self.joined_launch.grace_period = grace_period.min(MAX_WAIT);
        self
    }

    /// Sets the time in a collective after which a warning names the ranks that are missing there, once. The default is
    /// [`Spawn::STALL_WARNING`].
    pub fn stall_warning(mut self, limit: Duration) -> Self {
        self.stall_warning = limit.min(MAX_WAIT);
        self
    }

    /// Warns of what each rank does whenever something arrives in `requests`.
    pub fn dump_status_on(mut self, requests: Receiver<()>) -> Self {
        self.status_requests = requests;
        self
    }

    /// Tells `observer` what happens, after those that there are: notes and warnings, which go to stderr otherwise, what the
    /// ranks do, and what a [`Trainer`](crate::trainer::Trainer) measures that gets [`Rank::observers`].
    pub fn observe(mut self, observer: impl Observer + 'static) -> Self {
        self.observers.add(Arc::new(observer));
        self
    }

    /// Tells these observers what happens, and no others.
    #[doc(hidden)]
    pub fn observers(self, observers: Observers) -> Self {
        Self { observers, ..self }
    }

    /// Lets signals that set `stop` end a run whose ranks hang, and the time for which this process serves the store to
    /// others.
    #[doc(hidden)]
    pub fn stop_request(self, stop: Arc<StopRequest>) -> Self {
        Self { stop: Some(stop), ..self }
    }

    /// Injects a fault into one rank.
    pub fn fault(mut self, fault: Option<Fault>) -> Self {
        self.fault = fault;
        self
    }

    /// Makes the `nccl` backend also compare what the ranks call at every collective, at a small cost. A difference
    /// is then an error that names the calls of the ranks, instead of a hang or worse. Other backends always compare.
    pub fn check_collectives(mut self, check: bool) -> Self {
        self.check_collectives = check;
        self
    }

    /// Makes each all_reduce of all ranks take as long as on the network of `cluster`, on CPU ranks. The results stay the
    /// same.
    pub fn simulate_cluster(mut self, cluster: SimulatedCluster) -> Self {
        self.simulated_cluster = Some(cluster);
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
        self.supervise(&(Arc::new(f) as RankFunction<T>))
    }
}

/// Writes `error` to the launcher's error file, and notes it if that is not possible.
fn leave_error(launch: &Launch, error: &str, observers: &Observers) {
    if let Err(unwritable) = launch.report_failure(error) {
        observers.warn(unwritable);
    }
}
