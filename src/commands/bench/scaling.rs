//! `ddp-mp bench scaling`: the gain from more ranks on this machine. Efficiency compares them with one rank of as
//! many threads as each has; speed-up compares them with one rank of all cores.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use anyhow::{Context, bail};
use serde::Serialize;
use tch::Device;

use super::note_if_busy;
use super::sorted::Sorted;
use super::step::{StepTimes, step_on};
use super::table::{self, Column};
use crate::config::Config;
use crate::session::{check_shared_model, configure, open_data, place_ranks};
use engine::data::Dataset;
use engine::error::{Error, Result, counted};
use engine::ffi::cuda::Cuda;
use engine::launch::{Nproc, Placement, Spawn, SpawnChoice};
use engine::os::cores;
use views::Printer;

/// One number of ranks: a row of the table.
#[derive(Debug, Serialize)]
struct Row {
    model: &'static str,
    /// `weak`, where the work of each rank stays the same, or `strong`, where that of all ranks together does.
    scaling: &'static str,
    /// The number of CPU cores that this process may use.
    cores: usize,
    world_size: usize,
    threads_per_rank: usize,
    /// Samples per batch on each rank.
    batch_size: usize,
    us_per_step: f64,
    /// The samples of all ranks together.
    samples_per_second: f64,
    /// The samples per second of one rank with `threads_per_rank` threads.
    samples_per_second_of_one: f64,
    /// `samples_per_second` divided by `world_size` times `samples_per_second_of_one`: 1 if N ranks are N times
    /// faster.
    efficiency: f64,
    /// `samples_per_second` divided by that of one rank with the threads of all cores.
    speedup: f64,
}

/// What is measured: equal cases take the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Case {
    ranks: usize,
    threads_per_rank: usize,
    /// Samples per batch on each rank.
    batch_size: usize,
}

/// The times of each case, one for each repetition.
type Measured = BTreeMap<Case, Vec<StepTimes>>;

impl Case {
    /// Measures `steps` steps of this case. `placement` has its ranks. Returns the times of rank 0.
    fn measure(
        self,
        mut placement: Placement,
        config: &Config,
        dataset: &Arc<dyn Dataset>,
        steps: usize,
        printer: &Arc<Printer>,
    ) -> anyhow::Result<StepTimes> {
        placement.threads_per_rank = self.threads_per_rank;
        let mut config = config.clone();
        config.launch.nproc_per_node = Nproc::Count(self.ranks);
        config.training.batch_size = self.batch_size;
        config.validate_for(self.ranks)?;
        let spawn = configure(Spawn::at(&placement), &config, printer);
        let (backend, dataset) = (placement.backend, dataset.clone());
        let times = spawn.run(move |rank| step_on(rank, backend, &config, &dataset, steps))?;
        times.into_iter().flatten().next().context("rank 0 has no times")
    }
}

/// Returns the times of a step in order, one for each repetition.
fn sorted(times: &[StepTimes]) -> Sorted {
    Sorted::new(times.iter().map(|step| step.us_per_step))
}

/// A case, and those of one rank to compare it with.
struct ComparedCase {
    scaling: &'static str,
    case: Case,
    /// One rank with as many threads as each rank of `case`.
    alike: Case,
    /// One rank with the threads of all cores.
    one: Case,
}

impl ComparedCase {
    /// Returns the row of the table.
    fn row(&self, model: &'static str, measured: &Measured) -> Row {
        let Case { ranks, threads_per_rank, batch_size } = self.case;
        let us_of = |case: Case| sorted(&measured[&case]).median();
        let per_second = |case: Case| (case.batch_size * case.ranks) as f64 / us_of(case) * 1e6;
        let (all, alike) = (per_second(self.case), per_second(self.alike));
        Row {
            model,
            scaling: self.scaling,
            cores: cores(),
            world_size: ranks,
            threads_per_rank,
            batch_size,
            us_per_step: us_of(self.case),
            samples_per_second: all,
            samples_per_second_of_one: alike,
            efficiency: all / (alike * ranks as f64),
            speedup: all / per_second(self.one),
        }
    }
}

/// Measures the training step of `config` with 1, 2 and more ranks, up to `--nproc-per-node`. Prints samples per
/// second, efficiency and speed-up: once with the batch of `config` on each rank, and once with the same samples
/// shared out among the ranks. The numbers of ranks take turns `repetitions` times, for `steps` steps each, so that
/// other load on the machine affects all of them. The medians count.
///
/// One rank has the threads of all cores, two ranks have half of them each. There are therefore two kinds of one rank
/// to compare with. Efficiency is the share that is left of N times a rank with the same threads. Speed-up is the
/// gain over one rank with all cores.
///
/// # Errors
/// [`Error::Input`] when `config` can't be measured here, and [`SpawnError`](crate::SpawnError) when a rank
/// failed.
pub fn bench_scaling(
    config: Config,
    steps: usize,
    repetitions: usize,
    cuda: &Cuda,
    printer: &Arc<Printer>,
) -> anyhow::Result<()> {
    if config.ddp.grad_accum_steps > 1 || config.launch.spawn == SpawnChoice::Processes {
        let problem = "bench scaling measures steps of one batch, with ranks as threads; remove grad_accum_steps and \
                       spawn from the file";
        bail!(Error::usage(problem.into()));
    }
    let placement = place(config.launch.nproc_per_node, &config, cuda)?;
    check_shared_model(&config, &placement)?;
    let (ranks, on_gpu) = (placement.devices.len(), placement.devices[0] != Device::Cpu);
    // Steps of fewer samples would not be the same work.
    let mut config = config.without_validation();
    config.launch.inject_fault = None; // of a file, for training
    config.data.drop_last_batch = true;
    let (config, data) = open_data(config)?;
    let (batch_size, samples) = (config.training.batch_size, data.training.len());
    if batch_size.saturating_mul(ranks) > samples {
        bail!(Error::usage(format!(
            "--batch-size: {ranks} ranks with {batch_size} samples each need more than the {samples} samples of the \
             data; use a smaller batch, fewer ranks or more samples"
        )));
    }
    let compared = compared_cases(&config, ranks, on_gpu, cuda)?;
    let cases = compared.iter().flat_map(|it| [it.case, it.alike, it.one]);
    let mut measured: Measured = cases.map(|case| (case, Vec::new())).collect();
    for _ in 0..repetitions {
        for (case, times) in &mut measured {
            let placement = place(Nproc::Count(case.ranks), &config, cuda)?;
            times.push(case.measure(placement, &config, &data.training, steps, printer)?);
        }
    }
    let row = |compared: &ComparedCase| compared.row(config.model_name(), &measured);
    let rows: Vec<Row> = compared.iter().map(row).collect();
    print(&rows, on_gpu, batch_size, [steps, repetitions], printer)?;
    note_if_times_vary(&measured, printer);
    Ok(())
}

/// Returns where the ranks of `nproc` run, with the other options of `config`.
fn place(nproc: Nproc, config: &Config, cuda: &Cuda) -> Result<Placement> {
    place_ranks(nproc, config.launch.backend, config.launch.bind, cuda)
}

/// Returns each case, with the one rank of as many threads and the one of all cores. On GPUs threads do not matter.
fn compared_cases(
    config: &Config,
    most_ranks: usize,
    on_gpu: bool,
    cuda: &Cuda,
) -> Result<Vec<ComparedCase>> {
    let batch_size = config.training.batch_size;
    let batch_of_all = batch_size * most_ranks;
    let mut compared = Vec::new();
    for (scaling, is_weak) in [("weak", true), ("strong", false)] {
        let mut first = None;
        for ranks in numbers_of_ranks(most_ranks) {
            let batch_size = if is_weak { batch_size } else { batch_of_all.div_ceil(ranks) };
            let Placement { threads_per_rank, .. } = place(Nproc::Count(ranks), config, cuda)?;
            let case = Case { ranks, threads_per_rank, batch_size };
            let one = *first.get_or_insert(case);
            let alike = if on_gpu { one } else { Case { threads_per_rank, ..one } };
            compared.push(ComparedCase { scaling, case, alike, one });
        }
    }
    Ok(compared)
}

/// Notes that the machine is busy if the repetitions of a case differ, or its steps.
fn note_if_times_vary(measured: &Measured, printer: &Printer) {
    let slowest = measured.values().map(|times| sorted(times).spread()).fold(1.0, f64::max);
    // Ranks that share a core have slow steps even on an idle machine.
    let with_cores = measured.iter().filter(|(case, _)| case.ranks <= cores());
    let steps = with_cores.flat_map(|(_, times)| times);
    let median = steps.map(|step| step.us_per_step / step.us_min).fold(1.0, f64::max);
    if median > slowest {
        note_if_busy("the median step took", median, printer)
    } else {
        note_if_busy("the slowest repetition took", slowest, printer)
    }
}

/// Returns 1, 2, 3, 4, then powers of two, and `most`.
fn numbers_of_ranks(most: usize) -> Vec<usize> {
    let doubled = std::iter::successors(Some(8), |n: &usize| n.checked_mul(2));
    let mut numbers: Vec<usize> = (1..=4).chain(doubled.take_while(|&n| n < most)).collect();
    numbers.retain(|&n| n < most);
    numbers.push(most);
    numbers
}

const COLUMNS: [Column<Row>; 8] = [
    ("scaling", "", 8, |row| row.scaling.into()),
    ("ranks", "", 7, |row| row.world_size.to_string()),
    ("threads", "a rank", 9, |row| row.threads_per_rank.to_string()),
    ("batch", "a rank", 8, |row| row.batch_size.to_string()),
    ("step", "(us)", 12, |row| format!("{:.1}", row.us_per_step)),
    ("samples", "(1/s)", 12, |row| format!("{:.0}", row.samples_per_second)),
    ("efficiency", "(%)", 12, |row| format!("{:.1}", 100.0 * row.efficiency)),
    ("speed-up", "(times)", 10, |row| format!("{:.2}", row.speedup)),
];

fn print(
    rows: &[Row],
    on_gpu: bool,
    batch_size: usize,
    [steps, repetitions]: [usize; 2],
    printer: &Printer,
) -> io::Result<()> {
    let Some(last) = rows.last() else { return Ok(()) };
    let (ranks, cores) = (last.world_size, last.cores);
    let with_all = format!("one rank with {}", counted(rows[0].threads_per_rank, "thread"));
    let (machine, one_alike, one) = if on_gpu {
        ("GPUs".into(), "one GPU", "one GPU".into())
    } else {
        (counted(cores, "CPU core"), "one rank with as many threads", with_all)
    };
    let head = format!(
        "# {}, {machine}: medians of {repetitions} repetitions of {steps} steps\n\
         # weak: every rank takes {batch_size} samples a step; strong: all ranks together take {}\n\
         # efficiency: samples per second, by those of {one_alike} times the number of ranks\n\
         # speed-up: samples per second, by those of {one}\n\
         #\n{}",
        last.model,
        batch_size * ranks,
        table::head(&COLUMNS)
    );
    table::print_lines(printer, &head)?;
    rows.iter().try_for_each(|row| table::print_row(printer, &COLUMNS, row))?;
    if ranks > cores && !on_gpu {
        let share = format!("# {ranks} ranks share {}", counted(cores, "core"));
        let foot = format!("{share}: more ranks than cores make nothing faster.");
        table::print_lines(printer, &foot)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_counts_end_at_the_maximum() {
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
