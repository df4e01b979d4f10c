//! Warm-up: does a GPU's first-time work before the first step.

use tch::{Kind, Tensor};

use super::TrainContext;
use super::context::BufferSnapshot;
use crate::error::Result;
use crate::ffi::TorchResult;
use crate::models::Forward;
use crate::optim::GradState;

impl<M: Forward> TrainContext<M> {
    /// Runs the kernels and collectives of a step once before the first step, on a GPU.
    ///
    /// The first launch of a kernel loads the kernel and waits until the GPU is idle. The first use of memory allocates
    /// it, which stops all GPUs. The first collective of each kind connects the ranks and allocates. All should happen
    /// before collectives are in flight, and outside of the measured time.
    /// Parameters, buffers and the loss so far stay unchanged. Other state changes if the model's forward pass changes
    /// it.
    pub(super) fn warm_up(&mut self) -> Result<()> {
        let loss_so_far = self.loss_sum.sum(self.ddp.group())?;
        let buffers = BufferSnapshot::of(&self.ddp)?;
        if let Some(batch) = self.loader.epoch(0)?.next() {
            let batch = batch?;
            // The program's own step may change what could not be restored.
            let loss = if self.own_step.is_some() {
                Tensor::f_zeros([1], (Kind::Float, self.group().device())).doing("zeros")?
            } else {
                let loss = self.loss_of(&batch, None)?;
                let no_sync = self.ddp.no_sync();
                self.ddp.backward(&self.scaler.scale(&loss)?)?;
                drop(no_sync);
                loss
            };
            for mut buffer in self.ddp.flat_buffers() {
                let _ = buffer.gradients.f_zero_().doing("zero_")?;
                buffer.layout.set_gradients(GradState::Averaged); // the average of zeros is zero
            }
            self.ddp.warm_up()?;
            self.scaler.unscale_()?;
            if let Some(max_norm) = self.options.max_grad_norm {
                let _ = self.ddp.clip_grad_norm(max_norm)?;
            }
            // A partitioned optimizer makes no step here: only rank 0 gets its state, so the others could not restore it.
            if !self.ddp.partitions_optimizer() {
                // Gradients and learning rate are zero. The optimizer's state is restored afterwards.
                let state = self.optimizer.state()?;
                self.scaler.step(&mut *self.optimizer, 0.0)?;
                self.optimizer.load_state(&state)?;
            }
            if let Some(state) = self.scaler.state() {
                self.scaler.load_state(&state)?; // as before the warm-up, and ready for the next step
            }
            self.ddp.zero_grad()?;
            self.loss_sum.add(&loss, batch.len())?;
            self.loss_sum.count(batch.len())?;
        }
        // This also acts as a barrier: no rank continues before all have finished warming up.
        self.loss_sum.take_mean(self.ddp.group())?;
        self.loss_sum.set_sum(loss_so_far)?;
        buffers.restore()
    }
}
