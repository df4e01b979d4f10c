//! `ddp-mp sampler`: the samples of each rank.

use std::io::Write;

use anyhow::bail;
use clap::Args;
use serde::Serialize;

use crate::config::{Config, check_fits, name, whole};
use engine::error::Error;
use views::{LogFormat, Printer};

/// The most ranks. Each has at least one line.
const MOST_RANKS: usize = 1 << 20;

/// The flags of `sampler`.
#[derive(Debug, Clone, Args)]
pub struct SamplerFlags {
    /// Set the number of samples
    #[arg(long, value_name = "N", value_parser = whole::<usize>(1..=u64::MAX))]
    pub len: usize,
    /// Set the number of ranks
    #[arg(long, value_name = "W", value_parser = whole::<usize>(1..=MOST_RANKS as u64))]
    pub world_size: usize,
    /// Show only this rank
    #[arg(long, value_name = "R", value_parser = whole::<usize>(0..=u64::MAX))]
    pub rank: Option<usize>,
    /// Choose the epoch, from 0
    #[arg(long, value_name = "E", value_parser = whole::<u64>(0..=u64::MAX), default_value_t = 0)]
    pub epoch: u64,
    /// Set the random seed of the shuffle
    #[arg(long, value_name = "S", value_parser = whole::<u64>(0..=u64::MAX), default_value_t = 0)]
    pub seed: u64,
    /// Drop samples that cannot be divided equally; add no padding
    #[arg(long)]
    pub drop_last: bool,
    /// Deal each sample once, as training with --exact-mean does
    #[arg(long)]
    pub exact_mean: bool,
    /// Keep the samples in order; do not shuffle them
    #[arg(long)]
    pub no_shuffle: bool,
    /// Choose the output format
    ///
    /// text: one sample per line, with its rank unless --rank is given. json: one object per rank
    #[arg(long, value_name = "FORMAT", value_parser = name::<LogFormat>(), default_value = "text")]
    pub log_format: LogFormat,
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
/// [`Error::Input`] when the samples can't be dealt, and an error when stdout can't be written.
pub fn sampler(flags: &SamplerFlags, printer: &Printer) -> anyhow::Result<()> {
    let world_size = flags.world_size;
    let ranks = match flags.rank {
        Some(rank) if rank >= world_size => {
            bail!(Error::usage(format!(
                "--rank: there is no rank {rank} among {world_size} ranks; use 0 to {}",
                world_size - 1
            )));
        }
        Some(rank) => rank..rank + 1,
        None => 0..world_size,
    };
    let what = format!("--len: the order of {} samples takes", flags.len);
    check_fits(&what, flags.len as f64 * size_of::<usize>() as f64, "use fewer samples")?;
    let mut config = Config::default();
    (config.data.no_shuffle, config.data.drop_last) = (flags.no_shuffle, flags.drop_last);
    (config.training.seed, config.ddp.exact_mean) = (flags.seed, flags.exact_mean);
    let sampler = config.sampler(flags.len, world_size, 0)?;
    let order = sampler.order(flags.epoch)?;
    for rank in ranks {
        let sampler = sampler.for_rank(rank);
        let indices = sampler.deal(order.as_deref(), 0)?;
        // Samples from this number on repeat the first ones.
        let padding = sampler.without_padding().num_samples();
        let write = |out: &mut dyn Write| {
            if rank == 0 && flags.rank.is_none() {
                writeln!(out, "rank  sample")?;
            }
            indices.iter().enumerate().try_for_each(|(number, index)| match flags.rank {
                Some(_) => writeln!(out, "{index}"),
                None if number >= padding => writeln!(out, "{rank:>4}  {index}  (padding)"),
                None => writeln!(out, "{rank:>4}  {index}"),
            })
        };
        printer.result(&Shard { rank, epoch: flags.epoch, indices: &indices }, write)?;
    }
    Ok(())
}
