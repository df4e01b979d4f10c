//! Functions of `shim.cpp` on single tensors and for the whole thread, and how all bindings take over its errors and
//! tensors.

use std::ffi::{CStr, c_char, c_void};
use std::ops::Range;
use std::ptr;
use std::sync::Once;

use tch::Tensor;
use torch_sys::C_tensor;

use crate::error::{Error, Result, first_line, opaque_debug};

/// The function that C++ calls once when it no longer needs a context.
pub(super) type Release = unsafe extern "C" fn(*mut c_void);

unsafe extern "C" {
    fn ddp_free_message(message: *mut c_char);
    safe fn ddp_set_multithreading_enabled(enabled: bool);
    safe fn ddp_hide_stack_traces();
    fn ddp_set_grad(parameter: *mut C_tensor, grad: *mut C_tensor) -> *mut c_char;
    fn ddp_set_view(view: *mut C_tensor, whole: *mut C_tensor, start: i64, len: i64)
    -> *mut c_char;
    fn ddp_move_grad(parameter: *mut C_tensor, to: *mut C_tensor) -> *mut c_char;
    fn ddp_adopt_grad(parameter: *mut C_tensor, flat: *mut C_tensor) -> *mut c_char;
    fn ddp_shares_memory(tensor: *mut C_tensor) -> bool;
    fn ddp_add_scaled(to: *mut C_tensor, from: *mut C_tensor, alpha: f64) -> *mut c_char;
}

/// A C++ object that belongs to Rust.
pub(super) struct Object<T> {
    pub at: *mut T,
    free: unsafe extern "C" fn(*mut T),
}

impl<T> Object<T> {
    /// Takes over the object that `make` writes, or returns its error.
    ///
    /// # Safety
    /// `make` returns the message of a shim function. If there is none, it has written an object that `free` frees and that
    /// nobody else frees.
    pub(super) unsafe fn new(
        free: unsafe extern "C" fn(*mut T),
        make: impl FnOnce(*mut *mut T) -> *mut c_char,
    ) -> Result<Self, String> {
        let mut at = ptr::null_mut();
        take_message(make(&mut at))?;
        Ok(Self { at, free })
    }
}

impl<T> Drop for Object<T> {
    fn drop(&mut self) {
        // SAFETY: as the caller of `new` promises; this is the last use.
        unsafe { (self.free)(self.at) }
    }
}

opaque_debug!(Object<T>, T);

/// Takes over the message that a shim function returned.
pub(super) fn check(doing: &'static str, message: *mut c_char) -> Result<()> {
    take_message(message).map_err(failed_in(doing))
}

/// Returns a function that makes libtorch's reason an error that names the action.
pub(super) fn failed_in(doing: &'static str) -> impl FnOnce(String) -> Error {
    move |reason| Error::Torch { doing, reason }
}

/// Takes over the message like [`check`], but returns it without the name of the action.
pub(super) fn take_message(message: *mut c_char) -> Result<(), String> {
    if message.is_null() {
        return Ok(());
    }
    // SAFETY: a non-null result of a shim function is a NUL-terminated string that is now ours; it is
    // copied before it is freed, once, by the function made for that.
    let reason = unsafe {
        let text = CStr::from_ptr(message).to_string_lossy().into_owned();
        ddp_free_message(message);
        text
    };
    Err(first_line(&reason))
}

/// Returns the C++ tensor of `tensor`. The shim changes the tensor that the handle refers to, never the handle. A
/// shared reference is therefore enough, as for tch's own in-place operations on shallow clones.
pub(super) fn raw(tensor: &Tensor) -> *mut C_tensor {
    tensor.as_ptr().cast_mut()
}

/// Returns the new tensor that `make` writes, or its error.
///
/// # Safety
/// `make` returns the message of a shim function. If there is none, it has written a new C++ tensor, which is the
/// caller's.
pub(super) unsafe fn new_tensor(
    doing: &'static str,
    make: impl FnOnce(*mut *mut C_tensor) -> *mut c_char,
) -> Result<Tensor> {
    let mut tensor = ptr::null_mut();
    check(doing, make(&mut tensor))?;
    // SAFETY: as the caller promises.
    Ok(unsafe { Tensor::from_ptr(tensor) })
}

/// Sets whether backward may use other threads. With `false`, it runs on the calling thread for every device. For the
/// calling thread only. Follows `torch.autograd.set_multithreading_enabled`.
pub(crate) fn set_multithreading_enabled(enabled: bool) {
    ddp_set_multithreading_enabled(enabled);
}

/// Removes C++ stack traces from libtorch's error texts, in the whole process.
#[doc(hidden)]
pub fn hide_stack_traces() {
    static HIDDEN: Once = Once::new();
    HIDDEN.call_once(|| ddp_hide_stack_traces());
}

/// Sets `parameter.grad = grad` without a copy: backward then adds into `grad` in place. An undefined `grad` removes it.
pub(crate) fn set_grad(parameter: &Tensor, grad: &Tensor) -> Result<()> {
    // SAFETY: both point to live tensors.
    check("set_grad", unsafe { ddp_set_grad(raw(parameter), raw(grad)) })
}

/// Makes `view` the elements `range` of `whole`, which is contiguous and has one dimension. Unlike
/// [`narrow`](Tensor::narrow), it makes no new tensor.
pub(crate) fn set_view(view: &Tensor, whole: &Tensor, range: Range<usize>) -> Result<()> {
    let (start, len) = (range.start as i64, range.len() as i64);
    // SAFETY: both point to live tensors. The shim checks the range.
    check("a view", unsafe { ddp_set_view(raw(view), raw(whole), start, len) })
}

/// Removes the gradient of `parameter`, as if it had never had one.
pub(crate) fn remove_grad(parameter: &Tensor) -> Result<()> {
    set_grad(parameter, &Tensor::new())
}

/// Moves `parameter.grad` to `to`, if it is not there already. Without a gradient, fills `to` with zeros.
pub(crate) fn move_grad(parameter: &Tensor, to: &Tensor) -> Result<()> {
    // SAFETY: both point to live tensors.
    check("moving a gradient", unsafe { ddp_move_grad(raw(parameter), raw(to)) })
}

/// Makes `flat`, a tensor of one dimension, share the memory of `parameter.grad`, which stays where it is. Without a
/// gradient, it becomes zeros.
pub(crate) fn adopt_grad(parameter: &Tensor, flat: &Tensor) -> Result<()> {
    // SAFETY: both point to live tensors.
    check("taking over a gradient", unsafe { ddp_adopt_grad(raw(parameter), raw(flat)) })
}

/// Returns whether another tensor has the same memory as `tensor`, or memory in the same allocation.
pub(crate) fn shares_memory(tensor: &Tensor) -> bool {
    // SAFETY: the tensor is live. It is dense, so it has a storage.
    unsafe { ddp_shares_memory(raw(tensor)) }
}

/// Computes `to += alpha * from` in one pass and outside autograd, like a step of `torch.optim.SGD`.
pub(crate) fn add_scaled(to: &Tensor, from: &Tensor, alpha: f64) -> Result<()> {
    // SAFETY: both point to live tensors.
    check("add_", unsafe { ddp_add_scaled(raw(to), raw(from), alpha) })
}
