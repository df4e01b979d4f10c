//! The table of all backends. In this module a new one takes a folder, its `mod` line, and its line here.

use tch::Kind;

use super::backend::BackendType;
use super::reduce_op::ReduceOp;
use super::{gloo, nccl, threaded};
use crate::error::{Error, Result};
use crate::operation::Operation;

const BACKENDS: &[&BackendType] = &[&threaded::BACKEND, &gloo::BACKEND, &nccl::BACKEND];

/// Returns the backend of this name for a group within one process, or for one of several processes.
///
/// # Errors
/// [`Error::Unsupported`] if there is none.
pub(super) fn backend_named(name: &str, within_process: bool) -> Result<&'static BackendType> {
    match BACKENDS.iter().find(|backend| backend.name == name) {
        Some(backend) if backend.needs_network && within_process => Ok(&threaded::BACKEND),
        Some(backend) => Ok(backend),
        None => Err(Error::Unsupported(format!("there is no backend {name}"))),
    }
}

/// Checks that the backend of this name supports `operation` with `op` on tensors of `kind`.
pub(crate) fn check_reduction(
    backend: &str,
    operation: Operation,
    op: ReduceOp,
    kind: Kind,
) -> Result<()> {
    op.check_kind(operation, kind)?;
    (backend_named(backend, false)?.check_reduction)(operation, op, kind)
}
