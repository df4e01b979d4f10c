//! The cost of an all-reduce on a cluster: pure arithmetic, in seconds and bytes.
//!
//! A message of n bytes takes `latency + n / bandwidth`. Latencies add up along the path of a slice. Bytes add up on
//! the busiest link. NCCL weighs its own algorithms in the same way.

use super::cluster::{Algorithm, ClusterLink, Library, SimulatedCluster};
use crate::process_group::gloo::DIRECT_MAX_BYTES;
use crate::process_group::network::{HEADER_BYTES, HEADER_MAX_DATA_BYTES};

/// The ranks that take part: `gpus` ranks on each of `nodes` nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ClusterShape {
    pub nodes: usize,
    pub gpus: usize,
}

/// The largest segment of Gloo's ring, in bytes. Two segments are in flight at a time.
const SEGMENT: f64 = 1048576.0;

impl SimulatedCluster {
    /// Returns the shapes to show: 1, 2, 4, ... ranks of one node, then 2, 4, ... nodes, up to the whole cluster.
    pub(crate) fn shapes(&self) -> Vec<ClusterShape> {
        let doubled = |most: usize| {
            let powers = std::iter::successors(Some(1), |count| Some(count * 2));
            powers.take_while(move |count| *count < most).chain([most])
        };
        let mut shapes: Vec<ClusterShape> =
            doubled(self.gpus).map(|gpus| ClusterShape { nodes: 1, gpus }).collect();
        let more = doubled(self.nodes).filter(|nodes| *nodes > 1);
        shapes.extend(more.map(|nodes| ClusterShape { nodes, gpus: self.gpus }));
        shapes
    }

    /// Returns the time of an all-reduce of `bytes` bytes, in seconds, and the name of its algorithm.
    pub(crate) fn all_reduce(&self, shape: ClusterShape, bytes: f64) -> (f64, &'static str) {
        let time = |algorithm| (self.by(algorithm, shape, bytes), algorithm.name());
        match (self.library, self.algorithm) {
            _ if shape.nodes * shape.gpus == 1 => (0.0, "-"),
            (Library::Gloo, _) if shape.nodes == 1 => {
                (ring(shape.gpus, self.within, bytes), "shared memory")
            }
            (Library::Gloo, _) => (self.gloo(shape, bytes), "hierarchical"),
            (Library::Nccl, Some(algorithm)) => time(algorithm),
            (Library::Nccl, None) if shape.nodes == 1 => time(Algorithm::Ring),
            (Library::Nccl, None) => {
                let (ring, tree) = (time(Algorithm::Ring), time(Algorithm::Tree));
                if tree.0 < ring.0 { tree } else { ring }
            }
        }
    }

    fn by(&self, algorithm: Algorithm, shape: ClusterShape, bytes: f64) -> f64 {
        let Self { between, within, .. } = *self;
        let ClusterShape { nodes, gpus } = shape;
        // Bytes that pass through a node also pass through its ranks.
        let narrowest = match (nodes, gpus) {
            (1, _) => within.bandwidth,
            (_, 1) => between.bandwidth,
            _ => between.bandwidth.min(within.bandwidth),
        };
        match algorithm {
            Algorithm::Ring => {
                // Two rounds of `ranks - 1` steps. `across` steps of a round go from node to node.
                let (ranks, across) = ((nodes * gpus) as f64, (nodes - 1) as f64);
                let inside = ranks - 1.0 - across;
                let latency = 2.0 * (across * between.latency + inside * within.latency);
                latency + 2.0 * (ranks - 1.0) / ranks * bytes / narrowest
            }
            Algorithm::Tree => {
                let height = nodes.next_power_of_two().trailing_zeros();
                let chain = (gpus - 1) as f64 * within.latency;
                let latency = 2.0 * (chain + f64::from(height) * between.latency);
                latency + 2.0 * bytes / narrowest
            }
            // The slices of a node's ranks share its connection.
            Algorithm::Hierarchical => ring(gpus, within, bytes) + ring(nodes, between, bytes),
        }
    }

    /// Returns the time of an all-reduce of the backend `gloo` between processes. The data goes into shared memory,
    /// between the first ranks, and out again.
    fn gloo(&self, ClusterShape { nodes, gpus }: ClusterShape, bytes: f64) -> f64 {
        let ClusterLink { latency, bandwidth } = self.between;
        let others = (nodes - 1) as f64;
        // The sender waits until the receiver has asked for the data.
        let message = 2.0 * latency;
        // Two processes of one rank each send from their tensors, without a copy.
        let passes =
            if self.runs_in_background(ClusterShape { nodes, gpus }, bytes) { 1.0 } else { 2.0 };
        let local =
            2.0 * (gpus - 1) as f64 * self.within.latency + passes * bytes / self.within.bandwidth;
        let headers = self.headers(nodes);
        let network = if bytes * nodes as f64 <= DIRECT_MAX_BYTES as f64 {
            if bytes <= HEADER_MAX_DATA_BYTES as f64 {
                0.0
            } else {
                message + others * bytes / bandwidth
            }
        } else if nodes == 2 {
            gloo_ring_of_two(bytes, self.between)
        } else {
            // Each process gets its slices, adds them up, and sends the sum to all.
            2.0 * (message + others / nodes as f64 * bytes / bandwidth)
        };
        local + headers + network
    }

    /// Returns whether an all-reduce continues by itself while the next one begins.
    pub(crate) fn runs_in_background(
        &self,
        ClusterShape { nodes, gpus }: ClusterShape,
        bytes: f64,
    ) -> bool {
        self.library == Library::Gloo
            && (nodes, gpus) == (2, 1)
            && 2.0 * bytes > DIRECT_MAX_BYTES as f64
    }

    /// Returns the time of the headers that precede a collective, in seconds.
    pub(crate) fn headers(&self, nodes: usize) -> f64 {
        let ClusterLink { latency, bandwidth } = self.between;
        2.0 * latency + ((nodes - 1) * HEADER_BYTES) as f64 / bandwidth
    }
}

/// Returns the time of an all-reduce in slices around a ring of `count` members with equal links.
fn ring(count: usize, link: ClusterLink, bytes: f64) -> f64 {
    let others = (count - 1) as f64;
    2.0 * others * link.latency + 2.0 * others / count as f64 * bytes / link.bandwidth
}

/// Returns the time of Gloo's own all-reduce of two processes. Each sends the other its half, and then the sums, in
/// an even number of equal segments of at most 1 MiB. The third segment waits until the first has arrived, and so on.
/// Each segment also waits until the receiver asks for it.
fn gloo_ring_of_two(bytes: f64, link: ClusterLink) -> f64 {
    let half = ((bytes / SEGMENT).ceil().max(4.0) / 2.0).ceil();
    let segment = bytes / (2.0 * half) / link.bandwidth;
    // The time when the line is free, and the times when the last two segments arrive.
    let (mut free, mut come) = (0.0f64, [0.0; 2]);
    for _ in 0..half as u64 {
        free = free.max(come[0] + link.latency) + segment;
        come = [come[1], free + link.latency];
    }
    2.0 * come[1]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(text: &str) -> SimulatedCluster {
        text.parse().unwrap()
    }

    const NETWORK: &str = "latency=10us,bandwidth=1GB/s,node-latency=1us,node-bandwidth=100GB/s";

    /// Returns the time of an all-reduce, in microseconds.
    fn time(text: &str, nodes: usize, gpus: usize, bytes: f64) -> f64 {
        let cluster = cluster(&format!("{NETWORK},{text}"));
        cluster.all_reduce(ClusterShape { nodes, gpus }, bytes).0 * 1e6
    }

    fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-9 * expected.max(1.0), "{found}, not {expected}");
    }

    #[test]
    fn ring_and_tree_costs_match_hand_calculation() {
        // Two nodes of one rank: each sends half of the bytes, and then half of the sums.
        near(time("algorithm=ring", 2, 1, 1e6), 2. * 10. + 1e3);
        near(time("algorithm=ring", 8, 1, 1e6), 14. * 10. + 2. * 7. / 8. * 1e3);
        // Within a node: a hundred times the bandwidth.
        near(time("algorithm=ring", 1, 8, 1e6), 14. * 1. + 2. * 7. / 8. * 10.);
        // 2 * 3 of the 2 * 31 steps go from node to node.
        near(time("algorithm=ring", 4, 8, 1e6), 6. * 10. + 56. * 1. + 2. * 31. / 32. * 1e3);
        near(time("algorithm=tree", 8, 1, 1e6), 2. * 3. * 10. + 2e3);
        near(time("algorithm=tree", 5, 4, 1e6), 2. * (3. + 3. * 10.) + 2e3);
        near(
            time("algorithm=hierarchical", 4, 8, 1e6),
            14. * 1. + 2. * 7. / 8. * 10. + 6. * 10. + 2. * 3. / 4. * 1e3,
        );
        // A fast connection of a node does not help a ring that is slower within the node.
        let narrow = cluster("latency=0us,bandwidth=1TB/s,node-latency=0us,node-bandwidth=1GB/s");
        near(narrow.all_reduce(ClusterShape { nodes: 2, gpus: 2 }, 1e6).0 * 1e6, 1.5e3);
    }

    #[test]
    fn auto_algorithm_takes_the_faster_of_ring_and_tree() {
        let cluster = cluster(&format!("{NETWORK},nodes=64"));
        let shape = ClusterShape { nodes: 64, gpus: 8 };
        assert_eq!(cluster.all_reduce(shape, 1e3).1, "tree");
        assert_eq!(cluster.all_reduce(shape, 1e9).1, "ring");
        assert_eq!(cluster.all_reduce(ClusterShape { nodes: 1, gpus: 8 }, 1e3).1, "ring");
    }

    #[test]
    fn gloo_costs_match_hand_calculation() {
        let note = 20. + 0.256;
        let copies = |bytes: f64| 2. * bytes / 100e9 * 1e6;
        near(time("backend=gloo", 2, 1, 100.), note + copies(100.));
        near(time("backend=gloo", 2, 1, 1e4), note + 20. + 10. + copies(1e4));
        near(time("backend=gloo", 4, 1, 1e4), 20. + 3. * 0.256 + 20. + 30. + copies(1e4));
        // Gloo's ring: half of the bytes, twice.
        near(time("backend=gloo", 2, 1, 1e6), note + 2. * (20. + 500.) + copies(1e6) / 2.);
        near(time("backend=gloo", 2, 4, 1e6), 6. + note + 2. * (20. + 500.) + copies(1e6));
        // Slices to all, and sums to all.
        near(time("backend=gloo", 4, 1, 1e6), 20. + 3. * 0.256 + 2. * (20. + 750.) + copies(1e6));
        near(time("backend=gloo", 1, 2, 1e6), 2. + 10.);
    }

    #[test]
    fn gloo_ring_keeps_two_segments_in_flight() {
        let mib = 1048576.0;
        let ring = |mibs: f64, latency| {
            gloo_ring_of_two(mibs * mib, ClusterLink { latency, bandwidth: mib }) // a segment a second
        };
        // Two segments there, two back.
        near(ring(4.0, 0.0), 4.0);
        near(ring(4.0, 10.0), 2.0 * (20.0 + 2.0));
        // Three: the last one goes when the first has arrived, after 21 s, and the sender has been asked for it.
        near(ring(6.0, 0.0), 6.0);
        near(ring(6.0, 10.0), 2.0 * (21.0 + 21.0));
        // Segments are smaller where the two halves would have different numbers of them.
        near(ring(5.0, 0.0), 5.0);
        near(ring(5.0, 10.0), 2.0 * 2.0 * (5.0 / 6.0 + 20.0));
    }

    #[test]
    fn cost_never_rises_with_a_faster_network_or_fewer_bytes() {
        let ways = ["algorithm=ring", "algorithm=tree", "algorithm=hierarchical", "backend=gloo"];
        for way in ways.into_iter().chain(["algorithm=auto"]) {
            for (nodes, gpus) in [(1, 2), (1, 8), (2, 1), (2, 8), (3, 4), (64, 8), (512, 1)] {
                let shape = ClusterShape { nodes, gpus };
                let time = |network: &str, bytes: f64| {
                    cluster(&format!("{network},{way}")).all_reduce(shape, bytes).0
                };
                let mut last = 0.0;
                for power in 0..30 {
                    let bytes = f64::from(1u32 << power);
                    let plain = time(NETWORK, bytes);
                    for (worse, better) in [
                        ("latency=10us", "latency=9us"),
                        ("node-latency=1us", "node-latency=0us"),
                        (",bandwidth=1GB/s", ",bandwidth=2GB/s"),
                        ("node-bandwidth=100GB/s", "node-bandwidth=101GB/s"),
                    ] {
                        let better = NETWORK.replacen(worse, better, 1);
                        assert!(time(&better, bytes) <= plain, "{way} {shape:?} {bytes} {better}");
                    }
                    // Up to 64 KiB for all processes, gloo sends more bytes to save a round of messages.
                    let more = plain > last || way == "backend=gloo";
                    assert!(more, "{way} {shape:?}: {bytes} bytes");
                    last = plain;
                }
            }
        }
    }

    #[test]
    fn cluster_shapes_double_up_to_the_cluster() {
        let shapes = |text: &str| -> Vec<(usize, usize)> {
            cluster(text).shapes().iter().map(|shape| (shape.nodes, shape.gpus)).collect()
        };
        assert_eq!(shapes("nodes=1,gpus=1"), [(1, 1)]);
        assert_eq!(shapes("nodes=3,gpus=1"), [(1, 1), (2, 1), (3, 1)]);
        assert_eq!(shapes("nodes=4,gpus=6"), [(1, 1), (1, 2), (1, 4), (1, 6), (2, 6), (4, 6)]);
    }
}
