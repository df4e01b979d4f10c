//! Slurm's list formats: hosts (`node[01-03,07],login1`) and tasks on each node (`2(x3),1`).

use crate::error::{Error, Result};

use super::variables::shortened;

/// Returns the first of a list of hosts, as `scontrol show hostnames` prints it. Names are separated by commas. A name
/// may hold any number of brackets with numbers and ranges, whose leading zeros stay.
///
/// # Errors
/// [`Error::Input`] if the first name is wrong; the text names the variable.
pub(super) fn first_host(variable: &str, list: &str) -> Result<String> {
    first_of(list).ok_or_else(|| {
        Error::usage(format!(
            "{variable}={:?} is not a list of hosts such as node[01-03,07],login1; set MASTER_ADDR",
            shortened(list)
        ))
    })
}

fn first_of(list: &str) -> Option<String> {
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    let (mut name, mut rest) = (String::new(), list);
    loop {
        let plain = rest.find(|c| !is_of_name(c)).unwrap_or(rest.len());
        name.push_str(&rest[..plain]);
        rest = &rest[plain..];
        let Some(inside) = rest.strip_prefix('[') else { break };
        let (numbers, after) = inside.split_once(']')?;
        let first = numbers.split([',', '-']).next()?;
        number(first)?;
        name.push_str(first);
        rest = after;
    }
    ((rest.is_empty() || rest.starts_with(',')) && !name.is_empty()).then_some(name)
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

    #[test]
    fn first_host_of_a_list_of_slurm_is_found() {
        for (list, first) in [
            ("login1", "login1"),
            ("a,b,c", "a"),
            ("node[01-03,07],login1", "node01"),
            ("node[7]", "node7"),
            ("node[098-102]-ib0", "node098-ib0"),
            ("a[1-2]b[3-4]", "a1b3"),
            ("login1,a[1-2]b[03-04,9]x", "login1"),
            ("dgx-1.cluster_2.example.org", "dgx-1.cluster_2.example.org"),
            ("[1-3]", "1"),
        ] {
            assert_eq!(first_host("L", list).unwrap(), first, "{list}");
        }
    }

    #[test]
    fn invalid_host_list_is_refused() {
        for list in [
            "",
            ",",
            ",a",
            "a[",
            "a]",
            "a[]",
            "a[-1]",
            "a[x]",
            "a[+1]",
            "a[[1]]",
            "a b",
            "a[1]\u{e9}",
        ] {
            let error = first_host("SLURM_STEP_NODELIST", list).unwrap_err().to_string();
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

    proptest! {
        #![proptest_config(Config { cases: 256, failure_persistence: None, ..Config::default() })]

        #[test]
        fn random_text_never_panics(text in "[a-z0-9,()x\\[\\]-]{0,40}|.{0,40}", node in 0usize..9) {
            if let Ok(first) = first_host("L", &text) {
                prop_assert!(first.len() <= text.len());
            }
            if let Ok((mine, all)) = tasks_on("T", &text, node) {
                prop_assert!(mine <= all);
            }
        }
    }
}
