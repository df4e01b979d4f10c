//! Every flag of every command with values that are wrong: exit code 2, and the flag is named. The flags are clap's own
//! list of them, so that a new one is tried too.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use clap::{Arg, Command};
use ddp_mp::config::{Advice, all_advice};

use crate::harness::{
    ddp_mp_app, in_parallel, program, program_in, refused, repository, run_command, run_command_to,
    said, some_of, words,
};
use crate::mutated::{Chance, TEXTS, inputs};

/// More than 64 bits hold.
const HUGE: &str = "99999999999999999999";

/// What a flag takes, by the name of its value in the help.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Takes {
    Count,
    Number,
    Time,
    /// One of a few names, or a text in a form of its own.
    Name,
    /// Any number of keys, also none.
    Pairs,
    Size,
    Folder,
    File,
    /// Any text.
    Text,
}

fn takes(argument: &Arg) -> Option<Takes> {
    if !argument.get_num_args().is_none_or(|range| range.takes_values())
        || argument.get_long()? == "help"
    {
        return None;
    }
    if !argument.get_possible_values().is_empty() {
        return Some(Takes::Name);
    }
    let name = argument.get_value_names().and_then(|names| names.first())?;
    Some(match name.as_str() {
        "N" | "N,..." | "STEPS" | "PORT" | "W" | "R" | "E" | "S" | "K" => Takes::Count,
        "X" | "P" | "F" | "MIB" => Takes::Number,
        "TIME" => Takes::Time,
        "SIZE" => Takes::Size,
        "DIR" => Takes::Folder,
        "FILE" => Takes::File,
        "DTYPE" | "OP" | "auto|gpu|cpu|N" | "DATA" | "KIND:rank=R,at=STAGE[,step=N]" => Takes::Name,
        "KEY=VALUE,..." => Takes::Pairs,
        "ANSWER" | "HOST" | "auto|PATH" | "TEXT" => Takes::Text, // tests/lesson.rs tries answers
        other => panic!("--{}: what does {other} take?", argument.get_id()),
    })
}

impl Takes {
    /// Values that nothing of the kind can be.
    fn wrong(self) -> &'static [&'static str] {
        match self {
            Takes::Count => &["", " ", "x", "-5", "1e3", "1.5", "nan", "inf", "0x10", "1,5x", HUGE],
            Takes::Number => {
                &["", " ", "x", "nan", "inf", "-inf", "3.5e38", "-3.5e38", "1e400", "1,5"]
            }
            Takes::Time => &["", " ", "x", "-5", "1.5", "1e3", "nan", "5 parsecs", HUGE],
            Takes::Name => &["", " ", "x", "-5", "1.5", "nan", HUGE, "error", "=", ":"],
            Takes::Pairs => {
                &["x", "-5", "=", "nodes", "nodes=", "nodes=-1", "nodes=1.5", "latency=5"]
            }
            Takes::Size => &["", " ", "x", "-5", "nan", HUGE],
            Takes::Folder | Takes::File | Takes::Text => &[],
        }
    }

    /// Values that may be wrong, and must not be more than that.
    fn extreme(self) -> &'static [&'static str] {
        match self {
            Takes::Count | Takes::Size => {
                &["0", "1", "9223372036854775807", "18446744073709551615"]
            }
            Takes::Number => &["0", "-0.0", "-1", "1e-300"],
            Takes::Time => &["0", "9223372036854775807", "18446744073709551615", "500000000000y"],
            Takes::Name | Takes::Pairs | Takes::Text => &[],
            Takes::Folder => &["", "/dev/null", "a file", "a file/in it"],
            Takes::File => &["", "/dev/null", "a folder", "a file/in it"],
        }
    }
}

/// A command, what it needs beside a flag that is tried, and its flags.
fn commands() -> Vec<(Vec<&'static str>, Vec<&'static str>, Command)> {
    const FEW: [&str; 3] = ["--nproc-per-node=1", "--num-samples=64", "--max-steps=1"];
    let all = ddp_mp_app().command();
    let sub = |path: &[&str]| {
        path.iter()
            .fold(all.clone(), |command, name| command.find_subcommand(name).unwrap().clone())
    };
    vec![
        (vec![], FEW.to_vec(), all.clone()),
        (vec!["sampler"], vec!["--len=4", "--world-size=2"], sub(&["sampler"])),
        (vec!["comm", "barrier"], vec!["--nproc-per-node=2"], sub(&["comm"])),
        (
            vec!["bench", "all-reduce"],
            vec!["--nproc-per-node=2", "--max-bytes=4", "--iters=1"],
            sub(&["bench"]),
        ),
        (vec!["bench", "step"], vec!["--nproc-per-node=1", "--steps=1"], sub(&["bench", "step"])),
        (
            vec!["bench", "scaling"],
            vec!["--nproc-per-node=2", "--steps=1", "--repetitions=1"],
            sub(&["bench", "scaling"]),
        ),
        (vec!["verify"], vec!["--nproc-per-node=2", "--steps=1"], sub(&["verify"])),
        (vec!["sample"], vec!["--checkpoint=trained", "--num-tokens=1"], sub(&["sample"])),
        (vec!["lesson", "demo"], vec![], sub(&["lesson"])),
    ]
}

const GPT: &[&str] = &["--model=gpt", "--dataset=text:a text"];

/// What a flag does nothing without.
fn companions(flag: &str) -> &'static [&'static str] {
    match flag {
        "hidden" | "dropout" | "activation" => &["--model=mlp"],
        "n-layer" | "n-head" | "n-embd" | "block-size" => GPT,
        "channels" => &["--model=cnn", "--in-features=64"],
        "beta1" | "beta2" | "eps" => &["--optimizer=adamw"],
        "dampening" => &["--momentum=0.9"],
        "milestones" => &["--schedule=multi-step"],
        "gamma" => &["--schedule=multi-step", "--milestones=1"],
        "eta-min" | "schedule-by" => &["--schedule=cosine"],
        "prefetch-factor" => &["--num-workers=1"],
        "val-every" | "patience" => &["--val-fraction=0.5"],
        "save-every" | "save-every-epochs" | "keep-last" => &["--checkpoint-dir=run"],
        "node-rank" => &["--nnodes=1"],
        "language" => &["--explain"],
        _ => &[],
    }
}

/// A command line with one flag to try.
#[derive(Debug, Clone)]
struct Case {
    args: Vec<String>,
    flag: String,
    takes: Takes,
    value: &'static str,
}

/// Every flag of every command with the values that `of` gives for what it takes. The flags of training, which other
/// commands have as well, are tried there only.
fn cases(of: fn(Takes) -> &'static [&'static str]) -> Vec<Case> {
    let mut cases = Vec::new();
    let training = ddp_mp_app().command();
    let training: Vec<_> = training.get_arguments().map(Arg::get_id).collect();
    for (path, base, command) in commands() {
        for argument in command.get_arguments() {
            let Some(flag) = argument.get_long() else { continue };
            let shared =
                path.len() == 2 && ["step", "scaling"].contains(&path[1]) || path == ["verify"];
            if shared && training.contains(&argument.get_id()) {
                continue;
            }
            let Some(takes) = takes(argument) else { continue };
            // `lesson` has no options of training.
            let companions = if path[..] == ["lesson", "demo"] { &[] } else { companions(flag) };
            let others = base.iter().chain(companions);
            let others = others.filter(|it| it.split('=').next() != Some(&format!("--{flag}")));
            let args: Vec<String> = path.iter().chain(others).map(ToString::to_string).collect();
            for &value in of(takes) {
                let args = args.iter().cloned().chain([format!("--{flag}={value}")]).collect();
                cases.push(Case { args, flag: format!("--{flag}"), takes, value });
            }
        }
    }
    assert!(cases.len() > 100);
    cases
}

#[test]
fn wrong_value_of_any_flag_is_refused_by_name() {
    let mut wrong = Vec::new();
    let all = cases(Takes::wrong);
    let kept = all.len() / 3; // of each flag at least two
    for Case { args, flag, takes, value } in some_of(all, kept) {
        match said(args.iter().map(OsString::from)) {
            Some(text) if text.contains(&flag) => {
                let opaque =
                    ["invalid digit found", "cannot parse integer", "invalid float literal"];
                if opaque.iter().any(|it| text.contains(it)) {
                    wrong.push(format!("{args:?}: {text}"));
                }
            }
            Some(text) => wrong.push(format!("{args:?} does not name {flag}: {text}")),
            None => wrong.push(format!("{args:?}: {flag} ({takes:?}) takes {value:?}")),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The exit code of a command line, and what it says on stderr. What is refused at once needs no process.
fn outcome(folder: &Path, args: &[String]) -> (Option<i32>, String) {
    if let Some(text) = said(args.iter().map(OsString::from)) {
        return (Some(2), text);
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let (code, _, stderr) = run_command(program_in(folder, &args));
    (code, stderr)
}

#[test]
fn extreme_value_of_any_flag_runs_or_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a file"), "something else").unwrap();
    fs::create_dir(folder.path().join("a folder")).unwrap();
    fs::write(folder.path().join("a text"), "To be, or not to be. ".repeat(400)).unwrap();
    let few = ["--checkpoint-dir=trained", "--max-steps=1", "--nproc-per-node=1"];
    run_command_to(0, program_in(&folder, &[GPT, &few].concat()));
    let mut all = cases(Takes::extreme);
    all.retain(|case| case.flag != "--num-tokens"); // it writes as many as it is asked for
    let kept = all.len() / 12;
    let wrong = Mutex::new(Vec::new());
    in_parallel(&some_of(all, kept), |Case { args, flag, .. }| {
        let own = tempfile::tempdir_in(&folder).unwrap();
        for name in ["a file", "a folder", "a text", "trained"] {
            std::os::unix::fs::symlink(folder.path().join(name), own.path().join(name)).unwrap();
        }
        let (code, text) = outcome(own.path(), args);
        if !(code == Some(0) || code == Some(2) && text.contains(flag)) || text.contains("panicked")
        {
            wrong.lock().unwrap().push(format!("{args:?}: {code:?}: {text}"));
        }
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(fs::read_to_string(folder.path().join("a file")).unwrap(), "something else");
}

/// Those of training that write no file and wait for no other machine, and values that fit some of them.
const FLAGS: &str = "\
    max-epochs batch-size model hidden activation dropout channels loss amp lr optimizer momentum weight-decay beta1 \
    eps schedule schedule-by milestones gamma warmup-steps n-layer n-head n-embd block-size max-grad-norm \
    skip-nonfinite check-replicas-every dataset num-samples in-features out-features log-every val-fraction val-every \
    num-workers prefetch-factor seed save-every save-every-epochs keep-last resume init-from max-steps patience \
    nproc-per-node bucket-cap-mb grad-accum-steps comm-hook timeout grace-period stall-warning log-format language \
    inject-fault backend strategy spawn bind config";
const SWITCHES: &str = "\
    nesterov no-shuffle drop-last drop-last-batch scale-lr explain live static-graph check-collectives \
    find-unused-parameters no-overlap sync-batch-norm no-bias";
const VALUES: &str = "\
    0 1 2 7 -1 0.5 1e-3 1e30 nan inf mlp cnn gpt mse cross-entropy fp16 bf16 auto cpu gloo threaded nccl dp none 8,8 \
    1,2,3 10s 0s best random digits csv:plain.csv text:plain.csv npy:x.npy,y.npy step cosine zh json threads core";

/// A command with up to three flags and values at random.
fn random_line(chance: &mut Chance) -> Vec<String> {
    let commands =
        ["", "", "", "env", "sampler", "verify --steps=2", "comm all_reduce", "nonsense"];
    let mut args: Vec<String> = words(chance.pick(&commands)).into_iter().map(Into::into).collect();
    if args.is_empty() {
        args.push("--max-seconds=5".into());
    }
    for _ in 0..[1, 1, 2, 3][chance.below(4)] {
        if chance.below(5) == 0 {
            args.push(format!("--{}", chance.pick(&words(SWITCHES))));
            continue;
        }
        let (flag, value) = (chance.pick(&words(FLAGS)), chance.pick(&words(VALUES)));
        let text = chance.pick(&TEXTS).replace('\0', "");
        args.push(match chance.below(7) {
            0 => format!("--{flag}={value}{text}"),
            1 => format!("--{flag}={text}"),
            _ => format!("--{flag}={value}"),
        });
    }
    args
}

/// Long: it runs the program for each that is not refused at once.
#[test]
fn random_flags_together_run_or_are_refused() {
    let mut chance = Chance::new(4);
    let lines: Vec<_> = (0..inputs() / 10).map(|_| random_line(&mut chance)).collect();
    let run = AtomicUsize::new(0);
    in_parallel(&lines, |line| {
        let folder = tempfile::tempdir().unwrap();
        let [from, to] = [repository("tests/data/plain.csv"), folder.path().join("plain.csv")];
        fs::copy(&from, &to).unwrap();
        let (code, stderr) = outcome(folder.path(), line);
        let is_told = match code {
            Some(0) => true,
            Some(1) => stderr.contains("ddp-mp: "),
            // What is wrong is named: a flag, its value, or the command.
            Some(2) => line
                .iter()
                .any(|it| it.split('=').any(|part| !part.is_empty() && stderr.contains(part))),
            _ => false,
        };
        assert!(is_told && !stderr.contains("panicked"), "{line:?}: {code:?}: {stderr}");
        assert_eq!(fs::read(to).unwrap(), fs::read(from).unwrap(), "{line:?}");
        run.fetch_add(usize::from(code == Some(0)), Ordering::Relaxed);
    });
    let run = run.into_inner();
    assert!(run > 0 && run < lines.len(), "{run} of {} have run", lines.len());
}

#[test]
fn non_utf8_argument_is_refused_by_name() {
    let bytes = |text: &str, more: &[u8]| OsString::from_vec([text.as_bytes(), more].concat());
    for (path, _, command) in commands() {
        let flags = command.get_arguments().filter(|argument| takes(argument).is_some());
        for flag in some_of(flags, 10) {
            let flag = format!("--{}", flag.get_long().unwrap());
            let path = || path.iter().map(OsString::from);
            let joined = path().chain([bytes(&format!("{flag}="), b"r\xffn")]);
            let apart = path().chain([OsString::from(&flag), bytes("", b"r\xffn")]);
            for text in [said(joined), said(apart)] {
                let text = text.expect("it is refused");
                assert!(text.contains(&format!("{flag}: \"r\\xffn\" is not UTF-8")), "{text}");
            }
        }
    }
    let text = said([bytes("r", b"\xff")]).unwrap();
    assert!(text.contains("error: \"r\\xff\" is not UTF-8"), "{text}");
    let text = said([bytes("--", b"\xff=r")]).unwrap();
    assert!(text.contains("error: --\u{fffd}: \"r\" is not UTF-8"), "{text}");
    let mut command = program(&[]);
    command.arg(bytes("--checkpoint-dir=", b"\xff"));
    assert_eq!(run_command(command).0, Some(2));
}

#[test]
fn unknown_flag_of_another_program_gets_a_suggestion() {
    let flags: Vec<Command> = commands().into_iter().map(|(.., command)| command).collect();
    let is_known = |name: &str| {
        flags.iter().any(|command| command.get_arguments().any(|it| it.get_long() == Some(name)))
    };
    for advice in all_advice() {
        let Advice::Call(option) = advice else { continue };
        assert!(is_known(option.split('=').next().unwrap()), "there is no --{option}");
    }
    for (args, tip) in [
        ("--learning-rate=0.1", "'--lr'"),
        ("--ranks=2", "'--nproc-per-node'"),
        ("--num_train_epochs=2", "'--max-epochs'"),
        ("--fp16", "'--amp=fp16'"),
        ("sampler --len=4 --ranks=2", "'--world-size'"),
        ("sampler --world-size=4 --num-samples=2", "'--len'"),
        ("bench step --learning-rate=2", "'--lr'"),
    ] {
        let text = refused(args);
        assert!(text.contains(&format!("tip: ddp-mp calls it {tip}")), "{args}: {text}");
    }
    for (flag, tip) in [
        ("--deepspeed=ds.json", "'--zero'"),
        ("--redirects=3", "give it to torchrun"),
        ("--hostfile=hosts", "give it to mpirun"),
        ("--nnodes=1:4", "the machines that it starts with"),
        ("--momentun=0.9", "'--momentum'"),
    ] {
        let text = refused(flag);
        assert!(text.contains(tip), "{flag}: {text}");
    }
    // Clap would name --amp, --tensorboard and --milestones.
    for flag in ["--yaml=a", "--tensor-parallel-size=2", "--multi-node"] {
        let text = refused(flag);
        assert!(!text.contains("tip: "), "{flag}: {text}");
    }
    // Not where the command has nothing like it.
    let text = refused("comm --learning-rate=2");
    assert!(!text.contains("calls it"), "{text}");
}
