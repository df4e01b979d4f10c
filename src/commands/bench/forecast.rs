//! The output of `--simulate-cluster`: what the measured step would take on more and more ranks of the cluster. Pure
//! arithmetic.

use std::io::{self, Write};

use serde::Serialize;

use super::NOISY_RATIO;
use super::step::StepTimes;
use super::table::{self, Column, numbers, text};
use crate::process_group::{ClusterShape, Library, SimulatedCluster};
use crate::telemetry::{LogFormat, Printer};

/// The forecast of a step on the ranks of one shape of the cluster: a row of the table. Times are in microseconds.
#[derive(Debug, Serialize)]
struct Row {
    model: &'static str,
    cluster: String,
    nodes: usize,
    world_size: usize,
    /// The algorithms that reduce the buckets, joined by `+` if they differ.
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

/// Returns the forecast of a measured step on `shape` of `cluster`. With `overlaps`, buckets are reduced during backward:
/// one after the other, each when it is complete. Where two can be in flight, they share the line.
fn forecast(
    times: &StepTimes,
    overlaps: bool,
    cluster: &SimulatedCluster,
    shape: ClusterShape,
) -> Row {
    // Ranks that share memory reduce by themselves, after backward.
    let overlaps = overlaps && (cluster.library == Library::Nccl || shape.nodes > 1);
    let backward = times.backward_us / 1e6;
    let (mut free, mut end, mut communication) = (0.0f64, 0.0f64, 0.0);
    let mut names: Vec<&str> = Vec::new();
    for (bytes, complete) in times.buckets() {
        let (time, name) = cluster.all_reduce(shape, bytes);
        let complete = if overlaps { (complete / 1e6).min(backward) } else { backward };
        let began = complete.max(free);
        end = if overlaps && cluster.runs_in_background(shape, bytes) {
            free = began + cluster.headers(shape.nodes);
            (began + time).max(end + bytes / cluster.between.bandwidth)
        } else {
            free = began.max(end) + time;
            free
        };
        communication += time;
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let exposed = if overlaps { (end - backward).max(0.0) } else { communication };
    let (communication_us, exposed_us) = (communication * 1e6, exposed * 1e6);
    let alone = times.forward_us + times.backward_us + times.optimizer_us;
    let us_per_step = alone + exposed_us;
    let world_size = shape.nodes * shape.gpus;
    let settings: Vec<String> = cluster.settings().into_iter().map(|(it, ..)| it).collect();
    Row {
        model: times.model,
        cluster: settings.join(","),
        nodes: shape.nodes,
        world_size,
        all_reduce: names.join("+"),
        us_per_step,
        samples_per_second: (world_size * times.batch_size) as f64 / us_per_step * 1e6,
        efficiency: alone / us_per_step,
        communication_us,
        exposed_us,
        hidden: (communication > 0.0).then(|| 1.0 - exposed / communication),
    }
}

/// Prints the forecast of a measured step on more and more ranks of `cluster`. `overlaps` says whether buckets are reduced
/// during backward.
pub(super) fn print(
    times: &StepTimes,
    overlaps: bool,
    cluster: &SimulatedCluster,
    on_cpu: bool,
    printer: &Printer,
) -> io::Result<()> {
    let shapes = cluster.shapes().into_iter();
    let mut rows = shapes.map(|shape| forecast(times, overlaps, cluster, shape));
    match printer.format() {
        LogFormat::Json => rows.try_for_each(|row| printer.object(&row)),
        LogFormat::Text => printer.lines(|out| {
            write_head(times, cluster, out)?;
            for row in rows {
                writeln!(out, "{}", table::line(&COLUMNS, &row))?;
            }
            write_foot(on_cpu, times.us_per_step / times.us_min, out)
        }),
    }
}

fn write_head(
    times: &StepTimes,
    cluster: &SimulatedCluster,
    out: &mut dyn Write,
) -> io::Result<()> {
    let buckets: Vec<(f64, f64)> = times.buckets().collect();
    writeln!(out, "\n# buckets of gradients, and when backward has completed them")?;
    let shown = if buckets.len() > 8 { 7 } else { buckets.len() };
    for (bytes, complete) in &buckets[..shown] {
        writeln!(out, "#   {:>9.3} MB {complete:>12.1} us", bytes / 1e6)?;
    }
    let (rest, last) = (&buckets[shown..], buckets.last());
    if let (false, Some((_, complete))) = (rest.is_empty(), last) {
        let (count, mb) = (rest.len(), rest.iter().map(|(bytes, _)| bytes / 1e6).sum::<f64>());
        writeln!(out, "#   {mb:>9.3} MB {complete:>12.1} us for the last of {count} more")?;
    }
    writeln!(out, "\n# a cluster that is not here")?;
    for (setting, meaning, is_default) in cluster.settings() {
        let default = if is_default { " (default)" } else { "" };
        writeln!(out, "#   {setting:<24}{meaning}{default}")?;
    }
    writeln!(
        out,
        "\n# Every rank takes {} samples a step, so that more ranks take more (weak scaling).\n\
         # efficiency: a rank's samples per second beside those of one alone. reduction: how long\n\
         # the all_reduces take. exposed: the part that makes the step longer. hidden: the rest.",
        times.batch_size
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::StrategyKind;
    use crate::trainer::Amp;

    /// Returns the forecast of a step on `nodes` and `gpus` of a cluster.
    fn forecast_on(text: &str, overlaps: bool, [nodes, gpus]: [usize; 2]) -> Row {
        let times = StepTimes {
            model: "",
            strategy: StrategyKind::Ddp,
            amp: Amp::Off,
            batch_size: 32,
            world_size: 1,
            us_per_step: 6e3,
            us_min: 6e3,
            us_max: 6e3,
            forward_us: 2e3,
            backward_us: 3e3,
            communication_us: 0.0,
            optimizer_us: 1e3,
            bucket_bytes: vec![1_000_000, 2_000_000],
            bucket_complete_us: vec![1e3, 3e3],
        };
        forecast(&times, overlaps, &text.parse().unwrap(), ClusterShape { nodes, gpus })
    }

    fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-9 * expected.max(1.0), "{found}, not {expected}");
    }

    #[test]
    fn buckets_are_reduced_in_order_during_backward() {
        let quick = "latency=0us,bandwidth=1GB/s,algorithm=ring";
        // 1 ms from 1 ms on, 2 ms from 3 ms on.
        let row = forecast_on(quick, true, [2, 1]);
        near(row.communication_us, 3e3);
        near(row.exposed_us, 2e3);
        near(row.us_per_step, 8e3);
        near(row.efficiency, 6. / 8.);
        near(forecast_on(quick, false, [2, 1]).exposed_us, 3e3);
        // 10 ms from 1 ms on, 20 ms after that.
        let slow = "latency=0us,bandwidth=100MB/s,algorithm=ring";
        near(forecast_on(slow, true, [2, 1]).exposed_us, 28e3);
        // Two processes: 10 ms each way, and 1 ms per megabyte. The second bucket goes while the first one does.
        let far = "backend=gloo,latency=10ms,bandwidth=1GB/s,node-bandwidth=1000000TB/s";
        let note = 20f64 + 256e-6;
        let second = (3. + note + 2. * (20. + 1.)).max(1. + note + 2. * (20. + 0.5) + 2.);
        // The second bucket begins when the first one's note has arrived.
        let second = second.max(1. + 2. * note + 2. * (20. + 1.));
        near(forecast_on(far, true, [2, 1]).exposed_us / 1e3, second - 3.);
        // Threads reduce after backward.
        let threads = "backend=gloo,node-latency=0us,node-bandwidth=1GB/s";
        near(forecast_on(threads, true, [1, 2]).exposed_us, 3e3);
    }

    #[test]
    fn one_rank_has_no_communication_cost() {
        for text in ["backend=gloo", "algorithm=tree", "latency=1s,bandwidth=1kB/s"] {
            let row = forecast_on(text, true, [1, 1]);
            assert_eq!((row.communication_us, row.exposed_us), (0.0, 0.0));
            assert_eq!((row.efficiency, &row.all_reduce[..]), (1.0, "-"));
        }
    }
}
