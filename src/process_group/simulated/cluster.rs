//! The cluster of `--simulate-cluster`: the given values and the defaults.

use std::fmt;
use std::str::FromStr;

use serde_with::SerializeDisplay;
use strum::{Display, EnumString, IntoStaticStr};

use super::cost::ClusterShape;
use crate::error::{Error, Result, counted};

/// The link from one rank to another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ClusterLink {
    /// The latency of a message, in seconds.
    pub latency: f64,
    /// The bandwidth in each direction, in bytes per second.
    pub bandwidth: f64,
}

/// The library whose collectives are modelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display, EnumString)]
#[strum(serialize_all = "lowercase")]
pub(crate) enum Library {
    /// NCCL.
    Nccl,
    /// The backend `gloo`: one process per node, whose ranks share memory.
    Gloo,
}

/// The algorithm of an all-reduce.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, EnumString, IntoStaticStr)]
#[strum(serialize_all = "lowercase")]
pub(crate) enum Algorithm {
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
    pub(crate) nodes: usize,
    /// Ranks per node.
    pub(crate) gpus: usize,
    pub(crate) library: Library,
    /// `None` for the fastest one.
    pub(crate) algorithm: Option<Algorithm>,
    /// The link from node to node. The bandwidth is that of all ranks of a node together.
    pub(crate) between: ClusterLink,
    /// The link from rank to rank within a node. The bandwidth is that of each rank.
    pub(crate) within: ClusterLink,
    /// The keys that the user has given.
    given: Vec<&'static str>,
}

const KEYS: [&str; 8] = [
    "nodes",
    "gpus",
    "backend",
    "algorithm",
    "latency",
    "bandwidth",
    "node-latency",
    "node-bandwidth",
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

/// The most ranks, more than any cluster has.
const MAX_RANKS: usize = 1 << 24;

impl FromStr for SimulatedCluster {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut given: Vec<(&'static str, &str)> = Vec::new();
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let Some(known) = KEYS.into_iter().find(|known| *known == key.replace('_', "-")) else {
                let keys = KEYS.join(", ");
                return Err(Error::usage(format!("there is no key `{key}`; use {keys}")));
            };
            if given.iter().any(|(other, _)| *other == known) {
                return Err(Error::usage(format!("`{known}` is given twice; give it once")));
            }
            given.push((known, value));
        }
        let value =
            |key: &str| given.iter().find(|(known, _)| *known == key).map(|(_, value)| *value);
        let library = match value("backend") {
            None => Library::Nccl,
            Some(name) => name.parse().map_err(|_| wrong("backend", name, "use nccl or gloo"))?,
        };
        let chosen = value("algorithm").filter(|name| *name != "auto").map(|name| {
            let problem = |_| wrong("algorithm", name, "use ring, tree, hierarchical or auto");
            name.parse::<Algorithm>().map_err(problem)
        });
        let algorithm = chosen.transpose()?;
        if let (Library::Gloo, Some(chosen)) = (library, algorithm) {
            let only =
                "backend=gloo chooses the algorithm by the number of processes; leave it out";
            return Err(wrong("algorithm", chosen.name(), only));
        }
        // Typical values. NCCL: NVLink, and a network card of 200 Gbit/s or more. Gloo: cores and 10 Gbit/s.
        let [latency, bandwidth, node_latency, node_bandwidth] = match library {
            Library::Nccl => [5e-6, 25e9, 3e-6, 300e9],
            Library::Gloo => [50e-6, 1.25e9, 5e-6, 5e9],
        };
        let time = |key, default| value(key).map_or(Ok(default), |text| parse_time(key, text));
        let rate = |key, default| value(key).map_or(Ok(default), |text| parse_rate(key, text));
        let count = |key, default| value(key).map_or(Ok(default), |text| parse_count(key, text));
        let (nodes, gpus) = (count("nodes", 2)?, count("gpus", 8)?);
        if nodes.saturating_mul(gpus) > MAX_RANKS {
            let ranks =
                format!("that would be more than {MAX_RANKS} ranks; use fewer nodes or gpus");
            return Err(wrong("nodes", &nodes.to_string(), &ranks));
        }
        Ok(Self {
            nodes,
            gpus,
            library,
            algorithm,
            between: ClusterLink {
                latency: time("latency", latency)?,
                bandwidth: rate("bandwidth", bandwidth)?,
            },
            within: ClusterLink {
                latency: time("node-latency", node_latency)?,
                bandwidth: rate("node-bandwidth", node_bandwidth)?,
            },
            given: given.into_iter().map(|(key, _)| key).collect(),
        })
    }
}

impl SimulatedCluster {
    /// Returns all settings: as `key=value`, what each means, and whether it is a default.
    pub(crate) fn settings(&self) -> Vec<(String, &'static str, bool)> {
        let is_nccl = self.library == Library::Nccl;
        let meaning = |key| match key {
            "nodes" => "machines",
            "gpus" => "ranks on each",
            "backend" if is_nccl => "in one ring or tree, during backward",
            "backend" => "a process on each node, during backward",
            "algorithm" if !is_nccl => "Gloo's ring for two nodes, slices to all for more",
            "algorithm" if self.algorithm.is_none() => {
                "the faster of ring and tree for each bucket"
            }
            "algorithm" => "for all buckets",
            "latency" => "of a message from node to node",
            "bandwidth" => "out of a node, and as much into it",
            "node-latency" => "of a message within a node",
            _ => "out of a rank within a node, and as much into it",
        };
        let value = |key| match key {
            "nodes" => self.nodes.to_string(),
            "gpus" => self.gpus.to_string(),
            "backend" => self.library.to_string(),
            "algorithm" => self.algorithm.map_or("auto", Algorithm::name).to_string(),
            "latency" => show(self.between.latency, &TIMES),
            "bandwidth" => show(self.between.bandwidth, &RATES[..4]),
            "node-latency" => show(self.within.latency, &TIMES),
            _ => show(self.within.bandwidth, &RATES[..4]),
        };
        let setting =
            |key| (format!("{key}={}", value(key)), meaning(key), !self.given.contains(&key));
        KEYS.map(setting).to_vec()
    }
}

impl SimulatedCluster {
    /// Returns the shape of the cluster for this many ranks, which must be as many as the cluster has. If the user has given
    /// neither `nodes` nor `gpus`, each rank is on a node of its own.
    pub(crate) fn shape_of(&self, ranks: usize) -> ClusterShape {
        if self.has_shape() {
            ClusterShape { nodes: self.nodes, gpus: self.gpus }
        } else {
            ClusterShape { nodes: ranks, gpus: 1 }
        }
    }

    fn has_shape(&self) -> bool {
        self.given.iter().any(|key| ["nodes", "gpus"].contains(key))
    }

    /// Returns the cluster of this many ranks in words: `2 nodes of 1 rank (latency=5us, bandwidth=25GB/s)`.
    pub(crate) fn describe(&self, ranks: usize) -> String {
        let ClusterShape { nodes, gpus } = self.shape_of(ranks);
        let keys = match nodes {
            1 => ["node-latency", "node-bandwidth"],
            _ => ["latency", "bandwidth"],
        };
        let settings = self.settings().into_iter().map(|(setting, ..)| setting);
        let shown = settings.filter(|setting| {
            keys.iter().any(|key| setting.strip_prefix(key).is_some_and(|it| it.starts_with('=')))
        });
        format!(
            "{} of {} ({})",
            counted(nodes, "node"),
            counted(gpus, "rank"),
            shown.collect::<Vec<_>>().join(", ")
        )
    }

    /// Returns what is wrong if the cluster has another number of ranks than a run has.
    pub(crate) fn problem_with(&self, ranks: usize) -> Option<String> {
        let ClusterShape { nodes, gpus } = self.shape_of(ranks);
        (nodes * gpus != ranks).then(|| {
            format!(
                "nodes={nodes},gpus={gpus} has {} ranks, and this run has {ranks}; leave out both keys, so that each rank \
                 is on a node of its own",
                nodes * gpus
            )
        })
    }
}

impl Algorithm {
    pub(crate) fn name(self) -> &'static str {
        self.into()
    }
}

fn wrong(key: &str, value: &str, remedy: &str) -> Error {
    Error::usage(format!("{key}={value}: {remedy}"))
}

fn parse_count(key: &str, text: &str) -> Result<usize> {
    let count = text.parse().ok().filter(|count| *count > 0);
    count.ok_or_else(|| wrong(key, text, "use a whole number from 1"))
}

fn parse_time(key: &str, text: &str) -> Result<f64> {
    let time = with_unit(text, &TIMES).filter(|time| *time >= 0.0);
    time.ok_or_else(|| wrong(key, text, "use a time with its unit (ns, us, ms, s), as 5us"))
}

fn parse_rate(key: &str, text: &str) -> Result<f64> {
    let remedy = "use a number above 0 with its unit (kB/s, MB/s, GB/s, TB/s; kbit/s, Mbit/s, Gbit/s), as 25GB/s";
    with_unit(text, &RATES).filter(|rate| *rate > 0.0).ok_or_else(|| wrong(key, text, remedy))
}

/// Returns the value of a number followed by one of `units`. `None` if `text` is not such a number.
fn with_unit(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let begin = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, name) = text.split_at(begin);
    let (_, unit) = units.iter().find(|(unit, _)| *unit == name.trim_start())?;
    Some(number.parse::<f64>().ok()? * unit).filter(|value| value.is_finite())
}

/// Returns `value` in the unit that leaves the fewest digits before the point, but at least one.
fn show(value: f64, units: &[(&str, f64)]) -> String {
    let fitting = units.iter().filter(|(_, unit)| value >= *unit * 0.9999);
    let (name, unit) = fitting
        .max_by(|a, b| a.1.total_cmp(&b.1))
        .unwrap_or_else(|| units.iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or(&("", 1.0)));
    let number = format!("{:.3}", value / unit);
    format!("{}{name}", number.trim_end_matches('0').trim_end_matches('.'))
}

impl fmt::Display for SimulatedCluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let given = self.settings().into_iter().filter(|(.., is_default)| !is_default);
        f.write_str(&given.map(|(setting, ..)| setting).collect::<Vec<_>>().join(","))
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
        assert_eq!(cluster.algorithm, Some(Algorithm::Tree));
        assert_eq!(cluster.between, ClusterLink { latency: 5e-6, bandwidth: 25e9 });
        assert!((cluster.within.latency - 1.5e-6).abs() < 1e-18);
        let defaults = cluster.settings().into_iter().filter(|(_, _, default)| *default);
        let defaults: Vec<String> = defaults.map(|(setting, ..)| setting).collect();
        assert_eq!(defaults, ["backend=nccl", "latency=5us", "node-bandwidth=300GB/s"]);
        assert_eq!(parse("").nodes, 2);
        assert_eq!(
            parse("backend=gloo").between,
            ClusterLink { latency: 50e-6, bandwidth: 1.25e9 }
        );
    }

    #[test]
    fn cluster_display_parses_back_to_the_same_text() {
        for text in [
            "nodes=2,gpus=1,backend=gloo,algorithm=auto,latency=10ms,bandwidth=125MB/s,\
             node-latency=0ns,node-bandwidth=7.9GB/s",
            "nodes=3,gpus=8,backend=nccl,algorithm=ring,latency=750ns,bandwidth=1.5TB/s,\
             node-latency=2s,node-bandwidth=12kB/s",
        ] {
            assert_eq!(parse(text).to_string(), text);
        }
    }

    #[test]
    fn cluster_units_are_converted() {
        let bandwidth = |text: &str| parse(&format!("bandwidth={text}")).between.bandwidth;
        assert_eq!(bandwidth("1Gbit/s"), 125e6);
        assert_eq!(bandwidth("0.5 MB/s"), 5e5);
        assert_eq!(parse("latency=0.25ms").between.latency, 0.25e-3);
    }

    #[test]
    fn cluster_parse_error_names_key_value_and_remedy() {
        for (text, parts) in [
            (
                "speed=3",
                ["there is no key `speed`", "use nodes, gpus, backend, algorithm, latency"],
            ),
            ("nodes=2,nodes=3", ["`nodes` is given twice", "give it once"]),
            ("nodes=0", ["nodes=0", "whole number from 1"]),
            ("gpus=-1", ["gpus=-1", "whole number from 1"]),
            ("nodes", ["nodes=", "whole number from 1"]),
            ("nodes=9999999,gpus=8", ["nodes=9999999", "more than 16777216 ranks"]),
            ("backend=mpi", ["backend=mpi", "use nccl or gloo"]),
            ("algorithm=star", ["algorithm=star", "use ring, tree, hierarchical or auto"]),
            ("backend=gloo,algorithm=tree", ["algorithm=tree", "leave it out"]),
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
}
