//! `ddp-mp new`: what it writes, and what it refuses. `make crate` builds, tests and runs the project.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, FromArgMatches};
use ddp_mp::commands::{self, NewFlags};
use ddp_mp::views::{LogFormat, Printer};
use toml::Table;

use crate::harness::{files_below, refused, repository, run, run_refused, run_to};

fn table(file: &Path) -> Table {
    fs::read_to_string(file).unwrap().parse().unwrap()
}

fn text<'a>(table: &'a Table, keys: &[&str]) -> &'a str {
    let (first, rest) = keys.split_first().unwrap();
    rest.iter().fold(&table[*first], |value, key| &value[*key]).as_str().unwrap()
}

#[test]
fn project_has_the_versions_and_the_profile_of_the_clone() {
    let folder = tempfile::tempdir().unwrap();
    let clone = repository("").canonicalize().unwrap();
    for path in [Some(clone.to_str().unwrap()), None] {
        let project = folder.path().join(if path.is_some() { "with-path" } else { "without" });
        let mut args = vec!["new", project.to_str().unwrap()];
        args.extend(path.iter().flat_map(|path| ["--path", path]));
        let (stdout, stderr) = run_to(0, &args);
        assert_eq!(stderr.contains("where this program was built"), path.is_none(), "{stderr}");
        assert!(stdout.ends_with("    cargo run --release\n"), "{stdout}");

        let manifest = table(&project.join("Cargo.toml"));
        let ours = table(&clone.join("Cargo.toml"));
        assert_eq!(text(&manifest, &["package", "name"]), project.file_name().unwrap());
        let dependency = &manifest["dependencies"]["ddp-mp"];
        assert_eq!(dependency["path"].as_str(), clone.to_str());
        assert_eq!(manifest["dependencies"]["tch"], ours["workspace"]["dependencies"]["tch"]);
        let [theirs, levels] =
            [&manifest, &ours].map(|it| it["profile"]["release"]["package"].as_table().unwrap());
        for (package, level) in theirs {
            assert_eq!(level, levels.get(package).unwrap_or(&levels["*"]), "{package}");
        }
        for key in ["edition", "rust-version"] {
            assert_eq!(manifest["package"][key], ours["workspace"]["package"][key], "{key}");
        }

        let config = table(&project.join(".cargo/config.toml"));
        let libtorch = Path::new(text(&config, &["env", "LIBTORCH"]));
        assert!(libtorch.join("lib/libtorch_cpu.so").exists(), "{}", libtorch.display());
        let ours = table(&clone.join(".cargo/config.toml"));
        assert_eq!(config["env"]["CXXFLAGS"], ours["env"]["CXXFLAGS"]);
        let build_script = repository("assets/project/build.rs");
        assert_eq!(fs::read(project.join("build.rs")).unwrap(), fs::read(build_script).unwrap());
    }
}

/// The error of `ddp-mp new` with these arguments.
fn new_refused(args: &[&str]) -> String {
    let command = NewFlags::augment_args(clap::Command::new("new"));
    let matches = command.get_matches_from([&["new"], args].concat());
    let flags = NewFlags::from_arg_matches(&matches).unwrap();
    commands::new(&flags, &Printer::new(LogFormat::Text)).unwrap_err().to_string()
}

/// Returns the paths of all files below `folder`, from there.
fn files_of(folder: &Path) -> BTreeSet<PathBuf> {
    let files = files_below(folder).into_iter();
    files.map(|file| file.strip_prefix(folder).unwrap().to_path_buf()).collect()
}

#[test]
fn each_template_writes_its_files_and_the_shared_ones() {
    let folder = tempfile::tempdir().unwrap();
    for template in ["spirals", "digits-cnn", "gpt"] {
        let project = folder.path().join(template);
        let (stdout, _) = run_to(0, &["new", project.to_str().unwrap(), "--template", template]);
        assert!(stdout.contains(" tests and run.toml.\n"), "{stdout}");
        let source = repository("assets/project").join(template);
        let mut expected = files_of(&source);
        for file in &expected {
            let text = |folder: &Path| fs::read_to_string(folder.join(file)).unwrap();
            assert_eq!(text(&project), text(&source), "{template}: {}", file.display());
        }
        expected
            .extend(["Cargo.toml", ".cargo/config.toml", ".gitignore", "build.rs"].map(Into::into));
        assert_eq!(files_of(&project), expected, "{template}");
    }
    let without = folder.path().join("without");
    assert_eq!(run(&["new", without.to_str().unwrap()]).0, Some(0));
    assert_eq!(files_of(&without), files_of(&folder.path().join("spirals")));

    let error = refused("new unknown --template=cats");
    assert!(error.contains("[possible values: spirals, digits-cnn, gpt]"), "{error}");
}

#[test]
fn next_step_can_be_pasted_into_a_shell() {
    let folder = tempfile::tempdir().unwrap();
    let project = folder.path().join("it's $HOME/run");
    fs::create_dir(project.parent().unwrap()).unwrap();
    let (stdout, _) = run_to(0, &["new", project.to_str().unwrap()]);
    let step = stdout.lines().find(|line| line.trim().starts_with("cd ")).unwrap();
    let output = Command::new("sh").args(["-c", &format!("{step} && pwd")]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim_end(), project.to_str().unwrap());
}

#[test]
fn what_is_there_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("file"), "mine").unwrap();
    fs::create_dir(at("empty")).unwrap();
    symlink("nowhere", at("link")).unwrap();
    for name in ["file", "empty", "link", "no-folder/project"] {
        let error = new_refused(&[at(name).to_str().unwrap()]);
        assert!(error.contains(name), "{name}: {error}");
    }
    assert_eq!(fs::read_to_string(at("file")).unwrap(), "mine");
    assert_eq!(fs::read_dir(at("empty")).unwrap().count(), 0);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
}

#[test]
fn names_that_cargo_refuses_are_wrong_input() {
    let folder = tempfile::tempdir().unwrap();
    let names =
        ["", ".", "..", "7up", "a b", "Big", "tch", "ddp-mp", "test", "é", "a\"b", "-x", "a.b"];
    for name in names {
        new_refused(&[folder.path().join(name).to_str().unwrap()]);
    }
    run_refused(&["new", folder.path().join("7up").to_str().unwrap()]);
    for clone in ["nowhere", "docs", "tests/loom", "Cargo.toml"] {
        let (path, clone) = (folder.path().join("project"), repository(clone));
        let clone = clone.to_str().unwrap();
        let error = new_refused(&[path.to_str().unwrap(), "--path", clone]);
        assert!(error.contains("--path: ") && error.contains(clone), "{error}");
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}
