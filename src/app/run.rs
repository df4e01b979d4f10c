//! One run of a program: what its arguments ask for, and the exit code.

use std::env;
use std::io::{self, Write};
use std::sync::Arc;

use clap::error::ErrorKind;

use super::cli::{self, Bench, BenchCommand, Cli, Command, EnvFlags, TrainFlags};
use crate::commands::{self, Versions};
use crate::config::{Config, Program, Tool};
use crate::os;
use engine::error::{Error, Result};
use engine::ffi::{check_version, cuda, hide_stack_traces, keep_memory};
use engine::launch::{SpawnError, exit_code, install_panic_hook};
use engine::runtime::panics;
use views::{LogFormat, Printer, unwritable_stdout};

/// Exit code of a run that failed.
const FAILED: u8 = 1;
/// Exit code for invalid input, and for a request that this machine cannot fulfil.
const WRONG_INPUT: u8 = 2;

/// Runs what the process's arguments ask of `program`, and ends the process.
pub(super) fn run(program: &Arc<Program>) -> ! {
    os::hold_signals_of_user();
    install_panic_hook();
    os::ignore_file_size_signal();
    let code = match parse(program) {
        Err(code) => code,
        Ok(cli) => match run_command(program, cli) {
            Ok(code) => code,
            Err(error) => {
                if !error.is::<commands::AlreadyReported>() {
                    text_printer().report(&format!("{error:#}"));
                }
                code_of(&error)
            }
        },
    };
    os::exit(code)
}

/// Returns what was typed, or prints the help or the mistake and returns the exit code.
fn parse(program: &Program) -> Result<Cli, u8> {
    if let Err(error) = cli::check(program) {
        text_printer().report(&error.to_string());
        return Err(WRONG_INPUT);
    }
    cli::parse(&cli::command(program), env::args_os()).map_err(|message| {
        // Errors go to stderr, requested help to stdout.
        let printed = if message.kind() == ErrorKind::DisplayVersion && is_long_version() {
            // A libtorch of another version is only named.
            let cuda = check_version().map(|()| cuda::load()).unwrap_or_default();
            let versions = Versions::find(program, &cuda);
            text_printer().lines(|out| write!(out, "{versions}"))
        } else {
            message.print().map_err(unwritable_stdout)
        };
        if message.use_stderr() {
            WRONG_INPUT
        } else if is_written(printed) {
            0
        } else {
            FAILED
        }
    })
}

/// Runs the command, and returns the exit code.
fn run_command(program: &Arc<Program>, cli: Cli) -> anyhow::Result<u8> {
    let Cli { command, quiet, train } = cli;
    let command = command.unwrap_or(Command::Train(train));
    prepare_process(&command)?;
    let printer = |format| Arc::new(Printer::new(format).quiet(quiet));
    let text = || printer(LogFormat::Text);
    let result = match command {
        Command::Train(flags) => return run_training(program, &flags, quiet),
        Command::Comm(flags) => {
            let printer = printer(flags.log_format);
            commands::comm(&flags, &cuda::load(), &printer)
        }
        Command::Env(flags) => show_env(program, &flags),
        Command::Bench(bench) => run_bench(program, &bench, quiet),
        Command::Verify(flags) => {
            let (config, printer) = resolve_for(Tool::Verify, program, &flags.train, quiet)?;
            commands::verify(config, flags.steps, flags.per_parameter, &cuda::load(), &printer)
        }
        Command::Diff(flags) => commands::diff(&flags, &text()),
        Command::Bisect(flags) => commands::bisect(&flags, program.name, &text()),
        Command::Sample(flags) => commands::sample(&flags, program, &cuda::load(), &text()),
        Command::Lesson(flags) => commands::lesson(&flags, &text()),
        Command::New(flags) => commands::new(&flags, &text()),
        Command::Completions(flags) => {
            commands::completions(&flags, cli::command(program), &text())
        }
        Command::Sampler(flags) => commands::sampler(&flags, &printer(flags.log_format)),
    };
    result.map(|()| 0)
}

/// Prepares this process for `command`: its threads, libtorch, and its signals.
fn prepare_process(command: &Command) -> Result<()> {
    if matches!(command, Command::Train(_) | Command::Bench(_) | Command::Verify(_)) {
        os::limit_spinning_in_main();
    }
    check_version()?; // ahead of every other use of libtorch
    keep_memory();
    if !panics::wants_backtraces() {
        hide_stack_traces(); // for closures that run before the ranks start
    }
    if !matches!(command, Command::Train(_)) {
        os::release_user_signals();
    }
    Ok(())
}

/// Measures a collective, a training step or the scaling.
fn run_bench(program: &Arc<Program>, bench: &Bench, quiet: bool) -> anyhow::Result<()> {
    match &bench.subcommand {
        Some(BenchCommand::Step(flags)) => {
            let (config, printer) = resolve_for(Tool::BenchStep, program, &flags.train, quiet)?;
            commands::bench_step(config, flags.steps, &cuda::load(), &printer)
        }
        Some(BenchCommand::Scaling(flags)) => {
            let (config, printer) = resolve_for(Tool::BenchScaling, program, &flags.train, quiet)?;
            let (steps, repetitions) = (flags.steps, flags.repetitions);
            commands::bench_scaling(config, steps, repetitions, &cuda::load(), &printer)
        }
        None => {
            let printer = Printer::new(bench.collective.log_format).quiet(quiet);
            commands::bench(&bench.collective, &cuda::load(), &Arc::new(printer))
        }
    }
}

/// Returns the configuration of `tool`, and a printer of its format.
fn resolve_for(
    tool: Tool,
    program: &Arc<Program>,
    flags: &TrainFlags,
    quiet: bool,
) -> Result<(Config, Arc<Printer>)> {
    let config = flags.resolve_tool(program, tool)?;
    let printer = Printer::new(config.output.log_format).quiet(quiet);
    Ok((config, Arc::new(printer)))
}

/// Trains and returns the exit code.
fn run_training(program: &Arc<Program>, flags: &TrainFlags, quiet: bool) -> anyhow::Result<u8> {
    let config = flags.resolve(program)?;
    let printer = Printer::new(config.output.log_format).quiet(quiet).live(config.output.live);
    commands::train(config, &cuda::load(), &Arc::new(printer)).map(exit_code)
}

/// Shows the options and this machine, or checks its GPUs.
fn show_env(program: &Arc<Program>, flags: &EnvFlags) -> anyhow::Result<()> {
    let config = flags.train.resolve(program)?;
    let printer = Printer::new(config.output.log_format);
    if flags.check_gpus {
        return commands::check_gpus(&Arc::new(printer));
    }
    let cuda = cuda::load();
    commands::env(&config, flags.all, Versions::find(program, &cuda), &cuda, &printer)
}

/// Returns the exit code of a command that failed.
fn code_of(error: &anyhow::Error) -> u8 {
    let failed = error.downcast_ref::<Box<SpawnError>>();
    match (error.downcast_ref(), failed.and_then(|failed| failed.stopped)) {
        (_, Some(reason)) => exit_code(Some(reason)),
        (Some(Error::Input { .. }), _) => WRONG_INPUT,
        _ => FAILED,
    }
}

fn text_printer() -> Printer {
    Printer::new(LogFormat::Text)
}

/// Returns whether `--version` asks for the versions, and not `-V`, which prints one line.
fn is_long_version() -> bool {
    env::args_os().any(|arg| arg == "--version")
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
