//! `ddp-mp bench scaling`: what more ranks on this machine give, measured against one rank.

use std::io::{self, Write};
use std::sync::Arc;

use anyhow::Context;
use serde::Serialize;
use tch::Device;

use super::super::no_use::refuse_flags;
use super::super::train::with_data;
use super::super::{cores, place_ranks};
use super::note_if_busy;
use super::step::step_on;
use crate::config::Config;
use crate::data::Dataset;
use crate::error::{Error, Result};
use crate::launch::{Nproc, Spawn, SpawnChoice};
use crate::observe::{LogFormat, Printer};
use crate::torch::cuda::Cuda;

/// The flags that only runs of several processes have, and those that the measurement sets itself.
const NOT_OF_SCALING: [&str; 8] =
    ["fault", "accumulate", "spawn", "launch", "nnodes", "node_rank", "master_addr", "master_port"];

/// What stays the same when there are more ranks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Scaling {
    /// The work of each rank.
    Weak,
    /// The work of all ranks together.
    Strong,
}

/// One number of ranks: a row of the table.
#[derive(Debug, Serialize)]
struct Row {
    model: &'static str,
    scaling: Scaling,
    /// How many CPU cores this process may use.
    cores: usize,
    world_size: usize,
    threads_per_rank: usize,
    /// On each rank.
    batch_size: usize,
    us_per_step: f64,
    /// Of all ranks together.
    samples_per_second: f64,
    /// `samples_per_second` by `world_size` times those of one rank: 1 if N ranks are N times as fast as one.
    efficiency: f64,
    /// The slowest repetition by the fastest.
    #[serde(skip)]
    spread: f64,
}

/// Refuses a flag that [`bench_scaling`] would do nothing with.
///
/// # Errors
/// [`Error::Input`] that names it.
pub fn check_scaling_flags<'a>(keys: impl IntoIterator<Item = &'a String>) -> Result<()> {
    refuse_flags(keys, &NOT_OF_SCALING, "bench scaling measures single steps in one process,")
}

/// Measures the training step of `config` with 1, 2 and more ranks, up to `--nproc-per-node`, and prints samples per
/// second and efficiency against one rank: once with the batch of `config` on each rank, and once with the same samples
/// shared out among the ranks. The numbers of ranks take turns `repetitions` times, of `steps` steps each, so that
/// what else the machine does touches all of them; the medians count.
///
/// # Errors
/// [`Error::Input`] when that can't be done here, and [`SpawnError`](crate::SpawnError) when a rank failed.
pub fn bench_scaling(
    config: Config,
    steps: usize,
    repetitions: usize,
    cuda: &Cuda,
    printer: &Printer,
) -> anyhow::Result<()> {
    if config.accumulate > 1 || config.spawn == SpawnChoice::Processes {
        let problem = "bench scaling measures steps of one batch, of ranks that are threads; leave accumulate and \
                       spawn out of the file";
        return Err(Error::Input(problem.into()).into());
    }
    let ranks = place_ranks(config.nproc_per_node, config.backend, cuda)?.devices.len();
    // Steps of fewer samples would not be the same work.
    let config =
        Config { val_fraction: Some(0.0), patience: None, drop_last_batch: true, ..config };
    let (config, data) = with_data(config)?;
    let (batch_size, samples) = (config.batch_size, data.training.len());
    let of_all = batch_size.saturating_mul(ranks);
    if of_all > samples {
        return Err(Error::Input(format!(
            "--batch-size: a step of {ranks} ranks with {batch_size} samples each takes more than the {samples} that \
             there are; use a smaller batch, fewer ranks or more samples"
        ))
        .into());
    }
    let cases: Vec<(Scaling, usize, usize)> = [Scaling::Weak, Scaling::Strong]
        .into_iter()
        .flat_map(|scaling| numbers_of_ranks(ranks).into_iter().map(move |n| (scaling, n)))
        .map(|(scaling, n)| match scaling {
            Scaling::Weak => (scaling, n, batch_size),
            Scaling::Strong => (scaling, n, of_all.div_ceil(n)),
        })
        .collect();
    let mut times = vec![Vec::with_capacity(repetitions); cases.len()];
    let mut threads = vec![1; cases.len()];
    for _ in 0..repetitions {
        for (case, &(_, ranks, batch_size)) in cases.iter().enumerate() {
            let config =
                Config { nproc_per_node: Nproc::Count(ranks), batch_size, ..config.clone() };
            let (us_per_step, threads_per_rank) = measure(config, &data.training, steps, cuda)?;
            times[case].push(us_per_step);
            threads[case] = threads_per_rank;
        }
    }
    let mut rows: Vec<Row> = Vec::with_capacity(cases.len());
    for (case, &(scaling, world_size, batch_size)) in cases.iter().enumerate() {
        let times = &mut times[case];
        times.sort_unstable_by(f64::total_cmp);
        let us_per_step = times[times.len() / 2];
        let samples_per_second = (batch_size * world_size) as f64 / us_per_step * 1e6;
        let one = rows.iter().find(|row| row.scaling == scaling && row.world_size == 1);
        let of_one = one.map_or(samples_per_second, |row| row.samples_per_second);
        rows.push(Row {
            model: config.model.name(),
            scaling,
            cores: cores(),
            world_size,
            threads_per_rank: threads[case],
            batch_size,
            us_per_step,
            samples_per_second,
            efficiency: samples_per_second / (of_one * world_size as f64),
            spread: times[times.len() - 1] / times[0],
        });
    }
    match printer.format() {
        LogFormat::Json => rows.iter().try_for_each(|row| printer.object(row)),
        LogFormat::Text => {
            printer.lines(|out| write_text(&rows, batch_size, [steps, repetitions], out))
        }
    }
    .context("writing to stdout")?;
    let spread = rows.iter().map(|row| row.spread).fold(1.0, f64::max);
    note_if_busy("the slowest repetition took", spread, printer);
    Ok(())
}

/// Returns 1, 2, 3, 4, then powers of two, and `most`.
fn numbers_of_ranks(most: usize) -> Vec<usize> {
    let doubled = std::iter::successors(Some(8), |n: &usize| n.checked_mul(2));
    let mut numbers: Vec<usize> = (1..=4).chain(doubled.take_while(|&n| n < most)).collect();
    numbers.retain(|&n| n < most);
    numbers.push(most);
    numbers
}

/// Returns the median step of rank 0 in microseconds, and how many threads libtorch had on each rank.
fn measure(
    config: Config,
    dataset: &Arc<dyn Dataset>,
    steps: usize,
    cuda: &Cuda,
) -> anyhow::Result<(f64, usize)> {
    let placement = place_ranks(config.nproc_per_node, config.backend, cuda)?;
    let ranks = placement.devices.len();
    config.validate_for(ranks)?;
    if placement.devices[0] == Device::Cpu {
        config.check_memory_for(ranks)?;
    }
    let spawn = Spawn::at(&placement).timeout(config.timeout).grace_period(config.grace_period);
    let (backend, dataset) = (placement.backend, dataset.clone());
    let times = spawn.run(move |rank| step_on(rank, backend, &config, &dataset, steps))?;
    let times = times.into_iter().flatten().next().context("rank 0 has no times")?;
    Ok((times.us_per_step, placement.threads_per_rank))
}

fn write_text(
    rows: &[Row],
    batch_size: usize,
    [steps, repetitions]: [usize; 2],
    out: &mut dyn Write,
) -> io::Result<()> {
    let Some(last) = rows.last() else { return Ok(()) };
    let (ranks, cores) = (last.world_size, last.cores);
    let s = if cores == 1 { "" } else { "s" };
    writeln!(
        out,
        "# {}, {cores} CPU core{s}: medians of {repetitions} repetitions of {steps} steps\n\
         # weak: every rank takes {batch_size} samples a step; strong: all ranks together take {}\n\
         # efficiency: samples per second, by those of one rank times the number of ranks\n\
         #\n#{:>7}{:>7}{:>9}{:>8}{:>12}{:>12}{:>12}\n#{:>7}{:>7}{:>9}{:>8}{:>12}{:>12}{:>12}",
        last.model,
        batch_size * ranks,
        "scaling",
        "ranks",
        "threads",
        "batch",
        "step",
        "samples",
        "efficiency",
        "",
        "",
        "a rank",
        "a rank",
        "(us)",
        "(1/s)",
        "(%)"
    )?;
    for row in rows {
        let scaling = if row.scaling == Scaling::Weak { "weak" } else { "strong" };
        writeln!(
            out,
            "{scaling:>8}{:>7}{:>9}{:>8}{:>12.1}{:>12.0}{:>12.1}",
            row.world_size,
            row.threads_per_rank,
            row.batch_size,
            row.us_per_step,
            row.samples_per_second,
            100.0 * row.efficiency
        )?;
    }
    if ranks > cores {
        writeln!(
            out,
            "# {ranks} ranks take turns on {cores} core{s}: more than {cores} give no more."
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_of_ranks_end_at_the_largest() {
        for (most, numbers) in [
            (1, vec![1]),
            (2, vec![1, 2]),
            (4, vec![1, 2, 3, 4]),
            (6, vec![1, 2, 3, 4, 6]),
            (24, vec![1, 2, 3, 4, 8, 16, 24]),
        ] {
            assert_eq!(numbers_of_ranks(most), numbers);
        }
    }
}
