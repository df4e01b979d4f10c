//! The interface of all that happens during training besides the steps themselves.

use anyhow::Result;
use tch::Tensor;

use super::{Epoch, Step, TrainContext};
use crate::checkpoint::Checkpoint;

/// An action at fixed points of the training loop. Follows `Callback` of PyTorch Lightning and Keras.
///
/// Each rank has its own callbacks, which run on its thread. A method that calls a collective must do so on all ranks
/// alike. An error ends the run, and names this rank.
///
/// ```
/// # use ddp_mp_engine as ddp_mp;
/// use std::sync::Arc;
///
/// use ddp_mp::prelude::*;
///
/// /// Prints each step's learning rate, and ends training once the loss is small enough.
/// struct StopWhenSmall {
///     loss: f64,
/// }
///
/// impl<M> Callback<M> for StopWhenSmall {
///     fn on_step_end(&mut self, context: &mut TrainContext<M>, step: &Step) -> anyhow::Result<()> {
///         if context.group().rank() == 0 {
///             println!("step {}: learning rate {}", step.index, step.lr);
///         }
///         Ok(())
///     }
///
///     fn on_epoch_end(&mut self, context: &mut TrainContext<M>, epoch: &mut Epoch) -> anyhow::Result<()> {
///         if epoch.loss < self.loss {
///             context.end_training(); // the loss of an epoch is equal on all ranks, so all call this alike
///         }
///         Ok(())
///     }
/// }
///
/// # fn main() -> anyhow::Result<()> {
/// let dataset = Arc::new(TensorDataset::random(64, 20, Targets::Values(1), 1)?);
/// let steps = spawn(2, move |rank| {
///     let group = rank.init_process_group(rank.backend())?;
///     let (vs, model) = ModelConfig::default().build(rank.device(), 0)?;
///     let ddp = DistributedDataParallel::new(model, &vs, group, DdpOptions::default())?;
///     let sgd: Box<dyn Optimizer> = Box::new(Sgd::new(ddp.flat_buffers(), SgdOptions::default())?);
///     let sampler = DistributedSampler::new(dataset.len(), rank.world_size(), rank.rank())?;
///     let loader = DataLoader::new(dataset.clone(), sampler, 8, rank.device())?;
///     let mut trainer = Trainer::new(ddp, sgd, Schedule::constant(0.1), loader, Loss::Mse)?
///         .callback(StopWhenSmall { loss: f64::INFINITY });
///     Ok(trainer.train(10)?.steps)
/// })?;
/// assert_eq!(steps, [4, 4]); // one epoch: any loss is small enough
/// # Ok(())
/// # }
/// ```
#[allow(unused_variables)]
pub trait Callback<M> {
    /// Runs at each call of [`Trainer::train`](super::Trainer::train), after the warm-up, also if no step follows.
    fn on_train_start(&mut self, context: &mut TrainContext<M>) -> Result<()> {
        Ok(())
    }

    /// Runs when a run resumes, before the state of `checkpoint` is loaded.
    fn on_load_checkpoint(
        &mut self,
        context: &mut TrainContext<M>,
        checkpoint: &Checkpoint,
    ) -> Result<()> {
        Ok(())
    }

    /// Runs before the first step of an epoch, or of its rest after a resume.
    fn on_epoch_start(&mut self, context: &mut TrainContext<M>) -> Result<()> {
        Ok(())
    }

    /// Runs before the forward pass of a step. Its batches are loaded, and may be changed.
    fn on_step_start(&mut self, context: &mut TrainContext<M>, step: &mut Step) -> Result<()> {
        Ok(())
    }

    /// Runs between forward and backward of `step.batches[batch]`. Backward starts from `loss`, which may be changed:
    /// the mean loss of the batch, before it is scaled for float16 or divided by the number of batches.
    fn on_before_backward(
        &mut self,
        context: &mut TrainContext<M>,
        step: &Step,
        batch: usize,
        loss: &mut Tensor,
    ) -> Result<()> {
        Ok(())
    }

    /// Runs between backward and the optimizer's step, which [`Step::skip`] leaves out. The gradients are averaged;
    /// with float16 they are still scaled. Where the ranks step together (see
    /// [`OptimizerLayout`](crate::OptimizerLayout)), call [`average_gradients`](crate::optim::average_gradients) on all ranks
    /// before you read them.
    fn on_after_backward(&mut self, context: &mut TrainContext<M>, step: &mut Step) -> Result<()> {
        Ok(())
    }

    /// Runs right before the optimizer's step, unless the step is skipped. The gradients are those that the optimizer gets:
    /// unscaled and clipped. With float16 it makes no step of them if they are not finite. Where the ranks
    /// step together, call [`average_gradients`](crate::optim::average_gradients) on all ranks before you read them.
    fn on_before_optimizer_step(
        &mut self,
        context: &mut TrainContext<M>,
        step: &Step,
    ) -> Result<()> {
        Ok(())
    }

    /// Runs after a step, which the context has counted.
    fn on_step_end(&mut self, context: &mut TrainContext<M>, step: &Step) -> Result<()> {
        Ok(())
    }

    /// Runs after a complete epoch, which the context has counted. `epoch` has the result of its validation, if any. The
    /// program has printed it already.
    fn on_epoch_end(&mut self, context: &mut TrainContext<M>, epoch: &mut Epoch) -> Result<()> {
        Ok(())
    }

    /// Runs on each rank whose training ends with `error`: its own, or the failure of another rank. The model may be in the
    /// middle of a step. Call no collective here: the others may not have failed yet.
    fn on_failure(&mut self, context: &mut TrainContext<M>, error: &anyhow::Error) {}

    /// Runs after the last step, unless the run fails. Callbacks run in the reverse of their order here: what starts
    /// first ends last. The final checkpoint is already saved, so a change of the model here is not in it.
    fn on_train_end(&mut self, context: &mut TrainContext<M>) -> Result<()> {
        Ok(())
    }
}
