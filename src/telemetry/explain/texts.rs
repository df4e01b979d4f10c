//! What is told, whatever the language: one that lacks a text does not compile.

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
    /// How the ranks find each other.
    fn meeting(&self, facts: &RunInfo) -> Section;

    /// Why rank 0's parameters go to all; whether those of the ranks `were_same` before, and at which step a
    /// checkpoint was made.
    fn start(&self, facts: &RunInfo, were_same: bool, resumed: Option<u64>) -> Section;

    /// What the columns are called with the parameters as a rank has made them, and as it begins with them.
    fn built_and_now(&self) -> [&'static str; 2];

    /// Which samples each rank takes.
    fn data(&self, facts: &RunInfo, epoch: u64) -> Section;

    /// How the gradients of all ranks become one; as what they travel, if not as they are.
    fn gradients(&self, facts: &RunInfo, step: &Step, compressed: Option<&str>) -> Section;

    /// That gradients travel as something else.
    fn compressed(&self, name: &str) -> String;

    /// What the columns are called: so many samples (`None` if the ranks have different numbers), loss, gradient, mean,
    /// weight.
    fn columns(&self, num_samples: Option<usize>) -> [String; 5];

    /// What comes before the mean that can be checked.
    fn by_hand(&self) -> &'static str;

    /// Why the update is the same on all ranks.
    fn update(&self, facts: &RunInfo, step: u64, lr: &str) -> Section;

    /// What the column is called with the update; whether it is plain.
    fn rule(&self, is_plain: bool) -> &'static str;

    /// That the gradient was shortened first.
    fn clipped(&self, max_norm: &str, from: &str, to: &str) -> String;

    /// The next step.
    fn next_step(&self, step: u64) -> Section;

    /// That the rest goes on like that.
    fn goes_on(&self, steps_per_epoch: u64) -> String;

    /// What happens at the end, after so many steps.
    fn end(&self, facts: &RunInfo, steps: u64) -> Section;

    /// What the parameters of all ranks show.
    fn verdict(&self, facts: &RunInfo, are_same: bool) -> String;
}
