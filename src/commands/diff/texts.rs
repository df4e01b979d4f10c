//! What `ddp-mp diff` says.

use serde_json::Value;

use super::compare::{
    Comparison, Difference, Outcome, Parting, RankDifference, SidesOf, Stage, is_close,
};
use super::read::Record;
use crate::error::list_ranks;
use crate::telemetry::{StepOfRank, paragraph, steps_text};

/// The most tensors of a rank that a line names.
const MAX_NAMES: usize = 3;

/// Returns the lines of the comparison of `a` and `b`.
pub(super) fn lines(a: &Record, b: &Record, comparison: &Comparison) -> Vec<String> {
    let mut lines = vec![format!("A: {}", about(a)), format!("B: {}", about(b))];
    lines.extend(options(a, b));
    if comparison.pairs.by_order {
        lines.extend(paragraph(&format!(
            "The names of the parameters differ, so they are compared by their places: `{}` of A with `{}` of B, and so \
             on.",
            a.header.parameters[0].name, b.header.parameters[0].name
        )));
    }
    if !comparison.has_same_ranks {
        lines.extend(paragraph(
            "The runs have different numbers of ranks, so only the averages, the learning rates, the parameters and \
             rank 0's buffers are compared. A sum over other shards may differ in its last bits.",
        ));
    }
    lines.extend(left_out(a, b, comparison));
    lines.extend(equal_part(comparison));
    match &comparison.parting {
        Some(parting) => lines.extend(parting_lines(a, comparison, parting)),
        None => {
            lines.extend(failures(comparison.failed));
            lines.extend(further_steps(comparison));
        }
    }
    lines
}

/// Describes a record: its name, the program, and its length.
fn about(record: &Record) -> String {
    let Record { name, header, steps, .. } = record;
    let ranks = if header.world_size == 1 { "rank" } else { "ranks" };
    let steps = steps_text(steps.len() as u64);
    format!("{name} ({}, {} {ranks}, {steps})", header.program, header.world_size)
}

/// Returns a line for each option that differs.
fn options(a: &Record, b: &Record) -> Vec<String> {
    let (of_a, of_b) = (&a.header.options, &b.header.options);
    let both = of_a.iter().filter_map(|(key, value)| Some((key, value, of_b.get(key)?)));
    let differ = both.filter(|(_, a, b)| !is_same_option(a, b));
    let line = |(key, a, b)| format!("option {key}: A has {a}, B has {b}");
    let mut lines: Vec<String> = differ.map(line).collect();
    for (what, a, b) in [
        ("libtorch", &a.header.libtorch, &b.header.libtorch),
        ("processor", &a.header.processor, &b.header.processor),
    ] {
        if a != b {
            lines.push(format!("{what}: A has {a}, B has {b}"));
        }
    }
    lines
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

/// Names the tensors that neither run trains and only one of them has.
fn left_out(a: &Record, b: &Record, comparison: &Comparison) -> Vec<String> {
    let pairs = &comparison.pairs.buffers;
    let line = |record: &Record, other: &Record, paired: Vec<usize>| {
        let all = 0..record.header.buffers.len();
        let tensors: Vec<usize> = all.filter(|tensor| !paired.contains(tensor)).collect();
        if tensors.is_empty() {
            return Vec::new();
        }
        paragraph(&format!(
            "Left out, because {} has no such tensor: buffers and frozen parameters of {}, {}.",
            other.name,
            record.name,
            names(record, Stage::Buffers, &tensors)
        ))
    };
    let (of_a, of_b) = pairs.iter().copied().unzip();
    [line(a, b, of_a), line(b, a, of_b)].concat()
}

fn equal_part(comparison: &Comparison) -> Option<String> {
    let start = comparison.has_equal_start.then(|| "the start".to_owned());
    let steps = match comparison.equal_steps[..] {
        [] => None,
        [step] => Some(format!("step {step}")),
        [first, .., last] => {
            Some(format!("{} steps ({first} to {last})", comparison.equal_steps.len()))
        }
    };
    let parts: Vec<String> = start.into_iter().chain(steps).collect();
    (!parts.is_empty()).then(|| format!("Equal: {}.", parts.join(" and ")))
}

/// Says which of the runs failed.
fn failures(failed: SidesOf<Option<StepOfRank>>) -> Vec<String> {
    let line = |who, at: StepOfRank| {
        format!("{who} failed in step {}: see the error of the run.", at.step)
    };
    match failed {
        SidesOf { a: Some(a), b: Some(b) } if a.step == b.step => vec![line("Both runs", a)],
        SidesOf { a, b } => {
            [("A", a), ("B", b)].into_iter().filter_map(|(who, at)| Some(line(who, at?))).collect()
        }
    }
}

/// Returns a line about steps that only one of two equal records has.
fn further_steps(comparison: &Comparison) -> Vec<String> {
    let sides = [("A", comparison.only_in.a), ("B", comparison.only_in.b)];
    let further = sides.into_iter().filter(|(_, steps)| *steps > 0);
    let line = |(side, steps)| format!("Only {side} has {} more.", steps_text(steps as u64));
    further.map(line).collect()
}

/// Returns the lines about the place where the records part.
fn parting_lines(a: &Record, comparison: &Comparison, parting: &Parting) -> Vec<String> {
    let mut lines = vec![if parting.is_start {
        format!("The runs differ before step {}:", parting.step)
    } else {
        format!("Step {} is the first that differs:", parting.step)
    }];
    for (stage, outcome) in &parting.stages {
        let found = match outcome {
            Outcome::Unknown => "not compared".to_owned(),
            Outcome::Same => "the same".to_owned(),
            Outcome::Differs(difference) => differing(a, *stage, difference, parting, comparison),
        };
        let name: &str = stage.into();
        lines.push(format!("  {name:<10}  {found}"));
    }
    let next = comparison.equal_steps.last().map(|last| last + 1);
    if let Some(next) = next.filter(|next| *next < parting.step) {
        lines.extend(paragraph(&format!(
            "Steps {next} to {} are not in both records: the cause may be there.",
            parting.step - 1
        )));
    }
    if let Some((stage, difference)) = parting.first() {
        lines.extend(paragraph(&meaning(a, comparison, parting, stage, difference)));
    }
    lines
}

/// Returns the ranks that differ in a stage, each with its tensors; ranks with the same tensors together. Also says of
/// which ranks nothing is known.
fn differing(
    a: &Record,
    stage: Stage,
    difference: &Difference,
    parting: &Parting,
    comparison: &Comparison,
) -> String {
    let Difference { ranks, unknown } = difference;
    let mut groups: Vec<(Vec<usize>, &[usize])> = Vec::new();
    for RankDifference { rank, tensors } in ranks {
        match groups.iter_mut().find(|(_, known)| known == tensors) {
            Some((members, _)) => members.push(*rank),
            None => groups.push((vec![*rank], tensors)),
        }
    }
    let count = match stage {
        Stage::Buffers => comparison.pairs.buffers.len(),
        _ => comparison.pairs.parameters.len(),
    };
    let group = |(members, tensors): (Vec<usize>, &[usize])| {
        let who = who_differs(&members, a.header.world_size);
        let names = names(a, stage, tensors);
        match stage {
            _ if tensors.is_empty() => format!("differs on {who}"),
            Stage::Batch => format!("differs on {who}: {names}"),
            _ => format!("{} of {count} on {who}: {names}", tensors.len()),
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
fn who_differs(ranks: &[usize], world_size: usize) -> String {
    if ranks.len() == world_size && world_size > 1 { "all ranks".into() } else { list_ranks(ranks) }
}

/// Returns the names of A's tensors, of which some may be left out.
fn names(a: &Record, stage: Stage, tensors: &[usize]) -> String {
    if stage == Stage::Batch {
        let name = |tensor: &usize| match tensor {
            0 => "inputs".to_owned(),
            1 => "targets".to_owned(),
            more => format!("more_inputs.{}", more - 2),
        };
        return tensors.iter().map(name).collect::<Vec<_>>().join(", ");
    }
    let all = if stage == Stage::Buffers { &a.header.buffers } else { &a.header.parameters };
    let shown = tensors.iter().take(MAX_NAMES).map(|tensor| format!("`{}`", all[*tensor].name));
    let shown = shown.collect::<Vec<_>>().join(", ");
    if tensors.len() > MAX_NAMES { format!("{shown}, ...") } else { shown }
}

/// Says what it means that `stage` is the first that differs: what is known, and what to look at.
fn meaning(
    a: &Record,
    comparison: &Comparison,
    parting: &Parting,
    stage: Stage,
    difference: &Difference,
) -> String {
    let Difference { ranks, unknown } = difference;
    let members: Vec<usize> = ranks.iter().map(|difference| difference.rank).collect();
    let who = who_differs(&members, a.header.world_size);
    let has = if members.len() == 1 { "has" } else { "have" };
    // If some ranks are right, the program is.
    let is_local = members.len() + unknown.len() < a.header.world_size;
    let tensor = match (stage, ranks.first().map_or(&[][..], |rank| &rank.tensors)) {
        (Stage::Batch, []) => "batches".into(),
        (_, []) => String::new(),
        (Stage::Batch, tensors) => names(a, stage, tensors).replace(", ", " and "),
        (_, [tensor]) => names(a, stage, &[*tensor]),
        (_, [first, ..]) => format!("{} and others", names(a, stage, &[*first])),
    };
    if parting.is_start {
        return format!(
            "The runs start from other values of {tensor}: compare the seed, the initialisation of that layer, and the \
             file or checkpoint that the runs start from."
        );
    }
    if !comparison.has_same_ranks && stage != Stage::LearningRate {
        return format!(
            "Up to here the runs agree to the bit. If they differ in the last bits only, it is because other ranks add up \
             in another order; first differs {tensor}."
        );
    }
    let is_same = |stage| parting.stages.get(&stage) == Some(&Outcome::Same);
    let core = format!("look at {who}: the memory and the core");
    let (fact, compare) = match stage {
        Stage::Samples => (
            format!("The samples of {who} differ"),
            "the seed, the batch size, the order of the samples and the sampler",
        ),
        Stage::Batch if is_same(Stage::Samples) => (
            format!("The samples have the same numbers, but the {tensor} of {who} differ"),
            "the data files and what the loop makes of them",
        ),
        Stage::Batch => (
            format!("The {tensor} of {who} differ"),
            "the samples, the data files and what the loop makes of them",
        ),
        Stage::Loss if is_local => {
            (format!("Only {who} {has} another loss, so the forward pass there differs"), "")
        }
        Stage::Loss => (
            "All that both records have before is the same, so the forward pass differs".into(),
            "the model, the loss function and the versions",
        ),
        Stage::Gradients if is_local => (
            format!(
                "Only {who} {has} another gradient of {tensor}, so the backward pass there differs"
            ),
            "",
        ),
        Stage::Gradients => (
            format!("The gradients of {who} differ, first in backward that of {tensor}"),
            "the loss (mean or sum), its scale and the layers from there on",
        ),
        Stage::Averages => (
            format!(
                "The own gradients of all ranks are the same, but {who} {has} another average of {tensor}"
            ),
            "the number of ranks, the communication hook, the weights of the mean and the clipping",
        ),
        Stage::LearningRate => ("The learning rates differ".into(), "--lr and the schedules"),
        Stage::Parameters => (
            format!(
                "The averages and the learning rate are the same, but {who} {has} another {tensor} after the step"
            ),
            "the optimizer's options, such as weight decay and momentum, also for single parameters",
        ),
        Stage::Buffers => (
            format!("The buffer {tensor} differs on {who}, and no parameter does"),
            "the layer's options, such as the momentum of a batch norm",
        ),
    };
    match stage {
        Stage::Batch => format!("{fact}: compare {compare}, or {core}."),
        Stage::Samples | Stage::LearningRate => format!("{fact}: compare {compare}."),
        _ if is_local => format!("{fact}: {core}."),
        _ => format!("{fact}: compare {compare}."),
    }
}
