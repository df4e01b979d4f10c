//! The texts of the lessons, for every language: one that lacks a text does not compile.

use super::chinese::Chinese;
use super::english::English;
use super::lessons::{Chapter, Lesson};
use crate::telemetry::Language;

/// The texts of a lesson.
pub(super) struct Texts {
    pub title: &'static str,
    /// What one learns.
    pub learn: &'static str,
    /// The line to change, and what to predict.
    pub task: &'static str,
    /// Help after a wrong answer.
    pub hint: &'static str,
    /// What the run has measured, with `{0}` and so on for its numbers. Where no run can check an answer: a
    /// sentence that says why.
    pub measured: &'static str,
    /// Why the answer is right, with the same numbers.
    pub why: &'static str,
}

/// The words around the texts, each with the space that follows it.
pub(super) struct Words {
    pub program: &'static str,
    pub run: &'static str,
    pub check: &'static str,
    pub give_up: &'static str,
    pub right: &'static str,
    pub wrong: &'static str,
    pub hint: &'static str,
    pub answer: &'static str,
    pub measured: &'static str,
    pub why: &'static str,
    pub yes: &'static str,
    pub no: &'static str,
    /// The mark of a lesson whose exercise no run can check.
    pub unchecked: &'static str,
    /// How to go on from the list.
    pub how: &'static str,
}

/// All texts in one language.
pub(super) trait Catalog {
    /// Returns the title of a chapter.
    fn chapter(&self, chapter: Chapter) -> &'static str;

    /// Returns the heading of a lesson.
    fn heading(&self, id: &str, title: &str) -> String;

    /// Returns the texts of a lesson.
    fn texts(&self, lesson: Lesson) -> Texts;

    /// Returns the words around them.
    fn words(&self) -> Words;
}

/// Returns all texts in `language`.
pub(super) fn catalog(language: Language) -> &'static dyn Catalog {
    match language {
        Language::En => &English,
        Language::Zh => &Chinese,
    }
}

/// Returns `text` with `numbers` in place of `{0}`, `{1}` and so on.
pub(super) fn filled(text: &str, numbers: &[String]) -> String {
    let fill = |text: String, (index, number): (usize, &String)| {
        text.replace(&format!("{{{index}}}"), number)
    };
    numbers.iter().enumerate().fold(text.to_owned(), fill)
}
