//! Asynchronous operations: they run on the communication thread, or on the GPU's stream.

use std::time::Duration;

use tch::{Device, Tensor};

use super::comm_thread::{CommunicationThread, QueuedCall};
use super::instrumentation::CallContext;
use super::work::State;
use super::{ProcessGroup, ReduceOp, Work};
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::ffi::cuda;
use crate::runtime::Activity;

impl ProcessGroup {
    /// Starts `operation`, any collectives of this group, and returns without waiting for the other ranks.
    ///
    /// Replaces PyTorch's `async_op=True`. Operations run one after the other in the order in which the rank calls
    /// them, asynchronous or not. Other ranks need not call them in the same way. With `threaded` and `gloo`, a
    /// separate thread runs the operation. With `nccl`, this call launches it, and it runs on the GPU like every
    /// operation there.
    ///
    /// Leave the tensors alone until [`Work::wait`] has returned: they hold old values, new values, or a mix.
    /// `operation` and everything that it captures move to the other thread, so give it handles of its own
    /// (`shallow_clone`).
    ///
    /// # Errors
    /// [`Error::Cancelled`] if the run has already failed. [`Work::wait`] returns the errors of `operation`; with
    /// `nccl`, this call returns them.
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # fn main() -> anyhow::Result<()> {
    /// use ddp_mp::{Backend, ReduceOp, spawn};
    /// use tch::Tensor;
    ///
    /// spawn(2, |rank| {
    ///     let group = rank.init_process_group(Backend::Threaded)?;
    ///     let tensor = Tensor::from_slice(&[rank.rank() as f32 + 1.0]);
    ///     let mut same = tensor.shallow_clone(); // another handle to the same memory
    ///     let work = group.async_op(move |group| group.all_reduce(&mut same, ReduceOp::Sum))?;
    ///     // ... something else ...
    ///     work.wait()?;
    ///     assert_eq!(tensor.double_value(&[0]), 3.0);
    ///     Ok(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn async_op(
        &self,
        operation: impl FnOnce(&ProcessGroup) -> Result<()> + Send + 'static,
    ) -> Result<Work> {
        self.run().check(self.global_rank())?;
        if self.is_stream_ordered() {
            operation(self)?;
            return self.launched();
        }
        if self.own_activity.is_some() {
            // This is the communication thread.
            operation(self)?;
            return Ok(Work::new(State::Done, self.run().clone(), self.global_rank()));
        }
        self.queue(Box::new(|group| {
            group.set_context(CallContext::default()); // errors then show the call site inside `operation`
            operation(group)
        }))
    }

    /// Starts an [`all_reduce`](Self::all_reduce) of a contiguous tensor, like [`async_op`](Self::async_op).
    pub(crate) fn all_reduce_async(&self, tensor: &Tensor, op: ReduceOp) -> Result<Work> {
        let (mut tensor, context) = (tensor.shallow_clone(), self.phase_tracker.context.get());
        self.async_op(move |group| {
            group.set_context(context);
            group.all_reduce(&mut tensor, op)
        })
    }

    /// Starts [`reduce_scatter_in_place`](Self::reduce_scatter_in_place), like [`async_op`](Self::async_op).
    pub(crate) fn reduce_scatter_async(&self, tensor: &Tensor, op: ReduceOp) -> Result<Work> {
        let (tensor, context) = (tensor.shallow_clone(), self.phase_tracker.context.get());
        self.async_op(move |group| {
            group.set_context(context);
            group.reduce_scatter_in_place(&tensor, op)
        })
    }

    /// Returns for how long the communication thread has had operations under way.
    pub(crate) fn async_time(&self) -> Duration {
        self.communication.get().map_or(Duration::ZERO, CommunicationThread::busy)
    }

    /// Queues `call` on the communication thread, behind earlier ones. Starts the thread if there is none.
    fn queue(&self, call: QueuedCall) -> Result<Work> {
        let thread = match self.communication.get() {
            Some(thread) => thread,
            None => {
                let thread = CommunicationThread::start(self)?;
                self.communication.get_or_init(|| thread)
            }
        };
        if let Some(side) = self.detach() {
            thread.attach(side);
        }
        let result = thread.run(self, call);
        Ok(Work::new(State::Queued(result), self.run().clone(), self.global_rank()))
    }

    /// Returns a function that recreates this membership on the communication thread, without its side.
    pub(super) fn on_another_thread(&self) -> impl FnOnce() -> ProcessGroup + Send + 'static {
        let (identity, common) = (self.identity.clone(), self.common.clone());
        let (traffic, number) = (self.traffic.clone(), self.phase_tracker.group);
        move || {
            let mut group = ProcessGroup::new(identity, common);
            group.own_activity = Some(Activity::default());
            group.phase_tracker.group = number;
            group.traffic = traffic;
            group
        }
    }

    /// Returns the handle of everything launched on this rank's stream so far.
    pub(super) fn launched(&self) -> Result<Work> {
        let mark = cuda::CudaEvent::new()?;
        if let Device::Cuda(gpu) = self.device() {
            mark.record(gpu)?;
        }
        Ok(Work::new(State::Launched(mark), self.run().clone(), self.global_rank()))
    }
}
