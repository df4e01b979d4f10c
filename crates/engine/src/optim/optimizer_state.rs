//! The optimizer state for each element of the flat buffers, and the groups of parameters that one kernel call steps,
//! with their tensors.

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use tch::Tensor;

use super::param_layout::{Arrangement, copy_range, state_numel, zeros_like};
use super::parts::{Count, Group, Parts};
use super::runs::{Runs, runs};
use super::shared_step::{SharedRanges, on_one_rank, shared_model};
use super::{FlatBuffer, GradState, ParamSpan, average_gradients};
use crate::error::{Error, Result};
use crate::ffi::{TensorList, TorchResult, bump_versions};

/// A part of a [`SpanRun`](super::runs::SpanRun) that this rank updates.
struct Owned {
    buffer: usize,
    /// The range of elements in the buffer.
    range: Range<usize>,
    /// The offset of the first element in a state tensor.
    at: usize,
}

/// Flat buffers, with further buffers of the same layout (`tensors`) for the optimizer's state.
#[derive(Debug)]
pub(super) struct OptimizerState {
    pub buffers: Vec<FlatBuffer>,
    /// The arrangement of each buffer when `groups` were made.
    pub(super) seen: Vec<Rc<Arrangement>>,
    /// For each key of the state, a tensor for each buffer; zeros at first. With partitions, the values of this rank's
    /// partitions.
    pub(super) tensors: Vec<(&'static str, Vec<Tensor>)>,
    /// Selects the parameters with weight decay; `None` for no weight decay.
    pub(super) decays: Option<fn(&ParamSpan) -> bool>,
    /// The largest step count that the optimizer distinguishes.
    pub(super) count_to: u64,
    /// The number of steps of each parameter when `groups` were made, by its index.
    pub(super) steps: BTreeMap<usize, u64>,
    pub groups: Vec<Group>,
    /// The ranges of `groups`, if the ranks share the model.
    shared_ranges: Vec<SharedRanges>,
}

impl OptimizerState {
    pub(super) fn new(
        buffers: Vec<FlatBuffer>,
        keys: &[&'static str],
        decays: Option<fn(&ParamSpan) -> bool>,
        count_to: u64,
    ) -> Result<Self> {
        let mut flat = Self {
            buffers,
            seen: Vec::new(),
            tensors: keys.iter().map(|name| (*name, Vec::new())).collect(),
            decays,
            count_to,
            steps: BTreeMap::new(),
            groups: Vec::new(),
            shared_ranges: Vec::new(),
        };
        flat.allocate()?;
        flat.make_groups()?;
        Ok(flat)
    }

    /// Allocates all tensors again, filled with zeros. The groups must be made again after it.
    pub(super) fn allocate(&mut self) -> Result<()> {
        self.steps = self.steps();
        self.groups.clear(); // they have views of the tensors
        self.tensors.iter_mut().for_each(|(_, flats)| flats.clear());
        let zeros = || self.tensors.iter().map(|_| self.buffers.iter().map(zeros_like).collect());
        let new = on_one_rank(&self.buffers, self.tensors.len(), || zeros().collect())?;
        self.tensors.iter_mut().zip(new).for_each(|((_, flats), zeros)| *flats = zeros);
        Ok(())
    }

    /// Returns whether there are gradients to step with. If so, follows the parameters first. Local gradients are an error:
    /// with them the ranks would diverge.
    pub(super) fn begin_step(&mut self) -> Result<bool> {
        let states = || self.buffers.iter().map(|buffer| buffer.layout.gradients());
        if states().any(|state| state == GradState::Local) {
            return Err(Error::usage(
                "the gradients of this rank were not averaged, and a step with them would make the ranks differ: call the \
                 last backward before a step outside of no_sync"
                    .into(),
            ));
        }
        let have_gradients = states().any(|state| state != GradState::Cleared);
        if have_gradients {
            self.refresh()?;
        }
        Ok(have_gradients)
    }

    /// Follows the parameters: updates the groups if any have moved, or have gained or lost their gradient. Returns
    /// whether the groups are new.
    pub(super) fn refresh(&mut self) -> Result<bool> {
        let (mut have_moved, mut same) = (false, true);
        for (buffer, seen) in self.buffers.iter().zip(&self.seen) {
            let now = buffer.layout.now();
            have_moved |= !Rc::ptr_eq(&now.spans, &seen.spans);
            same &= Rc::ptr_eq(&now.unused, &seen.unused);
        }
        if have_moved {
            self.relocate_state()?;
        }
        let is_new = have_moved || !same;
        if is_new {
            self.make_groups()?;
        }
        Ok(is_new)
    }

    /// Moves the optimizer state to the parameters' current places.
    fn relocate_state(&mut self) -> Result<()> {
        if self.steps().values().all(|&steps| steps == 0) {
            // No parameter has any state yet. Only with partitions the length of a tensor can change.
            let lengths = || self.buffers.iter().map(state_numel);
            let fit = |flats: &[Tensor]| flats.iter().map(Tensor::numel).eq(lengths());
            let all_fit = self.tensors.iter().all(|(_, flats)| fit(flats));
            return if all_fit { Ok(()) } else { self.allocate() };
        }
        let now = self.arrangements();
        let relocate = |(buffer, old): (usize, &Tensor)| -> Result<Tensor> {
            let (was, now) = (&self.seen[buffer], &now[buffer]);
            if Rc::ptr_eq(&was.spans, &now.spans) {
                return Ok(old.shallow_clone());
            }
            let new = zeros_like(&self.buffers[buffer])?;
            was.each_section(old, true, |section, values| {
                for from in was.spans_in(section) {
                    let Some(to) = now.spans.iter().find(|to| to.index == from.index) else {
                        continue;
                    };
                    for (owned, at) in now.owned(to.start..to.start + to.numel()) {
                        let start = from.start - section.start + owned.start - to.start;
                        copy_range(&new, at, values, start, owned.len())?;
                    }
                }
                Ok(())
            })?;
            Ok(new)
        };
        let old =
            || self.tensors.iter().map(|(_, old)| old.iter().enumerate().map(relocate).collect());
        let moved = on_one_rank(&self.buffers, self.tensors.len(), || old().collect())?;
        self.tensors.iter_mut().zip(moved).for_each(|((_, flats), moved)| *flats = moved);
        Ok(())
    }

    pub(super) fn make_groups(&mut self) -> Result<()> {
        self.steps = self.steps();
        self.seen = self.arrangements();
        let mut groups = Vec::new();
        let runs = runs(&self.buffers, &self.seen, &self.steps, self.decays);
        for Runs { decays, steps, runs, members, .. } in runs {
            let device = self.buffers[runs[0].buffer].parameters.device();
            let owned = runs.iter().flat_map(|run| {
                let owned = self.seen[run.buffer].owned(run.start..run.end).into_iter();
                owned.map(|(range, at)| Owned { buffer: run.buffer, range, at })
            });
            let runs: Vec<Owned> = owned.collect();
            let cut = |run: &Owned, flat: &Tensor, start: usize| {
                if run.range.len() == self.buffers[run.buffer].parameters.numel() {
                    return Ok(flat.shallow_clone()); // follows a gradient that moves from step to step
                }
                flat.f_narrow(0, start as i64, run.range.len() as i64).doing("narrow")
            };
            let ranges = |flat: fn(&FlatBuffer) -> &Tensor| {
                let range =
                    |run: &Owned| cut(run, flat(&self.buffers[run.buffer]), run.range.start);
                runs.iter().map(range).collect::<Result<_>>()
            };
            let state = self.tensors.iter().map(|(_, flats)| {
                runs.iter().map(|run| cut(run, &flats[run.buffer], run.at)).collect()
            });
            let parts = Parts::new(
                ranges(|buffer| &buffer.parameters)?,
                ranges(|buffer| &buffer.gradients)?,
                state.collect::<Result<_>>()?,
            )?;
            let counts_all = self.count_to == u64::MAX;
            let count = counts_all.then(|| Count::new(steps, parts.len(), device)).transpose()?;
            let own = |&index: &usize| self.seen.iter().find_map(|it| it.tensors.get(index));
            let tensors = members.iter().filter_map(own).map(Tensor::shallow_clone).collect();
            let tensors = TensorList::new(tensors)?;
            groups.push(Group { decays, steps, parts, count, members, tensors });
        }
        self.groups = groups;
        self.shared_ranges = match shared_model(&self.buffers) {
            Some(_) => SharedRanges::of(&self.groups),
            None => Vec::new(),
        };
        Ok(())
    }

    /// Returns the current arrangement of each buffer.
    pub(super) fn arrangements(&self) -> Vec<Rc<Arrangement>> {
        self.buffers.iter().map(|buffer| buffer.layout.now()).collect()
    }

    /// Steps all parameters with a gradient. `kernel` steps the parts that it is given, of this group. Ranks that share a
    /// model each step a slice of it.
    pub(super) fn step(&mut self, kernel: impl Fn(&Group, &Parts) -> Result<()>) -> Result<()> {
        match shared_model(&self.buffers) {
            Some(shared) => {
                // Each rank steps a slice, piece by piece. A collective for each dtype.
                let is_averaged = |it: &FlatBuffer| it.layout.gradients() == GradState::Averaged;
                let is_averaged = self.buffers.iter().any(is_averaged);
                if is_averaged {
                    average_gradients(&self.buffers)?; // some of them may have been averaged alone
                }
                let windows = self.groups.iter().map(|group| group.parts.window());
                let windows = windows.collect::<Result<Vec<_>>>()?;
                for SharedRanges { gradients, shapes, ranges } in &self.shared_ranges {
                    shared.for_my_slice(gradients, shapes, is_averaged, |at, piece, mean| {
                        let (index, range) = ranges[at];
                        let (group, window) = (&self.groups[index], &windows[index]);
                        window.show(&group.parts, range, &piece, mean)?;
                        kernel(group, window)
                    })?;
                }
            }
            None => {
                for group in self.groups.iter().filter(|group| group.parts.len() > 0) {
                    kernel(group, &group.parts)?;
                }
                // With partitions, each rank has updated its own. A collective then.
                for FlatBuffer { parameters, layout, .. } in &self.buffers {
                    if let Some(partitions) = &layout.now().partitions {
                        partitions.gather_in_place(parameters)?;
                    }
                }
            }
        }
        for group in &mut self.groups {
            group.steps = (group.steps + 1).min(self.count_to);
        }
        // The kernels wrote through the buffers, which autograd does not see.
        for group in &self.groups {
            bump_versions(&group.tensors)?;
        }
        Ok(())
    }

    /// Returns the number of steps of each parameter, by its index.
    pub(super) fn steps(&self) -> BTreeMap<usize, u64> {
        let mut steps = self.steps.clone();
        for group in &self.groups {
            steps.extend(group.members.iter().map(|&index| (index, group.steps)));
        }
        steps
    }

    /// Returns all parameters' spans with the indices of their buffers, as of when `groups` were made.
    pub(super) fn spans(&self) -> impl Iterator<Item = (usize, &ParamSpan)> {
        let buffers = self.seen.iter().enumerate();
        buffers.flat_map(|(buffer, seen)| seen.spans.iter().map(move |span| (buffer, span)))
    }
}
