//! Keeps freed CPU memory for the next tensor: the allocator of `kept_memory.cpp`.

use tch::Device;

unsafe extern "C" {
    fn ddp_keep_memory();
    fn ddp_keeps_memory() -> bool;
    fn ddp_give_back_memory();
    fn ddp_kept_memory() -> usize;
}

/// The environment variable that turns kept memory off, with the value `0`.
const SWITCH: &str = "DDP_MP_KEEP_MEMORY";

/// Makes libtorch keep freed CPU blocks of 256 KiB and more for the next tensors, unless the environment has
/// `DDP_MP_KEEP_MEMORY=0`.
///
/// By default libtorch returns the memory of large gradients and activations to the system in each step, and gets it
/// back with a page fault for every 4 KiB. The size of used and kept blocks together is bounded: by 1.5 times the peak
/// of the used blocks, or by this peak plus 256 MiB if that is more. At its end, a run returns the kept blocks to the
/// system.
///
/// The `ddp-mp` program calls this first. In a program of your own it is your decision, because it replaces the CPU
/// allocator of the whole process: call it at the start of `main`, before other threads use libtorch. An allocator
/// that was registered with a priority above 1 stays.
pub fn keep_memory() {
    if std::env::var_os(SWITCH).is_none_or(|value| value != "0") {
        // SAFETY: stores a pointer to a static in c10's registry. Both the old and the new allocator stay valid, and
        // each block has the deleter of its own allocator.
        unsafe { ddp_keep_memory() }
    }
}

/// Returns whether libtorch keeps freed CPU memory. False without [`keep_memory`], or where that had no effect.
pub fn keeps_memory() -> bool {
    // SAFETY: compares two pointers.
    unsafe { ddp_keeps_memory() }
}

/// Returns all kept blocks to the system. Tensors are not affected.
pub fn give_back_memory() {
    // SAFETY: unmaps blocks that no tensor has, under their locks.
    unsafe { ddp_give_back_memory() }
}

/// Returns how many bytes are kept for the next tensors; 0 without [`keep_memory`].
pub fn kept_memory() -> usize {
    // SAFETY: reads atomic numbers.
    unsafe { ddp_kept_memory() }
}

/// Returns the alignment, in bytes, of a new tensor on `device`, in libtorch's allocators and in this one.
pub(crate) fn alignment(device: Device) -> usize {
    if matches!(device, Device::Cuda(_)) { 512 } else { 64 }
}
