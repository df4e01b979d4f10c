//! The end of a run: the summary of each rank, and the result that rank 0 derives from them.

use std::io;

use serde::{Deserialize, Serialize};
use tch::Device;

use super::Session;
use super::end_messages::{before_max_steps, best, stopped, through_rank_0};
use crate::config::StrategyKind;
use crate::data::DatasetSpec;
use crate::ddp::Strategy;
use crate::error::{Compared, Result};
use crate::models::Model;
use crate::process_group::{ProcessGroup, Traffic};
use crate::records::PhaseSeconds;
use crate::runtime::StopReason;
use crate::telemetry::report::{
    Cores, Measured, Moved, Replicas, Verdict, advice, outside_collectives,
};
use crate::telemetry::{End, Event, LogFormat, find_straggler, find_straggler_over, peak_memory};
use crate::trainer::{Summary, Trainer, compare_replicas};

/// The summary that each rank sends to rank 0.
#[derive(Debug, Serialize, Deserialize)]
struct RankSummary {
    sent: u64,
    received: u64,
    /// The time spent waiting for data, in seconds.
    waited: f64,
    phases: PhaseSeconds,
    /// A 64-bit hash of what must be equal on all ranks. `None` if rank 0 alone has the model.
    parameters: Option<u64>,
}

/// Gathers the summaries of all ranks. Returns the result of the run on rank 0 (`None` on other ranks), and on all
/// ranks whether the replicas are equal. A collective.
pub(crate) fn gather_summary(
    trainer: &Trainer<Model>,
    summary: &Summary,
    session: &Session,
    group: &ProcessGroup,
) -> Result<(Option<End>, bool)> {
    let Traffic { sent, received } = group.traffic();
    let model_hash = trainer.ddp().parameters_hash()?;
    let parameters = match trainer.ddp() {
        Strategy::Ddp(ddp) if session.config.ddp.no_broadcast_buffers => Some(ddp.replica_hash()?),
        Strategy::Ddp(_) => Some(model_hash),
        Strategy::Dp(_) => None, // rank 0 alone has the model
    };
    let mine = RankSummary {
        sent,
        received,
        waited: trainer.loader().waited().as_secs_f64(),
        phases: group.phase_seconds(),
        parameters,
    };
    // Only rank 0 gets the summaries: on every rank they would take memory for each pair of ranks.
    let summaries = group.gather_object(&mine, 0)?;
    let replicas = summaries
        .as_ref()
        .and_then(|summaries| replicas(summaries, session.config.ddp.check_replicas_every));
    // Each rank ends with an error if the replicas differ.
    let mut equal = vec![replicas.as_ref().is_none_or(|replicas| replicas.equal)];
    group.broadcast_object_list(&mut equal, 0)?;
    let equal = equal == [true];
    let Some(summaries) = summaries else { return Ok((None, equal)) };
    let seconds = summary.elapsed.as_secs_f64();
    let statistics = trainer.ddp().statistics();
    let hidden = statistics.hidden;
    let by_rank = |value: fn(&RankSummary) -> f64| summaries.iter().map(value).collect::<Vec<_>>();
    let phases: Vec<PhaseSeconds> = summaries.iter().map(|rank| rank.phases).collect();
    let end = End {
        seconds,
        steps: summary.steps,
        loss: summary.last_loss,
        us_per_step: seconds * 1e6 / summary.steps_now.max(1) as f64,
        parameters_hash: format!("{model_hash:016x}"),
        replicas_equal: replicas.as_ref().map(|replicas| replicas.equal),
        bucket_bytes: statistics.bucket_bytes,
        backward_us: statistics.backward_us,
        communication_us: statistics.communication_us,
        overlapped: statistics.overlapped,
        bytes_sent_by_rank: summaries.iter().map(|rank| rank.sent).collect(),
        bytes_received_by_rank: summaries.iter().map(|rank| rank.received).collect(),
        data_wait_seconds_by_rank: by_rank(|rank| rank.waited),
        collective_seconds_by_rank: by_rank(|rank| rank.phases.collectives),
        straggler: find_straggler(&phases, seconds),
        peak_memory_bytes: peak_memory(),
        skipped_steps: trainer.counts_skipped_steps().then_some(summary.skipped_steps),
        scale: trainer.scaler().state().map(|scaler| scaler.scale),
        stopped: summary.stopped.map(StopReason::name),
        restarts: session.restarts.reasons.clone(),
        best: trainer.state().best.clone(),
        steps_now: summary.steps_now,
        first_loss: summary.first_loss,
    };
    if let Some(prometheus) = session.artifacts.prometheus() {
        prometheus.keep(&end);
    }
    session.artifacts.update(|draft| {
        // The buckets have been rebuilt since the start.
        draft.model.buckets.clone_from(&end.bucket_bytes);
        draft.model.parameters = trainer.ddp().parameter_places();
        draft.moved = Moved {
            sent: end.bytes_sent_by_rank.clone(),
            received: end.bytes_received_by_rank.clone(),
            collectives: Vec::new(),
        };
        draft.replicas = replicas;
        draft.verdict = verdict(&end, phases, hidden, session, group);
        draft.end = Some(end.clone());
    });
    Ok((Some(end), equal))
}

/// Prints the result of a run on rank 0. Of a run that fails, prints only its numbers.
pub(crate) fn print_end(
    end: End,
    replicas_equal: bool,
    trainer: &Trainer<Model>,
    reason: Option<StopReason>,
    session: &Session,
) -> io::Result<()> {
    let Session { config, printer, start_point, .. } = session;
    let with_text = printer.format() == LogFormat::Text && replicas_equal;
    if config.ddp.strategy == StrategyKind::Dp
        && with_text
        && let Some(note) = through_rank_0(&end)
    {
        printer.info(&note);
    }
    printer.event(&Event::End(Box::new(end)))?;
    let dir = start_point.checkpoint_dir.as_ref();
    if let Some(metrics) = &trainer.state().best
        && with_text
    {
        printer.info(&best(metrics, dir));
    }
    if replicas_equal {
        let text = match reason {
            Some(reason) => Some(stopped(reason, trainer.state(), dir)),
            None => before_max_steps(trainer.state(), &config.training),
        };
        text.iter().for_each(|text| printer.info(text));
    }
    Ok(())
}

/// Ends a run whose replicas differ.
///
/// # Errors
/// [`Error::ReplicasDiverged`], on all ranks alike.
pub(crate) fn refuse_different_replicas(trainer: &Trainer<Model>, session: &Session) -> Result<()> {
    match trainer.ddp() {
        Strategy::Ddp(ddp) => {
            let buffers = !session.config.ddp.no_broadcast_buffers;
            compare_replicas(ddp, buffers, trainer.state().step, Compared::AtEnd)
        }
        Strategy::Dp(_) => Ok(()),
    }
}

fn replicas(summaries: &[RankSummary], checked_every: Option<u64>) -> Option<Replicas> {
    let hashes: Vec<u64> = summaries.iter().map(|rank| rank.parameters).collect::<Option<_>>()?;
    Some(Replicas {
        equal: hashes.iter().all(|hash| *hash == hashes[0]),
        hashes: hashes.iter().map(|hash| format!("{hash:016x}")).collect(),
        checked_every,
    })
}

/// The least time, in seconds, that other ranks waited for a straggler to name it in the report.
const MIN_STRAGGLER_SECONDS: f64 = 0.05;

fn verdict(
    end: &End,
    phases: Vec<PhaseSeconds>,
    hidden: f64,
    session: &Session,
    group: &ProcessGroup,
) -> Verdict {
    let config = &session.config;
    let on_cpu = group.device() == Device::Cpu;
    let overlaps = config.ddp.strategy == StrategyKind::Ddp && group.world_size() > 1;
    let overlapped = overlaps.then_some(hidden);
    let straggler = find_straggler_over(&phases, end.seconds, MIN_STRAGGLER_SECONDS);
    let measured = Measured {
        phases: &phases,
        straggler: straggler.as_ref(),
        overlapped,
        us_per_step: end.us_per_step,
        bucket_bytes: &end.bucket_bytes,
        batch_size: config.training.batch_size,
        num_workers: config.data.num_workers,
        can_overlap: group.is_stream_ordered() || group.spans_processes(),
        seconds: end.seconds,
        cores: on_cpu.then_some(Cores {
            count: session.cores,
            local_ranks: session.joined_launch.placement.devices.len(),
            threads_per_rank: session.joined_launch.placement.threads_per_rank,
        }),
        losses: session.artifacts.losses(),
        lr: config.lr_for(group.world_size()).0,
        fitting_config: (config.data.dataset == DatasetSpec::DIGITS)
            .then_some("configs/digits.toml"),
    };
    Verdict {
        outside_collectives: outside_collectives(&phases),
        overlapped,
        advice: match end.replicas_equal {
            Some(false) => vec![
                "First of all find out why the ranks do not hold the same parameters: --check-replicas-every 1 names the \
                 step, the rank and the parameter."
                    .into(),
            ],
            _ => advice(measured),
        },
        straggler,
        phases,
    }
}
