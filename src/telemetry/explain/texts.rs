//! The texts of the explanation: which of them a run is explained with. The words are in `telemetry/language/*.toml`.

use std::fmt::Display;

use serde::Deserialize;

use super::layout::number;
use super::{ExplainedStep, Explainer};
use crate::optim::OptimizerLayout;
use crate::telemetry::language::filled;

/// A heading, and a paragraph below it.
pub(super) struct Section {
    pub heading: String,
    pub text: String,
}

/// The table `explain` of a language's file. A text may have placeholders, and may be a part of a paragraph.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Texts {
    rendezvous: String,
    rendezvous_of_one: String,
    rendezvous_by_nccl: String,
    rendezvous_in_memory: String,
    rendezvous_of_processes_by_nccl: String,
    rendezvous_channel: String,
    rendezvous_of_processes: String,
    rendezvous_shares_memory: String,
    start: String,
    start_built_by_one: String,
    start_built_by_each: String,
    start_checkpoint: String,
    start_file: String,
    start_broadcast: String,
    start_partitions: String,
    start_gradients: String,
    start_was_same: String,
    start_no_broadcast: String,
    start_shared: String,
    start_hash: String,
    pub column_built: String,
    pub column_start: String,
    data_of_one: String,
    data_of_ranks: String,
    data_shuffled: String,
    data_in_order: String,
    data_for_one: String,
    data_for_each: String,
    data_left_out: String,
    data_uneven: String,
    data_repeated: String,
    gradients_of_one: String,
    gradients_of_ranks: String,
    gradients_for_one: String,
    gradients_for_each: String,
    gradients_accumulated: String,
    gradients_bucket: String,
    gradients_buckets: String,
    gradients_exact_mean: String,
    gradients_compressed: String,
    gradients_largest: String,
    column_samples: String,
    column_one_sample: String,
    column_equal_samples: String,
    column_loss: String,
    column_gradient: String,
    column_averaged: String,
    column_weight: String,
    pub by_hand: String,
    update_of_one: String,
    update_of_replicas: String,
    update_of_shared: String,
    update_of_partitions: String,
    update_by_one: String,
    update_by_each: String,
    update_by_shared: String,
    update_by_partitions: String,
    update_clipped: String,
    column_plain_update: String,
    column_update: String,
    next_step: String,
    remaining_one: String,
    remaining_steps: String,
    end: String,
    end_of_one: String,
    end_of_ranks: String,
    end_of_partitions: String,
    end_step: String,
    end_steps: String,
    verdict_of_one: String,
    verdict_same: String,
    verdict_different: String,
}

/// A placeholder and its value.
type Value<'a> = (&'a str, &'a dyn Display);

impl Explainer {
    /// Joins `parts`, and fills in `values` and those of the run.
    fn filled(&self, parts: &[&str], values: &[Value]) -> String {
        let run_info = &self.run_info;
        let of_run: [Value; 7] = [
            ("ranks", &run_info.world_size),
            ("processes", &run_info.processes),
            ("model", &run_info.model),
            ("parameters", &run_info.parameters),
            ("seed", &run_info.seed),
            ("samples", &run_info.samples),
            ("optimizer", &run_info.optimizer),
        ];
        filled(&filled(&parts.concat(), values), &of_run)
    }

    fn section(&self, heading: &str, parts: &[&str], values: &[Value]) -> Section {
        Section { heading: self.filled(&[heading], values), text: self.filled(parts, values) }
    }

    /// Explains how the ranks find each other.
    pub(super) fn explain_rendezvous(&self) -> Section {
        let (texts, run_info) = (&self.texts, &self.run_info);
        let uses_nccl = run_info.backend == "nccl";
        let has_neighbours = run_info.world_size > run_info.processes;
        let channel = if has_neighbours { texts.rendezvous_channel.as_str() } else { "" };
        let mut parts: Vec<&str> = Vec::new();
        if run_info.world_size == 1 {
            parts.push(&texts.rendezvous_of_one);
        } else if run_info.processes == 1 && uses_nccl {
            parts.push(&texts.rendezvous_by_nccl);
        } else if run_info.processes == 1 {
            parts.push(&texts.rendezvous_in_memory);
        } else if uses_nccl {
            parts.push(&texts.rendezvous_of_processes_by_nccl);
        } else {
            parts.push(&texts.rendezvous_of_processes);
            if has_neighbours {
                parts.push(&texts.rendezvous_shares_memory);
            }
        }
        self.section(&texts.rendezvous, &parts, &[("channel", &channel)])
    }

    /// Explains why rank 0's parameters are sent to all ranks. `were_same` is whether all ranks built the same
    /// parameters. `resumed` is the step of the checkpoint, `None` without one.
    pub(super) fn explain_start(&self, were_same: bool, resumed: Option<u64>) -> Section {
        let (texts, run_info) = (&self.texts, &self.run_info);
        let is_alone = run_info.world_size == 1;
        let mut parts: Vec<&str> = Vec::new();
        parts.push(if is_alone { &texts.start_built_by_one } else { &texts.start_built_by_each });
        if resumed.is_some() {
            parts.push(&texts.start_checkpoint);
        } else if run_info.starts_from_file {
            parts.push(&texts.start_file);
        }
        if is_alone {
            parts.push(&texts.start_no_broadcast);
        } else {
            parts.push(&texts.start_broadcast);
            let partitions = run_info.optimizer_layout == OptimizerLayout::Partitioned;
            parts.push(if partitions { &texts.start_partitions } else { &texts.start_gradients });
            if were_same {
                parts.push(&texts.start_was_same);
            }
        }
        if run_info.optimizer_layout == OptimizerLayout::SharedModel {
            parts.push(&texts.start_shared);
        }
        parts.push(&texts.start_hash);
        self.section(&texts.start, &parts, &[("steps", &resumed.unwrap_or_default())])
    }

    /// Explains which samples each rank takes.
    pub(super) fn explain_data(&self, epoch: u64) -> Section {
        let (texts, run_info) = (&self.texts, &self.run_info);
        let ranks = run_info.world_size;
        let order = if run_info.shuffles { &texts.data_shuffled } else { &texts.data_in_order };
        let order = self.filled(&[order], &[("epoch", &epoch)]);
        if ranks == 1 {
            return self.section(&texts.data_of_one, &[&texts.data_for_one], &[("order", &order)]);
        }
        let left = run_info.samples % ranks;
        let mut parts: Vec<&str> = vec![&texts.data_for_each];
        if left > 0 && run_info.drops_last {
            parts.push(&texts.data_left_out);
        } else if left > 0 && run_info.exact_mean {
            parts.push(&texts.data_uneven);
        } else if left > 0 {
            parts.push(&texts.data_repeated);
        }
        let values: [Value; 5] = [
            ("order", &order),
            ("twice_ranks", &(2 * ranks)),
            ("left", &left),
            ("last_rank", &left.saturating_sub(1)),
            ("repeated", &(ranks - left)),
        ];
        self.section(&texts.data_of_ranks, &parts, &values)
    }

    /// Explains how gradients are averaged. `form` is that in which they are sent, `None` if unchanged.
    pub(super) fn explain_gradients(&self, step: &ExplainedStep, form: Option<&str>) -> Section {
        let (texts, run_info) = (&self.texts, &self.run_info);
        let buckets = match step.buckets {
            1 => texts.gradients_bucket.clone(),
            count => filled(&texts.gradients_buckets, &[("count", count)]),
        };
        let accumulated = match run_info.accumulate {
            1 => String::new(),
            batches => filled(&texts.gradients_accumulated, &[("batches", batches)]),
        };
        let multiplied = step.factors(run_info).map_or(String::new(), |factors| {
            filled(&texts.gradients_exact_mean, &[("factors", factors)])
        });
        let compressed = form
            .map_or(String::new(), |form| filled(&texts.gradients_compressed, &[("form", form)]));
        let is_alone = run_info.world_size == 1;
        let heading = if is_alone { &texts.gradients_of_one } else { &texts.gradients_of_ranks };
        let text = if is_alone { &texts.gradients_for_one } else { &texts.gradients_for_each };
        let values: [Value; 5] = [
            ("step", &step.step),
            ("buckets", &buckets),
            ("accumulated", &accumulated),
            ("multiplied", &multiplied),
            ("weight", &step.weight),
        ];
        self.section(heading, &[text, &compressed, &texts.gradients_largest], &values)
    }

    /// Returns the headings of samples, loss, gradient, mean and weight. `num_samples` is `None` if the ranks have
    /// different numbers of samples.
    pub(super) fn columns(&self, num_samples: Option<usize>) -> Vec<String> {
        let texts = &self.texts;
        let samples = match num_samples {
            None => texts.column_samples.clone(),
            Some(1) => texts.column_one_sample.clone(),
            Some(count) => filled(&texts.column_equal_samples, &[("count", count)]),
        };
        let others = [
            &texts.column_loss,
            &texts.column_gradient,
            &texts.column_averaged,
            &texts.column_weight,
        ];
        std::iter::once(samples).chain(others.into_iter().cloned()).collect()
    }

    /// Explains why the update is the same on all ranks, and that the gradient was clipped before it.
    pub(super) fn explain_update(&self, step: &ExplainedStep) -> Section {
        let (texts, run_info) = (&self.texts, &self.run_info);
        let first = &step.ranks[0];
        let is_clipped = first.averaged.to_bits() != first.stepped_by.to_bits();
        let clipped = match run_info.max_grad_norm {
            Some(max_norm) if is_clipped => {
                let values = [
                    ("max_norm", number(max_norm)),
                    ("from", number(first.averaged)),
                    ("to", number(first.stepped_by)),
                ];
                filled(&texts.update_clipped, &values)
            }
            _ => String::new(),
        };
        let values: [Value; 2] = [("step", &step.step), ("lr", &number(step.lr))];
        let section = |heading, text| self.section(heading, &[text, &clipped], &values);
        match run_info.optimizer_layout {
            _ if run_info.world_size == 1 => section(&texts.update_of_one, &texts.update_by_one),
            OptimizerLayout::SharedModel => {
                section(&texts.update_of_shared, &texts.update_by_shared)
            }
            OptimizerLayout::Partitioned => {
                section(&texts.update_of_partitions, &texts.update_by_partitions)
            }
            OptimizerLayout::Replicated => {
                section(&texts.update_of_replicas, &texts.update_by_each)
            }
        }
    }

    /// Introduces the next step with a heading.
    pub(super) fn explain_next_step(&self, step: u64) -> Section {
        self.section(&self.texts.next_step, &[], &[("step", &step)])
    }

    /// Explains that training continues in the same way.
    pub(super) fn explain_remaining_steps(&self) -> String {
        match self.run_info.steps_per_epoch {
            1 => self.texts.remaining_one.clone(),
            count => filled(&self.texts.remaining_steps, &[("count", count)]),
        }
    }

    /// Explains what happens at the end, after `steps` steps.
    pub(super) fn explain_end(&self, steps: u64) -> Section {
        let texts = &self.texts;
        let steps = match steps {
            1 => texts.end_step.clone(),
            count => filled(&texts.end_steps, &[("count", count)]),
        };
        let text = if self.run_info.world_size == 1 {
            &texts.end_of_one
        } else if self.run_info.optimizer_layout == OptimizerLayout::Partitioned {
            &texts.end_of_partitions
        } else {
            &texts.end_of_ranks
        };
        self.section(&texts.end, &[text], &[("steps", &steps)])
    }

    /// Explains what the parameters of all ranks show.
    pub(super) fn explain_hashes(&self, are_same: bool) -> String {
        let texts = &self.texts;
        let text = match (self.run_info.world_size, are_same) {
            (1, _) => &texts.verdict_of_one,
            (_, true) => &texts.verdict_same,
            (_, false) => &texts.verdict_different,
        };
        self.filled(&[text], &[])
    }

    /// Returns the heading of the updates.
    pub(super) fn update_column(&self) -> String {
        if self.run_info.is_plain {
            self.texts.column_plain_update.clone()
        } else {
            self.texts.column_update.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use strum::IntoEnumIterator;

    use super::*;
    use crate::telemetry::explain::{RankStep, RunInfo};
    use crate::telemetry::{Language, LogFormat, Printer};

    fn run_info() -> RunInfo {
        RunInfo {
            world_size: 1,
            processes: 1,
            backend: "threaded",
            model: "linear",
            parameters: 21,
            seed: 0,
            starts_from_file: false,
            samples: 33,
            shuffles: false,
            drops_last: false,
            accumulate: 1,
            exact_mean: false,
            optimizer_layout: OptimizerLayout::Replicated,
            steps_per_epoch: 1,
            compression: None,
            optimizer: "sgd",
            is_plain: false,
            max_grad_norm: None,
        }
    }

    /// Returns descriptions of runs for which all texts are needed.
    fn runs() -> Vec<RunInfo> {
        let one = RunInfo { starts_from_file: true, shuffles: true, ..run_info() };
        let ranks = RunInfo { world_size: 4, steps_per_epoch: 8, is_plain: true, ..run_info() };
        let processes = RunInfo { processes: 2, exact_mean: true, ..ranks.clone() };
        vec![
            RunInfo {
                optimizer_layout: OptimizerLayout::SharedModel,
                max_grad_norm: Some(0.5),
                ..ranks.clone()
            },
            RunInfo {
                optimizer_layout: OptimizerLayout::Partitioned,
                drops_last: true,
                ..ranks.clone()
            },
            RunInfo { backend: "nccl", accumulate: 2, ..ranks.clone() },
            RunInfo { backend: "nccl", ..processes.clone() },
            RunInfo { backend: "nccl", world_size: 2, ..processes.clone() },
            one,
            ranks,
            processes,
        ]
    }

    fn step(buckets: usize) -> ExplainedStep {
        let rank = RankStep {
            samples: vec![0, 1],
            num_samples: 2,
            count: 2,
            loss: 1.0,
            local: 0.5,
            averaged: 0.5,
            stepped_by: 0.25,
            before: 1.0,
            after: 0.75,
        };
        ExplainedStep {
            step: 0,
            lr: 0.1,
            weight: "weight[0][7]".into(),
            buckets,
            ranks: vec![rank; 4],
        }
    }

    /// Returns a step whose ranks count 1 and 3, and whose gradients are 1 and 5.
    fn counted_step() -> ExplainedStep {
        let mut step = step(1);
        step.ranks[0] = RankStep { count: 1, local: 1.0, ..step.ranks[0].clone() };
        step.ranks[1] = RankStep { count: 3, local: 5.0, ..step.ranks[1].clone() };
        step.ranks.truncate(2);
        step
    }

    #[test]
    fn losses_are_multiplied_by_what_their_batches_count() {
        let run_info = RunInfo { world_size: 2, exact_mean: true, ..run_info() };
        let step = counted_step();
        assert_eq!(step.factors(&run_info).unwrap(), "1 * 2 / 4, 3 * 2 / 4");
        let printer = Arc::new(Printer::new(LogFormat::Text));
        let explainer = Explainer::new(Language::En, run_info, printer);
        let said = explainer.explain_gradients(&step, None).text;
        assert!(said.contains("its mean loss times 1 * 2 / 4, 3 * 2 / 4 (--exact-mean"), "{said}");
    }

    /// Returns all that `explainer` can say about its run.
    fn all_texts(explainer: &Explainer) -> Vec<String> {
        let sections = [
            explainer.explain_rendezvous(),
            explainer.explain_start(true, None),
            explainer.explain_start(false, Some(7)),
            explainer.explain_data(3),
            explainer.explain_gradients(&step(1), None),
            explainer.explain_gradients(&counted_step(), None),
            explainer.explain_gradients(&step(2), Some("bfloat16")),
            explainer.explain_update(&step(1)),
            explainer.explain_next_step(1),
            explainer.explain_end(1),
            explainer.explain_end(8),
        ];
        let Texts { column_built, column_start, by_hand, .. } = &explainer.texts;
        let mut texts = [column_built, column_start, by_hand].map(String::clone).to_vec();
        texts.extend(sections.into_iter().flat_map(|section| [section.heading, section.text]));
        texts.push(explainer.explain_remaining_steps());
        texts.extend([true, false].map(|are_same| explainer.explain_hashes(are_same)));
        texts.push(explainer.update_column());
        texts.extend([None, Some(1), Some(2)].into_iter().flat_map(|it| explainer.columns(it)));
        texts
    }

    #[test]
    fn every_text_is_used_and_every_placeholder_is_known() {
        for language in Language::iter() {
            let mut marked: toml::Table = language.texts("explain");
            for (key, text) in &mut marked {
                *text = format!("<{key}>{}", text.as_str().unwrap()).into();
            }
            let mut said = String::new();
            for run_info in runs() {
                let printer = Arc::new(Printer::new(LogFormat::Text));
                let mut explainer = Explainer::new(language, run_info, printer);
                explainer.texts = marked.clone().try_into().unwrap();
                for text in all_texts(&explainer) {
                    assert!(!text.contains(['{', '}']), "{language}: {text}");
                    said += &text;
                }
            }
            for key in marked.keys() {
                assert!(said.contains(&format!("<{key}>")), "no run has said {key}");
            }
        }
    }
}
