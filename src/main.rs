//! The `ddp-mp` program: parses the flags, resolves the configuration, loads CUDA, runs, and exits.

mod cli;

use std::io::{self, Write};
use std::sync::Arc;

use ddp_mp::commands;
use ddp_mp::config::Tool;
use ddp_mp::ffi::{cuda, keep_memory};
use ddp_mp::launch::{exit_code, install_panic_hook};
use ddp_mp::os;
use ddp_mp::telemetry::{LogFormat, Printer};

use cli::{Bench, BenchCommand, Command, ScalingFlags, StepFlags, TrainFlags, VerifyFlags};

/// Limits spinning. Runs before `main` and before libtorch's constructors.
#[used]
#[unsafe(link_section = ".preinit_array")]
static LIMIT_SPINNING: os::BeforeMain = os::limit_spinning;

/// Exit code of a run that failed.
const FAILED: u8 = 1;
/// Exit code for invalid input, and for a request that this machine cannot fulfil.
const WRONG_INPUT: u8 = 2;

fn main() {
    install_panic_hook();
    os::ignore_file_size_signal();
    keep_memory();
    let cli = match cli::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(message) => {
            // Errors go to stderr, requested help to stdout.
            let printed = message.print();
            if message.use_stderr() {
                os::exit(WRONG_INPUT)
            }
            os::exit(if is_written(printed) { 0 } else { FAILED })
        }
    };
    let code = match run(cli.command.unwrap_or(Command::Train(cli.train))) {
        Ok(code) => code,
        Err(error) => {
            if !error.is::<commands::AlreadyReported>() {
                Printer::new(LogFormat::Text).info(&format!("{error:#}"));
            }
            let wrong_input = matches!(error.downcast_ref(), Some(ddp_mp::Error::InvalidInput(_)));
            if wrong_input { WRONG_INPUT } else { FAILED }
        }
    };
    os::exit(code)
}

/// Returns whether the output was written to stdout. Reports an error, unless the reader closed the pipe.
fn is_written(printed: io::Result<()>) -> bool {
    match printed.and_then(|()| io::stdout().flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Printer::new(LogFormat::Text).info(&format!("writing to stdout: {error}"));
            false
        }
        _ => true,
    }
}

/// Runs `command`, and returns the exit code.
fn run(command: Command) -> anyhow::Result<u8> {
    let result = match command {
        Command::Train(flags) => return train(&flags),
        Command::Comm(flags) => {
            let printer = Arc::new(Printer::new(flags.log_format));
            commands::comm(flags, &cuda::load(), &printer)
        }
        Command::Env(flags) => env(&flags),
        Command::Bench(Bench { subcommand, collective: flags }) => match subcommand {
            Some(BenchCommand::Step(flags)) => bench_step(&flags),
            Some(BenchCommand::Scaling(flags)) => bench_scaling(&flags),
            None => {
                let printer = Arc::new(Printer::new(flags.log_format));
                commands::bench(flags, &cuda::load(), &printer)
            }
        },
        Command::Verify(flags) => verify(&flags),
        Command::Replay(flags) => commands::replay(&flags, &Printer::new(LogFormat::Text)),
        Command::Sample(flags) => {
            commands::sample(&flags, &cuda::load(), &Printer::new(LogFormat::Text))
        }
        Command::Lesson(flags) => commands::lesson(&flags, &Printer::new(LogFormat::Text)),
        Command::New(flags) => commands::new(&flags, &Printer::new(LogFormat::Text)),
        Command::Sampler(flags) => commands::sampler(&flags, &Printer::new(flags.log_format)),
    };
    result.map(|()| 0)
}

/// Trains and returns the exit code.
fn train(flags: &TrainFlags) -> anyhow::Result<u8> {
    let config = flags.resolve()?;
    let printer = Arc::new(Printer::new(config.output.log_format).live(config.output.live));
    commands::train(config, &cuda::load(), &printer).map(exit_code)
}

fn bench_step(flags: &StepFlags) -> anyhow::Result<()> {
    let config = flags.train.resolve_for(Tool::BenchStep)?;
    let printer = Arc::new(Printer::new(config.output.log_format));
    let cluster = flags.simulate_cluster.clone();
    commands::bench_step(config, flags.steps as usize, cluster, &cuda::load(), &printer)
}

fn bench_scaling(flags: &ScalingFlags) -> anyhow::Result<()> {
    let config = flags.train.resolve_for(Tool::BenchScaling)?;
    let printer = Printer::new(config.output.log_format);
    let (steps, repetitions) = (flags.steps as usize, flags.repetitions as usize);
    commands::bench_scaling(config, steps, repetitions, &cuda::load(), &printer)
}

fn verify(flags: &VerifyFlags) -> anyhow::Result<()> {
    let config = flags.train.resolve_for(Tool::Verify)?;
    let printer = Printer::new(config.output.log_format);
    commands::verify(config, flags.steps, flags.per_parameter, &cuda::load(), &printer)
}

fn env(flags: &TrainFlags) -> anyhow::Result<()> {
    let config = flags.resolve()?;
    let printer = Printer::new(config.output.log_format);
    commands::env(&config, &cuda::load(), &printer)
}
