//! The end of a run: rank 0 gathers what each rank did, and hands how the run went to everything that shows it.

use super::Session;
use super::data_parallel::through_rank_0_message;
use super::end_messages::{before_max_steps_message, best_message, stopped_message};
use crate::config::Config;
use engine::error::{Compared, Result};
use engine::events::{End, Event, RankEnd, find_straggler};
use engine::models::Model;
use engine::os::peak_memory;
use engine::process_group::{ProcessGroup, Traffic};
use engine::records::PhaseSeconds;
use engine::runtime::StopReason;
use engine::trainer::{Summary, Trainer, compare_replicas};
use views::LogFormat;

/// Shows how the run ended, on rank 0. Returns on all ranks whether the replicas are equal. A collective.
pub(crate) fn show_end(
    trainer: &Trainer<Model>,
    summary: &Summary,
    session: &Session,
    group: &ProcessGroup,
) -> anyhow::Result<bool> {
    let model_hash = trainer.ddp().parameters_hash()?;
    let mine = rank_end(trainer, model_hash, session, group)?;
    // Only rank 0 gets them all: on every rank they would take memory for each pair of ranks.
    let ranks = group.gather_object(&mine, 0)?;
    let mut are_equal = vec![ranks.as_deref().is_none_or(replicas_equal)];
    group.broadcast_object_list(&mut are_equal, 0)?;
    if let Some(ranks) = ranks {
        let end = end(ranks, model_hash, trainer, summary, session, group);
        print_end(end, trainer, summary.stopped, session)?;
    }
    Ok(are_equal == [true])
}

/// Returns what this rank did. `model_hash` is that of its model.
fn rank_end(
    trainer: &Trainer<Model>,
    model_hash: u64,
    session: &Session,
    group: &ProcessGroup,
) -> Result<RankEnd> {
    let replica_hash = if session.config.ddp.no_broadcast_buffers {
        trainer.ddp().replica_hash()?
    } else {
        model_hash
    };
    let Traffic { sent, received } = group.traffic();
    Ok(RankEnd {
        bytes_sent: sent,
        bytes_received: received,
        data_wait_seconds: trainer.loader().waited().as_secs_f64(),
        phases: group.phase_seconds(),
        replica_hash,
    })
}

/// Returns whether all replicas are equal.
fn replicas_equal(ranks: &[RankEnd]) -> bool {
    ranks.iter().all(|rank| rank.replica_hash == ranks[0].replica_hash)
}

/// Shorter delays, in seconds, are noise, and name no straggler.
const MIN_STRAGGLER_SECONDS: f64 = 1.0;

/// Returns how the run went. `ranks` is what each rank did, and `model_hash` that of rank 0's model.
fn end(
    ranks: Vec<RankEnd>,
    model_hash: u64,
    trainer: &Trainer<Model>,
    summary: &Summary,
    session: &Session,
    group: &ProcessGroup,
) -> End {
    let seconds = summary.elapsed.as_secs_f64();
    let phases: Vec<PhaseSeconds> = ranks.iter().map(|rank| rank.phases).collect();
    End {
        seconds,
        steps: summary.steps,
        loss: summary.last_loss,
        us_per_step: seconds * 1e6 / summary.steps_now.max(1) as f64,
        parameters_hash: format!("{model_hash:016x}"),
        replicas_equal: replicas_equal(&ranks),
        statistics: trainer.ddp().statistics(),
        ranks,
        straggler: find_straggler(&phases, seconds, MIN_STRAGGLER_SECONDS),
        peak_memory_bytes: peak_memory(),
        skipped_steps: trainer.counts_skipped_steps().then_some(summary.skipped_steps),
        scale: trainer.scaler().state().map(|scaler| scaler.scale),
        best: trainer.state().best.clone(),
        stopped: summary.stopped.map(StopReason::name),
        restarts: session.restarts.reasons.clone(),
        steps_now: summary.steps_now,
        first_loss: summary.first_loss,
        can_overlap: group.is_stream_ordered() || group.uses_network(),
        parameters: trainer.ddp().described_parameters(),
    }
}

/// Prints the result of a run on rank 0. Of a run that fails, prints only its numbers.
fn print_end(
    end: End,
    trainer: &Trainer<Model>,
    reason: Option<StopReason>,
    session: &Session,
) -> anyhow::Result<()> {
    let Session { config, printer, start_point, .. } = session;
    let replicas_equal = end.replicas_equal;
    let with_text = printer.format() == LogFormat::Text && replicas_equal;
    if with_text {
        let notes = [through_rank_0_message(config, &end), hidden_message(config, &end)];
        notes.iter().flatten().for_each(|note| printer.info(note));
    }
    session.observers.tell(&Event::End(Box::new(end)))?;
    let saves = config.checkpoints.checkpoint_dir.is_some();
    let dir = start_point.checkpoint_dir.as_ref().filter(|_| saves);
    if let Some(metrics) = &trainer.state().best
        && with_text
    {
        printer.info(&best_message(metrics, dir));
    }
    if replicas_equal {
        let text = match reason {
            Some(reason) => Some(stopped_message(reason, trainer.state(), dir)),
            None => before_max_steps_message(trainer.state(), &config.training),
        };
        text.iter().for_each(|text| printer.info(text));
    }
    Ok(())
}

/// Returns how much of the communication backward has hidden, over a simulated network.
fn hidden_message(config: &Config, end: &End) -> Option<String> {
    config.ddp.simulate_cluster.as_ref()?;
    let (us, percent) = (end.statistics.communication_us, 100.0 * end.statistics.hidden);
    Some(format!(
        "all-reduces took {us:.0} us in each step; {percent:.0} % of that ran during backward"
    ))
}

/// Ends a run whose replicas differ.
///
/// # Errors
/// [`Error::ReplicasDiverged`](crate::Error::ReplicasDiverged), on all ranks alike.
pub(crate) fn refuse_different_replicas(trainer: &Trainer<Model>, session: &Session) -> Result<()> {
    let buffers = !session.config.ddp.no_broadcast_buffers;
    compare_replicas(trainer.ddp(), buffers, trainer.state().step, Compared::AtEnd)
}
