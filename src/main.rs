//! The program: parse, resolve, load CUDA, run, leave.

mod cli;

use std::sync::Arc;

use ddp_mp::commands;
use ddp_mp::config::Config;
use ddp_mp::launch::{exit_code, install_panic_hook};
use ddp_mp::observe::{LogFormat, Printer};
use ddp_mp::torch::{self, cuda};

use cli::{BenchCommand, BenchFlags, Command, StepFlags, TrainFlags, VerifyFlags};

/// The run failed.
const FAILED: u8 = 1;
/// What was asked for is wrong, or cannot be done here.
const WRONG_INPUT: u8 = 2;

fn main() {
    install_panic_hook();
    let cli = match cli::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(message) => {
            // A mistake goes to stderr, the help that was asked for to stdout.
            let _ = message.print();
            torch::exit(if message.use_stderr() { WRONG_INPUT } else { 0 })
        }
    };
    let result = match cli.command {
        None => train(&cli.train),
        Some(Command::Train(flags)) => train(&flags),
        Some(other) => run(other).map(|()| 0),
    };
    let code = match result {
        Ok(code) => code,
        Err(error) => {
            if !error.is::<commands::Told>() {
                Printer::new(LogFormat::Text).note(&format!("{error:#}"));
            }
            let wrong_input = matches!(error.downcast_ref(), Some(ddp_mp::Error::Input(_)));
            if wrong_input { WRONG_INPUT } else { FAILED }
        }
    };
    torch::exit(code)
}

/// Any command.
fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Train(flags) => train(&flags).map(drop),
        Command::Comm(flags) => {
            let printer = Arc::new(Printer::new(flags.log_format()));
            commands::comm(flags.request(), &cuda::load(), &printer)
        }
        Command::Env(flags) => env(&flags),
        Command::Bench(BenchFlags { step: Some(BenchCommand::Step(flags)), .. }) => {
            bench_step(&flags)
        }
        Command::Bench(flags) => {
            let printer = Arc::new(Printer::new(flags.log_format()));
            commands::bench(flags.request(), &cuda::load(), &printer)
        }
        Command::Verify(flags) => verify(&flags),
        Command::Sampler(flags) => {
            commands::sampler(&flags.request(), &Printer::new(flags.log_format()))
        }
    }
}

/// The exit code.
fn train(flags: &TrainFlags) -> anyhow::Result<u8> {
    let config = Config::resolve(flags.config.as_deref(), flags.table()?)?;
    let printer = Arc::new(Printer::new(config.log_format));
    commands::train(config, &cuda::load(), &printer).map(exit_code)
}

fn bench_step(flags: &StepFlags) -> anyhow::Result<()> {
    let table = flags.train.table()?;
    commands::check_step_flags(table.keys())?;
    let config = Config::resolve(flags.train.config.as_deref(), table)?;
    let printer = Arc::new(Printer::new(config.log_format));
    let cluster = flags.model_cluster.clone();
    commands::bench_step(config, flags.steps, cluster, &cuda::load(), &printer)
}

fn verify(flags: &VerifyFlags) -> anyhow::Result<()> {
    let table = flags.train.table()?;
    commands::check_verify_flags(table.keys())?;
    let config = Config::resolve(flags.train.config.as_deref(), table)?;
    let printer = Printer::new(config.log_format);
    commands::verify(config, flags.steps, flags.per_parameter, &cuda::load(), &printer)
}

fn env(flags: &TrainFlags) -> anyhow::Result<()> {
    let config = Config::resolve(flags.config.as_deref(), flags.table()?)?;
    let printer = Printer::new(config.log_format);
    commands::env(&config, &cuda::load(), &printer)
}
