//! What was typed on the command line, as typed; `config` says what it means.

mod mistakes;
mod tools;
mod train;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::{PathBufValueParser, TypedValueParser, ValueHint};
use clap::{Arg, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::commands::{
    BisectFlags, CommFlags, CompletionsFlags, DiffFlags, LessonFlags, NewFlags, SampleFlags,
    SamplerFlags,
};
use crate::config::{InShortHelp, Program, Tool, is_refused_by};
use engine::files::expand_home;
pub(crate) use tools::{Bench, BenchCommand, EnvFlags, VerifyFlags};
pub(crate) use train::TrainFlags;

/// Train a model in parallel, one rank per visible GPU.
///
/// Each rank is a thread, or a process with --spawn=processes. Without a GPU, each CPU core gets a rank. Without a
/// command the program trains. The defaults are a random data set of 4096 samples and one dense layer.
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    /// Print only results and failures; no notes on stderr
    #[arg(long, short, global = true, add = InShortHelp)]
    pub(crate) quiet: bool,
    #[command(flatten)]
    pub(crate) train: TrainFlags,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train on all ranks (the default)
    Train(TrainFlags),
    /// Show what each collective does
    Comm(CommFlags),
    /// Generate text with a trained gpt
    Sample(SampleFlags),
    /// List each rank's samples
    Sampler(SamplerFlags),
    /// Time collectives, training steps and scaling
    Bench(Bench),
    /// Check that N ranks train like one, within rounding
    Verify(VerifyFlags),
    /// Find the first difference of two recorded runs
    Diff(DiffFlags),
    /// Run two commands and find the first different tensor
    Bisect(BisectFlags),
    /// Show this machine and the resolved options
    Env(EnvFlags),
    /// List lessons and check answers
    Lesson(LessonFlags),
    /// Create a cargo project for your own model
    New(NewFlags),
    /// Print shell completions
    Completions(CompletionsFlags),
}

const EXAMPLES: &str = "\
Examples:
  ddp-mp --max-epochs=2 --batch-size=32
  ddp-mp --model=mlp --dataset=digits --loss=cross-entropy --lr=0.3 --val-fraction=0.2
  torchrun --standalone --no-python --nproc-per-node=2 ddp-mp --max-epochs=2";

/// The commands that teach, which [`App::course`](super::App::course) adds.
const COURSE: [&str; 4] = ["comm", "sampler", "lesson", "new"];

/// The commands for a model of `--model`.
const OF_BUILT_IN: &str = "sample";

/// Returns `command` with a `-h` that lists the common options only.
fn with_short_help(command: clap::Command) -> clap::Command {
    command.mut_args(|arg| {
        let is_common = arg.get::<InShortHelp>().is_some();
        arg.hide_short_help(!is_common)
    })
}

/// Returns `command` with a help that leaves out what `tool` refuses.
fn for_tool(command: clap::Command, tool: Tool) -> clap::Command {
    command.mut_args(|arg| if is_refused_by(&arg, tool) { arg.hide(true) } else { arg })
}

/// Returns the declaration of `program`'s command line, with its help.
pub(crate) fn command(program: &Program) -> clap::Command {
    let options = program.options_with_defaults();
    let with_options = |command: clap::Command| command.args(&options);
    let declared = Cli::command();
    let is_there = |name: &str| match name {
        OF_BUILT_IN => program.model.is_none(),
        name => program.has_course || !COURSE.contains(&name),
    };
    let commands = declared.get_subcommands().filter(|command| is_there(command.get_name()));
    let commands = commands.map(|command| match command.get_name() {
        "train" | "env" => with_short_help(with_options(command.clone())),
        "verify" => for_tool(with_options(command.clone()), Tool::Verify),
        "bench" => {
            let command = command.clone().mut_subcommands(with_options);
            let command = command.mut_subcommand("step", |step| for_tool(step, Tool::BenchStep));
            command.mut_subcommand("scaling", |scaling| for_tool(scaling, Tool::BenchScaling))
        }
        _ => command.clone(),
    });
    // A negative number is a wrong value, and not an unknown flag.
    let negative = |arg: Arg| {
        let takes_value = arg.get_num_args().is_none_or(|range| range.takes_values());
        if takes_value { arg.allow_negative_numbers(true) } else { arg }
    };
    let own = clap::Command::new(program.name)
        .bin_name(program.name)
        .version(program.version)
        .about(declared.get_about().cloned().unwrap_or_default())
        .args_conflicts_with_subcommands(true)
        .max_term_width(100)
        .args(declared.get_arguments())
        .subcommands(commands)
        .add(program.clone());
    let own = with_short_help(with_options(own));
    let own = if program.has_course {
        own.long_about(declared.get_long_about().cloned().unwrap_or_default())
            .after_help(format!("{EXAMPLES}\n\n--help lists all options."))
            .after_long_help(EXAMPLES)
    } else {
        own.after_help("--help lists all options.")
    };
    let change = |arg: Arg| with_home(negative(arg));
    own.mut_args(change).mut_subcommands(|command| command.mut_args(change))
}

/// Lets the values of an argument that takes paths begin with `~/`, the home folder.
fn with_home(arg: Arg) -> Arg {
    if arg.get_value_hint() != ValueHint::AnyPath {
        return arg;
    }
    let expand = |path: PathBuf| {
        path.to_str().map_or(path.clone(), |text| expand_home(text).into_owned().into())
    };
    arg.value_parser(PathBufValueParser::new().map(expand))
}

/// Checks the program's options: none has the name of an option of ours, in any command.
///
/// # Errors
/// [`Error::Input`](crate::Error::Input) that names both options.
pub(crate) fn check(program: &Program) -> engine::error::Result<()> {
    if program.options.is_none() {
        return program.check(&[]); // without the time that it takes to declare the command line once more
    }
    let without = Program { options: None, ..program.clone() };
    let mut command = command(&without);
    command.build(); // adds --help and --version
    program.check(&args_of_training(&command))
}

/// Returns the arguments of `command` and of its subcommands that have the options of training.
fn args_of_training(command: &clap::Command) -> Vec<Arg> {
    let own = command.get_arguments().filter(|_| trains(command)).cloned();
    own.chain(command.get_subcommands().flat_map(args_of_training)).collect()
}

/// Returns whether `command` has the options of training.
fn trains(command: &clap::Command) -> bool {
    command.get_arguments().any(|arg| arg.get_id() == "batch_size")
}

/// Reads the command line of `command`. `_` is as good as `-` in a flag's name, as Python programs write them.
///
/// # Errors
/// What clap wants to say and leave with: a mistake, or the help that was asked for.
pub(crate) fn parse(
    command: &clap::Command,
    args: impl Iterator<Item = OsString>,
) -> Result<Cli, clap::Error> {
    let mut flags_end = false;
    let mut args: Vec<OsString> = args
        .map(|arg| {
            flags_end |= arg == "--";
            match arg.to_str() {
                Some(text) if text.starts_with("--") && !flags_end => {
                    let (name, rest) = text.split_at(text.find('=').unwrap_or(text.len()));
                    OsString::from(name.replace('_', "-") + rest)
                }
                _ => arg,
            }
        })
        .collect();
    quiet_after_command(command, &mut args);
    mistakes::check_utf8(&args).map_err(|problem| mistakes::error(command, problem))?;
    let matches = command.clone().try_get_matches_from(&args);
    Cli::from_arg_matches(&matches.map_err(|error| mistakes::suggest(error, command, &args))?)
}

/// Moves a leading `--quiet` behind the command: this parser accepts no flag before a command.
fn quiet_after_command(command: &clap::Command, args: &mut [OsString]) {
    if let [_, quiet, name, ..] = args
        && (*quiet == "--quiet" || *quiet == "-q")
        && command.find_subcommand(&*name).is_some()
    {
        std::mem::swap(quiet, name);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use clap::builder::StyledStr;

    use crate::config::Config;

    use super::*;

    /// Returns `ddp-mp` with all commands.
    fn with_course() -> Program {
        Program { has_course: true, ..Program::default() }
    }

    fn parsed(line: &str) -> Cli {
        let args = line.split(' ').map(OsString::from);
        let command = command(&with_course());
        parse(&command, std::iter::once("ddp-mp".into()).chain(args)).unwrap()
    }

    #[test]
    fn clap_definitions_pass_the_debug_assert() {
        command(&with_course()).debug_assert();
        command(&Program::default()).debug_assert();
    }

    /// The verbs that help begins with.
    const VERBS: [&str; 61] = [
        "Add",
        "Allow",
        "Append",
        "Apply",
        "Assume",
        "Average",
        "Bind",
        "Check",
        "Choose",
        "Compare",
        "Compute",
        "Continue",
        "Count",
        "Create",
        "Deal",
        "Depend",
        "Divide",
        "Draw",
        "Drop",
        "End",
        "Exempt",
        "Explain",
        "Find",
        "Generate",
        "Give",
        "Hold",
        "Keep",
        "Leave",
        "List",
        "Load",
        "Make",
        "Measure",
        "Multiply",
        "Partition",
        "Play",
        "Print",
        "Raise",
        "Read",
        "Record",
        "Reduce",
        "Repeat",
        "Report",
        "Restart",
        "Run",
        "Save",
        "Scale",
        "Search",
        "Set",
        "Show",
        "Simulate",
        "Skip",
        "Start",
        "Stop",
        "Time",
        "Train",
        "Use",
        "Validate",
        "Wait",
        "Warm",
        "Weight",
        "Write",
    ];

    /// Checks the help of `command`, of its arguments, and of its subcommands.
    fn check_help(command: &clap::Command) {
        let shown = |text: Option<&StyledStr>| text.map(ToString::to_string).unwrap_or_default();
        let name = command.get_name();
        let args =
            command.get_arguments().map(|arg| (arg.get_id().as_str(), shown(arg.get_help())));
        for (of, help) in args.chain([("the command", shown(command.get_about()))]) {
            let help = help.split(" [default: ").next().unwrap();
            let words: Vec<&str> = help.split_whitespace().collect();
            let begins = words.first().is_some_and(|word| VERBS.contains(word));
            assert!(begins && words.len() <= 10, "{name}, {of}: {help:?}");
        }
        command.get_subcommands().for_each(check_help);
    }

    #[test]
    fn help_begins_with_a_verb_and_is_short() {
        check_help(&command(&with_course()));
    }

    #[test]
    fn help_of_a_tool_leaves_out_what_it_refuses() {
        let mut command = command(&with_course());
        for (path, tool) in [
            (&["verify"][..], Tool::Verify),
            (&["bench", "step"], Tool::BenchStep),
            (&["bench", "scaling"], Tool::BenchScaling),
        ] {
            let mut found = &mut command;
            for name in path {
                found = found.find_subcommand_mut(name).unwrap();
            }
            let help = found.render_long_help().to_string();
            assert!(
                help.contains("--batch-size <N>") && !help.contains("--max-epochs"),
                "{path:?}"
            );
            for arg in found.get_arguments() {
                assert_eq!(
                    arg.is_hide_set(),
                    is_refused_by(arg, tool),
                    "{path:?}: {}",
                    arg.get_id()
                );
            }
        }
    }

    #[test]
    fn flags_accept_underscores_for_dashes() {
        let flags = parsed("--max_epochs=2 --batch_size 8 --no_shuffle").train;
        let config = flags.resolve(&Arc::default()).unwrap();
        let mut expected = Config::default();
        (expected.training.max_epochs, expected.training.batch_size) = (2, 8);
        expected.data.no_shuffle = true;
        assert_eq!(config, expected);
    }

    #[test]
    fn quiet_may_come_before_a_command() {
        for line in ["-q env", "--quiet env", "env -q", "env --quiet"] {
            let cli = parsed(line);
            assert!(cli.quiet && matches!(cli.command, Some(Command::Env(_))), "{line}");
        }
    }

    #[test]
    fn config_keys_are_flags() {
        let defaults = Config::default().to_string().parse::<toml::Table>().unwrap();
        let command = command(&with_course());
        for key in defaults.keys() {
            let argument = command.get_arguments().find(|a| a.get_id() == key.as_str());
            let flag = argument.unwrap_or_else(|| panic!("no flag for {key}")).get_long().unwrap();
            assert_eq!(flag.replace('-', "_"), *key);
        }
    }
}
