//! The construction of a trainer: its options, its callbacks, and what connects it with the run.

use std::cell::OnceCell;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::callbacks::{
    Callbacks, Checkpoints, Events, FaultInjection, FingerprintOptions, Fingerprints, KeepTensors,
    KeptTensors, NonFiniteGuard, Order, ReplicaCheck, SaveAfterFailure, SaveEvery, Validation,
    WeightProbe,
};
use super::last_step::LastStep;
use super::loss::LossSum;
use super::own_step::{OwnStep, Share};
use super::{Callback, Criterion, LossParts, TrainContext, Trainer, TrainerOptions};
use crate::checkpoint::{CheckpointDir, TrainerState, Writer};
use crate::data::{Batch, DataLoader};
use crate::ddp::DistributedDataParallel;
#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::events::Observers;
use crate::ffi::Generator;
use crate::models::Forward;
use crate::optim::{GradScaler, Optimizer, Schedule};
use crate::records::DataFile;
use crate::runtime::StopRequest;

impl<M: Forward> Trainer<M> {
    /// Creates a trainer for `ddp`'s model on the batches of `loader`, with the learning rates of `schedule`. `loss` is a
    /// built-in [`Loss`](super::Loss), or a [`Criterion`].
    ///
    /// # Errors
    /// [`Error::Input`] when two numbers of the criterion have one name. [`Error::Torch`] when the device is out of
    /// memory.
    #[inline(never)] // for `built_in_models`
    pub fn new(
        ddp: DistributedDataParallel<M>,
        optimizer: Box<dyn Optimizer>,
        schedule: Schedule,
        loader: DataLoader,
        loss: impl Into<Criterion>,
    ) -> Result<Self> {
        let criterion = loss.into();
        criterion.check()?;
        let mut callbacks = Callbacks(Vec::new());
        callbacks.set(Order::FaultInjection, FaultInjection::planned(ddp.group()));
        callbacks.add(Order::NonFiniteGuard, NonFiniteGuard);
        let options = TrainerOptions::default();
        let context = TrainContext {
            scaler: options.amp.grad_scaler(&ddp)?,
            loss_sum: LossSum::new(ddp.group().device())?,
            last_step: LastStep::default(),
            ddp,
            optimizer,
            schedule,
            loader,
            criterion,
            own_step: None,
            share: Share::default(),
            step_count: None,
            has_run_backward: false,
            makes_loss_nan: false,
            options,
            generator: None,
            max_epochs: 1,
            stop: None,
            observers: Observers::default(),
            ended_by: None,
            state: TrainerState::default(),
            counted: 0,
            counted_here: 0,
            tokens_per_sample: OnceCell::new(),
        };
        Ok(Self { context, callbacks })
    }

    /// Adds a callback, which runs after the callbacks of the settings below and before the checkpoint of a step or an
    /// epoch is saved. Callbacks run in the order in which they are added; at the end of training in reverse, so the final
    /// checkpoint is saved first. Add callbacks before [`Trainer::resume`], or they miss the checkpoint.
    #[must_use]
    pub fn callback(mut self, callback: impl Callback<M> + 'static) -> Self {
        self.callbacks.add(Order::User, callback);
        self
    }

    /// Replaces the callback of this order.
    fn with(mut self, order: Order, callback: impl Callback<M> + 'static) -> Self {
        self.callbacks.set(order, Some(callback));
        self
    }

    /// Adds a callback that replaces the batches of each step. It runs before all others.
    #[must_use]
    #[doc(hidden)]
    pub fn replace_batches(self, callback: impl Callback<M> + 'static) -> Self {
        self.with(Order::Batches, callback)
    }

    /// Replaces all options.
    ///
    /// # Errors
    /// The errors of [`GradScaler::new`].
    #[inline(never)] // for `built_in_models`
    pub fn options(mut self, mut options: TrainerOptions) -> Result<Self> {
        options.accumulate = options.accumulate.max(1);
        if options.amp != self.context.options.amp {
            self.context.scaler = options.amp.grad_scaler(&self.context.ddp)?;
        }
        let check = options.check_replicas.map(|every| ReplicaCheck { every: every.max(1) });
        self.callbacks.set(Order::ReplicaCheck, check);
        self.context.options = options;
        Ok(self)
    }

    /// Replaces forward pass, loss and backward of each batch by `step`: for several models, or for another or more than
    /// one backward. `step` returns the mean loss of the batch, as the closure of [`Criterion::own`] does. The trainer's
    /// criterion still validates.
    ///
    /// ```
    /// # use ddp_mp_engine as ddp_mp;
    /// # use ddp_mp::prelude::*;
    /// # fn with_penalty(trainer: Trainer<Model>) -> Trainer<Model> {
    /// trainer.step(|context, batch| {
    ///     let autocast = context.autocast()?;
    ///     let output = context.forward(batch, true);
    ///     let loss = output.mse_loss(&batch.targets, Reduction::Mean);
    ///     drop(autocast);
    ///     context.backward(&(&loss + output.abs().mean(Kind::Float) * 0.1))?;
    ///     Ok(loss)
    /// })
    /// # }
    /// ```
    ///
    /// The step must keep to this:
    ///
    /// * It averages the gradients of the trainer's model exactly once, by [`TrainContext::backward`]. Any backward
    ///   before that is within [`no_sync`](crate::DistributedDataParallel::no_sync). With `accumulate` it runs for each batch, and
    ///   the trainer holds `no_sync` for all but the last. This is checked.
    /// * It makes the same collectives on all ranks.
    /// * An empty batch, which a rank may get with `exact_mean`, has a loss whose gradients are finite, such as a sum times 0.
    /// * Forward pass and loss run within [`TrainContext::autocast`], and backward outside.
    /// * For a backward of [`TrainContext::ddp_mut`], the step scales the loss with [`TrainContext::scaler`], divides it
    ///   by the number of accumulated batches, and has no `exact_mean`.
    /// * Other models are its own: it wraps them, and steps their optimizers.
    ///
    /// [`Callback::on_before_backward`] does not run, and of a loss that is not finite only samples with such data are
    /// named.
    #[must_use]
    pub fn step<L: Into<LossParts>>(
        mut self,
        step: impl FnMut(&mut TrainContext<M>, &Batch) -> anyhow::Result<L> + 'static,
    ) -> Self {
        self.context.own_step = Some(OwnStep::new(step));
        self
    }

    /// Reseeds `generator`, from which the model draws, at the start of each step. Its random numbers then depend on
    /// the step, not on earlier draws.
    #[must_use]
    pub fn generator(mut self, generator: Arc<Generator>) -> Self {
        self.context.generator = Some(generator);
        self
    }

    /// Stops training after the same step on all ranks when `stop` is requested. Call on all ranks alike.
    #[must_use]
    pub fn share_stop(mut self, stop: Arc<StopRequest>) -> Self {
        self.context.group().share_stop(&stop);
        self.context.stop = Some(stop);
        self
    }

    /// Validates on the batches of `loader` after every `every` epochs (at least 1), and after the last. Its sampler
    /// should be [`uneven`](crate::DistributedSampler::uneven), so that no sample is counted twice.
    #[must_use]
    #[inline(never)] // for `built_in_models`
    pub fn validation(self, loader: DataLoader, every: u64) -> Self {
        self.with(Order::Validation, Validation { loader, every: every.max(1) })
    }

    /// Saves into `dir` at the intervals of `every`, after the best validation so far, and when training ends or stops.
    /// Call on all ranks alike; rank 0 alone, which writes, needs `dir`. If a rank fails, a surviving rank that has `dir`
    /// saves the state after its last step. Before each other save the parameters of all ranks are compared. Training ends
    /// with [`Error::ReplicasDiverged`] if they differ, so these checkpoints hold equal replicas.
    ///
    /// `options` is stored as [`TrainerState::options`], and sets nothing, unlike [`TrainerOptions`]. A program that
    /// resumes can compare it with its own options, as `ddp-mp` does. [`resume`](Self::resume) itself compares only
    /// parameters, optimizer, number of samples and batch size.
    #[must_use]
    pub fn checkpoints(
        self,
        dir: impl Into<Option<CheckpointDir>>,
        every: SaveEvery,
        options: Map<String, Value>,
    ) -> Self {
        let dir = dir.into();
        let writer = dir.clone().filter(|_| self.context.group().rank() == 0).map(Writer::new);
        let checkpoints = Checkpoints { every, options: options.clone(), writer, saved_at: None };
        self.save_after_failure(dir, options).with(Order::Checkpoints, checkpoints)
    }

    /// Saves the state of the last whole step into `dir` if a rank fails, and nothing before. [`checkpoints`](Self::checkpoints)
    /// includes this. Call on all ranks alike.
    #[must_use]
    #[doc(hidden)]
    pub fn save_after_failure(
        mut self,
        dir: impl Into<Option<CheckpointDir>>,
        options: Map<String, Value>,
    ) -> Self {
        let callback = dir.into().map(|dir| SaveAfterFailure { dir, options });
        self.callbacks.set(Order::SaveAfterFailure, callback);
        self
    }

    /// Sets the data files, whose hashes checkpoints save: [`TrainerState::data_files`].
    #[doc(hidden)]
    pub fn data_files(mut self, files: Vec<DataFile>) -> Self {
        self.context.state.data_files = files;
        self
    }

    /// Tells `observers` what happens: the start, each step, metrics after every `every` steps of an epoch (at least 1), at
    /// its end and that of the run, each epoch and each validation. Call on all ranks alike, because they reduce their
    /// metrics if an observer of rank 0 wants them. `observers` are those of [`Rank::observers`](crate::Rank::observers).
    #[must_use]
    #[inline(never)] // for `built_in_models`
    pub fn observe(mut self, observers: Observers, every: u64) -> Self {
        self.context.observers = observers;
        self.with(Order::Events, Events::new(every.max(1)))
    }

    /// Tells the observers the fingerprints of each rank's batches, gradients, averages, parameters and buffers, as `options`
    /// say.
    #[must_use]
    #[inline(never)] // for `built_in_models`
    pub fn fingerprint(self, options: FingerprintOptions) -> Self {
        let run = self.context.ddp.group().run().clone();
        self.with(Order::Fingerprints, Fingerprints::new(options, run))
    }

    /// Writes all tensors of one step of one rank to a safetensors file: `batch`, `before` (the parameters before the
    /// step), `gradient` (the rank's own), `average`, `loss`, `parameter` (after the step) and `buffer`, each with a dot
    /// and the name of the tensor behind it.
    #[must_use]
    pub fn keep(self, place: KeepTensors) -> Self {
        self.with(Order::KeptTensors, KeptTensors::new(place))
    }

    /// Tells the observers of rank 0 the numbers of one weight on all ranks, in the first two steps. `hash_before_broadcast`
    /// is the [`parameters_hash`](crate::parameters_hash) of this rank's model before it was wrapped. Call on all ranks
    /// alike. The results of training are the same.
    #[must_use]
    pub fn probe(self, hash_before_broadcast: u64) -> Self {
        self.with(Order::WeightProbe, WeightProbe::new(hash_before_broadcast))
    }

    /// Returns the model in its current state.
    pub fn ddp(&self) -> &DistributedDataParallel<M> {
        self.context.ddp()
    }

    /// Returns the source of the batches.
    pub fn loader(&self) -> &DataLoader {
        self.context.loader()
    }

    /// Returns the loss scaler; enabled for float16 only.
    pub fn scaler(&self) -> &GradScaler {
        self.context.scaler()
    }

    /// Returns the progress of the run, as a checkpoint stores it.
    pub fn state(&self) -> &TrainerState {
        self.context.state()
    }

    /// Returns whether steps may be skipped because they are not finite. The averaged gradients decide it, so all ranks must
    /// have the same then.
    #[doc(hidden)]
    pub fn counts_skipped_steps(&self) -> bool {
        self.context.counts_skipped_steps()
    }
}
