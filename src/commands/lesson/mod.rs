//! `ddp-mp lesson`: the lessons of the course, their exercises, and the check of an answer.
//!
//! `lessons` declares them, `checks` runs what an exercise of `ddp-mp` is about, and `texts` reads what is said about each from the
//! file of a language. The book shows the exercises, too: `tests/lesson.rs` compares them.

mod answer;
mod checks;
mod lessons;
mod texts;

use anyhow::{Context, bail};
use clap::Args;
use serde_json::Value;
use textwrap::core::display_width;

use crate::config::name;
use crate::session::AlreadyReported;
use answer::Answer;
use engine::error::Error;
use lessons::LESSONS;
use texts::{Catalog, Texts, Words};
use views::{Language, Printer, filled, paragraph};

pub use lessons::Lesson;

/// The flags of `lesson`.
#[derive(Debug, Clone, Args)]
pub struct LessonFlags {
    /// Show this lesson (number or name); without it, list all
    #[arg(value_name = "LESSON", value_parser = lessons::parse)]
    pub lesson: Option<Lesson>,
    /// Check an answer to the exercise
    ///
    /// Whole numbers with a space between them, a number with a fraction, or yes or no, as the exercise asks for. The
    /// exit code is 0 if the answer is right, and 1 if it is not
    #[arg(long, value_name = "ANSWER", requires = "lesson", conflicts_with = "solution")]
    pub answer: Option<String>,
    /// Show the answer of the exercise and the reason
    #[arg(long, requires = "lesson")]
    pub solution: bool,
    /// Choose the language of the lessons
    #[arg(long, value_name = "NAME", value_parser = name::<Language>(), default_value_t = Language::En)]
    pub language: Language,
}

/// Lists the lessons, prints the exercise of one, or checks an answer to it. If the exercise changes a
/// command, the check runs it, on ranks of this machine's CPU.
///
/// # Errors
/// [`Error::Input`] when the answer has another form than the exercise asks for, or when no run can check it;
/// [`AlreadyReported`] when it is wrong; the failure of a run; and an error when stdout can't be written.
pub fn lesson(flags: &LessonFlags, printer: &Printer) -> anyhow::Result<()> {
    let catalog: Catalog = flags.language.texts("course");
    let Some(lesson) = flags.lesson else {
        return print(printer, &list(&catalog));
    };
    let (id, words, texts) = (lesson.id(), &catalog.words, &catalog.lessons[lesson.name]);
    if flags.answer.is_none() && !flags.solution {
        return print(printer, &question(lesson, &catalog));
    }
    let Some((form, run)) = lesson.check else {
        if flags.solution {
            return print(printer, &[paragraph(&texts.measured), paragraph(&texts.why)].concat());
        }
        bail!(Error::usage(format!(
            "--answer: lesson {id} has no check. {} Compare yours with ddp-mp lesson {id} --solution",
            texts.measured
        )));
    };
    let answer = flags.answer.as_ref().map(|answer| form.parse(answer)).transpose();
    let answer =
        answer.map_err(|problem| Error::usage(format!("--answer: lesson {id}: {problem}")))?;
    let (right, numbers) = run().with_context(|| format!("running lesson {id}"))?;
    let (verdict, answer) = match &answer {
        None => (&words.answer, &right),
        Some(answer) if form.accepts(answer, &right) => (&words.right, answer),
        Some(answer) => {
            let mut lines = vec![format!("{}{}", words.wrong, shown(answer, words))];
            lines.extend(paragraph(&format!("{}{}", words.hint, texts.hint)));
            print(printer, &lines)?;
            return Err(anyhow::Error::msg(AlreadyReported));
        }
    };
    let mut lines = vec![format!("{verdict}{}", shown(answer, words))];
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let numbers = numbers.as_object().into_iter().flatten();
    let numbers: Vec<_> = numbers.map(|(name, value)| (&**name, text(value))).collect();
    for (what, text) in [(&words.measured, &texts.measured), (&words.why, &texts.why)] {
        lines.extend(paragraph(&format!("{what}{}", filled(text, &numbers))));
    }
    print(printer, &lines)
}

fn print(printer: &Printer, lines: &[String]) -> anyhow::Result<()> {
    Ok(printer.line(&lines.join("\n"))?)
}

/// Returns all lessons, by chapter: what to type, the title, and what one learns.
fn list(catalog: &Catalog) -> Vec<String> {
    let id_width = LESSONS.iter().map(|lesson| lesson.id().len()).max().unwrap_or(0);
    let titles = LESSONS.iter().map(|lesson| display_width(&catalog.lessons[lesson.name].title));
    let title_width = titles.max().unwrap_or(0);
    let mut lines = Vec::new();
    for lesson in LESSONS {
        let Texts { chapter, title, learn, .. } = &catalog.lessons[lesson.name];
        lines.extend(chapter.clone());
        let gap = " ".repeat(title_width - display_width(title));
        let note = if lesson.check.is_some() { "" } else { &catalog.words.unchecked };
        lines.push(format!("  {:id_width$}  {title}{gap}  {learn}{note}", lesson.id()));
    }
    lines.extend([String::new(), catalog.words.how.clone()]);
    lines
}

/// Returns the exercise of `lesson`, and how to answer it.
fn question(lesson: Lesson, catalog: &Catalog) -> Vec<String> {
    let (id, words, texts) = (lesson.id(), &catalog.words, &catalog.lessons[lesson.name]);
    let mut lines = vec![filled(&words.heading, &[("id", &id), ("title", &texts.title)])];
    if let Some(program) = lesson.program() {
        lines.push(format!("  {}examples/{program}.rs", words.program));
        lines.push(format!("  {}cargo run --release --example {program}", words.run));
    }
    lines.extend(paragraph(&texts.task));
    match lesson.check {
        Some((form, _)) => {
            let answer = format!("ddp-mp lesson {id} --answer=\"{}\"", form.example());
            lines.extend(paragraph(&format!("{}{answer}", words.check)));
        }
        None => {
            lines.extend(paragraph(&texts.measured));
            lines.extend(paragraph(&texts.hint));
        }
    }
    lines.extend(paragraph(&format!("{}ddp-mp lesson {id} --solution", words.give_up)));
    lines
}

/// Returns `answer` as text.
fn shown(answer: &Answer, words: &Words) -> String {
    match answer {
        Answer::Whole(numbers) => numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(" "),
        Answer::Decimal(number) => format!("{number:.6}"),
        Answer::YesNo(true) => words.yes.clone(),
        Answer::YesNo(false) => words.no.clone(),
    }
}

#[cfg(test)]
mod tests {
    use strum::IntoEnumIterator;

    use super::*;

    #[test]
    fn every_lesson_has_texts_in_every_language() {
        let texts = |language: Language, lesson: Lesson| {
            let catalog: Catalog = language.texts("course");
            let Texts { title, learn, task, hint, measured, why, .. } =
                &catalog.lessons[lesson.name];
            [title, learn, task, hint, measured, why].map(String::clone)
        };
        for language in Language::iter() {
            let catalog: Catalog = language.texts("course");
            assert_eq!(catalog.lessons.len(), LESSONS.len(), "{language}");
        }
        for lesson in LESSONS {
            let english = texts(Language::En, lesson);
            assert!(english.iter().all(|text| !text.is_empty() && text.is_ascii()), "{english:?}");
            for language in Language::iter().filter(|language| *language != Language::En) {
                for (english, translated) in english.iter().zip(texts(language, lesson)) {
                    assert!(!translated.is_empty(), "{language}: {english:?}");
                    assert_ne!(*english, translated, "{language}: not translated");
                }
            }
        }
    }

    #[test]
    fn lines_of_the_list_fit_into_100_columns() {
        for language in Language::iter() {
            for line in list(&language.texts("course")) {
                assert!(display_width(&line) <= 100, "{line}");
            }
        }
    }
}
