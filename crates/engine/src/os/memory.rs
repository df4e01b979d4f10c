//! Memory that the process has used, and memory that it may use.

use super::limits::{STATUS, kilobytes_in, number_in};

/// Returns the peak resident memory, in bytes; `None` where the system does not report it like Linux.
pub fn peak_memory() -> Option<u64> {
    kilobytes_in(STATUS, "VmHWM:")
}

/// Returns the memory that this process may use, in bytes: the machine's with swap, or its container's limit. `None`
/// where the system does not report it like Linux.
pub fn total_memory() -> Option<u64> {
    // Unless it has a cgroup namespace of its own, a process does not find its limit here. The machine's memory then
    // counts.
    const LIMITS: [&str; 2] =
        ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let of_machine = |key| kilobytes_in("/proc/meminfo", key);
    let machine = of_machine("MemTotal:")? + of_machine("SwapTotal:").unwrap_or(0);
    LIMITS.into_iter().filter_map(number_in).chain([machine]).min()
}

/// Returns `bytes` as text, in gigabytes of 10^9 bytes.
#[doc(hidden)]
pub fn gigabytes(bytes: f64) -> String {
    format!("{:.1} GB", bytes / 1e9)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    #[test]
    fn peak_memory_is_below_total_memory() {
        assert!(super::peak_memory().unwrap() < super::total_memory().unwrap());
    }

    #[test]
    fn peak_memory_rises_with_an_allocation() {
        let before = super::peak_memory().unwrap();
        let more = std::hint::black_box(vec![1u8; before as usize]);
        assert!(super::peak_memory().unwrap() > before + more.len() as u64 / 2);
    }
}
