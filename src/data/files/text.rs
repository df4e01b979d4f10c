//! Text files, whose bytes are tokens.

use super::TargetKind;
use super::array::Array;
use super::format::Format;
use crate::error::{Error, Result};

/// A text, of which [`TextDataset`](crate::TextDataset) makes contexts.
#[derive(Debug)]
pub(super) struct Text;

impl Format for Text {
    fn usage(&self) -> &'static str {
        "text:FILE"
    }

    fn remark(&self) -> &'static str {
        "for --model gpt"
    }

    fn endings(&self) -> &'static [&'static str] {
        &[".txt"]
    }

    fn has_classes(&self) -> bool {
        true
    }

    fn read(&self, _location: &str, _kind: TargetKind) -> Result<(Array, Array)> {
        Err(Error::usage("a text has no samples of numbers; use TextDataset::open".into()))
    }
}
