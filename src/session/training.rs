//! The objects that one rank trains with, built as a configuration says.

use std::rc::Rc;
use std::sync::Arc;

use super::data_parallel::{GatherOnRank0, ScatterFromRank0, StepOnRank0};
use super::start_point::StartPoint;
use crate::config::Config;
use engine::data::{DataLoader, Dataset};
use engine::ddp::{DdpOptions, DistributedDataParallel};
use engine::error::{Error, Result};
use engine::ffi::Generator;
use engine::launch::Rank;
use engine::models::Model;
use engine::models::parameters_hash;
use engine::optim::{Optimizer, Schedule};
use engine::process_group::ProcessGroup;
use engine::trainer::{Trainer, TrainerOptions};

/// The objects that one rank trains with.
pub(crate) struct Training {
    pub ddp: DistributedDataParallel<Model>,
    pub optimizer: Box<dyn Optimizer>,
    pub schedule: Schedule,
    /// The random generator of the model.
    pub generator: Arc<Generator>,
    pub loader: DataLoader,
    /// On rank 0 the loaders of all ranks, with `--strategy dp`; otherwise none.
    pub loaders: Vec<DataLoader>,
    /// A 64-bit hash of this rank's parameters before it got rank 0's. `None` without `--explain`.
    pub hash_before_broadcast: Option<u64>,
}

impl Training {
    /// Builds these objects on this rank of `group`, as `config` says. A collective.
    pub(crate) fn new(
        rank: &Rank,
        group: &Rc<ProcessGroup>,
        config: &Config,
        dataset: &Arc<dyn Dataset>,
        start_point: &StartPoint,
    ) -> anyhow::Result<Self> {
        let loader = |rank_number| -> Result<DataLoader> {
            let sampler = config.sampler(dataset.len(), group.world_size(), rank_number)?;
            let loader = DataLoader::new(
                dataset.clone(),
                sampler,
                config.training.batch_size,
                rank.device(),
            )?;
            loader
                .drop_last(config.data.drop_last_batch)
                .in_step(config.ddp.exact_mean)
                .num_workers(config.data.num_workers, config.data.prefetch_factor, group)
                .pin_memory(group)
        };
        let generator =
            Arc::new(Generator::new(rank.device(), config.training.seed, group.rank())?);
        let (vs, model) = config.build_model(rank.device(), &generator, Some(group))?;
        if group.rank() == 0 {
            start_point.load_model(&vs)?;
        }
        let hash_before_broadcast =
            config.output.explain.then(|| parameters_hash(&vs)).transpose()?;
        let mut options = config.ddp_options();
        if config.is_data_parallel() {
            // `verify` also trains so where there are options that only DDP has.
            let DdpOptions { find_unused_parameters, static_graph, .. } = options;
            options = DdpOptions { find_unused_parameters, static_graph, ..DdpOptions::default() };
        }
        let mut ddp = DistributedDataParallel::new(model, &vs, group.clone(), options)?;
        let mut optimizer = config.optimizer_options().build(ddp.flat_buffers())?;
        let mut loaders = Vec::new();
        if config.is_data_parallel() {
            ddp.register_comm_hook(Box::new(GatherOnRank0::default()))?;
            optimizer = Box::new(StepOnRank0::new(optimizer, &ddp));
            let ranks = if group.rank() == 0 { 0..group.world_size() } else { 0..0 };
            loaders = ranks.map(loader).collect::<Result<_>>()?;
        } else if let Some(hook) = config.comm_hook() {
            ddp.register_comm_hook(hook)?;
        }
        let loader = loader(group.rank())?;
        let schedule = config.schedule_for(group.world_size());
        Ok(Self { ddp, optimizer, schedule, generator, loader, loaders, hash_before_broadcast })
    }

    /// Returns the trainer of these objects, as the program of `config` changes it.
    pub(crate) fn trainer(
        self,
        config: &Config,
        options: TrainerOptions,
    ) -> anyhow::Result<Trainer<Model>> {
        let Self { ddp, optimizer, schedule, generator, loader, loaders, .. } = self;
        let mut trainer = Trainer::new(ddp, optimizer, schedule, loader, config.criterion())?
            .generator(generator)
            .options(options)?;
        if config.is_data_parallel() {
            trainer = trainer.replace_batches(ScatterFromRank0::new(loaders));
        }
        let trainer = config.changed_by_program(trainer)?;
        if config.is_data_parallel() && trainer.counts_skipped_steps() {
            return Err(Error::usage(
                "--strategy dp: each rank would decide by its own gradients which steps to skip; leave out fp16 and \
                 skip_nonfinite, or use --strategy ddp"
                    .into(),
            )
            .into());
        }
        Ok(trainer)
    }
}
