//! [`TextDataset`]: contexts of a text, for a model that predicts the next token.

use std::path::Path;

use tch::{Kind, Tensor};

use super::Dataset;
use super::dataset::Samples;
use super::subset::size_of_first_part;
use crate::error::{Error, Result};
use crate::ffi::{MappedFile, TorchResult};
use crate::files::{HTML, mistaken};

/// Contexts of a text file. The tokens are its bytes: int64 numbers from 0 to 255.
///
/// Sample i has the inputs `text[i * T..(i + 1) * T]` for contexts of T tokens, and as targets the token that follows
/// each of them, both of shape `[T]`. So one pass over the samples predicts every token of the text once, except for
/// the first token and the last ones if they do not fill a context.
///
/// The file is mapped into memory and must not change: see [`FileDataset`](super::FileDataset).
#[derive(Debug, Clone)]
pub struct TextDataset {
    name: String,
    /// One context per row, as bytes.
    samples: Samples,
    /// The number of the first context in the file.
    start: usize,
}

impl TextDataset {
    /// The number of different tokens.
    pub const VOCAB_SIZE: i64 = 256;

    /// Opens a text file as contexts of `block_size` tokens.
    ///
    /// # Errors
    /// [`Error::Input`] if the file cannot be read, or is too short for one context.
    pub fn open(path: &Path, block_size: usize) -> Result<Self> {
        let file = MappedFile::open(path)?;
        let name = file.name().to_owned();
        let is_page = path.extension().is_some_and(|ending| ending == "html" || ending == "htm");
        let expected = if is_page { HTML } else { "a text" };
        if let Some(problem) = mistaken(&file, expected, "name a file of plain text") {
            return Err(Error::data(format!("{name}: {problem}")));
        }
        let contexts = (file.len() - 1).checked_div(block_size).unwrap_or(0);
        if contexts == 0 {
            return Err(Error::data(format!(
                "{name}: the text has {} bytes, and a context of {block_size} tokens needs {}; use a longer text, or a \
                 smaller --block-size of at least 1",
                file.len(),
                block_size.saturating_add(1)
            )));
        }
        let rows = |first: usize| {
            let bytes = file.bytes(first..first + contexts * block_size)?;
            let rows = bytes.f_view([contexts as i64, block_size as i64]);
            rows.doing("making contexts of a text")
        };
        Ok(Self { samples: Samples::new(rows(0)?, rows(1)?), name, start: 0 })
    }

    /// Returns the first `samples` contexts.
    ///
    /// # Errors
    /// [`Error::Input`] for 0, and for more contexts than there are.
    pub fn first(&self, samples: usize) -> Result<Self> {
        let samples = self.samples.first(samples, &self.name, "contexts")?;
        Ok(Self { samples, ..self.clone() })
    }

    /// Splits the text into two parts. The second has `fraction` of the contexts, the last ones.
    ///
    /// # Errors
    /// [`Error::Input`] if a part would have no contexts.
    pub fn split_tail(&self, fraction: f64) -> Result<(Self, Self)> {
        let first = size_of_first_part(self.len(), fraction)?;
        Ok((self.part(0, first)?, self.part(first, self.len() - first)?))
    }

    /// Returns `len` contexts from context `first` on.
    fn part(&self, first: usize, len: usize) -> Result<Self> {
        let samples = self.samples.part(first, len)?;
        Ok(Self { name: self.name.clone(), samples, start: self.start + first })
    }
}

impl Dataset for TextDataset {
    fn len(&self) -> usize {
        self.samples.len()
    }

    fn get(&self, index: usize) -> anyhow::Result<(Tensor, Tensor)> {
        let (inputs, targets) = self.batch(&[index])?;
        Ok((inputs.f_get(0)?, targets.f_get(0)?))
    }

    fn source_index(&self, index: usize) -> usize {
        self.start + index
    }

    fn batch(&self, indices: &[usize]) -> anyhow::Result<(Tensor, Tensor)> {
        let (inputs, targets) = self.samples.gathered(indices)?;
        Ok((inputs.f_to_kind(Kind::Int64)?, targets.f_to_kind(Kind::Int64)?))
    }
}
