//! Rust bindings for `shim.cpp`.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ops::Range;
use std::sync::Once;

use tch::Tensor;
use torch_sys::C_tensor;

use crate::error::{Error, Result, first_line};

/// The function that a gradient hook calls. Returns null, or the reason why backward must fail, a static text.
pub(super) type HookFn = extern "C" fn(context: *mut c_void, index: usize) -> *const c_char;

/// The function that C++ calls to apply a linear function. Its arguments are the context, the input, whether to apply
/// the transpose, and a buffer for the reason of a failure with its size in bytes. Returns a new C++ tensor, which C++
/// takes over, or null after a failure.
pub(super) type Apply =
    unsafe extern "C" fn(*mut c_void, *mut C_tensor, bool, *mut c_char, usize) -> *mut C_tensor;

/// The function that C++ calls once when it no longer needs a context.
pub(super) type Release = unsafe extern "C" fn(*mut c_void);

/// The state that `torch.autocast` sets for a thread.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct AutocastState {
    pub enabled: bool,
    /// A `c10::ScalarType`.
    pub dtype: i8,
    pub cache_enabled: bool,
}

/// A tensor's memory and shape.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RawTensorFacts {
    pub data: *mut c_void,
    pub numel: usize,
    pub sizes: *const i64,
    pub dim: usize,
    pub is_plain: bool,
}

/// `std::vector<at::Tensor>`, only ever behind a pointer.
#[repr(C)]
pub(super) struct RawTensorList {
    _opaque: [u8; 0],
}

/// `at::Generator`, only ever behind a pointer.
#[repr(C)]
pub(super) struct RawGenerator {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    fn ddp_free_message(message: *mut c_char);
    fn ddp_set_multithreading_enabled(enabled: bool);
    fn ddp_hide_stack_traces();
    fn ddp_autocast_swap(on_cuda: bool, state: *mut AutocastState) -> *mut c_char;
    fn ddp_tensor_facts(tensor: *mut C_tensor, facts: *mut RawTensorFacts) -> *mut c_char;
    fn ddp_set_grad(parameter: *mut C_tensor, grad: *mut C_tensor) -> *mut c_char;
    fn ddp_remove_grad(parameter: *mut C_tensor) -> *mut c_char;
    fn ddp_set_view(view: *mut C_tensor, whole: *mut C_tensor, start: i64, len: i64)
    -> *mut c_char;
    fn ddp_backward(loss: *mut C_tensor, retain_graph: bool) -> *mut c_char;
    fn ddp_set_grad_hook(
        parameter: *mut C_tensor,
        call: Option<HookFn>,
        context: *mut c_void,
        index: usize,
    ) -> *mut c_char;
    fn ddp_move_grad(parameter: *mut C_tensor, place: *mut C_tensor) -> *mut c_char;
    fn ddp_adopt_grad(parameter: *mut C_tensor, flat: *mut C_tensor) -> *mut c_char;
    fn ddp_shares_memory(tensor: *mut C_tensor) -> bool;
    fn ddp_add_scaled(to: *mut C_tensor, from: *mut C_tensor, alpha: f64) -> *mut c_char;
    fn ddp_tensor_list_new(
        tensors: *const *mut C_tensor,
        len: usize,
        list: *mut *mut RawTensorList,
    ) -> *mut c_char;
    pub(super) fn ddp_tensor_list_free(list: *mut RawTensorList);
    pub(super) fn ddp_bump_versions(list: *mut RawTensorList) -> *mut c_char;
    pub(super) fn ddp_fused_sgd(
        parameters: *mut RawTensorList,
        gradients: *mut RawTensorList,
        momentum_buffers: *mut RawTensorList,
        lr: f64,
        weight_decay: f64,
        momentum: f64,
        dampening: f64,
        nesterov: bool,
        is_first_step: bool,
    ) -> *mut c_char;
    pub(super) fn ddp_fused_adamw(
        parameters: *mut RawTensorList,
        gradients: *mut RawTensorList,
        exp_avgs: *mut RawTensorList,
        exp_avg_sqs: *mut RawTensorList,
        steps: *mut RawTensorList,
        lr: f64,
        beta1: f64,
        beta2: f64,
        weight_decay: f64,
        eps: f64,
    ) -> *mut c_char;
    fn ddp_scale_all(tensors: *mut RawTensorList, factor: *mut C_tensor) -> *mut c_char;
    fn ddp_total_norm(tensors: *mut RawTensorList, norm: *mut *mut C_tensor) -> *mut c_char;
    pub(super) fn ddp_amp_unscale(
        gradients: *mut RawTensorList,
        found_inf: *mut C_tensor,
        inv_scale: *mut C_tensor,
    ) -> *mut c_char;
    fn ddp_linear(
        input: *mut C_tensor,
        apply: Apply,
        release: Release,
        context: *mut c_void,
        output: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn ddp_from_bytes(
        bytes: *mut c_void,
        len: usize,
        release: Release,
        context: *mut c_void,
        tensor: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn ddp_cpu_rng_get_state(state: *mut *mut C_tensor) -> *mut c_char;
    fn ddp_cpu_rng_set_state(state: *mut C_tensor) -> *mut c_char;
    fn ddp_cpu_rng_seed(seed: u64) -> *mut c_char;
    fn ddp_generator_new(gpu: c_int, generator: *mut *mut RawGenerator) -> *mut c_char;
    pub(super) fn ddp_generator_free(generator: *mut RawGenerator);
    fn ddp_generator_seed(generator: *mut RawGenerator, seed: u64) -> *mut c_char;
    fn ddp_generator_bernoulli(
        generator: *mut RawGenerator,
        tensor: *mut C_tensor,
        p: f64,
    ) -> *mut c_char;
    fn ddp_generator_normal(generator: *mut RawGenerator, tensor: *mut C_tensor) -> *mut c_char;
    fn ddp_generator_exponential(
        generator: *mut RawGenerator,
        tensor: *mut C_tensor,
    ) -> *mut c_char;
}

/// Takes over the message that a shim function returned.
pub(super) fn check(doing: &'static str, message: *mut c_char) -> Result<()> {
    take_message(message).map_err(|reason| Error::Torch { doing, reason })
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

/// Sets whether backward may use other threads. With `false`, it runs on the calling thread for every device. For the
/// calling thread only. Follows `torch.autograd.set_multithreading_enabled`.
pub(crate) fn set_multithreading_enabled(enabled: bool) {
    // SAFETY: sets a thread-local flag.
    unsafe { ddp_set_multithreading_enabled(enabled) }
}

/// Removes C++ stack traces from libtorch's error texts, in the whole process.
pub(crate) fn hide_stack_traces() {
    static HIDDEN: Once = Once::new();
    // SAFETY: takes nothing; called once.
    HIDDEN.call_once(|| unsafe { ddp_hide_stack_traces() });
}

/// Sets the autocast state of the calling thread, for CUDA devices or for the CPU. Returns the previous state.
pub(super) fn autocast_swap(on_cuda: bool, mut state: AutocastState) -> Result<AutocastState> {
    // SAFETY: reads and writes one plain struct, whose `dtype` is a kind that libtorch knows: those that
    // `Autocast` names, or the one that was set before.
    check("autocast", unsafe { ddp_autocast_swap(on_cuda, &mut state) })?;
    Ok(state)
}

/// Returns the memory and the shape of `tensor`. The pointers are valid until the tensor changes.
pub(super) fn tensor_facts(tensor: &Tensor) -> Result<RawTensorFacts> {
    let (data, sizes) = (std::ptr::null_mut(), std::ptr::null());
    let mut facts = RawTensorFacts { data, numel: 0, sizes, dim: 0, is_plain: false };
    // SAFETY: points to a live tensor; writes one plain struct.
    check("looking at a tensor", unsafe { ddp_tensor_facts(raw(tensor), &mut facts) })?;
    Ok(facts)
}

/// Sets `parameter.grad = grad` without a copy: backward then adds into `grad` in place.
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
    // SAFETY: points to a live tensor.
    check("removing a gradient", unsafe { ddp_remove_grad(raw(parameter)) })
}

/// Runs backward from `loss`, and keeps its graph for another backward if `retain_graph`.
pub(super) fn backward(loss: &Tensor, retain_graph: bool) -> Result<()> {
    // SAFETY: points to a live tensor.
    check("backward", unsafe { ddp_backward(raw(loss), retain_graph) })
}

/// Registers a hook, or removes it if `call` is `None`. Follows `register_post_accumulate_grad_hook`.
///
/// # Safety
/// `call` may be called with `context` and `index` by every backward on this parameter, until the hook is
/// removed.
pub(super) unsafe fn set_grad_hook(
    parameter: &Tensor,
    call: Option<HookFn>,
    context: *mut c_void,
    index: usize,
) -> Result<()> {
    // SAFETY: points to a live tensor; the rest is up to the caller.
    check("register_post_accumulate_grad_hook", unsafe {
        ddp_set_grad_hook(raw(parameter), call, context, index)
    })
}

/// Moves `parameter.grad` to `place`, if it is not there already. Without a gradient, fills `place` with zeros.
pub(crate) fn move_grad(parameter: &Tensor, place: &Tensor) -> Result<()> {
    // SAFETY: both point to live tensors.
    check("moving a gradient", unsafe { ddp_move_grad(raw(parameter), raw(place)) })
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

/// Creates a C++ list of `tensors`. Free it with [`ddp_tensor_list_free`].
pub(super) fn tensor_list_new(tensors: &[Tensor]) -> Result<*mut RawTensorList> {
    let handles: Vec<*mut C_tensor> = tensors.iter().map(raw).collect();
    let mut list = std::ptr::null_mut();
    // SAFETY: `handles` are pointers to live tensors, and the list has handles of its own to them; writes one
    // pointer to a valid place.
    check("listing tensors", unsafe {
        ddp_tensor_list_new(handles.as_ptr(), handles.len(), &mut list)
    })?;
    Ok(list)
}

/// # Safety
/// `tensors` comes from [`tensor_list_new`] and has not been freed.
pub(super) unsafe fn total_norm(tensors: *mut RawTensorList) -> Result<Tensor> {
    let mut norm = std::ptr::null_mut();
    // SAFETY: as the caller promises; on success `norm` is a new C++ tensor, which `from_ptr` takes over.
    unsafe {
        check("the norm of the gradients", ddp_total_norm(tensors, &mut norm))?;
        Ok(Tensor::from_ptr(norm))
    }
}

/// # Safety
/// `tensors` comes from [`tensor_list_new`] and has not been freed.
pub(super) unsafe fn scale_all(tensors: *mut RawTensorList, factor: &Tensor) -> Result<()> {
    // SAFETY: as the caller promises; `factor` is live.
    check("scaling gradients", unsafe { ddp_scale_all(tensors, raw(factor)) })
}

/// Applies the linear function `apply` to `input` under autograd. Backward applies the transpose to the gradient.
///
/// # Safety
/// `apply` may be called with `context` until `release` is, once, by whichever thread drops the graph.
pub(super) unsafe fn linear(
    input: &Tensor,
    apply: Apply,
    release: Release,
    context: *mut c_void,
) -> Result<Tensor> {
    let mut output = std::ptr::null_mut();
    // SAFETY: `input` is live, the rest as the caller promises; on success `output` is a new C++ tensor,
    // which `from_ptr` takes over and frees.
    unsafe {
        let message = ddp_linear(raw(input), apply, release, context, &mut output);
        check("autograd", message)?;
        Ok(Tensor::from_ptr(output))
    }
}

/// Returns `len` bytes from `bytes` on as a tensor, without a copy.
///
/// # Safety
/// The bytes can be read and written until `release` is called with `context`, once, by whichever thread drops
/// the last tensor over them.
pub(super) unsafe fn from_bytes(
    bytes: *mut u8,
    len: usize,
    release: Release,
    context: *mut c_void,
) -> Result<Tensor> {
    let mut tensor = std::ptr::null_mut();
    // SAFETY: as the caller promises; on success `tensor` is a new C++ tensor, which `from_ptr` takes over.
    unsafe {
        let message = ddp_from_bytes(bytes.cast(), len, release, context, &mut tensor);
        check("making a tensor of a mapped file", message)?;
        Ok(Tensor::from_ptr(tensor))
    }
}

pub(super) fn cpu_rng_state() -> Result<Tensor> {
    let mut state = std::ptr::null_mut();
    // SAFETY: on success `state` is a new C++ tensor, which `from_ptr` takes over and frees.
    unsafe {
        check("the CPU generator", ddp_cpu_rng_get_state(&mut state))?;
        Ok(Tensor::from_ptr(state))
    }
}

pub(super) fn set_cpu_rng_state(state: &Tensor) -> Result<()> {
    // SAFETY: points to a live tensor; libtorch checks that it holds a state.
    check("the CPU generator", unsafe { ddp_cpu_rng_set_state(raw(state)) })
}

pub(super) fn seed_cpu_rng(seed: u64) -> Result<()> {
    // SAFETY: takes a plain number.
    check("the CPU generator", unsafe { ddp_cpu_rng_seed(seed) })
}

/// Creates a generator for a GPU, or for the CPU if `gpu` is `None`. Free it with [`ddp_generator_free`].
pub(super) fn generator_new(gpu: Option<usize>) -> Result<*mut RawGenerator> {
    let mut generator = std::ptr::null_mut();
    let gpu = gpu.map_or(-1, |gpu| gpu as c_int);
    // SAFETY: writes one pointer to a valid place.
    check("making a generator", unsafe { ddp_generator_new(gpu, &mut generator) })?;
    Ok(generator)
}

/// # Safety
/// `generator` comes from [`generator_new`] and has not been freed.
pub(super) unsafe fn generator_seed(generator: *mut RawGenerator, seed: u64) -> Result<()> {
    // SAFETY: as the caller promises.
    check("seeding a generator", unsafe { ddp_generator_seed(generator, seed) })
}

/// # Safety
/// `generator` comes from [`generator_new`] and has not been freed.
pub(super) unsafe fn generator_bernoulli(
    generator: *mut RawGenerator,
    tensor: &Tensor,
    p: f64,
) -> Result<()> {
    // SAFETY: as the caller promises; the tensor is live.
    check("bernoulli_", unsafe { ddp_generator_bernoulli(generator, raw(tensor), p) })
}

/// # Safety
/// `generator` comes from [`generator_new`] and has not been freed.
pub(super) unsafe fn generator_normal(generator: *mut RawGenerator, tensor: &Tensor) -> Result<()> {
    // SAFETY: as the caller promises; the tensor is live.
    check("normal_", unsafe { ddp_generator_normal(generator, raw(tensor)) })
}

/// # Safety
/// `generator` comes from [`generator_new`] and has not been freed.
pub(super) unsafe fn generator_exponential(
    generator: *mut RawGenerator,
    tensor: &Tensor,
) -> Result<()> {
    // SAFETY: as the caller promises; the tensor is live.
    check("exponential_", unsafe { ddp_generator_exponential(generator, raw(tensor)) })
}
