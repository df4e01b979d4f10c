//! A progress bar on a terminal.

use indicatif::{
    HumanCount, HumanDuration, ProgressBar, ProgressDrawTarget, ProgressFinish, ProgressStyle,
};

/// A bar on stderr, below all other output, removed at the end. Not drawn in a pipe.
#[derive(Debug)]
pub(super) struct Progress {
    bar: ProgressBar,
    /// The newest metrics as text; empty before the first.
    metrics: String,
}

impl Progress {
    /// Creates the bar of a run of `steps` steps, of which `done` have been made.
    pub(super) fn new(steps: u64, done: u64) -> Option<Self> {
        // Text that exceeds the terminal's width is cut off: a second line would not be cleared.
        let style = ProgressStyle::with_template("{bar:12} {wide_msg}").ok()?;
        // Hidden automatically where stderr is not a terminal.
        let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr())
            .with_style(style.progress_chars("=> "))
            .with_finish(ProgressFinish::AndClear);
        // Otherwise the estimate would count the steps before a resume as made in no time.
        bar.set_position(done);
        bar.reset_eta();
        Some(Self { bar, metrics: String::new() })
    }

    /// Shows that `step` steps have been made, followed by `metrics`, or by those of the last call without any.
    pub(super) fn set(&mut self, step: u64, metrics: Option<String>) {
        self.metrics = metrics.map_or(std::mem::take(&mut self.metrics), |new| format!(", {new}"));
        self.bar.set_position(step);
        let steps = HumanCount(self.bar.length().unwrap_or_default());
        let left = HumanDuration(self.bar.eta());
        let (step, metrics) = (HumanCount(step), &self.metrics);
        self.bar.set_message(format!("step {step}/{steps}, {left:#} left{metrics}"));
    }

    /// Hides the bar while `print` prints.
    pub(super) fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        self.bar.suspend(print)
    }
}
