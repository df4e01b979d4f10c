//! Parameters, gradients and optimizer state as flat buffers, and which stretches are stepped alike.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use tch::{Kind, Tensor};

use super::ParameterState;
use crate::error::{Error, Result};
use crate::torch::TensorList;

/// Parameters and their gradients as an optimizer sees them: two one-dimensional tensors of the same
/// length and kind, handles to the memory that the model uses.
#[derive(Debug)]
pub struct FlatBuffer {
    /// The parameters' values, one parameter after the other.
    pub parameters: Tensor,
    /// Their gradients, likewise. Gaps between parameters are zero.
    pub gradients: Tensor,
    /// Which parameters these are.
    pub places: Places,
}

impl FlatBuffer {
    /// Another handle to the same memory.
    fn handle(&self) -> Self {
        Self {
            parameters: self.parameters.shallow_clone(),
            gradients: self.gradients.shallow_clone(),
            places: self.places.clone(),
        }
    }
}

/// Where the parameters of a buffer lie in it, in their order: known to all who have a handle, because it
/// changes once, when buckets are put together anew.
#[derive(Debug, Clone)]
pub struct Places(Rc<RefCell<Rc<[Place]>>>);

impl Default for Places {
    fn default() -> Self {
        Self::from(Vec::new())
    }
}

impl From<Vec<Place>> for Places {
    fn from(places: Vec<Place>) -> Self {
        Self(Rc::new(RefCell::new(places.into())))
    }
}

impl Places {
    /// As it is now.
    pub fn get(&self) -> Rc<[Place]> {
        self.0.borrow().clone()
    }

    pub(crate) fn set(&self, places: Vec<Place>) {
        *self.0.borrow_mut() = places.into();
    }
}

/// Where a parameter lies in its buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The parameter's name.
    pub name: String,
    /// Its place among all parameters of the model, in the order of their creation.
    pub index: usize,
    /// Where it starts in the buffer, in elements.
    pub start: usize,
    /// Its shape.
    pub shape: Vec<i64>,
}

impl Place {
    /// How many elements the parameter has.
    pub fn numel(&self) -> usize {
        self.shape.iter().product::<i64>() as usize
    }

    /// Whether this is a weight, and not a bias or a parameter of a norm: those have one dimension, or
    /// `bias` for a name. What weight decay is usually for.
    pub fn is_weight(&self) -> bool {
        let name = self.name.rsplit('.').next();
        self.shape.len() > 1 && name != Some("bias")
    }

    /// The parameter's part of `flat`, in its shape.
    pub(crate) fn of(&self, flat: &Tensor) -> Result<Tensor> {
        let part = flat.f_narrow(0, self.start as i64, self.numel() as i64);
        part.and_then(|part| part.f_view(&self.shape[..])).map_err(Error::torch("view"))
    }
}

/// Neighbours in a buffer, from one's start to the next one's outside.
///
/// The gaps between parameters are stepped as well: they are zero and stay so. A kernel then ends where
/// its vectors end, and never in its loop over single numbers, which rounds otherwise.
#[derive(Debug, PartialEq)]
struct Run {
    buffer: usize,
    start: usize,
    end: usize,
}

/// What one kernel call steps.
#[derive(Debug)]
pub(super) struct Group {
    /// Whether weight decay is for these.
    pub decays: bool,
    pub parameters: TensorList,
    pub gradients: TensorList,
    /// The optimizer's slots, in their order.
    pub slots: Vec<TensorList>,
    /// How many tensors each list has.
    pub len: usize,
}

/// Flat buffers, with more of the same layout (`slots`) for what an optimizer keeps for each number.
#[derive(Debug)]
pub(super) struct Flat {
    pub buffers: Vec<FlatBuffer>,
    /// Where the parameters lay in them when this was made.
    layout: Vec<Rc<[Place]>>,
    /// Names and, for each buffer, values: zero at first.
    slots: Vec<(&'static str, Vec<Tensor>)>,
    pub groups: Vec<Group>,
}

impl Flat {
    pub(super) fn new(
        buffers: Vec<FlatBuffer>,
        slot_names: &[&'static str],
        decays: impl Fn(&Place) -> bool,
    ) -> Result<Self> {
        let zeros = |buffer: &FlatBuffer| {
            buffer.parameters.f_zeros_like().map_err(Error::torch("making the optimizer's state"))
        };
        let slots = slot_names
            .iter()
            .map(|name| Ok((*name, buffers.iter().map(zeros).collect::<Result<_>>()?)))
            .collect::<Result<Vec<(&'static str, Vec<Tensor>)>>>()?;
        let layout: Vec<Rc<[Place]>> = buffers.iter().map(|buffer| buffer.places.get()).collect();
        let mut groups = Vec::new();
        for (decays, runs) in runs(&buffers, &layout, decays) {
            let list = |flat: &dyn Fn(usize) -> Tensor| {
                let part = |run: &Run| {
                    let (start, len) = (run.start as i64, (run.end - run.start) as i64);
                    flat(run.buffer).f_narrow(0, start, len).map_err(Error::torch("narrow"))
                };
                TensorList::new(&runs.iter().map(part).collect::<Result<Vec<_>>>()?)
            };
            groups.push(Group {
                decays,
                parameters: list(&|buffer| buffers[buffer].parameters.shallow_clone())?,
                gradients: list(&|buffer| buffers[buffer].gradients.shallow_clone())?,
                slots: slots
                    .iter()
                    .map(|(_, flats)| list(&|buffer| flats[buffer].shallow_clone()))
                    .collect::<Result<_>>()?,
                len: runs.len(),
            });
        }
        Ok(Self { buffers, layout, slots, groups })
    }

    /// A copy of what the slots hold for each parameter, in the order of the parameters' creation.
    pub(super) fn state(&self) -> Result<Vec<ParameterState>> {
        let mut states = Vec::new();
        for (buffer, place) in self.places() {
            let value = |(name, flats): &(&'static str, Vec<Tensor>)| {
                let copied = place.of(&flats[buffer])?.f_detach_copy();
                Ok(((*name).into(), copied.map_err(Error::torch("copying the state"))?))
            };
            let tensors = self.slots.iter().map(value).collect::<Result<_>>()?;
            states.push((place.index, ParameterState { name: place.name.clone(), tensors }));
        }
        states.sort_by_key(|(index, _)| *index);
        Ok(states.into_iter().map(|(_, state)| state).collect())
    }

    /// Fills the slots; whether there was anything to fill them with. `besides` names what the optimizer
    /// reads from the state on its own. On an error nothing has changed.
    pub(super) fn load(&mut self, state: &[ParameterState], besides: &[&str]) -> Result<bool> {
        let wrong = |problem: String| Err(Error::Input(format!("the optimizer's state {problem}")));
        let known: BTreeMap<&str, &ParameterState> =
            state.iter().map(|state| (&state.name[..], state)).collect();
        if let Some(extra) = known.keys().find(|name| self.places().all(|(_, p)| p.name != **name))
        {
            return wrong(format!("has `{extra}`, which is no parameter of this model"));
        }
        let filled = state.iter().any(|state| !state.tensors.is_empty());
        let mut copies = Vec::new();
        for (buffer, place) in self.places() {
            let name = &place.name;
            let Some(state) = known.get(&name[..]) else {
                return wrong(format!(
                    "has nothing for parameter `{name}`; is it another model's?"
                ));
            };
            let names = || self.slots.iter().map(|(slot, _)| *slot).chain(besides.iter().copied());
            if let Some(extra) = state.tensors.keys().find(|key| names().all(|name| name != *key)) {
                return wrong(format!(
                    "has `{extra}` for parameter `{name}`, which this optimizer does not keep; it is \
                     that of another optimizer, or of one with other options"
                ));
            }
            if !filled {
                continue; // of an optimizer that has not stepped yet
            }
            if let Some(missing) = names().find(|slot| !state.tensors.contains_key(*slot)) {
                return wrong(format!(
                    "has no `{missing}` for parameter `{name}`; it is that of another optimizer, or \
                     of one with other options"
                ));
            }
            for (slot, flats) in &self.slots {
                let from = &state.tensors[*slot];
                if from.size() != place.shape {
                    return wrong(format!(
                        "has a `{slot}` of shape {:?} for parameter `{name}` of shape {:?}",
                        from.size(),
                        place.shape
                    ));
                }
                copies.push((place.of(&flats[buffer])?, from));
            }
        }
        let loading = || Error::torch("loading the optimizer's state");
        if !filled {
            for flat in self.slots.iter_mut().flat_map(|(_, flats)| flats) {
                let _ = flat.f_zero_().map_err(loading())?;
            }
        }
        for (mut to, from) in copies {
            tch::no_grad(|| to.f_copy_(from)).map_err(loading())?;
        }
        Ok(filled)
    }

    /// All parameters' places, with the numbers of their buffers.
    fn places(&self) -> impl Iterator<Item = (usize, &Place)> {
        let buffers = self.layout.iter().enumerate();
        buffers.flat_map(|(number, places)| places.iter().map(move |place| (number, place)))
    }

    /// The same buffers, if the parameters lie elsewhere in them by now.
    pub(super) fn moved(&self) -> Option<Vec<FlatBuffer>> {
        let mut now = self.buffers.iter().map(|buffer| buffer.places.get());
        let same =
            self.layout.iter().all(|then| now.next().is_some_and(|now| Rc::ptr_eq(then, &now)));
        (!same).then(|| self.buffers.iter().map(FlatBuffer::handle).collect())
    }
}

/// The runs of all that decay and of all that don't; each kind apart, because a kernel takes one.
fn runs(
    buffers: &[FlatBuffer],
    layout: &[Rc<[Place]>],
    decays: impl Fn(&Place) -> bool,
) -> Vec<(bool, Vec<Run>)> {
    let mut groups: Vec<((bool, Kind), Vec<Run>)> = Vec::new();
    for (buffer, (FlatBuffer { parameters, .. }, places)) in buffers.iter().zip(layout).enumerate()
    {
        let starts = places.iter().skip(1).map(|next| next.start);
        for (place, end) in places.iter().zip(starts.chain([parameters.numel()])) {
            let key = (decays(place), parameters.kind());
            let at = groups.iter().position(|(known, _)| *known == key).unwrap_or_else(|| {
                groups.push((key, Vec::new()));
                groups.len() - 1
            });
            match groups[at].1.last_mut() {
                Some(run) if run.buffer == buffer && run.end == place.start => run.end = end,
                _ => groups[at].1.push(Run { buffer, start: place.start, end }),
            }
        }
    }
    groups.into_iter().map(|((decays, _), runs)| (decays, runs)).collect()
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    fn buffer(places: &[(&str, usize, &[i64])], len: i64, kind: Kind) -> FlatBuffer {
        let zeros = || Tensor::zeros([len], (kind, Device::Cpu));
        let place = |(index, (name, start, shape)): (usize, &(&str, usize, &[i64]))| Place {
            name: (*name).into(),
            index,
            start: *start,
            shape: shape.to_vec(),
        };
        let places: Vec<Place> = places.iter().enumerate().map(place).collect();
        FlatBuffer { parameters: zeros(), gradients: zeros(), places: places.into() }
    }

    #[test]
    fn neighbours_of_one_group_are_one_run_with_the_gaps_between_them() {
        let weights: &[(&str, usize, &[i64])] =
            &[("b.bias", 0, &[3]), ("b.weight", 16, &[3, 2]), ("a.weight", 32, &[2, 2])];
        let buffers = [
            buffer(weights, 48, Kind::Float),
            buffer(&[("c.weight", 0, &[2, 2])], 16, Kind::Float),
            buffer(&[("d.weight", 0, &[2, 2])], 8, Kind::Double),
        ];
        let run = |buffer, start, end| Run { buffer, start, end };
        let expected = [
            (false, vec![run(0, 0, 16)]),
            (true, vec![run(0, 16, 48), run(1, 0, 16)]),
            (true, vec![run(2, 0, 8)]),
        ];
        let layout = buffers.each_ref().map(|buffer| buffer.places.get());
        assert_eq!(runs(&buffers, &layout, Place::is_weight), expected);
        let all = [(true, vec![run(0, 0, 48), run(1, 0, 16)]), (true, vec![run(2, 0, 8)])];
        assert_eq!(runs(&buffers, &layout, |_| true), all);
    }

    #[test]
    fn a_weight_has_two_dimensions_and_is_no_bias() {
        let is_weight = |name: &str, shape: &[i64]| {
            Place { name: name.into(), index: 0, start: 0, shape: shape.into() }.is_weight()
        };
        assert!(is_weight("0.weight", &[3, 2]) && is_weight("unbiased", &[3, 2]));
        assert!(!is_weight("norm.weight", &[3]) && !is_weight("scale", &[]));
        assert!(!is_weight("bias", &[1, 3]) && !is_weight("attention.bias", &[1, 3]));
    }
}
