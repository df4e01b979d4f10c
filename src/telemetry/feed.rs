//! A queue of lines and metrics for the live view.

use parking_lot::Mutex;

use super::{HeldOutput, Stream};
use crate::error::escaped;
use crate::records::TrainMetrics;

/// What the view shows besides the ranks. The ranks and other threads write, the view reads.
#[derive(Debug, Default)]
pub(crate) struct Feed(Mutex<FeedState>);

#[derive(Debug, Default)]
struct FeedState {
    /// Lines that the view has not taken yet.
    lines: Vec<String>,
    /// Text for the terminal, which is printed when the view has closed.
    held: HeldOutput,
    /// Metrics that the view has not taken yet.
    points: Vec<TrainMetrics>,
    /// The steps of the run, and those made before it was resumed.
    steps: Option<[u64; 2]>,
}

impl Feed {
    /// Adds a line to the view's events.
    pub(crate) fn line(&self, line: &str) {
        self.0.lock().lines.extend(line.lines().map(str::to_owned));
    }

    /// Keeps text for the terminal until the view has closed.
    pub(crate) fn hold(&self, stream: Stream, text: &[u8]) {
        self.0.lock().held.add(stream, text);
    }

    /// Adds a note to the events, and keeps it for stderr.
    pub(crate) fn note(&self, text: &str) {
        let line = format!("ddp-mp: {}\n", escaped(text));
        self.line(&line);
        self.hold(Stream::Stderr, line.as_bytes());
    }

    /// Notes that the run has `steps` steps, of which `done` have been made.
    pub(crate) fn begin(&self, steps: u64, done: u64) {
        self.0.lock().steps = Some([steps, done]);
    }

    /// Adds the metrics of training.
    pub(crate) fn train(&self, metrics: &TrainMetrics) {
        self.0.lock().points.push(metrics.clone());
    }

    /// Takes the lines that have come since the last call.
    pub(super) fn take_lines(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().lines)
    }

    /// Takes the metrics that have come since the last call.
    pub(super) fn take_points(&self) -> Vec<TrainMetrics> {
        std::mem::take(&mut self.0.lock().points)
    }

    /// Returns the steps of the run, and those made before it was resumed; `None` until that is known.
    pub(super) fn steps(&self) -> Option<[u64; 2]> {
        self.0.lock().steps
    }

    /// Prints the text that was held, in its order.
    pub(super) fn print_held(&self) {
        self.0.lock().held.print();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_metrics_are_taken_once() {
        let feed = Feed::default();
        feed.line("one\ntwo\n");
        assert_eq!(
            (feed.take_lines(), feed.take_lines().len()),
            (vec!["one".into(), "two".into()], 0)
        );
        assert_eq!(feed.steps(), None);
        feed.begin(10, 3);
        assert_eq!(feed.steps(), Some([10, 3]));
    }
}
