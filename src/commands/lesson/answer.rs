//! An answer to an exercise: its form, how it is read, and when it is right.

/// An answer, as typed or as a run gives it.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Answer {
    /// Whole numbers, in the order of the question.
    Whole(Vec<u64>),
    /// A number with a fraction.
    Decimal(f64),
    /// Yes (`true`) or no.
    YesNo(bool),
}

/// The form of an answer.
#[derive(Debug, Clone, Copy)]
pub(super) enum Form {
    /// So many whole numbers.
    Whole(usize),
    /// A number, right if it differs by at most `tolerance`.
    Decimal { tolerance: f64 },
    /// Yes or no.
    YesNo,
}

impl Form {
    /// Returns how to type an answer.
    pub(super) fn example(self) -> String {
        match self {
            Form::Whole(count) => ["N", "M", "K", "L"][..count.min(4)].join(" "),
            Form::Decimal { .. } => "X".into(),
            Form::YesNo => "yes|no".into(),
        }
    }

    /// Reads an answer. Numbers may be separated by spaces or commas.
    ///
    /// # Errors
    /// A text that says what was expected.
    pub(super) fn parse(self, text: &str) -> Result<Answer, String> {
        let text = text.trim();
        match self {
            Form::Whole(count) => {
                let parts = text.split([' ', ',']).filter(|part| !part.is_empty());
                let numbers: Option<Vec<u64>> = parts.map(|part| part.parse().ok()).collect();
                let numbers = numbers.filter(|numbers| numbers.len() == count);
                let expected = match count {
                    1 => "a whole number".to_owned(),
                    _ => format!("{count} whole numbers with a space between them"),
                };
                numbers
                    .map(Answer::Whole)
                    .ok_or_else(|| format!("expected {expected}, not {text:?}"))
            }
            Form::Decimal { .. } => {
                let number = text.parse().ok().filter(|number: &f64| number.is_finite());
                number
                    .map(Answer::Decimal)
                    .ok_or_else(|| format!("expected a number such as 0.5, not {text:?}"))
            }
            Form::YesNo => match text.to_lowercase().as_str() {
                "yes" | "y" | "是" => Ok(Answer::YesNo(true)),
                "no" | "n" | "否" => Ok(Answer::YesNo(false)),
                _ => Err(format!("expected yes or no, not {text:?}")),
            },
        }
    }

    /// Returns whether `answer` is the one that a run has `found`.
    pub(super) fn accepts(self, answer: &Answer, found: &Answer) -> bool {
        match (self, answer, found) {
            (Form::Decimal { tolerance }, Answer::Decimal(answer), Answer::Decimal(found)) => {
                (answer - found).abs() <= tolerance
            }
            _ => answer == found,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_in_their_form_only() {
        let two = Form::Whole(2);
        for text in ["3 2", " 3,2 ", "3, 2"] {
            assert_eq!(two.parse(text), Ok(Answer::Whole(vec![3, 2])), "{text}");
        }
        for text in ["", "3", "3 2 1", "3 -2", "3 2.0", "three two"] {
            assert!(two.parse(text).is_err(), "{text}");
        }
        let number = Form::Decimal { tolerance: 0.01 };
        assert_eq!(number.parse("-0.75"), Ok(Answer::Decimal(-0.75)));
        for text in ["", "nan", "inf", "3/4", "1 2"] {
            assert!(number.parse(text).is_err(), "{text}");
        }
        assert_eq!(Form::YesNo.parse("Yes"), Ok(Answer::YesNo(true)));
        assert_eq!(Form::YesNo.parse("否"), Ok(Answer::YesNo(false)));
        assert!(Form::YesNo.parse("maybe").is_err());
    }

    #[test]
    fn tolerance_decides_about_measured_numbers() {
        let form = Form::Decimal { tolerance: 0.01 };
        assert!(form.accepts(&Answer::Decimal(0.755), &Answer::Decimal(0.75)));
        assert!(!form.accepts(&Answer::Decimal(0.77), &Answer::Decimal(0.75)));
        assert!(!Form::Whole(1).accepts(&Answer::Whole(vec![3]), &Answer::Whole(vec![2])));
    }
}
