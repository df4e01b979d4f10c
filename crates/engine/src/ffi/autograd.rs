//! Runs functions of this crate inside libtorch's autograd, and passes their errors through it.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{c_char, c_void};
use std::mem::{self, ManuallyDrop};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;

use send_wrapper::SendWrapper;
use tch::Tensor;
use torch_sys::C_tensor;

use super::shim::{Release, check, new_tensor, raw};
use crate::error::{Error, Result};

/// The function that C++ calls to apply a linear function. Its arguments are the context, the input, whether to apply
/// the transpose, and a buffer for the reason of a failure with its size in bytes. Returns a new C++ tensor, which C++
/// takes over, or null after a failure.
type Apply =
    unsafe extern "C" fn(*mut c_void, *mut C_tensor, bool, *mut c_char, usize) -> *mut C_tensor;

unsafe extern "C" {
    fn ddp_retain_grad(tensor: *mut C_tensor) -> *mut c_char;
    fn ddp_backward(loss: *mut C_tensor, retain_graph: bool) -> *mut c_char;
    fn ddp_linear(
        input: *mut C_tensor,
        apply: Apply,
        release: Release,
        context: *mut c_void,
        output: *mut *mut C_tensor,
    ) -> *mut c_char;
}

/// A linear function or, if the argument is true, its transpose. Only the thread that made it may call it: a graph may
/// be sent to other threads, but the rank's group that the function holds may not.
type LinearMap = SendWrapper<Box<dyn Fn(&Tensor, bool) -> Result<Tensor>>>;

thread_local! {
    /// The error of a function inside autograd. C++ can pass only a text through its frames. The function sets it, and
    /// the call into libtorch that fails because of it takes it.
    static CAUGHT: RefCell<Option<Caught>> = const { RefCell::new(None) };
}

enum Caught {
    Error(Error),
    Panic(Box<dyn Any + Send>),
}

/// Computes the gradients of `loss`.
///
/// Like [`Tensor::f_backward`], but returns errors of this crate unchanged, not as a text. An example is
/// [`Error::Cancelled`] in [`all_reduce`](crate::process_group::functional::all_reduce).
///
/// # Errors
/// [`Error::Torch`], and those of the functions of this crate that `loss` was computed with.
pub fn backward(loss: &Tensor) -> Result<()> {
    run_backward(loss, false)
}

/// Makes backward keep the gradient of `tensor`, which is no parameter. Follows `Tensor.retain_grad`.
pub(crate) fn retain_grad(tensor: &Tensor) -> Result<()> {
    // SAFETY: a live tensor.
    check("retain_grad", unsafe { ddp_retain_grad(raw(tensor)) })
}

/// Computes gradients like [`backward`]. With `retain_graph`, the graph is kept for another backward.
pub(crate) fn run_backward(loss: &Tensor, retain_graph: bool) -> Result<()> {
    CAUGHT.take();
    // SAFETY: points to a live tensor.
    let result = check("backward", unsafe { ddp_backward(raw(loss), retain_graph) });
    result.map_err(|error| caught().unwrap_or(error))
}

/// Returns `f(input, false)` under autograd, for a linear `f`. Backward calls the transpose, `f(gradient, true)`, which
/// takes a tensor of the shape of the result and returns one of the shape of `input`. Both return new tensors.
pub(crate) fn linear(
    input: &Tensor,
    f: impl Fn(&Tensor, bool) -> Result<Tensor> + 'static,
) -> Result<Tensor> {
    let map: Box<LinearMap> = Box::new(SendWrapper::new(Box::new(f)));
    let context = Box::into_raw(map).cast();
    CAUGHT.take();
    // SAFETY: `input` is live; the context is a `LinearMap` in a box, as `apply` and `release` require. libtorch may call
    // `apply` until it calls `release`, once. On success the shim writes a new C++ tensor.
    let output = unsafe {
        new_tensor("autograd", |output| ddp_linear(raw(input), apply, release, context, output))
    };
    output.map_err(|error| caught().unwrap_or(error))
}

/// Keeps the panic of a hook, which cannot unwind through libtorch. [`run_backward`], which fails because of it, resumes
/// it.
pub(super) fn keep_panic(payload: Box<dyn Any + Send>) {
    CAUGHT.set(Some(Caught::Panic(payload)));
}

/// Takes the error that made libtorch fail. Resumes a panic.
fn caught() -> Option<Error> {
    match CAUGHT.take()? {
        Caught::Error(error) => Some(error),
        Caught::Panic(payload) => resume_unwind(payload),
    }
}

/// Applies the function or its transpose to `input`. libtorch calls this in forward and backward. Returns a new C++
/// tensor, or null after a failure.
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
        // SAFETY: as the caller promises. Other threads only check to which thread it belongs.
        let map = unsafe { &*context.cast::<LinearMap>() };
        if !map.valid() {
            return Err(Error::unsupported(
                "backward goes through a collective that another thread called; call it on the rank's own \
                 thread"
                    .into(),
            ));
        }
        // SAFETY: as the caller promises; the new handle is independent of the caller's.
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
    ptr::null_mut()
}

/// Drops the function in `context`.
///
/// # Safety
/// `context` is a [`LinearMap`] in a box, which is not used afterwards.
unsafe extern "C" fn release(context: *mut c_void) {
    // SAFETY: as the caller promises.
    let map = unsafe { Box::from_raw(context.cast::<LinearMap>()) };
    if map.valid() {
        // The drop should not panic, but a panic must never reach C++.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(map)));
    } else {
        // The graph was dropped on another thread, where its parts must not be touched.
        mem::forget(map);
    }
}
