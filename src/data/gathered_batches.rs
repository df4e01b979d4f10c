//! Batches of samples that are already on the device, gathered several at a time.

use tch::Tensor;

use super::Batch;
use crate::error::Result;
use crate::ffi::TorchResult;
use crate::process_group::num_bytes;

/// Gathers several batches at a time and splits them. This saves a libtorch call per tensor and step, without a
/// second copy of the data set.
#[derive(Debug)]
pub(super) struct GatheredBatches {
    inputs: Tensor,
    targets: Tensor,
    indices: Tensor,
    total: i64,
    batch_size: i64,
    /// The number of batches gathered at a time.
    batches: i64,
    /// The gathered batches.
    block: Option<Block>,
}

/// Adjacent batches.
#[derive(Debug)]
struct Block {
    /// The number of the first batch.
    first: i64,
    inputs: Vec<Tensor>,
    targets: Vec<Tensor>,
}

/// The number of bytes gathered at a time, at least one batch. Chosen to stay in the CPU's cache.
const BLOCK_BYTES: usize = 4 << 20;

impl GatheredBatches {
    pub(super) fn new(
        inputs: Tensor,
        targets: Tensor,
        indices: &[usize],
        batch_size: usize,
    ) -> Result<Self> {
        let indices: Vec<i64> = indices.iter().map(|&index| index as i64).collect();
        let total = indices.len() as i64;
        let on_device = || Tensor::f_from_slice(&indices)?.f_to_device(inputs.device());
        let indices = on_device().doing("the epoch's indices")?;
        let sample_bytes = |tensor: &Tensor| {
            num_bytes(tensor.kind(), tensor.numel()) / tensor.size()[0].max(1) as usize
        };
        let bytes = (sample_bytes(&inputs) + sample_bytes(&targets)).max(1) * batch_size;
        let batches = (BLOCK_BYTES / bytes).max(1) as i64;
        let batch_size = batch_size as i64;
        Ok(Self { inputs, targets, indices, total, batch_size, batches, block: None })
    }

    /// Returns batch `number` of the epoch.
    pub(super) fn batch(&mut self, number: usize) -> Result<Batch> {
        let number = number as i64;
        let first = number - number % self.batches;
        let gather = || {
            let start = first * self.batch_size;
            let len = (self.batches * self.batch_size).min(self.total - start);
            let indices = self.indices.f_narrow(0, start, len)?;
            // One call makes all batches, which costs less than a view for each.
            let gather =
                |all: &Tensor| all.f_index_select(0, &indices)?.f_unsafe_split(self.batch_size, 0);
            Ok(Block { first, inputs: gather(&self.inputs)?, targets: gather(&self.targets)? })
        };
        let block = match &mut self.block {
            Some(block) if block.first == first => block,
            block => block.insert(gather().doing("gathering samples")?),
        };
        let within = (number - first) as usize;
        let [inputs, targets] =
            [&block.inputs, &block.targets].map(|batches| batches[within].shallow_clone());
        let len = self.batch_size.min(self.total - number * self.batch_size);
        Ok(Batch { inputs, targets, len })
    }
}
