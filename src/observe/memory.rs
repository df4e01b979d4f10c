//! How much memory the process has taken.

use std::fs;

/// The most that was resident at once, in bytes; `None` where the system does not tell as Linux does.
pub fn peak_memory() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    #[test]
    fn the_peak_is_seen() {
        let before = super::peak_memory().unwrap();
        let more = std::hint::black_box(vec![1u8; before as usize]);
        assert!(super::peak_memory().unwrap() > before + more.len() as u64 / 2);
    }
}
