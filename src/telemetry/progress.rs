//! A bar that says how far the run is, on a terminal.

use indicatif::{HumanCount, HumanDuration, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Drawn on stderr, below whatever is printed, and gone in the end; nothing at all in a pipe.
#[derive(Debug)]
pub(super) struct Progress(ProgressBar);

impl Progress {
    /// Of so many steps, `done` of which have been made.
    pub(super) fn new(steps: u64, done: u64) -> Self {
        // Hidden by itself where stderr is no terminal.
        let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
        // What does not fit into the terminal's width is cut off: a second line would not be cleared.
        let template = "{bar:12} {wide_msg}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        // Else the time left would be that of a run that made these in no time.
        bar.set_position(done);
        bar.reset_eta();
        Self(bar)
    }

    /// `step` steps have been made, and `message` tells how it goes.
    pub(super) fn set(&self, step: u64, message: &str) {
        self.0.set_position(step);
        let steps = HumanCount(self.0.length().unwrap_or_default());
        let left = HumanDuration(self.0.eta());
        let step = HumanCount(step);
        self.0.set_message(format!("step {step}/{steps}, {left:#} left, {message}"));
    }

    /// Takes the bar away while `print` prints.
    pub(super) fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        self.0.suspend(print)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
