//! The writer that all ranks share.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::{FileType, fstat};
use serde::Serialize;
use serde_with::SerializeDisplay;
use strum::{Display, EnumString, VariantNames};

use super::feed::Feed;
use super::progress::Progress;
use super::{End, Epoch, Event, Straggler, Stream};
use crate::error::{counted, escaped};
use crate::os::limits::explain;
use crate::os::terminal::screen_problem;
use crate::records::{TrainMetrics, ValidationMetrics};

/// The format of results: `--log-format`.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Display, EnumString, VariantNames, SerializeDisplay,
)]
#[strum(serialize_all = "lowercase")]
pub enum LogFormat {
    /// Text for people.
    Text,
    /// One JSON object per line.
    Json,
}

/// A writer of results to stdout and of everything else to stderr, a whole line at a time.
///
/// Ranks finish an epoch in any order. Their lines are printed in the order of the ranks, once all have finished.
#[derive(Debug)]
pub struct Printer {
    format: LogFormat,
    /// Reports of epochs that not all ranks have finished, by epoch.
    waiting: Mutex<BTreeMap<u64, Vec<Epoch>>>,
    display: Mutex<Display>,
    /// Whether the live view is to be shown, and can be.
    pub(crate) shows_live: bool,
    /// Whether notes and the progress bar are left out.
    is_quiet: bool,
}

/// What is shown on the terminal besides lines.
#[derive(Debug, Default)]
enum Display {
    #[default]
    Nothing,
    Progress(Progress),
    /// The live view, which gets the lines.
    Live(Arc<Mutex<Feed>>),
}

impl Printer {
    /// Creates a printer for the process's stdout and stderr.
    pub fn new(format: LogFormat) -> Self {
        let (waiting, display) = (Mutex::new(BTreeMap::new()), Mutex::new(Display::Nothing));
        Self { format, waiting, display, shows_live: false, is_quiet: false }
    }

    /// Sets whether notes and the progress bar are left out. Failures are still printed.
    pub fn quiet(self, wanted: bool) -> Self {
        Self { is_quiet: wanted, ..self }
    }

    /// Sets whether the live view is to be shown where there is a terminal for it.
    pub fn live(self, wanted: bool) -> Self {
        Self { shows_live: wanted && screen_problem().is_none(), ..self }
    }

    /// Returns the format of results.
    pub fn format(&self) -> LogFormat {
        self.format
    }

    /// Prints an event.
    ///
    /// # Errors
    /// When stdout cannot be written, unless its reader has closed the pipe.
    pub fn event(&self, event: &Event) -> io::Result<()> {
        if let Event::End(end) = event
            && let Some(skipped @ 1..) = end.skipped_steps
        {
            let why = match end.scale {
                Some(scale) => {
                    format!("scaled gradients were not finite; the loss scale is {scale} now")
                }
                None => "losses or gradients were not finite".into(),
            };
            self.info(&format!("{skipped} of {} steps skipped: {why}", end.steps));
        }
        if self.format == LogFormat::Json {
            return self.object(event);
        }
        match event {
            Event::Start(start) => self.line(&format!("GPU_Count: {}", start.gpu_count))?,
            Event::Epoch(Epoch { device, epoch, batch_size, steps, .. }) => self.line(&format!(
                "{device} | Epoch: {epoch} | Batchsize: {batch_size} | Steps: {steps}"
            ))?,
            Event::Validation(validation) => {
                let best = if validation.best { " (best so far)" } else { "" };
                let (epoch, text) = (validation.epoch, validation_text(validation));
                self.info(&format!("validation after epoch {epoch}: {text}{best}"));
            }
            Event::End(end) => self.end(end),
            Event::Failure { .. } => {} // its text goes to stderr, with all that is known
        }
        Ok(())
    }

    /// Prints how a run ended.
    fn end(&self, end: &End) {
        if !end.replicas_equal {
            // The run fails: its last line reports that, and no other line may report success.
            self.report(
                "the ranks do not hold the same parameters; --check-replicas-every 1 finds the step at which they \
                 began to differ",
            );
            return;
        }
        if let Some(straggler) = &end.straggler {
            let Straggler { rank, seconds, phase_seconds, .. } = straggler;
            let phase_text = straggler.phase_text();
            self.info(&format!(
                "rank {rank} was the straggler: the others waited {seconds:.1} of {:.1} s for it; it was \
                 {phase_seconds:.1} s slower than they were {phase_text}",
                end.seconds
            ));
        }
        for (number, reason) in (1..).zip(&end.restarts) {
            self.info(&format!("restart {number} was needed: {reason}"));
        }
        let (first, last) = (end.first_loss, end.loss);
        let losses = if first.to_bits() == last.to_bits() {
            format!("{last:.6}")
        } else {
            format!("{first:.6} -> {last:.6}")
        };
        let each = match end.steps_now {
            0 | 1 => String::new(),
            _ => format!(", {:.0} us each", end.us_per_step),
        };
        self.info(&format!(
            "loss {losses}; {} in {:.3} s{each}; parameters {}",
            counted(end.steps_now, "step"),
            end.seconds,
            end.parameters_hash
        ));
    }

    /// Adds one rank's report of an epoch. Prints the reports of all `world_size` ranks once the last has arrived.
    ///
    /// # Errors
    /// The errors of [`Printer::event`].
    pub fn epoch(&self, epoch: Epoch, world_size: usize) -> io::Result<()> {
        let mut waiting = self.waiting.lock();
        let reports = waiting.entry(epoch.epoch).or_default();
        let number = epoch.epoch;
        reports.push(epoch);
        if reports.len() < world_size {
            return Ok(());
        }
        let mut reports = waiting.remove(&number).unwrap_or_default();
        reports.sort_by_key(|report| report.rank);
        // Still locked: the lines of two epochs must not mix.
        // Loss and validation are the same on all ranks. They are printed once, in the process of rank 0.
        let first = reports.first_mut().filter(|report| report.rank == 0);
        let loss = first.as_ref().map(|report| report.loss);
        let validation = first.and_then(|report| report.validation.take());
        reports.into_iter().map(Event::Epoch).try_for_each(|report| self.event(&report))?;
        if let (LogFormat::Text, Some(loss)) = (self.format, loss) {
            self.info(&format!("epoch {number}: loss {loss:.6}"));
        }
        match validation {
            Some(metrics) => self.event(&Event::Validation(metrics)),
            None => Ok(()),
        }
    }

    /// Prints the reports of epochs that not all ranks finished.
    ///
    /// # Errors
    /// The errors of [`Printer::event`].
    pub fn flush_epochs(&self) -> io::Result<()> {
        let reports = std::mem::take(&mut *self.waiting.lock()).into_values().flatten();
        reports.map(Event::Epoch).try_for_each(|report| self.event(&report))
    }

    /// Prints a result: `object` as a line of JSON, or the text that `write` writes.
    ///
    /// # Errors
    /// As [`Printer::event`].
    pub fn result(
        &self,
        object: &impl Serialize,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<()> {
        match self.format {
            LogFormat::Json => self.object(object),
            LogFormat::Text => self.lines(write),
        }
    }

    /// Prints one object as a line of JSON.
    ///
    /// # Errors
    /// The errors of [`Printer::event`].
    pub fn object(&self, object: &impl Serialize) -> io::Result<()> {
        self.line(&serde_json::to_string(object).map_err(io::Error::other)?)
    }

    /// Prints a line on stdout.
    ///
    /// # Errors
    /// The errors of [`Printer::event`].
    pub fn line(&self, line: &str) -> io::Result<()> {
        self.lines(|out| writeln!(out, "{line}"))
    }

    /// Prints text on stdout, perhaps a part of a line. It is escaped: names of hosts, files and variables are untrusted text.
    /// Returns `false` if the reader has closed the pipe.
    ///
    /// # Errors
    /// The errors of [`Printer::event`].
    pub(super) fn text(&self, text: &str) -> io::Result<bool> {
        let mut out = io::stdout().lock();
        match out.write_all(escaped(text).as_bytes()).and_then(|()| out.flush()) {
            Err(error) if nobody_reads(&error) => Ok(false),
            result => result.map(|()| true).map_err(unwritable_stdout),
        }
    }

    /// Prints many lines on stdout at once.
    ///
    /// # Errors
    /// The errors of [`Printer::event`].
    pub fn lines(&self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
        let mut text = Vec::new();
        write(&mut text)?;
        self.show(Stream::Stdout, &String::from_utf8_lossy(&text))
    }

    /// Prints text on `stream`, beside the progress bar. The live view shows it too, unless it is JSON, and keeps what is for
    /// the terminal until it closes.
    fn show(&self, stream: Stream, text: &str) -> io::Result<()> {
        let text = escaped(text);
        let print = || match stream {
            Stream::Stdout => self.text(&text).map(drop),
            // One write: stderr has no buffer, and the lines of several processes must not mix.
            Stream::Stderr => io::stderr().lock().write_all(text.as_bytes()),
        };
        let is_stdout = stream == Stream::Stdout;
        match &*self.display.lock() {
            Display::Nothing => print(),
            Display::Progress(progress) => progress.suspend(print),
            Display::Live(feed) => {
                if !is_stdout || self.format == LogFormat::Text {
                    feed.lock().line(&text);
                }
                if is_stdout && !io::stdout().is_terminal() {
                    return print();
                }
                feed.lock().held.add(stream, text.as_bytes());
                Ok(())
            }
        }
    }

    /// Prints a note on stderr, unless notes are left out.
    pub fn info(&self, note: &str) {
        if !self.is_quiet {
            self.report(note);
        }
    }

    /// Prints on stderr what the user must see or has asked for: a failure, a warning of one, a status table. If a
    /// system limit caused an error in it, the limit is explained.
    pub fn report(&self, text: &str) {
        // Errors are ignored: without stderr they cannot be reported.
        let _ = self.show(Stream::Stderr, &format!("ddp-mp: {}\n", explain(text)));
    }

    /// Returns whether progress is shown: in the live view, or as a bar, if stderr is a terminal and results are text
    /// for people.
    pub fn shows_progress(&self) -> bool {
        self.shows_live || self.shows_bar()
    }

    fn shows_bar(&self) -> bool {
        !self.is_quiet && self.format == LogFormat::Text && io::stderr().is_terminal()
    }

    /// Shows a progress bar if stderr is a terminal, until [`end_progress`](Self::end_progress), unless the live view
    /// is shown. The run has `steps` steps, of which `done` have been made.
    pub fn start_progress(&self, steps: u64, done: u64) {
        let mut display = self.display.lock();
        match &*display {
            Display::Live(feed) => feed.lock().steps = Some(steps),
            _ if !self.shows_bar() => {}
            _ => *display = Progress::new(steps, done).map_or(Display::Nothing, Display::Progress),
        }
    }

    /// Shows the metrics of training.
    pub(super) fn progress(&self, metrics: &TrainMetrics) {
        match &mut *self.display.lock() {
            Display::Nothing => {}
            Display::Progress(progress) => {
                progress.set(metrics.step, Some(train_texts(metrics).join(", ")));
            }
            Display::Live(feed) => feed.lock().points.push(metrics.clone()),
        }
    }

    /// Shows that `step` steps have been made: in the progress bar, or as the note `text` where nothing shows progress.
    pub(crate) fn step(&self, step: u64, text: &str) {
        match &mut *self.display.lock() {
            Display::Nothing => {}
            Display::Progress(progress) => return progress.set(step, None),
            Display::Live(_) => return,
        }
        self.info(text);
    }

    /// Removes the progress bar.
    pub fn end_progress(&self) {
        let mut display = self.display.lock();
        if matches!(*display, Display::Progress(_)) {
            *display = Display::Nothing;
        }
    }

    /// Hands all lines for the terminal to the live view from now on, and the metrics.
    pub(super) fn open_live(&self) -> Arc<Mutex<Feed>> {
        let feed = Arc::<Mutex<Feed>>::default();
        *self.display.lock() = Display::Live(feed.clone());
        feed
    }

    /// Prints the lines for the terminal that the live view got, and all later ones.
    pub(super) fn close_live(&self) {
        let mut display = self.display.lock();
        if let Display::Live(feed) = std::mem::take(&mut *display) {
            feed.lock().held.print();
        }
    }
}

/// Returns the loss, the learning rate and the rate of training, such as `1234 samples/s`.
pub(crate) fn train_texts(metrics: &TrainMetrics) -> [String; 3] {
    let TrainMetrics { loss, lr, samples_per_second, tokens_per_second, .. } = metrics;
    let rate = match tokens_per_second {
        Some(tokens) => format!("{tokens:.0} tokens/s"),
        None => format!("{samples_per_second:.0} samples/s"),
    };
    [format!("loss {loss:.4}"), format!("lr {lr:.3e}"), rate]
}

/// Returns the numbers of a validation: `loss 1.234567, accuracy 51.20 %, f1 0.765432`.
pub(crate) fn validation_text(validation: &ValidationMetrics) -> String {
    let ValidationMetrics { loss, bits_per_token, accuracy, metrics, .. } = validation;
    let bits = bits_per_token.map_or(String::new(), |bits| format!(", {bits:.3} bits per token"));
    let accuracy =
        accuracy.map_or(String::new(), |share| format!(", accuracy {:.2} %", 100.0 * share));
    let metrics: String =
        metrics.iter().map(|(name, value)| format!(", {name} {value:.6}")).collect();
    format!("loss {loss:.6}{bits}{accuracy}{metrics}")
}

/// Returns whether stdout could not be written because its reader has closed the pipe (`| head`), or because the terminal is
/// gone. Neither is a failure.
fn nobody_reads(error: &io::Error) -> bool {
    let is_device = || {
        let stdout = fstat(io::stdout()).map(|found| FileType::from_raw_mode(found.st_mode));
        stdout == Ok(FileType::CharacterDevice)
    };
    error.kind() == ErrorKind::BrokenPipe
        || (error.raw_os_error() == Some(libc::EIO) && is_device())
}

/// Returns the error of writing to stdout, with the limit of the system that caused it explained.
pub fn unwritable_stdout(error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("writing to stdout: {}", explain(error)))
}
