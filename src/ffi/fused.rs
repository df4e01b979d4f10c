//! Operations of libtorch on whole lists of tensors: fused optimizer steps, norms, and scaling.

use std::ffi::c_char;
use std::ops::Deref;
use std::ptr;

use tch::Tensor;
use torch_sys::C_tensor;

use super::shim::{check, new_tensor, raw};
use crate::error::{Error, Result};

/// `std::vector<at::Tensor>`, only ever behind a pointer.
#[repr(C)]
struct RawTensorList {
    _opaque: [u8; 0],
}

unsafe extern "C" {
    fn ddp_tensor_list_new(
        tensors: *const *mut C_tensor,
        len: usize,
        list: *mut *mut RawTensorList,
    ) -> *mut c_char;
    fn ddp_tensor_list_free(list: *mut RawTensorList);
    fn ddp_bump_versions(list: *mut RawTensorList) -> *mut c_char;
    fn ddp_fused_sgd(
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
    fn ddp_fused_adamw(
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
    fn ddp_amp_unscale(
        gradients: *mut RawTensorList,
        found_inf: *mut C_tensor,
        inv_scale: *mut C_tensor,
    ) -> *mut c_char;
}

/// A list of tensors for fused calls, built once so that the calls do not allocate.
#[derive(Debug)]
pub(crate) struct TensorList {
    list: *mut RawTensorList,
    tensors: Vec<Tensor>,
}

impl TensorList {
    /// Creates a list of these tensors, without copies.
    pub(crate) fn new(tensors: Vec<Tensor>) -> Result<Self> {
        let handles: Vec<*mut C_tensor> = tensors.iter().map(raw).collect();
        let mut list = ptr::null_mut();
        // SAFETY: `handles` are pointers to live tensors, and the list has handles of its own to them; writes one
        // pointer to a valid place.
        let made = unsafe { ddp_tensor_list_new(handles.as_ptr(), handles.len(), &mut list) };
        check("listing tensors", made)?;
        Ok(Self { list, tensors })
    }
}

impl Deref for TensorList {
    type Target = [Tensor];

    fn deref(&self) -> &[Tensor] {
        &self.tensors
    }
}

impl Drop for TensorList {
    fn drop(&mut self) {
        // SAFETY: the pointer is ours, and this is its last use.
        unsafe { ddp_tensor_list_free(self.list) }
    }
}

/// Marks each of `tensors` as written to, for writes that bypass the tensor's own operations. A graph that saved one of
/// them then refuses to run backward. Follows `torch.autograd.graph.increment_version`.
pub(crate) fn bump_versions(tensors: &TensorList) -> Result<()> {
    // SAFETY: the pointer lives as long as `tensors`.
    check("increment_version", unsafe { ddp_bump_versions(tensors.list) })
}

/// The options of one SGD step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SgdStep {
    pub lr: f64,
    pub weight_decay: f64,
    pub momentum: f64,
    pub dampening: f64,
    pub nesterov: bool,
    /// Whether to initialise the momentum buffers with this step's gradients.
    pub is_first_step: bool,
}

/// Calls `torch._fused_sgd_`. `momentum_buffers` is empty without momentum.
pub(crate) fn fused_sgd(
    parameters: &TensorList,
    gradients: &TensorList,
    momentum_buffers: &TensorList,
    step: SgdStep,
) -> Result<()> {
    same_len("_fused_sgd_", parameters, &[gradients])?;
    if step.momentum != 0.0 {
        same_len("_fused_sgd_", parameters, &[momentum_buffers])?;
    }
    let SgdStep { lr, weight_decay, momentum, dampening, nesterov, is_first_step } = step;
    // SAFETY: all point to live lists, which libtorch reads to the end of `parameters`: none is shorter.
    check("_fused_sgd_", unsafe {
        ddp_fused_sgd(
            parameters.list,
            gradients.list,
            momentum_buffers.list,
            lr,
            weight_decay,
            momentum,
            dampening,
            nesterov,
            is_first_step,
        )
    })
}

/// The options of one AdamW step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AdamWStep {
    pub lr: f64,
    pub betas: (f64, f64),
    pub weight_decay: f64,
    pub eps: f64,
}

/// Calls `torch._fused_adamw_`. `steps` already include this step.
pub(crate) fn fused_adamw(
    parameters: &TensorList,
    gradients: &TensorList,
    exp_avgs: &TensorList,
    exp_avg_sqs: &TensorList,
    steps: &TensorList,
    AdamWStep { lr, betas: (beta1, beta2), weight_decay, eps }: AdamWStep,
) -> Result<()> {
    same_len("_fused_adamw_", parameters, &[gradients, exp_avgs, exp_avg_sqs, steps])?;
    // SAFETY: all point to live lists, which libtorch reads to the end of `parameters`: none is shorter.
    check("_fused_adamw_", unsafe {
        ddp_fused_adamw(
            parameters.list,
            gradients.list,
            exp_avgs.list,
            exp_avg_sqs.list,
            steps.list,
            lr,
            beta1,
            beta2,
            weight_decay,
            eps,
        )
    })
}

/// Returns the 2-norm of all `tensors` together, as a tensor without dimensions on their device.
pub(crate) fn total_norm(tensors: &TensorList) -> Result<Tensor> {
    // SAFETY: the pointer lives as long as `tensors`; on success the shim writes a new C++ tensor.
    unsafe { new_tensor("the norm of the gradients", |norm| ddp_total_norm(tensors.list, norm)) }
}

/// Multiplies `gradients` by `inv_scale`, and sets `found_inf` to 1 if one of them is not finite. Both are float32
/// tensors of one number. Follows `torch._amp_foreach_non_finite_check_and_unscale_`.
pub(crate) fn amp_unscale(
    gradients: &TensorList,
    found_inf: &Tensor,
    inv_scale: &Tensor,
) -> Result<()> {
    // SAFETY: all point to what lives as long as the call; libtorch checks the tensors.
    check("_amp_foreach_non_finite_check_and_unscale_", unsafe {
        ddp_amp_unscale(gradients.list, raw(found_inf), raw(inv_scale))
    })
}

/// Multiplies each of `tensors` by `factor`, a tensor without dimensions on their device.
pub(crate) fn scale_all(tensors: &TensorList, factor: &Tensor) -> Result<()> {
    // SAFETY: the pointer lives as long as `tensors`; `factor` is live.
    check("scaling gradients", unsafe { ddp_scale_all(tensors.list, raw(factor)) })
}

fn same_len(doing: &'static str, first: &TensorList, others: &[&TensorList]) -> Result<()> {
    let Some(other) = others.iter().find(|other| other.len() != first.len()) else { return Ok(()) };
    let reason = format!("lists of {} and {} tensors", first.len(), other.len());
    Err(Error::Torch { doing, reason })
}
