//! Operations of libtorch on whole lists of tensors: fused optimizer steps, norms, and scaling.

use tch::Tensor;

use super::shim::{self, RawTensorList, check};
use crate::error::{Error, Result};

/// A list of tensors for fused calls, built once so that the calls do not allocate.
#[derive(Debug)]
pub(crate) struct TensorList {
    list: *mut RawTensorList,
    len: usize,
}

impl TensorList {
    /// Creates a list of these tensors, without copies.
    pub(crate) fn new(tensors: &[Tensor]) -> Result<Self> {
        Ok(Self { list: shim::tensor_list_new(tensors)?, len: tensors.len() })
    }
}

impl Drop for TensorList {
    fn drop(&mut self) {
        // SAFETY: the pointer is ours, and this is its last use.
        unsafe { shim::ddp_tensor_list_free(self.list) }
    }
}

/// Marks each of `tensors` as written to, for writes that bypass the tensor's own operations. A graph that saved one of
/// them then refuses to run backward. Follows `torch.autograd.graph.increment_version`.
pub(crate) fn bump_versions(tensors: &TensorList) -> Result<()> {
    // SAFETY: the pointer lives as long as `tensors`.
    check("increment_version", unsafe { shim::ddp_bump_versions(tensors.list) })
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
        shim::ddp_fused_sgd(
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
        shim::ddp_fused_adamw(
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
    // SAFETY: the pointer lives as long as `tensors`.
    unsafe { shim::total_norm(tensors.list) }
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
        shim::ddp_amp_unscale(gradients.list, shim::raw(found_inf), shim::raw(inv_scale))
    })
}

/// Multiplies each of `tensors` by `factor`, a tensor without dimensions on their device.
pub(crate) fn scale_all(tensors: &TensorList, factor: &Tensor) -> Result<()> {
    // SAFETY: the pointer lives as long as `tensors`.
    unsafe { shim::scale_all(tensors.list, factor) }
}

fn same_len(doing: &'static str, first: &TensorList, others: &[&TensorList]) -> Result<()> {
    let Some(other) = others.iter().find(|other| other.len != first.len) else { return Ok(()) };
    let reason = format!("lists of {} and {} tensors", first.len, other.len);
    Err(Error::Torch { doing, reason })
}
