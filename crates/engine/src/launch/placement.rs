//! The number of ranks, and the device of each.

use std::fmt;
use std::str::FromStr;

use serde_with::SerializeDisplay;
use tch::Device;

use crate::error::{Error, Result, counted};
use crate::ffi::cuda::Cuda;
use crate::process_group::{Backend, Devices, device_name};

/// The number of ranks to start on this machine: `--nproc-per-node`, as in torchrun.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Nproc {
    /// One for each visible GPU; without a GPU, one for each CPU core.
    #[default]
    Auto,
    /// One for each visible GPU.
    Gpu,
    /// One for each CPU core, on the CPU.
    Cpu,
    /// This number of ranks.
    Count(usize),
}

/// The most ranks of a process: more threads than any machine runs well. Linux allows a process 65530 mappings, and
/// a thread takes four.
const MOST_RANKS: usize = 1 << 13;

/// With more ranks than this on each core, the user gets a note that this is slow.
const FEW_PER_CORE: usize = 4;

impl FromStr for Nproc {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Nproc::Auto),
            "gpu" => Ok(Nproc::Gpu),
            "cpu" => Ok(Nproc::Cpu),
            number => match number.parse() {
                Ok(count @ 1..=MOST_RANKS) => Ok(Nproc::Count(count)),
                _ => Err(Error::usage(format!(
                    "{text:?} is not a number of ranks; use auto, gpu, cpu, or a number from 1 to {MOST_RANKS}"
                ))),
            },
        }
    }
}

/// The communication backend: `--backend`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SerializeDisplay)]
pub enum BackendChoice {
    /// The default for the ranks' devices and processes. `nccl` for ranks on GPUs. For ranks on the CPU, `threaded`
    /// in one process and `gloo` in several.
    Auto,
    /// This backend.
    Given(Backend),
}

impl BackendChoice {
    /// Returns the given backend; `None` if the user gave none.
    pub fn given(self) -> Option<Backend> {
        match self {
            Self::Auto => None,
            Self::Given(backend) => Some(backend),
        }
    }
}

impl fmt::Display for BackendChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.given().map_or("auto", Backend::name))
    }
}

impl FromStr for BackendChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == "auto" { Ok(Self::Auto) } else { text.parse().map(Self::Given) }
    }
}

/// The part of the machine that a process has: all of it, unless a launcher has started several processes there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeSlice {
    /// The process's number on its machine, from 0.
    pub index: usize,
    /// How many processes there are on the machine.
    pub count: usize,
    /// How many CPU cores this process may use.
    pub cores: usize,
    /// Whether the run has no other process, on no machine.
    pub is_alone: bool,
    /// How many threads libtorch uses in each rank (`OMP_NUM_THREADS`). If `None`, [`Placement::threads_per_rank`] says how
    /// many there are.
    pub threads_per_rank: Option<usize>,
}

impl NodeSlice {
    /// Returns the part of a process that is alone on its machine and may use `cores` CPU cores.
    pub fn all(cores: usize) -> Self {
        Self { index: 0, count: 1, cores, is_alone: true, threads_per_rank: None }
    }

    /// Returns how many threads libtorch uses in each of `count` ranks of this process.
    pub(super) fn threads(&self, count: usize, on_gpus: bool) -> usize {
        let divides_cores = on_gpus || (self.is_alone && count == 1);
        let default = if divides_cores { (self.cores / count.max(1)).max(1) } else { 1 };
        self.threads_per_rank.unwrap_or(default)
    }

    /// Returns how many of `gpus` visible GPUs belong to this process; `None` if they cannot be divided equally.
    fn count_gpus(&self, gpus: usize) -> Option<usize> {
        match gpus {
            // The launcher shows each process only its own GPU.
            1 => Some(1),
            _ if gpus.is_multiple_of(self.count) => Some(gpus / self.count),
            _ => None,
        }
    }

    /// Returns the first GPU of this process, which uses `count` of `gpus` visible ones; `None` if there are too
    /// few.
    ///
    /// Process `l` takes the GPU with index `l * count` and those after it. If the launcher shows each process only its
    /// own GPUs (`torchrun --virtual-local-rank`, `srun --gpus-per-task`), their indices start from 0 in each process.
    fn first_gpu(&self, count: usize, gpus: usize) -> Option<usize> {
        if self.count.checked_mul(count).is_some_and(|all| all <= gpus) {
            return Some(self.index * count);
        }
        (count == gpus).then_some(0)
    }
}

/// Where the ranks of this process run.
#[derive(Debug, Clone, PartialEq)]
pub struct Placement {
    /// The communication backend.
    pub backend: Backend,
    /// The device of each of its ranks.
    pub devices: Vec<Device>,
    /// How many GPUs are visible to the ranks; 0 for ranks on the CPU.
    pub gpu_count: usize,
    /// How many threads libtorch uses in each rank. By default ranks on the CPU have one: libtorch's sums depend on the number
    /// of threads in their last bits, and the number of cores differs from machine to machine. A rank without others has all
    /// cores, and ranks on GPUs divide them.
    pub threads_per_rank: usize,
    /// A note on the placement for the user, if there is one.
    pub note: Option<String>,
}

/// Decides how many ranks there are and where they run.
///
/// `share` is this process's part of the machine.
///
/// # Errors
/// [`Error::Input`] when the requested devices or backend are not available; the text says what to do.
pub fn place(
    nproc: Nproc,
    choice: BackendChoice,
    cuda: &Cuda,
    share: &NodeSlice,
) -> Result<Placement> {
    let request = Request { nproc, given: choice.given(), cuda, gpus: cuda.usable(), share };
    let count = request.count_ranks()?;
    let threads_per_rank = share.threads(count, request.is_for_gpus());
    if request.is_for_gpus() {
        let (backend, devices, note) = request.choose_gpus(count)?;
        return Ok(Placement { backend, devices, gpu_count: request.gpus, threads_per_rank, note });
    }
    let (backend, devices) = request.choose_cpu(count)?;
    let note = (nproc != Nproc::Cpu).then(|| request.cpu_note(count, threads_per_rank));
    Ok(Placement { backend, devices, gpu_count: 0, threads_per_rank, note })
}

/// What the user has asked for, and what the process has for it.
struct Request<'a> {
    nproc: Nproc,
    given: Option<Backend>,
    cuda: &'a Cuda,
    /// How many GPUs are visible and usable.
    gpus: usize,
    share: &'a NodeSlice,
}

impl Request<'_> {
    /// Returns whether the ranks run on GPUs.
    fn is_for_gpus(&self) -> bool {
        self.gpus > 0 && self.nproc != Nproc::Cpu
    }

    /// Decides how many ranks there are.
    fn count_ranks(&self) -> Result<usize> {
        let Self { share, gpus, .. } = *self;
        match self.nproc {
            Nproc::Auto | Nproc::Gpu if self.is_for_gpus() => {
                share.count_gpus(gpus).ok_or_else(|| {
                    Error::unsupported(format!(
                        "{gpus} GPUs are visible to each of {} processes on this machine, and cannot be divided \
                         equally; use --nproc-per-node with the number of ranks in each process",
                        share.count
                    ))
                })
            }
            Nproc::Gpu => Err(Error::unsupported(format!(
                "--nproc-per-node gpu: {}; use cpu or a number for ranks on the CPU",
                self.why_no_gpu()
            ))),
            Nproc::Auto | Nproc::Cpu => Ok(share.cores),
            Nproc::Count(count) => Ok(count),
        }
    }

    /// Chooses the backend of `count` ranks on the CPU. Returns also the device of each.
    fn choose_cpu(&self, count: usize) -> Result<(Backend, Vec<Device>)> {
        let devices = vec![Device::Cpu; count];
        if let Some(backend) = self.given.filter(|it| !it.devices().include(&devices)) {
            return Err(self.needs_gpus(backend));
        }
        let within = self.given.filter(|backend| backend.works_within_process());
        Ok((within.unwrap_or_else(|| Backend::for_threads(&devices)), devices))
    }

    /// Chooses the backend and the GPUs of `count` ranks. Returns also a note if they share GPUs.
    fn choose_gpus(&self, count: usize) -> Result<(Backend, Vec<Device>, Option<String>)> {
        let Self { given, share, gpus, .. } = *self;
        let from = |first: usize| (first..first + count).map(Device::Cuda).collect::<Vec<_>>();
        if let Some(backend) = given.filter(|it| it.devices() == Devices::Cpu) {
            return Err(Error::unsupported(format!(
                "--backend {} is for ranks on the CPU; use --nproc-per-node cpu, or --backend {}",
                backend.name(),
                Backend::for_threads(&from(0)).name()
            )));
        }
        if let Some(backend) = given.filter(|it| it.devices() == Devices::CpuOrSharedGpu) {
            let gpu = share.first_gpu(1, gpus).unwrap_or(0);
            let note = (count > 1).then(|| shared_note(backend, count, &format!("GPU {gpu}")));
            return Ok((backend, vec![Device::Cuda(gpu); count], note));
        }
        if let Some(first) = share.first_gpu(count, gpus) {
            let devices = from(first);
            return Ok((given.unwrap_or_else(|| Backend::for_threads(&devices)), devices, None));
        }
        // There is no GPU for each rank: the processes share all, if the backend can.
        let Some(backend) = given else { return Err(self.too_few_gpus(count, "")) };
        if let Err(why) = backend.check_shared_gpu(share.count > 1) {
            return Err(self.too_few_gpus(count, &format!(", and {why}")));
        }
        let first = share.index * count;
        let devices = (first..first + count).map(|rank| Device::Cuda(rank % gpus)).collect();
        let shared = if gpus == 1 { "GPU 0".into() } else { format!("{gpus} GPUs") };
        Ok((backend, devices, Some(shared_note(backend, share.count * count, &shared))))
    }

    /// Returns why no rank can run on a GPU.
    fn why_no_gpu(&self) -> String {
        self.cuda.problem.clone().unwrap_or_else(|| "no GPU is visible".into())
    }

    /// Returns the note that the ranks run on the CPU, because there is no GPU.
    fn cpu_note(&self, count: usize, threads: usize) -> String {
        let of_all = self.share.cores / count;
        let why = match self.share.threads_per_rank {
            Some(_) => " (OMP_NUM_THREADS)".into(),
            None if of_all > threads => format!(" (OMP_NUM_THREADS={of_all} uses all cores)"),
            None => String::new(),
        };
        let (ranks, threads) = (counted(count, "rank"), counted(threads, "thread"));
        let slow = oversubscribed(count, self.share.cores).unwrap_or_default();
        let each = if count == 1 { "" } else { " each" };
        format!("{}: {ranks} on the CPU, {threads}{each}{why}{slow}", self.why_no_gpu())
    }

    /// Returns the error that `backend` was asked for ranks on the CPU.
    fn needs_gpus(&self, backend: Backend) -> Error {
        let why = match self.gpus {
            0 => self.why_no_gpu(),
            _ => "ranks on the CPU were asked for".into(),
        };
        Error::unsupported(format!(
            "--backend {} needs a GPU for each rank: {why}; leave --backend out",
            backend.name()
        ))
    }

    /// Returns the error that there are too few GPUs for `count` ranks in each process. `why_not_shared` says why the ranks
    /// cannot share them, if the user has given a backend.
    fn too_few_gpus(&self, count: usize, why_not_shared: &str) -> Error {
        let gpus = self.gpus;
        let NodeSlice { index, count: processes, .. } = *self.share;
        Error::unsupported(if processes > 1 {
            format!(
                "process {index} of {processes} on this machine: {processes} processes with {} each need {} GPUs, \
                 and {gpus} {} visible{why_not_shared}; start fewer processes or ranks, or check CUDA_VISIBLE_DEVICES",
                counted(count, "rank"),
                processes * count,
                if gpus == 1 { "is" } else { "are" }
            )
        } else {
            format!(
                "--nproc-per-node {count}: only {gpus} {} visible{why_not_shared}; use at most {gpus}, check \
                 CUDA_VISIBLE_DEVICES, or let all ranks share GPU 0 with --backend threaded",
                if gpus == 1 { "GPU is" } else { "GPUs are" }
            )
        })
    }
}

/// The most threads that may share a GPU with NCCL: the kernels of all of them have to be on it at once, with up to 32 blocks
/// each.
const NCCL_THREADS_PER_GPU: usize = 4;

/// Returns the note that `ranks` ranks use the same GPUs, `shared`.
fn shared_note(backend: Backend, ranks: usize, shared: &str) -> String {
    format!("--backend {}: {ranks} ranks share {shared}", backend.name())
}

/// Returns the note that many ranks share few cores; `None` if they do not.
fn oversubscribed(ranks: usize, cores: usize) -> Option<String> {
    let cores_are = if cores == 1 { "core is" } else { "cores are" };
    (ranks > FEW_PER_CORE * cores).then(|| {
        format!(
            "; only {cores} CPU {cores_are} available, so about {} ranks take turns on each core: the results are \
             right, but more ranks make this run slower, not faster",
            ranks / cores
        )
    })
}

impl Placement {
    /// Returns the label of the rank at this index, for the user: its device type and its local rank, such as
    /// `GPU:1`. The first rank has the local rank `first_local`. A rank that shares its GPU has the index of that instead.
    pub(crate) fn label(&self, index: usize, first_local: usize) -> String {
        let device = self.devices[index];
        let is_gpu = matches!(device, Device::Cuda(_));
        if is_gpu && self.devices.iter().filter(|other| **other == device).count() > 1 {
            return device_name(device);
        }
        format!("{}:{}", if is_gpu { "GPU" } else { "CPU" }, first_local + index)
    }

    /// Returns the labels of all ranks; see `label`.
    #[doc(hidden)]
    pub fn labels(&self, first_local: usize) -> Vec<String> {
        (0..self.devices.len()).map(|index| self.label(index, first_local)).collect()
    }

    /// Checks that the ranks can be threads of one process.
    ///
    /// # Errors
    /// [`Error::Input`] if too many of them share a GPU.
    pub(crate) fn check_threads(&self) -> Result<()> {
        let on_first = self.devices.iter().filter(|device| **device == self.devices[0]).count();
        if self.backend.devices() != Devices::OwnGpu || on_first <= NCCL_THREADS_PER_GPU {
            return Ok(());
        }
        Err(Error::unsupported(format!(
            "--backend {}: at most {NCCL_THREADS_PER_GPU} threads can share a GPU, and {on_first} would; use fewer ranks, \
             --spawn=processes, or --backend threaded",
            self.backend.name()
        )))
    }

    /// Adapts the placement to a run of `count` processes.
    ///
    /// # Errors
    /// [`Error::Input`] for a backend that does not work across processes.
    pub fn in_processes(self, count: usize, choice: BackendChoice) -> Result<Self> {
        let given = choice.given();
        if count == 1 {
            let Some(backend) = given.filter(|backend| !backend.works_within_process()) else {
                return Ok(self);
            };
            let known = self.note.map_or(String::new(), |note| note + "; ");
            let note = format!(
                "{known}--backend {} has no effect in one process: its ranks share memory",
                backend.name()
            );
            return Ok(Self { note: Some(note), ..self });
        }
        let suits = given.map_or_else(|| Backend::for_processes(&self.devices), Some);
        match suits.filter(|backend| backend.works_between_processes()) {
            Some(backend) => Ok(Self { backend, ..self }),
            None => Err(Error::unsupported(format!(
                "--backend {} stays within one process, and there are {count}; use {}",
                suits.unwrap_or(self.backend).name(),
                Backend::for_processes(&self.devices)
                    .map_or_else(Backend::names_between_processes, |backend| backend
                        .name()
                        .to_owned())
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NCCL: BackendChoice = BackendChoice::Given(Backend::Nccl);
    const THREADED: BackendChoice = BackendChoice::Given(Backend::Threaded);

    fn gpus(count: usize) -> Cuda {
        let gpus = (0..count).map(|i| format!("GPU number {i}")).collect();
        Cuda { gpus, ..Cuda::default() }
    }

    fn refused(nproc: Nproc, choice: BackendChoice, cuda: &Cuda) -> String {
        place(nproc, choice, cuda, &NodeSlice::all(8)).unwrap_err().to_string()
    }

    #[test]
    fn auto_places_one_rank_on_each_visible_gpu() {
        for nproc in [Nproc::Auto, Nproc::Gpu, Nproc::Count(4)] {
            let placement =
                place(nproc, BackendChoice::Auto, &gpus(4), &NodeSlice::all(8)).unwrap();
            assert_eq!(placement.backend, Backend::Nccl);
            assert_eq!(placement.devices, [0, 1, 2, 3].map(Device::Cuda));
            assert_eq!((placement.threads_per_rank, placement.note), (2, None));
        }
    }

    #[test]
    fn auto_without_gpus_places_one_rank_on_each_core() {
        let placement =
            place(Nproc::Auto, BackendChoice::Auto, &gpus(0), &NodeSlice::all(8)).unwrap();
        assert_eq!(placement.backend, Backend::Threaded);
        assert_eq!(placement.devices, [Device::Cpu; 8]);
        let note = placement.note.unwrap();
        assert_eq!(note, "no GPU is visible: 8 ranks on the CPU, 1 thread each");

        let placement = place(Nproc::Count(3), THREADED, &gpus(0), &NodeSlice::all(8)).unwrap();
        assert_eq!((placement.devices.len(), placement.threads_per_rank), (3, 1));
        let note = placement.note.unwrap();
        assert!(note.ends_with("1 thread each (OMP_NUM_THREADS=2 uses all cores)"), "{note}");
        let one = place(Nproc::Count(1), THREADED, &gpus(0), &NodeSlice::all(8)).unwrap();
        assert_eq!(one.threads_per_rank, 8);
        // More ranks than cores are fine on a CPU; each gets one thread.
        let placement =
            place(Nproc::Count(20), BackendChoice::Auto, &gpus(0), &NodeSlice::all(8)).unwrap();
        assert_eq!((placement.devices.len(), placement.threads_per_rank), (20, 1));
    }

    #[test]
    fn oversubscribed_cores_are_noted() {
        let note = |ranks, cores| {
            let share = NodeSlice::all(cores);
            let placement = place(Nproc::Count(ranks), BackendChoice::Auto, &gpus(0), &share);
            placement.unwrap().note.unwrap()
        };
        assert_eq!(note(8, 2), "no GPU is visible: 8 ranks on the CPU, 1 thread each");
        assert_eq!(
            note(1000, 2),
            "no GPU is visible: 1000 ranks on the CPU, 1 thread each; only 2 CPU cores are available, so about 500 \
             ranks take turns on each core: the results are right, but more ranks make this run slower, not faster"
        );
        assert!(note(5, 1).contains("; only 1 CPU core is available, so about 5 ranks take turns"));
    }

    #[test]
    fn nproc_cpu_ignores_visible_gpus() {
        let placement =
            place(Nproc::Cpu, BackendChoice::Auto, &gpus(2), &NodeSlice::all(8)).unwrap();
        assert_eq!((placement.devices.len(), placement.devices[0]), (8, Device::Cpu));
        assert_eq!(placement.note, None);
    }

    #[test]
    fn ranks_share_a_gpu_only_with_the_threaded_backend() {
        let error = refused(Nproc::Count(2), BackendChoice::Auto, &gpus(1));
        assert!(error.contains("only 1 GPU is visible; use at most 1"), "{error}");
        assert!(error.contains("--backend threaded"), "{error}");
        let placement = place(Nproc::Count(2), THREADED, &gpus(1), &NodeSlice::all(8)).unwrap();
        assert_eq!(placement.devices, [Device::Cuda(0); 2]);
    }

    /// Places the ranks of process `index` of `count` on a machine, with 4 cores each.
    fn shared(index: usize, count: usize, nproc: Nproc, cuda: &Cuda) -> Result<Placement> {
        let share =
            NodeSlice { index, count, cores: 4, is_alone: count == 1, threads_per_rank: None };
        place(nproc, BackendChoice::Auto, cuda, &share)
    }

    #[test]
    fn processes_of_a_node_divide_its_gpus() {
        let devices = |index, count, nproc, visible| {
            let devices = shared(index, count, nproc, &gpus(visible)).unwrap().devices;
            let index = |device| match device {
                Device::Cuda(index) => index,
                other => panic!("{other:?}"),
            };
            devices.into_iter().map(index).collect::<Vec<_>>()
        };
        // One rank in each of four, and two ranks in each of two.
        assert_eq!(devices(2, 4, Nproc::Count(1), 4), [2]);
        assert_eq!(devices(1, 2, Nproc::Count(2), 4), [2, 3]);
        assert_eq!(devices(1, 2, Nproc::Gpu, 4), [2, 3]);
        // Each process sees only its own GPUs.
        assert_eq!(devices(2, 4, Nproc::Count(1), 1), [0]);
        assert_eq!(devices(2, 4, Nproc::Gpu, 1), [0]);
        assert_eq!(devices(1, 2, Nproc::Count(2), 2), [0, 1]);
        // There are more GPUs than are needed.
        assert_eq!(devices(1, 2, Nproc::Count(1), 8), [1]);

        let refused = |index, count, nproc, visible| {
            shared(index, count, nproc, &gpus(visible)).unwrap_err().to_string()
        };
        // Every process of the machine fails alike, so that none waits for the others.
        for index in 0..4 {
            assert_eq!(
                refused(index, 4, Nproc::Count(1), 3),
                format!(
                    "process {index} of 4 on this machine: 4 processes with 1 rank each need 4 GPUs, and 3 are \
                     visible; start fewer processes or ranks, or check CUDA_VISIBLE_DEVICES"
                )
            );
        }
        assert!(refused(0, 2, Nproc::Count(2), 3).contains("with 2 ranks each need 4 GPUs"));
        assert!(refused(0, 2, Nproc::Gpu, 3).contains("3 GPUs are visible to each of 2 processes"));
    }

    #[test]
    fn ranks_on_cpus_have_one_thread_in_every_layout() {
        let threads = |count, nproc, visible| {
            shared(0, count, nproc, &gpus(visible)).unwrap().threads_per_rank
        };
        for nproc in [Nproc::Count(1), Nproc::Count(2), Nproc::Cpu, Nproc::Count(9)] {
            assert_eq!(threads(2, nproc, 0), 1);
        }
        assert_eq!((threads(1, Nproc::Count(1), 0), threads(1, Nproc::Count(2), 0)), (4, 1));
        // GPUs compute, and the CPUs only help.
        assert_eq!((threads(2, Nproc::Count(1), 4), threads(2, Nproc::Count(2), 4)), (4, 2));
        let share = NodeSlice { threads_per_rank: Some(3), ..NodeSlice::all(8) };
        let placement = place(Nproc::Count(2), BackendChoice::Auto, &gpus(0), &share).unwrap();
        assert_eq!(placement.threads_per_rank, 3);
    }

    #[test]
    fn missing_gpus_are_refused() {
        assert!(refused(Nproc::Gpu, BackendChoice::Auto, &gpus(0)).contains("no GPU is visible"));
        assert!(refused(Nproc::Auto, NCCL, &gpus(0)).contains("needs a GPU"));
        assert!(refused(Nproc::Cpu, NCCL, &gpus(2)).contains("were asked for"));
        let mut broken = gpus(2);
        broken.problem = Some("the driver is too old".into());
        assert!(refused(Nproc::Gpu, BackendChoice::Auto, &broken).contains("driver is too old"));
    }

    #[test]
    fn nproc_parses_positive_integers_only() {
        assert_eq!("7".parse::<Nproc>().unwrap(), Nproc::Count(7));
        for bad in ["0", "-1", "two", "", "1.5"] {
            assert!(bad.parse::<Nproc>().is_err(), "{bad}");
        }
    }
}
