//! `ddp-mp sampler`: which sample goes to which rank.

use serde::Serialize;

use crate::data::DistributedSampler;
use crate::error::{Error, Result};
use crate::observe::{LogFormat, Printer};

/// What to show.
#[derive(Debug, Clone)]
pub struct SamplerRequest {
    /// How many samples there are.
    pub len: usize,
    /// How many ranks they are dealt to.
    pub world_size: usize,
    /// The rank to show; all, one after the other, if none.
    pub rank: Option<usize>,
    /// The epoch, from 0.
    pub epoch: u64,
    /// What the shuffle starts from.
    pub seed: u64,
    /// Drop the samples that don't go round.
    pub drop_last: bool,
    /// Don't shuffle.
    pub no_shuffle: bool,
}

#[derive(Serialize)]
struct Shard {
    rank: usize,
    epoch: u64,
    indices: Vec<usize>,
}

/// Prints the samples of the asked ranks: a sample a line, or one object a rank. With a rank for each sample, unless
/// there is only one to show.
///
/// # Errors
/// [`Error::Input`] when they can't be dealt, and when stdout can't be written.
pub fn sampler(request: &SamplerRequest, printer: &Printer) -> anyhow::Result<()> {
    if request.world_size == 0 {
        return Err(Error::Input("--world-size: 0 ranks get nothing; use 1 or more".into()).into());
    }
    let ranks = request.rank.map_or(0..request.world_size, |rank| rank..rank.saturating_add(1));
    for rank in ranks {
        let indices = sampler_of(request, rank)?.indices(request.epoch)?;
        match printer.format() {
            LogFormat::Json => printer.object(&Shard { rank, epoch: request.epoch, indices })?,
            LogFormat::Text => printer.lines(|out| {
                if rank == 0 && request.rank.is_none() {
                    writeln!(out, "rank  sample")?;
                }
                indices.iter().try_for_each(|index| match request.rank {
                    Some(_) => writeln!(out, "{index}"),
                    None => writeln!(out, "{rank:>4}  {index}"),
                })
            })?,
        }
    }
    Ok(())
}

fn sampler_of(request: &SamplerRequest, rank: usize) -> Result<DistributedSampler> {
    DistributedSampler::new(request.len, request.world_size, rank)?
        .shuffle(!request.no_shuffle)
        .seed(request.seed)
        .drop_last(request.drop_last)
}
