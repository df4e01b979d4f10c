//! `--record`: writes hashes of what this rank has in each step.

use std::cell::RefCell;
use std::fs;
use std::rc::Rc;
use std::sync::Arc;

use anyhow::Result;
use serde_json::{Map, Value};
use tch::Tensor;

use crate::data::Batch;
use crate::ddp::DistributedDataParallel;
use crate::ffi::{self, TorchResult};
use crate::models::tensor_hash;
use crate::process_group::dtype_name;
use crate::runtime::RunContext;
use crate::telemetry::{
    RECORD_FORMAT, RecordFile, RecordHeader, RecordLine, RecordedStep, RecordedTensor, StepOfRank,
    TensorHash,
};
use crate::trainer::{Callback, Step, TrainContext};

/// Writes the lines of one rank to the record of its process.
#[derive(Debug)]
pub(in crate::trainer) struct Record {
    pub file: Arc<RecordFile>,
    /// Only steps whose number is divisible by this are recorded.
    pub every: u64,
    /// The program and its version.
    pub program: String,
    pub options: Map<String, Value>,
    /// The run, which knows the rank that failed first.
    pub run: Arc<RunContext>,
    pub now: Recorded,
}

/// What is recorded of this rank so far.
#[derive(Debug, Default)]
pub(in crate::trainer) struct Recorded {
    /// This rank, once it has recorded its start.
    rank: Option<usize>,
    /// The step that is being recorded.
    step: Option<RecordedStep>,
    /// The last step that this rank has ended.
    ended: Option<u64>,
    /// The hashes of this step's own gradients.
    gradients: Rc<RefCell<Vec<Option<TensorHash>>>>,
}

/// The name of the record among the observers of gradients.
const OBSERVER: &str = "record";

impl<M> Callback<M> for Record {
    fn on_train_start(&mut self, context: &mut TrainContext<M>) -> Result<()> {
        let ddp = &context.ddp;
        let describe = |(name, tensor): (String, Tensor)| RecordedTensor {
            name,
            dtype: dtype_name(tensor.kind()).into(),
            shape: tensor.size(),
        };
        self.file.begin(RecordHeader {
            format: RECORD_FORMAT,
            program: self.program.clone(),
            libtorch: ffi::version(),
            processor: processor(),
            world_size: ddp.group().world_size(),
            every: self.every,
            options: self.options.clone(),
            parameters: ddp.trained_parameters().into_iter().map(describe).collect(),
            buffers: ddp.untrained_tensors().into_iter().map(describe).collect(),
        })?;
        ddp.group().synchronize()?;
        let rank = ddp.group().rank();
        let line = RecordLine::Start {
            step: context.state.step,
            rank,
            parameters: hashes(ddp.trained_parameters())?,
            buffers: hashes(ddp.untrained_tensors())?,
        };
        self.now.rank = Some(rank);
        Ok(self.file.line(&line)?)
    }

    /// Begins a step that is due: hashes its batches, and watches its gradients.
    fn on_step_start(&mut self, context: &mut TrainContext<M>, step: &mut Step) -> Result<()> {
        let ddp = &context.ddp;
        if !step.index.is_multiple_of(self.every) {
            return Ok(());
        }
        let batch = step.batches.iter().flat_map(Batch::tensors).map(hash);
        let none = vec![None; ddp.trained_parameters().len()];
        self.now.step = Some(RecordedStep {
            step: step.index,
            rank: ddp.group().rank(),
            epoch: context.state.epoch,
            lr: step.lr,
            samples: Some(context.samples(0, step.batches.len())?),
            batch: Some(batch.collect::<crate::error::Result<_>>()?),
            averages: none.clone(),
            parameters: none.clone(),
            buffers: vec![None; ddp.untrained_tensors().len()],
            ..RecordedStep::default()
        });
        *self.now.gradients.borrow_mut() = none;
        let gradients = self.now.gradients.clone();
        let observe = move |parameter: usize, gradient: &mut Tensor| {
            gradients.borrow_mut()[parameter] = Some(hash(gradient)?);
            Ok(())
        };
        ddp.observe_gradients(OBSERVER, Box::new(observe));
        Ok(())
    }

    fn on_after_backward(&mut self, context: &mut TrainContext<M>, _: &mut Step) -> Result<()> {
        let (ddp, Some(step)) = (&context.ddp, &mut self.now.step) else { return Ok(()) };
        ddp.stop_observing(OBSERVER);
        ddp.group().synchronize()?;
        step.gradients = self.now.gradients.take();
        Ok(())
    }

    fn on_before_optimizer_step(&mut self, context: &mut TrainContext<M>, _: &Step) -> Result<()> {
        if let Some(step) = &mut self.now.step {
            step.averages = average_hashes(&context.ddp)?;
        }
        Ok(())
    }

    fn on_step_end(&mut self, context: &mut TrainContext<M>, step: &Step) -> Result<()> {
        self.now.ended = Some(step.index);
        let (ddp, Some(mut line)) = (&context.ddp, self.now.step.take()) else { return Ok(()) };
        if step.is_skipped() {
            line.averages = average_hashes(ddp)?;
        }
        ddp.group().synchronize()?;
        line.loss = step.losses.iter().map(loss).collect::<crate::error::Result<_>>()?;
        line.parameters = hashes(ddp.trained_parameters())?;
        line.buffers = hashes(ddp.untrained_tensors())?;
        Ok(self.file.line(&RecordLine::Step(line))?)
    }
}

impl Drop for Record {
    /// Writes what is known of a step that has failed.
    fn drop(&mut self) {
        let failed_first = self.run.cancel.cancelled_by();
        let Some(mut line) = self.now.step.take() else {
            let Some(rank) = self.now.rank else { return };
            let entered = self.run.flight_recorder.step_of(rank);
            let entered = entered.filter(|step| self.now.ended.is_none_or(|ended| *step > ended));
            let failed = failed_first.unwrap_or(rank);
            // A process that was killed cannot write it.
            if let Some(step) = entered
                && (failed == rank || self.run.is_elsewhere(failed))
            {
                let line = RecordLine::Failed(StepOfRank { step, rank: failed });
                let _ = self.file.line(&line);
            }
            return;
        };
        if line.gradients.is_empty() {
            line.gradients = self.now.gradients.take();
        }
        line.stopped = failed_first.is_some_and(|rank| rank != line.rank);
        line.failed = !line.stopped;
        // The run has failed already, and says why.
        let _ = self.file.line(&RecordLine::Step(line));
    }
}

/// Returns the hashes of the averaged gradients.
fn average_hashes<M>(
    ddp: &DistributedDataParallel<M>,
) -> crate::error::Result<Vec<Option<TensorHash>>> {
    ddp.group().synchronize()?;
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
