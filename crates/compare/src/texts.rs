//! What `ddp-mp diff` says.

use serde_json::Value;

use crate::comparison::{Comparison, Difference, Parting, Stage, is_close};
use crate::diff::RTOL;
use crate::layout::paragraph;
use crate::read::Record;
use crate::text::{counted, list_ranks};

/// The most tensors of a rank that a line names.
const MAX_NAMES: usize = 3;

impl Comparison<'_> {
    /// Returns the lines of a comparison of two records; with `rtol`, as far as rounding does not explain them.
    pub(crate) fn lines(&self, rtol: Option<f64>) -> Vec<String> {
        let [a, b] = self.records;
        let mut lines = vec![about("A", a), about("B", b)];
        lines.extend(options(a, b));
        if self.by_order {
            lines.extend(paragraph(&format!(
                "The names of the parameters differ, so they are compared by their places: `{}` of A with `{}` of B, and so \
                 on. If that is wrong, say how the names differ with --rename.",
                a.header.parameters[0].name, b.header.parameters[0].name
            )));
        }
        if !self.has_same_ranks() {
            lines.extend(paragraph(
                "The runs have different numbers of ranks, so only the averages, the learning rates, the parameters and \
                 rank 0's buffers are compared. A sum over other shards may differ in its last bits.",
            ));
        }
        if let Some([all, common]) = self.modules().filter(|[all, common]| common < all) {
            lines.extend(paragraph(&format!(
                "Left out, because no module of B has its name: what {} of {all} modules of A return. Say how the names differ \
                 with --rename.",
                all - common
            )));
        }
        for (record, other) in [(a, b), (b, a)] {
            lines.extend(self.left_out(record, other));
        }
        lines.extend(self.equal_part());
        if let Some(parting) = &self.parting {
            lines.extend(self.difference(parting, rtol));
            if rtol.is_none() {
                return lines;
            }
        }
        let failed = self.records.map(|record| record.failure().map(|at| at.step));
        let sides = match failed {
            [Some(of_a), Some(of_b)] if of_a == of_b => vec![("Both runs", failed[0])],
            [of_a, of_b] => vec![("A", of_a), ("B", of_b)],
        };
        for (who, step) in sides {
            let failed = |it: u64| format!("{who} failed in step {it}: see the error of the run.");
            lines.extend(step.map(failed));
        }
        for (side, record, other) in [("A", a, b), ("B", b, a)] {
            let is_further = |step: &&u64| !other.steps.contains_key(*step);
            let further = record.steps.keys().filter(is_further).count();
            if further > 0 {
                lines.push(format!("Only {side} has {} more.", counted(further, "step")));
            }
        }
        lines
    }

    /// Names the tensors that neither run trains and only `record` has.
    fn left_out(&self, record: &Record, other: &Record) -> Vec<String> {
        let names = record.header.buffers.iter().map(|tensor| &tensor.name);
        let is_left_out = |name: &&String| self.buffers.iter().all(|pair| pair.name != **name);
        let left_out: Vec<String> = names.filter(is_left_out).cloned().collect();
        if left_out.is_empty() {
            return Vec::new();
        }
        paragraph(&format!(
            "Left out, because {} has no such tensor: buffers and frozen parameters of {}, {}.",
            other.name,
            record.name,
            listed(Stage::Buffers, &left_out)
        ))
    }

    fn equal_part(&self) -> Option<String> {
        let start = self.has_equal_start.then(|| "the start".to_owned());
        let steps = match self.equal_steps[..] {
            [] => None,
            [step] => Some(format!("step {step}")),
            [first, .., last] => {
                Some(format!("{} steps ({first} to {last})", self.equal_steps.len()))
            }
        };
        let parts: Vec<String> = start.into_iter().chain(steps).collect();
        (!parts.is_empty()).then(|| format!("Equal: {}.", parts.join(" and ")))
    }

    /// Returns the lines about the place where the bits part, and about the first tensor that is far.
    fn difference(&self, parting: &Parting, rtol: Option<f64>) -> Vec<String> {
        let is_at_parting = |far: &Parting| {
            let stage = |it: &Parting| it.first().map(|(stage, _)| stage);
            far.step == parting.step
                && far.is_start == parting.is_start
                && stage(far) == stage(parting)
        };
        let far = self.far.as_ref().zip(self.verdict.far.as_ref());
        let is_first = far.is_some_and(|(place, far)| far.before == 0.0 && is_at_parting(place));
        let mut lines = Vec::new();
        if rtol.is_none() || is_first {
            lines.push(if parting.is_start {
                format!("The runs differ before step {}:", parting.step)
            } else {
                format!("Step {} is the first that differs:", parting.step)
            });
            lines.extend(self.stage_lines(parting, "the same"));
            lines.extend(self.unknown_steps(parting));
            if is_first || self.is_of_some_ranks(parting) || self.verdict.largest == 0.0 {
                lines.extend(self.cause(parting, false));
            }
        }
        let rtol = rtol.unwrap_or(RTOL);
        let Some((place, far)) = far else {
            lines.extend(paragraph(&self.about_rounding(parting, rtol)));
            return lines;
        };
        let how_far = match (far.distance, far.before) {
            _ if far.name.is_empty() && far.stage != Stage::Loss => String::new(),
            (distance, _) if distance.is_infinite() => {
                "Only one run has it, or it has another number of elements, or only one is finite."
                    .into()
            }
            (distance, 0.0) => {
                let what = named(&far.name);
                format!(
                    "{what} is {distance:.1e} away there, and all before is equal: no rounding."
                )
            }
            (distance, before) => format!(
                "{} is {distance:.1e} away there, and nothing before it more than {before:.1e}: no rounding.",
                named(&far.name)
            ),
        };
        if !is_first {
            let when = if place.is_start { "before step" } else { "in step" };
            lines.extend(paragraph(&format!(
                "The bits differ from step {} on, as after rounding. The first jump is {when} {}:",
                parting.step, place.step
            )));
            lines.extend(self.stage_lines(place, "close"));
            lines.extend(self.cause(place, true));
        }
        lines.extend(paragraph(&how_far));
        lines
    }

    /// Says that two runs differ by rounding only, and how fast that grows.
    fn about_rounding(&self, parting: &Parting, rtol: f64) -> String {
        let verdict = &self.verdict;
        let growth = match (verdict.growth.last(), verdict.factor_of_a_step()) {
            (Some((step, distance)), Some(factor)) => format!(
                " After step {step} the parameters are {distance:.1e} apart, a factor of {factor:.3} a step."
            ),
            (Some((step, distance)), None) if *distance > 0.0 => {
                format!(" After step {step} the parameters are {distance:.1e} apart.")
            }
            _ => String::new(),
        };
        let bits = format!("the bits differ from step {} on", parting.step);
        match verdict.first_over {
            _ if verdict.has_grown_apart() => format!(
                "Far: {bits}. Nothing jumps, but the distances grow until nothing is the same.{growth} Compare the options, or \
                 fewer steps."
            ),
            None => format!(
                "Close: {bits}, and no tensor is farther than {:.1e}, relative to its norm (--rtol {rtol:e}).{growth}",
                verdict.largest
            ),
            Some(step) => format!(
                "Close: {bits}. From step {step} on some distances are over {rtol:e} (--rtol), but they grow as rounding does: \
                 everywhere, and nothing jumps.{growth}"
            ),
        }
    }

    /// Returns a line for each stage of a step. `same` is said of those that do not differ.
    fn stage_lines(&self, parting: &Parting, same: &str) -> Vec<String> {
        let mut lines = Vec::new();
        for (stage, found) in &parting.stages {
            let found = match found {
                None if stage.is_of_modules() => continue,
                None => "not compared".to_owned(),
                Some(found) if found.ranks.is_empty() => same.to_owned(),
                Some(found) => self.differing(parting, *stage, found),
            };
            let name: &str = stage.into();
            lines.push(format!("  {name:<10}  {found}"));
        }
        lines
    }

    /// Says which steps before the parting are not in both records.
    fn unknown_steps(&self, parting: &Parting) -> Vec<String> {
        let next = self.equal_steps.last().map(|last| last + 1);
        match next.filter(|next| *next < parting.step) {
            None => Vec::new(),
            Some(next) => paragraph(&format!(
                "Steps {next} to {} are not in both records: the cause may be there.",
                parting.step - 1
            )),
        }
    }

    /// Returns whether some ranks are right, so that the cause is not in the program.
    fn is_of_some_ranks(&self, parting: &Parting) -> bool {
        parting.first().is_some_and(|(_, Difference { ranks, unknown })| {
            ranks.len() + unknown.len() < self.records[0].header.world_size
        })
    }

    /// Says what to look at: if `is_far`, at a jump after rounding.
    fn cause(&self, parting: &Parting, is_far: bool) -> Vec<String> {
        match parting.first() {
            Some((stage, difference)) => {
                let known = self.known_cause(parting, stage, difference);
                paragraph(&known.unwrap_or_else(|| self.remedy(parting, stage, difference, is_far)))
            }
            None => Vec::new(),
        }
    }

    /// Returns the ranks that differ in a stage, each with its tensors; ranks with the same tensors together. Also says of
    /// which ranks nothing is known.
    fn differing(&self, parting: &Parting, stage: Stage, found: &Difference) -> String {
        let Difference { ranks, unknown } = found;
        let mut groups: Vec<(Vec<usize>, &[String])> = Vec::new();
        for (rank, tensors) in ranks {
            match groups.iter_mut().find(|(_, known)| known == tensors) {
                Some((members, _)) => members.push(*rank),
                None => groups.push((vec![*rank], tensors)),
            }
        }
        let all = if stage == Stage::Buffers { &self.buffers } else { &self.parameters };
        let group = |(members, tensors): (Vec<usize>, &[String])| {
            let (who, names) = (self.who_differs(&members), listed(stage, tensors));
            match stage {
                _ if tensors.is_empty() => format!("differs on {who}"),
                Stage::Batch | Stage::Outputs | Stage::Backward => {
                    format!("differs on {who}: {names}")
                }
                _ => format!("{} of {} on {who}: {names}", tensors.len(), all.len()),
            }
        };
        let mut found: Vec<String> = groups.into_iter().map(group).collect();
        if !unknown.is_empty() {
            let have_stopped = unknown.iter().all(|rank| parting.stopped.contains(rank));
            let why = if have_stopped { ", which stopped in this step" } else { "" };
            found.push(format!("not recorded on {}{why}", list_ranks(unknown)));
        }
        found.join("; ")
    }

    /// Formats ranks: `all ranks` if they are all of several.
    fn who_differs(&self, ranks: &[usize]) -> String {
        let all = self.records[0].header.world_size;
        if ranks.len() == all && all > 1 { "all ranks".into() } else { list_ranks(ranks) }
    }

    /// Says what to look at if `stage` is the first that differs.
    fn remedy(&self, parting: &Parting, stage: Stage, found: &Difference, is_far: bool) -> String {
        let Difference { ranks, .. } = found;
        let members: Vec<usize> = ranks.iter().map(|(rank, _)| *rank).collect();
        let core = format!("look at {}: the memory and the core", self.who_differs(&members));
        let is_local = self.is_of_some_ranks(parting) && !is_far;
        let samples = parting.stages.get(&Stage::Samples).and_then(Option::as_ref);
        let compared = match stage {
            _ if parting.is_start => {
                "the seed, the initialisation of that layer, and the file or checkpoint that the runs start from"
            }
            Stage::LearningRate => "the learning rates (--lr) and the schedules",
            _ if !self.has_same_ranks() && !is_far => {
                return "Up to here the runs agree to the bit. If they differ in the last bits only, it is because other \
                        ranks add up in another order."
                    .into();
            }
            Stage::Samples => "the seed, the batch size, the order of the samples and the sampler",
            Stage::Batch => {
                let samples = if samples.is_some() { "" } else { "the samples, " };
                let files = "the data files and what the loop makes of them";
                let or_core = if is_far { String::new() } else { format!(", or {core}") };
                return format!("To find the cause, compare {samples}{files}{or_core}.");
            }
            _ if is_local => return format!("The others do not differ, so {core}."),
            Stage::Outputs => {
                let module = ranks.first().and_then(|(_, names)| names.first());
                return match module.map(String::as_str) {
                    Some("") | None => {
                        "To find the cause, compare what the model does beside its modules.".into()
                    }
                    Some(module) => format!(
                        "What goes into `{module}` is {}. To find the cause, compare its options, and what the model's forward \
                         does before it is called.",
                        if is_far { "close" } else { "the same" }
                    ),
                };
            }
            Stage::Loss => "the model, the loss function, what it is a mean over, and the versions",
            Stage::Backward => {
                "what the loss is multiplied by before backward, detached tensors, and functions with a backward of their own"
            }
            Stage::Gradients => "the loss (mean or sum), its scale and the layers from there on",
            Stage::Averages => {
                "the number of ranks, the communication hook, the weights of the mean and the clipping"
            }
            Stage::Parameters => {
                "the optimizer's options, such as weight decay and momentum, also for single parameters"
            }
            Stage::Buffers => "the layer's options, such as the momentum of a batch norm",
        };
        format!("To find the cause, compare {compared}.")
    }
}

/// Describes a record: its name, the program, and its length.
fn about(side: &str, record: &Record) -> String {
    let Record { name, header, steps, .. } = record;
    let (ranks, steps) = (counted(header.world_size, "rank"), counted(steps.len(), "step"));
    format!("{side}: {name} ({}, {ranks}, {steps})", header.program)
}

/// Returns a line for each option that differs.
fn options(a: &Record, b: &Record) -> Vec<String> {
    let (of_a, of_b) = (&a.header, &b.header);
    let both = of_a.options.iter().filter_map(|(key, a)| Some((key, a, of_b.options.get(key)?)));
    let differ = both.filter(|(_, a, b)| !is_same_option(a, b));
    let options = differ.map(|(key, a, b)| format!("option {key}: A has {a}, B has {b}"));
    let others = [
        ("libtorch", &of_a.libtorch, &of_b.libtorch),
        ("processor", &of_a.processor, &of_b.processor),
    ];
    let others = others.into_iter().filter(|(_, a, b)| a != b);
    options.chain(others.map(|(what, a, b)| format!("{what}: A has {a}, B has {b}"))).collect()
}

/// Returns whether two options say the same. PyTorch writes 0 for 0.0, and SGD for sgd.
fn is_same_option(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) if a.is_f64() || b.is_f64() => {
            a.as_f64().zip(b.as_f64()).is_some_and(|(a, b)| is_close(a, b))
        }
        (Value::String(a), Value::String(b)) => a.eq_ignore_ascii_case(b),
        _ => a == b,
    }
}

/// Names a tensor, or the loss, at the beginning of a sentence.
fn named(tensor: &str) -> String {
    if tensor.is_empty() { "The loss".into() } else { format!("`{tensor}`") }
}

/// Lists the names of tensors, of which some may be left out. Those of a batch are all named.
fn listed(stage: Stage, names: &[String]) -> String {
    if stage == Stage::Batch {
        return names.join(", ");
    }
    let shown: Vec<String> = names.iter().take(MAX_NAMES).map(|name| format!("`{name}`")).collect();
    let more = if names.len() > MAX_NAMES { ", ..." } else { "" };
    format!("{}{more}", shown.join(", "))
}
