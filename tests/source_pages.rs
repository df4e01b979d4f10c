//! The pages about the source: the list of all files, the path through them, and the table of rooms.

use std::collections::BTreeMap;
use std::fs;

use crate::harness::{assert_generated, repository};
use crate::tidy::{before_tests, files_with, name, rooms};

/// The page with the path.
const PATH: &str = "docs/src/reading-the-source.md";

/// Returns the purpose of a file: the first paragraph of its comment.
fn purpose(text: &str) -> String {
    let marks = ["//!", "//", "#", "/*", "<!--"];
    // A page of HTML begins with its type.
    let lines = text.lines().skip_while(|line| line.is_empty() || line.starts_with("<!doctype"));
    let words = lines.map_while(|line| marks.iter().find_map(|mark| line.strip_prefix(mark)));
    let paragraph: Vec<&str> = words.map(str::trim).take_while(|line| !line.is_empty()).collect();
    let text = paragraph.join(" ");
    let text = text.trim_end_matches("*/").trim_end_matches("-->").trim_end();
    without_links(text).trim_end_matches('.').replace('|', "\\|")
}

/// Returns `text` with the code of each link in place of the link: the book has no page for an item of Rust.
fn without_links(text: &str) -> String {
    let mut parts = text.split("](");
    let mut code = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (_, rest) =
            part.split_once(')').unwrap_or_else(|| panic!("{text}: a link without end"));
        code = code + "]" + rest;
    }
    code.replace("[`", "`").replace("`]", "`")
}

/// Returns the page that lists all files, made from the first paragraph of each.
fn list_of_files() -> String {
    let mut page = String::from(
        "# What is in which file\n\n\
        <!-- Made from the first lines of the files by `TRYCMD=overwrite cargo test --release --test tests source_pages`. -->\n\n\
        Each file begins with its purpose. This is the list, in the order of the modules: a module uses only modules below\n\
        it. [Reading the source](reading-the-source.md) follows one run through them. All paths are below `src/`.\n",
    );
    let mut of_room: BTreeMap<String, Vec<[String; 2]>> = BTreeMap::new();
    for file in files_with(&["rs", "cpp", "h", "toml", "js", "css", "html"]) {
        let name = name(&file);
        let purpose = purpose(&fs::read_to_string(&file).unwrap());
        let room = name.split(['/', '.']).next().unwrap().to_owned();
        of_room.entry(room).or_default().push([name, purpose]);
    }
    for [room, description] in rooms() {
        page += &format!("\n## {room}\n\n{description}\n\n| file | purpose |\n|---|---|\n");
        let files = of_room.remove(&room).unwrap_or_else(|| panic!("src has no room {room}"));
        for [file, purpose] in files {
            page += &format!("| `{file}` | {purpose} |\n");
        }
    }
    let rest: Vec<&String> = of_room.keys().collect();
    assert_eq!(rest, ["lib", "prelude"], "rooms that the table in lib.rs lacks");
    page
}

#[test]
fn list_of_files_matches_the_sources() {
    assert_generated("docs/src/files.md", &list_of_files());
}

/// Returns the number of a file's lines before its unit tests.
fn num_lines(file: &str) -> usize {
    let path = repository("src").join(file);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{PATH}: {file}: {error}"));
    before_tests(&text).lines().count()
}

#[test]
fn path_through_the_source_is_true() {
    let page = fs::read_to_string(repository(PATH)).unwrap();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
    let files: Vec<&str> = rows.map(|(file, _)| file).collect();
    assert!(files.len() > 20, "{files:?}");
    // A room may come back, but no file twice.
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
        let path = repository("src").join(word);
        assert!(!is_path || word.starts_with("src") || path.exists(), "{PATH}: no {word}");
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
        let places = ["", "src/", "src/process_group/"];
        let is_there = places.iter().any(|place| repository(place).join(file).exists());
        assert!(is_there, "ARCHITECTURE.md: no {file}");
    }
}

#[test]
fn architecture_has_the_rooms_of_the_crate() {
    let page = fs::read_to_string(repository("ARCHITECTURE.md")).unwrap();
    let rows: Vec<String> =
        rooms().iter().map(|[room, description]| format!("| `{room}` | {description} |")).collect();
    assert!(
        page.contains(&rows.join("\n")),
        "ARCHITECTURE.md: the rooms are not:\n{}",
        rows.join("\n")
    );
}
