//! The lessons in the order of the course: each with the check of its exercise.

use serde_json::Value;
use serde_with::DeserializeFromStr;
use strum::{EnumIter, EnumString, IntoEnumIterator, IntoStaticStr};

use super::answer::{Answer, Form};
use super::checks;

/// A lesson of the course. Its name is that of the variant, such as `all-reduce-by-hand`.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    EnumIter,
    EnumString,
    IntoStaticStr,
    DeserializeFromStr,
)]
#[strum(serialize_all = "kebab-case")]
#[allow(missing_docs)] // `texts` describes each in every language
pub enum Lesson {
    Demo,
    Shards,
    Update,
    Batch,
    Backend,
    Straggler,
    Desync,
    BadCore,
    OneRank,
    ThreadsThatMeet,
    AllReduceByHand,
    NaiveDdp,
    Buckets,
    Overlap,
    YourOwnModel,
    TheEngine,
    DataAndValidation,
    Checkpoints,
    Gpt,
    WhatGrows,
    SeveralMachines,
}

/// What a run has found.
#[derive(Debug)]
pub(super) struct Found {
    pub answer: Answer,
    /// The measured numbers, each with the placeholder that it replaces in the texts.
    pub numbers: Vec<(String, String)>,
}

impl Found {
    /// Returns what a run has found. `numbers` is an object.
    pub(super) fn new(answer: Answer, numbers: &Value) -> Self {
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let numbers = numbers.as_object().into_iter().flatten();
        Self { answer, numbers: numbers.map(|(name, it)| (name.clone(), text(it))).collect() }
    }

    /// Returns an answer that is the same in every run. The texts have its numbers.
    fn known(answer: Answer) -> anyhow::Result<Self> {
        Ok(Self { answer, numbers: Vec::new() })
    }
}

/// How an answer is checked: its form, and a run, which takes a second or two, or what is known of it.
pub(super) type Check = (Form, fn() -> anyhow::Result<Found>);

/// The largest difference from a weight that is computed from numbers with six digits.
const WEIGHT_TOLERANCE: f64 = 1e-5;
/// The largest difference from a weight of a mean, which rounding changes.
const SHARE_TOLERANCE: f64 = 1e-3;
/// The largest difference from a factor between bytes, to which the ranks' agreements add a few.
const FACTOR_TOLERANCE: f64 = 0.01;

impl Lesson {
    /// Returns the number of the program of `examples` that is this lesson. `None` for the lessons before, which use
    /// `ddp-mp`.
    pub(super) fn number(self) -> Option<usize> {
        let programs = Lesson::iter().skip_while(|lesson| *lesson != Lesson::OneRank);
        programs.zip(1..).find_map(|(lesson, number)| (lesson == self).then_some(number))
    }

    /// Returns what a user types for this lesson: its number, or its name if it has none.
    pub(super) fn id(self) -> String {
        self.number().map_or_else(|| self.name().to_owned(), |number| number.to_string())
    }

    /// Returns the name of its program in `examples`. `None` for the lessons that use `ddp-mp`.
    pub(super) fn program(self) -> Option<String> {
        self.number().map(|number| format!("{number:02}-{}", self.name()))
    }

    fn name(self) -> &'static str {
        self.into()
    }

    /// Returns how an answer to the exercise of this lesson is checked. `None` if no run can decide.
    pub(super) fn check(self) -> Option<Check> {
        let run = |form, run: fn() -> anyhow::Result<Found>| Some((form, run));
        let (one, two, yes_no) = (Form::Whole(1), Form::Whole(2), Form::YesNo);
        let weight = Form::Decimal { tolerance: WEIGHT_TOLERANCE };
        let factor = Form::Decimal { tolerance: FACTOR_TOLERANCE };
        let share = Form::Decimal { tolerance: SHARE_TOLERANCE };
        match self {
            Lesson::Demo => run(one, checks::demo),
            Lesson::Shards => run(one, || Found::known(Answer::Whole(vec![2]))),
            Lesson::Update => run(weight, checks::update),
            Lesson::Batch => run(yes_no, checks::batch),
            Lesson::Backend => run(yes_no, checks::backend),
            Lesson::Straggler => run(one, checks::straggler),
            Lesson::Desync => run(one, checks::desync),
            Lesson::BadCore => run(one, checks::bad_core),
            Lesson::OneRank => run(share, || Found::known(Answer::Decimal(0.75))),
            Lesson::ThreadsThatMeet => None,
            Lesson::AllReduceByHand => run(two, || Found::known(Answer::Whole(vec![1792, 448]))),
            Lesson::NaiveDdp => run(yes_no, || Found::known(Answer::YesNo(false))),
            Lesson::Buckets => run(one, || Found::known(Answer::Whole(vec![7]))),
            Lesson::Overlap => run(two, checks::overlap),
            Lesson::YourOwnModel => run(one, || Found::known(Answer::Whole(vec![4000]))),
            Lesson::TheEngine => run(one, || Found::known(Answer::Whole(vec![2]))),
            Lesson::DataAndValidation => run(one, || Found::known(Answer::Whole(vec![602]))),
            Lesson::Checkpoints => run(one, checks::checkpoints),
            Lesson::Gpt => run(one, || Found::known(Answer::Whole(vec![2048]))),
            Lesson::WhatGrows => run(factor, checks::traffic),
            Lesson::SeveralMachines => run(yes_no, checks::two_by_two),
        }
    }
}

/// Reads the number or the name of a lesson.
pub(super) fn parse(text: &str) -> Result<Lesson, String> {
    let by_name = || text.parse().ok();
    let by_number = |number| Lesson::iter().find(|lesson| lesson.number() == Some(number));
    text.parse().ok().map_or_else(by_name, by_number).ok_or_else(|| {
        let ids: Vec<String> = Lesson::iter().map(Lesson::id).collect();
        format!("there is no such lesson; use one of {}", ids.join(", "))
    })
}
