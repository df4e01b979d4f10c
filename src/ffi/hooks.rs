//! Being told when the gradient of a parameter is complete, while backward goes on.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::thread::{self, ThreadId};

use tch::Tensor;

use super::shim;
use crate::error::Result;

/// Hooks on the gradients of some parameters, until this is dropped. Follows
/// `Tensor.register_post_accumulate_grad_hook`; a parameter has one such hook at most here.
pub(crate) struct GradHooks {
    parameters: Vec<Tensor>,
    /// Boxed, so that it stays where the hooks know it to be.
    target: Box<Target>,
}

/// Why backward must fail, if it must.
pub(crate) type Complaint = Option<&'static CStr>;

struct Target {
    /// The thread of the tensors, and of `call`.
    thread: ThreadId,
    call: Box<dyn Fn(usize) -> Complaint>,
    /// What the first call that panicked has said: a panic cannot pass through libtorch.
    panic: RefCell<Option<Box<dyn Any + Send>>>,
}

impl fmt::Debug for GradHooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GradHooks").field("parameters", &self.parameters.len()).finish()
    }
}

impl GradHooks {
    /// Has `call(index)` called for each of `parameters` whose gradient backward has completed, on the thread
    /// that runs backward, which must be this one: on another, backward fails.
    pub(crate) fn register(
        parameters: Vec<Tensor>,
        call: impl Fn(usize) -> Complaint + 'static,
    ) -> Result<Self> {
        let (thread, call) = (thread::current().id(), Box::new(call));
        let target = Box::new(Target { thread, call, panic: RefCell::default() });
        let hooks = Self { parameters, target };
        let context: *const Target = &*hooks.target;
        for (index, parameter) in hooks.parameters.iter().enumerate() {
            // SAFETY: the target lives until `drop` has removed the hooks, and is only used on this thread:
            // backward runs on the thread that asks for it, which is the one of these tensors.
            unsafe {
                shim::set_grad_hook(parameter, Some(on_grad), context.cast_mut().cast(), index)
            }?;
        }
        Ok(hooks)
    }

    /// Goes on with the panic of a hook, if one has. To be called when backward has returned.
    pub(crate) fn resume_panic(&self) {
        if let Some(panic) = self.target.panic.take() {
            std::panic::resume_unwind(panic);
        }
    }
}

impl Drop for GradHooks {
    fn drop(&mut self) {
        let context: *const Target = &*self.target;
        for parameter in &self.parameters {
            // It could be set, so it can be removed, if it is still this one.
            // SAFETY: no hook, so nothing is called.
            let _ = unsafe { shim::set_grad_hook(parameter, None, context.cast_mut().cast(), 0) };
        }
    }
}

extern "C" fn on_grad(context: *mut c_void, index: usize) -> *const c_char {
    // SAFETY: `register` passed a target that lives as long as the hooks. Shared between threads at most to ask
    // whose it is.
    let target = unsafe { &*context.cast::<Target>() };
    if target.thread != thread::current().id() {
        return c"backward reaches parameters that DistributedDataParallel keeps on another thread; run it \
                 on the thread of their rank"
            .as_ptr();
    }
    if target.panic.borrow().is_some() {
        return ptr::null(); // after a panic there is nothing more to do
    }
    match catch_unwind(AssertUnwindSafe(|| (target.call)(index))) {
        Ok(complaint) => complaint.map_or(ptr::null(), CStr::as_ptr),
        Err(panic) => {
            target.panic.borrow_mut().get_or_insert(panic);
            ptr::null()
        }
    }
}
