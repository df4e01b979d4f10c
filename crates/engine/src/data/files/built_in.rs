//! Data without a file: the handwritten digits that are built into the program (see README.md), and random numbers.

use flate2::read::GzDecoder;

use super::array::Array;
use super::csv;
use super::format::Format;
use crate::error::Error;
use crate::ffi::TorchResult;

/// 1797 handwritten digits of 8 x 8 pixels, in 17 shades.
pub(super) const DIGITS: Format = Format {
    remark: "handwritten, part of this program",
    has_classes: true,
    ..Format::new("digits", |_, kind| {
        let packed: &[u8] = include_bytes!("digits.csv.gz");
        let (inputs, targets) = csv::parse("digits", GzDecoder::new(packed), kind)?;
        let shades = inputs.tensor.f_div_scalar(16.0);
        Ok((Array::plain(shades.doing("reading the digits")?), targets))
    })
};

/// Random numbers.
pub(super) const RANDOM: Format = Format::new("random", |_, _| {
    Err(Error::usage("random data has no file; use TensorDataset::random".into()))
});
