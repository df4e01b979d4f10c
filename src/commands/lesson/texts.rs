//! The texts of the lessons. The words are in `views/language/*.toml`.

use std::collections::BTreeMap;

use serde::Deserialize;

/// The texts of a lesson.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Texts {
    /// The title of the chapter that this lesson begins. `None` if it continues one.
    pub chapter: Option<String>,
    pub title: String,
    /// What one learns.
    pub learn: String,
    /// The line to change, and what to predict.
    pub task: String,
    /// Help after a wrong answer.
    pub hint: String,
    /// What the run has measured, with placeholders for its numbers. Where no run can check an answer: a sentence that
    /// says why.
    pub measured: String,
    /// Why the answer is right, with the same numbers.
    pub why: String,
}

/// The words around the texts, most with the space that follows them.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Words {
    pub program: String,
    pub run: String,
    pub check: String,
    pub give_up: String,
    pub right: String,
    pub wrong: String,
    pub hint: String,
    pub answer: String,
    pub measured: String,
    pub why: String,
    pub yes: String,
    pub no: String,
    /// The mark of a lesson whose exercise no run can check.
    pub unchecked: String,
    /// How to go on from the list.
    pub how: String,
    /// The heading of a lesson, which has a number or a name.
    pub heading: String,
}

/// All texts in one language.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Catalog {
    pub words: Words,
    /// By the names of the lessons.
    pub lessons: BTreeMap<String, Texts>,
}
