//! `--keep`: writes all tensors of one step of one rank to a file.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;

use anyhow::Result;
use tch::Tensor;

use crate::checkpoint::{TensorFile, write_tensors};
use crate::ddp::DistributedDataParallel;
use crate::ffi::TorchResult;
use crate::trainer::{Callback, Step, TrainContext};

/// The place of the step whose tensors are kept.
#[derive(Debug, Clone)]
pub struct KeepTensors {
    /// The safetensors file, which must not exist yet.
    pub file: PathBuf,
    /// The index of the step in the run, from 0.
    pub step: u64,
    /// The rank.
    pub rank: usize,
}

impl KeepTensors {
    /// Returns whether the file has the kept tensors of a step.
    #[doc(hidden)]
    pub fn is_written(&self) -> bool {
        let tensors = TensorFile::read(&self.file).and_then(|file| file.tensors());
        tensors.is_ok_and(|tensors| tensors.keys().any(|name| name.starts_with("before.")))
    }
}

/// The tensors of the step, as they come.
#[derive(Debug)]
pub(in crate::trainer) struct KeptTensors {
    place: KeepTensors,
    tensors: Rc<RefCell<BTreeMap<String, Tensor>>>,
}

/// The name of this callback among the observers of gradients.
const OBSERVER: &str = "keep";

impl KeptTensors {
    pub(in crate::trainer) fn new(place: KeepTensors) -> Self {
        Self { place, tensors: Rc::default() }
    }

    /// Returns the wrapped model, if it is in the step and on the rank that are kept.
    fn ddp_here<'a, M>(
        &self,
        context: &'a TrainContext<M>,
        step: &Step,
    ) -> Option<&'a DistributedDataParallel<M>> {
        let is_here = step.index == self.place.step && context.group().rank() == self.place.rank;
        is_here.then_some(&context.ddp)
    }

    /// Copies tensors, each under its name behind `prefix`.
    fn keep(
        &self,
        prefix: &str,
        tensors: impl IntoIterator<Item = (String, Tensor)>,
    ) -> crate::error::Result<()> {
        for (name, tensor) in tensors {
            copy(&mut self.tensors.borrow_mut(), format!("{prefix}.{name}"), &tensor)?;
        }
        Ok(())
    }
}

impl<M> Callback<M> for KeptTensors {
    fn on_step_start(&mut self, context: &mut TrainContext<M>, step: &mut Step) -> Result<()> {
        let Some(ddp) = self.ddp_here(context, step) else {
            if step.index == self.place.step {
                // As on the rank that is kept.
                context.ddp.observe_gradients(OBSERVER, Box::new(|_, _| Ok(())));
            }
            return Ok(());
        };
        for (index, batch) in step.batches.iter().enumerate() {
            let names = ["inputs".to_owned(), "targets".to_owned()].into_iter();
            let more = (0..batch.more_inputs.len()).map(|more| format!("more_inputs.{more}"));
            let tensors = batch.tensors().map(Tensor::shallow_clone);
            self.keep(&format!("batch.{index}"), names.chain(more).zip(tensors))?;
        }
        let parameters = ddp.trained_parameters();
        let names: Vec<String> = parameters.iter().map(|(name, _)| name.clone()).collect();
        self.keep("before", parameters)?;
        ddp.keep_outputs();
        let tensors = self.tensors.clone();
        let observe = move |index: usize, gradient: &mut Tensor| {
            copy(&mut tensors.borrow_mut(), format!("gradient.{}", names[index]), gradient)
        };
        ddp.observe_gradients(OBSERVER, Box::new(observe));
        Ok(())
    }

    fn on_after_backward(&mut self, context: &mut TrainContext<M>, step: &mut Step) -> Result<()> {
        context.ddp.stop_observing(OBSERVER);
        let Some(ddp) = self.ddp_here(context, step) else { return Ok(()) };
        ddp.group().await_launched()?;
        self.keep("output", numbered(&ddp.take_outputs()))?;
        Ok(self.keep("loss", numbered(&step.losses))?)
    }

    fn on_before_optimizer_step(
        &mut self,
        context: &mut TrainContext<M>,
        step: &Step,
    ) -> Result<()> {
        let Some(ddp) = self.ddp_here(context, step) else { return Ok(()) };
        ddp.group().await_launched()?;
        let averages = ddp.trained_parameters().into_iter();
        let averages = averages.map(|(name, parameter)| (name, parameter.grad()));
        Ok(self.keep("average", averages.filter(|(_, average)| average.defined()))?)
    }

    fn on_step_end(&mut self, context: &mut TrainContext<M>, step: &Step) -> Result<()> {
        if step.is_skipped() {
            self.on_before_optimizer_step(context, step)?;
        }
        let Some(ddp) = self.ddp_here(context, step) else { return Ok(()) };
        ddp.group().await_launched()?;
        self.keep("parameter", ddp.trained_parameters())?;
        self.keep("buffer", ddp.untrained_tensors())?;
        Ok(write_tensors(&self.place.file, self.tensors.take())?)
    }
}

impl Drop for KeptTensors {
    /// Writes what there is of a step that has failed.
    fn drop(&mut self) {
        let tensors = self.tensors.take();
        if !tensors.is_empty() {
            // The run has failed already, and says why.
            let _ = write_tensors(&self.place.file, tensors);
        }
    }
}

/// Returns the tensors of the batches, each with its index.
fn numbered(tensors: &[Tensor]) -> impl Iterator<Item = (String, Tensor)> {
    tensors.iter().enumerate().map(|(index, tensor)| (index.to_string(), tensor.shallow_clone()))
}

fn copy(
    tensors: &mut BTreeMap<String, Tensor>,
    name: String,
    tensor: &Tensor,
) -> crate::error::Result<()> {
    let copy = tensor.f_detach_copy().doing("keeping a tensor")?;
    tensors.insert(name, copy);
    Ok(())
}
