//! A program that trains: its command line, its commands, and its exit code.

mod cli;

use std::ffi::OsString;
use std::io::{self, Write};
use std::sync::Arc;

use clap::error::ErrorKind;

use crate::commands::{self, Versions};
use crate::config::{Config, Tool};
use crate::error::{Error, Result};
use crate::ffi::{check_version, cuda, keep_memory};
use crate::launch::{SpawnError, exit_code, install_panic_hook};
use crate::os;
use crate::telemetry::{LogFormat, Printer, unwritable_stdout};
use cli::{
    Bench, BenchCommand, Command, EnvFlags, ScalingFlags, StepFlags, TrainFlags, VerifyFlags,
};

pub use cli::command;

/// Exit code of a run that failed.
const FAILED: u8 = 1;
/// Exit code for invalid input, and for a request that this machine cannot fulfil.
const WRONG_INPUT: u8 = 2;

/// Runs the program that the process's arguments ask for, and ends the process. `commit` is the commit that it was built
/// from, empty without a repository.
pub fn run(commit: &'static str) -> ! {
    install_panic_hook();
    os::ignore_file_size_signal();
    let cli = match cli::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(message) => {
            // Errors go to stderr, requested help to stdout.
            let printed = if message.kind() == ErrorKind::DisplayVersion && is_long_version() {
                text_printer().lines(|out| write!(out, "{}", Versions::find(commit)))
            } else {
                message.print().map_err(unwritable_stdout)
            };
            if message.use_stderr() {
                os::exit(WRONG_INPUT)
            }
            os::exit(if is_written(printed) { 0 } else { FAILED })
        }
    };
    let code =
        match run_command(cli.command.unwrap_or(Command::Train(cli.train)), cli.quiet, commit) {
            Ok(code) => code,
            Err(error) => {
                if !error.is::<commands::AlreadyReported>() {
                    text_printer().report(&format!("{error:#}"));
                }
                let failed = error.downcast_ref::<Box<SpawnError>>();
                match (error.downcast_ref(), failed.and_then(|failed| failed.stopped)) {
                    (_, Some(reason)) => exit_code(Some(reason)),
                    (Some(Error::InvalidInput(_)), _) => WRONG_INPUT,
                    _ => FAILED,
                }
            }
        };
    os::exit(code)
}

/// Returns the configuration of the training run that the command line `args` asks for, and runs nothing. `args` begins
/// with the program's name. `None` for another command than `train`.
///
/// # Errors
/// [`Error::InvalidInput`] with what the program would say.
pub fn config_of(args: impl Iterator<Item = OsString>) -> Result<Option<Config>> {
    let cli = cli::parse(args).map_err(|error| Error::InvalidInput(error.to_string()))?;
    match cli.command {
        None => cli.train.resolve().map(Some),
        Some(Command::Train(flags)) => flags.resolve().map(Some),
        Some(_) => Ok(None),
    }
}

fn text_printer() -> Printer {
    Printer::new(LogFormat::Text)
}

/// Returns whether `--version` asks for the versions, and not `-V`, which prints one line.
fn is_long_version() -> bool {
    std::env::args_os().any(|arg| arg == "--version")
}

/// Returns whether the output was written to stdout. Reports an error, unless the reader closed the pipe.
fn is_written(printed: io::Result<()>) -> bool {
    match printed.and_then(|()| io::stdout().flush().map_err(unwritable_stdout)) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            text_printer().report(&error.to_string());
            false
        }
        _ => true,
    }
}

/// Runs `command`, and returns the exit code.
fn run_command(command: Command, quiet: bool, commit: &'static str) -> anyhow::Result<u8> {
    check_version()?; // ahead of every other use of libtorch
    keep_memory();
    let printer = |format| Arc::new(Printer::new(format).quiet(quiet));
    let text = || printer(LogFormat::Text);
    if !matches!(command, Command::Train(_)) {
        os::release_user_signals();
    }
    let result = match command {
        Command::Train(flags) => return train(&flags, quiet),
        Command::Comm(flags) => {
            let printer = printer(flags.log_format);
            commands::comm(flags, &cuda::load(), &printer)
        }
        Command::Env(flags) => env(&flags, commit),
        Command::Bench(Bench { subcommand, collective: flags }) => match subcommand {
            Some(BenchCommand::Step(flags)) => bench_step(&flags, printer),
            Some(BenchCommand::Scaling(flags)) => bench_scaling(&flags, printer),
            None => {
                let printer = printer(flags.log_format);
                commands::bench(flags, &cuda::load(), &printer)
            }
        },
        Command::Verify(flags) => verify(&flags, printer),
        Command::Replay(flags) => commands::replay(&flags, &text()),
        Command::Sample(flags) => commands::sample(&flags, &cuda::load(), &text()),
        Command::Lesson(flags) => commands::lesson(&flags, &text()),
        Command::New(flags) => commands::new(&flags, &text()),
        Command::Completions(flags) => commands::completions(&flags, cli::command(), &text()),
        Command::Man(flags) => commands::man(&flags, cli::command(), &text()),
        Command::Sampler(flags) => commands::sampler(&flags, &printer(flags.log_format)),
    };
    result.map(|()| 0)
}

/// Trains and returns the exit code.
fn train(flags: &TrainFlags, quiet: bool) -> anyhow::Result<u8> {
    let config = flags.resolve()?;
    let printer = Printer::new(config.output.log_format).quiet(quiet).live(config.output.live);
    commands::train(config, &cuda::load(), &Arc::new(printer)).map(exit_code)
}

fn bench_step(
    flags: &StepFlags,
    printer: impl Fn(LogFormat) -> Arc<Printer>,
) -> anyhow::Result<()> {
    let config = flags.train.resolve_for(Tool::BenchStep)?;
    let printer = printer(config.output.log_format);
    let cluster = flags.simulate_cluster.clone();
    commands::bench_step(config, flags.steps as usize, cluster, &cuda::load(), &printer)
}

fn bench_scaling(
    flags: &ScalingFlags,
    printer: impl Fn(LogFormat) -> Arc<Printer>,
) -> anyhow::Result<()> {
    let config = flags.train.resolve_for(Tool::BenchScaling)?;
    let printer = printer(config.output.log_format);
    let (steps, repetitions) = (flags.steps as usize, flags.repetitions as usize);
    commands::bench_scaling(config, steps, repetitions, &cuda::load(), &printer)
}

fn verify(flags: &VerifyFlags, printer: impl Fn(LogFormat) -> Arc<Printer>) -> anyhow::Result<()> {
    let config = flags.train.resolve_for(Tool::Verify)?;
    let printer = printer(config.output.log_format);
    commands::verify(config, flags.steps, flags.per_parameter, &cuda::load(), &printer)
}

fn env(flags: &EnvFlags, commit: &'static str) -> anyhow::Result<()> {
    let config = flags.train.resolve()?;
    let printer = Printer::new(config.output.log_format);
    commands::env(&config, flags.all, Versions::find(commit), &cuda::load(), &printer)
}
