//! Training on uneven inputs: ranks that have run out take part in the other ranks' collectives.

use tch::{Kind, Tensor};

use super::DistributedDataParallel;
use super::reducer::Reducer;
use crate::error::{Error, Result};
use crate::process_group::{ProcessGroup, ReduceOp};

/// Options for ranks that have run out of inputs. Follows the arguments of `DistributedDataParallel.join`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JoinOptions {
    /// Divide by the number of all ranks, so that every sample has the same weight; otherwise by the number of ranks
    /// with inputs.
    pub divide_by_initial_world_size: bool,
    /// Return an error on every rank when one has run out.
    pub throw_on_early_termination: bool,
}

impl Default for JoinOptions {
    /// Returns PyTorch's defaults.
    fn default() -> Self {
        Self { divide_by_initial_world_size: true, throw_on_early_termination: false }
    }
}

impl<M> DistributedDataParallel<M> {
    /// Runs `train`, in which ranks may call [`backward`](Self::backward) different numbers of times. A rank that is
    /// done takes part in the others' reductions with zeros until all ranks are done. Then one of the last ranks sends
    /// its model to all. A collective.
    ///
    /// Follows `DistributedDataParallel.join`. As in PyTorch, optimizer state such as momentum stays local, and differs
    /// where ranks have made different numbers of steps. Within `train`, a rank must make no collective calls but
    /// `backward`. Each of those costs one more collective, of one number. A model whose forward pass makes collective
    /// calls, such as [`SyncBatchNorm`](crate::SyncBatchNorm), gives an error on the first rank that has run out. That
    /// rank cannot take part in them.
    ///
    /// # Errors
    /// The error of `train`; those of the collectives; [`Error::Input`] with `throw_on_early_termination`.
    ///
    /// ```
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::ddp::JoinOptions;
    /// use ddp_mp::{
    ///     Backend, DdpOptions, DistributedDataParallel, Optimizer, Sgd, SgdOptions, spawn,
    /// };
    /// use tch::{Kind, nn};
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let vs = nn::VarStore::new(rank.device());
    ///     let weight = vs.root().var("weight", &[2], nn::Init::Const(1.0));
    ///     let mut ddp = DistributedDataParallel::new((), &vs, group, DdpOptions::default())?;
    ///     let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
    ///     ddp.join(JoinOptions::default(), |ddp| {
    ///         for _ in 0..=rank.rank() {
    ///             ddp.zero_grad()?;
    ///             ddp.backward(&weight.sum(Kind::Float))?;
    ///             optimizer.step(0.1)?;
    ///         }
    ///         Ok(())
    ///     })?;
    ///     // One step of both ranks, and one of rank 1 alone that counts half.
    ///     assert!((weight.double_value(&[0]) - (1.0 - 0.1 - 0.05)).abs() < 1e-6);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn join<T>(
        &mut self,
        options: JoinOptions,
        train: impl FnOnce(&mut Self) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        self.reducer.set_joining(Some(options));
        let result = train(self);
        self.reducer.set_joining(None);
        let result = result?;
        let last = self.reducer.shadow_until_all_joined(options)?;
        self.sync_from(last)?;
        Ok(result)
    }

    /// Copies the parameters and buffers of rank `src` to all ranks.
    pub(super) fn sync_from(&self, src: usize) -> Result<()> {
        self.reducer.for_each_flat(|flat| self.group.broadcast(&mut flat.parameters, src))?;
        // Includes parameters that are not trained.
        let rest = self.tensors.iter().filter(|tensor| !tensor.trainable && !tensor.is_ignored);
        rest.map(|rest| &rest.tensor).try_for_each(|tensor| self.copy_from(src, tensor))
    }

    /// Copies the buffers of rank `src` to all ranks.
    pub(super) fn sync_buffers(&self, src: usize) -> Result<()> {
        let buffers = self.tensors.iter().filter(|tensor| tensor.is_buffer && !tensor.is_ignored);
        buffers.map(|buffer| &buffer.tensor).try_for_each(|tensor| self.copy_from(src, tensor))
    }

    fn copy_from(&self, src: usize, tensor: &Tensor) -> Result<()> {
        tch::no_grad(|| self.group.broadcast(&mut tensor.shallow_clone(), src))
    }
}

/// The state that a rank within `join` sends to the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Inputs {
    /// The rank has run out of inputs.
    None,
    /// The rank has inputs and calls `backward`.
    Plain,
    /// The rank has inputs and calls `backward_weighted`.
    Weighted,
}

/// The number of ranks with inputs, and whether they are weighted by samples.
#[derive(Debug, Clone, Copy)]
pub(super) struct Active {
    pub count: usize,
    pub weighted: bool,
}

impl Active {
    /// Returns the number of ranks to divide by; `None` for all ranks, or where weights already account for it.
    pub(super) fn to_divide_by(self, join: JoinOptions) -> Option<usize> {
        (!join.divide_by_initial_world_size && !self.weighted).then_some(self.count)
    }
}

/// Sends whether this rank has inputs to all ranks. Returns how many have.
pub(super) fn count_active(
    group: &ProcessGroup,
    mine: Inputs,
    options: JoinOptions,
) -> Result<Active> {
    // Packs two counts into one number.
    const WEIGHTED: i64 = 1 << 32;
    let mine = match mine {
        Inputs::None => 0,
        Inputs::Plain => 1,
        Inputs::Weighted => WEIGHTED,
    };
    let counts = agree(group, mine, ReduceOp::Sum)?;
    let (weighted, plain) = ((counts / WEIGHTED) as usize, (counts % WEIGHTED) as usize);
    if weighted > 0 && plain > 0 {
        return Err(Error::Input(format!(
            "join: {plain} ranks call backward and {weighted} call backward_weighted; all must call the same"
        )));
    }
    let active = weighted + plain;
    if options.throw_on_early_termination && (1..group.world_size()).contains(&active) {
        return Err(Error::Input(format!(
            "join: {} of {} ranks have run out of inputs; give every rank the same number of batches, or \
             allow it without throw_on_early_termination",
            group.world_size() - active,
            group.world_size()
        )));
    }
    Ok(Active { count: active, weighted: weighted > 0 })
}

/// All-reduces one number and reads the result.
fn agree(group: &ProcessGroup, mine: i64, op: ReduceOp) -> Result<i64> {
    let mut number = Tensor::from_slice(&[mine]).to_kind(Kind::Int64).to_device(group.device());
    group.all_reduce(&mut number, op)?;
    group.synchronize()?;
    number.f_int64_value(&[0]).map_err(Error::torch("reading a number"))
}

impl Reducer {
    pub(super) fn is_joining(&self) -> bool {
        self.with_state(|state| state.joining.is_some())
    }

    fn set_joining(&self, joining: Option<JoinOptions>) {
        self.with_state(|state| state.joining = joining);
    }

    /// Takes part in the others' steps with zeros until no rank has inputs. Returns one of the last ranks, the same on
    /// all ranks.
    fn shadow_until_all_joined(&self, options: JoinOptions) -> Result<usize> {
        let group = self.group();
        let mut is_last = true;
        loop {
            let active = count_active(&group, Inputs::None, options)?;
            if active.count == 0 {
                break;
            }
            is_last = false;
            self.shadow(active, options)?;
        }
        let mine = if is_last { group.rank() as i64 } else { -1 };
        Ok(agree(&group, mine, ReduceOp::Max)?.max(0) as usize)
    }
}
