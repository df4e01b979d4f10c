//! Rust bindings for the CUDA part of `shim.cpp`: devices, streams and events.

use std::ffi::{c_char, c_int, c_long, c_void};

use super::shim::check;
use crate::error::Result;

/// `c10::Stream`, only ever behind a pointer.
#[repr(C)]
pub(super) struct Stream {
    _opaque: [u8; 0],
}

/// `c10::Event`, only ever behind a pointer.
#[repr(C)]
pub(super) struct Event {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    fn ddp_cuda_device_count() -> c_int;
    fn ddp_cuda_version(version: *mut c_long) -> *mut c_char;
    fn ddp_cuda_set_device(index: c_int) -> *mut c_char;
    fn ddp_cuda_current_stream(index: c_int, stream: *mut *mut c_void) -> *mut c_char;
    fn ddp_cuda_event_new(timed: bool, event: *mut *mut Event) -> *mut c_char;
    fn ddp_cuda_event_free(event: *mut Event);
    fn ddp_cuda_event_record(event: *mut Event, index: c_int) -> *mut c_char;
    fn ddp_cuda_event_query(event: *mut Event, done: *mut bool) -> *mut c_char;
    fn ddp_cuda_event_since(event: *mut Event, earlier: *mut Event, ms: *mut f64) -> *mut c_char;
    fn ddp_cuda_event_block(event: *mut Event, index: c_int) -> *mut c_char;
    fn ddp_cuda_stream_new(index: c_int, stream: *mut *mut Stream) -> *mut c_char;
    fn ddp_cuda_stream_free(stream: *mut Stream);
    fn ddp_cuda_stream_swap(stream: *mut Stream) -> *mut c_char;
}

/// Returns the number of CUDA devices that libtorch finds. `None` while libtorch_cuda is not loaded.
pub(super) fn cuda_device_count() -> Option<usize> {
    // SAFETY: reads c10's registry.
    usize::try_from(unsafe { ddp_cuda_device_count() }).ok()
}

/// Returns the version of CUDA that libtorch_cuda was built for, such as 13000. Call it once libtorch_cuda is loaded.
pub(super) fn cuda_version() -> Result<i64> {
    let mut version = 0;
    // SAFETY: writes one number to a valid place.
    check("versionCUDART", unsafe { ddp_cuda_version(&mut version) })?;
    Ok(version)
}

pub(super) fn cuda_set_device(index: usize) -> Result<()> {
    // SAFETY: takes a plain number; libtorch checks it.
    check("set_device", unsafe { ddp_cuda_set_device(index as c_int) })
}

pub(super) fn cuda_current_stream(index: usize) -> Result<*mut c_void> {
    let mut stream = std::ptr::null_mut();
    // SAFETY: writes one pointer to a valid place.
    check("current_stream", unsafe { ddp_cuda_current_stream(index as c_int, &mut stream) })?;
    Ok(stream)
}

pub(super) fn cuda_event_new(timed: bool) -> Result<*mut Event> {
    let mut event = std::ptr::null_mut();
    // SAFETY: writes one pointer to a valid place.
    check("creating a CUDA event", unsafe { ddp_cuda_event_new(timed, &mut event) })?;
    Ok(event)
}

/// # Safety
/// `event` comes from [`cuda_event_new`] and is not used afterwards.
pub(super) unsafe fn cuda_event_free(event: *mut Event) {
    // SAFETY: as the caller promises.
    unsafe { ddp_cuda_event_free(event) }
}

/// # Safety
/// `event` comes from [`cuda_event_new`] and has not been freed.
pub(super) unsafe fn cuda_event_record(event: *mut Event, index: usize) -> Result<()> {
    // SAFETY: as the caller promises.
    check("recording a CUDA event", unsafe { ddp_cuda_event_record(event, index as c_int) })
}

/// # Safety
/// `event` comes from [`cuda_event_new`] and has not been freed.
pub(super) unsafe fn cuda_event_query(event: *mut Event) -> Result<bool> {
    let mut done = false;
    // SAFETY: as the caller promises; `done` is a valid place.
    check("querying a CUDA event", unsafe { ddp_cuda_event_query(event, &mut done) })?;
    Ok(done)
}

/// Returns the time from `earlier` to `event`, in milliseconds.
///
/// # Safety
/// Both come from [`cuda_event_new`] and have not been freed.
pub(super) unsafe fn cuda_event_since(event: *mut Event, earlier: *mut Event) -> Result<f64> {
    let mut milliseconds = 0.0;
    // SAFETY: as the caller promises; `milliseconds` is a valid place.
    let done = unsafe { ddp_cuda_event_since(event, earlier, &mut milliseconds) };
    check("reading the time of a CUDA event", done)?;
    Ok(milliseconds)
}

/// # Safety
/// `event` comes from [`cuda_event_new`] and has not been freed.
pub(super) unsafe fn cuda_event_block(event: *mut Event, index: usize) -> Result<()> {
    // SAFETY: as the caller promises.
    check("waiting for a CUDA event", unsafe { ddp_cuda_event_block(event, index as c_int) })
}

pub(super) fn cuda_stream_new(index: usize) -> Result<*mut Stream> {
    let mut stream = std::ptr::null_mut();
    // SAFETY: writes one pointer to a valid place.
    check("creating a CUDA stream", unsafe { ddp_cuda_stream_new(index as c_int, &mut stream) })?;
    Ok(stream)
}

/// # Safety
/// `stream` comes from [`cuda_stream_new`] and is not used afterwards.
pub(super) unsafe fn cuda_stream_free(stream: *mut Stream) {
    // SAFETY: as the caller promises.
    unsafe { ddp_cuda_stream_free(stream) }
}

/// # Safety
/// `stream` comes from [`cuda_stream_new`] and has not been freed.
pub(super) unsafe fn cuda_stream_swap(stream: *mut Stream) -> Result<()> {
    // SAFETY: as the caller promises.
    check("changing the CUDA stream", unsafe { ddp_cuda_stream_swap(stream) })
}
