//! The facts about a run that `--explain` needs before it begins.

use super::Session;
use crate::config::CommHookKind;
use crate::telemetry::{Explainer, RunInfo};

/// Returns the explainer of a run whose model has `parameters` parameters.
pub(crate) fn explainer(session: &Session, parameters: usize) -> Explainer {
    let Session { config, joined_launch, data, printer, .. } = session;
    let run_info = RunInfo {
        world_size: joined_launch.world_size(),
        processes: joined_launch.process()[1],
        backend: joined_launch.placement.backend.name(),
        model: config.model_name(),
        parameters,
        seed: config.training.seed,
        starts_from_file: config.checkpoints.init_from.is_some(),
        samples: data.training.len(),
        shuffles: !config.data.no_shuffle,
        drops_last: config.data.drop_last,
        accumulate: config.ddp.grad_accum_steps,
        exact_mean: config.ddp.exact_mean,
        optimizer_layout: config.optimizer_layout(),
        steps_per_epoch: config.steps_per_epoch(joined_launch.world_size()),
        compression: match config.ddp.comm_hook {
            CommHookKind::None => None,
            CommHookKind::Fp16 => Some("float16"),
            CommHookKind::Bf16 => Some("bfloat16"),
        },
        optimizer: config.optimization.optimizer.to_string(),
        is_plain: config.optimizer_options().is_plain(),
        max_grad_norm: config.optimization.max_grad_norm,
    };
    Explainer::new(config.output.language, run_info, printer.clone())
}
