//! Functions of this crate inside of libtorch's autograd, and how their errors come out of it.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{c_char, c_void};
use std::mem::{self, ManuallyDrop};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use send_wrapper::SendWrapper;
use tch::Tensor;
use torch_sys::C_tensor;

use super::shim;
use crate::error::{Error, Result};

/// A linear function or, if asked for, its transpose, for the thread that made it and for no other: a graph may be sent
/// to other threads, but what this holds (a rank's group) may not.
type LinearMap = SendWrapper<Box<dyn Fn(&Tensor, bool) -> Result<Tensor>>>;

thread_local! {
    /// Why a function failed inside of autograd: C++ can carry a text only past its frames. Set there, and
    /// taken by the call into libtorch that failed of it.
    static CAUGHT: RefCell<Option<Caught>> = const { RefCell::new(None) };
}

enum Caught {
    Error(Error),
    Panic(Box<dyn Any + Send>),
}

/// Computes the gradients of `loss`.
///
/// As [`Tensor::f_backward`], but an error of this crate that happens meanwhile, such as
/// [`Error::Cancelled`] in [`all_reduce`](crate::process_group::functional::all_reduce), comes out as what
/// it is, and not as a text.
///
/// # Errors
/// [`Error::Torch`], and those of the functions of this crate that `loss` was computed with.
pub fn backward(loss: &Tensor) -> Result<()> {
    run_backward(loss, false)
}

/// As [`backward`]; with `retain_graph` another one can go through the same graph.
pub(crate) fn run_backward(loss: &Tensor, retain_graph: bool) -> Result<()> {
    CAUGHT.take();
    shim::backward(loss, retain_graph).map_err(|error| caught().unwrap_or(error))
}

/// `f(input, false)` under autograd, for a linear `f`. The gradient goes through its transpose: `f(gradient, true)` gets
/// a tensor of the shape of the result and returns one of the shape of `input`. Both return new tensors.
pub(crate) fn linear(
    input: &Tensor,
    f: impl Fn(&Tensor, bool) -> Result<Tensor> + 'static,
) -> Result<Tensor> {
    let map: Box<LinearMap> = Box::new(SendWrapper::new(Box::new(f)));
    CAUGHT.take();
    // SAFETY: `apply` and `release` take the context for what it is, a `LinearMap` in a box.
    let output =
        unsafe { shim::linear(input, apply, release, Box::into_raw(map).cast::<c_void>()) };
    output.map_err(|error| caught().unwrap_or(error))
}

/// The error that made libtorch fail; a panic goes on.
fn caught() -> Option<Error> {
    match CAUGHT.take()? {
        Caught::Error(error) => Some(error),
        Caught::Panic(payload) => resume_unwind(payload),
    }
}

/// Applies the function to `input`, or its transpose; libtorch calls this, forward and backward. Returns a new C++
/// tensor, or null.
///
/// # Safety
/// `context` is a live [`LinearMap`], `input` a live C++ tensor, and `reason` has room for `capacity` bytes.
unsafe extern "C" fn apply(
    context: *mut c_void,
    input: *mut C_tensor,
    transposed: bool,
    reason: *mut c_char,
    capacity: usize,
) -> *mut C_tensor {
    let run = || {
        // SAFETY: as the caller promises. Shared between threads at most to ask whose it is.
        let map = unsafe { &*context.cast::<LinearMap>() };
        if !map.valid() {
            return Err(Error::Unsupported(
                "backward goes through a collective that another thread called; call it on the rank's own \
                 thread"
                    .into(),
            ));
        }
        // SAFETY: as the caller promises; the new handle is of its own.
        map(&unsafe { Tensor::clone_from_ptr(input) }, transposed)
    };
    let caught = match catch_unwind(AssertUnwindSafe(run)) {
        // The caller deletes it.
        Ok(Ok(output)) => return ManuallyDrop::new(output).as_mut_ptr(),
        Ok(Err(error)) => Caught::Error(error),
        Err(payload) => Caught::Panic(payload),
    };
    let text = match &caught {
        Caught::Error(error) => error.to_string(),
        Caught::Panic(_) => "panicked".into(),
    };
    let length = text.len().min(capacity.saturating_sub(1));
    // SAFETY: no more than the capacity, with room for the NUL at the end.
    unsafe {
        reason.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), length);
        *reason.add(length) = 0;
    }
    CAUGHT.set(Some(caught));
    std::ptr::null_mut()
}

/// Drops what `context` holds.
///
/// # Safety
/// `context` is a [`LinearMap`] in a box, which nobody uses afterwards.
unsafe extern "C" fn release(context: *mut c_void) {
    // SAFETY: as the caller promises.
    let map = unsafe { Box::from_raw(context.cast::<LinearMap>()) };
    if map.valid() {
        // What it holds does not panic, but C++ must not find out.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(map)));
    } else {
        // The graph was dropped on another thread, where its parts must not be touched.
        mem::forget(map);
    }
}
