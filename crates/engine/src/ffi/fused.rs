//! Operations of libtorch on whole lists of tensors: fused optimizer steps, norms, and scaling.

use std::ffi::c_char;
use std::ops::Deref;

use tch::Tensor;
use torch_sys::C_tensor;

use super::shim::{Object, check, failed_in, new_tensor, raw};
use crate::error::Result;

/// `std::vector<at::Tensor>`, only ever behind a pointer.
enum RawTensorList {}

unsafe extern "C" {
    fn ddp_tensor_list_new(
        tensors: *const *mut C_tensor,
        len: usize,
        list: *mut *mut RawTensorList,
    ) -> *mut c_char;
    fn ddp_tensor_list_free(list: *mut RawTensorList);
    fn ddp_bump_versions(list: *mut RawTensorList) -> *mut c_char;
    fn ddp_fused_sgd(lists: &[*mut RawTensorList; 3], step: &SgdStep) -> *mut c_char;
    fn ddp_fused_adamw(lists: &[*mut RawTensorList; 5], step: &AdamWStep) -> *mut c_char;
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
    list: Object<RawTensorList>,
    tensors: Vec<Tensor>,
}

impl TensorList {
    /// Creates a list of these tensors, without copies.
    pub(crate) fn new(tensors: Vec<Tensor>) -> Result<Self> {
        let handles: Vec<*mut C_tensor> = tensors.iter().map(raw).collect();
        // SAFETY: `handles` are pointers to live tensors, and the list has handles of its own to them. It is freed with
        // `ddp_tensor_list_free`.
        let list = unsafe {
            Object::new(ddp_tensor_list_free, |list| {
                ddp_tensor_list_new(handles.as_ptr(), handles.len(), list)
            })
        };
        Ok(Self { list: list.map_err(failed_in("listing tensors"))?, tensors })
    }
}

impl Deref for TensorList {
    type Target = [Tensor];

    fn deref(&self) -> &[Tensor] {
        &self.tensors
    }
}

/// Marks each of `tensors` as written to, for writes that bypass the tensor's own operations. A graph that saved one of
/// them then refuses to run backward. Follows `torch.autograd.graph.increment_version`.
pub(crate) fn bump_versions(tensors: &TensorList) -> Result<()> {
    // SAFETY: the pointer lives as long as `tensors`.
    check("increment_version", unsafe { ddp_bump_versions(tensors.list.at) })
}

/// The options of one SGD step, as in `shim.cpp`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct SgdStep {
    pub lr: f64,
    pub weight_decay: f64,
    pub momentum: f64,
    pub dampening: f64,
    pub nesterov: bool,
    /// Whether to initialise the momentum buffers with this step's gradients.
    pub is_first_step: bool,
}

/// Calls `torch._fused_sgd_` with the parameters, their gradients and their momentum buffers. The list of these is empty
/// without momentum.
pub(crate) fn fused_sgd(lists: [&TensorList; 3], step: SgdStep) -> Result<()> {
    same_len("_fused_sgd_", if step.momentum == 0.0 { &lists[..2] } else { &lists })?;
    let lists = lists.map(|list| list.list.at);
    // SAFETY: all point to live lists, which libtorch reads to the end of the first one: none is shorter.
    check("_fused_sgd_", unsafe { ddp_fused_sgd(&lists, &step) })
}

/// The options of one AdamW step, as in `shim.cpp`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct AdamWStep {
    pub lr: f64,
    pub betas: [f64; 2],
    pub weight_decay: f64,
    pub eps: f64,
}

/// Calls `torch._fused_adamw_` with the parameters, their gradients, the averages of these and of their squares, and the
/// numbers of steps, which already include this one.
pub(crate) fn fused_adamw(lists: [&TensorList; 5], step: AdamWStep) -> Result<()> {
    same_len("_fused_adamw_", &lists)?;
    let lists = lists.map(|list| list.list.at);
    // SAFETY: as in `fused_sgd`.
    check("_fused_adamw_", unsafe { ddp_fused_adamw(&lists, &step) })
}

/// Returns the 2-norm of all `tensors` together, as a tensor without dimensions on their device.
pub(crate) fn total_norm(tensors: &TensorList) -> Result<Tensor> {
    // SAFETY: the pointer lives as long as `tensors`; on success the shim writes a new C++ tensor.
    unsafe { new_tensor("the norm of the gradients", |norm| ddp_total_norm(tensors.list.at, norm)) }
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
        ddp_amp_unscale(gradients.list.at, raw(found_inf), raw(inv_scale))
    })
}

/// Multiplies each of `tensors` by `factor`, a tensor without dimensions on their device.
pub(crate) fn scale_all(tensors: &TensorList, factor: &Tensor) -> Result<()> {
    // SAFETY: the pointer lives as long as `tensors`; `factor` is live.
    check("scaling gradients", unsafe { ddp_scale_all(tensors.list.at, raw(factor)) })
}

fn same_len(doing: &'static str, lists: &[&TensorList]) -> Result<()> {
    let first = lists[0];
    let Some(other) = lists.iter().find(|other| other.len() != first.len()) else { return Ok(()) };
    let reason = format!("lists of {} and {} tensors", first.len(), other.len());
    Err(failed_in(doing)(reason))
}
