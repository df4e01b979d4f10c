//! A queue of lines and metrics for the live view.

use parking_lot::Mutex;

use super::{HeldOutput, Stream};
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
    /// The steps of the run.
    steps: Option<u64>,
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

    /// Notes that the run has `steps` steps.
    pub(crate) fn begin(&self, steps: u64) {
        self.0.lock().steps = Some(steps);
    }

    /// Adds the metrics of training.
    pub(crate) fn train(&self, metrics: &TrainMetrics) {
        self.0.lock().points.push(metrics.clone());
    }

    /// Takes the lines and the metrics that have come since the last call. The steps of the run are `None` until they are
    /// known.
    pub(super) fn take(&self) -> (Vec<String>, Vec<TrainMetrics>, Option<u64>) {
        let mut state = self.0.lock();
        (std::mem::take(&mut state.lines), std::mem::take(&mut state.points), state.steps)
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
        assert_eq!(feed.take(), (vec!["one".into(), "two".into()], Vec::new(), None));
        feed.begin(10);
        assert_eq!(feed.take(), (Vec::new(), Vec::new(), Some(10)));
    }
}
