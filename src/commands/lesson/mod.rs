//! `ddp-mp lesson`: the lessons of the course, their exercises, and the check of an answer.
//!
//! `lessons` declares them, `checks` runs what an exercise is about, and `english` and `chinese` have the texts, which
//! the book shows, too.

mod answer;
mod checks;
mod chinese;
mod english;
mod lessons;
mod texts;

use std::io::Write;

use anyhow::Context;
use clap::Args;
use strum::IntoEnumIterator;
use textwrap::core::display_width;

use crate::config::name;
use crate::error::Error;
use crate::session::AlreadyReported;
use crate::telemetry::{Language, Printer, paragraph};
use answer::Answer;
use lessons::{Check, Exercise};
use texts::{Catalog, Texts, filled};

pub use lessons::Lesson;

/// The flags of `lesson`.
#[derive(Debug, Clone, Args)]
pub struct LessonFlags {
    /// Number or name of a lesson; without it a list
    #[arg(value_name = "LESSON", value_parser = lessons::parse)]
    pub lesson: Option<Lesson>,
    /// Answer to the exercise, checked by a run
    ///
    /// Whole numbers with a space between them, a number with a fraction, or yes or no, as the exercise asks for. The
    /// exit code is 0 if the answer is right, and 1 if it is not
    #[arg(long, value_name = "ANSWER", requires = "lesson", conflicts_with = "solution")]
    pub answer: Option<String>,
    /// Answer that a run gives now, and its reason
    #[arg(long, requires = "lesson")]
    pub solution: bool,
    /// Language of the lessons
    #[arg(long, value_name = "NAME", value_parser = name::<Language>(), default_value_t = Language::En)]
    pub language: Language,
}

/// Lists the lessons, prints the exercise of one, or checks an answer to it. The check runs what the exercise is
/// about, on ranks of this machine's CPU.
///
/// # Errors
/// [`Error::InvalidInput`] when the answer has another form than the exercise asks for, or when no run can check it;
/// [`AlreadyReported`] when it is wrong; the failure of a run; and an error when stdout can't be written.
pub fn lesson(flags: &LessonFlags, printer: &Printer) -> anyhow::Result<()> {
    let catalog = texts::catalog(flags.language);
    let Some(lesson) = flags.lesson else {
        return print(printer, &list(catalog));
    };
    let (id, exercise, texts) = (lesson.id(), lesson.exercise(), catalog.texts(lesson));
    match (&flags.answer, exercise.check) {
        (Some(_), Check::None) => Err(Error::InvalidInput(format!(
            "--answer: lesson {id} has no check. {} Compare yours with ddp-mp lesson {id} --solution",
            texts.measured
        ))
        .into()),
        (Some(answer), Check::Run { form, run }) => {
            let answer = form.parse(answer).map_err(|problem| {
                Error::InvalidInput(format!("--answer: lesson {id}: {problem}"))
            })?;
            let found = run().with_context(|| format!("running lesson {id}"))?;
            let words = catalog.words();
            if form.accepts(&answer, &found.answer) {
                let mut lines = vec![format!("{}{}", words.right, shown(&answer, catalog))];
                lines.extend(reason(catalog, &texts, &found.numbers));
                return print(printer, &lines);
            }
            let mut lines = vec![format!("{}{}", words.wrong, shown(&answer, catalog))];
            lines.extend(paragraph(&format!("{}{}", words.hint, texts.hint)));
            print(printer, &lines)?;
            Err(anyhow::Error::msg(AlreadyReported))
        }
        (None, _) if !flags.solution => {
            print(printer, &question(lesson, exercise, catalog, &texts))
        }
        (None, Check::Run { run, .. }) => {
            let found = run().with_context(|| format!("running lesson {id}"))?;
            let answer = shown(&found.answer, catalog);
            let mut lines = vec![format!("{}{answer}", catalog.words().answer)];
            lines.extend(reason(catalog, &texts, &found.numbers));
            print(printer, &lines)
        }
        (None, Check::None) => {
            let lines = [paragraph(texts.measured), paragraph(texts.why)];
            print(printer, &lines.concat())
        }
    }
}

fn print(printer: &Printer, lines: &[String]) -> anyhow::Result<()> {
    let write = |out: &mut dyn Write| lines.iter().try_for_each(|line| writeln!(out, "{line}"));
    Ok(printer.lines(write)?)
}

/// Returns all lessons, by chapter: what to type, the title, and what one learns.
fn list(catalog: &dyn Catalog) -> Vec<String> {
    let rows: Vec<(Lesson, Texts)> =
        Lesson::iter().map(|lesson| (lesson, catalog.texts(lesson))).collect();
    let widest = |width: fn(&(Lesson, Texts)) -> usize| rows.iter().map(width).max().unwrap_or(0);
    let id_width = widest(|(lesson, _)| lesson.id().len());
    let title_width = widest(|(_, texts)| display_width(texts.title));
    let (mut lines, mut chapter) = (Vec::new(), None);
    for (lesson, texts) in &rows {
        let Exercise { chapter: its_chapter, check } = lesson.exercise();
        if chapter.replace(its_chapter) != Some(its_chapter) {
            lines.push(catalog.chapter(its_chapter).to_owned());
        }
        let gap = " ".repeat(title_width - display_width(texts.title));
        let note = match check {
            Check::Run { .. } => "",
            Check::None => catalog.words().unchecked,
        };
        let (id, title, learn) = (lesson.id(), texts.title, texts.learn);
        lines.push(format!("  {id:id_width$}  {title}{gap}  {learn}{note}"));
    }
    lines.extend([String::new(), catalog.words().how.to_owned()]);
    lines
}

/// Returns the exercise of `lesson`, and how to answer it.
fn question(
    lesson: Lesson,
    exercise: Exercise,
    catalog: &dyn Catalog,
    texts: &Texts,
) -> Vec<String> {
    let (id, words) = (lesson.id(), catalog.words());
    let mut lines = vec![catalog.heading(&id, texts.title)];
    if let Some(program) = lesson.program() {
        lines.push(format!("  {}examples/{program}.rs", words.program));
        lines.push(format!("  {}cargo run --release --example {program}", words.run));
    }
    lines.extend(paragraph(texts.task));
    match exercise.check {
        Check::Run { form, .. } => {
            let answer = format!("ddp-mp lesson {id} --answer=\"{}\"", form.example());
            lines.extend(paragraph(&format!("{}{answer}", words.check)));
        }
        Check::None => {
            lines.extend(paragraph(texts.measured));
            lines.extend(paragraph(texts.hint));
        }
    }
    lines.extend(paragraph(&format!("{}ddp-mp lesson {id} --solution", words.give_up)));
    lines
}

/// Returns what a run has measured, and why it is so.
fn reason(catalog: &dyn Catalog, texts: &Texts, numbers: &[String]) -> Vec<String> {
    let words = catalog.words();
    let measured = format!("{}{}", words.measured, filled(texts.measured, numbers));
    let why = format!("{}{}", words.why, filled(texts.why, numbers));
    [paragraph(&measured), paragraph(&why)].concat()
}

/// Returns `answer` as text in the language of `catalog`.
fn shown(answer: &Answer, catalog: &dyn Catalog) -> String {
    match answer {
        Answer::Whole(numbers) => numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(" "),
        Answer::Decimal(number) => format!("{number:.6}"),
        Answer::YesNo(is_yes) => {
            let words = catalog.words();
            if *is_yes { words.yes } else { words.no }.to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_language_names_every_lesson_and_uses_the_same_numbers() {
        let placeholders = |text: &str| {
            let found: Vec<String> = (0..8).map(|number| format!("{{{number}}}")).collect();
            found.into_iter().filter(|mark| text.contains(mark)).collect::<Vec<_>>()
        };
        let [english, chinese] = [Language::En, Language::Zh].map(texts::catalog);
        for lesson in Lesson::iter() {
            let [en, zh] = [english.texts(lesson), chinese.texts(lesson)];
            for (en, zh) in [(en.measured, zh.measured), (en.why, zh.why)] {
                assert_eq!(placeholders(en), placeholders(zh), "{}", lesson.id());
            }
            for text in [en.title, en.learn, en.task, en.hint, en.measured, en.why] {
                assert!(text.is_ascii() && !text.is_empty() && !text.contains("  "), "{text:?}");
            }
            for text in [zh.title, zh.learn, zh.task, zh.hint, zh.measured, zh.why] {
                assert!(!text.is_empty() && !text.is_ascii() && !text.contains("  "), "{text:?}");
            }
        }
    }

    #[test]
    fn lines_of_the_list_fit_into_100_columns() {
        for language in [Language::En, Language::Zh] {
            for line in list(texts::catalog(language)) {
                assert!(display_width(&line) <= 100, "{line}");
            }
        }
    }
}
