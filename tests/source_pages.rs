//! The pages about the source: the path through the files, and the table of modules.

use std::fs;

use crate::harness::repository;
use crate::tidy::{before_tests, modules, source};

/// The page with the path.
const PATH: &str = "docs/src/reading-the-source.md";

/// Returns the number of a file's lines before its unit tests.
fn num_lines(file: &str) -> usize {
    let path = source(file).unwrap_or_else(|| panic!("{PATH}: no {file}"));
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{PATH}: {file}: {error}"));
    before_tests(&text).lines().count()
}

#[test]
fn path_through_the_source_is_true() {
    let page = fs::read_to_string(repository(PATH)).unwrap();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
    let files: Vec<&str> = rows.map(|(file, _)| file).collect();
    assert!(files.len() > 20, "{files:?}");
    // A module may come back, but no file twice.
    for (index, file) in files.iter().enumerate() {
        assert!(!files[..index].contains(file), "{PATH} names {file} twice");
    }
    assert_eq!(files.first(), Some(&"main.rs"));

    let sum: usize = files.iter().map(|file| num_lines(file)).sum();
    let (before, _) = page.split_once(" lines, without their unit tests").unwrap();
    let said = before.rsplit(' ').next().unwrap().replace(',', "");
    let rounded = (sum + 50) / 100 * 100;
    assert_eq!(said.parse(), Ok(rounded), "{PATH}: {sum} lines");

    // Every other file and folder that the text names.
    let text: Vec<&str> = page.lines().filter(|line| !line.starts_with("| `")).collect();
    for word in text.join("\n").split('`').skip(1).step_by(2) {
        let is_path = word.contains('/') && !word.contains([' ', '<', ':']);
        let is_known =
            ["crates/", "src"].iter().any(|it| word.starts_with(it)) || source(word).is_some();
        assert!(!is_path || is_known, "{PATH}: no {word}");
    }
}

#[test]
fn drawings_name_files_that_exist() {
    let page = fs::read_to_string(repository("ARCHITECTURE.md")).unwrap();
    let words = page.split(|c: char| !(c.is_ascii_alphanumeric() || "_/.".contains(c)));
    let files: Vec<&str> =
        words.filter(|word| word.ends_with(".rs") && word.contains('/')).collect();
    assert!(files.len() >= 10, "{files:?}");
    for file in files {
        let in_group = || source(&format!("process_group/{file}"));
        let is_there = repository(file).exists() || source(file).or_else(in_group).is_some();
        assert!(is_there, "ARCHITECTURE.md: no {file}");
    }
}

#[test]
fn architecture_has_the_modules_of_the_crate() {
    let page = fs::read_to_string(repository("ARCHITECTURE.md")).unwrap();
    let rows: Vec<String> = modules()
        .iter()
        .map(|[module, description]| format!("| `{module}` | {description} |"))
        .collect();
    assert!(
        page.contains(&rows.join("\n")),
        "ARCHITECTURE.md: the modules are not:\n{}",
        rows.join("\n")
    );
}
