//! DataParallel, PyTorch's older way, to compare: all goes through rank 0. It follows `torch.nn.DataParallel`.
//!
//! It is DDP and three parts. In each step
//!
//! 1. rank 0 loads the batches of all ranks and scatters them: [`ScatterFromRank0`]. Each rank also loads its own, which says
//!    how large it is;
//! 2. all ranks run forward and backward, as with DDP;
//! 3. rank 0 gathers the gradients, and averages them: [`GatherOnRank0`];
//! 4. rank 0 makes the optimizer's step, while the others wait, and broadcasts the parameters: [`StepOnRank0`].
//!
//! DDP is better because rank 0 is a bottleneck here. With N ranks, rank 0 sends and receives N - 1 times the data of each
//! other rank, so every added rank makes a step slower. Rank 0 needs memory for all ranks' gradients and batches, and runs
//! out first. DDP's all_reduce distributes sending and adding evenly, and overlaps with backward. DDP never sends
//! parameters again, because all ranks make the same step.

use std::collections::BTreeMap;
use std::rc::Rc;

use tch::Tensor;

use crate::config::Config;
use engine::data::{Batch, Batches, DataLoader};
use engine::ddp::{CommHook, DistributedDataParallel, GradBucket};
use engine::error::{Error, Result};
use engine::events::{End, RankEnd};
use engine::ffi::TorchResult;
use engine::models::Model;
use engine::optim::{Optimizer, ParameterState};
use engine::process_group::ProcessGroup;
use engine::trainer::{Callback, Step, TrainContext};

/// A communication hook that gathers each bucket on rank 0, and averages it there. The other ranks keep their own gradients,
/// which nobody uses.
#[derive(Debug, Default)]
pub(super) struct GatherOnRank0 {
    /// On rank 0: room for the gradients of the other ranks, by bucket.
    rooms: BTreeMap<usize, Vec<Tensor>>,
}

impl CommHook for GatherOnRank0 {
    fn name(&self) -> &'static str {
        "gather"
    }

    fn reduce(&mut self, bucket: &mut GradBucket<'_>, group: &ProcessGroup) -> Result<()> {
        if group.rank() > 0 {
            return group.gather(bucket.gradients, None, 0);
        }
        let known = self.rooms.remove(&bucket.index);
        let alike = |room: &Tensor| {
            room.kind() == bucket.gradients.kind() && room.size() == bucket.gradients.size()
        };
        let fits = |room: &Vec<Tensor>| room.iter().all(alike);
        let room = match known.filter(fits) {
            Some(room) => room,
            None => {
                let others = (1..group.world_size()).map(|_| bucket.gradients.f_empty_like());
                others.collect::<Result<_, _>>().doing("making room for all ranks' gradients")?
            }
        };
        let mut all = vec![bucket.gradients.shallow_clone()];
        all.extend(room);
        group.gather(bucket.gradients, Some(&mut all), 0)?;
        // Divides each rank's gradients first and adds them in rank order: the same bits as DDP's all_reduce.
        let share = 1.0 / group.world_size() as f64;
        let mut average = || {
            let _ = bucket.gradients.f_mul_scalar_(share)?;
            for other in &mut all[1..] {
                let _ = bucket.gradients.f_add_(&other.f_mul_scalar_(share)?)?;
            }
            Ok(())
        };
        tch::no_grad(&mut average).doing("averaging the gradients")?;
        self.rooms.insert(bucket.index, all.split_off(1));
        Ok(())
    }
}

/// An optimizer of which rank 0 alone makes the steps. The other ranks then get its parameters.
#[derive(Debug)]
pub(super) struct StepOnRank0 {
    optimizer: Box<dyn Optimizer>,
    /// The flat buffers of the parameters.
    parameters: Vec<Tensor>,
    group: Rc<ProcessGroup>,
}

impl StepOnRank0 {
    /// Returns `optimizer`, which steps the parameters of `ddp`, for rank 0.
    pub(super) fn new(optimizer: Box<dyn Optimizer>, ddp: &DistributedDataParallel<Model>) -> Self {
        let buffers = ddp.flat_buffers().into_iter();
        let parameters = buffers.map(|buffer| buffer.parameters).collect();
        Self { optimizer, parameters, group: ddp.group().clone() }
    }
}

impl Optimizer for StepOnRank0 {
    fn step(&mut self, lr: f64) -> Result<()> {
        if self.group.rank() == 0 {
            self.optimizer.step(lr)?;
        }
        for parameters in &mut self.parameters {
            tch::no_grad(|| self.group.broadcast(parameters, 0))?;
        }
        self.group.await_launched()
    }

    fn state(&self) -> Result<Vec<ParameterState>> {
        self.optimizer.state()
    }

    fn load_state(&mut self, state: &[ParameterState]) -> Result<()> {
        self.optimizer.load_state(state)
    }

    fn parameter_names(&self) -> Vec<String> {
        self.optimizer.parameter_names()
    }
}

/// A callback that replaces each rank's batches by those that rank 0 sends.
#[derive(Default)]
pub(super) struct ScatterFromRank0 {
    /// The loaders of all ranks on rank 0, none on the others.
    loaders: Vec<DataLoader>,
    /// The epoch of `batches`.
    epoch: Option<u64>,
    batches: Vec<Batches>,
}

impl ScatterFromRank0 {
    /// Returns the callback. `loaders` are those of all ranks on rank 0, and none on the others.
    pub(super) fn new(loaders: Vec<DataLoader>) -> Self {
        Self { loaders, ..Self::default() }
    }
}

impl Callback<Model> for ScatterFromRank0 {
    /// Gets the batches of a step. The rank's own say how large they are.
    fn on_step_start(
        &mut self,
        context: &mut TrainContext<Model>,
        step: &mut Step,
    ) -> anyhow::Result<()> {
        let state = context.state();
        if self.epoch.replace(state.epoch) != Some(state.epoch) {
            let start = |loader: &DataLoader| loader.epoch_from(state.epoch, state.samples_seen);
            self.batches = self.loaders.iter().map(start).collect::<Result<_>>()?;
        }
        for batch in &mut step.batches {
            let of_ranks = self.batches.iter_mut().filter_map(Iterator::next);
            *batch = scatter(of_ranks.collect::<Result<_>>()?, batch, context.group())?;
        }
        Ok(())
    }
}

/// Scatters the batches of all ranks, which rank 0 has. Returns this rank's, which is `like` its own. A collective.
fn scatter(of_ranks: Vec<Batch>, like: &Batch, group: &ProcessGroup) -> Result<Batch> {
    let mut tensor = 0;
    like.map(like.len() as i64, |like| {
        let parts = of_ranks.iter().filter_map(|batch| batch.tensors().nth(tensor));
        let parts: Vec<Tensor> = parts.map(Tensor::shallow_clone).collect();
        tensor += 1;
        let mut mine = like.f_empty_like().doing("making room for a batch")?;
        group.scatter(&mut mine, (group.rank() == 0).then_some(&parts[..]), 0)?;
        Ok::<_, Error>(mine)
    })
}

/// Returns a note on the bytes that went through rank 0. `None` with DDP, and if there are no other ranks.
pub(super) fn through_rank_0_message(config: &Config, end: &End) -> Option<String> {
    let (first, others) = end.ranks.split_first().filter(|_| config.is_data_parallel())?;
    let most = |bytes: fn(&RankEnd) -> u64| others.iter().map(bytes).max();
    let kb = |bytes: u64| (bytes + 500) / 1000;
    Some(format!(
        "all went through rank 0, which sent {} kB and received {} kB; any other rank {} and {}",
        kb(first.bytes_sent),
        kb(first.bytes_received),
        kb(most(|rank| rank.bytes_sent)?),
        kb(most(|rank| rank.bytes_received)?)
    ))
}
