//! What a user of a Unix shell expects: completions, the versions, --quiet, and colours on request only.

use std::process::{Command, Stdio};

use crate::harness::{program, repository, run, run_command, run_to, some_of};

fn completions(shell: &str) -> String {
    let (code, script, stderr) = run(&["completions", shell]);
    assert_eq!((code, stderr.as_str()), (Some(0), ""));
    assert!(script.contains("max-epochs") && script.contains("simulate-cluster"), "{script}");
    script
}

/// What bash completes the last of `words` to, with the completions of the program.
fn completed(completions: &str, words: &[&str]) -> String {
    // Outside of a completion, compopt would fail.
    let script = "compopt() { :; }; source <(cat); COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); \
                  f=$(complete -p ddp-mp); f=${f##*-F }; \
                  ${f%% *} ddp-mp \"${COMP_WORDS[COMP_CWORD]}\" \"${COMP_WORDS[COMP_CWORD - 1]}\"; \
                  echo \"${COMPREPLY[*]}\"";
    let mut bash = Command::new("bash");
    bash.args(["--norc", "-euc", script, "bash"]).args(words).current_dir(repository(""));
    let (code, stdout, stderr) = with_input(bash, completions);
    assert_eq!((code, stderr.as_str()), (Some(0), ""), "{words:?}");
    stdout.trim().to_owned()
}

fn with_input(mut command: Command, text: &str) -> (Option<i32>, String, String) {
    let mut file = tempfile::tempfile().unwrap();
    std::io::Write::write_all(&mut file, text.as_bytes()).unwrap();
    std::io::Seek::rewind(&mut file).unwrap();
    command.stdin(file);
    run_command(command)
}

#[test]
fn bash_completes_commands_flags_and_values() {
    let script = completions("bash");
    let completed = |words: &[&str]| completed(&script, words);
    assert_eq!(completed(&["ddp-mp", "--max-ep"]), "--max-epochs");
    assert_eq!(completed(&["ddp-mp", "train", "--tensorb"]), "--tensorboard");
    assert_eq!(completed(&["ddp-mp", "--model", "m"]), "mlp");
    assert_eq!(completed(&["ddp-mp", "--model", "=", "m"]), "mlp");
    assert_eq!(completed(&["ddp-mp", "--config", "confi"]), "configs");
    let files = script.matches("compgen -f").count();
    assert!(files > 0 && script.matches("compopt -o filenames").count() == files, "{script}");
    assert_eq!(completed(&["ddp-mp", "bench", "scal"]), "scaling");
    assert_eq!(completed(&["ddp-mp", "completions", ""]), "-q -h --quiet --help bash zsh fish");
}

#[test]
fn zsh_and_fish_read_their_completions() {
    for (shell, begins) in [("zsh", "#compdef ddp-mp\n"), ("fish", "# Print an optspec")] {
        let script = completions(shell);
        assert!(script.starts_with(begins), "{script}");
        let mut check = Command::new(shell);
        check.arg("-n").arg("/dev/stdin").stdout(Stdio::null());
        if Command::new(shell).arg("--version").output().is_err() {
            println!("skipped: there is no {shell}");
            continue;
        }
        let (code, _, stderr) = with_input(check, &script);
        assert_eq!((code, stderr.as_str()), (Some(0), ""), "{shell}");
        if shell == "fish" {
            let mut fish = Command::new("fish");
            fish.env("HOME", "/dev/null").args(["--no-config", "--command"]).arg(
                "source -; complete -C 'ddp-mp --max-ep'; complete -C 'ddp-mp train --n-l'; \
                 complete -C 'ddp-mp bench sca'; complete -C 'ddp-mp --model=m'",
            );
            let (_, found, stderr) = with_input(fish, &script);
            let found: Vec<&str> =
                found.lines().map(|line| line.split('\t').next().unwrap()).collect();
            let expected = ["--max-epochs", "--n-layer", "scaling", "--model=mlp"];
            assert_eq!((&found[..], stderr.as_str()), (&expected[..], ""));
        }
    }
}

#[test]
fn long_version_names_the_libraries() {
    let (code, stdout, _) = run(&["--version"]);
    let rows: Vec<Vec<&str>> = stdout.lines().map(|row| row.split("  ").collect()).collect();
    let names: Vec<&str> = rows.iter().map(|row| row[0]).collect();
    assert_eq!((code, &names[..]), (Some(0), &["ddp-mp", "commit", "libtorch", "NCCL"][..]));
    let value = |row: usize| rows[row].last().unwrap().trim();
    let report: serde_json::Value =
        serde_json::from_str(&run(&["env", "--log-format=json"]).1).unwrap();
    let of_env = |name: &str, or: &str| report[name].as_str().unwrap_or(or).to_owned();
    assert_eq!(value(0), of_env("version", ""));
    assert_eq!(value(1), of_env("commit", "unknown"));
    assert_eq!(value(2), of_env("libtorch", ""));
    assert_eq!(value(3), of_env("nccl", "none"));
    let commit = value(1).trim_end_matches("-modified");
    let is_hash = commit.len() == 12 && commit.chars().all(|it| it.is_ascii_hexdigit());
    assert!(commit == "unknown" || is_hash, "{stdout}");
}

#[test]
fn quiet_keeps_results_and_failures() {
    for args in some_of(
        [
            &["--nproc-per-node=2", "--val-fraction=0.2"][..],
            &["--nproc-per-node=2", "--spawn=processes", "--max-steps=3"],
            &["comm", "barrier", "--nproc-per-node=2"],
        ],
        1,
    ) {
        let (code, stdout, stderr) = run(args);
        assert!(code == Some(0) && !stdout.is_empty() && !stderr.is_empty(), "{args:?}");
        let args = [args, &["-q"]].concat();
        assert_eq!(run(&args), (Some(0), stdout, "".into()), "{args:?}");
    }
    let fault = "--inject-fault=error:rank=1,at=step,step=2";
    for spawn in ["threads", "processes"] {
        let spawn = format!("--spawn={spawn}");
        let (_, stderr) = run_to(1, &["--quiet", "--nproc-per-node=2", fault, &spawn]);
        assert!(stderr.starts_with("ddp-mp: rank 1 (CPU:1) failed in"), "{stderr}");
    }
    // A rank that the others wait for, and the explanation that was asked for.
    let slow = ["--inject-fault=slow=2000ms:rank=1,at=step,step=2", "--stall-warning=200ms"];
    let slow = [&["--quiet", "--nproc-per-node=2", "--max-steps=3"][..], &slow].concat();
    let (_, stderr) = run_to(0, &slow);
    assert!(stderr.contains("rank 1 has not entered all_reduce"), "{stderr}");
    let (_, _, stderr) = run(&["-q", "--explain", "--nproc-per-node=2", "--max-steps=3"]);
    assert!(stderr.lines().count() > 10, "{stderr}");
}

/// On a terminal `make live` tries the live view's.
#[test]
fn colours_follow_the_environment() {
    let colours = |args: &[&str], variables: &[(&str, &str)]| {
        let mut command = program(args);
        for name in ["NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "CI"] {
            command.env_remove(name);
        }
        command.envs(variables.iter().copied());
        let (_, stdout, stderr) = run_command(command);
        (stdout + &stderr).contains("\u{1b}[")
    };
    for flag in ["--help", "--max-epoch"] {
        assert!(!colours(&[flag], &[]), "{flag} into a pipe");
        assert!(colours(&[flag], &[("CLICOLOR_FORCE", "1")]), "{flag}");
    }
    assert!(!colours(&["--help"], &[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")]));
    assert!(colours(&["--help"], &[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "")]));
}
