//! `--live`: what each rank does, in the terminal, while it does it.
//!
//! [`screen`] looks at the ranks and draws what [`state`] keeps with [`draw`], a few times a second.

mod draw;
mod keys;
mod lanes;
mod screen;
mod state;

use std::io::{self, IsTerminal};
use std::sync::Arc;

use parking_lot::Mutex;

use super::{Outcome, Printer, RunState, View};
use engine::error::Result;
use engine::events::{Event, Observer, RanksActivity, Wants};
use engine::runtime::StopRequest;
use screen::LiveScreen;

/// The live view of a run, in the process of rank 0.
#[derive(Debug)]
pub struct Live {
    printer: Arc<Printer>,
    /// The run in a few words.
    title: String,
    /// What a key sets to stop the run.
    stop: Arc<StopRequest>,
    /// Whether the view stays open after the run, until the user presses a key.
    stays: bool,
    /// The screen, while the view is open.
    screen: Mutex<Option<LiveScreen>>,
}

impl Live {
    /// Creates the view of a run, `title` in a few words. Where the user can press a key, it `stays` open until then.
    pub fn new(printer: Arc<Printer>, title: String, stop: Arc<StopRequest>, stays: bool) -> Self {
        let stays = stays && io::stdin().is_terminal();
        Self { printer, title, stop, stays, screen: Mutex::default() }
    }
}

impl Observer for Live {
    fn wants(&self) -> Wants {
        Wants { metrics: true, activity: true, ..Wants::default() }
    }

    fn watch(&self, ranks: &Arc<RanksActivity>) {
        drop(self.screen.lock().take()); // that of an earlier run
        let opened = LiveScreen::open(&self.printer, &self.title, ranks, &self.stop);
        *self.screen.lock() = match opened {
            Ok(screen) => Some(screen),
            Err(error) => {
                self.printer.report(&format!("--live: {error}"));
                None
            }
        };
    }

    fn event(&self, event: &Event) -> anyhow::Result<()> {
        let screen = self.screen.lock();
        let Some(screen) = screen.as_ref().filter(|screen| screen.is_open()) else { return Ok(()) };
        match event {
            Event::Training(training) => screen.feed.lock().steps = Some(training.steps),
            Event::Metrics(metrics) => screen.feed.lock().points.push(metrics.clone()),
            Event::Checkpoint { step } => {
                screen.feed.lock().line(&format!("saving a checkpoint of step {step}"));
            }
            Event::Ended { .. } => screen.end_ranks(),
            _ => {}
        }
        Ok(())
    }
}

impl View for Live {
    /// Closes the view, after a key if it stays open.
    fn finish(&self, outcome: &Outcome) -> Result<()> {
        let screen = self.screen.lock().take(); // closes when it is dropped
        if let Some(mut screen) = screen
            && self.stays
            && outcome.kind != RunState::Failed
        {
            screen.join();
        }
        Ok(())
    }
}
