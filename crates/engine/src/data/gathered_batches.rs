//! Batches of samples that are already on the device, gathered several at a time.

use tch::Tensor;

use super::Batch;
use crate::error::Result;
use crate::ffi::{TorchResult, alignment};
use crate::process_group::num_bytes;

/// Gathers several batches at a time and splits them. This saves a libtorch call per tensor and step, without a
/// second copy of the data set.
///
/// Each batch starts at an address at which a new tensor could start. Elsewhere libtorch's matrix products round
/// differently, and a resumed run has its batches at other places in a block.
#[derive(Debug)]
pub(super) struct GatheredBatches {
    inputs: Rows,
    targets: Rows,
    total: i64,
    batch_size: i64,
    /// The number of batches gathered at a time.
    batches: i64,
    /// The number of the first gathered batch. `None` before the first is gathered.
    first: Option<i64>,
}

/// The rows of a tensor that an epoch takes, one for each sample.
#[derive(Debug)]
struct Rows {
    all: Tensor,
    /// The numbers of the rows, in the epoch's order, with those that fill the gap behind each batch.
    indices: Tensor,
    /// The number of rows from the start of a batch to the start of the next.
    stride: i64,
    /// The gathered batches, each with the gap behind it.
    block: Vec<Tensor>,
}

/// The number of bytes gathered at a time, at least one batch. Chosen to stay in the CPU's cache.
const BLOCK_BYTES: usize = 4 << 20;

/// The largest gap in bytes. To copy more takes longer than the libtorch call that it saves.
const MAX_GAP_BYTES: usize = 4 << 10;

impl GatheredBatches {
    pub(super) fn new(
        inputs: Tensor,
        targets: Tensor,
        indices: &[usize],
        batch_size: usize,
    ) -> Result<Self> {
        let batch_size = batch_size.min(indices.len()).max(1);
        let strides = aligned_stride(&inputs, batch_size).zip(aligned_stride(&targets, batch_size));
        let (inputs_stride, targets_stride) = strides.unwrap_or((batch_size, batch_size));
        let bytes = inputs_stride * row_bytes(&inputs) + targets_stride * row_bytes(&targets);
        let batches = if strides.is_some() { (BLOCK_BYTES / bytes.max(1)).max(1) } else { 1 };
        let indices_with_gaps = |stride: usize| {
            let mut padded: Vec<i64> = Vec::with_capacity(indices.len());
            for batch in indices.chunks(batch_size) {
                let end = padded.len() + stride;
                padded.extend(batch.iter().map(|&index| index as i64));
                if stride > batch_size {
                    padded.resize(end, batch[0] as i64);
                }
            }
            let on_device = || Tensor::f_from_slice(&padded)?.f_to_device(inputs.device());
            on_device().doing("the epoch's indices")
        };
        let of_inputs = indices_with_gaps(inputs_stride)?;
        let of_targets = if targets_stride == inputs_stride {
            of_inputs.shallow_clone()
        } else {
            indices_with_gaps(targets_stride)?
        };
        Ok(Self {
            inputs: Rows::new(inputs, of_inputs, inputs_stride),
            targets: Rows::new(targets, of_targets, targets_stride),
            total: indices.len() as i64,
            batch_size: batch_size as i64,
            batches: batches as i64,
            first: None,
        })
    }

    /// Returns batch `index` of the epoch.
    pub(super) fn batch(&mut self, index: usize) -> Result<Batch> {
        let index = index as i64;
        let within = index % self.batches;
        let first = index - within;
        if self.first != Some(first) {
            self.inputs.gather(first, self.batches)?;
            self.targets.gather(first, self.batches)?;
            self.first = Some(first);
        }
        let len = self.batch_size.min(self.total - index * self.batch_size);
        let batch = |rows: &Rows| rows.batch(within as usize, len, self.batch_size);
        let (inputs, targets) = (batch(&self.inputs)?, batch(&self.targets)?);
        Ok(Batch { inputs, targets, more_inputs: Vec::new(), len })
    }
}

impl Rows {
    fn new(all: Tensor, indices: Tensor, stride: usize) -> Self {
        Self { all, indices, stride: stride as i64, block: Vec::new() }
    }

    /// Gathers `batches` batches from batch `first` on, or as many as there are.
    fn gather(&mut self, first: i64, batches: i64) -> Result<()> {
        let start = first * self.stride;
        let len = (batches * self.stride).min(self.indices.numel() as i64 - start);
        // One call makes all batches, which costs less than a view for each.
        let gather = || {
            let indices = self.indices.f_narrow(0, start, len)?;
            self.all.f_index_select(0, &indices)?.f_unsafe_split(self.stride, 0)
        };
        self.block = gather().doing("gathering samples")?;
        Ok(())
    }

    /// Returns a gathered batch of `len` samples. `batch_size` is the length of all batches but the last.
    fn batch(&self, index: usize, len: i64, batch_size: i64) -> Result<Tensor> {
        let batch = &self.block[index];
        if self.stride == batch_size {
            return Ok(batch.shallow_clone()); // costs less than a view
        }
        batch.f_narrow(0, 0, len).doing("gathering samples")
    }
}

fn row_bytes(all: &Tensor) -> usize {
    num_bytes(all.kind(), all.numel()) / all.size()[0].max(1) as usize
}

/// Returns the smallest number of rows that has room for a batch and after which the next batch is aligned. `None` if
/// the gap is too large.
fn aligned_stride(all: &Tensor, batch_size: usize) -> Option<usize> {
    let (bytes, alignment) = (row_bytes(all), alignment(all.device()));
    let aligned_rows = alignment >> bytes.trailing_zeros().min(alignment.trailing_zeros());
    let stride = batch_size.next_multiple_of(aligned_rows);
    ((stride - batch_size) * bytes <= MAX_GAP_BYTES).then_some(stride)
}
