//! Training on uneven inputs: ranks that have run out take part in the other ranks' collectives.

use super::active_ranks::{JoinOptions, all_reduce_number, count_active};
use super::wrapper::DistributedDataParallel;
use crate::error::Error;
use crate::optim::OptimizerLayout;
use crate::process_group::ReduceOp;

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
    /// The error of `train`; the errors of the collectives; [`Error::Input`] with `throw_on_early_termination`.
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
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
        let optimizer_layout = self.reducer.state().options.optimizer_layout;
        if optimizer_layout != OptimizerLayout::Replicated {
            // A rank that has run out of inputs makes no steps, and each step is a collective.
            return Err(Error::unsupported(format!(
                "join cannot be used with OptimizerLayout::{optimizer_layout:?}: a rank without inputs makes no optimizer \
                 steps, so its part of the parameters would not be updated; use Replicated, or give every rank the same \
                 number of batches"
            ))
            .into());
        }
        self.reducer.state().joining = Some(options);
        let result = train(self);
        self.reducer.state().joining = None;
        let result = result?;
        // Takes part in the others' steps with zeros until no rank has inputs.
        let mut is_last = true;
        while count_active(&self.group, false, options)? > 0 {
            is_last = false;
            self.reducer.state().shadow()?;
        }
        // One of the last ranks, the same on all ranks.
        let mine = if is_last { self.group.rank() as i64 } else { -1 };
        let last = all_reduce_number(&self.group, mine, ReduceOp::Max)?.max(0) as usize;
        self.sync_module_states(last)?;
        Ok(result)
    }
}
