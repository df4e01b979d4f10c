//! The texts of the explanation: which of them a run is explained with. The words are in `views/language/*.toml`.

use std::collections::BTreeMap;
use std::fmt::Display;

use super::layout::number;
use super::{Explainer, RunInfo};
use crate::language::filled;
use compare::indices;
use engine::events::ProbedStep;
use engine::optim::OptimizerLayout;

/// A heading, and a paragraph below it.
pub(super) type Section = [String; 2];

/// The table `explain` of a language's file: each text by its key. A text may have placeholders, and may be a part of a
/// paragraph.
pub(super) type Texts = BTreeMap<String, String>;

/// A placeholder and its value.
type Value<'a> = (&'a str, &'a dyn Display);

impl Explainer {
    /// Returns the text of `key` with the values of the run.
    pub(super) fn text(&self, key: &str) -> String {
        self.joined(&[Some(key)], &[])
    }

    /// Returns the text of `key` with its placeholders; none without a key.
    fn part(&self, key: Option<&str>) -> &str {
        key.map_or("", |key| self.texts[key].as_str())
    }

    /// Joins the texts of `keys`, and fills in `values` and those of the run. A value may have the placeholders of later ones.
    fn joined(&self, keys: &[Option<&str>], values: &[Value]) -> String {
        let run_info = &self.run_info;
        let of_run: [Value; 7] = [
            ("ranks", &run_info.world_size),
            ("processes", &run_info.processes),
            ("model", &run_info.model),
            ("parameters", &self.parameters),
            ("seed", &run_info.seed),
            ("samples", &run_info.samples),
            ("optimizer", &run_info.optimizer),
        ];
        let text: String = keys.iter().map(|key| self.part(*key)).collect();
        filled(&filled(&text, values), &of_run)
    }

    /// Returns the text for one thing, or that for several, with their number.
    fn counted(&self, [one, several]: [&str; 2], count: u64) -> String {
        self.joined(&[Some(if count == 1 { one } else { several })], &[("count", &count)])
    }

    fn section(&self, heading: &str, keys: &[Option<&str>], values: &[Value]) -> Section {
        [&[Some(heading)][..], keys].map(|keys| self.joined(keys, values))
    }

    /// Explains how the ranks find each other.
    pub(super) fn explain_rendezvous(&self) -> Section {
        let RunInfo { world_size, processes, backend, .. } = self.run_info;
        let uses_nccl = backend == "nccl";
        let has_neighbours = world_size > processes;
        let way = match (world_size, processes) {
            (1, _) => "rendezvous_of_one",
            (_, 1) if uses_nccl => "rendezvous_by_nccl",
            (_, 1) => "rendezvous_in_memory",
            _ if uses_nccl => "rendezvous_of_processes_by_nccl",
            _ => "rendezvous_of_processes",
        };
        let shares = way == "rendezvous_of_processes" && has_neighbours;
        let channel = self.part(has_neighbours.then_some("rendezvous_channel"));
        let keys = [Some(way), shares.then_some("rendezvous_shares_memory")];
        self.section("rendezvous", &keys, &[("channel", &channel)])
    }

    /// Explains why rank 0's parameters are sent to all ranks. `were_same` is whether all ranks built the same
    /// parameters. `resumed` is the step of the checkpoint, `None` without one.
    pub(super) fn explain_start(&self, were_same: bool, resumed: Option<u64>) -> Section {
        let RunInfo { world_size, optimizer_layout, starts_from_file, .. } = self.run_info;
        let are_several = world_size > 1;
        let built = if are_several { "start_built_by_each" } else { "start_built_by_one" };
        let exchanged = match optimizer_layout {
            OptimizerLayout::Partitioned => "start_partitions",
            _ => "start_gradients",
        };
        let keys = [
            Some(built),
            match resumed {
                Some(_) => Some("start_checkpoint"),
                None => starts_from_file.then_some("start_file"),
            },
            Some(if are_several { "start_broadcast" } else { "start_no_broadcast" }),
            are_several.then_some(exchanged),
            (are_several && were_same).then_some("start_was_same"),
            (optimizer_layout == OptimizerLayout::SharedModel).then_some("start_shared"),
            Some("start_hash"),
        ];
        self.section("start", &keys, &[("steps", &resumed.unwrap_or_default())])
    }

    /// Explains which samples each rank takes.
    pub(super) fn explain_data(&self, epoch: u64) -> Section {
        let RunInfo { world_size: ranks, samples, shuffles, drops_last, exact_mean, .. } =
            self.run_info;
        let order = if shuffles { "data_shuffled" } else { "data_in_order" };
        let [heading, text] = match ranks {
            1 => ["data_of_one", "data_for_one"],
            _ => ["data_of_ranks", "data_for_each"],
        };
        let left = samples % ranks;
        let rest = match (drops_last, exact_mean) {
            (true, _) => "data_left_out",
            (false, true) => "data_uneven",
            (false, false) => "data_repeated",
        };
        let values: [Value; 6] = [
            ("order", &self.part(Some(order))),
            ("epoch", &epoch),
            ("twice_ranks", &(2 * ranks)),
            ("left", &left),
            ("last_rank", &left.saturating_sub(1)),
            ("repeated", &(ranks - left)),
        ];
        self.section(heading, &[Some(text), (left > 0).then_some(rest)], &values)
    }

    /// Explains how gradients are averaged.
    pub(super) fn explain_gradients(&self, step: &ProbedStep) -> Section {
        let RunInfo { world_size, accumulate, compression, .. } = self.run_info;
        let accumulated = (accumulate > 1).then_some("gradients_accumulated");
        let weight = format!("{}{}", step.parameter, indices(step.weight, &step.shape));
        let factors = self.factors(step);
        let multiplied = factors.as_ref().map(|_| "gradients_exact_mean");
        let buckets = ["gradients_bucket", "gradients_buckets"];
        let values: [Value; 8] = [
            ("accumulated", &self.part(accumulated)),
            ("batches", &accumulate),
            ("multiplied", &self.part(multiplied)),
            ("factors", &factors.unwrap_or_default()),
            ("buckets", &self.counted(buckets, step.buckets as u64)),
            ("form", &compression.unwrap_or_default()),
            ("step", &step.step),
            ("weight", &weight),
        ];
        let [heading, text] = match world_size {
            1 => ["gradients_of_one", "gradients_for_one"],
            _ => ["gradients_of_ranks", "gradients_for_each"],
        };
        let compressed = compression.map(|_| "gradients_compressed");
        self.section(heading, &[Some(text), compressed, Some("gradients_largest")], &values)
    }

    /// Returns the headings of samples, loss, gradient, mean and weight. `num_samples` is `None` if the ranks have
    /// different numbers of samples.
    pub(super) fn columns(&self, num_samples: Option<usize>) -> Vec<String> {
        let equal = ["column_one_sample", "column_equal_samples"];
        let samples = match num_samples {
            None => self.text("column_samples"),
            Some(count) => self.counted(equal, count as u64),
        };
        let others = ["column_loss", "column_gradient", "column_averaged", "column_weight"];
        std::iter::once(samples).chain(others.map(|key| self.text(key))).collect()
    }

    /// Explains why the update is the same on all ranks, and that the gradient was clipped before it.
    pub(super) fn explain_update(&self, step: &ProbedStep) -> Section {
        let RunInfo { world_size, optimizer_layout, max_grad_norm, .. } = self.run_info;
        let first = &step.ranks[0];
        let is_clipped = first.averaged.to_bits() != first.stepped_by.to_bits();
        let max_norm = max_grad_norm.filter(|_| is_clipped);
        let [heading, text] = match optimizer_layout {
            _ if world_size == 1 => ["update_of_one", "update_by_one"],
            OptimizerLayout::SharedModel => ["update_of_shared", "update_by_shared"],
            OptimizerLayout::Partitioned => ["update_of_partitions", "update_by_partitions"],
            OptimizerLayout::Replicated => ["update_of_replicas", "update_by_each"],
        };
        let values: [Value; 5] = [
            ("step", &step.step),
            ("lr", &number(step.lr)),
            ("max_norm", &number(max_norm.unwrap_or_default())),
            ("from", &number(first.averaged)),
            ("to", &number(first.stepped_by)),
        ];
        self.section(heading, &[Some(text), max_norm.map(|_| "update_clipped")], &values)
    }

    /// Introduces the next step with a heading.
    pub(super) fn explain_next_step(&self, step: u64) -> Section {
        self.section("next_step", &[], &[("step", &step)])
    }

    /// Explains that training continues in the same way.
    pub(super) fn explain_remaining_steps(&self) -> String {
        self.counted(["remaining_one", "remaining_steps"], self.run_info.steps_per_epoch)
    }

    /// Explains what happens at the end, after `steps` steps.
    pub(super) fn explain_end(&self, steps: u64) -> Section {
        let text = match self.run_info.optimizer_layout {
            _ if self.run_info.world_size == 1 => "end_of_one",
            OptimizerLayout::Partitioned => "end_of_partitions",
            _ => "end_of_ranks",
        };
        let steps = self.counted(["end_step", "end_steps"], steps);
        self.section("end", &[Some(text)], &[("steps", &steps)])
    }

    /// Explains what the parameters of all ranks show.
    pub(super) fn explain_hashes(&self, are_same: bool) -> String {
        self.text(match (self.run_info.world_size, are_same) {
            (1, _) => "verdict_of_one",
            (_, true) => "verdict_same",
            (_, false) => "verdict_different",
        })
    }

    /// Returns the heading of the updates.
    pub(super) fn update_column(&self) -> String {
        self.text(if self.run_info.is_plain { "column_plain_update" } else { "column_update" })
    }
}

#[cfg(test)]
mod tests {
    use strum::IntoEnumIterator;

    use super::*;
    use crate::Language;
    use engine::events::RankStep;

    fn run_info() -> RunInfo {
        RunInfo {
            world_size: 1,
            processes: 1,
            backend: "threaded",
            model: "linear",
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
            optimizer: "sgd".into(),
            is_plain: false,
            max_grad_norm: None,
        }
    }

    fn explainer(texts: Texts, run_info: RunInfo) -> Explainer {
        Explainer { texts, run_info, parameters: 21 }
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
            RunInfo { compression: Some("bfloat16"), ..ranks.clone() },
            RunInfo { backend: "nccl", ..processes.clone() },
            RunInfo { backend: "nccl", world_size: 2, ..processes.clone() },
            one,
            ranks,
            processes,
        ]
    }

    fn step(buckets: usize) -> ProbedStep {
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
        ProbedStep {
            step: 0,
            index: 0,
            lr: 0.1,
            parameter: "weight".into(),
            shape: vec![1, 20],
            weight: 7,
            buckets,
            ranks: vec![rank; 4],
        }
    }

    /// Returns a step whose ranks count 1 and 3, and whose gradients are 1 and 5.
    fn counted_step() -> ProbedStep {
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
        let explainer = explainer(Language::En.texts("explain"), run_info);
        assert_eq!(explainer.factors(&step).unwrap(), "1 * 2 / 4, 3 * 2 / 4");
        let [_, said] = explainer.explain_gradients(&step);
        assert!(said.contains("its mean loss times 1 * 2 / 4, 3 * 2 / 4 (--exact-mean"), "{said}");
    }

    /// Returns all that `explainer` can say about its run.
    fn all_texts(explainer: &Explainer) -> Vec<String> {
        let sections = [
            explainer.explain_rendezvous(),
            explainer.explain_start(true, None),
            explainer.explain_start(false, Some(7)),
            explainer.explain_data(3),
            explainer.explain_gradients(&step(1)),
            explainer.explain_gradients(&counted_step()),
            explainer.explain_gradients(&step(2)),
            explainer.explain_update(&step(1)),
            explainer.explain_next_step(1),
            explainer.explain_end(1),
            explainer.explain_end(8),
        ];
        let mut texts =
            ["column_built", "column_start", "by_hand"].map(|key| explainer.text(key)).to_vec();
        texts.extend(sections.into_iter().flatten());
        texts.push(explainer.explain_remaining_steps());
        texts.extend([true, false].map(|are_same| explainer.explain_hashes(are_same)));
        texts.push(explainer.update_column());
        texts.extend([None, Some(1), Some(2)].into_iter().flat_map(|it| explainer.columns(it)));
        texts
    }

    #[test]
    fn every_text_is_used_and_every_placeholder_is_known() {
        for language in Language::iter() {
            let mut marked: Texts = language.texts("explain");
            for (key, text) in &mut marked {
                *text = format!("<{key}>{text}");
            }
            let mut said = String::new();
            for run_info in runs() {
                for text in all_texts(&explainer(marked.clone(), run_info)) {
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
