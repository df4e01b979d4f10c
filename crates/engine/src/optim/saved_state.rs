//! An optimizer's state by parameter, in the form of a checkpoint: reads it from the flat buffers, and loads it.

use std::collections::BTreeMap;

use super::optimizer_state::OptimizerState;
use super::param_layout::copy_range;
use super::shared_step::shared_model;
use super::{ParamSpan, ParameterState};
use crate::error::{Error, Result};
use crate::ffi::TorchResult;

impl OptimizerState {
    /// Returns a copy of each parameter's state with its number of steps, in creation order. The state is empty for a
    /// parameter that has not been stepped.
    pub(super) fn state(&self) -> Result<Vec<(u64, ParameterState)>> {
        let steps = self.steps();
        let fresh = |(_, span): (usize, &ParamSpan)| {
            let steps = steps.get(&span.index).copied().unwrap_or(0);
            let state = ParameterState { name: span.name.clone(), tensors: BTreeMap::new() };
            (span.index, (steps, state))
        };
        let mut states: BTreeMap<usize, (u64, ParameterState)> = self.spans().map(fresh).collect();
        for (key, flats) in &self.tensors {
            for (layout, flat) in self.seen.iter().zip(flats) {
                layout.each_section(flat, false, |section, values| {
                    for span in layout.spans_in(section) {
                        let Some((steps, state)) = states.get_mut(&span.index) else { continue };
                        if *steps > 0 {
                            let start = span.start - section.start;
                            let value = ParamSpan { start, ..span.clone() }.of(values)?;
                            state.tensors.insert((*key).into(), layout.copy(&value)?);
                        }
                    }
                    Ok(())
                })?;
            }
        }
        // On the other ranks the states would be those of parameters that have not been stepped.
        let mut partitions = self.seen.iter().filter_map(|layout| layout.partitions.as_ref());
        let is_whole = partitions.all(|partitions| partitions.group.rank() == 0);
        Ok(if is_whole { states.into_values().collect() } else { Vec::new() })
    }

    /// Returns the names of all parameters, in creation order.
    pub(super) fn parameter_names(&self) -> Vec<String> {
        let names = self.spans().map(|(_, span)| (span.index, span.name.clone()));
        names.collect::<BTreeMap<_, _>>().into_values().collect()
    }

    /// Loads the state. `count` reads the number of steps from the state of a parameter that was stepped. This state
    /// also holds the tensors named in `besides`. A state that does not match is refused before anything changes.
    pub(super) fn load(
        &mut self,
        state: &[ParameterState],
        besides: &[&str],
        count: impl Fn(&ParameterState) -> Result<u64>,
    ) -> Result<()> {
        let known: BTreeMap<&str, &ParameterState> =
            state.iter().map(|state| (&state.name[..], state)).collect();
        if let Some(extra) = known.keys().find(|name| self.spans().all(|(_, p)| p.name != **name)) {
            return Err(wrong(format!("has `{extra}`, which is not a parameter of this model")));
        }
        let now = self.arrangements();
        let spans = now.iter().enumerate();
        let spans = spans.flat_map(|(buffer, now)| now.spans.iter().map(move |it| (buffer, it)));
        let mut copies = Vec::new();
        let mut steps = BTreeMap::new();
        for (buffer, span) in spans {
            let Some(state) = self.stepped_state(&known, span, besides)? else { continue };
            for (index, (key, _)) in self.tensors.iter().enumerate() {
                let from = &state.tensors[*key];
                let from = from.f_reshape([-1]).doing("loading the optimizer's state")?;
                let end = span.start + span.numel();
                for (owned, at) in now[buffer].owned(span.start..end) {
                    let (start, len) = (owned.start - span.start, owned.len());
                    copies.push(((index, buffer, at), (from.shallow_clone(), start), len));
                }
            }
            steps.insert(span.index, count(state)?.min(self.count_to));
        }
        self.allocate()?; // ranks that share them wait here until none reads them any more
        let shared = shared_model(&self.buffers);
        if shared.as_ref().is_none_or(|shared| shared.group.rank() == 0) {
            for ((index, buffer, at), (from, start), len) in copies {
                copy_range(&self.tensors[index].1[buffer], at, &from, start, len)?;
            }
        }
        if let Some(shared) = shared {
            shared.group.barrier()?;
        }
        self.steps = steps;
        self.make_groups()
    }

    /// Returns the state of the parameter at `span`, with tensors that this optimizer can load; `None` if the parameter has
    /// not been stepped.
    fn stepped_state<'a>(
        &self,
        known: &BTreeMap<&str, &'a ParameterState>,
        span: &ParamSpan,
        besides: &[&str],
    ) -> Result<Option<&'a ParameterState>> {
        let name = &span.name;
        let Some(&state) = known.get(&name[..]) else {
            return Err(wrong(format!(
                "has nothing for parameter `{name}`; use the state of the same model"
            )));
        };
        let names = || self.tensors.iter().map(|(key, _)| *key).chain(besides.iter().copied());
        if let Some(extra) = state.tensors.keys().find(|key| names().all(|name| name != *key)) {
            return Err(wrong(format!(
                "has `{extra}` for parameter `{name}`, which this optimizer does not keep; it belongs to another optimizer, or to one with other options"
            )));
        }
        if state.tensors.is_empty() {
            return Ok(None);
        }
        if let Some(missing) = names().find(|key| !state.tensors.contains_key(*key)) {
            return Err(wrong(format!(
                "has no `{missing}` for parameter `{name}`; it belongs to another optimizer, or \
                 to one with other options"
            )));
        }
        for (key, _) in &self.tensors {
            let shape = state.tensors[*key].size();
            if shape != span.shape {
                return Err(wrong(format!(
                    "has a `{key}` of shape {shape:?} for parameter `{name}` of shape {:?}",
                    span.shape
                )));
            }
        }
        Ok(Some(state))
    }
}

/// Returns the error of a state that does not match the optimizer or the model.
fn wrong(problem: String) -> Error {
    Error::mismatch(format!("the optimizer's state {problem}"))
}
