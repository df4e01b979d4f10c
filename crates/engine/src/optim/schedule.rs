//! Learning rate schedules: pure functions of the epoch and the step.

use std::f64::consts::PI;

use serde_with::SerializeDisplay;
use strum::{Display, EnumString, VariantNames};

/// The unit that a schedule counts.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Display, EnumString, VariantNames, SerializeDisplay,
)]
#[strum(serialize_all = "lowercase")]
pub enum Unit {
    /// Epochs.
    Epoch,
    /// Steps.
    Step,
}

/// A learning rate schedule.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    lr: f64,
    shape: Shape,
    unit: Unit,
    warmup_steps: u64,
    start_factor: f64,
}

#[derive(Debug, Clone, PartialEq)]
enum Shape {
    Constant,
    MultiStep { milestones: Vec<u64>, gamma: f64 },
    Cosine { t_max: u64, eta_min: f64 },
}

impl Schedule {
    /// The default start factor of PyTorch's `LinearLR`.
    pub const START_FACTOR: f64 = 1.0 / 3.0;

    /// Returns a schedule with a constant learning rate.
    pub fn constant(lr: f64) -> Self {
        let start_factor = Self::START_FACTOR;
        Self { lr, shape: Shape::Constant, unit: Unit::Epoch, warmup_steps: 0, start_factor }
    }

    /// Returns a schedule that starts at `lr` and multiplies by `gamma` at each milestone. Follows `MultiStepLR`.
    pub fn multi_step(lr: f64, milestones: Vec<u64>, gamma: f64) -> Self {
        Self { shape: Shape::MultiStep { milestones, gamma }, ..Self::constant(lr) }
    }

    /// Returns a schedule that falls from `lr` to `eta_min` after `t_max`, along half a cosine wave. Follows
    /// `CosineAnnealingLR`: it rises again afterwards.
    pub fn cosine(lr: f64, t_max: u64, eta_min: f64) -> Self {
        Self { shape: Shape::Cosine { t_max: t_max.max(1), eta_min }, ..Self::constant(lr) }
    }

    /// Sets the unit that the schedule counts; the default is epochs.
    #[must_use]
    pub fn by(self, unit: Unit) -> Self {
        Self { unit, ..self }
    }

    /// Adds a warm-up of `steps` steps, in which the learning rate rises linearly from `start_factor` times its first
    /// value to that value. Follows `LinearLR`, placed before the schedule as in `SequentialLR`. A schedule that counts
    /// steps starts at the end of the warm-up; one that counts epochs counts all of them.
    #[must_use]
    pub fn warmup(self, steps: u64, start_factor: f64) -> Self {
        Self { warmup_steps: steps, start_factor, ..self }
    }

    /// Returns the learning rate of a step. Both arguments count from 0; steps count over the whole run.
    pub fn lr(&self, epoch: u64, step: u64) -> f64 {
        if step < self.warmup_steps {
            let done = step as f64 / self.warmup_steps as f64;
            return self.lr * (self.start_factor + (1.0 - self.start_factor) * done);
        }
        let at = match self.unit {
            Unit::Epoch => epoch,
            Unit::Step => step - self.warmup_steps,
        };
        match &self.shape {
            Shape::Constant => self.lr,
            Shape::MultiStep { milestones, gamma } => {
                let passed = milestones.iter().filter(|milestone| **milestone <= at);
                passed.fold(self.lr, |lr, _| lr * gamma)
            }
            Shape::Cosine { t_max, eta_min } => {
                let angle = PI * at as f64 / *t_max as f64;
                eta_min + (self.lr - eta_min) * (1.0 + angle.cos()) / 2.0
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn milestones_count_epochs_unless_steps_are_requested() {
        let schedule = Schedule::multi_step(1.0, vec![2, 3], 0.5);
        let lrs = |schedule: &Schedule| (0..5).map(|i| schedule.lr(i, 10 * i)).collect::<Vec<_>>();
        assert_eq!(lrs(&schedule), [1.0, 1.0, 0.5, 0.25, 0.25]);
        assert_eq!(lrs(&schedule.by(Unit::Step)), [1.0, 0.25, 0.25, 0.25, 0.25]);
    }

    #[test]
    fn warmup_ends_at_the_schedule() {
        let schedule = Schedule::constant(0.8).warmup(4, 0.5);
        let lrs: Vec<f64> = (0..6).map(|step| schedule.lr(0, step)).collect();
        assert_eq!(lrs, [0.4, 0.5, 0.6000000000000001, 0.7000000000000001, 0.8, 0.8]);
        // The warm-up delays a milestone in steps, but not one in epochs.
        let schedule = Schedule::multi_step(1.0, vec![1], 0.1).warmup(4, 0.5);
        assert_eq!(schedule.lr(1, 4), 0.1);
        let schedule = schedule.by(Unit::Step);
        assert_eq!((schedule.lr(1, 4), schedule.lr(1, 5)), (1.0, 0.1));
    }

    #[test]
    fn cosine_ends_at_eta_min() {
        let schedule = Schedule::cosine(0.5, 10, 0.1);
        let near = |epoch, lr: f64| (schedule.lr(epoch, 0) - lr).abs() < 1e-15;
        assert!(near(0, 0.5) && near(5, 0.3) && near(10, 0.1));
    }
}
