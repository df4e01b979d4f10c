//! The rules of the source that a compiler does not check.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::harness::{files_below, repository};

/// The folders of the source of the program, the views, the engine and the comparison.
pub(crate) const ROOTS: [&str; 4] = ["src", VIEWS, ENGINE, COMPARE];
const VIEWS: &str = "crates/views/src";
const ENGINE: &str = "crates/engine/src";
const COMPARE: &str = "crates/compare/src";

/// Returns all Rust files of these crates, sorted in each.
fn sources() -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> =
        ROOTS.into_iter().flat_map(|root| files_below(&repository(root))).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "rs"));
    assert!(files.len() > 30);
    files
}

/// Returns the path of a source file below the folder of its crate's source. A file of two of the crates begins with `views/`
/// or `compare/`.
fn name(file: &Path) -> String {
    let below =
        |root: &str| Some(file.strip_prefix(repository(root)).ok()?.to_string_lossy().into());
    let of = |crate_name: &str, root: &str| Some(format!("{crate_name}/{}", below(root)?));
    let named = below("src").or_else(|| of("views", VIEWS)).or_else(|| of("compare", COMPARE));
    named.or_else(|| below(ENGINE)).unwrap()
}

/// Returns where a file is that is named by its path below the folder of its crate's source.
pub(crate) fn source(name: &str) -> Option<PathBuf> {
    let paths = ROOTS.into_iter().map(|root| repository(root).join(name));
    paths.into_iter().find(|path| path.exists())
}

/// Returns the part of a file's text before its unit tests.
pub(crate) fn before_tests(text: &str) -> &str {
    let attributes = ["#[cfg(test)]", "#[cfg(all(test"];
    attributes.iter().fold(text, |code, attribute| code.split(attribute).next().unwrap())
}

/// The code of a file, without comments and tests.
fn code(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap();
    let lines = before_tests(&text).lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// Returns the rows of the table "Reading order" in lib.rs, from the top to the bottom: a module, and what happens there.
pub(crate) fn modules() -> Vec<[String; 2]> {
    let library = fs::read_to_string(repository("src/lib.rs")).unwrap();
    let (_, section) = library.split_once("//! # Reading order\n").unwrap();
    let section = section.split("//! # ").next().unwrap();
    let rows = section
        .lines()
        .filter_map(|line| line.strip_prefix("//! | ")?.strip_suffix(" |")?.split_once(" | "));
    let modules =
        rows.map(|(module, text)| [module.trim_matches(['[', ']', '`']), text].map(str::to_owned));
    modules.filter(|[module, _]| module != "module").collect()
}

/// Returns the modules of that table.
fn reading_order() -> Vec<String> {
    modules().into_iter().map(|[module, _]| module).collect()
}

#[test]
fn modules_use_only_modules_below_them() {
    let order = reading_order();
    let place = |module: &str| order.iter().position(|known| known == module);
    let mut seen = BTreeSet::new();
    for file in sources() {
        let name = name(&file);
        let module = name.split(['/', '.']).next().unwrap();
        if ["lib", "prelude"].contains(&module) {
            continue; // they name all modules
        }
        let mine = place(module).unwrap_or_else(|| panic!("{name} is not in lib.rs's table"));
        seen.insert(module.to_owned());
        let code = code(&file).replace("ddp_mp_engine::", "").replace("ddp_mp_views::", "");
        let code = code.replace("views::", "crate::views::").replace("engine::", "crate::");
        let code = code.replace("compare::", "crate::compare::");
        for used in code.split("crate::").skip(1) {
            let used = used.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap();
            // The compiler checks these.
            let is_within = ["views", "compare"].contains(&module) && place(used).is_none();
            if used == "loom_primitives" || is_within || module == "compare" {
                continue; // tests/loom has the first
            }
            let theirs = place(used).unwrap_or_else(|| {
                panic!("{name} uses crate::{used}; name the module that declares it")
            });
            assert!(theirs >= mine, "{name} uses {used}, which is above it");
        }
    }
    assert_eq!(seen, order.into_iter().collect(), "the table of lib.rs names these modules");
}

/// Returns what a package of this workspace needs: a line for each package.
fn packages_of(package: &str) -> String {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["tree", "--locked", "--package", package, "--edges=normal", "--prefix=none"]);
    let output = cargo.current_dir(repository("")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Who trains with a loop of their own builds neither a command line nor a screen.
#[test]
fn engine_needs_no_command_line_and_no_terminal() {
    let packages = packages_of("ddp-mp-engine");
    assert!(packages.contains("tch v"), "{packages}");
    for foreign in
        ["clap v", "ratatui v", "crossterm v", "indicatif v", "prost v", "ddp-mp-views v"]
    {
        assert!(!packages.contains(foreign), "the engine needs {foreign}");
    }
}

/// Who stays with PyTorch compares records without libtorch.
#[test]
fn comparison_needs_no_libtorch() {
    for package in ["ddp-mp-compare", "ddp-mp-native"] {
        let packages = packages_of(package);
        for foreign in ["tch v", "torch-sys v", "ddp-mp-engine v"] {
            assert!(!packages.contains(foreign), "{package} needs {foreign}");
        }
    }
}

/// The engine tells events, and knows nobody who looks at them. It may not name a view in a comment either.
#[test]
fn engine_names_no_view() {
    let mut words: Vec<String> =
        ["live view", "tensorboard", "prometheus", "perfetto", "printer", "progress bar"]
            .map(String::from)
            .into();
    let folders = fs::read_dir(repository(VIEWS)).unwrap().map(|entry| entry.unwrap().path());
    let views: Vec<String> = folders.filter(|path| path.is_dir()).map(|path| name(&path)).collect();
    assert!(views.contains(&"views/trace".into()), "{views:?}");
    words.extend(views.iter().map(|view| view.replace("views/", "--")));
    for file in files_below(&repository(ENGINE)) {
        if file.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let name = name(&file);
        let text = fs::read_to_string(&file).unwrap().to_lowercase();
        let found = words.iter().find(|word| text.contains(word.as_str()));
        assert!(found.is_none(), "{name} names a view: {found:?}");
    }
}

#[test]
fn files_state_their_purpose_and_have_at_most_600_lines() {
    for file in sources() {
        let text = fs::read_to_string(&file).unwrap();
        assert!(text.starts_with("//! "), "{} does not say what it is for", name(&file));
        let lines = text.lines().count();
        assert!(lines <= 600, "{} has {lines} lines: one purpose each?", name(&file));
    }
}

/// The module of a folder is its `mod.rs`. Unit tests are the module `tests`, at the end of the file that they test, or in
/// a file of their own where they are long.
#[test]
fn modules_and_unit_tests_have_one_style() {
    for file in sources() {
        let (name, text) = (name(&file), fs::read_to_string(&file).unwrap());
        assert!(!file.with_extension("").is_dir(), "{name}: move it into its folder, as mod.rs");
        assert!(!name.ends_with("_tests.rs"), "{name}: name it tests.rs, below the file it tests");
        for mark in ["#[cfg(test)]\n", "#[cfg(all(test"] {
            for rest in text.split(mark).skip(1) {
                let item = rest.lines().find(|line| line.contains("mod ")).unwrap_or_default();
                let (_, after) = rest.split_once(item).unwrap();
                let is_last = match item.trim_start_matches("pub(super) ") {
                    "mod tests;" => after.trim().is_empty(),
                    "mod tests {" => {
                        after.split_once("\n}\n").is_some_and(|(_, end)| end.is_empty())
                    }
                    _ => false,
                };
                assert!(is_last, "{name}: put its unit tests at the end, as `mod tests`");
            }
        }
    }
}

/// Words, the files that may have them, and what holds elsewhere.
type Rule = (&'static [&'static str], fn(&str) -> bool, &'static str);

#[test]
fn some_words_are_in_few_files_only() {
    let may_be_unsafe = |name: &str| {
        let kind = name.strip_prefix("process_group/").is_some_and(|rest| rest.contains('/'));
        kind || name.starts_with("ffi/") || name.starts_with("os/")
    };
    let rules: [Rule; 5] = [
        (&["unsafe "], may_be_unsafe, "unsafe code belongs into ffi, os and kinds of groups"),
        // A duration of a user's may be too long for an `Instant`, and while a process is suspended no time must count.
        (
            &["Instant::now() + ", "recv_deadline("],
            |name| name == "runtime/clock.rs",
            "use crate::runtime::Deadline",
        ),
        (
            &["print!(", "println!(", "eprint!(", "eprintln!(", "dbg!("],
            |name| name.starts_with("views/"),
            "only views print",
        ),
        // The name of a file may have a line break, and text of others must not look like a line of the program.
        (&[".display()"], |_| false, "use error::Shown"),
        (
            &["scope.spawn(", "thread::spawn("],
            |name| name.ends_with("tests.rs"),
            "start threads with thread::Builder",
        ),
    ];
    for file in sources() {
        let (name, code) = (name(&file), code(&file));
        for (words, may_have, rule) in rules {
            let found = words.iter().find(|word| code.contains(**word));
            assert!(may_have(&name) || found.is_none(), "{name} has {found:?}: {rule}");
        }
    }
}

/// A reader of one module need not know these. Comments may explain them.
#[test]
fn words_of_one_module_stay_there() {
    for file in sources() {
        let (name, code) = (name(&file), code(&file));
        let averages = [
            "process_group/",
            "ddp/",
            "optim/shared_model.rs",
            "optim/flat_memory.rs",
            "optim/param_memory.rs",
        ];
        let is_plain = averages.iter().any(|module| name.starts_with(module));
        assert!(!is_plain || !code.contains("weight"), "{name}: the trainer weights, by the loss");
        let words = code.split(|it: char| !it.is_alphanumeric());
        let found = words.into_iter().any(|word| word == "DataParallel");
        let may = name == "session/data_parallel.rs";
        assert!(may || !found, "{name} names a part of session/data_parallel.rs");
        // Where a layout of the optimizer is made, chosen and explained.
        let layouts = ["optim/", "config/", "session/checked_placement.rs", "views/explain/"];
        let may = layouts.iter().any(|module| name.starts_with(module));
        for word in ["SharedModel", "Partitioned", "share_model", "shares_model"] {
            assert!(may || !code.contains(word), "{name} names {word}, a layout of optim");
        }
    }
}

/// Each of these has a plainer form: a loop, `if let`, `if`, or a value for each field.
#[test]
fn code_avoids_forms_that_are_read_twice() {
    for file in sources() {
        let text = fs::read_to_string(&file).unwrap();
        for line in text.lines().map(str::trim_start) {
            let is_bool_arm = ["true =>", "true if ", "false =>", "false if "]
                .iter()
                .any(|arm| line.starts_with(arm) && line.contains(" => "));
            let is_tuple_of_defaults = line.starts_with("let (") && line.contains("= Default::");
            let found = is_bool_arm || is_tuple_of_defaults || line.contains(".map_or(Ok(()), ");
            assert!(!found, "{}: {line}", name(&file));
        }
    }
}

/// A string without the backslash at the end of its line has the indentation of the next one in its text.
#[test]
fn messages_have_no_gap() {
    const GAP: &str = "        ";
    for file in sources() {
        for line in code(&file).lines().map(str::trim_start) {
            let before =
                line.split_once(GAP).and_then(|(before, _)| before.trim_end().chars().last());
            let is_text = before.is_some_and(|it| it.is_alphabetic() || ",;.:".contains(it));
            assert!(!is_text, "{}: {line}", name(&file));
        }
    }
}

/// A test that drew from libtorch's generator on its own would change what another one draws at the same time.
#[test]
fn tests_draw_layers_in_turn() {
    for entry in fs::read_dir(repository("tests")).unwrap() {
        let path = entry.unwrap().path();
        let is_test = path.extension().is_some_and(|extension| extension == "rs");
        if is_test && !path.ends_with("harness.rs") && !path.ends_with("tidy.rs") {
            let draws = ["nn::linear(", "nn::conv2d("].iter().any(|it| code(&path).contains(it));
            assert!(!draws, "{}: use harness::linear", path.display());
        }
    }
}

/// `make test-fast` runs the modules that the Makefile names in `FAST_TESTS`.
#[test]
fn fast_modules_do_not_start_the_program() {
    let makefile = fs::read_to_string(repository("Makefile")).unwrap();
    let modules = makefile.lines().find_map(|line| line.strip_prefix("FAST_TESTS = ")).unwrap();
    for module in modules.split_whitespace() {
        let text = fs::read_to_string(repository(&format!("tests/{module}.rs"))).unwrap();
        let imports = text.split("\nuse crate::harness::").skip(1);
        let imports: String = imports.map(|it| it.split(';').next().unwrap()).collect();
        let mut names = imports.split(|c: char| !c.is_alphanumeric() && c != '_');
        let starts = names.find(|it| it.starts_with("run") || it.starts_with("program"));
        assert_eq!(starts, None, "{module} is in FAST_TESTS and starts the program");
    }
}

#[test]
fn tests_readme_names_every_module() {
    let readme = fs::read_to_string(repository("tests/README.md")).unwrap();
    let program = fs::read_to_string(repository("tests/tests.rs")).unwrap();
    let modules = program.lines().filter_map(|line| line.strip_prefix("mod ")?.split_once("; // "));
    let modules: Vec<&str> = modules.map(|(module, _)| module).collect();
    assert!(modules.len() > 30, "{modules:?}");
    for module in modules {
        let is_named = ["`", "::"].iter().any(|end| readme.contains(&format!("`{module}{end}")));
        assert!(is_named, "tests/README.md does not say what {module} proves");
    }
}

#[test]
fn examples_are_short_and_in_the_book() {
    let pages = fs::read_dir(repository("docs/src/tutorial")).unwrap();
    let course: String =
        pages.map(|page| fs::read_to_string(page.unwrap().path()).unwrap()).collect();
    let manifest = fs::read_to_string(repository("examples/Cargo.toml")).unwrap();
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
        let is_built = manifest.contains(&format!("path = \"{name}.rs\"\n"));
        assert!(is_built, "examples/Cargo.toml does not name {name}");
        let command = format!("cargo run --release --example {name}");
        assert!(
            text.contains(&format!("//!     {command}\n")),
            "{name} does not say how to run it"
        );
        let shown = course.contains(&format!("```sh\n{command}\n```\n"));
        assert!(shown, "the lessons of the book do not show {name}");
        if let Some((number, _)) = name.split_once('-') {
            // Whatever the prelude has is not named on its own.
            let prelude = fs::read_to_string(repository("crates/engine/src/prelude.rs")).unwrap();
            let names = |text: &str| -> Vec<String> {
                let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
                words.filter(|word| !word.is_empty()).map(Into::into).collect()
            };
            let of_prelude = names(&prelude[prelude.find("pub use").unwrap()..]);
            for import in text.split("use ddp_mp::").skip(1) {
                let import = names(import.split(';').next().unwrap());
                let last = import.last().unwrap();
                assert!(!of_prelude.contains(last), "{name} imports {last} beside the prelude");
            }
            let purpose = text.strip_prefix(&format!("//! {number}. "));
            assert!(purpose.is_some(), "{name} does not begin with its number and purpose");
            lessons.push(number.parse::<usize>().unwrap());
        }
    }
    lessons.sort_unstable();
    assert_eq!(lessons, (1..=lessons.len()).collect::<Vec<_>>(), "no lesson is missing");
}

/// Otherwise the first test or lesson would compile libtorch's bindings and the library once more.
#[test]
fn tests_use_the_dependencies_of_the_program_with_the_same_features() {
    let packages = |edges: &str| -> BTreeSet<String> {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["tree", "--locked", "--prefix=none", "--format={p} has {f}", "--edges", edges]);
        let output = cargo.current_dir(repository("")).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let lines = String::from_utf8(output.stdout).unwrap();
        lines.lines().map(|line| line.trim_end_matches(" (*)").trim_end().to_owned()).collect()
    };
    let (program, tests) = (packages("normal,build"), packages("normal,build,dev"));
    assert!(program.len() > 100, "{program:?}");
    let differ: Vec<_> = program.difference(&tests).collect();
    assert!(differ.is_empty(), "add their features to examples/Cargo.toml: {differ:?}");
}

#[test]
fn readme_has_the_example_of_the_crate() {
    let library = fs::read_to_string(repository("src/lib.rs")).unwrap();
    let example = library.split("//! ```\n").nth(1).unwrap();
    let lines = example.lines().map(|line| line.trim_start_matches("//!"));
    let lines: Vec<&str> = lines.map(|line| line.strip_prefix(' ').unwrap_or(line)).collect();
    let block = format!("```rust\n{}\n```\n", lines.join("\n"));
    assert!(block.contains("use ddp_mp::prelude::*;"), "{block}");
    let readme = fs::read_to_string(repository("README.md")).unwrap();
    assert!(readme.contains(&block), "README.md does not have\n{block}");
}

/// A heading, a paragraph, an item of a list, a row of a table or a block of code in Markdown.
struct Block {
    line: usize,
    text: String,
}

fn blocks(markdown: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let (mut in_fence, mut goes_on) = (false, false);
    for (index, line) in markdown.lines().enumerate() {
        let is_fence = line.starts_with("```");
        let begins = is_fence || ["#", "|", "- ", "* "].iter().any(|mark| line.starts_with(mark));
        if in_fence || (goes_on && !begins && !line.is_empty()) {
            let block = blocks.last_mut().unwrap();
            block.text += "\n";
            block.text += line;
        } else if !line.is_empty() {
            blocks.push(Block { line: index + 1, text: line.to_string() });
        }
        in_fence ^= is_fence;
        goes_on = !line.is_empty() && !is_fence;
    }
    blocks
}

/// Where a link to each heading leads, as GitHub derives it: `#several-processes`.
fn anchors(blocks: &[Block]) -> Vec<String> {
    let anchor = |heading: &str| {
        let heading = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
        format!("#{}", kept.map(|c| if c == ' ' { '-' } else { c }).collect::<String>())
    };
    let headings = blocks.iter().filter(|block| block.text.starts_with('#'));
    headings.map(|block| anchor(&block.text)).collect()
}

/// The numbers in a text, in any order.
fn numbers(text: &str) -> Vec<String> {
    let numbers = text.split(|c: char| !c.is_ascii_digit() && c != '.' && c != ',');
    let numbers = numbers.map(|number| number.trim_matches(['.', ',']));
    let mut numbers: Vec<String> =
        numbers.filter(|number| !number.is_empty()).map(str::to_string).collect();
    numbers.sort();
    numbers
}

/// What a translation keeps of a block: a block of code as it is (of what is printed in Chinese the numbers); of a row each
/// cell in its place; of others, in any order, the mark that they begin with, inline code, where links lead, and numbers.
fn kept(block: &str, anchors: &[String]) -> Vec<String> {
    let is_translated = [" --explain", "ddp-mp lesson"].iter().any(|it| block.contains(it));
    if block.starts_with("```console\n") && is_translated {
        return numbers(&block.replace(" --language=zh", ""));
    }
    if block.starts_with("```") || block.starts_with("    ") {
        return vec![block.to_string()];
    }
    if block.starts_with('|') {
        let mut cells = Vec::new();
        for cell in block.replace("\\|", " ").split('|') {
            cells.push("|".to_string());
            cells.extend(kept(cell.trim(), anchors));
        }
        return cells;
    }
    let mut kept = Vec::new();
    let mark = block.split(' ').next().unwrap();
    if !mark.is_empty() && mark.chars().all(|c| "#-*".contains(c)) {
        kept.push(mark.to_string());
    }
    let title = block.trim_start_matches('#').trim_start();
    let is_name = !title.contains(' ') && title.starts_with(|c: char| c.is_ascii_lowercase());
    if block.starts_with('#') && is_name {
        kept.push(title.to_string());
    }
    // Between backticks is code: every other part.
    let parts: Vec<&str> = block.split('`').collect();
    for code in parts.iter().skip(1).step_by(2) {
        let code = code.split_whitespace().collect::<Vec<_>>().join(" ");
        kept.push(format!("`{code}`"));
    }
    let prose = parts.iter().step_by(2).copied().collect::<Vec<_>>().join(" ");
    for link in prose.split("](").skip(1) {
        let link = link.split(')').next().unwrap();
        if link.starts_with('#') {
            let section = anchors.iter().position(|anchor| anchor == link);
            let section = section.unwrap_or_else(|| panic!("{link} leads to no heading"));
            kept.push(format!("a link to heading {section}"));
        } else {
            // The pages of the tutorial are there in both languages, and so are the pictures.
            let english = link.replace("src/zh/", "src/tutorial/").replace(".zh.svg", ".svg");
            kept.push(format!("a link to {english}"));
        }
    }
    kept.extend(numbers(&prose));
    kept.sort();
    kept
}

/// Asserts that two pages say the same, block by block. `starts` are the lines that differ between them.
fn assert_in_step(files: [&str; 2], starts: [&str; 2]) {
    let read = |index: usize| {
        let (file, start) = (files[index], starts[index]);
        let text = fs::read_to_string(repository(file)).unwrap();
        assert!(text.starts_with(start), "{file} does not begin with\n{start}");
        blocks(&text.replacen(start, &"\n".repeat(start.lines().count()), 1))
    };
    let [english, chinese] = [read(0), read(1)];
    let (english_anchors, chinese_anchors) = (anchors(&english), anchors(&chinese));
    let mut section = String::new();
    for (en, zh) in english.iter().zip(&chinese) {
        if en.text.starts_with('#') {
            section = format!("`{}`, `{}`", en.text, zh.text);
        }
        assert_eq!(
            kept(&en.text, &english_anchors),
            kept(&zh.text, &chinese_anchors),
            "in section {section}\n{}:{}: {}\n{}:{}: {}\n",
            files[0],
            en.line,
            en.text,
            files[1],
            zh.line,
            zh.text
        );
    }
    assert_eq!(english.len(), chinese.len(), "one goes on after `{section}`, the other does not");
}

#[test]
fn chinese_readme_matches_the_english_one() {
    let english = "# ddp-mp\n\nEnglish | [简体中文](README.zh.md)\n";
    let chinese = "# ddp-mp\n\n[English](README.md) | 简体中文\n";
    assert_in_step(["README.md", "README.zh.md"], [english, chinese]);
}

#[test]
fn chinese_tutorial_matches_the_english_one() {
    let pages = |folder: &str| -> BTreeSet<String> {
        let files = fs::read_dir(repository(&format!("docs/src/{folder}"))).unwrap();
        files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect()
    };
    let english = pages("tutorial");
    assert!(english.len() > 5, "{english:?}");
    assert_eq!(english, pages("zh"), "each page is there in both languages");
    for page in english {
        let files = [format!("docs/src/tutorial/{page}"), format!("docs/src/zh/{page}")];
        assert_in_step([&files[0], &files[1]], ["# ", "# "]);
    }
}

#[test]
fn readmes_have_at_most_160_lines() {
    for file in ["README.md", "README.zh.md"] {
        let lines = fs::read_to_string(repository(file)).unwrap().lines().count();
        assert!(lines <= 160, "{file} has {lines} lines: what is longer belongs into the book");
    }
}
