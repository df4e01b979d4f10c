//! Memory that the process has used, and memory that it may use.

use std::fs;

/// Returns the peak resident memory, in bytes; `None` where the system does not report it like Linux.
pub fn peak_memory() -> Option<u64> {
    kib(&fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

/// Returns the memory that this process may use, in bytes: the machine's with swap, or its container's limit. `None`
/// where the system does not report it like Linux.
pub fn total_memory() -> Option<u64> {
    // Unless it has a cgroup namespace of its own, a process does not find its limit here. The machine's memory then
    // counts.
    const LIMITS: [&str; 2] =
        ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let machine = kib(&text, "MemTotal:")? + kib(&text, "SwapTotal:").unwrap_or(0);
    let limit = |file| fs::read_to_string(file).ok()?.trim().parse::<u64>().ok();
    LIMITS.into_iter().filter_map(limit).chain([machine]).min()
}

/// Returns `bytes` as text, in gigabytes of 10^9 bytes.
pub(crate) fn gigabytes(bytes: f64) -> String {
    format!("{:.1} GB", bytes / 1e9)
}

/// Returns the bytes that the line `name` of a file in `/proc` counts in kB.
fn kib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
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
