//! Errors in the arguments of an operation.

use crate::error::{Error, Result};
use crate::operation::Operation;

/// Returns an error in the arguments of `operation`.
pub(super) fn refuse<T>(operation: Operation, why: String) -> Result<T> {
    Err(Error::InvalidInput(format!("{operation}: {why}")))
}

/// Returns the error of a tensor that is undefined.
pub(super) fn undefined<T>(operation: Operation) -> Result<T> {
    refuse(operation, "the tensor is undefined; make one first".into())
}
