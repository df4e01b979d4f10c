//! Slurm's list formats: hosts (`node[01-03,07],login1`) and tasks on each node (`2(x3),1`).

use crate::error::{Error, Result};

use super::variables::shortened;

/// Summary of a list of hosts, which may stand for more hosts than memory could hold.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Hosts {
    /// The name of the first host.
    pub first: String,
    /// The number of hosts.
    pub count: u64,
}

/// Reads a list of hosts, as `scontrol show hostnames` does: names separated by commas. A name may hold any number
/// of brackets with numbers and ranges. Numbers keep their leading zeros.
///
/// # Errors
/// [`Error::Input`] if the list is wrong; the text names the variable.
pub(super) fn hosts(variable: &str, list: &str) -> Result<Hosts> {
    let wrong = || {
        Error::usage(format!(
            "{variable}={:?} is not a list of hosts such as node[01-03,07],login1; set MASTER_ADDR",
            shortened(list)
        ))
    };
    let mut hosts: Option<Hosts> = None;
    let mut rest = list;
    loop {
        let (name, after) = one_entry(rest).ok_or_else(wrong)?;
        hosts = Some(match hosts {
            None => name,
            Some(Hosts { first, count }) => {
                Hosts { first, count: count.checked_add(name.count).ok_or_else(wrong)? }
            }
        });
        match after.strip_prefix(',') {
            Some(after) => rest = after,
            None => return hosts.ok_or_else(wrong),
        }
    }
}

/// Returns the first entry of a list and the rest: empty, or a comma and more. `None` if it is malformed.
fn one_entry(list: &str) -> Option<(Hosts, &str)> {
    let mut entry = Hosts { first: String::new(), count: 1 };
    let mut rest = list;
    loop {
        let plain = rest.find(['[', ']', ',']).unwrap_or(rest.len());
        let is_of_name = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
        if !rest[..plain].chars().all(is_of_name) {
            return None;
        }
        entry.first.push_str(&rest[..plain]);
        rest = &rest[plain..];
        let Some(inside) = rest.strip_prefix('[') else { break };
        let (inside, after) = inside.split_once(']')?;
        let (first, count) = numbers(inside)?;
        entry.first.push_str(first);
        entry.count = entry.count.checked_mul(count)?;
        rest = after;
    }
    let ends = rest.is_empty() || rest.starts_with(',');
    (ends && !entry.first.is_empty()).then_some((entry, rest))
}

/// Returns the first number in a bracket, as it is written, and how many there are. `None` if it is malformed.
fn numbers(inside: &str) -> Option<(&str, u64)> {
    let mut count = 0u64;
    let mut first = None;
    for range in inside.split(',') {
        let (from, to) = range.split_once('-').unwrap_or((range, range));
        let (low, high) = (number(from)?, number(to)?);
        count = count.checked_add(high.checked_sub(low)?.checked_add(1)?)?;
        first.get_or_insert(from);
    }
    Some((first?, count))
}

/// Parses digits alone; `parse` would accept a sign.
fn number(text: &str) -> Option<u64> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse().ok() } else { None }
}

/// Returns how many tasks there are on node `node`, and in all, from a list such as `2(x3),1`.
///
/// # Errors
/// [`Error::Input`] if the list is wrong; the text names the variable.
pub(super) fn tasks_on(variable: &str, list: &str, node: usize) -> Result<(usize, usize)> {
    let wrong = |why: &str| {
        let list = shortened(list);
        Error::usage(format!("{variable}={list:?} {why}; --launch local ignores it"))
    };
    let mut nodes = 0u64;
    let mut all = 0u64;
    let mut mine = None;
    for part in list.split(',') {
        let (tasks, times) = tasks_and_times(part)
            .ok_or_else(|| wrong("is not a list of tasks on each node such as 2(x3),1"))?;
        nodes = nodes.saturating_add(times);
        all = all.saturating_add(tasks.saturating_mul(times));
        if (node as u64) < nodes {
            mine.get_or_insert(tasks);
        }
    }
    let mine = mine.ok_or_else(|| wrong(&format!("has no node SLURM_NODEID={node}")))?;
    Ok((mine as usize, usize::try_from(all).unwrap_or(usize::MAX)))
}

fn tasks_and_times(part: &str) -> Option<(u64, u64)> {
    match part.split_once("(x") {
        Some((tasks, times)) => Some((number(tasks)?, number(times.strip_suffix(')')?)?)),
        None => Some((number(part)?, 1)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::test_runner::Config;

    use super::*;

    fn read(list: &str) -> (String, u64) {
        let Hosts { first, count } = hosts("SLURM_STEP_NODELIST", list).unwrap();
        (first, count)
    }

    #[test]
    fn host_lists_of_slurm_are_parsed() {
        for (list, first, count) in [
            ("login1", "login1", 1),
            ("a,b,c", "a", 3),
            ("node[01-03,07],login1", "node01", 5),
            ("node[7]", "node7", 1),
            ("node[8-12]", "node8", 5),
            ("node[098-102]-ib0", "node098-ib0", 5),
            ("a[1-2]b[3-4]", "a1b3", 4),
            ("login1,a[1-2]b[03-04,9]x", "login1", 7),
            ("rack[0-3]node[000-127]", "rack0node000", 512),
            ("dgx-1.cluster_2.example.org", "dgx-1.cluster_2.example.org", 1),
            ("n[0-999999999999]", "n0", 1_000_000_000_000),
            ("[1-3]", "1", 3),
        ] {
            assert_eq!(read(list), (first.into(), count), "{list}");
        }
    }

    #[test]
    fn invalid_host_list_is_refused() {
        for list in [
            "",
            ",",
            "a,",
            ",a",
            "a,,b",
            "a[",
            "a]",
            "a[]",
            "a[1-]",
            "a[-1]",
            "a[1,]",
            "a[2-1]",
            "a[1-2-3]",
            "a[x]",
            "a[+1]",
            "a[[1]]",
            "a[1]]",
            "a b",
            "a[1]\u{e9}",
            "n[0-18446744073709551615]",
            "n[0-9999999999]x[0-9999999999]",
        ] {
            let error = hosts("SLURM_STEP_NODELIST", list).unwrap_err().to_string();
            assert!(error.starts_with("SLURM_STEP_NODELIST="), "{error}");
            assert!(error.contains("is not a list of hosts"), "{error}");
        }
    }

    #[test]
    fn tasks_per_node_are_parsed() {
        let read = |list, node| tasks_on("SLURM_STEP_TASKS_PER_NODE", list, node);
        for (node, expected) in [(0, 2), (2, 2), (3, 1), (4, 4), (5, 4)] {
            assert_eq!(read("2(x3),1,4(x2)", node).unwrap(), (expected, 15));
        }
        assert_eq!(read("8", 0).unwrap(), (8, 8));
        let error = read("2(x3),1", 4).unwrap_err().to_string();
        assert!(error.contains("has no node SLURM_NODEID=4"), "{error}");
        for wrong in ["", "2(x3", "2(3)", "(x3)", "2(x)", "two", "2,,1", "-2"] {
            assert!(read(wrong, 0).unwrap_err().to_string().contains("is not a list"), "{wrong}");
        }
    }

    /// Generates a list, and the hosts that it stands for.
    fn written_out() -> impl Strategy<Value = (String, Vec<String>)> {
        let bracket = proptest::collection::vec((0u32..1000, 0u32..12, 1usize..5), 1..4);
        let entry = ("[a-z]{1,4}", proptest::option::of((bracket, "[a-z.-]{0,3}")));
        proptest::collection::vec(entry, 1..5).prop_map(|entries| {
            let (mut texts, mut hosts) = (Vec::new(), Vec::new());
            for (name, bracket) in entries {
                let Some((ranges, end)) = bracket else {
                    hosts.push(name.clone());
                    texts.push(name);
                    continue;
                };
                let mut parts = Vec::new();
                for (low, more, width) in ranges {
                    let high = low + more;
                    parts.push(format!("{low:0width$}-{high:0width$}"));
                    hosts.extend((low..=high).map(|i| format!("{name}{i:0width$}{end}")));
                }
                texts.push(format!("{name}[{}]{end}", parts.join(",")));
            }
            (texts.join(","), hosts)
        })
    }

    proptest! {
        #![proptest_config(Config { cases: 256, failure_persistence: None, ..Config::default() })]

        #[test]
        fn first_host_and_count_match_the_expanded_list((list, all) in written_out()) {
            prop_assert_eq!(read(&list), (all[0].clone(), all.len() as u64));
        }

        #[test]
        fn random_text_never_panics(text in "[a-z0-9,()x\\[\\]-]{0,40}|.{0,40}", node in 0usize..9) {
            if let Ok(Hosts { first, count }) = hosts("L", &text) {
                prop_assert!(first.len() <= text.len() && count > 0);
            }
            if let Ok((mine, all)) = tasks_on("T", &text, node) {
                prop_assert!(mine <= all);
            }
        }
    }
}
