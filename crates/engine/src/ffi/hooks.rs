//! Hooks that backward calls when the gradient of a parameter is complete.

use std::ffi::{CStr, c_char, c_void};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use send_wrapper::SendWrapper;
use tch::Tensor;
use torch_sys::C_tensor;

use super::autograd::keep_panic;
use super::shim::{check, raw};
use crate::error::Result;

/// The function that a gradient hook calls. Returns null, or the reason why backward must fail, a static text.
type HookFn = extern "C" fn(context: *mut c_void, index: usize) -> *const c_char;

unsafe extern "C" {
    fn ddp_set_grad_hook(
        parameter: *mut C_tensor,
        call: Option<HookFn>,
        context: *mut c_void,
        index: usize,
    ) -> *mut c_char;
}

/// Hooks on the gradients of some parameters, removed on drop. Follows
/// `Tensor.register_post_accumulate_grad_hook`, but a parameter has at most one such hook.
pub(crate) struct GradHooks {
    parameters: Vec<Tensor>,
    /// Boxed, so that its address, which the hooks keep, does not change.
    target: Box<Target>,
    /// Only this thread may drop them.
    of_thread: PhantomData<*const ()>,
}

/// The reason why backward must fail. `None` to continue.
pub(crate) type Complaint = Option<&'static CStr>;

/// The function of the hooks. Only the thread of the tensors may call it.
type Target = SendWrapper<Box<dyn Fn(usize) -> Complaint>>;

impl GradHooks {
    /// Registers `call`. Backward calls `call(index)` for each of `parameters` when its gradient is complete. Backward
    /// must run on this thread: on another thread, it fails.
    pub(crate) fn register(
        parameters: Vec<Tensor>,
        call: impl Fn(usize) -> Complaint + 'static,
    ) -> Result<Self> {
        let target: Box<Target> = Box::new(SendWrapper::new(Box::new(call)));
        let hooks = Self { parameters, target, of_thread: PhantomData };
        let context = hooks.context();
        for (index, parameter) in hooks.parameters.iter().enumerate() {
            // SAFETY: the target lives until `drop` has removed the hooks, and is only used on this thread:
            // backward runs on the thread that calls it, which is the thread of these tensors.
            let set = unsafe { ddp_set_grad_hook(raw(parameter), Some(on_grad), context, index) };
            check("register_post_accumulate_grad_hook", set)?;
        }
        Ok(hooks)
    }

    /// Returns the argument of the hooks.
    fn context(&self) -> *mut c_void {
        let target: *const Target = &*self.target;
        target.cast_mut().cast()
    }
}

impl Drop for GradHooks {
    fn drop(&mut self) {
        for parameter in &self.parameters {
            // SAFETY: no hook, so nothing is called.
            let removed = unsafe { ddp_set_grad_hook(raw(parameter), None, self.context(), 0) };
            // Removing cannot fail, as setting did not. A hook with another context stays.
            let _ = check("register_post_accumulate_grad_hook", removed);
        }
    }
}

extern "C" fn on_grad(context: *mut c_void, index: usize) -> *const c_char {
    // SAFETY: `register` passed a target that lives as long as the hooks. Other threads only check
    // to which thread it belongs.
    let target = unsafe { &*context.cast::<Target>() };
    if !target.valid() {
        return c"backward reaches parameters that DistributedDataParallel keeps on another thread; run it \
                 on the thread of their rank"
            .as_ptr();
    }
    match catch_unwind(AssertUnwindSafe(|| target(index))) {
        Ok(complaint) => complaint.map_or(ptr::null(), CStr::as_ptr),
        Err(panic) => {
            keep_panic(panic);
            c"a hook of a gradient panicked".as_ptr()
        }
    }
}
