//! Which adjacent parameters one kernel call steps.

use std::collections::BTreeMap;
use std::rc::Rc;

use tch::Kind;

use super::param_layout::Arrangement;
use super::{FlatBuffer, ParamSpan};

/// A half-open range `start..end` of adjacent parameters in a flat buffer.
///
/// The gaps between parameters are stepped too: they are zero and stay zero. A kernel then ends at a vector boundary
/// and never runs its loop over single elements, which rounds differently.
#[derive(Debug, PartialEq)]
pub(super) struct SpanRun {
    pub buffer: usize,
    pub start: usize,
    pub end: usize,
}

/// The runs of one kernel call, and what all of their parameters share.
#[derive(Debug)]
pub(super) struct Runs {
    pub decays: bool,
    pub steps: u64,
    kind: Kind,
    pub runs: Vec<SpanRun>,
    /// The indices of the parameters in the runs.
    pub members: Vec<usize>,
}

/// Returns the parameters with a gradient in `buffers`, whose layout is `seen`, by kernel call. `steps` has the number of
/// steps of each, by its index; `decays` selects those with weight decay.
pub(super) fn runs(
    buffers: &[FlatBuffer],
    seen: &[Rc<Arrangement>],
    steps: &BTreeMap<usize, u64>,
    decays: Option<fn(&ParamSpan) -> bool>,
) -> Vec<Runs> {
    let mut groups: Vec<Runs> = Vec::new();
    for (buffer, seen) in seen.iter().enumerate() {
        let Arrangement { spans, unused, .. } = &**seen;
        let FlatBuffer { parameters, .. } = &buffers[buffer];
        let kind = parameters.kind();
        let starts = spans.iter().skip(1).map(|next| next.start);
        for (span, end) in spans.iter().zip(starts.chain([parameters.numel()])) {
            if unused.contains(&span.index) {
                continue;
            }
            let decays = decays.is_some_and(|decays| decays(span));
            let steps = steps.get(&span.index).copied().unwrap_or(0);
            let fits = |it: &Runs| (it.decays, it.steps, it.kind) == (decays, steps, kind);
            let at = groups.iter().position(fits).unwrap_or_else(|| {
                groups.push(Runs { decays, steps, kind, runs: Vec::new(), members: Vec::new() });
                groups.len() - 1
            });
            let Runs { runs, members, .. } = &mut groups[at];
            members.push(span.index);
            match runs.last_mut() {
                Some(run) if run.buffer == buffer && run.end == span.start => run.end = end,
                _ => runs.push(SpanRun { buffer, start: span.start, end }),
            }
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use tch::{Device, Tensor};

    use super::*;
    use crate::optim::optimizer_state::OptimizerState;

    /// Returns a buffer of `len` elements, with parameters given by index, name, start and shape.
    fn buffer(spans: &[(usize, &str, usize, &[i64])], len: i64, kind: Kind) -> FlatBuffer {
        let zeros = || Tensor::zeros([len], (kind, Device::Cpu));
        let span = |&(index, name, start, shape): &(usize, &str, usize, &[i64])| ParamSpan {
            name: name.into(),
            index,
            start,
            shape: shape.to_vec(),
        };
        let spans: Vec<ParamSpan> = spans.iter().map(span).collect();
        FlatBuffer { parameters: zeros(), gradients: zeros(), layout: spans.into() }
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
        let runs_of = |flat: &OptimizerState| -> Vec<(bool, u64, Vec<SpanRun>)> {
            let parts = runs(&flat.buffers, &flat.seen, &flat.steps, flat.decays).into_iter();
            parts.map(|it| (it.decays, it.steps, it.runs)).collect()
        };
        let ends_with_weight: fn(&ParamSpan) -> bool = |span| span.name.ends_with("weight");
        let flat = OptimizerState::new(buffers(), &[], Some(ends_with_weight), 9).unwrap();
        let expected = [
            (false, 0, vec![run(0, 0, 16)]),
            (true, 0, vec![run(0, 16, 48), run(1, 0, 16)]),
            (true, 0, vec![run(2, 0, 8)]),
        ];
        assert_eq!(runs_of(&flat), expected);

        let mut flat = OptimizerState::new(buffers(), &[], None, 9).unwrap();
        let all = |steps, kind_two| {
            [
                (false, steps, vec![run(0, 0, 48), run(1, 0, 16)]),
                (false, kind_two, vec![run(2, 0, 8)]),
            ]
        };
        assert_eq!(runs_of(&flat), all(0, 0));
        // A parameter without a gradient is skipped, and its step is not counted.
        flat.buffers.iter().for_each(|buffer| buffer.layout.set_unused(&[2]));
        assert!(flat.refresh().unwrap() && !flat.refresh().unwrap());
        let parted = vec![run(0, 0, 16), run(0, 32, 48), run(1, 0, 16)];
        assert_eq!(runs_of(&flat), [(false, 0, parted), (false, 0, vec![run(2, 0, 8)])]);
        flat.step(|_, _| Ok(())).unwrap();
        flat.buffers.iter().for_each(|buffer| buffer.layout.set_unused(&[]));
        assert!(flat.refresh().unwrap());
        let again = [
            (false, 1, vec![run(0, 0, 16), run(0, 32, 48), run(1, 0, 16)]),
            (false, 0, vec![run(0, 16, 32)]),
            (false, 1, vec![run(2, 0, 8)]),
        ];
        assert_eq!(runs_of(&flat), again);
    }
}
