//! Random numbers, which have no file.

use super::TargetKind;
use super::array::Array;
use super::format::Format;
use crate::error::{Error, Result};

#[derive(Debug)]
pub(super) struct Random;

impl Format for Random {
    fn usage(&self) -> &'static str {
        "random"
    }

    fn read(&self, _location: &str, _kind: TargetKind) -> Result<(Array, Array)> {
        Err(Error::InvalidInput("random data has no file; use TensorDataset::random".into()))
    }
}
