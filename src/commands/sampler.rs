//! `ddp-mp sampler`: the samples of each rank.

use std::io::Write;

use serde::Serialize;

use crate::data::DistributedSampler;
use crate::error::Error;
use crate::telemetry::{Printer, total_memory};

/// The samples to show.
#[derive(Debug, Clone)]
pub struct SamplerRequest {
    /// The number of samples.
    pub len: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// The rank to show. `None` for all, one after the other.
    pub rank: Option<usize>,
    /// The epoch, from 0.
    pub epoch: u64,
    /// The seed of the shuffle.
    pub seed: u64,
    /// Drop the samples that cannot be divided equally among the ranks.
    pub drop_last: bool,
    /// Deal every sample once, unless some are dropped. Ranks may differ by one sample.
    pub exact_mean: bool,
    /// Don't shuffle.
    pub no_shuffle: bool,
}

impl SamplerRequest {
    /// The most ranks. Each has at least one line.
    pub const MOST_RANKS: usize = 1 << 20;
}

#[derive(Serialize)]
struct Shard<'a> {
    rank: usize,
    epoch: u64,
    indices: &'a [usize],
}

/// Prints the samples of the requested ranks: one line per sample, or one JSON object per rank. A line includes the
/// rank unless only one rank is requested.
///
/// # Errors
/// [`Error::InvalidInput`] when the samples can't be dealt, and an error when stdout can't be written.
pub fn sampler(request: &SamplerRequest, printer: &Printer) -> anyhow::Result<()> {
    let world_size = request.world_size;
    if !(1..=SamplerRequest::MOST_RANKS).contains(&world_size) {
        return Err(Error::InvalidInput(format!(
            "--world-size: {world_size} ranks cannot be listed; use 1 to {}",
            SamplerRequest::MOST_RANKS
        ))
        .into());
    }
    let ranks = match request.rank {
        Some(rank) if rank >= world_size => {
            return Err(Error::InvalidInput(format!(
                "--rank: there is no rank {rank} among {world_size} ranks; use 0 to {}",
                world_size - 1
            ))
            .into());
        }
        Some(rank) => rank..rank + 1,
        None => 0..world_size,
    };
    let bytes = (request.len as u64).saturating_mul(size_of::<usize>() as u64);
    if total_memory().is_some_and(|total| bytes > total) {
        return Err(Error::InvalidInput(format!(
            "--len: the order of {} samples does not fit into this machine's memory; use fewer samples",
            request.len
        ))
        .into());
    }
    let sampler = DistributedSampler::new(request.len, world_size, 0)?
        .shuffle(!request.no_shuffle)
        .seed(request.seed)
        .drop_last(request.drop_last)?;
    let sampler = match request.exact_mean && !request.drop_last {
        true => sampler.without_padding(),
        false => sampler,
    };
    let order = sampler.order(request.epoch)?;
    for rank in ranks {
        let sampler = sampler.for_rank(rank);
        let indices = sampler.deal(order.as_deref(), 0)?;
        // Samples from this number on repeat the first ones.
        let padding = sampler.without_padding().num_samples();
        let write = |out: &mut dyn Write| {
            if rank == 0 && request.rank.is_none() {
                writeln!(out, "rank  sample")?;
            }
            indices.iter().enumerate().try_for_each(|(number, index)| match request.rank {
                Some(_) => writeln!(out, "{index}"),
                None if number >= padding => writeln!(out, "{rank:>4}  {index}  (padding)"),
                None => writeln!(out, "{rank:>4}  {index}"),
            })
        };
        printer.result(&Shard { rank, epoch: request.epoch, indices: &indices }, write)?;
    }
    Ok(())
}
