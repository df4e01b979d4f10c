//! The handwritten digits that are built into the program: see assets/README.md.

use flate2::read::GzDecoder;

use super::array::Array;
use super::{TargetKind, csv};
use crate::error::{Error, Result};

const DIGITS: &[u8] = include_bytes!("../../../assets/digits.csv.gz");

/// Returns 1797 images of 8 x 8 pixels in 17 shades, and the digit of each.
pub(super) fn read(kind: TargetKind) -> Result<(Array, Array)> {
    let (inputs, targets) = csv::parse("digits", GzDecoder::new(DIGITS), kind)?;
    let shades = inputs.tensor.f_div_scalar(16.0).map_err(Error::torch("reading the digits"))?;
    Ok((Array::plain(shades), targets))
}
