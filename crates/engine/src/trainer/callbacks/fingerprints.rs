//! Fingerprints of what this rank has in each step, for the observers of the run.

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
    Event, FINGERPRINT_FORMAT, Fingerprint, FingerprintedRun, ModuleTensor, Observers,
    StepFingerprint, StepOfRank, TensorFingerprint, TensorShape,
};
use crate::ffi::{self, TorchResult, retain_grad};
use crate::models::{stop_watching_outputs, tensor_fingerprint, watch_outputs};
use crate::process_group::dtype_name;
use crate::runtime::RunContext;
use crate::trainer::{Amp, Callback, Step, TrainContext};

/// What is told of each rank.
#[derive(Debug, Clone)]
pub struct FingerprintOptions {
    /// Only steps whose index is divisible by this are told; at least 1.
    pub every: u64,
    /// Tell of whole tensors in each step, not of one part of those that are large.
    pub whole: bool,
    /// Tell what named layers return, and the gradients of that; see [`layer_output`](crate::models::layer_output).
    pub modules: bool,
    /// The program and its version.
    pub program: String,
    /// What may change the result.
    pub options: Map<String, Value>,
}

/// Tells the observers the fingerprints of one rank.
#[derive(Debug)]
pub(in crate::trainer) struct Fingerprints {
    options: FingerprintOptions,
    /// The run, which knows the rank that failed first.
    run: Arc<RunContext>,
    /// The observers, once this rank has told its start, and this rank.
    told: Option<(Observers, usize)>,
    /// The step that is being told.
    step: Option<StepFingerprint>,
    /// The last step that this rank has ended.
    ended: Option<u64>,
    /// This step's own gradients.
    gradients: Rc<RefCell<Vec<Option<TensorFingerprint>>>>,
    outputs: Rc<RefCell<Outputs>>,
}

/// What the named layers of the model have returned in this step.
#[derive(Debug, Default)]
struct Outputs {
    told: Vec<ModuleTensor>,
    /// Those whose gradient backward keeps.
    kept: Vec<(String, Tensor)>,
    /// The first error.
    error: Option<crate::error::Error>,
}

impl FingerprintOptions {
    /// Returns the step whose parts of large tensors are due; `None` for whole tensors.
    fn step_of_parts(&self, step: u64) -> Option<u64> {
        (!self.whole).then_some(step)
    }
}

impl Fingerprints {
    pub(in crate::trainer) fn new(options: FingerprintOptions, run: Arc<RunContext>) -> Self {
        let options = FingerprintOptions { every: options.every.max(1), ..options };
        Self {
            options,
            run,
            told: None,
            step: None,
            ended: None,
            gradients: Rc::default(),
            outputs: Rc::default(),
        }
    }

    /// Watches what the layers of the model return in this step.
    fn watch(&self, step: u64) {
        let (outputs, part) = (self.outputs.clone(), self.options.step_of_parts(step));
        outputs.take();
        watch_outputs(Box::new(move |layer, output| {
            let outputs = &mut *outputs.borrow_mut();
            if let Err(error) = outputs.add(layer, output, part) {
                outputs.error.get_or_insert(error);
            }
        }));
    }
}

impl Outputs {
    /// Adds the output of a layer, unless this is validation.
    fn add(
        &mut self,
        layer: String,
        output: &Tensor,
        part: Option<u64>,
    ) -> crate::error::Result<()> {
        if !output.requires_grad() {
            return Ok(());
        }
        self.told.push(module_tensor(layer.clone(), output, part)?);
        retain_grad(output)?;
        self.kept.push((layer, output.shallow_clone()));
        Ok(())
    }

    /// Returns what layers have returned in the order of execution, and the gradients of that in the order of backward.
    fn complete(
        self,
        part: Option<u64>,
    ) -> crate::error::Result<(Vec<ModuleTensor>, Vec<ModuleTensor>)> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let mut gradients = Vec::new();
        for (layer, output) in self.kept.into_iter().rev() {
            let gradient = output.grad();
            if gradient.defined() {
                gradients.push(module_tensor(layer, &gradient, part)?);
            }
        }
        Ok((self.told, gradients))
    }
}

fn module_tensor(
    module: String,
    tensor: &Tensor,
    part: Option<u64>,
) -> crate::error::Result<ModuleTensor> {
    let (dtype, shape) = (dtype_name(tensor.kind()).into(), tensor.size());
    Ok(ModuleTensor { module, dtype, shape, tensor: tensor_fingerprint(tensor, part)? })
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
            program: self.options.program.clone(),
            libtorch: ffi::version(),
            processor: processor(),
            world_size: ddp.group().world_size(),
            every: self.options.every,
            whole: self.options.whole,
            options: self.options.options.clone(),
            parameters: ddp.trained_parameters().into_iter().map(describe).collect(),
            buffers: ddp.untrained_tensors().into_iter().map(describe).collect(),
        };
        tell(&context.observers, Fingerprint::Header(header))?;
        ddp.group().synchronize()?;
        let rank = ddp.group().rank();
        let start = Fingerprint::Start {
            step: context.state.step,
            rank,
            parameters: fingerprints(ddp.trained_parameters(), None)?,
            buffers: fingerprints(ddp.untrained_tensors(), None)?,
        };
        self.told = Some((context.observers.clone(), rank));
        tell(&context.observers, start)
    }

    /// Begins a step that is due: takes the fingerprints of its batches, and watches its outputs and gradients.
    fn on_step_start(&mut self, context: &mut TrainContext<M>, step: &mut Step) -> Result<()> {
        let ddp = &context.ddp;
        if !step.index.is_multiple_of(self.options.every) {
            return Ok(());
        }
        let part = self.options.step_of_parts(step.index);
        let batch = step.batches.iter().flat_map(Batch::tensors);
        let batch = batch.map(|tensor| tensor_fingerprint(tensor, part));
        let computes_in = match context.options.amp {
            Amp::Off => None,
            Amp::Bf16 => Some("bfloat16".to_owned()),
            Amp::Fp16 => Some("float16".to_owned()),
        };
        let none = vec![None; ddp.trained_parameters().len()];
        self.step = Some(StepFingerprint {
            step: step.index,
            rank: ddp.group().rank(),
            epoch: context.state.epoch,
            lr: step.lr,
            computes_in,
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
            gradients.borrow_mut()[parameter] = Some(tensor_fingerprint(gradient, part)?);
            Ok(())
        };
        ddp.observe_gradients(OBSERVER, Box::new(observe));
        if self.options.modules {
            self.watch(step.index);
        }
        Ok(())
    }

    fn on_after_backward(&mut self, context: &mut TrainContext<M>, _: &mut Step) -> Result<()> {
        let (ddp, Some(step)) = (&context.ddp, &mut self.step) else { return Ok(()) };
        ddp.stop_observing(OBSERVER);
        stop_watching_outputs();
        ddp.group().await_launched()?;
        step.gradients = self.gradients.take();
        let part = self.options.step_of_parts(step.step);
        (step.outputs, step.output_gradients) = self.outputs.take().complete(part)?;
        Ok(())
    }

    fn on_before_optimizer_step(&mut self, context: &mut TrainContext<M>, _: &Step) -> Result<()> {
        if let Some(step) = &mut self.step {
            let part = self.options.step_of_parts(step.step);
            step.averages = averages(&context.ddp, part)?;
        }
        Ok(())
    }

    fn on_step_end(&mut self, context: &mut TrainContext<M>, step: &Step) -> Result<()> {
        self.ended = Some(step.index);
        // The line stays in `self.step` until it is complete. If a call fails before, `drop` tells what is known.
        let (ddp, Some(line)) = (&context.ddp, &mut self.step) else { return Ok(()) };
        let part = self.options.step_of_parts(line.step);
        if step.is_skipped() {
            line.averages = averages(ddp, part)?;
        }
        ddp.group().await_launched()?;
        line.loss = step.losses.iter().map(loss).collect::<crate::error::Result<_>>()?;
        line.parameters = fingerprints(ddp.trained_parameters(), part)?;
        line.buffers = fingerprints(ddp.untrained_tensors(), part)?;
        let Some(line) = self.step.take() else { return Ok(()) };
        tell(&context.observers, Fingerprint::Step(line))
    }
}

impl Drop for Fingerprints {
    /// Tells what is known of a step that has failed.
    fn drop(&mut self) {
        stop_watching_outputs();
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
            line.outputs = self.outputs.take().told;
        }
        line.stopped = failed_first.is_some_and(|rank| rank != line.rank);
        line.failed = !line.stopped;
        tell_last(&observers, Fingerprint::Step(line));
    }
}

/// Returns the fingerprints of the averaged gradients. This waits for no rank: one that has the averages makes the step, and may
/// save its state after the failure of another.
fn averages<M>(
    ddp: &DistributedDataParallel<M>,
    part: Option<u64>,
) -> crate::error::Result<Vec<Option<TensorFingerprint>>> {
    ddp.group().await_launched()?;
    let averages = ddp.trained_parameters().into_iter().map(|(_, parameter)| parameter.grad());
    let made =
        |average: Tensor| average.defined().then(|| tensor_fingerprint(&average, part)).transpose();
    averages.map(made).collect()
}

fn fingerprints(
    tensors: Vec<(String, Tensor)>,
    part: Option<u64>,
) -> crate::error::Result<Vec<Option<TensorFingerprint>>> {
    tensors.iter().map(|(_, tensor)| tensor_fingerprint(tensor, part).map(Some)).collect()
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
