//! The CPUs on which threads may run: reads and sets them, and reads which of them share a core or memory.

use std::fmt;
use std::fs;
use std::io;
use std::num::ParseIntError;
use std::path::Path;
use std::str::FromStr;

use rustix::process::getpid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// A set of CPUs, in ascending order. Written as the kernel writes it: `0-3,8`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[doc(hidden)]
pub struct CpuList(pub Vec<usize>);

/// The CPUs of the machine, and those that the calling thread may use.
#[derive(Debug, Clone, Default)]
pub(crate) struct Topology {
    /// The CPUs that the thread may use. The kernel leaves out those that are offline.
    pub allowed: CpuList,
    /// The CPUs that are online. Empty if the system does not list them.
    pub online: CpuList,
    /// For each allowed CPU the CPUs of its core: itself, and its SMT siblings.
    pub cores: Vec<CpuList>,
    /// The CPUs of each NUMA node. Empty if the system does not list them.
    pub nodes: Vec<CpuList>,
}

impl CpuList {
    /// Creates a set from CPUs in any order.
    pub(crate) fn new(cpus: impl IntoIterator<Item = usize>) -> Self {
        let mut cpus: Vec<usize> = cpus.into_iter().collect();
        cpus.sort_unstable();
        cpus.dedup();
        Self(cpus)
    }

    /// Returns the CPUs that are also in `other`.
    pub(crate) fn intersection(&self, other: &Self) -> Self {
        Self(self.0.iter().copied().filter(|cpu| other.0.binary_search(cpu).is_ok()).collect())
    }

    /// Binds the calling thread, and the threads that it will start, to these CPUs.
    ///
    /// # Errors
    /// If the system refuses: the process may use none of the CPUs.
    pub(crate) fn bind_this_thread(&self) -> io::Result<()> {
        let mut set = CpuSet::new();
        for &cpu in self.0.iter().filter(|&&cpu| cpu < CpuSet::MAX_CPU) {
            set.set(cpu);
        }
        Ok(sched_setaffinity(None, &set)?)
    }

    /// Lets the calling thread, which serves all ranks of the process, run on all CPUs of the process: on those of its main
    /// thread, which is no rank. Otherwise it would stay on those of the rank that has started it.
    pub(crate) fn unbind_this_thread() {
        let _ = sched_getaffinity(Some(getpid())).and_then(|all| sched_setaffinity(None, &all));
    }

    /// Returns the CPUs that the calling thread may use.
    ///
    /// # Errors
    /// If the system refuses.
    pub(crate) fn of_this_thread() -> io::Result<Self> {
        let set = sched_getaffinity(None)?;
        Ok(Self((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect()))
    }
}

impl Topology {
    /// Reads the topology of this machine. Without `/sys`, each CPU is a core of its own.
    ///
    /// # Errors
    /// If the CPUs that the calling thread may use cannot be read.
    pub(crate) fn read() -> io::Result<Self> {
        let allowed = CpuList::of_this_thread()?;
        let system = Path::new("/sys/devices/system");
        let siblings = |cpu: &usize| {
            let file = format!("cpu/cpu{cpu}/topology/thread_siblings_list");
            let core = read_list(&system.join(file)).filter(|core| core.0.contains(cpu));
            core.unwrap_or(CpuList(vec![*cpu]))
        };
        let cores = allowed.0.iter().map(siblings).collect();
        let online = read_list(&system.join("cpu/online")).unwrap_or_default();
        let node = |node: &usize| read_list(&system.join(format!("node/node{node}/cpulist")));
        let nodes = read_list(&system.join("node/online")).unwrap_or_default();
        let nodes = nodes.0.iter().filter_map(node).collect();
        Ok(Self { allowed, online, cores, nodes })
    }
}

fn read_list(file: &Path) -> Option<CpuList> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

impl FromStr for CpuList {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut cpus = Vec::new();
        for range in text.split(',').filter(|range| !range.is_empty()) {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            cpus.extend(first.parse::<usize>()?..=last.parse::<usize>()?);
        }
        Ok(Self::new(cpus))
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges = self.0.chunk_by(|cpu, next| cpu + 1 == *next);
        for (number, range) in ranges.enumerate() {
            let comma = if number == 0 { "" } else { "," };
            match range {
                [first, .., last] => write!(f, "{comma}{first}-{last}")?,
                _ => write!(f, "{comma}{}", range[0])?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_are_read_and_written_as_the_kernel_writes_them() {
        for (text, cpus) in [
            ("", vec![]),
            ("5", vec![5]),
            ("0-3,8", vec![0, 1, 2, 3, 8]),
            ("0-1,4,6-7", vec![0, 1, 4, 6, 7]),
        ] {
            let list: CpuList = text.parse().unwrap();
            assert_eq!((list.to_string(), list.0), (text.into(), cpus));
        }
        assert_eq!("7,1-2,2".parse::<CpuList>().unwrap().to_string(), "1-2,7");
        assert!("0-x".parse::<CpuList>().is_err() && "1-2-3".parse::<CpuList>().is_err());
        assert_eq!(CpuList::new([3, 1, 2]).intersection(&CpuList::new([2, 3, 9])).0, [2, 3]);
    }

    #[test]
    fn a_thread_and_those_that_it_starts_are_bound() {
        let all = Topology::read().unwrap();
        assert_eq!(all.allowed.0.len(), all.cores.len());
        let first = CpuList(vec![all.allowed.0[0]]);
        let here = || CpuList::of_this_thread().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                first.bind_this_thread().unwrap();
                assert_eq!(here(), first);
                std::thread::scope(|scope| {
                    scope.spawn(|| assert_eq!(here(), first));
                    scope.spawn(|| {
                        CpuList::unbind_this_thread();
                        assert_eq!(here(), all.allowed);
                    });
                });
            });
        });
        assert_eq!(here(), all.allowed);
        let nowhere = CpuList(vec![CpuSet::MAX_CPU - 1]);
        if !all.online.0.contains(&nowhere.0[0]) {
            assert!(nowhere.bind_this_thread().is_err());
        }
    }
}
