//! Every public method of a group with threads, with two processes of one rank, and with two processes of two ranks.

use std::collections::BTreeSet;
use std::fs;

use ddp_mp::Backend;

use crate::harness::repository;
use crate::processes::play_with;
use crate::shared::surface::{Seen, from_lines, has_check, with_threads};

fn with_processes(of_process: [usize; 2]) -> Seen {
    let folder = tempfile::tempdir().unwrap();
    let variables = [("DDP_MP_FOLDER", folder.path())];
    let mut seen = Seen::new();
    for (code, output) in play_with("surface", &of_process, &variables) {
        assert_eq!(code, Some(0), "{of_process:?}: {output}");
        seen.extend(from_lines(&output));
    }
    seen
}

#[test]
fn every_method_gives_the_same_with_threads_and_processes() {
    for of_process in [[1, 1], [2, 2]] {
        let threads = with_threads(of_process.iter().sum(), Backend::Gloo);
        assert_eq!(with_processes(of_process), threads, "{of_process:?}");
    }
}

/// The code between the braces that follow each line that `starts` takes, with that line.
fn blocks(code: &str, starts: impl Fn(&str) -> bool) -> Vec<Vec<&str>> {
    let mut found: Vec<Vec<&str>> = Vec::new();
    let mut inside = false;
    for line in code.lines() {
        if !inside && starts(line) {
            inside = true;
            found.push(Vec::new());
        }
        if inside {
            found.last_mut().unwrap().push(line);
            inside = line != "}";
        }
    }
    found
}

/// The public methods of `ProcessGroup` and `Work` that a file of `process_group` has, and its functions that take a
/// group. What the documentation hides is for the program.
fn public_methods(code: &str, module: &str) -> Vec<String> {
    let name = |line: &str| {
        let after = line.trim_start().strip_prefix("pub fn ")?;
        Some(after.split(['(', '<']).next().unwrap().to_string())
    };
    let is_impl = |line: &str| ["impl ProcessGroup {", "impl Work {"].contains(&line);
    let methods = blocks(code, is_impl).into_iter().flatten().filter_map(name);
    let of_group = |block: &Vec<&str>| block.join(" ").contains("ProcessGroup>");
    let functions = blocks(code, |line| line.starts_with("pub fn ")).into_iter().filter(of_group);
    let functions = functions.filter_map(|block| Some(format!("{module}_{}", name(block[0])?)));
    methods.chain(functions).collect()
}

#[test]
fn every_public_method_has_a_check() {
    let mut methods = BTreeSet::new();
    for entry in fs::read_dir(repository("crates/engine/src/process_group")).unwrap() {
        let file = entry.unwrap().path();
        if file.extension().is_some_and(|extension| extension == "rs") {
            let code = fs::read_to_string(&file).unwrap();
            let code = code.replace("#[doc(hidden)]\n    pub fn ", "fn ");
            methods.extend(public_methods(&code, file.file_stem().unwrap().to_str().unwrap()));
        }
    }
    // So that this test notices when it finds none any more.
    for known in ["all_reduce", "recv_object_list", "wait", "functional_all_reduce"] {
        assert!(methods.contains(known), "{known} is not found: {methods:?}");
    }
    let files = fs::read_dir(repository("tests/shared/surface")).unwrap();
    let checks: String =
        files.map(|file| fs::read_to_string(file.unwrap().path()).unwrap()).collect();
    for method in &methods {
        // `ranks` would hide the function of the harness.
        let (check, call) = match method.strip_prefix("functional_") {
            Some(function) => (method.as_str(), format!("functional::{function}(")),
            None if method == "ranks" => ("ranks_of_group", ".ranks()".into()),
            None => (method.as_str(), format!(".{method}(")),
        };
        let function = blocks(&checks, |line| {
            line.trim_start_matches("pub(super) ").starts_with(&format!("fn {check}("))
        });
        let calls = function.iter().flatten().any(|line| line.contains(&call));
        assert!(
            has_check(check) && calls,
            "{method} is public: add a function {check} that calls it and compares its result with the \
             definition to tests/shared/surface, and to CHECKS there"
        );
    }
}
