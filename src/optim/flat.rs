//! The optimizer state for each element of the flat buffers, and the groups of parameters that one kernel call steps,
//! with their tensors.

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use tch::{Device, Kind, Tensor};

use super::param_layout::{LayoutVersion, copy_range, zeros_like};
use super::partitions::gather_parameters;
use super::{FlatBuffer, GradState, ParamSpan, SharedModel, average_gradients};
use crate::error::{Error, Result};
use crate::ffi::{TensorList, TorchResult, bump_versions, set_view};
use crate::process_group::join_shapes;

/// A half-open range `start..end` of adjacent parameters in a flat buffer.
///
/// The gaps between parameters are stepped too: they are zero and stay zero. A kernel then ends at a vector boundary
/// and never runs its loop over single elements, which rounds differently.
#[derive(Debug, PartialEq)]
struct SpanRun {
    buffer: usize,
    start: usize,
    end: usize,
}

/// A part of a [`SpanRun`] that this rank updates.
struct Owned {
    buffer: usize,
    /// The range of elements in the buffer.
    range: Range<usize>,
    /// The offset of the first element in a slot.
    at: usize,
}

/// The parameters that one kernel call steps.
#[derive(Debug)]
pub(super) struct Group {
    /// Whether weight decay applies to them.
    pub decays: bool,
    /// The number of steps that they have made.
    pub steps: u64,
    pub parts: Parts,
    pub device: Device,
    /// The indices of the parameters.
    members: Vec<usize>,
    /// The model's own tensors of the parameters.
    tensors: TensorList,
}

/// The ranges of one dtype, which the ranks of a shared model step in one collective.
#[derive(Debug)]
struct SharedRanges {
    gradients: Vec<Tensor>,
    /// The lengths of the gradients, as the ranks compare them.
    shapes: Vec<i64>,
    /// For each gradient the index of its group, and of its range in the group's parts.
    ranges: Vec<(usize, usize)>,
}

/// Flat buffers, with further buffers of the same layout (`slots`) for the optimizer's state.
#[derive(Debug)]
pub(super) struct OptimizerState {
    pub buffers: Vec<FlatBuffer>,
    /// The layout of each buffer when `groups` were made.
    pub(super) seen: Vec<LayoutVersion>,
    /// Name and, for each buffer, values of each slot; zero at first. With partitions, the values of this rank's partitions.
    pub(super) slots: Vec<(&'static str, Vec<Tensor>)>,
    /// Selects the parameters with weight decay; `None` for no weight decay.
    decays: Option<fn(&ParamSpan) -> bool>,
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
        slot_names: &[&'static str],
        decays: Option<fn(&ParamSpan) -> bool>,
        count_to: u64,
    ) -> Result<Self> {
        let mut flat = Self {
            buffers,
            seen: Vec::new(),
            slots: slot_names.iter().map(|name| (*name, Vec::new())).collect(),
            decays,
            count_to,
            steps: BTreeMap::new(),
            groups: Vec::new(),
            shared_ranges: Vec::new(),
        };
        flat.make_slots()?;
        flat.make_groups()?;
        Ok(flat)
    }

    /// Allocates all slots again, filled with zeros. The groups must be made again after it.
    pub(super) fn make_slots(&mut self) -> Result<()> {
        self.steps = self.steps();
        self.groups.clear(); // they have views of the slots
        self.slots.iter_mut().for_each(|(_, flats)| flats.clear());
        let zeros = || self.slots.iter().map(|_| self.buffers.iter().map(zeros_like).collect());
        let slots = on_one_rank(&self.buffers, self.slots.len(), || zeros().collect())?;
        self.slots.iter_mut().zip(slots).for_each(|((_, slot), zeros)| *slot = zeros);
        Ok(())
    }

    /// Returns whether there are gradients to step with. Local gradients are an error: with them the ranks would
    /// diverge.
    pub(super) fn have_gradients(&self) -> Result<bool> {
        let mut any = false;
        for buffer in &self.buffers {
            match buffer.places.gradients() {
                GradState::Cleared => {}
                GradState::Averaged | GradState::Partitioned | GradState::Complete => any = true,
                GradState::Local => {
                    return Err(Error::InvalidInput(
                        "the gradients of this rank were not averaged, and a step with them would make the ranks \
                         differ: call the last backward before a step outside of no_sync"
                            .into(),
                    ));
                }
            }
        }
        Ok(any)
    }

    /// Follows the parameters: updates the groups if any have moved, or have gained or lost their gradient. Returns
    /// whether the groups are new.
    pub(super) fn refresh(&mut self) -> Result<bool> {
        let (mut have_moved, mut same) = (false, true);
        for (buffer, seen) in self.buffers.iter().zip(&self.seen) {
            have_moved |= !buffer.places.is(&seen.places);
            same &= buffer.places.are_unused(&seen.unused);
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
        let now: Vec<LayoutVersion> = self.buffers.iter().map(LayoutVersion::of).collect();
        if self.steps().values().all(|&steps| steps == 0) {
            // No parameter has any state yet. Only with partitions the length of a slot can change.
            let fit = |flats: &[Tensor]| {
                let lengths =
                    now.iter().zip(&self.buffers).map(|(now, buffer)| now.slot_numel(buffer));
                flats.iter().map(Tensor::numel).eq(lengths)
            };
            let all_fit = self.slots.iter().all(|(_, flats)| fit(flats));
            return if all_fit { Ok(()) } else { self.make_slots() };
        }
        let relocate = |(buffer, old): (usize, &Tensor)| -> Result<Tensor> {
            let (was, now) = (&self.seen[buffer], &now[buffer]);
            if Rc::ptr_eq(&was.places, &now.places) {
                return Ok(old.shallow_clone());
            }
            let new = zeros_like(&self.buffers[buffer])?;
            was.each_section(old, true, |section, values| {
                for from in was.places_in(section) {
                    let Some(to) = now.places.iter().find(|to| to.index == from.index) else {
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
            || self.slots.iter().map(|(_, old)| old.iter().enumerate().map(relocate).collect());
        let moved = on_one_rank(&self.buffers, self.slots.len(), || old().collect())?;
        self.slots.iter_mut().zip(moved).for_each(|((_, slot), moved)| *slot = moved);
        Ok(())
    }

    pub(super) fn make_groups(&mut self) -> Result<()> {
        self.steps = self.steps();
        self.seen = self.buffers.iter().map(LayoutVersion::of).collect();
        let mut groups = Vec::new();
        for (Key { decays, steps, .. }, Runs { runs, members }) in self.runs() {
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
            let slots = self.slots.iter().map(|(_, flats)| {
                runs.iter().map(|run| cut(run, &flats[run.buffer], run.at)).collect()
            });
            groups.push(Group {
                decays,
                steps,
                parts: Parts::new(
                    ranges(|buffer| &buffer.parameters)?,
                    ranges(|buffer| &buffer.gradients)?,
                    slots.collect::<Result<_>>()?,
                )?,
                device,
                tensors: self.tensors(&members)?,
                members,
            });
        }
        self.groups = groups;
        self.shared_ranges = match shared_model(&self.buffers) {
            Some(_) => self.shared_ranges(),
            None => Vec::new(),
        };
        Ok(())
    }

    /// Returns the ranges of all groups by dtype.
    fn shared_ranges(&self) -> Vec<SharedRanges> {
        let dtype = |group: &Group| group.parts.parameters[0].kind();
        let mut dtypes: Vec<Kind> = Vec::new();
        for group in &self.groups {
            if !dtypes.contains(&dtype(group)) {
                dtypes.push(dtype(group));
            }
        }
        let same_dtype = |wanted: Kind| {
            let groups = self.groups.iter().enumerate();
            let groups = groups.filter(move |(_, group)| dtype(group) == wanted);
            let ranges = groups
                .flat_map(|(index, group)| (0..group.parts.len()).map(move |range| (index, range)));
            let ranges: Vec<(usize, usize)> = ranges.collect();
            let parts = || ranges.iter().map(|&(group, range)| (&self.groups[group].parts, range));
            let gradients = parts().map(|(parts, range)| parts.gradients[range].shallow_clone());
            // A gradient that moves from step to step has no length before the first backward.
            let shapes = join_shapes(parts().map(|(parts, range)| parts.parameters[range].size()));
            SharedRanges { gradients: gradients.collect(), shapes, ranges }
        };
        dtypes.into_iter().map(same_dtype).collect()
    }

    /// Returns the parameters with a gradient, grouped by key.
    fn runs(&self) -> Vec<(Key, Runs)> {
        let mut groups: Vec<(Key, Runs)> = Vec::new();
        for (buffer, LayoutVersion { places, unused, .. }) in self.seen.iter().enumerate() {
            let FlatBuffer { parameters, .. } = &self.buffers[buffer];
            let starts = places.iter().skip(1).map(|next| next.start);
            for (place, end) in places.iter().zip(starts.chain([parameters.numel()])) {
                if unused.contains(&place.index) {
                    continue;
                }
                let decays = self.decays.is_some_and(|decays| decays(place));
                let steps = self.steps.get(&place.index).copied().unwrap_or(0);
                let key = Key { decays, steps, kind: parameters.kind() };
                let at = groups.iter().position(|(known, _)| *known == key).unwrap_or_else(|| {
                    groups.push((key, Runs::default()));
                    groups.len() - 1
                });
                let Runs { runs, members } = &mut groups[at].1;
                members.push(place.index);
                match runs.last_mut() {
                    Some(run) if run.buffer == buffer && run.end == place.start => run.end = end,
                    _ => runs.push(SpanRun { buffer, start: place.start, end }),
                }
            }
        }
        groups
    }

    /// Returns the model's own tensors of the parameters with these indices.
    fn tensors(&self, indices: &[usize]) -> Result<TensorList> {
        let of = |&index: &usize| self.buffers.iter().find_map(|it| it.places.tensor(index));
        TensorList::new(&indices.iter().filter_map(of).collect::<Vec<_>>())
    }

    /// Steps all parameters with a gradient. `kernel` steps the parts that it is given, of the group with this index.
    /// Ranks that share a model each step a slice of it.
    pub(super) fn step(
        &mut self,
        kernel: impl Fn(usize, &Group, &Parts) -> Result<()>,
    ) -> Result<()> {
        match shared_model(&self.buffers) {
            Some(shared) => self.step_my_slice(&shared, &kernel)?,
            None => {
                let groups = self.groups.iter().enumerate();
                let mut groups = groups.filter(|(_, group)| group.parts.len() > 0);
                groups.try_for_each(|(index, group)| kernel(index, group, &group.parts))?;
                gather_parameters(&self.buffers)?;
            }
        }
        for group in &mut self.groups {
            group.steps = (group.steps + 1).min(self.count_to);
        }
        // The kernels wrote through the buffers, which autograd does not see.
        self.groups.iter().try_for_each(|group| bump_versions(&group.tensors))
    }

    /// Steps this rank's slice of the parameters, piece by piece. A collective for each dtype.
    fn step_my_slice(
        &self,
        shared: &SharedModel,
        kernel: &dyn Fn(usize, &Group, &Parts) -> Result<()>,
    ) -> Result<()> {
        let is_averaged = |buffer: &FlatBuffer| buffer.places.gradients() == GradState::Averaged;
        let is_averaged = self.buffers.iter().any(is_averaged);
        if is_averaged {
            average_gradients(&self.buffers)?; // some of them may have been averaged alone
        }
        let windows = self.groups.iter().map(|group| group.parts.window());
        let windows = windows.collect::<Result<Vec<_>>>()?;
        self.shared_ranges.iter().try_for_each(|SharedRanges { gradients, shapes, ranges }| {
            shared.for_my_slice(gradients, shapes, is_averaged, |place, piece, mean| {
                let (index, range) = ranges[place];
                let (group, window) = (&self.groups[index], &windows[index]);
                window.show(&group.parts, range, &piece, mean)?;
                kernel(index, group, window)
            })
        })
    }

    /// Returns the number of steps of each parameter, by its index.
    pub(super) fn steps(&self) -> BTreeMap<usize, u64> {
        let mut steps = self.steps.clone();
        for group in &self.groups {
            steps.extend(group.members.iter().map(|&index| (index, group.steps)));
        }
        steps
    }

    /// Returns all parameters' places with the indices of their buffers, as of when `groups` were made.
    pub(super) fn places(&self) -> impl Iterator<Item = (usize, &ParamSpan)> {
        let buffers = self.seen.iter().enumerate();
        buffers.flat_map(|(number, seen)| seen.places.iter().map(move |place| (number, place)))
    }
}

/// The properties that all parameters of one kernel call share.
#[derive(Debug, PartialEq)]
struct Key {
    decays: bool,
    steps: u64,
    kind: Kind,
}

#[derive(Debug, Default, PartialEq)]
struct Runs {
    runs: Vec<SpanRun>,
    /// The indices of the parameters in the runs.
    members: Vec<usize>,
}

/// Returns this rank's side of the model, if the ranks share one.
pub(super) fn shared_model(buffers: &[FlatBuffer]) -> Option<Rc<SharedModel>> {
    buffers.first().and_then(|buffer| buffer.places.shared())
}

/// Returns the `count` slots that `make` makes, with a tensor for each buffer. Ranks that share a model get those of
/// one rank; it is a collective then.
fn on_one_rank(
    buffers: &[FlatBuffer],
    count: usize,
    make: impl FnOnce() -> Result<Vec<Vec<Tensor>>>,
) -> Result<Vec<Vec<Tensor>>> {
    let Some(shared) = shared_model(buffers).filter(|_| count > 0) else { return make() };
    let make = || Ok(make()?.into_iter().flatten().collect());
    let mut tensors = shared.group().share_tensors(make)?.into_iter();
    Ok((0..count).map(|_| tensors.by_ref().take(buffers.len()).collect()).collect())
}

/// Ranges of parameters, each with its gradient and its slots of optimizer state, as lists for a kernel.
#[derive(Debug)]
pub(super) struct Parts {
    pub parameters: Vec<Tensor>,
    pub gradients: Vec<Tensor>,
    /// For each of the optimizer's slots, in their order, the ranges of its values.
    pub slots: Vec<Vec<Tensor>>,
    pub parameter_list: TensorList,
    pub gradient_list: TensorList,
    pub slot_lists: Vec<TensorList>,
}

impl Parts {
    pub(super) fn new(
        parameters: Vec<Tensor>,
        gradients: Vec<Tensor>,
        slots: Vec<Vec<Tensor>>,
    ) -> Result<Self> {
        Ok(Self {
            parameter_list: TensorList::new(&parameters)?,
            gradient_list: TensorList::new(&gradients)?,
            slot_lists: slots.iter().map(|slot| TensorList::new(slot)).collect::<Result<_>>()?,
            parameters,
            gradients,
            slots,
        })
    }

    /// Returns the number of ranges.
    pub(super) fn len(&self) -> usize {
        self.parameters.len()
    }

    /// Returns empty parts of one range, for [`show`](Self::show).
    pub(super) fn window(&self) -> Result<Self> {
        let empty =
            |tensor: &Tensor| Tensor::f_empty([0], (tensor.kind(), tensor.device())).doing("empty");
        let one = |tensors: &[Tensor]| -> Result<Vec<Tensor>> {
            tensors.iter().take(1).map(empty).collect()
        };
        let slots = self.slots.iter().map(|slot| one(slot)).collect::<Result<Vec<_>>>()?;
        Self::new(one(&self.parameters)?, one(&self.gradients)?, slots)
    }

    /// Makes this window the elements `piece` of the range of `parts` at `index`, with `gradient` instead of theirs, if
    /// given.
    pub(super) fn show(
        &self,
        parts: &Self,
        index: usize,
        piece: &Range<usize>,
        gradient: Option<&Tensor>,
    ) -> Result<()> {
        set_view(&self.parameters[0], &parts.parameters[index], piece.clone())?;
        match gradient {
            Some(gradient) => set_view(&self.gradients[0], gradient, 0..piece.len())?,
            None => set_view(&self.gradients[0], &parts.gradients[index], piece.clone())?,
        }
        let mut slots = self.slots.iter().zip(&parts.slots);
        slots.try_for_each(|(window, slot)| set_view(&window[0], &slot[index], piece.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a buffer of `len` elements, with parameters given by index, name, start and shape.
    fn buffer(places: &[(usize, &str, usize, &[i64])], len: i64, kind: Kind) -> FlatBuffer {
        let zeros = || Tensor::zeros([len], (kind, Device::Cpu));
        let place = |&(index, name, start, shape): &(usize, &str, usize, &[i64])| ParamSpan {
            name: name.into(),
            index,
            start,
            shape: shape.to_vec(),
        };
        let places: Vec<ParamSpan> = places.iter().map(place).collect();
        FlatBuffer { parameters: zeros(), gradients: zeros(), places: places.into() }
    }

    #[test]
    fn parameters_of_one_group_form_one_span_with_gaps() {
        let buffers = || {
            let weights: &[(usize, &str, usize, &[i64])] =
                &[(3, "b.bias", 0, &[3]), (2, "b.weight", 16, &[3, 2]), (1, "a.weight", 32, &[4])];
            vec![
                buffer(weights, 48, Kind::Float),
                buffer(&[(0, "c.weight", 0, &[2, 2])], 16, Kind::Float),
                buffer(&[(4, "d.weight", 0, &[2, 2])], 8, Kind::Double),
            ]
        };
        let run = |buffer, start, end| SpanRun { buffer, start, end };
        let runs = |flat: &OptimizerState| -> Vec<(bool, u64, Vec<SpanRun>)> {
            let parts = flat.runs().into_iter();
            parts.map(|(key, runs)| (key.decays, key.steps, runs.runs)).collect()
        };
        let ends_with_weight: fn(&ParamSpan) -> bool = |place| place.name.ends_with("weight");
        let flat = OptimizerState::new(buffers(), &[], Some(ends_with_weight), 9).unwrap();
        let expected = [
            (false, 0, vec![run(0, 0, 16)]),
            (true, 0, vec![run(0, 16, 48), run(1, 0, 16)]),
            (true, 0, vec![run(2, 0, 8)]),
        ];
        assert_eq!(runs(&flat), expected);

        let mut flat = OptimizerState::new(buffers(), &[], None, 9).unwrap();
        let all = |steps, kind_two| {
            [
                (false, steps, vec![run(0, 0, 48), run(1, 0, 16)]),
                (false, kind_two, vec![run(2, 0, 8)]),
            ]
        };
        assert_eq!(runs(&flat), all(0, 0));
        // A parameter without a gradient is skipped, and its step is not counted.
        flat.buffers.iter().for_each(|buffer| buffer.places.set_unused(&[2]));
        assert!(flat.refresh().unwrap() && !flat.refresh().unwrap());
        let parted = vec![run(0, 0, 16), run(0, 32, 48), run(1, 0, 16)];
        assert_eq!(runs(&flat), [(false, 0, parted), (false, 0, vec![run(2, 0, 8)])]);
        flat.step(|_, _, _| Ok(())).unwrap();
        flat.buffers.iter().for_each(|buffer| buffer.places.set_unused(&[]));
        assert!(flat.refresh().unwrap());
        let again = [
            (false, 1, vec![run(0, 0, 16), run(0, 32, 48), run(1, 0, 16)]),
            (false, 0, vec![run(0, 16, 32)]),
            (false, 1, vec![run(2, 0, 8)]),
        ];
        assert_eq!(runs(&flat), again);
    }
}
