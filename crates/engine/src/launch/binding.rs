//! The CPUs of each rank: `--bind`.
//!
//! A bound rank stays on its CPUs, and so do the threads that it starts: loader workers, the communication thread,
//! libtorch's OpenMP threads. The threads of the network serve all ranks of the process, and are not bound.

use std::ops::Range;

use serde_with::SerializeDisplay;
use strum::{Display, EnumString, VariantNames};
use tch::Device;

use super::Placement;
use crate::error::{Error, Result, counted};
use crate::os::affinity::{CpuList, Topology};

/// The CPUs to which each rank is bound: `--bind`.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Display, EnumString, VariantNames, SerializeDisplay,
)]
#[strum(serialize_all = "lowercase")]
pub enum BindChoice {
    /// `Core` for two or more ranks on the CPU, if each of their threads gets a CPU. Otherwise `None`.
    #[default]
    Auto,
    /// All CPUs that the process may use.
    None,
    /// An equal share of these CPUs, for this rank alone. The SMT siblings of a core stay together where possible.
    Core,
}

/// The ranks that may share a machine's CPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LocalRanks {
    /// The local ranks of this process's ranks: their numbers on the machine, from 0.
    pub ranks: Range<usize>,
    /// The number of ranks on the machine.
    pub on_machine: usize,
    /// The number of threads that libtorch uses per rank.
    pub threads: usize,
    pub device: Device,
}

impl LocalRanks {
    /// Returns the ranks of `placement`, which has at least one. `before` ranks of the machine, which has `on_machine` in
    /// all, come before them.
    pub(super) fn new(placement: &Placement, before: usize, on_machine: usize) -> Self {
        Self {
            ranks: before..before.saturating_add(placement.devices.len()),
            on_machine,
            threads: placement.threads_per_rank,
            device: placement.devices[0],
        }
    }
}

/// The result of a [`BindChoice`] on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
#[doc(hidden)]
pub enum Binding {
    /// The CPUs of each rank of this process.
    Bound(Vec<CpuList>),
    /// No rank is bound, for this reason.
    Unbound(String),
}

impl BindChoice {
    /// Decides which CPUs each of `ranks` gets. The calling thread must not be bound to a rank's CPUs.
    ///
    /// # Errors
    /// [`Error::Input`] where `core` is impossible; the text says why.
    pub(crate) fn binding(self, ranks: &LocalRanks) -> Result<Binding> {
        let binding = match Topology::read() {
            Ok(topology) => self.decide(&topology, ranks),
            Err(error) => Err(format!("cannot read which CPUs this process may use: {error}")),
        };
        match binding {
            Err(reason) if matches!(self, Self::Auto | Self::None) => Ok(Binding::Unbound(reason)),
            binding => {
                binding.map_err(|reason| Error::unsupported(format!("--bind {self}: {reason}")))
            }
        }
    }

    /// Binds the calling thread, a rank's, to `cpus`.
    ///
    /// # Errors
    /// [`Error::Input`] when the system refuses; with `auto` the rank then runs unbound.
    pub(crate) fn bind_this_thread(self, cpus: &CpuList) -> Result<()> {
        match cpus.bind_this_thread() {
            Err(error) if self != Self::Auto => Err(Error::unsupported(format!(
                "--bind {self}: cannot bind a rank to CPUs {cpus}: {error}; use --bind none"
            ))),
            _ => Ok(()),
        }
    }

    /// Returns the CPUs of the ranks, or why they cannot be bound.
    fn decide(self, topology: &Topology, ranks: &LocalRanks) -> Result<Binding, String> {
        let LocalRanks { ranks, on_machine, threads, device } = ranks;
        let (allowed, cpus) = (&topology.allowed, topology.allowed.0.len());
        // A launcher has given this process a part of the machine. Other processes have other parts.
        let is_part = allowed.0.len() < topology.online.0.len();
        let (ranks, count) =
            if is_part { (0..ranks.len(), ranks.len()) } else { (ranks.clone(), *on_machine) };
        match self {
            Self::None => Ok(Binding::Unbound("--bind none".into())),
            Self::Auto if *device != Device::Cpu => {
                Ok(Binding::Unbound("auto binds ranks on the CPU only".into()))
            }
            Self::Auto if count == 1 => {
                Ok(Binding::Unbound("a single rank uses all CPUs of its process".into()))
            }
            Self::Auto if threads.saturating_mul(count) > cpus => {
                let (ranks, each) = (counted(count, "rank"), counted(threads, "thread"));
                Err(format!("{ranks} with {each} each do not fit {}", named(allowed)))
            }
            Self::Core if count > cpus => {
                let may_use = named(allowed);
                Err(format!("{count} ranks do not fit {may_use}; use fewer ranks, or --bind none"))
            }
            Self::Auto | Self::Core => {
                let blocks = blocks(topology, count, *threads);
                Ok(Binding::Bound(blocks[ranks].to_vec()))
            }
        }
    }
}

/// Returns `the 4 CPUs that this process may use (0-3)`.
fn named(allowed: &CpuList) -> String {
    let cpus = counted(allowed.0.len(), "CPU");
    format!("the {cpus} that this process may use ({allowed})")
}

/// Divides the allowed CPUs into `count` blocks, none of them empty. `count` is at most the number of CPUs.
///
/// A block has whole cores unless it would then have too few CPUs for `threads`.
fn blocks(topology: &Topology, count: usize, threads: usize) -> Vec<CpuList> {
    let cores = cores(topology);
    let needed = threads.clamp(1, topology.allowed.0.len() / count);
    let of_cores: Vec<_> = split(&cores, count).map(joined).collect();
    if of_cores.iter().all(|block| block.len() >= needed) {
        return of_cores.into_iter().map(CpuList::new).collect();
    }
    split(&joined(&cores), count).map(|cpus| CpuList::new(cpus.iter().copied())).collect()
}

/// Returns the CPUs of `cores`, one core after the other.
fn joined(cores: &[CpuList]) -> Vec<usize> {
    cores.iter().flat_map(|core| core.0.iter().copied()).collect()
}

/// Returns the allowed CPUs of each core, with the cores of a NUMA node beside each other.
fn cores(topology: &Topology) -> Vec<CpuList> {
    let node = |cpu: &usize| topology.nodes.iter().position(|node| node.0.contains(cpu));
    let allowed = topology.cores.iter().map(|core| core.intersection(&topology.allowed));
    let mut cores: Vec<CpuList> = allowed.collect();
    cores.sort_by_key(|core| (core.0.first().and_then(node), core.0.clone()));
    cores.dedup();
    cores
}

/// Divides `items` into `count` parts of consecutive items, whose lengths differ by one at most.
fn split<T>(items: &[T], count: usize) -> impl Iterator<Item = &[T]> {
    (0..count).map(move |n| &items[n * items.len() / count..(n + 1) * items.len() / count])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> CpuList {
        text.parse().unwrap()
    }

    /// A machine whose CPU `n` has the sibling `n + cores` where there are `smt` threads on a core.
    fn machine(cores: usize, smt: usize, allowed: &str) -> Topology {
        let siblings = |core: usize| CpuList::new((0..smt).map(|thread| core + thread * cores));
        let allowed = list(allowed);
        let nodes = Vec::new();
        Topology {
            online: CpuList::new(0..cores * smt),
            cores: allowed.0.iter().map(|cpu| siblings(cpu % cores)).collect(),
            allowed,
            nodes,
        }
    }

    fn threads(count: usize, threads: usize) -> LocalRanks {
        LocalRanks { ranks: 0..count, on_machine: count, threads, device: Device::Cpu }
    }

    /// Returns the CPUs of the ranks, or the reason why they are not bound.
    fn bound(choice: BindChoice, topology: &Topology, ranks: &LocalRanks) -> Vec<String> {
        match choice.decide(topology, ranks) {
            Ok(Binding::Bound(cpus)) => cpus.iter().map(CpuList::to_string).collect(),
            Ok(Binding::Unbound(reason)) | Err(reason) => vec![reason],
        }
    }

    const AUTO: BindChoice = BindChoice::Auto;
    const CORE: BindChoice = BindChoice::Core;

    #[test]
    fn ranks_get_disjoint_blocks_of_whole_cores() {
        for choice in [AUTO, CORE] {
            let two = machine(2, 1, "0-1");
            assert_eq!(bound(choice, &two, &threads(2, 1)), ["0", "1"]);
            let smt = machine(4, 2, "0-7");
            assert_eq!(bound(choice, &smt, &threads(2, 4)), ["0-1,4-5", "2-3,6-7"]);
            assert_eq!(bound(choice, &smt, &threads(4, 2)), ["0,4", "1,5", "2,6", "3,7"]);
            // More ranks than cores: two ranks share a core, and no CPU.
            assert_eq!(bound(choice, &smt, &threads(8, 1))[..3], ["0", "4", "1"]);
            // Whole cores would leave a rank with two CPUs for three threads.
            let five = machine(5, 2, "0-9");
            assert_eq!(bound(choice, &five, &threads(3, 3)), ["0-1,5", "2,6-7", "3-4,8-9"]);
            assert_eq!(bound(choice, &five, &threads(3, 2)), ["0,5", "1-2,6-7", "3-4,8-9"]);
        }
    }

    #[test]
    fn blocks_leave_out_cpus_that_the_process_may_not_use() {
        // CPUs 2 and 6 are offline, so the kernel does not list them.
        let offline = machine(4, 2, "0-1,3-5,7");
        assert_eq!(bound(CORE, &offline, &threads(3, 2)), ["0,4", "1,5", "3,7"]);
        // A control group allows one thread of some cores.
        let limited = machine(8, 2, "2-5,10");
        assert_eq!(bound(AUTO, &limited, &threads(2, 2)), ["2-3,10", "4-5"]);
        let unknown = Topology {
            allowed: list("4-7"),
            cores: (4..8).map(|cpu| CpuList(vec![cpu])).collect(),
            online: CpuList::default(),
            nodes: Vec::new(),
        };
        assert_eq!(bound(CORE, &unknown, &threads(2, 2)), ["4-5", "6-7"]);
    }

    #[test]
    fn blocks_are_never_empty_and_never_overlap() {
        for (cores, smt) in [(1, 1), (3, 1), (4, 2), (6, 2), (7, 4)] {
            let cpus = cores * smt;
            let all = machine(cores, smt, &format!("0-{}", cpus - 1));
            for count in 1..=cpus {
                for threads in [1, cpus / count, 99] {
                    let blocks = blocks(&all, count, threads);
                    let enough = |block: &CpuList| block.0.len() >= threads.min(cpus / count);
                    assert!(blocks.iter().all(enough), "{blocks:?} for {threads} threads");
                    let mut used: Vec<usize> = blocks.into_iter().flat_map(|it| it.0).collect();
                    used.sort_unstable();
                    assert_eq!(used, (0..cpus).collect::<Vec<_>>(), "{count} ranks");
                }
            }
        }
    }

    #[test]
    fn cores_of_a_node_are_side_by_side() {
        let mut mixed = machine(4, 1, "0-3");
        mixed.nodes = vec![list("0,2"), list("1,3")];
        assert_eq!(bound(BindChoice::Core, &mixed, &threads(2, 2)), ["0,2", "1,3"]);
    }

    #[test]
    fn auto_binds_only_ranks_that_fit() {
        let four = machine(4, 1, "0-3");
        assert_eq!(
            bound(AUTO, &four, &threads(1, 4)),
            ["a single rank uses all CPUs of its process"]
        );
        assert_eq!(
            bound(AUTO, &four, &threads(3, 2)),
            ["3 ranks with 2 threads each do not fit the 4 CPUs that this process may use (0-3)"]
        );
        let on_gpu = LocalRanks { device: Device::Cuda(0), ..threads(2, 1) };
        assert_eq!(bound(AUTO, &four, &on_gpu), ["auto binds ranks on the CPU only"]);
        assert_eq!(bound(CORE, &four, &on_gpu), ["0-1", "2-3"]);
        // `core` is an order: the threads of a rank then share its CPUs.
        assert_eq!(bound(CORE, &four, &threads(3, 2)), ["0", "1", "2-3"]);
        assert_eq!(
            bound(CORE, &machine(4, 1, "2"), &threads(2, 1)),
            [
                "2 ranks do not fit the 1 CPU that this process may use (2); use fewer ranks, or --bind none"
            ]
        );
        let error = BindChoice::Core.binding(&threads(1 << 20, 1)).unwrap_err().to_string();
        assert!(error.contains("--bind core: 1048576 ranks do not fit the "), "{error}");
        let too_many = BindChoice::Auto.binding(&threads(1 << 20, 1)).unwrap();
        assert!(matches!(too_many, Binding::Unbound(_)));
    }

    #[test]
    fn any_number_of_a_launcher_is_taken() {
        let huge = LocalRanks { on_machine: usize::MAX, ..threads(1, 2) };
        let two = machine(4, 1, "0-3");
        assert!(
            bound(AUTO, &two, &huge)[0]
                .ends_with("do not fit the 4 CPUs that this process may use (0-3)")
        );
        assert!(bound(CORE, &two, &huge)[0].contains(" do not fit the 4 CPUs "));
    }

    #[test]
    fn processes_of_a_machine_divide_it_unless_they_have_been_given_a_part() {
        let of = |ranks: Range<usize>| LocalRanks { ranks, on_machine: 4, ..threads(4, 1) };
        let whole = machine(8, 1, "0-7");
        assert_eq!(bound(AUTO, &whole, &of(1..2)), ["2-3"]);
        assert_eq!(bound(AUTO, &whole, &of(2..4)), ["4-5", "6-7"]);
        let part = machine(8, 1, "4-5");
        assert_eq!(bound(AUTO, &part, &of(2..3)), ["a single rank uses all CPUs of its process"]);
        assert_eq!(bound(AUTO, &part, &of(2..4)), ["4", "5"]);
        assert_eq!(bound(CORE, &part, &of(2..3)), ["4-5"]);
    }
}
