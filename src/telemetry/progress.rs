//! A progress bar on a terminal.

use indicatif::{HumanCount, HumanDuration, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar on stderr, below all other output, removed at the end. Not drawn in a pipe.
#[derive(Debug)]
pub(super) struct Progress(ProgressBar);

impl Progress {
    /// Creates the bar of a run of `steps` steps, of which `done` have been made.
    pub(super) fn new(steps: u64, done: u64) -> Option<Self> {
        // Hidden automatically where stderr is no terminal.
        let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
        // Text that exceeds the terminal's width is cut off: a second line would not be cleared.
        let template = "{bar:12} {wide_msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        // Otherwise the estimate would count the steps before a resume as made in no time.
        bar.set_position(done);
        bar.reset_eta();
        Some(Self(bar))
    }

    /// Shows that `step` steps have been made, followed by `message`.
    pub(super) fn set(&self, step: u64, message: &str) {
        self.0.set_position(step);
        let steps = HumanCount(self.0.length().unwrap_or_default());
        let left = HumanDuration(self.0.eta());
        let step = HumanCount(step);
        self.0.set_message(format!("step {step}/{steps}, {left:#} left, {message}"));
    }

    /// Hides the bar while `print` prints.
    pub(super) fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        self.0.suspend(print)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
