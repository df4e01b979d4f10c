//! Data without a file: the handwritten digits that are built into the program (see assets/README.md), and random numbers.

use flate2::read::GzDecoder;

use super::array::Array;
use super::format::Format;
use super::{TargetKind, csv};
use crate::error::{Error, Result};
use crate::ffi::TorchResult;

const DIGITS: &[u8] = include_bytes!("../../../assets/digits.csv.gz");

/// 1797 handwritten digits of 8 x 8 pixels, in 17 shades.
#[derive(Debug)]
pub(super) struct Digits;

impl Format for Digits {
    fn usage(&self) -> &'static str {
        "digits"
    }

    fn remark(&self) -> &'static str {
        "handwritten, part of this program"
    }

    fn has_classes(&self) -> bool {
        true
    }

    fn read(&self, _location: &str, kind: TargetKind) -> Result<(Array, Array)> {
        let (inputs, targets) = csv::parse("digits", GzDecoder::new(DIGITS), kind)?;
        let shades = inputs.tensor.f_div_scalar(16.0);
        let shades = shades.doing("reading the digits")?;
        Ok((Array::plain(shades), targets))
    }
}

/// Random numbers.
#[derive(Debug)]
pub(super) struct Random;

impl Format for Random {
    fn usage(&self) -> &'static str {
        "random"
    }

    fn read(&self, _location: &str, _kind: TargetKind) -> Result<(Array, Array)> {
        Err(Error::usage("random data has no file; use TensorDataset::random".into()))
    }
}
