//! `ddp-mp replay`: recorded traces in the live view.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::telemetry::{Player, Printer, SPEEDS};

/// The columns and lines of a frame that is printed.
const FRAME: [u16; 2] = [100, 24];

/// The flags of `replay`.
#[derive(Debug, Clone, Args)]
pub struct ReplayFlags {
    /// Play these files of --trace, one from each process
    #[arg(value_name = "TRACE", required = true)]
    pub traces: Vec<PathBuf>,
    /// Play at X times the speed of the run
    ///
    /// 0.1 is ten times as slow
    #[arg(long, value_name = "X", value_parser = speed, default_value_t = 1.0)]
    pub speed: f64,
    /// Print the frame at this time as text
    #[arg(long, value_name = "SECONDS", value_parser = seconds, conflicts_with = "speed")]
    pub frame: Option<Duration>,
}

fn speed(text: &str) -> Result<f64, String> {
    let [slowest, fastest] = SPEEDS;
    let speed = text.parse().ok().filter(|speed| (slowest..=fastest).contains(speed));
    speed.ok_or_else(|| format!("use a number from {slowest} to {fastest}"))
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| "use a number of seconds, such as 0.25".into())
}

/// Plays the traces on the terminal, or prints one frame.
///
/// # Errors
/// [`Error::InvalidInput`](crate::Error::InvalidInput) if they are no traces of one run, and without a terminal to play
/// them on.
pub fn replay(flags: &ReplayFlags, printer: &Printer) -> anyhow::Result<()> {
    let player = Player::new(&flags.traces, flags.speed)?;
    let Some(time) = flags.frame else { return player.play() };
    let frame = player.frame(time, FRAME)?;
    Ok(printer.lines(|out| out.write_all(frame.as_bytes()))?)
}
