//! The texts of the explanation, for every language: one that lacks a text does not compile.

use super::{RunInfo, Step};

/// A heading, and a paragraph below it.
pub(super) struct Section {
    pub heading: String,
    pub text: String,
}

impl Section {
    pub(super) fn new(heading: impl Into<String>, text: impl Into<String>) -> Self {
        Self { heading: heading.into(), text: text.into() }
    }
}

/// All texts in one language.
pub(super) trait Catalog {
    /// Explains how the ranks find each other.
    fn rendezvous(&self, run_info: &RunInfo) -> Section;

    /// Explains why rank 0's parameters are sent to all ranks. `were_same` is whether all ranks built the same
    /// parameters. `resumed` is the step of the checkpoint, `None` without one.
    fn start(&self, run_info: &RunInfo, were_same: bool, resumed: Option<u64>) -> Section;

    /// Returns the headings of the parameters that a rank built, and of those that it begins with.
    fn built_and_now(&self) -> [&'static str; 2];

    /// Explains which samples each rank takes.
    fn data(&self, run_info: &RunInfo, epoch: u64) -> Section;

    /// Explains how gradients are averaged. `compressed` is the form in which they are sent, `None` if unchanged.
    fn gradients(&self, run_info: &RunInfo, step: &Step, compressed: Option<&str>) -> Section;

    /// Explains that gradients are sent in a compressed form.
    fn compressed(&self, name: &str) -> String;

    /// Returns the headings of samples, loss, gradient, mean and weight. `num_samples` is `None` if the ranks have
    /// different numbers of samples.
    fn columns(&self, num_samples: Option<usize>) -> [String; 5];

    /// Returns the label of the mean that a reader can check.
    fn by_hand(&self) -> &'static str;

    /// Explains why the update is the same on all ranks.
    fn update(&self, run_info: &RunInfo, step: u64, lr: &str) -> Section;

    /// Returns the heading of the update; `is_plain` if it is `weight - lr * gradient`.
    fn rule(&self, is_plain: bool) -> &'static str;

    /// Explains that the gradient was clipped first.
    fn clipped(&self, max_norm: &str, from: &str, to: &str) -> String;

    /// Introduces the next step.
    fn next_step(&self, step: u64) -> Section;

    /// Explains that training continues in the same way.
    fn remaining_steps(&self, steps_per_epoch: u64) -> String;

    /// Explains what happens at the end, after `steps` steps.
    fn end(&self, run_info: &RunInfo, steps: u64) -> Section;

    /// Explains what the parameters of all ranks show.
    fn verdict(&self, run_info: &RunInfo, are_same: bool) -> String;
}
