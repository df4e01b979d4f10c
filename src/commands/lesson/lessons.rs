//! The lessons in the order of the course: each with the check of its exercise.

use serde_json::Value;

use super::answer::{Answer, Form};
use super::checks;

/// A lesson of the course. `texts` describes each in every language.
#[derive(Debug, Clone, Copy)]
pub struct Lesson {
    pub(super) name: &'static str,
    /// How an answer to its exercise is checked: its form, and a run. `None` if no run can decide.
    pub(super) check: Option<(Form, Run)>,
}

/// The name of the first lesson that is a program of `examples`. Those before use `ddp-mp`.
const FIRST_PROGRAM: &str = "one-rank";

/// All lessons.
pub(super) static LESSONS: [Lesson; 22] = [
    lesson("demo", ONE, checks::demo),
    lesson("shards", ONE, || known(Answer::Whole(vec![2]))),
    lesson("update", WEIGHT, checks::update),
    lesson("batch", Form::YesNo, checks::batch),
    lesson("backend", Form::YesNo, checks::backend),
    lesson("straggler", ONE, checks::straggler),
    lesson("desync", ONE, checks::desync),
    lesson("bad-core", ONE, checks::bad_core),
    lesson("lost-rank", ONE, checks::lost_rank),
    lesson(FIRST_PROGRAM, SHARE, || known(Answer::Decimal(0.75))),
    Lesson { name: "threads-that-meet", check: None },
    lesson("all-reduce-by-hand", TWO, || known(Answer::Whole(vec![1792, 448]))),
    lesson("naive-ddp", Form::YesNo, || known(Answer::YesNo(false))),
    lesson("buckets", ONE, || known(Answer::Whole(vec![7]))),
    lesson("overlap", TWO, checks::overlap),
    lesson("your-own-model", ONE, || known(Answer::Whole(vec![4000]))),
    lesson("the-engine", ONE, || known(Answer::Whole(vec![2]))),
    lesson("data-and-validation", ONE, || known(Answer::Whole(vec![602]))),
    lesson("checkpoints", ONE, checks::checkpoints),
    lesson("gpt", ONE, || known(Answer::Whole(vec![2048]))),
    lesson("what-grows", FACTOR, checks::traffic),
    lesson("several-machines", Form::YesNo, checks::two_by_two),
];

/// One or two whole numbers.
const ONE: Form = Form::Whole(1);
const TWO: Form = Form::Whole(2);
/// A weight that is computed from numbers with six digits.
const WEIGHT: Form = Form::Decimal { tolerance: 1e-5 };
/// A weight of a mean, which rounding changes.
const SHARE: Form = Form::Decimal { tolerance: 1e-3 };
/// A factor between bytes, to which the ranks' agreements add a few.
const FACTOR: Form = Form::Decimal { tolerance: 0.01 };

const fn lesson(name: &'static str, form: Form, run: Run) -> Lesson {
    Lesson { name, check: Some((form, run)) }
}

/// Returns an answer that is the same in every run. The texts have its numbers.
fn known(answer: Answer) -> anyhow::Result<Found> {
    Ok((answer, Value::Null))
}

/// A run, which takes a second or two, or what is known of it.
type Run = fn() -> anyhow::Result<Found>;

/// What a run has found: the answer, and an object with the measured numbers, each under the placeholder that it replaces in
/// the texts.
pub(super) type Found = (Answer, Value);

impl Lesson {
    /// Returns the number of the program of `examples` that is this lesson. `None` for the lessons before, which use
    /// `ddp-mp`.
    pub(super) fn number(self) -> Option<usize> {
        let programs = LESSONS.iter().skip_while(|lesson| lesson.name != FIRST_PROGRAM);
        programs.zip(1..).find_map(|(lesson, number)| (lesson.name == self.name).then_some(number))
    }

    /// Returns what a user types for this lesson: its number, or its name if it has none.
    pub(super) fn id(self) -> String {
        self.number().map_or_else(|| self.name.to_owned(), |number| number.to_string())
    }

    /// Returns the name of its program in `examples`. `None` for the lessons that use `ddp-mp`.
    pub(super) fn program(self) -> Option<String> {
        self.number().map(|number| format!("{number:02}-{}", self.name))
    }
}

/// Reads the number or the name of a lesson.
pub(super) fn parse(text: &str) -> Result<Lesson, String> {
    let number: Option<usize> = text.parse().ok();
    let is_meant = |lesson: &&Lesson| match number {
        Some(_) => lesson.number() == number,
        None => lesson.name == text,
    };
    LESSONS.iter().find(is_meant).copied().ok_or_else(|| {
        let ids: Vec<String> = LESSONS.iter().map(|lesson| lesson.id()).collect();
        format!("there is no such lesson; use one of {}", ids.join(", "))
    })
}
