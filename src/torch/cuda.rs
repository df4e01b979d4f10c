//! Finding CUDA at run time: one binary for machines with and without GPUs.

use std::env;
use std::ffi::c_void;

use cudarc::driver::result as driver;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use super::shim;
use crate::error::Result;

/// What was found at the start of the process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cuda {
    /// The names of the visible GPUs, in the order of their indices here. `CUDA_VISIBLE_DEVICES` has
    /// been applied by the driver.
    pub gpus: Vec<String>,
    /// The CUDA version that the driver supports, such as `13.0`; `None` without a driver.
    pub driver: Option<String>,
    /// Why there are GPUs that cannot be used, if so.
    pub problem: Option<String>,
}

/// Looks for GPUs and, where one is visible, loads libtorch_cuda.
///
/// Must be called before anything else of libtorch: the first question about CUDA that libtorch is
/// asked settles for the process's life whether it has any. Without a visible GPU nothing of CUDA is
/// loaded. Must be called while the process has one thread, because it may set `NCCL_LAUNCH_MODE`.
pub fn load() -> Cuda {
    let mut cuda = find_gpus();
    if cuda.gpus.is_empty() {
        return cuda;
    }
    if env::var_os("NCCL_LAUNCH_MODE").is_none() {
        // With one thread per GPU, NCCL must launch the kernels of all local ranks together: a rank
        // that runs ahead could otherwise block in the driver while its peers' kernels wait for it.
        // SAFETY: `main` calls this before it starts any thread.
        unsafe { env::set_var("NCCL_LAUNCH_MODE", "GROUP") };
    }
    // SAFETY: loading libtorch_cuda runs its static initialisers, as linking to it would.
    let library = unsafe { Library::open(Some("libtorch_cuda.so"), RTLD_NOW | RTLD_GLOBAL) };
    match library {
        // Stays loaded: libtorch keeps pointers into it.
        Ok(library) => std::mem::forget(library),
        Err(error) => {
            cuda.problem = Some(format!(
                "libtorch_cuda cannot be loaded ({error}); `make libtorch` fetches the CUDA libraries"
            ));
            return cuda;
        }
    }
    match shim::cuda_device_count() {
        Some(count) if count == cuda.gpus.len() => {}
        count => {
            cuda.problem = Some(format!(
                "the driver shows {} GPUs, libtorch {}; the driver may be too old for this libtorch",
                cuda.gpus.len(),
                count.unwrap_or(0)
            ));
        }
    }
    cuda
}

fn find_gpus() -> Cuda {
    // SAFETY: tries to load the driver's library, and nothing more.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return Cuda::default();
    }
    let mut version = 0;
    // SAFETY: writes one number to a valid place; allowed before `cuInit`.
    let known = unsafe { cudarc::driver::sys::cuDriverGetVersion(&mut version) }.result().is_ok();
    let driver = known.then(|| format!("{}.{}", version / 1000, version % 1000 / 10));
    // The driver answers with an error where no device is visible: that is no GPU, not a failure.
    let names = || -> Result<Vec<String>, driver::DriverError> {
        driver::init()?;
        (0..driver::device::get_count()?)
            .map(|i| driver::device::get_name(driver::device::get(i)?))
            .collect()
    };
    Cuda { gpus: names().unwrap_or_default(), driver, problem: None }
}

/// As `torch.cuda.set_device`, for the calling thread.
///
/// # Errors
/// When libtorch_cuda is not loaded or there is no such device.
pub fn set_device(index: usize) -> Result<()> {
    shim::cuda_set_device(index)
}

/// The `cudaStream_t` that this thread's work on device `index` goes to.
pub(crate) fn current_stream(index: usize) -> Result<*mut c_void> {
    shim::cuda_current_stream(index)
}

/// A mark on a stream that can be asked, without waiting, whether the device has passed it.
#[derive(Debug)]
pub(crate) struct Event(*mut shim::Event);

impl Event {
    pub(crate) fn new() -> Result<Self> {
        shim::cuda_event_new().map(Self)
    }

    /// Marks this point of the calling thread's stream on device `index`.
    pub(crate) fn record(&self, index: usize) -> Result<()> {
        // SAFETY: the pointer lives as long as `self`.
        unsafe { shim::cuda_event_record(self.0, index) }
    }

    pub(crate) fn is_done(&self) -> Result<bool> {
        // SAFETY: the pointer lives as long as `self`.
        unsafe { shim::cuda_event_query(self.0) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the pointer is ours, and this is its last use.
        unsafe { shim::cuda_event_free(self.0) }
    }
}
