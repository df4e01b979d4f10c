//! The README and the book: their commands do what they show, and the chapter on options is that of the help.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::harness::{
    assert_generated, ddp_mp_app, files_below, free_port, in_parallel, program_in, repository,
    run_command_to, runs_every_case, some_of, words,
};

/// README.md and the pages of the book, in the order of their paths. README.zh.md has the code blocks of README.md:
/// `tidy` compares them.
fn pages() -> Vec<PathBuf> {
    let mut pages = files_below(&repository("docs/src"));
    pages.retain(|page| page.extension().is_some_and(|extension| extension == "md"));
    pages.push(repository("README.md"));
    pages.sort();
    assert!(pages.len() > 20, "{pages:?}");
    pages
}

/// A block of code between two fences.
struct Block {
    /// The page and the line, for messages.
    place: String,
    language: String,
    text: String,
}

fn blocks(page: &Path) -> Vec<Block> {
    let text = fs::read_to_string(page).unwrap();
    let mut blocks = Vec::new();
    let mut lines = text.lines().enumerate();
    while let Some((index, line)) = lines.next() {
        let Some(language) = line.trim_start().strip_prefix("```") else { continue };
        let inside = lines.by_ref().map(|(_, line)| line);
        let inside: Vec<&str> =
            inside.take_while(|line| !line.trim_start().starts_with("```")).collect();
        blocks.push(Block {
            place: format!("{}:{}", page.display(), index + 1),
            language: language.to_owned(),
            text: inside.join("\n") + "\n",
        });
    }
    blocks
}

/// A folder to run commands in, which has what the pages name: configurations and data.
fn working_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["assets", "configs", "tests"] {
        symlink(repository(name), folder.path().join(name)).unwrap();
    }
    folder
}

/// The part of a line of output that does not depend on the machine and the moment.
fn lasting(line: &str) -> String {
    let kept = match line {
        _ if line.starts_with("ddp-mp: loss ") => "ddp-mp: loss ",
        _ if line.starts_with("ddp-mp: epoch ") => line.split_once(" loss").unwrap().0,
        _ if line.starts_with("ddp-mp: validation ") => line.split_once(": loss").unwrap().0,
        _ if line.starts_with("ddp-mp: best: ") => line.split_once(", loss").unwrap().0,
        _ if line.contains(" last seen ") && line.ends_with(" s ago") => {
            line.split_once(".rs:").unwrap().0
        }
        _ if line.contains("on the CPU, ") => line.split_once("on the CPU, ").unwrap().0,
        _ => line,
    };
    // Either of the ranks that wait may be the first to say so.
    let kept = kept.replace("rank 1 waited", "rank 0 waited");
    // A call is at some line of a source file, for which the book has N: a number would soon be another one.
    let mut parts = kept.split(".rs:");
    let first = parts.next().unwrap().to_owned();
    parts.fold(first, |text, part| {
        text + ".rs:" + part.trim_start_matches(|it: char| it.is_numeric() || it == 'N')
    })
}

/// Lines that are not empty.
fn filled(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| !line.is_empty())
}

/// Output of which parts are left out: a line `...` stands for any lines.
fn shows_parts(expected: &[&str], found: &[&str]) -> Result<(), String> {
    let found: Vec<String> = found.iter().map(|line| lasting(line)).collect();
    let mut from = 0;
    for part in expected.split(|line| *line == "...").filter(|part| !part.is_empty()) {
        let part: Vec<String> = part.iter().map(|line| lasting(line)).collect();
        let place = found[from..].windows(part.len()).position(|window| window == part);
        from += place.ok_or_else(|| part.join("\n"))? + part.len();
    }
    Ok(())
}

/// Runs the commands of a `console` block, compares output and exit codes, and returns how many commands there are.
fn check_console(block: &Block, folder: &tempfile::TempDir) -> usize {
    let place = &block.place;
    let cases: Vec<&str> = block.text.split("$ ddp-mp").skip(1).collect();
    for case in &cases {
        // A run that fails is followed by the command that shows its exit code.
        let (case, code) = case.split_once("$ echo $?\n").unwrap_or((case, "0"));
        let expected: i32 = code.trim().parse().unwrap();
        let mut lines = filled(case);
        let args = words(lines.next().unwrap());
        let lines: Vec<&str> = lines.collect();
        let (stdout, stderr) = run_command_to(expected, program_in(folder, &args));
        if lines.contains(&"...") {
            let found: Vec<&str> = stderr.lines().chain(stdout.lines()).collect();
            if let Err(part) = shows_parts(&lines, &found) {
                panic!("{place}: {args:?} does not print\n{part}\nbut\n{stderr}{stdout}");
            }
            continue;
        }
        let mut is_error = false;
        let (errors, results): (Vec<&str>, Vec<&str>) = lines.into_iter().partition(|line| {
            let continued = is_error && line.starts_with("  ");
            is_error = line.starts_with("ddp-mp: ") || continued;
            is_error
        });
        assert_eq!(filled(&stdout).collect::<Vec<_>>(), results, "{place}: {args:?}");
        // A rank may really have been slow, or the whole run, on a machine that does other things as well.
        let is_slow =
            |line: &str| line.contains(" was the straggler: ") || line.starts_with("ddp-mp: step ");
        let said = |lines: &[&str]| {
            let lines = lines.iter().filter(|line| !is_slow(line));
            lines.map(|line| lasting(line)).collect::<Vec<_>>()
        };
        let found: Vec<&str> = stderr.lines().collect();
        assert_eq!(said(&found), said(&errors), "{place}: {args:?}");
    }
    cases.len()
}

/// Every command in a `console` block, with its output and exit code.
#[test]
fn page_commands_print_what_is_shown() {
    let count = AtomicUsize::new(0);
    in_parallel(&some_of(pages(), 10), |page| {
        let folder = working_folder();
        let blocks = blocks(page);
        for block in blocks.iter().filter(|block| block.language == "console") {
            count.fetch_add(check_console(block, &folder), Ordering::Relaxed);
        }
    });
    let count = count.into_inner();
    assert!(count >= 25 || !runs_every_case(), "{count} commands with output");
}

/// The words of a command, the first of which is `ddp-mp`, and the exit code that it is to have.
fn args_and_code(command: &str) -> (Vec<&str>, i32) {
    let (command, code) = command.split_once(" || test $? = ").unwrap_or((command, "0"));
    (command.split_whitespace().skip(1).collect(), code.parse().unwrap())
}

/// Every command in a `sh` block, which has no output. Those of one run on several machines run side by side on this one.
/// Long: it runs the commands of several pages.
#[test]
fn page_commands_without_output_succeed() {
    let ci = fs::read_to_string(repository(".ci/run")).unwrap();
    let count = AtomicUsize::new(0);
    in_parallel(&some_of(pages(), 5), |page| {
        let folder = working_folder();
        for block in blocks(page).iter().filter(|block| block.language == "sh") {
            let place = &block.place;
            let port = free_port().to_string();
            let mut together = Vec::new();
            // A backslash continues a command on the next line.
            let text = block.text.replace("\\\n", " ");
            for command in filled(&text) {
                count.fetch_add(1, Ordering::Relaxed);
                let mut parts = command.split_whitespace();
                match parts.next().unwrap() {
                    "ddp-mp" => {
                        let (args, expected) = args_and_code(command);
                        let is_one_of_several = args.iter().any(|it| it.starts_with("--nnodes="));
                        let args: Vec<String> =
                            args.iter().map(|arg| arg.replace("node0", "127.0.0.1")).collect();
                        let mut args: Vec<&str> = args.iter().map(String::as_str).collect();
                        if is_one_of_several {
                            args.extend(["--master-port", &port]);
                        }
                        let process = program_in(&folder, &args);
                        let check = move || {
                            run_command_to(expected, process);
                        };
                        if is_one_of_several {
                            together.push(check);
                        } else {
                            check();
                        }
                    }
                    "make" => {
                        let target = parts.next().unwrap();
                        // It runs all cases of the tests.
                        let target = if target == "test" { "test-all" } else { target };
                        let step = format!("make {target}\n");
                        assert!(ci.contains(&step), "{place}: .ci/run has no {command:?}");
                    }
                    "cargo" => {
                        let example =
                            command.strip_prefix("cargo run --release --example ").unwrap();
                        let file = repository(&format!("examples/{example}.rs"));
                        assert!(file.exists(), "{place}: {command:?}");
                        assert!(ci.contains("for example in examples/*.rs; do"), "{ci}");
                    }
                    // tests/launchers/documented.py runs these.
                    "torchrun" | "mpirun" => {
                        assert!(ci.contains("make test-launchers\n"), "{ci}");
                    }
                    // tests/interop/wheel.py runs it.
                    "pip" => {
                        assert_eq!(command, "pip install dist/ddp_mp-*.whl", "{place}");
                        assert!(ci.contains("make test-wheel\n"), "{ci}");
                    }
                    _ => panic!("{place}: nothing runs {command:?}"),
                }
            }
            std::thread::scope(|scope| {
                for check in together {
                    scope.spawn(check);
                }
            });
        }
    });
    let count = count.into_inner();
    assert!(count >= 25 || !runs_every_case(), "{count} commands without output");
}

#[test]
fn book_has_no_numbers_of_source_lines() {
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        let mut places = text.match_indices(".rs:").map(|(at, colon)| &text[at + colon.len()..]);
        let stale = places.find(|rest| rest.starts_with(|it: char| it.is_ascii_digit()));
        assert_eq!(stale, None, "{}: write N", page.display());
    }
}

#[test]
fn book_code_blocks_have_a_known_language() {
    // Commands are in `console` and `sh`; `bash` is a script for a cluster, which tests/launchers/slurm.py tries.
    let known = ["console", "sh", "bash", "text", "toml", "rust", "python"];
    for page in pages().iter().filter(|page| !page.ends_with("README.md")) {
        for Block { place, language, text } in blocks(page) {
            assert!(known.contains(&&*language), "{place}: {language:?} is none of {known:?}");
            let has_command = text.contains("\n$ ddp-mp") || text.starts_with("ddp-mp -");
            let is_run = ["console", "sh"].contains(&&*language);
            assert!(is_run || !has_command, "{place}: nothing runs this command");
        }
    }
}

/// Flags of torchrun, mpirun, srun, cargo and others, and of a program in the book.
const OTHERS: &str = "allow-incomplete-ranks collector cpus-per-task device example from gpus-per-node hostfile \
    kill-on-bad-exit distribution map-by no-deps no-python nodes ntasks-per-node open path \
    rdzv-backend rdzv-endpoint rdzv-id release bench signal standalone time use-env test tests \
    fallback-node locked param width";

const COMMANDS: &str = "|comm|sample|sampler|bench|bench step|bench scaling|verify|diff|bisect|env|lesson|new|completions";

/// The help of each of `COMMANDS`.
static HELPS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let mut all = ddp_mp_app().command();
    all.build();
    let help = |path: &str| {
        let command = words(path).into_iter();
        let mut command = command.fold(&all, |it, name| it.find_subcommand(name).unwrap()).clone();
        command.render_long_help().to_string()
    };
    COMMANDS.split('|').map(help).collect()
});

/// Names such as `max-epochs` of what begins with two dashes in `text`.
fn flags(text: &str) -> Vec<String> {
    let mut flags = Vec::new();
    for (at, _) in text.match_indices("--") {
        let before = text[..at].chars().last();
        let name: String =
            text[at + 2..].chars().take_while(|it| it.is_ascii_lowercase() || *it == '-').collect();
        let begins = before.is_none_or(|it| !it.is_alphanumeric() && it != '-');
        if begins && name.starts_with(|it: char| it.is_ascii_lowercase()) {
            flags.push(name.trim_end_matches('-').to_owned());
        }
    }
    flags
}

#[test]
fn flags_named_in_the_pages_exist() {
    let known: Vec<String> = HELPS.iter().flat_map(|help| flags(help)).collect();
    for page in pages().into_iter().chain([repository("README.zh.md")]) {
        for flag in flags(&fs::read_to_string(&page).unwrap()) {
            let exists = known.contains(&flag) || OTHERS.split(' ').any(|it| it == flag);
            assert!(exists, "{}: there is no --{flag}", page.display());
        }
    }
}

/// An option or argument of the help.
#[derive(PartialEq)]
struct Entry {
    /// Such as `--model <NAME>`.
    name: String,
    text: String,
    values: String,
    default: String,
}

/// Takes `[label: ...]` out of `text`.
fn take(text: &mut String, label: &str) -> String {
    let Some(start) = text.find(&format!("[{label}: ")) else { return String::new() };
    let end = start + text[start..].find(']').expect("a bracket that is closed");
    let value = text[start + label.len() + 3..end].to_owned();
    *text = format!("{}{}", text[..start].trim_end(), &text[end + 1..]);
    value
}

/// The headings of a help text, each with its entries.
fn sections(help: &str) -> Vec<(String, Vec<Entry>)> {
    let mut sections: Vec<(String, Vec<Entry>)> = Vec::new();
    for line in help.lines() {
        let text = line.trim_start();
        let indent = line.len() - text.len();
        if indent == 0 && text.ends_with(':') {
            sections.push((text.trim_end_matches(':').to_owned(), Vec::new()));
        } else if let Some((heading, entries)) = sections.last_mut() {
            if indent == 0 && !text.is_empty() {
                break; // what follows the options
            }
            let begins = (1..10).contains(&indent) && text.starts_with(['-', '<', '[']);
            if begins {
                // A short help has the text on the same line.
                let (name, text) = text.split_once("  ").unwrap_or((text, ""));
                let (name, text) = (name.to_owned(), text.trim().to_owned());
                entries.push(Entry { name, text, values: String::new(), default: String::new() });
            } else if let Some(entry) = entries.last_mut().filter(|_| heading != "Commands") {
                // An empty line begins another paragraph.
                entry.text += if text.is_empty() { "\n" } else { " " };
                entry.text += text;
            }
        }
    }
    for entry in sections.iter_mut().flat_map(|(_, entries)| entries) {
        let mut text = entry.text.clone();
        entry.default = take(&mut text, "default");
        entry.values = take(&mut text, "possible values");
        let paragraphs = text.split('\n').map(str::trim).filter(|it| !it.is_empty());
        let paragraphs: Vec<&str> = paragraphs.map(|it| it.trim_end_matches('.')).collect();
        entry.text = paragraphs.join(". ");
    }
    sections.retain(|(heading, entries)| heading != "Commands" && !entries.is_empty());
    sections
}

fn code(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("`{}`", text.replace('|', "\\|")) }
}

/// The chapter on options, as the help has them.
fn options() -> String {
    let mut page = String::from(
        "# Options\n\n\
        <!-- Made from the help by `TRYCMD=overwrite cargo test --release --test tests docs::book_options`. -->\n\n\
        `ddp-mp -h` shows the options that most runs need, and `ddp-mp --help` all of them. In a flag `_` is accepted for `-`.\n\
        Every flag of training but `--config` and `--quiet` is also a key of a file for `--config`, with `_` for `-`. Flags\n\
        win over the file. Every command takes `--quiet`, before or after its name.\n",
    );
    let mut training: Vec<Entry> = Vec::new();
    for (name, help) in COMMANDS.split('|').zip(&*HELPS) {
        let about = help.lines().next().unwrap().trim_end_matches('.');
        let title =
            if name.is_empty() { "ddp-mp, ddp-mp train".into() } else { format!("ddp-mp {name}") };
        page += &format!("\n## {title}\n\n{about}.\n");
        let sections = sections(help);
        // `bench step` and others have the options of training, too.
        let has_training =
            !name.is_empty() && sections.iter().any(|(heading, _)| heading == "Training");
        for (heading, mut entries) in sections {
            entries.retain(|entry| !["-h, --help", "-V, --version"].contains(&&*entry.name));
            entries.retain(|entry| !(has_training && training.contains(entry)));
            entries.retain(|entry| name.is_empty() || entry.name != "-q, --quiet");
            if entries.is_empty() {
                continue;
            }
            if name.is_empty() {
                page += &format!("\n### {heading}\n");
            }
            page += "\n| | | values | default |\n|---|---|---|---|\n";
            for Entry { name, text, values, default } in &entries {
                let values: Vec<String> =
                    values.split(", ").map(|value| code(value.trim())).collect();
                let cells =
                    [code(name), text.replace('|', "\\|"), values.join(", "), code(default)];
                page += &format!("| {} |\n", cells.join(" | "));
            }
            if name.is_empty() {
                training.append(&mut entries);
            }
        }
        if has_training {
            page += "\nIt also takes options of training, as far as they make sense here.\n";
        }
    }
    page
}

#[test]
fn book_options_match_the_help() {
    assert_generated("docs/src/options.md", &options());
}
