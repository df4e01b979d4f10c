//! Finds CUDA at run time, so that one binary works on machines with and without GPUs.

use std::error::Error;
use std::ffi::{c_char, c_int, c_long, c_void};
use std::ptr;
use std::time::Duration;

use cudarc::driver::result as driver;
use cudarc::driver::sys::CUresult;
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use tch::{Device, Tensor};
use torch_sys::C_tensor;

use super::shim::{Object, check, failed_in};
use crate::error::Result;

/// `c10::Stream`, only ever behind a pointer.
enum RawStream {}

/// `c10::Event`, only ever behind a pointer.
enum RawEvent {}

unsafe extern "C" {
    safe fn ddp_cuda_device_count() -> c_int;
    fn ddp_cuda_version(version: *mut c_long) -> *mut c_char;
    safe fn ddp_cuda_set_device(index: c_int) -> *mut c_char;
    fn ddp_cuda_current_stream(index: c_int, stream: *mut *mut c_void) -> *mut c_char;
    fn ddp_cuda_event_new(timed: bool, event: *mut *mut RawEvent) -> *mut c_char;
    fn ddp_cuda_event_free(event: *mut RawEvent);
    fn ddp_cuda_event_record(event: *mut RawEvent, index: c_int) -> *mut c_char;
    fn ddp_cuda_event_query(event: *mut RawEvent, done: *mut bool) -> *mut c_char;
    fn ddp_cuda_event_since(
        event: *mut RawEvent,
        earlier: *mut RawEvent,
        ms: *mut f64,
    ) -> *mut c_char;
    fn ddp_cuda_event_block(event: *mut RawEvent, index: c_int) -> *mut c_char;
    fn ddp_cuda_stream_from_pool(
        index: c_int,
        high_priority: bool,
        stream: *mut *mut RawStream,
    ) -> *mut c_char;
    fn ddp_cuda_stream_default(index: c_int, stream: *mut *mut RawStream) -> *mut c_char;
    fn ddp_cuda_stream_current(index: c_int, stream: *mut *mut RawStream) -> *mut c_char;
    fn ddp_cuda_stream_free(stream: *mut RawStream);
    fn ddp_cuda_stream_set(stream: *const RawStream) -> *mut c_char;
    fn ddp_cuda_stream_swap(stream: *mut RawStream) -> *mut c_char;
    fn ddp_cuda_stream_wait(stream: *const RawStream, earlier: *const RawStream) -> *mut c_char;
    fn ddp_cuda_record_stream(tensor: *const C_tensor) -> *mut c_char;
}

/// The GPUs and the driver found at the start of the process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cuda {
    /// The names of the visible GPUs, by index. The driver has applied `CUDA_VISIBLE_DEVICES`.
    pub gpus: Vec<String>,
    /// The CUDA version that the driver supports, such as `13.0`; `None` without a driver.
    pub driver: Option<String>,
    /// The reason why the GPUs cannot be used. `None` if they can, or if there are none.
    pub problem: Option<String>,
}

impl Cuda {
    /// Returns the number of GPUs that are visible and can be used.
    pub fn usable(&self) -> usize {
        if self.problem.is_none() { self.gpus.len() } else { 0 }
    }
}

/// Looks for GPUs and, if one is visible, loads libtorch_cuda.
///
/// Must be called before any other function of libtorch: libtorch decides at the first query, for the life of the
/// process, whether it has CUDA. Without a visible GPU, libtorch_cuda is not loaded.
pub fn load() -> Cuda {
    // SAFETY: tries to load the driver's library, and nothing more.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return Cuda::default();
    }
    let mut cuda = find_gpus();
    if cuda.gpus.is_empty() {
        return cuda;
    }
    if let Err(reason) = load_library("libtorch_cuda.so") {
        cuda.problem = Some(format!(
            "libtorch_cuda cannot be loaded ({reason}); fetch the CUDA libraries with `make libtorch`, or \
             `pip install torch` for the wheel"
        ));
        return cuda;
    }
    let mut version = 0;
    // SAFETY: writes one number to a valid place.
    let found = unsafe { check("versionCUDART", ddp_cuda_version(&mut version)) };
    let built_for = (found.is_ok() && version > 0).then(|| version_text(version));
    if let (Some(driver), Some(built_for)) = (&cuda.driver, &built_for)
        && major(driver) < major(built_for)
    {
        cuda.problem = Some(format!(
            "the NVIDIA driver is too old: it supports CUDA {driver}, and libtorch is built for CUDA {built_for}; install \
             a newer driver, or build with a libtorch for the driver's CUDA"
        ));
        return cuda;
    }
    // A negative number while libtorch_cuda is not loaded.
    match usize::try_from(ddp_cuda_device_count()).ok() {
        Some(count) if count == cuda.gpus.len() => {}
        count => {
            cuda.problem = Some(format!(
                "the driver shows {} GPUs, but libtorch finds {} (driver: CUDA {}; libtorch: CUDA {})",
                cuda.gpus.len(),
                count.unwrap_or(0),
                cuda.driver.as_deref().unwrap_or("unknown"),
                built_for.as_deref().unwrap_or("unknown")
            ));
        }
    }
    cuda
}

/// Loads the part of libtorch_cuda that has QR, inverses and the like. Call this before several threads use GPUs.
///
/// libtorch loads it in the first call of such a function, and counts without a lock. If another thread calls one meanwhile,
/// libtorch fails with "lazy wrapper should be called at most once".
pub(crate) fn load_linear_algebra() {
    // A libtorch_cuda that has all in one library lacks this one, and needs nothing. If the library cannot be loaded, the
    // function that needs it says so.
    let _ = load_library("libtorch_cuda_linalg.so");
}

/// Returns a version such as `13.0`, which CUDA writes as 13000.
fn version_text(version: i64) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Returns the major version of CUDA, of which a driver runs all minor versions.
fn major(version: &str) -> Option<u32> {
    version.split('.').next()?.parse().ok()
}

/// Loads a library for the life of the process, because libtorch keeps pointers into it. An error is the text of
/// `dlerror`, which names the missing file.
fn load_library(name: &str) -> std::result::Result<(), String> {
    // SAFETY: loading a library of libtorch runs its static initialisers, as linking to it would.
    match unsafe { Library::open(Some(name), RTLD_NOW | RTLD_GLOBAL) } {
        Ok(library) => {
            std::mem::forget(library);
            Ok(())
        }
        Err(error) => Err(dlerror(&error)),
    }
}

/// Returns the text of `dlerror`, which names the file.
pub(crate) fn dlerror(error: &libloading::Error) -> String {
    error.source().map_or(error.to_string(), ToString::to_string)
}

fn find_gpus() -> Cuda {
    let mut version = 0;
    // SAFETY: writes one number to a valid place; allowed before `cuInit`.
    let known = unsafe { cudarc::driver::sys::cuDriverGetVersion(&mut version) }.result().is_ok();
    let driver = known.then(|| version_text(version.into()));
    let names = || -> Result<Vec<String>, driver::DriverError> {
        driver::init()?;
        (0..driver::device::get_count()?)
            .map(|i| driver::device::get_name(driver::device::get(i)?))
            .collect()
    };
    let (gpus, problem) = match names() {
        Ok(gpus) => (gpus, None),
        // CUDA_VISIBLE_DEVICES may be empty or -1. That is not a failure.
        Err(error) if error.0 == CUresult::CUDA_ERROR_NO_DEVICE => (Vec::new(), None),
        Err(error) => (Vec::new(), Some(format!("the NVIDIA driver fails: {:?}", error.0))),
    };
    Cuda { gpus, driver, problem }
}

/// Returns the UUID of GPU `index`, such as `GPU-8c1f...`, as `nvidia-smi -L` prints it. `None` if the driver does not
/// provide it.
pub(crate) fn uuid(index: usize) -> Option<String> {
    let gpu = driver::device::get(i32::try_from(index).ok()?).ok()?;
    let bytes = driver::device::get_uuid(gpu).ok()?.bytes;
    let hex: String = bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
    let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    Some(format!("GPU-{}", parts.join("-")))
}

/// Sets the calling thread's current device. Follows `torch.cuda.set_device`.
///
/// # Errors
/// If libtorch_cuda is not loaded or there is no such device.
pub fn set_device(index: usize) -> Result<()> {
    check("set_device", ddp_cuda_set_device(index as c_int))
}

/// Returns the `cudaStream_t` of this thread's current stream on device `index`.
pub(crate) fn current_stream(index: usize) -> Result<*mut c_void> {
    let mut stream = ptr::null_mut();
    // SAFETY: writes one pointer to a valid place.
    check("current_stream", unsafe { ddp_cuda_current_stream(index as c_int, &mut stream) })?;
    Ok(stream)
}

/// A CUDA stream: a queue of work for a GPU.
#[derive(Debug)]
pub(crate) struct CudaStream(Object<RawStream>);

// SAFETY: any thread may use a stream, one thread at a time.
unsafe impl Send for CudaStream {}

impl CudaStream {
    /// Takes a stream of libtorch's pool. Up to 32 of a priority that are in use are different. A high one is for work beside
    /// a rank's own.
    pub(crate) fn from_pool(index: usize, high_priority: bool) -> Result<Self> {
        // SAFETY: writes one pointer to the place that it is given.
        Self::make(|stream| unsafe {
            ddp_cuda_stream_from_pool(index as c_int, high_priority, stream)
        })
    }

    /// Returns the default stream of GPU `index`, which all threads have in common.
    pub(crate) fn default_of(index: usize) -> Result<Self> {
        // SAFETY: as above.
        Self::make(|stream| unsafe { ddp_cuda_stream_default(index as c_int, stream) })
    }

    /// Returns the calling thread's current stream on GPU `index`.
    pub(crate) fn current(index: usize) -> Result<Self> {
        // SAFETY: as above.
        Self::make(|stream| unsafe { ddp_cuda_stream_current(index as c_int, stream) })
    }

    fn make(make: impl FnOnce(*mut *mut RawStream) -> *mut c_char) -> Result<Self> {
        // SAFETY: `make` calls one of the shim's functions above, and their streams are freed with `ddp_cuda_stream_free`.
        let stream = unsafe { Object::new(ddp_cuda_stream_free, make) };
        stream.map(Self).map_err(failed_in("finding a CUDA stream"))
    }

    /// Makes this stream and its GPU the current ones of the calling thread. Follows `torch.cuda.set_stream`.
    pub(crate) fn set_current(&self) -> Result<()> {
        // SAFETY: the pointer lives as long as `self`.
        check("changing the CUDA stream", unsafe { ddp_cuda_stream_set(self.0.at) })
    }

    /// Makes the work that this stream gets from now on wait for all that `earlier` has got so far. The host does not
    /// wait. Follows `torch.cuda.Stream.wait_stream`.
    pub(crate) fn wait_stream(&self, earlier: &CudaStream) -> Result<()> {
        // SAFETY: the pointers live as long as the streams.
        check("ordering CUDA streams", unsafe { ddp_cuda_stream_wait(self.0.at, earlier.0.at) })
    }

    /// Runs `f` with this stream as the thread's current stream.
    pub(crate) fn with<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        /// Restores the previous stream, even if `f` panics.
        struct Back<'a>(&'a CudaStream);
        impl Drop for Back<'_> {
            fn drop(&mut self) {
                let _ = self.0.swap(); // cannot fail: that stream was the current one before
            }
        }
        self.swap()?;
        let _back = Back(self);
        f()
    }

    /// Exchanges this stream and the thread's current one.
    fn swap(&self) -> Result<()> {
        // SAFETY: the pointer lives as long as `self`.
        check("changing the CUDA stream", unsafe { ddp_cuda_stream_swap(self.0.at) })
    }
}

/// The stream of a rank's own work, which is the current one of its thread.
#[derive(Debug)]
pub(crate) struct RankStream {
    gpu: usize,
    stream: CudaStream,
}

impl RankStream {
    /// Takes a stream on GPU `gpu` and makes it the current one of the calling thread. It begins after the default stream,
    /// on which the caller of the ranks may have made tensors.
    pub(crate) fn enter(gpu: usize) -> Result<Self> {
        let own = Self { gpu, stream: CudaStream::from_pool(gpu, false)? };
        own.stream.set_current()?;
        own.stream.wait_stream(&CudaStream::default_of(gpu)?)?;
        Ok(own)
    }

    /// Ends the rank's work on the stream: the default stream, on which the caller may use what the rank returns, waits for
    /// it. Not for a rank that failed, whose work may never end.
    pub(crate) fn leave(self) -> Result<()> {
        CudaStream::default_of(self.gpu)?.wait_stream(&self.stream)
    }
}

/// Keeps the memory of `tensor`, which another thread may free, until the calling thread's current stream has done what it
/// has got by then. Does nothing for a tensor on the CPU. Follows `torch.Tensor.record_stream`.
pub(crate) fn record_stream(tensor: &Tensor) -> Result<()> {
    if tensor.device() == Device::Cpu {
        return Ok(());
    }
    // SAFETY: the pointer lives as long as `tensor`.
    check("record_stream", unsafe { ddp_cuda_record_stream(tensor.as_ptr()) })
}

/// A CUDA event: a mark on a stream. Querying whether the device has passed the mark does not wait.
#[derive(Debug)]
pub(crate) struct CudaEvent(Object<RawEvent>);

// SAFETY: any thread may use an event, one thread at a time.
unsafe impl Send for CudaEvent {}

impl CudaEvent {
    pub(crate) fn new() -> Result<Self> {
        Self::make(false)
    }

    /// Creates an event that also records the time at which the device passes it.
    pub(crate) fn timed() -> Result<Self> {
        Self::make(true)
    }

    fn make(timed: bool) -> Result<Self> {
        // SAFETY: an event is freed with `ddp_cuda_event_free`.
        let event =
            unsafe { Object::new(ddp_cuda_event_free, |event| ddp_cuda_event_new(timed, event)) };
        event.map(Self).map_err(failed_in("creating a CUDA event"))
    }

    /// Records the event on the calling thread's current stream on device `index`.
    pub(crate) fn record(&self, index: usize) -> Result<()> {
        // SAFETY: the pointer lives as long as `self`.
        let recorded = unsafe { ddp_cuda_event_record(self.0.at, index as c_int) };
        check("recording a CUDA event", recorded)
    }

    /// Makes the work that this thread launches on device `index` from now on wait for the event.
    pub(crate) fn block(&self, index: usize) -> Result<()> {
        // SAFETY: the pointer lives as long as `self`.
        let blocked = unsafe { ddp_cuda_event_block(self.0.at, index as c_int) };
        check("waiting for a CUDA event", blocked)
    }

    /// Returns the time from `earlier` to this event. Both must record times, and the device must have passed them.
    pub(crate) fn since(&self, earlier: &CudaEvent) -> Result<Duration> {
        let mut milliseconds = 0.0;
        // SAFETY: the pointers live as long as the events; writes one number to a valid place.
        let read = unsafe { ddp_cuda_event_since(self.0.at, earlier.0.at, &mut milliseconds) };
        check("reading the time of a CUDA event", read)?;
        Ok(Duration::try_from_secs_f64(milliseconds / 1e3).unwrap_or_default())
    }

    pub(crate) fn is_done(&self) -> Result<bool> {
        let mut is_done = false;
        // SAFETY: the pointer lives as long as `self`; writes one bool to a valid place.
        check("querying a CUDA event", unsafe { ddp_cuda_event_query(self.0.at, &mut is_done) })?;
        Ok(is_done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_library_error_has_the_reason_of_the_system() {
        let reason = load_library("libtorch_nowhere.so").unwrap_err();
        assert!(reason.starts_with("libtorch_nowhere.so: cannot open shared object"), "{reason}");
    }
}
