//! The rules of the source that a compiler does not check.

use std::fs;
use std::path::{Path, PathBuf};

use crate::harness::repository;

fn sources() -> Vec<PathBuf> {
    fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                collect(&path, files);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    let mut files = Vec::new();
    collect(&repository("src"), &mut files);
    assert!(files.len() > 30);
    files.sort();
    files
}

fn name(file: &Path) -> String {
    let relative = file.strip_prefix(repository("src")).unwrap();
    relative.to_string_lossy().into_owned()
}

/// The code of a file, without comments and tests.
fn code(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap();
    let code = text.split("#[cfg(test)]").next().unwrap();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// The order in which lib.rs tells to read; a module uses those below it.
const ORDER: [&str; 15] = [
    "commands",
    "config",
    "launch",
    "trainer",
    "checkpoint",
    "ddp",
    "optim",
    "data",
    "models",
    "process_group",
    "observe",
    "torch",
    "sync",
    "error",
    "operation",
];

#[test]
fn a_module_uses_modules_below_it_only() {
    let place = |module: &str| ORDER.iter().position(|known| *known == module);
    for file in sources() {
        let name = name(&file);
        let module = name.split(['/', '.']).next().unwrap();
        let Some(mine) = place(module) else {
            assert!(["main", "cli", "lib"].contains(&module), "{name} has no place in the order");
            continue;
        };
        for used in code(&file).split("crate::").skip(1) {
            let used = used.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap();
            let Some(theirs) = place(used) else { continue };
            assert!(theirs >= mine, "{name} uses {used}, which is above it");
        }
    }
}

#[test]
fn every_file_says_its_purpose_first_and_is_short() {
    for file in sources() {
        let text = fs::read_to_string(&file).unwrap();
        assert!(text.starts_with("//! "), "{} does not say what it is for", name(&file));
        let lines = text.lines().count();
        assert!(lines <= 450, "{} has {lines} lines: one purpose each?", name(&file));
    }
}

#[test]
fn unsafe_is_where_it_may_be() {
    let may = ["torch/", "process_group/gloo/", "process_group/nccl/", "process_group/threaded/"];
    for file in sources() {
        let name = name(&file);
        let allowed = may.iter().any(|place| name.starts_with(place));
        let found = code(&file).contains("unsafe ");
        assert!(allowed || !found, "{name} has unsafe code");
    }
}

#[test]
fn only_the_printer_prints() {
    for file in sources() {
        let name = name(&file);
        if name.starts_with("observe/") {
            continue;
        }
        for macro_name in ["print!(", "println!(", "eprint!(", "eprintln!(", "dbg!("] {
            assert!(!code(&file).contains(macro_name), "{name} prints with {macro_name}");
        }
    }
}

#[test]
fn every_example_is_short_and_in_the_readme() {
    let readme = fs::read_to_string(repository("README.md")).unwrap();
    let mut lessons = Vec::new();
    for entry in fs::read_dir(repository("examples")).unwrap() {
        let file = entry.unwrap().path();
        if file.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let name = file.file_stem().unwrap().to_str().unwrap().to_owned();
        let text = fs::read_to_string(&file).unwrap();
        let lines = text.lines().count();
        assert!(lines < 100, "{name} has {lines} lines: a lesson is read in one go");
        let command = format!("cargo run --release --example {name}");
        assert!(
            text.contains(&format!("//!     {command}\n")),
            "{name} does not say how to run it"
        );
        assert!(readme.contains(&format!("`{command}`")), "the README does not name {name}");
        if let Some((number, _)) = name.split_once('-') {
            let purpose = text.strip_prefix(&format!("//! {number}. "));
            assert!(purpose.is_some(), "{name} does not begin with its number and purpose");
            lessons.push(number.parse::<usize>().unwrap());
        }
    }
    lessons.sort_unstable();
    assert_eq!(lessons, (1..=lessons.len()).collect::<Vec<_>>(), "no lesson is missing");
}
