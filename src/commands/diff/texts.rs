//! What `ddp-mp diff` says.

use serde_json::Value;

use super::compare::{Comparison, Difference, Parting, Stage, is_close};
use super::read::Record;
use engine::error::{counted, list_ranks};
use views::paragraph;

/// The most tensors of a rank that a line names.
const MAX_NAMES: usize = 3;

impl Comparison<'_> {
    /// Returns the lines of a comparison of two records.
    pub(super) fn lines(&self) -> Vec<String> {
        let [a, b] = self.records;
        let mut lines = vec![about("A", a), about("B", b)];
        lines.extend(options(a, b));
        if self.by_order {
            lines.extend(paragraph(&format!(
                "The names of the parameters differ, so they are compared by their places: `{}` of A with `{}` of B, and so \
                 on.",
                a.header.parameters[0].name, b.header.parameters[0].name
            )));
        }
        if !self.has_same_ranks() {
            lines.extend(paragraph(
                "The runs have different numbers of ranks, so only the averages, the learning rates, the parameters and \
                 rank 0's buffers are compared. A sum over other shards may differ in its last bits.",
            ));
        }
        for (record, other) in [(a, b), (b, a)] {
            lines.extend(self.left_out(record, other));
        }
        lines.extend(self.equal_part());
        if let Some(parting) = &self.parting {
            lines.extend(self.parting_lines(parting));
            return lines;
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

    /// Returns the lines about the place where the records part.
    fn parting_lines(&self, parting: &Parting) -> Vec<String> {
        let step = parting.step;
        let mut lines = vec![if parting.is_start {
            format!("The runs differ before step {step}:")
        } else {
            format!("Step {step} is the first that differs:")
        }];
        for (stage, found) in &parting.stages {
            let found = match found {
                None => "not compared".to_owned(),
                Some(found) if found.ranks.is_empty() => "the same".to_owned(),
                Some(found) => self.differing(parting, *stage, found),
            };
            let name: &str = stage.into();
            lines.push(format!("  {name:<10}  {found}"));
        }
        let next = self.equal_steps.last().map(|last| last + 1);
        if let Some(next) = next.filter(|next| *next < step) {
            lines.extend(paragraph(&format!(
                "Steps {next} to {} are not in both records: the cause may be there.",
                step - 1
            )));
        }
        if let Some((stage, difference)) = parting.first() {
            lines.extend(paragraph(&self.remedy(parting, stage, difference)));
        }
        lines
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
                Stage::Batch => format!("differs on {who}: {names}"),
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
    fn remedy(&self, parting: &Parting, stage: Stage, found: &Difference) -> String {
        let Difference { ranks, unknown } = found;
        let members: Vec<usize> = ranks.iter().map(|(rank, _)| *rank).collect();
        let core = format!("look at {}: the memory and the core", self.who_differs(&members));
        // If some ranks are right, the program is.
        let is_local = members.len() + unknown.len() < self.records[0].header.world_size;
        let samples = parting.stages.get(&Stage::Samples).and_then(Option::as_ref);
        let compared = match stage {
            _ if parting.is_start => {
                "the seed, the initialisation of that layer, and the file or checkpoint that the runs start from"
            }
            Stage::LearningRate => "--lr and the schedules",
            _ if !self.has_same_ranks() => {
                return "Up to here the runs agree to the bit. If they differ in the last bits only, it is because other \
                        ranks add up in another order."
                    .into();
            }
            Stage::Samples => "the seed, the batch size, the order of the samples and the sampler",
            Stage::Batch => {
                let samples = if samples.is_some() { "" } else { "the samples, " };
                let files = "the data files and what the loop makes of them";
                return format!("To find the cause, compare {samples}{files}, or {core}.");
            }
            _ if is_local => return format!("The others do not differ, so {core}."),
            Stage::Loss => "the model, the loss function and the versions",
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

/// Lists the names of tensors, of which some may be left out. Those of a batch are all named.
fn listed(stage: Stage, names: &[String]) -> String {
    if stage == Stage::Batch {
        return names.join(", ");
    }
    let shown: Vec<String> = names.iter().take(MAX_NAMES).map(|name| format!("`{name}`")).collect();
    let more = if names.len() > MAX_NAMES { ", ..." } else { "" };
    format!("{}{more}", shown.join(", "))
}
