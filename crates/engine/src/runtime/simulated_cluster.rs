//! The cluster of `--simulate-cluster`, and how long an all-reduce takes there: pure arithmetic, in seconds and bytes.
//!
//! A message of n bytes takes `latency + n / bandwidth`. Latencies add up along the path of a slice. Bytes add up on
//! the busiest link. NCCL weighs its own algorithms in the same way.

use std::array;
use std::fmt;
use std::str::FromStr;

use serde_with::SerializeDisplay;
use strum::EnumString;

use crate::error::{Error, Result, counted};

/// The algorithm of an all-reduce.
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumString)]
#[strum(serialize_all = "lowercase")]
enum Algorithm {
    /// The faster of ring and tree.
    Auto,
    /// From rank to rank, in slices, and once more around with the sums.
    Ring,
    /// Up two binary trees of nodes, with half of the bytes each, and down again.
    Tree,
    /// Slices within each node, each slice in a ring of nodes, and then within each node again.
    Hierarchical,
}

/// A simulated cluster: `nodes=64,gpus=8,bandwidth=25GB/s`. Keys that are not given have defaults. Shown are those that are
/// given.
#[derive(Debug, Clone, PartialEq, SerializeDisplay)]
pub struct SimulatedCluster {
    nodes: usize,
    /// Ranks per node.
    gpus: usize,
    algorithm: Algorithm,
    /// The latency of a message from node to node.
    latency: f64,
    /// The bandwidth from node to node, in each direction, of all ranks of a node together.
    bandwidth: f64,
    /// The latency of a message from rank to rank within a node.
    node_latency: f64,
    /// The bandwidth of each rank within a node, in each direction.
    node_bandwidth: f64,
    /// The values that the user has given, in the order of [`KEYS`].
    given: [Option<String>; KEYS.len()],
}

/// The keys with their defaults. These are typical of NVLink, and of a network card of 200 Gbit/s or more.
const KEYS: [(&str, &str); 7] = [
    ("nodes", "2"),
    ("gpus", "8"),
    ("algorithm", "auto"),
    ("latency", "5us"),
    ("bandwidth", "25GB/s"),
    ("node-latency", "3us"),
    ("node-bandwidth", "300GB/s"),
];

const TIMES: [(&str, f64); 4] = [("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0)];

const RATES: [(&str, f64); 7] = [
    ("TB/s", 1e12),
    ("GB/s", 1e9),
    ("MB/s", 1e6),
    ("kB/s", 1e3),
    ("Gbit/s", 1e9 / 8.0),
    ("Mbit/s", 1e6 / 8.0),
    ("kbit/s", 1e3 / 8.0),
];

const COUNT: &str = "use a whole number from 1 to 1000000";
const TIME: &str = "use a time with its unit (ns, us, ms, s), as 5us";
const RATE: &str = "use a number above 0 with its unit (kB/s, MB/s, GB/s, TB/s; kbit/s, Mbit/s, Gbit/s), as 25GB/s";

/// A key, and its value as text.
type Setting<'a> = (&'static str, &'a str);

impl FromStr for SimulatedCluster {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut given: [Option<String>; KEYS.len()] = Default::default();
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let named = key.replace('_', "-");
            let Some(index) = KEYS.iter().position(|(known, _)| *known == named) else {
                let keys = KEYS.map(|(key, _)| key).join(", ");
                return Err(Error::usage(format!("there is no key `{key}`; use {keys}")));
            };
            if given[index].replace(value.to_owned()).is_some() {
                return Err(Error::usage(format!("`{named}` is given twice; give it once")));
            }
        }
        let [nodes, gpus, algorithm, latency, bandwidth, node_latency, node_bandwidth] =
            settings(&given);
        let count =
            |text: &str| text.parse::<usize>().ok().filter(|count| (1..=1_000_000).contains(count));
        let time = |text: &str| with_unit(text, &TIMES);
        let rate = |text: &str| with_unit(text, &RATES).filter(|rate| *rate > 0.0);
        let name = |text: &str| text.parse::<Algorithm>().ok();
        Ok(Self {
            nodes: read(nodes, count, COUNT)?,
            gpus: read(gpus, count, COUNT)?,
            algorithm: read(algorithm, name, "use ring, tree, hierarchical or auto")?,
            latency: read(latency, time, TIME)?,
            bandwidth: read(bandwidth, rate, RATE)?,
            node_latency: read(node_latency, time, TIME)?,
            node_bandwidth: read(node_bandwidth, rate, RATE)?,
            given,
        })
    }
}

/// Returns all settings: the given ones, and the defaults of the others.
fn settings(given: &[Option<String>; KEYS.len()]) -> [Setting<'_>; KEYS.len()] {
    array::from_fn(|i| (KEYS[i].0, given[i].as_deref().unwrap_or(KEYS[i].1)))
}

/// Reads the value of a setting. `remedy` says what it must be.
fn read<T>((key, text): Setting, parse: fn(&str) -> Option<T>, remedy: &str) -> Result<T> {
    parse(text).ok_or_else(|| Error::usage(format!("{key}={text}: {remedy}")))
}

/// Returns the value of a number followed by one of `units`. `None` if `text` is not such a number.
fn with_unit(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let begin = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, name) = text.split_at(begin);
    let (_, unit) = units.iter().find(|(unit, _)| *unit == name.trim_start())?;
    Some(number.parse::<f64>().ok()? * unit).filter(|value| value.is_finite())
}

impl fmt::Display for SimulatedCluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.settings().into_iter().zip(&self.given);
        let given = all.filter_map(|(setting, given)| given.is_some().then_some(setting));
        f.write_str(&given.collect::<Vec<_>>().join(","))
    }
}

impl SimulatedCluster {
    /// Returns all settings, the defaults among them, as `key=value`.
    pub fn settings(&self) -> [String; KEYS.len()] {
        settings(&self.given).map(|(key, value)| format!("{key}={value}"))
    }

    /// Returns the number of nodes, and of ranks on each, for this many ranks in all. If the user has given neither `nodes`
    /// nor `gpus`, each rank is on a node of its own.
    pub(crate) fn shape_of(&self, ranks: usize) -> [usize; 2] {
        match self.given {
            [None, None, ..] => [ranks, 1],
            _ => [self.nodes, self.gpus],
        }
    }

    /// Returns the shapes to show: 1, 2, 4, ... ranks of one node, then 2, 4, ... nodes, up to the whole cluster.
    pub fn shapes(&self) -> Vec<[usize; 2]> {
        let doubled = |most: usize| {
            let powers = std::iter::successors(Some(1), |count| Some(count * 2));
            powers.take_while(move |count| *count < most).chain([most])
        };
        let within = doubled(self.gpus).map(|gpus| [1, gpus]);
        within.chain(doubled(self.nodes).skip(1).map(|nodes| [nodes, self.gpus])).collect()
    }

    /// Returns what to tell the user of a run with this many ranks on a network that is simulated.
    ///
    /// # Errors
    /// [`Error::Input`] if the cluster has another number of ranks.
    pub fn note_for(&self, ranks: usize) -> Result<String> {
        let [nodes, gpus] = self.shape_of(ranks);
        if nodes * gpus != ranks {
            return Err(Error::usage(format!(
                "--simulate-cluster: nodes={nodes},gpus={gpus} has {} ranks, and this run has {ranks}; leave out both \
                 keys, so that each rank is on a node of its own",
                nodes * gpus
            )));
        }
        let [.., latency, bandwidth, node_latency, node_bandwidth] = self.settings();
        let between = [latency, bandwidth].join(", ");
        let link = if nodes > 1 { between } else { [node_latency, node_bandwidth].join(", ") };
        Ok(format!(
            "the network is simulated: each all_reduce takes as long as on {} of {} ({link})",
            counted(nodes, "node"),
            counted(gpus, "rank")
        ))
    }

    /// Returns the time of an all-reduce of `bytes` bytes on a number of nodes, with a number of ranks on each, and the name
    /// of its algorithm.
    pub fn all_reduce(&self, [nodes, gpus]: [usize; 2], bytes: f64) -> (f64, &'static str) {
        let Self { latency, bandwidth, node_latency, node_bandwidth, .. } = *self;
        // Bytes that pass through a node also pass through its ranks.
        let narrowest = |nodes: usize, gpus: usize| match (nodes, gpus) {
            (1, _) => node_bandwidth,
            (_, 1) => bandwidth,
            _ => bandwidth.min(node_bandwidth),
        };
        // Two rounds of `ranks - 1` steps. `across` steps of a round go from node to node.
        let ring = |nodes: usize, gpus: usize| {
            let (ranks, across) = ((nodes * gpus) as f64, (nodes - 1) as f64);
            let latencies = across * latency + (ranks - 1.0 - across) * node_latency;
            2.0 * (latencies + (ranks - 1.0) / ranks * bytes / narrowest(nodes, gpus))
        };
        let height = f64::from(nodes.next_power_of_two().trailing_zeros());
        let latencies = (gpus - 1) as f64 * node_latency + height * latency;
        let tree = 2.0 * (latencies + bytes / narrowest(nodes, gpus));
        match self.algorithm {
            _ if nodes * gpus == 1 => (0.0, "-"),
            Algorithm::Tree => (tree, "tree"),
            // The slices of a node's ranks share its connection.
            Algorithm::Hierarchical => (ring(1, gpus) + ring(nodes, 1), "hierarchical"),
            Algorithm::Auto if nodes > 1 && tree < ring(nodes, gpus) => (tree, "tree"),
            Algorithm::Auto | Algorithm::Ring => (ring(nodes, gpus), "ring"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> SimulatedCluster {
        text.parse().unwrap()
    }

    #[test]
    fn cluster_parse_fills_missing_keys_with_defaults() {
        let cluster =
            parse("nodes=64, gpus=4,bandwidth=200Gbit/s,node_latency=1.5us,algorithm=tree");
        assert_eq!((cluster.nodes, cluster.gpus), (64, 4));
        assert_eq!(cluster.algorithm, Algorithm::Tree);
        assert_eq!(cluster.bandwidth, 25e9);
        assert!((cluster.latency - 5e-6).abs() < 1e-18);
        assert!((cluster.node_latency - 1.5e-6).abs() < 1e-18);
        assert_eq!(
            cluster.settings().join(","),
            "nodes=64,gpus=4,algorithm=tree,latency=5us,bandwidth=200Gbit/s,node-latency=1.5us,node-bandwidth=300GB/s"
        );
        assert_eq!(parse("").nodes, 2);
    }

    #[test]
    fn cluster_display_parses_back_to_the_same_text() {
        for text in [
            "",
            "gpus=3,latency=0.5 ms",
            "nodes=3,gpus=8,algorithm=ring,latency=750ns,bandwidth=1.5TB/s,node-latency=2s,node-bandwidth=12kB/s",
        ] {
            assert_eq!(parse(text).to_string(), text);
        }
    }

    #[test]
    fn cluster_units_are_converted() {
        let bandwidth = |text: &str| parse(&format!("bandwidth={text}")).bandwidth;
        assert_eq!(bandwidth("1Gbit/s"), 125e6);
        assert_eq!(bandwidth("0.5 MB/s"), 5e5);
        assert_eq!(parse("latency=0.25ms").latency, 0.25e-3);
    }

    #[test]
    fn cluster_parse_error_names_key_value_and_remedy() {
        for (text, parts) in [
            ("speed=3", ["there is no key `speed`", "use nodes, gpus, algorithm, latency"]),
            ("backend=gloo", ["there is no key `backend`", "use nodes, gpus, algorithm, latency"]),
            ("nodes=2,nodes=3", ["`nodes` is given twice", "give it once"]),
            ("nodes=0", ["nodes=0", "whole number from 1"]),
            ("gpus=-1", ["gpus=-1", "whole number from 1"]),
            ("nodes", ["nodes=", "whole number from 1"]),
            ("nodes=9999999,gpus=8", ["nodes=9999999", "from 1 to 1000000"]),
            ("algorithm=star", ["algorithm=star", "use ring, tree, hierarchical or auto"]),
            ("latency=5", ["latency=5", "with its unit (ns, us, ms, s)"]),
            ("node-latency=-5us", ["node-latency=-5us", "as 5us"]),
            ("bandwidth=0GB/s", ["bandwidth=0GB/s", "above 0"]),
            ("bandwidth=25GB", ["bandwidth=25GB", "kB/s, MB/s, GB/s"]),
            ("bandwidth=1e999GB/s", ["bandwidth=1e999GB/s", "as 25GB/s"]),
            ("node-bandwidth=1.2.3GB/s", ["node-bandwidth=1.2.3GB/s", "as 25GB/s"]),
        ] {
            let error = text.parse::<SimulatedCluster>().unwrap_err().to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{text}: {error}");
        }
    }

    const NETWORK: &str = "latency=10us,bandwidth=1GB/s,node-latency=1us,node-bandwidth=100GB/s";

    /// Returns the time of an all-reduce, in microseconds.
    fn time(text: &str, nodes: usize, gpus: usize, bytes: f64) -> f64 {
        parse(&format!("{NETWORK},{text}")).all_reduce([nodes, gpus], bytes).0 * 1e6
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
        let narrow = parse("latency=0us,bandwidth=1TB/s,node-latency=0us,node-bandwidth=1GB/s");
        near(narrow.all_reduce([2, 2], 1e6).0 * 1e6, 1.5e3);
    }

    #[test]
    fn auto_algorithm_takes_the_faster_of_ring_and_tree() {
        let cluster = parse(&format!("{NETWORK},nodes=64"));
        assert_eq!(cluster.all_reduce([64, 8], 1e3).1, "tree");
        assert_eq!(cluster.all_reduce([64, 8], 1e9).1, "ring");
        assert_eq!(cluster.all_reduce([1, 8], 1e3).1, "ring");
    }

    #[test]
    fn cost_never_rises_with_a_faster_network_or_fewer_bytes() {
        for way in ["ring", "tree", "hierarchical", "auto"] {
            for shape in [[1, 2], [1, 8], [2, 1], [2, 8], [3, 4], [64, 8], [512, 1]] {
                let time = |network: &str, bytes: f64| {
                    parse(&format!("{network},algorithm={way}")).all_reduce(shape, bytes).0
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
                    assert!(plain > last, "{way} {shape:?}: {bytes} bytes");
                    last = plain;
                }
            }
        }
    }

    #[test]
    fn cluster_shapes_double_up_to_the_cluster() {
        assert_eq!(parse("nodes=1,gpus=1").shapes(), [[1, 1]]);
        assert_eq!(parse("nodes=3,gpus=1").shapes(), [[1, 1], [2, 1], [3, 1]]);
        let expected = [[1, 1], [1, 2], [1, 4], [1, 6], [2, 6], [4, 6]];
        assert_eq!(parse("nodes=4,gpus=6").shapes(), expected);
    }
}
