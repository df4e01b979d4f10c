//! Shows the current step at growing intervals, because an epoch may be long, and prints each epoch.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::telemetry::Printer;
use crate::trainer::{Callback, Epoch, Step, TrainContext};

/// The time to the first sign. The later ones come ever more rarely.
const FIRST: Duration = Duration::from_secs(2);

/// The longest time between two signs.
const LONGEST: Duration = Duration::from_secs(60);

/// Shows on rank 0 which step the run is at, and prints each epoch once for all ranks of the process.
#[derive(Debug)]
pub(in crate::trainer) struct Progress {
    printer: Arc<Printer>,
    began: Instant,
    /// The time after `began` of the next sign.
    next: Duration,
    /// The steps that were made before this start of the run.
    done: u64,
}

impl Progress {
    pub(in crate::trainer) fn new(printer: Arc<Printer>) -> Self {
        Self { printer, began: Instant::now(), next: FIRST, done: 0 }
    }
}

impl<M> Callback<M> for Progress {
    fn on_train_start(&mut self, context: &mut TrainContext<M>) -> Result<()> {
        self.began = Instant::now();
        self.done = context.state.step;
        Ok(())
    }

    fn on_step_end(&mut self, context: &mut TrainContext<M>, _: &Step) -> Result<()> {
        if context.group().rank() > 0 {
            return Ok(());
        }
        let elapsed = self.began.elapsed();
        if elapsed >= self.next {
            // Whether there is a bar takes a system call to find out.
            self.next = elapsed + interval(elapsed, self.printer.shows_progress());
            let (step, steps) = (context.state.step, context.total_steps());
            let each = elapsed.as_secs_f64() / (step - self.done).max(1) as f64;
            let left = each * steps.saturating_sub(step) as f64;
            self.printer.step(step, &format!("step {step} of {steps}, about {left:.0} s left"));
        }
        Ok(())
    }

    fn on_epoch_end(&mut self, context: &mut TrainContext<M>, epoch: &mut Epoch) -> Result<()> {
        let local_ranks = context.group().local_world_size();
        Ok(self.printer.epoch(epoch.clone(), local_ranks)?)
    }
}

/// Returns the time from a sign at `elapsed` to the next one. A bar is drawn more often than a line is printed.
fn interval(elapsed: Duration, is_bar: bool) -> Duration {
    if is_bar { FIRST / 4 } else { elapsed.clamp(FIRST, LONGEST) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_come_after_two_seconds_and_then_more_rarely() {
        let [mut lines, mut draws] = [Vec::new(), Vec::new()];
        for (is_bar, signs) in [(false, &mut lines), (true, &mut draws)] {
            let mut next = FIRST;
            for elapsed in (0..200).map(Duration::from_secs) {
                if elapsed >= next {
                    next = elapsed + interval(elapsed, is_bar);
                    signs.push(elapsed.as_secs());
                }
            }
        }
        assert_eq!(lines, [2, 4, 8, 16, 32, 64, 124, 184]);
        assert!(draws.starts_with(&[2, 3, 4]) && draws.len() == 198, "{draws:?}");
    }
}
