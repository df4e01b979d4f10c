//! Hashes of what this rank has in each step, for the observers of the run.

use std::cell::RefCell;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;

use anyhow::Result;
use serde_json::{Map, Value};
use tch::Tensor;

use crate::data::Batch;
use crate::ddp::DistributedDataParallel;
use crate::events::{
    Event, FINGERPRINT_FORMAT, Fingerprint, FingerprintedRun, Observers, StepFingerprint,
    StepOfRank, TensorHash, TensorShape,
};
use crate::ffi::{self, TorchResult};
use crate::models::tensor_hash;
use crate::process_group::dtype_name;
use crate::runtime::RunContext;
use crate::trainer::{Callback, Step, TrainContext};

/// Tells the observers hashes of one rank.
#[derive(Debug)]
pub(in crate::trainer) struct Fingerprints {
    /// Only steps whose number is divisible by this are hashed.
    every: u64,
    /// The program and its version.
    program: String,
    options: Map<String, Value>,
    /// The run, which knows the rank that failed first.
    run: Arc<RunContext>,
    /// The observers, once this rank has told its start, and this rank.
    told: Option<(Observers, usize)>,
    /// The step that is being hashed.
    step: Option<StepFingerprint>,
    /// The last step that this rank has ended.
    ended: Option<u64>,
    /// The hashes of this step's own gradients.
    gradients: Rc<RefCell<Vec<Option<TensorHash>>>>,
}

impl Fingerprints {
    pub(in crate::trainer) fn new(
        every: u64,
        program: String,
        options: Map<String, Value>,
        run: Arc<RunContext>,
    ) -> Self {
        let gradients = Rc::default();
        Self { every, program, options, run, told: None, step: None, ended: None, gradients }
    }
}

fn tell(observers: &Observers, fingerprint: Fingerprint) -> Result<()> {
    observers.tell(&Event::Fingerprint { fingerprint })
}

/// Tells the last of a rank that has failed. The run says why already; an observer that panics as well must not end the
/// process.
fn tell_last(observers: &Observers, fingerprint: Fingerprint) {
    let _ = catch_unwind(AssertUnwindSafe(|| tell(observers, fingerprint)));
}

/// The name of this callback among the observers of gradients.
const OBSERVER: &str = "fingerprints";

impl<M> Callback<M> for Fingerprints {
    fn on_train_start(&mut self, context: &mut TrainContext<M>) -> Result<()> {
        let ddp = &context.ddp;
        let describe = |(name, tensor): (String, Tensor)| TensorShape {
            name,
            dtype: dtype_name(tensor.kind()).into(),
            shape: tensor.size(),
        };
        let header = FingerprintedRun {
            format: FINGERPRINT_FORMAT,
            program: self.program.clone(),
            libtorch: ffi::version(),
            processor: processor(),
            world_size: ddp.group().world_size(),
            every: self.every,
            options: self.options.clone(),
            parameters: ddp.trained_parameters().into_iter().map(describe).collect(),
            buffers: ddp.untrained_tensors().into_iter().map(describe).collect(),
        };
        tell(&context.observers, Fingerprint::Header(header))?;
        ddp.group().synchronize()?;
        let rank = ddp.group().rank();
        let start = Fingerprint::Start {
            step: context.state.step,
            rank,
            parameters: hashes(ddp.trained_parameters())?,
            buffers: hashes(ddp.untrained_tensors())?,
        };
        self.told = Some((context.observers.clone(), rank));
        tell(&context.observers, start)
    }

    /// Begins a step that is due: hashes its batches, and watches its gradients.
    fn on_step_start(&mut self, context: &mut TrainContext<M>, step: &mut Step) -> Result<()> {
        let ddp = &context.ddp;
        if !step.index.is_multiple_of(self.every) {
            return Ok(());
        }
        let batch = step.batches.iter().flat_map(Batch::tensors).map(hash);
        let none = vec![None; ddp.trained_parameters().len()];
        self.step = Some(StepFingerprint {
            step: step.index,
            rank: ddp.group().rank(),
            epoch: context.state.epoch,
            lr: step.lr,
            samples: Some(context.samples(0, step.batches.len())?),
            batch: Some(batch.collect::<crate::error::Result<_>>()?),
            averages: none.clone(),
            parameters: none.clone(),
            buffers: vec![None; ddp.untrained_tensors().len()],
            ..StepFingerprint::default()
        });
        *self.gradients.borrow_mut() = none;
        let gradients = self.gradients.clone();
        let observe = move |parameter: usize, gradient: &mut Tensor| {
            gradients.borrow_mut()[parameter] = Some(hash(gradient)?);
            Ok(())
        };
        ddp.observe_gradients(OBSERVER, Box::new(observe));
        Ok(())
    }

    fn on_after_backward(&mut self, context: &mut TrainContext<M>, _: &mut Step) -> Result<()> {
        let (ddp, Some(step)) = (&context.ddp, &mut self.step) else { return Ok(()) };
        ddp.stop_observing(OBSERVER);
        ddp.group().await_launched()?;
        step.gradients = self.gradients.take();
        Ok(())
    }

    fn on_before_optimizer_step(&mut self, context: &mut TrainContext<M>, _: &Step) -> Result<()> {
        if let Some(step) = &mut self.step {
            step.averages = average_hashes(&context.ddp)?;
        }
        Ok(())
    }

    fn on_step_end(&mut self, context: &mut TrainContext<M>, step: &Step) -> Result<()> {
        self.ended = Some(step.index);
        // The line stays in `self.step` until it is complete. If a call fails before, `drop` tells what is known.
        let (ddp, Some(line)) = (&context.ddp, &mut self.step) else { return Ok(()) };
        if step.is_skipped() {
            line.averages = average_hashes(ddp)?;
        }
        ddp.group().await_launched()?;
        line.loss = step.losses.iter().map(loss).collect::<crate::error::Result<_>>()?;
        line.parameters = hashes(ddp.trained_parameters())?;
        line.buffers = hashes(ddp.untrained_tensors())?;
        let Some(line) = self.step.take() else { return Ok(()) };
        tell(&context.observers, Fingerprint::Step(line))
    }
}

impl Drop for Fingerprints {
    /// Tells what is known of a step that has failed.
    fn drop(&mut self) {
        let failed_first = self.run.cancel.cancelled_by();
        let Some((observers, rank)) = self.told.take() else { return };
        let Some(mut line) = self.step.take() else {
            let entered = self.run.flight_recorder.step_of(rank);
            let entered = entered.filter(|step| self.ended.is_none_or(|ended| *step > ended));
            let failed = failed_first.unwrap_or(rank);
            // A process that was killed cannot tell it.
            if let Some(step) = entered
                && (failed == rank || self.run.is_elsewhere(failed))
            {
                tell_last(&observers, Fingerprint::Failed(StepOfRank { step, rank: failed }));
            }
            return;
        };
        if line.gradients.is_empty() {
            line.gradients = self.gradients.take();
        }
        line.stopped = failed_first.is_some_and(|rank| rank != line.rank);
        line.failed = !line.stopped;
        tell_last(&observers, Fingerprint::Step(line));
    }
}

/// Returns the hashes of the averaged gradients. This waits for no rank: one that has the averages makes the step, and may save
/// its state after the failure of another.
fn average_hashes<M>(
    ddp: &DistributedDataParallel<M>,
) -> crate::error::Result<Vec<Option<TensorHash>>> {
    ddp.group().await_launched()?;
    let averages = ddp.trained_parameters().into_iter().map(|(_, parameter)| parameter.grad());
    averages.map(|average| average.defined().then(|| hash(&average)).transpose()).collect()
}

fn hashes(tensors: Vec<(String, Tensor)>) -> crate::error::Result<Vec<Option<TensorHash>>> {
    tensors.iter().map(|(_, tensor)| hash(tensor).map(Some)).collect()
}

fn hash(tensor: &Tensor) -> crate::error::Result<TensorHash> {
    tensor_hash(tensor).map(TensorHash)
}

/// Returns a loss; `None` if it is not finite.
fn loss(loss: &Tensor) -> crate::error::Result<Option<f64>> {
    let loss = loss.f_double_value(&[]).doing("reading the loss")?;
    Ok(loss.is_finite().then_some(loss))
}

/// Returns the name of this machine's processor.
fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    name.map_or("unknown", |(_, name)| name).trim().into()
}
