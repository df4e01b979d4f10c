//! What a GPU does for the first time, done before the first step.

use tch::nn::ModuleT;

use super::Trainer;
use super::buffers::BufferSnapshot;
use crate::error::{Error, Result};
use crate::optim::GradState;

impl<M: ModuleT> Trainer<M> {
    /// Runs the kernels of a step once before the first step, on a GPU.
    ///
    /// The first launch of a kernel loads it, and waits for the GPU to become idle; the first use of memory
    /// allocates it, which stops all GPUs. Better before collectives are on their way, and outside of the
    /// time that is measured. Changes neither parameters nor buffers nor the loss so far, but whatever
    /// else a model's forward pass changes.
    pub(super) fn warm_up(&mut self) -> Result<()> {
        let loss_so_far = self.loss_sum.sum(self.ddp.group())?;
        let buffers = BufferSnapshot::of(&self.ddp)?;
        if let Some(batch) = self.loader.epoch(0)?.next() {
            let batch = batch?;
            let loss = self.loss_of(&batch)?;
            let no_sync = self.ddp.no_sync();
            self.ddp.backward(&self.scaler.scale(&loss)?)?;
            drop(no_sync);
            if let Some(optimizer) = &mut self.optimizer {
                for mut buffer in self.ddp.flat_buffers().into_iter().flatten() {
                    let _ = buffer.gradients.f_zero_().map_err(Error::torch("zero_"))?;
                    buffer.places.set_gradients(GradState::Averaged); // zeros are, too
                }
                self.scaler.unscale_()?;
                if let Some(max_norm) = self.max_grad_norm {
                    let _ = self.ddp.clip_grad_norm(max_norm)?;
                }
                // With gradients of zero and a learning rate of zero; what an optimizer remembers of it is
                // forgotten again.
                let state = optimizer.state()?;
                self.scaler.step(&mut **optimizer, 0.0)?;
                optimizer.load_state(&state)?;
            }
            if let Some(state) = self.scaler.state() {
                self.scaler.load_state(&state)?; // as it was, and ready for the next step
            }
            self.ddp.begin_step()?;
            self.loss_sum.add(&loss, batch.len())?;
            self.loss_sum.count(batch.len())?;
        }
        // Reduced, waited for, read, and reset: all ranks are through with it then.
        self.loss_sum.take_mean(self.ddp.group())?;
        self.loss_sum.set_sum(loss_so_far)?;
        buffers.restore()
    }
}
