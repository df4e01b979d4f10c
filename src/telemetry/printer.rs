//! The one writer that all ranks share.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, IsTerminal, StderrLock, StdoutLock, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::progress::Progress;
use super::{Epoch, Event, Straggler, ValidationMetrics};
use crate::error::escaped;
use crate::ffi::limits::explain;

/// How results are written: `--log-format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Writes results to stdout and everything else to stderr, a whole line at a time.
///
/// Ranks end an epoch in any order; their lines come out in the order of the ranks, when all are there.
#[derive(Debug)]
pub struct Printer {
    format: LogFormat,
    /// Lines of epochs that not all ranks have ended.
    waiting: Mutex<BTreeMap<u64, Vec<Epoch>>>,
    progress: Mutex<Option<Progress>>,
}

impl Printer {
    /// A printer for the process's stdout and stderr.
    pub fn new(format: LogFormat) -> Self {
        Self { format, waiting: Mutex::default(), progress: Mutex::default() }
    }

    /// How this printer writes.
    pub fn format(&self) -> LogFormat {
        self.format
    }

    /// Prints an event.
    ///
    /// # Errors
    /// When stdout cannot be written, unless its reader has just left.
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
        match (self.format, event) {
            (LogFormat::Json, event) => self.object(event),
            (LogFormat::Text, Event::Start(start)) => {
                self.line(&format!("GPU_Count: {}", start.gpu_count))
            }
            (LogFormat::Text, Event::Epoch(epoch)) => self.line(&epoch_line(epoch)),
            (LogFormat::Text, Event::Validation(validation)) => {
                let ValidationMetrics { epoch, loss, accuracy, best, .. } = validation;
                let accuracy = accuracy
                    .map_or(String::new(), |share| format!(", accuracy {:.2} %", 100.0 * share));
                let best = if *best { " (best so far)" } else { "" };
                self.info(&format!(
                    "validation after epoch {epoch}: loss {loss:.6}{accuracy}{best}"
                ));
                Ok(())
            }
            (LogFormat::Text, Event::End(end)) => {
                let (first, last) = (end.first_loss, end.loss);
                let losses = if first.to_bits() == last.to_bits() {
                    format!("{last:.6}")
                } else {
                    format!("{first:.6} -> {last:.6}")
                };
                let each = match end.steps_now {
                    0 => String::new(),
                    _ => format!(", {:.0} us each", end.us_per_step),
                };
                if end.replicas_equal == Some(false) {
                    // The run fails: its last line says so, and no other line that it went well.
                    self.info(
                        "the ranks do not hold the same parameters; --check-replicas-every 1 finds the step, the rank and \
                         the parameter",
                    );
                    return Ok(());
                }
                if let Some(held) = &end.straggler {
                    let (Straggler { rank, seconds, phase_seconds, .. }, place) =
                        (held, held.place());
                    self.info(&format!(
                        "rank {rank} held the others back: they waited for it for {seconds:.1} of {:.1} s; it was \
                         {phase_seconds:.1} s slower than they {place}",
                        end.seconds
                    ));
                }
                for (number, reason) in (1..).zip(&end.restarts) {
                    self.info(&format!("restart {number} was needed: {reason}"));
                }
                self.info(&format!(
                    "loss {losses}; {} steps in {:.3} s{each}; parameters {}",
                    end.steps_now, end.seconds, end.parameters_hash
                ));
                Ok(())
            }
            // The text of a failure is for stderr, with all that is known.
            (LogFormat::Text, Event::Failure(_)) => Ok(()),
        }
    }

    /// Takes one rank's report of an epoch; prints those of all `world_size` ranks once the last is in.
    ///
    /// # Errors
    /// As [`Printer::event`].
    pub fn epoch(&self, epoch: Epoch, world_size: usize) -> io::Result<()> {
        let mut waiting = self.waiting();
        let reports = waiting.entry(epoch.epoch).or_default();
        let number = epoch.epoch;
        reports.push(epoch);
        if reports.len() < world_size {
            return Ok(());
        }
        let mut reports = waiting.remove(&number).unwrap_or_default();
        reports.sort_by_key(|report| report.rank);
        // Still locked: the lines of two epochs must not mix.
        // Which is the same on all ranks, and told once, where rank 0 is.
        let first = reports.first_mut().filter(|report| report.rank == 0);
        let loss = first.as_ref().map(|report| report.loss);
        let validation = first.and_then(|report| report.validation.take());
        reports.into_iter().try_for_each(|report| self.event(&Event::Epoch(report)))?;
        if let (LogFormat::Text, Some(loss)) = (self.format, loss) {
            self.info(&format!("epoch {number}: loss {loss:.6}"));
        }
        validation.map_or(Ok(()), |metrics| self.event(&Event::Validation(metrics)))
    }

    /// Prints what ranks reported of epochs that not all ranks came to the end of.
    ///
    /// # Errors
    /// As [`Printer::event`].
    pub fn flush_epochs(&self) -> io::Result<()> {
        let reports = std::mem::take(&mut *self.waiting());
        reports.into_values().flatten().try_for_each(|r| self.event(&Event::Epoch(r)))
    }

    /// Prints one object as a line of JSON.
    ///
    /// # Errors
    /// As [`Printer::event`].
    pub fn object(&self, object: &impl Serialize) -> io::Result<()> {
        self.line(&serde_json::to_string(object).map_err(io::Error::other)?)
    }

    /// Prints a line on stdout.
    ///
    /// # Errors
    /// As [`Printer::event`].
    pub fn line(&self, line: &str) -> io::Result<()> {
        self.lines(|out| writeln!(out, "{line}"))
    }

    /// Prints many lines on stdout at once.
    ///
    /// # Errors
    /// As [`Printer::event`].
    pub fn lines(&self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
        self.beside_progress(|| Self::write(write))
    }

    fn write(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
        let mut out = Escaping { out: io::BufWriter::new(stdout()), line: Vec::new() };
        match write(&mut out).and_then(|()| out.flush()) {
            // Who reads us has seen enough (`| head`): that is no failure.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                let _ = out.out.into_parts(); // drops what could not be written
                Ok(())
            }
            result => result.map_err(|error| io::Error::new(error.kind(), explain(&error))),
        }
    }

    /// Prints a remark on stderr. An error that says that a limit of the system is reached is explained.
    pub fn info(&self, note: &str) {
        // In one piece: stderr has no buffer, and the lines of several processes must not mix.
        let line = format!("ddp-mp: {}\n", escaped(&explain(note)));
        // With stderr gone there is nobody to tell.
        self.beside_progress(|| drop(stderr().write_all(line.as_bytes())));
    }

    /// Whether somebody sees a progress bar: stderr is a terminal, and results are for people.
    pub fn shows_progress(&self) -> bool {
        self.format == LogFormat::Text && io::stderr().is_terminal()
    }

    /// On a terminal, shows how far a run of so many steps is, `done` of which have been made, until
    /// [`end_progress`](Self::end_progress).
    pub fn start_progress(&self, steps: u64, done: u64) {
        if self.shows_progress() {
            *self.bar() = Some(Progress::new(steps, done));
        }
    }

    /// Shows that `step` steps have been made, and how it goes.
    pub fn progress(&self, step: u64, message: &str) {
        if let Some(progress) = &*self.bar() {
            progress.set(step, message);
        }
    }

    /// Takes the bar away.
    pub fn end_progress(&self) {
        *self.bar() = None;
    }

    fn bar(&self) -> MutexGuard<'_, Option<Progress>> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prints where the bar is not.
    fn beside_progress<T>(&self, print: impl FnOnce() -> T) -> T {
        match &*self.bar() {
            Some(progress) => progress.suspend(print),
            None => print(),
        }
    }

    fn waiting(&self) -> MutexGuard<'_, BTreeMap<u64, Vec<Epoch>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes whole lines, escaped: names of hosts, files and variables are other people's text.
struct Escaping<W> {
    out: W,
    /// What has come since the last line break.
    line: Vec<u8>,
}

impl<W: Write> Write for Escaping<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let end = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        self.line.extend_from_slice(&bytes[..end]);
        if end > 0 {
            self.out.write_all(escaped(&String::from_utf8_lossy(&self.line)).as_bytes())?;
            self.line.clear();
        }
        self.line.extend_from_slice(&bytes[end..]);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.write_all(escaped(&String::from_utf8_lossy(&self.line)).as_bytes())?;
        self.line.clear();
        self.out.flush()
    }
}

fn epoch_line(epoch: &Epoch) -> String {
    let Epoch { device, epoch, batch_size, steps, .. } = epoch;
    format!("{device} | Epoch: {epoch} | Batchsize: {batch_size} | Steps: {steps}")
}

fn stdout() -> StdoutLock<'static> {
    io::stdout().lock()
}

fn stderr() -> StderrLock<'static> {
    io::stderr().lock()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_escaped_however_they_are_cut() {
        let text = "{\"host\":\"a\u{9b}2J\"}\n\u{1b}[31mrank\t0 ä";
        let expected = "{\"host\":\"a\\u009b2J\"}\n\\u001b[31mrank\t0 ä";
        for cut in 0..=text.len() {
            let mut out = Escaping { out: Vec::new(), line: Vec::new() };
            out.write_all(&text.as_bytes()[..cut]).unwrap();
            out.write_all(&text.as_bytes()[cut..]).unwrap();
            out.flush().unwrap();
            assert_eq!(String::from_utf8(out.out).unwrap(), expected, "cut at {cut}");
        }
    }
}
