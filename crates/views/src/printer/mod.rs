//! The printer: results on stdout, messages and progress on stderr. The ranks of a process share it.

mod feed;
mod progress;
mod progress_clock;
mod utf8_stream;

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::{FileType, fstat};
use rustix::io::Errno;
use serde::Serialize;
use serde_with::SerializeDisplay;
use strum::{Display, EnumString, VariantNames};

use engine::error::{counted, escaped};
use engine::events::{End, Epoch, Event, Observer, Straggler, TrainingStart, Wants};
use engine::os::Stream;
use engine::os::limits::explain;
use engine::os::terminal::{message, screen_problem};
use engine::records::{TrainMetrics, ValidationMetrics};

pub(crate) use feed::Feed;
use progress::Progress;
use progress_clock::ProgressClock;
pub use utf8_stream::Utf8Stream;

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
    /// Epochs that not all ranks have finished, by their number.
    waiting: Mutex<BTreeMap<u64, Vec<Epoch>>>,
    /// When progress is shown next.
    progress: Mutex<ProgressClock>,
    display: Mutex<Display>,
    /// Whether the live view is to be shown, and can be.
    #[doc(hidden)]
    pub shows_live: bool,
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
        Self {
            format,
            waiting: Mutex::default(),
            progress: Mutex::default(),
            display: Mutex::default(),
            shows_live: false,
            is_quiet: false,
        }
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

    /// Prints an event, if it is a result or a message.
    ///
    /// # Errors
    /// When stdout cannot be written, unless its reader has closed the pipe.
    pub fn print(&self, event: &Event) -> io::Result<()> {
        let is_text = self.format == LogFormat::Text;
        match event {
            Event::Note { text } => self.info(text),
            Event::Warning { text } => self.report(text),
            Event::Training(training) => self.start_progress(training),
            Event::Step { step, steps } => self.step(*step, *steps),
            Event::Metrics(metrics) => self.show_metrics(metrics),
            Event::Epoch(epoch) => return self.epoch(epoch.clone()),
            Event::Ended { .. } => self.end_progress(),
            Event::Start(start) if is_text && !start.is_known => {
                return self.line(&format!("GPU_Count: {}", start.gpu_count));
            }
            Event::End(end) => {
                self.end_progress();
                self.note_skipped_steps(end);
                if !is_text {
                    return self.object(event);
                }
                self.end(end);
            }
            // In text, its error goes to stderr, with all that is known.
            Event::Start(_) | Event::Failure { .. } if !is_text => return self.object(event),
            _ => {}
        }
        Ok(())
    }

    fn note_skipped_steps(&self, end: &End) {
        let Some(skipped @ 1..) = end.skipped_steps else { return };
        let why = match end.scale {
            Some(scale) => {
                format!("scaled gradients were not finite; the loss scale is {scale} now")
            }
            None => "losses or gradients were not finite".into(),
        };
        self.info(&format!("{skipped} of {} steps skipped: {why}", end.steps));
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

    /// Adds one rank's epoch. Prints those of all ranks of the process once the last has arrived.
    fn epoch(&self, epoch: Epoch) -> io::Result<()> {
        let mut waiting = self.waiting.lock();
        let (number, world_size) = (epoch.epoch, epoch.local_world_size);
        let epochs = waiting.entry(number).or_default();
        epochs.push(epoch);
        if epochs.len() < world_size {
            return Ok(());
        }
        let epochs = waiting.remove(&number).unwrap_or_default();
        // Still locked: the lines of two epochs must not mix.
        self.epochs(epochs)
    }

    /// Prints the epochs that not all ranks finished, when the ranks have ended.
    ///
    /// # Errors
    /// The errors of [`Printer::print`].
    pub fn flush_epochs(&self) -> io::Result<()> {
        let waiting = std::mem::take(&mut *self.waiting.lock());
        waiting.into_values().try_for_each(|epochs| self.epochs(epochs))
    }

    /// Prints the same epoch of several ranks. Loss and validation are the same on all ranks, and are printed once, in the
    /// process of rank 0.
    fn epochs(&self, mut epochs: Vec<Epoch>) -> io::Result<()> {
        epochs.sort_by_key(|epoch| epoch.rank);
        let of_rank_0 = epochs.first_mut().filter(|epoch| epoch.rank == 0);
        let validation = of_rank_0.and_then(|epoch| epoch.validation.take());
        if self.format == LogFormat::Json {
            epochs.into_iter().try_for_each(|epoch| self.object(&Event::Epoch(epoch)))?;
            return match validation {
                Some(validation) => self.object(&Event::Validation(validation)),
                None => Ok(()),
            };
        }
        for Epoch { device, epoch, batch_size, steps, .. } in &epochs {
            self.line(&format!(
                "{device} | Epoch: {epoch} | Batchsize: {batch_size} | Steps: {steps}"
            ))?;
        }
        if let Some(Epoch { rank: 0, epoch, loss, .. }) = epochs.first() {
            self.info(&format!("epoch {epoch}: loss {loss:.6}"));
        }
        if let Some(validation) = validation {
            let best = if validation.best { " (best so far)" } else { "" };
            let text = validation_text(&validation);
            self.info(&format!("validation after epoch {}: {text}{best}", validation.epoch));
        }
        Ok(())
    }

    /// Prints a result: `object` as a line of JSON, or the text that `write` writes.
    ///
    /// # Errors
    /// As [`Printer::print`].
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
    /// The errors of [`Printer::print`].
    pub fn object(&self, object: &impl Serialize) -> io::Result<()> {
        self.line(&serde_json::to_string(object).map_err(io::Error::other)?)
    }

    /// Prints a line on stdout.
    ///
    /// # Errors
    /// The errors of [`Printer::print`].
    pub fn line(&self, line: &str) -> io::Result<()> {
        self.lines(|out| writeln!(out, "{line}"))
    }

    /// Prints text on stdout, perhaps a part of a line. It is escaped: names of hosts, files and variables are untrusted text.
    /// Returns `false` if the reader has closed the pipe.
    ///
    /// # Errors
    /// The errors of [`Printer::print`].
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
    /// The errors of [`Printer::print`].
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
        let _ = self.show(Stream::Stderr, &message(text));
    }

    /// Returns whether a bar is to show progress: if stderr is a terminal, and results are text for people.
    fn shows_bar(&self) -> bool {
        !self.is_quiet && self.format == LogFormat::Text && io::stderr().is_terminal()
    }

    /// Begins to show progress: by a bar, where there is one.
    fn start_progress(&self, training: &TrainingStart) {
        *self.progress.lock() = ProgressClock::new(training.step);
        let mut display = self.display.lock();
        if !matches!(*display, Display::Live(_)) && self.shows_bar() {
            let bar = Progress::new(training.steps, training.step);
            *display = bar.map_or(Display::Nothing, Display::Progress);
        }
    }

    /// Shows the metrics of training in the bar.
    fn show_metrics(&self, metrics: &TrainMetrics) {
        if let Display::Progress(progress) = &mut *self.display.lock() {
            progress.set(metrics.step, Some(train_texts(metrics).join(", ")));
        }
    }

    /// Shows now and then that `step` of `steps` steps have been made: in the progress bar, or as a note where nothing shows
    /// progress.
    fn step(&self, step: u64, steps: u64) {
        let mut clock = self.progress.lock();
        let Some(elapsed) = clock.due() else { return };
        let mut display = self.display.lock();
        clock.set_next(elapsed, !matches!(*display, Display::Nothing));
        let left = clock.time_left(elapsed, step, steps);
        match &mut *display {
            Display::Nothing => {}
            Display::Progress(progress) => return progress.set(step, None),
            Display::Live(_) => return,
        }
        drop(display);
        self.info(&format!("step {step} of {steps}, about {left:.0} s left"));
    }

    /// Removes the progress bar.
    pub fn end_progress(&self) {
        let mut display = self.display.lock();
        if matches!(*display, Display::Progress(_)) {
            *display = Display::Nothing;
        }
    }

    /// Hands all lines for the terminal to the live view from now on.
    pub(crate) fn open_live(&self) -> Arc<Mutex<Feed>> {
        let feed = Arc::<Mutex<Feed>>::default();
        *self.display.lock() = Display::Live(feed.clone());
        feed
    }

    /// Prints the lines for the terminal that the live view got, and all later ones.
    pub fn close_live(&self) {
        let mut display = self.display.lock();
        if let Display::Live(feed) = std::mem::take(&mut *display) {
            feed.lock().held.print();
        }
    }
}

impl Observer for Printer {
    fn wants(&self) -> Wants {
        Wants { messages: true, metrics: self.shows_bar(), ..Wants::default() }
    }

    /// Prints every event but a failure. Whoever has started the ranks prints that, after all of their lines.
    fn event(&self, event: &Event) -> anyhow::Result<()> {
        if matches!(event, Event::Failure { .. }) {
            return Ok(());
        }
        Ok(self.print(event)?)
    }
}

/// Returns the loss, the learning rate and the rate of training, such as `1234 samples/s`.
pub fn train_texts(metrics: &TrainMetrics) -> [String; 3] {
    let TrainMetrics { loss, lr, samples_per_second, tokens_per_second, .. } = metrics;
    let rate = match tokens_per_second {
        Some(tokens) => format!("{tokens:.0} tokens/s"),
        None => format!("{samples_per_second:.0} samples/s"),
    };
    [format!("loss {loss:.4}"), format!("lr {lr:.3e}"), rate]
}

/// Returns the numbers of a validation: `loss 1.234567, accuracy 51.20 %, f1 0.765432`.
pub fn validation_text(validation: &ValidationMetrics) -> String {
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
        || (Errno::from_io_error(error) == Some(Errno::IO) && is_device())
}

/// Returns the error of writing to stdout, with the limit of the system that caused it explained.
pub fn unwritable_stdout(error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("writing to stdout: {}", explain(error)))
}
