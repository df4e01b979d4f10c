//! How many ranks there are, and which device each gets.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tch::Device;

use super::Backend;
use crate::error::{Error, Result};
use crate::torch::cuda::Cuda;

/// How many ranks to start on this machine: `--nproc-per-node`, as torchrun has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nproc {
    /// One for each visible GPU, or for each CPU core where there is none.
    Auto,
    /// One for each visible GPU.
    Gpu,
    /// One for each CPU core, on the CPU.
    Cpu,
    /// So many.
    Count(usize),
}

/// More threads than any machine runs well.
const MOST_RANKS: usize = 1 << 16;

impl FromStr for Nproc {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Nproc::Auto),
            "gpu" => Ok(Nproc::Gpu),
            "cpu" => Ok(Nproc::Cpu),
            number => match number.parse() {
                Ok(count @ 1..=MOST_RANKS) => Ok(Nproc::Count(count)),
                _ => Err(Error::Input(format!(
                    "{text:?} is no number of ranks; use auto, gpu, cpu, or a number from 1 to \
                     {MOST_RANKS}"
                ))),
            },
        }
    }
}

/// What carries the tensors: `--backend`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BackendChoice {
    /// `nccl` for ranks on GPUs, `threaded` for ranks on the CPU.
    Auto,
    /// NCCL: one GPU a rank.
    Nccl,
    /// Shared memory: ranks on the CPU, or all ranks on the first visible GPU.
    Threaded,
}

/// Where the ranks of this machine run.
#[derive(Debug, Clone, PartialEq)]
pub struct Placement {
    /// What carries the tensors.
    pub backend: Backend,
    /// The device of each local rank.
    pub devices: Vec<Device>,
    /// How many GPUs are visible to the ranks; none to ranks on the CPU.
    pub gpu_count: usize,
    /// How many threads libtorch gets in each rank.
    pub threads_per_rank: usize,
    /// What the user should know about it, if anything.
    pub note: Option<String>,
}

/// Decides how many ranks there are and where they run.
///
/// `cores` is how many CPU cores this process may use.
///
/// # Errors
/// [`Error::Input`] when what was asked for is not there; it says what to do.
pub fn place(nproc: Nproc, choice: BackendChoice, cuda: &Cuda, cores: usize) -> Result<Placement> {
    let gpus = if cuda.problem.is_none() { cuda.gpus.len() } else { 0 };
    let on_gpus = gpus > 0 && nproc != Nproc::Cpu;
    let why_none = || match &cuda.problem {
        Some(problem) => problem.clone(),
        None => "no GPU is visible".into(),
    };

    let count = match nproc {
        Nproc::Auto | Nproc::Gpu if on_gpus => gpus,
        Nproc::Gpu => {
            return Err(Error::Input(format!(
                "--nproc-per-node gpu: {}; use cpu or a number for ranks on the CPU",
                why_none()
            )));
        }
        Nproc::Auto | Nproc::Cpu => cores,
        Nproc::Count(count) => count,
    };
    let threads_per_rank = (cores / count).max(1);

    if !on_gpus {
        if choice == BackendChoice::Nccl {
            let why = if gpus == 0 { why_none() } else { "ranks on the CPU were asked for".into() };
            return Err(Error::Input(format!(
                "--backend nccl needs a GPU for each rank: {why}; use --backend threaded"
            )));
        }
        let note = (nproc != Nproc::Cpu).then(|| {
            let ranks = if count == 1 { "1 rank" } else { &format!("{count} ranks") };
            let threads = if threads_per_rank == 1 {
                "1 thread".into()
            } else {
                format!("{threads_per_rank} threads")
            };
            format!("{}: {ranks} on the CPU, {threads} each", why_none())
        });
        return Ok(Placement {
            backend: Backend::Threaded,
            devices: vec![Device::Cpu; count],
            gpu_count: 0,
            threads_per_rank,
            note,
        });
    }

    let (backend, devices, note) = if choice == BackendChoice::Threaded {
        let note = (count > 1).then(|| format!("--backend threaded: {count} ranks share GPU 0"));
        (Backend::Threaded, vec![Device::Cuda(0); count], note)
    } else if count <= gpus {
        (Backend::Nccl, (0..count).map(Device::Cuda).collect(), None)
    } else {
        return Err(Error::Input(format!(
            "--nproc-per-node {count}: only {gpus} {} visible; use at most {gpus}, check \
             CUDA_VISIBLE_DEVICES, or let all ranks share GPU 0 with --backend threaded",
            if gpus == 1 { "GPU is" } else { "GPUs are" }
        )));
    };
    Ok(Placement { backend, devices, gpu_count: gpus, threads_per_rank, note })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus(count: usize) -> Cuda {
        let gpus = (0..count).map(|i| format!("GPU number {i}")).collect();
        Cuda { gpus, ..Cuda::default() }
    }

    fn refused(nproc: Nproc, choice: BackendChoice, cuda: &Cuda) -> String {
        place(nproc, choice, cuda, 8).unwrap_err().to_string()
    }

    #[test]
    fn one_rank_per_visible_gpu() {
        for nproc in [Nproc::Auto, Nproc::Gpu, Nproc::Count(4)] {
            let placement = place(nproc, BackendChoice::Auto, &gpus(4), 8).unwrap();
            assert_eq!(placement.backend, Backend::Nccl);
            assert_eq!(placement.devices, [0, 1, 2, 3].map(Device::Cuda));
            assert_eq!((placement.threads_per_rank, placement.note), (2, None));
        }
    }

    #[test]
    fn cpu_ranks_where_there_is_no_gpu() {
        let placement = place(Nproc::Auto, BackendChoice::Auto, &gpus(0), 8).unwrap();
        assert_eq!(placement.backend, Backend::Threaded);
        assert_eq!(placement.devices, [Device::Cpu; 8]);
        let note = placement.note.unwrap();
        assert_eq!(note, "no GPU is visible: 8 ranks on the CPU, 1 thread each");

        let placement = place(Nproc::Count(3), BackendChoice::Threaded, &gpus(0), 8).unwrap();
        assert_eq!((placement.devices.len(), placement.threads_per_rank), (3, 2));
        // More ranks than cores is fine on a CPU, and leaves each one thread.
        let placement = place(Nproc::Count(20), BackendChoice::Auto, &gpus(0), 8).unwrap();
        assert_eq!((placement.devices.len(), placement.threads_per_rank), (20, 1));
    }

    #[test]
    fn cpu_ranks_beside_gpus_when_asked_for() {
        let placement = place(Nproc::Cpu, BackendChoice::Auto, &gpus(2), 8).unwrap();
        assert_eq!((placement.devices.len(), placement.devices[0]), (8, Device::Cpu));
        assert_eq!(placement.note, None);
    }

    #[test]
    fn ranks_share_a_gpu_only_when_asked_to() {
        let error = refused(Nproc::Count(2), BackendChoice::Auto, &gpus(1));
        assert!(error.contains("only 1 GPU is visible; use at most 1"), "{error}");
        assert!(error.contains("--backend threaded"), "{error}");
        let placement = place(Nproc::Count(2), BackendChoice::Threaded, &gpus(1), 8).unwrap();
        assert_eq!(placement.devices, [Device::Cuda(0); 2]);
    }

    #[test]
    fn what_is_not_there_is_refused() {
        assert!(refused(Nproc::Gpu, BackendChoice::Auto, &gpus(0)).contains("no GPU is visible"));
        assert!(refused(Nproc::Auto, BackendChoice::Nccl, &gpus(0)).contains("needs a GPU"));
        assert!(refused(Nproc::Cpu, BackendChoice::Nccl, &gpus(2)).contains("were asked for"));
        let mut broken = gpus(2);
        broken.problem = Some("the driver is too old".into());
        assert!(refused(Nproc::Gpu, BackendChoice::Auto, &broken).contains("driver is too old"));
    }

    #[test]
    fn a_number_of_ranks() {
        assert_eq!("7".parse::<Nproc>().unwrap(), Nproc::Count(7));
        for bad in ["0", "-1", "two", "", "1.5"] {
            assert!(bad.parse::<Nproc>().is_err(), "{bad}");
        }
    }
}
