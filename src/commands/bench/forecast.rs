//! The output of `--simulate-cluster`: the measured step, on more and more ranks of the cluster.

use std::io::{self, Write};

use serde::Serialize;

use super::NOISY_RATIO;
use super::measured_step::{Forecast, MeasuredStep};
use super::table::{self, Column, numbers, text};
use crate::process_group::SimulatedCluster;
use crate::telemetry::{LogFormat, Printer};

/// A row of the table. Times are in microseconds.
#[derive(Debug, Serialize)]
struct Row {
    model: &'static str,
    cluster: String,
    nodes: usize,
    world_size: usize,
    all_reduce: String,
    us_per_step: f64,
    samples_per_second: f64,
    /// The time of a step on one rank divided by that of this step.
    efficiency: f64,
    /// The time of all reductions of buckets.
    communication_us: f64,
    /// The part of `communication_us` that makes the step longer.
    exposed_us: f64,
    /// The share of `communication_us` that does not. `None` without communication.
    hidden: Option<f64>,
}

/// Prints the forecast of the step on `cluster`. `spread` is the median of the measured steps divided by the fastest.
pub(super) fn print(
    model: &'static str,
    batch_size: usize,
    measured: &MeasuredStep,
    cluster: &SimulatedCluster,
    on_cpu: bool,
    spread: f64,
    printer: &Printer,
) -> io::Result<()> {
    let settings = cluster.settings().into_iter().map(|(setting, ..)| setting);
    let settings: Vec<String> = settings.collect();
    let row = |Forecast { shape, algorithm, step, efficiency, communication, exposed }| {
        let world_size = shape.nodes * shape.gpus;
        Row {
            model,
            cluster: settings.join(","),
            nodes: shape.nodes,
            world_size,
            all_reduce: algorithm,
            us_per_step: step * 1e6,
            samples_per_second: (world_size * batch_size) as f64 / step,
            efficiency,
            communication_us: communication * 1e6,
            exposed_us: exposed * 1e6,
            hidden: (communication > 0.0).then(|| 1.0 - exposed / communication),
        }
    };
    let shapes = cluster.shapes().into_iter();
    let mut rows = shapes.map(|shape| row(measured.on(cluster, shape)));
    match printer.format() {
        LogFormat::Json => rows.try_for_each(|row| printer.object(&row)),
        LogFormat::Text => printer.lines(|out| {
            write_head(measured, cluster, batch_size, out)?;
            for row in rows {
                writeln!(out, "{}", table::line(&COLUMNS, &row))?;
            }
            write_foot(on_cpu, spread, out)
        }),
    }
}

fn write_head(
    measured: &MeasuredStep,
    cluster: &SimulatedCluster,
    batch_size: usize,
    out: &mut dyn Write,
) -> io::Result<()> {
    let buckets = &measured.buckets;
    writeln!(out, "\n# buckets of gradients, and when backward has completed them")?;
    let shown = if buckets.len() > 8 { 7 } else { buckets.len() };
    for (bytes, complete) in &buckets[..shown] {
        writeln!(out, "#   {:>9.3} MB {:>12.1} us", bytes / 1e6, complete * 1e6)?;
    }
    let (rest, last) = (&buckets[shown..], buckets.last());
    if let (false, Some((_, complete))) = (rest.is_empty(), last) {
        let (count, bytes) = (rest.len(), rest.iter().map(|(bytes, _)| bytes).sum::<f64>());
        let (bytes, complete) = (bytes / 1e6, complete * 1e6);
        writeln!(out, "#   {bytes:>9.3} MB {complete:>12.1} us for the last of {count} more")?;
    }
    writeln!(out, "\n# a cluster that is not here")?;
    for (setting, meaning, is_default) in cluster.settings() {
        let default = if is_default { " (default)" } else { "" };
        writeln!(out, "#   {setting:<24}{meaning}{default}")?;
    }
    writeln!(
        out,
        "\n# Every rank takes {batch_size} samples a step, so that more ranks take more (weak scaling).\n\
         # efficiency: a rank's samples per second beside those of one alone. reduction: how long\n\
         # the all_reduces take. exposed: the part that makes the step longer. hidden: the rest."
    )?;
    writeln!(out, "\n{}", table::head(&COLUMNS))
}

const COLUMNS: [Column<Row>; 9] = [
    numbers("nodes", "", 6, |row| row.nodes.to_string()),
    numbers("ranks", "", 7, |row| row.world_size.to_string()),
    text("all_reduce", 13, |row| row.all_reduce.clone()),
    numbers("step", "(us)", 11, |row| format!("{:.1}", row.us_per_step)),
    numbers("samples", "(1/s)", 11, |row| format!("{:.0}", row.samples_per_second)),
    numbers("efficiency", "(%)", 11, |row| format!("{:.1}", 100.0 * row.efficiency)),
    numbers("reduction", "(us)", 11, |row| format!("{:.1}", row.communication_us)),
    numbers("exposed", "(us)", 10, |row| format!("{:.1}", row.exposed_us)),
    numbers("hidden", "(%)", 7, |row| {
        row.hidden.map_or("-".into(), |share| format!("{:.1}", 100.0 * share))
    }),
];

fn write_foot(on_cpu: bool, spread: f64, out: &mut dyn Write) -> io::Result<()> {
    writeln!(
        out,
        "\n# This is a model, not a measurement: every rank computes as fast as here, and a message\n\
         # takes latency + bytes / bandwidth. Left out: ranks that are late (stragglers), others on\n\
         # the network (congestion), what communication takes from computing, loading of data."
    )?;
    if spread > NOISY_RATIO {
        writeln!(
            out,
            "# The steps that were measured vary: their median is {spread:.1} times the fastest.\n\
             # A slow step makes a cluster look efficient: measure where nothing else runs."
        )?;
    }
    if on_cpu {
        writeln!(
            out,
            "# Computed on the CPU: for a cluster of GPUs, measure on one that has such a GPU."
        )?;
    }
    Ok(())
}
