//! `ddp-mp train`: starts the ranks, and trains on each.

use std::rc::Rc;
use std::sync::Arc;

use crate::config::Config;
use crate::session::{
    Requests, Session, Training, after_restart, handle_signals, refuse_different_replicas,
    remove_kept, run_command, show_end,
};
use engine::data::{DataLoader, DistributedSampler};
use engine::error::Shown;
use engine::ffi::cuda::Cuda;
use engine::launch::{Launch, Rank, Restarts, StopReason};
use engine::models::Model;
use engine::process_group::ProcessGroup;
use engine::trainer::Trainer;
use views::Printer;

/// Trains as `config` says, until all ranks finish. Returns `Some(reason)` if training stopped early.
///
/// # Errors
/// [`Error::Input`](crate::Error::Input) when `config` can't run here, and
/// [`SpawnError`](crate::SpawnError) when a rank failed.
pub fn train(
    config: Config,
    cuda: &Cuda,
    printer: &Arc<Printer>,
) -> anyhow::Result<Option<StopReason>> {
    let launch = Launch::from_env(&config.launch_options(), cuda)?;
    let mut requests: Option<Requests> = None;
    // Each child process comes here, too, and trains its ranks.
    run_command(config, &launch, true, cuda, printer, |config, launch| {
        let restarts = Restarts::before(launch)?;
        let config = after_restart(config, launch, &restarts, printer)?;
        let requests = match &requests {
            Some(requests) => {
                requests.stop.begin_again();
                requests
            }
            None => requests.insert(handle_signals(&config, launch, &restarts, printer)?),
        };
        let joined = Session::join(config, launch.clone(), restarts, requests, cuda, printer)?;
        let Some(session) = joined else { return Ok(requests.stop.request_reason()) };
        let session = Arc::new(session);
        let shared = session.clone();
        let result = session.spawn().run(move |rank| train_on(rank, &shared));
        session.end(result)
    })
}

/// Trains on one rank.
fn train_on(rank: &Rank, session: &Session) -> anyhow::Result<()> {
    let Session { config, joined_launch, data, start_point, printer, .. } = session;
    let group = rank.init_process_group(joined_launch.placement.backend)?;
    let checkpoint = start_point.agreed_checkpoint(&group)?;

    let training = Training::new(rank, &group, config, &data.training, start_point)?;
    if rank.rank() == 0 {
        session.tell_start(training.ddp.num_parameters())?;
    }
    let mut trainer = trainer(training, rank, &group, session)?;
    if let Some(checkpoint) = &checkpoint {
        trainer.resume(checkpoint)?;
    }
    remove_kept(config, joined_launch, rank.rank(), trainer.state().step);
    let summary = trainer.train(config.training.max_epochs)?;
    note_if_not_kept(rank, config, printer);

    group.barrier()?;
    let replicas_equal = show_end(&trainer, &summary, session, &group)?;
    session.note_stop(summary.stopped);
    if replicas_equal { Ok(()) } else { Ok(refuse_different_replicas(&trainer, session)?) }
}

/// Returns the trainer of `training`, with all that the options of the session add.
fn trainer(
    training: Training,
    rank: &Rank,
    group: &Rc<ProcessGroup>,
    session: &Session,
) -> anyhow::Result<Trainer<Model>> {
    let Session { config, data, start_point, .. } = session;
    let hash_before_broadcast = training.hash_before_broadcast;
    let mut trainer = training
        .trainer(config, config.trainer_options())?
        .share_stop(session.stop.clone())
        .observe(rank.observers().clone(), config.log_every());
    if let Some(options) = config.fingerprints()? {
        trainer = trainer.fingerprint(options);
    }
    if let Some(keep) = config.keep() {
        trainer = trainer.keep(keep);
    }
    if let Some(hash_before_broadcast) = hash_before_broadcast {
        trainer = trainer.probe(hash_before_broadcast);
    }
    if let Some(validation) = &data.validation {
        let sampler = DistributedSampler::new(validation.len(), rank.world_size(), rank.rank())?;
        let (batch_size, device) = (config.training.batch_size, rank.device());
        let loader = DataLoader::new(validation.clone(), sampler.uneven(), batch_size, device)?;
        trainer = trainer.validation(loader.pin_memory(group)?, config.data.val_every);
    }
    let dir = start_point.folder_of_rank(config, &session.joined_launch.launch);
    if config.checkpoints.checkpoint_dir.is_some() {
        trainer = trainer
            .checkpoints(dir, config.save_every(), config.options()?)
            .data_files(start_point.data_files.clone());
    } else {
        trainer = trainer.save_after_failure(dir, config.options()?);
    }
    Ok(trainer)
}

/// Notes that the run had no step of `--keep-step`, on the rank of `--keep-rank`.
fn note_if_not_kept(rank: &Rank, config: &Config, printer: &Printer) {
    if let Some(keep) = config.keep()
        && keep.rank == rank.rank()
        && !keep.file.is_file()
    {
        printer.info(&format!(
            "--keep-step {}: the run had no such step, so {} was not written",
            keep.step,
            keep.file.shown()
        ));
    }
}
