//! The options of training as a whole: its length, its batch size, its loss, its precision and its seed.

use std::time::Duration;

use clap::Args;
use serde::Serialize;
use serde_with::skip_serializing_none;

use super::Config;
use super::option_rules::{Conflict, InShortHelp, MayDiffer, RefusedBy};
use super::values::{name, positive_duration, whole};
use engine::models::{Model, ModelKind};
use engine::runtime::panics;
use engine::trainer::{Amp, Criterion, Loss, Trainer, TrainerOptions};

/// The most samples of a batch, and the most batches of a step: their product fits into 63 bits.
pub(super) const MOST_IN_A_STEP: u64 = i32::MAX as u64;

/// The length of a run, its loss and its seed.
#[skip_serializing_none]
#[derive(Debug, Clone, PartialEq, Args, Serialize)]
#[command(next_help_heading = "Training")]
#[group(skip)]
pub struct TrainingSection {
    /// Train for N passes over the data
    #[arg(long, value_name = "N", value_parser = whole::<u64>(1..), default_value_t = 1)]
    #[arg(add = InShortHelp, add = MayDiffer::OnResume, add = RefusedBy::TOOLS)]
    pub max_epochs: u64,
    /// Stop the whole run after N steps
    #[arg(long, value_name = "N", value_parser = whole::<u64>(1..))]
    #[arg(add = MayDiffer::OnResume, add = RefusedBy::TOOLS)]
    pub max_steps: Option<u64>,
    /// Stop this run after TIME (90, 30s, 10m)
    ///
    /// Time before the checkpoint of --resume does not count. Restarts by --max-restarts do not reset it
    #[arg(long, value_name = "TIME", value_parser = positive_duration)]
    #[arg(add = MayDiffer::BetweenProcesses, add = RefusedBy::TOOLS)]
    #[serde(serialize_with = "humantime_serde::serialize")]
    pub max_seconds: Option<Duration>,
    /// Stop after N validations without improvement
    #[arg(long, value_name = "N", value_parser = whole::<u64>(1..))]
    #[arg(add = MayDiffer::OnResume, add = RefusedBy::TOOLS)]
    pub patience: Option<u64>,
    /// Give each rank N samples per batch
    #[arg(long, value_name = "N", value_parser = whole::<usize>(1..=MOST_IN_A_STEP), default_value_t = 32)]
    #[arg(add = InShortHelp)]
    pub batch_size: usize,
    /// Choose the loss function
    #[arg(long, value_name = "NAME", value_parser = name::<Loss>(), default_value_t = Loss::Mse)]
    #[arg(default_value_if("model", "gpt", "cross-entropy"))]
    #[arg(add = InShortHelp, add = Conflict(needs_classes))]
    pub loss: Loss,
    /// Run the forward pass in mixed precision
    ///
    /// Operations that need more precision stay in float32. With fp16 the loss is scaled
    #[arg(long, value_name = "NAME", value_parser = name::<Amp>(), default_value_t = Amp::Off)]
    #[arg(add = Conflict(scales_losses))]
    pub amp: Amp,
    /// Set the random seed
    #[arg(long, value_name = "N", value_parser = whole::<u64>(..), default_value_t = 0)]
    #[arg(add = InShortHelp)]
    pub seed: u64,
}

impl Config {
    /// Returns what the run minimizes and measures.
    pub(crate) fn criterion(&self) -> Criterion {
        let criterion = self.program.criterion.clone();
        if criterion.has_own_loss() {
            return criterion;
        }
        criterion.with_loss_of(self.training.loss.into())
    }

    /// Returns `trainer` as the program changes it.
    ///
    /// # Errors
    /// The errors of the program.
    pub(crate) fn changed_by_program(
        &self,
        trainer: Trainer<Model>,
    ) -> anyhow::Result<Trainer<Model>> {
        let args = &*self.own.args;
        self.program.trainer.iter().try_fold(trainer, |trainer, change| {
            panics::in_closure("the trainer's closure", || change(trainer, args))?
        })
    }

    /// Returns the options of the trainer.
    pub fn trainer_options(&self) -> TrainerOptions {
        TrainerOptions {
            amp: self.training.amp,
            accumulate: self.ddp.grad_accum_steps as usize,
            exact_mean: self.ddp.exact_mean,
            max_grad_norm: self.optimization.max_grad_norm,
            skip_nonfinite: self.optimization.skip_nonfinite,
            max_steps: self.training.max_steps,
            patience: self.training.patience,
            check_replicas: self.ddp.check_replicas_every,
        }
    }
}

fn needs_classes(config: &Config) -> Option<String> {
    let is_one_column = config.model.kind != ModelKind::Gpt // its data is text, which says how many
        && config.data.out_features.is_some_and(|classes| classes < 2);
    (config.training.loss == Loss::CrossEntropy && is_one_column).then(|| {
        "cross-entropy over one column is always 0, and so is its gradient: nothing would be learned; use \
         --out-features 2 or more, or --loss mse"
            .into()
    })
}

fn scales_losses(config: &Config) -> Option<String> {
    (config.training.amp == Amp::Fp16 && config.is_data_parallel()).then(|| {
        "fp16 needs --strategy ddp: each rank would decide by its own gradients which steps to skip"
            .into()
    })
}
