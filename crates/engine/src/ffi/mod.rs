//! Parts of libtorch that `tch` lacks: the C++ shim and its safe wrappers.
//!
//! `unsafe` stands only here, in `os` and in the backends of `process_group`.

mod autocast;
mod autograd;
mod c10d;
pub mod cuda;
mod facts;
mod fused;
mod generator;
pub(crate) mod gloo;
mod hooks;
mod kept_memory;
mod library;
mod mapped;
mod shared;
mod shim;
pub(crate) mod store;

pub use autocast::Autocast;
pub use autograd::backward;
pub use generator::{Generator, fork_rng};
pub use kept_memory::{give_back_memory, keep_memory, keeps_memory, kept_memory};
pub use library::{check_version, library_folder, version};
pub(crate) use library::{choose_kernels, library_file};
pub use shared::SharedTensor;

pub(crate) use autograd::{linear, retain_grad, run_backward};
pub(crate) use facts::{Shape, TensorFacts, shape, with_bytes};
pub(crate) use fused::{
    AdamWStep, SgdStep, TensorList, amp_unscale, bump_versions, fused_adamw, fused_sgd, scale_all,
    total_norm,
};
pub(crate) use gloo::{GlooCall, GlooGroup, check_interfaces};
pub(crate) use hooks::GradHooks;
pub(crate) use kept_memory::alignment;
pub(crate) use mapped::{MappedFile, memory_tensor, open_file};
pub use shim::hide_stack_traces;
pub(crate) use shim::{
    add_scaled, adopt_grad, move_grad, remove_grad, set_grad, set_multithreading_enabled, set_view,
    shares_memory,
};
pub(crate) use store::TcpStore;

use tch::TchError;

use crate::error::{Error, Result, first_line};

/// A result of libtorch. Its error does not name the action that failed.
#[doc(hidden)]
pub trait TorchResult<T> {
    /// Converts the error into [`Error::Torch`], which names `action`.
    fn doing(self, action: &'static str) -> Result<T>;
}

impl<T> TorchResult<T> for Result<T, TchError> {
    fn doing(self, action: &'static str) -> Result<T> {
        self.map_err(|error| Error::Torch { doing: action, reason: first_line(&error.to_string()) })
    }
}
