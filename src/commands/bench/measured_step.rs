//! A measured step, and what it would take on a cluster: pure arithmetic, in seconds and bytes.

use crate::process_group::{ClusterShape, Library, SimulatedCluster};

/// The measured times of a step on one rank, in seconds.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct MeasuredStep {
    pub forward: f64,
    /// Autograd alone.
    pub backward: f64,
    pub optimizer: f64,
    /// The bytes of each bucket, and the time in backward when it is complete.
    pub buckets: Vec<(f64, f64)>,
    /// Whether buckets are reduced during backward.
    pub overlaps: bool,
}

/// The forecast of a step on the ranks of `shape`. Times are in seconds.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Forecast {
    pub shape: ClusterShape,
    /// The algorithms that reduce the buckets, joined by `+` if they differ.
    pub algorithm: String,
    pub step: f64,
    /// The time of a step on one rank divided by that of this step.
    pub efficiency: f64,
    /// The time of all reductions.
    pub communication: f64,
    /// The part of `communication` that backward does not cover.
    pub exposed: f64,
}

impl MeasuredStep {
    /// Returns the forecast of this step on `shape` of `cluster`. Buckets are reduced one after the other, each when
    /// it is complete. Where two can be in flight, they share the line.
    pub(super) fn on(&self, cluster: &SimulatedCluster, shape: ClusterShape) -> Forecast {
        // Ranks that share memory reduce by themselves, after backward.
        let overlaps = self.overlaps && (cluster.library == Library::Nccl || shape.nodes > 1);
        let (mut free, mut end, mut communication) = (0.0f64, 0.0f64, 0.0);
        let mut names: Vec<&str> = Vec::new();
        for &(bytes, complete) in &self.buckets {
            let (time, name) = cluster.all_reduce(shape, bytes);
            let complete = if overlaps { complete.min(self.backward) } else { self.backward };
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
        let exposed = if overlaps { (end - self.backward).max(0.0) } else { communication };
        let alone = self.forward + self.backward + self.optimizer;
        let step = alone + exposed;
        let algorithm = names.join("+");
        Forecast { shape, algorithm, step, efficiency: alone / step, communication, exposed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(text: &str) -> SimulatedCluster {
        text.parse().unwrap()
    }

    fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-9 * expected.max(1.0), "{found}, not {expected}");
    }

    fn measured(overlaps: bool) -> MeasuredStep {
        let buckets = vec![(1e6, 1e-3), (2e6, 3e-3)];
        MeasuredStep { forward: 2e-3, backward: 3e-3, optimizer: 1e-3, buckets, overlaps }
    }

    #[test]
    fn buckets_are_reduced_in_order_during_backward() {
        let two = ClusterShape { nodes: 2, gpus: 1 };
        let quick = "latency=0us,bandwidth=1GB/s,algorithm=ring";
        // 1 ms from 1 ms on, 2 ms from 3 ms on.
        let forecast = measured(true).on(&cluster(quick), two);
        near(forecast.communication, 3e-3);
        near(forecast.exposed, 2e-3);
        near(forecast.step, 8e-3);
        near(forecast.efficiency, 6. / 8.);
        near(measured(false).on(&cluster(quick), two).exposed, 3e-3);
        // 10 ms from 1 ms on, 20 ms after that.
        let slow = "latency=0us,bandwidth=100MB/s,algorithm=ring";
        near(measured(true).on(&cluster(slow), two).exposed, 28e-3);
        // Two processes: 10 ms each way, and 1 ms per megabyte. The second bucket goes while the first one does.
        let far = "backend=gloo,latency=10ms,bandwidth=1GB/s,node-bandwidth=1000000TB/s";
        let note = 20f64 + 256e-6;
        let second = (3. + note + 2. * (20. + 1.)).max(1. + note + 2. * (20. + 0.5) + 2.);
        // The second bucket begins when the first one's note has arrived.
        let second = second.max(1. + 2. * note + 2. * (20. + 1.));
        near(measured(true).on(&cluster(far), two).exposed * 1e3, second - 3.);
        // Threads reduce after backward.
        let threads = "backend=gloo,node-latency=0us,node-bandwidth=1GB/s";
        near(
            measured(true).on(&cluster(threads), ClusterShape { nodes: 1, gpus: 2 }).exposed,
            3e-3,
        );
    }

    #[test]
    fn one_rank_has_no_communication_cost() {
        for text in ["backend=gloo", "algorithm=tree", "latency=1s,bandwidth=1kB/s"] {
            let forecast = measured(true).on(&cluster(text), ClusterShape { nodes: 1, gpus: 1 });
            assert_eq!((forecast.communication, forecast.exposed), (0.0, 0.0));
            assert_eq!((forecast.efficiency, &forecast.algorithm[..]), (1.0, "-"));
        }
    }
}
