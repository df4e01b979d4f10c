//! The output of `--simulate-cluster`: what the measured step would take on more and more ranks of the cluster. Pure
//! arithmetic.

use std::collections::BTreeSet;
use std::io;

use serde::Serialize;

use super::step::StepTimes;
use super::table::{self, Column};
use engine::process_group::SimulatedCluster;
use views::Printer;

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

/// Returns the forecast of a measured step on a number of nodes of `cluster`, with a number of ranks on each. Buckets are
/// reduced one after the other: where they overlap, during backward, each when it is complete.
fn forecast(times: &StepTimes, cluster: &SimulatedCluster, [nodes, gpus]: [usize; 2]) -> Row {
    let backward_us = times.backward_us;
    let (mut end_us, mut communication_us) = (0.0f64, 0.0);
    let mut names = BTreeSet::new();
    for (bytes, complete_us) in times.buckets() {
        let (seconds, name) = cluster.all_reduce([nodes, gpus], bytes);
        let began_us = if times.overlaps { complete_us.min(backward_us) } else { backward_us };
        end_us = end_us.max(began_us) + 1e6 * seconds;
        communication_us += 1e6 * seconds;
        names.insert(name);
    }
    let exposed_us = (end_us - backward_us).max(0.0);
    let alone_us = times.forward_us + backward_us + times.optimizer_us;
    let us_per_step = alone_us + exposed_us;
    let world_size = nodes * gpus;
    Row {
        model: times.model,
        cluster: cluster.settings().join(","),
        nodes,
        world_size,
        all_reduce: Vec::from_iter(names).join("+"),
        us_per_step,
        samples_per_second: world_size as f64 * times.batch_size as f64 / us_per_step * 1e6,
        efficiency: alone_us / us_per_step,
        communication_us,
        exposed_us,
        hidden: (communication_us > 0.0).then(|| (1.0 - exposed_us / communication_us).max(0.0)),
    }
}

/// Prints the forecast of a measured step on more and more ranks of `cluster`.
pub(super) fn print(
    times: &StepTimes,
    cluster: &SimulatedCluster,
    printer: &Printer,
) -> io::Result<()> {
    let bucket = |(bytes, us): (f64, f64)| format!("#   {:>9.3} MB {us:>12.1} us\n", bytes / 1e6);
    let head = format!(
        "\n# buckets of gradients, and when backward has completed them\n{}\n\
         # a cluster that is not here\n#   {}\n\n\
         # Every rank takes {} samples a step, so that more ranks take more (weak scaling).\n\
         # efficiency: a rank's samples per second beside those of one alone. reduction: how long\n\
         # the all_reduces take. exposed: the part that makes the step longer. hidden: the rest.\n\n{}",
        times.buckets().map(bucket).collect::<String>(),
        cluster.settings().join("\n#   "),
        times.batch_size,
        table::head(&COLUMNS)
    );
    table::print_lines(printer, &head)?;
    for shape in cluster.shapes() {
        table::print_row(printer, &COLUMNS, &forecast(times, cluster, shape))?;
    }
    table::print_lines(printer, FOOT)
}

const COLUMNS: [Column<Row>; 9] = [
    ("nodes", "", 6, |row| row.nodes.to_string()),
    ("ranks", "", 7, |row| row.world_size.to_string()),
    ("all_reduce   ", "", 15, |row| format!("  {:<13}", row.all_reduce)), // aligned on the left
    ("step", "(us)", 11, |row| format!("{:.1}", row.us_per_step)),
    ("samples", "(1/s)", 11, |row| format!("{:.0}", row.samples_per_second)),
    ("efficiency", "(%)", 11, |row| format!("{:.1}", 100.0 * row.efficiency)),
    ("reduction", "(us)", 11, |row| format!("{:.1}", row.communication_us)),
    ("exposed", "(us)", 10, |row| format!("{:.1}", row.exposed_us)),
    ("hidden", "(%)", 7, |row| {
        row.hidden.map_or("-".into(), |share| format!("{:.1}", 100.0 * share))
    }),
];

const FOOT: &str = "
# This is a model, not a measurement: every rank computes as fast as here, and a message
# takes latency + bytes / bandwidth. Left out: ranks that are late (stragglers), others on
# the network (congestion), what communication takes from computing, loading of data.
# For a cluster of GPUs, measure on one that has such a GPU.";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::StrategyKind;
    use engine::trainer::Amp;

    /// Returns the forecast of a step on a number of nodes of a cluster, with a number of ranks on each.
    fn forecast_on(text: &str, overlaps: bool, shape: [usize; 2]) -> Row {
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
            overlaps,
        };
        forecast(&times, &text.parse().unwrap(), shape)
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
    }

    #[test]
    fn one_rank_has_no_communication_cost() {
        for text in ["algorithm=hierarchical", "algorithm=tree", "latency=1s,bandwidth=1kB/s"] {
            let row = forecast_on(text, true, [1, 1]);
            assert_eq!((row.communication_us, row.exposed_us), (0.0, 0.0));
            assert_eq!((row.efficiency, &row.all_reduce[..]), (1.0, "-"));
        }
    }
}
