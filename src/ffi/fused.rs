//! Lists of tensors that libtorch steps or measures in one call.

use tch::Tensor;

use super::shim::{self, RawTensorList, check};
use crate::error::{Error, Result};

/// Tensors that go into one call, listed once: the calls allocate nothing.
#[derive(Debug)]
pub(crate) struct TensorList {
    list: *mut RawTensorList,
    len: usize,
}

impl TensorList {
    /// A list of these very tensors, not of copies.
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

/// Notes that each of `tensors` has been written to, by other means than an operation on the tensor itself: a graph that
/// has saved one refuses to run backward then. As `torch.autograd.graph.increment_version`.
pub(crate) fn bump_versions(tensors: &TensorList) -> Result<()> {
    // SAFETY: the pointer lives as long as `tensors`.
    check("increment_version", unsafe { shim::ddp_bump_versions(tensors.list) })
}

/// The numbers of one step of SGD.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SgdStep {
    pub lr: f64,
    pub weight_decay: f64,
    pub momentum: f64,
    pub dampening: f64,
    pub nesterov: bool,
    /// The momentum buffers begin with this step's gradients.
    pub is_first_step: bool,
}

/// `torch._fused_sgd_`. `momentum_buffers` is empty without momentum.
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

/// The numbers of one step of AdamW.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AdamWStep {
    pub lr: f64,
    pub betas: (f64, f64),
    pub weight_decay: f64,
    pub eps: f64,
}

/// `torch._fused_adamw_`. `steps` count this one already.
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

/// The 2-norm of all `tensors` together: a tensor without dimensions, on their device.
pub(crate) fn total_norm(tensors: &TensorList) -> Result<Tensor> {
    // SAFETY: the pointer lives as long as `tensors`.
    unsafe { shim::total_norm(tensors.list) }
}

/// `torch._amp_foreach_non_finite_check_and_unscale_`: multiplies `gradients` by `inv_scale`, and sets
/// `found_inf` to 1 if one of them is not finite. Both are float32 tensors of one number.
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
    let Some(odd) = others.iter().find(|other| other.len != first.len) else { return Ok(()) };
    let reason = format!("lists of {} and {} tensors", first.len, odd.len);
    Err(Error::Torch { doing, reason })
}
