//! A queue of lines and metrics for the live view.

use engine::os::HeldOutput;
use engine::records::TrainMetrics;

/// What the view shows besides the ranks. The ranks and other threads write, the view reads.
#[derive(Debug, Default)]
pub(crate) struct Feed {
    /// Lines that the view has not taken yet.
    lines: Vec<String>,
    /// Text for the terminal, which is printed when the view has closed.
    pub held: HeldOutput,
    /// Metrics of training that the view has not taken yet.
    pub points: Vec<TrainMetrics>,
    /// The steps of the run; `None` until they are known.
    pub steps: Option<u64>,
}

impl Feed {
    /// Adds a line to the view's events.
    pub(crate) fn line(&mut self, line: &str) {
        self.lines.extend(line.lines().map(str::to_owned));
    }

    /// Takes the lines and the metrics that have come since the last call.
    pub(crate) fn take(&mut self) -> (Vec<String>, Vec<TrainMetrics>) {
        (std::mem::take(&mut self.lines), std::mem::take(&mut self.points))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_metrics_are_taken_once() {
        let mut feed = Feed::default();
        feed.line("one\ntwo\n");
        feed.points.push(TrainMetrics::default());
        let two = vec!["one".to_owned(), "two".into()];
        assert_eq!(feed.take(), (two, vec![TrainMetrics::default()]));
        assert_eq!(feed.take(), (Vec::new(), Vec::new()));
    }
}
