//! What `ddp-mp diff` says.

use serde_json::Value;
use strum::IntoEnumIterator;

use super::compare::{Comparison, Outcome, Parting, RankDifference, SidesOf, Stage};
use super::read::Record;
use crate::error::list_ranks;
use crate::telemetry::{RecordedFailure, paragraph, steps_text};

/// The most tensors of a rank that a line names.
const MAX_NAMES: usize = 3;

/// Returns the lines of the comparison of `a` and `b`.
pub(super) fn lines(a: &Record, b: &Record, comparison: &Comparison) -> Vec<String> {
    let mut lines = vec![format!("A: {}", about(a)), format!("B: {}", about(b))];
    lines.extend(options(a, b));
    if comparison.pairs.by_place {
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
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (Value::String(a), Value::String(b)) => a.eq_ignore_ascii_case(b),
        _ => a == b,
    }
}

fn equal_part(comparison: &Comparison) -> Option<String> {
    let start = comparison.has_equal_start.then(|| "the start".to_owned());
    let steps = comparison.equal_steps.map(|equal| match equal.count {
        1 => format!("step {}", equal.first),
        count => format!("{count} steps ({} to {})", equal.first, equal.last),
    });
    let parts: Vec<String> = [start, steps].into_iter().flatten().collect();
    (!parts.is_empty()).then(|| format!("Equal: {}.", parts.join(" and ")))
}

/// Says which of the runs failed.
fn failures(failed: SidesOf<Option<RecordedFailure>>) -> Vec<String> {
    let line = |who, at: RecordedFailure| {
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
    let place = match parting.is_start {
        true => format!("The runs differ before step {}:", parting.step),
        false => format!("Step {} is the first that differs:", parting.step),
    };
    let mut lines = vec![place];
    for stage in Stage::iter() {
        let Some(outcome) = parting.stages.get(&stage) else { continue };
        let found = match outcome {
            Outcome::Unknown => "not compared".to_owned(),
            Outcome::Same => "the same".to_owned(),
            Outcome::Differs(ranks) => differing(a, stage, ranks, comparison),
        };
        let name: &str = stage.into();
        lines.push(format!("  {name:<10}  {found}"));
    }
    let next = comparison.equal_steps.map(|equal| equal.last + 1);
    if let Some(next) = next.filter(|next| *next < parting.step) {
        lines.extend(paragraph(&format!(
            "Steps {next} to {} are not in both records: the cause may be there.",
            parting.step - 1
        )));
    }
    if let Some((stage, ranks)) = parting.first() {
        lines.extend(paragraph(&meaning(a, comparison, parting, stage, ranks)));
    }
    lines
}

/// Returns the ranks that differ in a stage, each with its tensors; ranks with the same tensors together.
fn differing(
    a: &Record,
    stage: Stage,
    ranks: &[RankDifference],
    comparison: &Comparison,
) -> String {
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
        match tensors {
            [] => format!("differs on {who}"),
            tensors => {
                format!("{} of {count} on {who}: {}", tensors.len(), names(a, stage, tensors))
            }
        }
    };
    groups.into_iter().map(group).collect::<Vec<_>>().join("; ")
}

/// Formats ranks: `all ranks` if they are all of several.
fn who_differs(ranks: &[usize], world_size: usize) -> String {
    if ranks.len() == world_size && world_size > 1 { "all ranks".into() } else { list_ranks(ranks) }
}

/// Returns the names of A's tensors, of which some may be left out.
fn names(a: &Record, stage: Stage, tensors: &[usize]) -> String {
    let all = if stage == Stage::Buffers { &a.header.buffers } else { &a.header.parameters };
    let shown = tensors.iter().take(MAX_NAMES).map(|tensor| format!("`{}`", all[*tensor].name));
    let shown = shown.collect::<Vec<_>>().join(", ");
    if tensors.len() > MAX_NAMES { format!("{shown}, ...") } else { shown }
}

/// Says what it means that `stage` is the first that differs, on `ranks`.
fn meaning(
    a: &Record,
    comparison: &Comparison,
    parting: &Parting,
    stage: Stage,
    ranks: &[RankDifference],
) -> String {
    let members: Vec<usize> = ranks.iter().map(|difference| difference.rank).collect();
    let who = who_differs(&members, a.header.world_size);
    // If some ranks are right, the program is.
    let is_local = members.len() < a.header.world_size;
    let first = ranks.first().and_then(|rank| rank.tensors.first().map(|tensor| (rank, *tensor)));
    let tensor = first.map_or(String::new(), |(rank, tensor)| {
        let name = names(a, stage, &[tensor]);
        match rank.tensors.len() {
            1 => name,
            _ => format!("{name} and others"),
        }
    });
    let core = format!("look at {who}: the memory and the core");
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
    let has = if members.len() == 1 { "has" } else { "have" };
    let is_same = |stage| parting.stages.get(&stage) == Some(&Outcome::Same);
    match stage {
        Stage::Samples => format!(
            "The samples of {who} differ: compare the seed, the batch size, the order of the samples and the sampler."
        ),
        Stage::Batch if !is_same(Stage::Samples) => {
            format!("The data of {who} differ: compare the samples, the data files, or {core}.")
        }
        Stage::Batch => {
            format!("The samples have the same numbers, but the data of {who} differ: compare the data files, or {core}.")
        }
        Stage::Loss if is_local => {
            format!("Only {who} {has} another loss, so the forward pass there differs: {core}.")
        }
        Stage::Loss if !is_same(Stage::Batch) => "The loss differs: compare the batches, which are not in both records, \
                                                  the model, the loss function and the versions."
            .into(),
        Stage::Loss if !comparison.has_equal_start && comparison.equal_steps.is_none() => {
            "The loss differs, and no earlier step was compared, so the parameters may have differed before: compare the \
             options, the model, the loss function and the versions."
                .into()
        }
        Stage::Loss => "All that came before is the same, so the forward pass differs: compare the model, the loss \
                        function and the versions."
            .into(),
        Stage::Gradients if is_local => {
            format!("Only {who} {has} another gradient of {tensor}, so the backward pass there differs: {core}.")
        }
        Stage::Gradients => format!(
            "The gradients of all ranks differ, first in backward that of {tensor}: compare the loss (mean or sum) and \
             the layers from there on."
        ),
        Stage::Averages if is_local => {
            format!("The own gradients of all ranks are the same, but {who} {has} another average of {tensor}: {core}.")
        }
        Stage::Averages => format!(
            "The own gradients of all ranks are the same, but the average of {tensor} differs: compare the number of \
             ranks, the communication hook and the weights of the mean."
        ),
        Stage::LearningRate => "The learning rates differ: compare --lr and the schedules.".into(),
        Stage::Parameters if is_local => {
            format!("The averages are the same, but {who} {has} another {tensor} after the step: {core}.")
        }
        Stage::Parameters => format!(
            "The averages and the learning rate are the same, so the optimizer has made another step of {tensor}: compare \
             its options, such as weight decay and momentum, also for single parameters."
        ),
        Stage::Buffers if is_local => {
            format!("Only {who} {has} another buffer {tensor} after the step: {core}.")
        }
        Stage::Buffers => format!(
            "The buffer {tensor} differs on all ranks, and no parameter does: compare the layer's options, such as the \
             momentum of a batch norm."
        ),
    }
}
