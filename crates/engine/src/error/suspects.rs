//! Decides which ranks are wrong when ranks differ: the minority, if there is a majority.

use compare::list_ranks;

use crate::operation::Operation;

/// The reason for a comparison of replicas. Only `AfterStep` identifies the step that made them differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compared {
    /// `--check-replicas-every` requested it.
    AfterStep,
    /// A checkpoint was due. Replicas that differ are not saved.
    BeforeSave,
    /// Training had finished all steps.
    AtEnd,
}

impl Compared {
    /// Returns the beginning of the message about replicas that differ after `step`.
    pub(super) fn after(self, step: u64) -> String {
        let when = match self {
            Self::AfterStep => return format!("after step {step}"),
            Self::BeforeSave => "before a checkpoint was saved",
            Self::AtEnd => "at the end",
        };
        format!("found when the replicas were compared {when}, after step {step}:")
    }

    /// Returns the operation in which replicas that differ are reported.
    pub(crate) fn operation(self) -> Operation {
        match self {
            Self::AfterStep => Operation::Step,
            Self::BeforeSave | Self::AtEnd => Operation::Compare,
        }
    }
}

/// The ranks that may be wrong where ranks differ.
///
/// If more than half of the ranks agree, they are assumed to be right. With two ranks it is unknown which is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Suspects {
    /// The ranks outside of the majority; all ranks, if there is no majority. Ascending.
    pub ranks: Vec<usize>,
    /// Whether more than half of the ranks agree.
    pub has_majority: bool,
}

impl Suspects {
    /// Returns the suspects among `answers`, pairs of a rank and its answer.
    pub(crate) fn of<T: PartialEq>(answers: &[(usize, T)]) -> Self {
        let same = |answer: &T| answers.iter().filter(|(_, other)| other == answer).count();
        let majority = answers.iter().find(|(_, other)| 2 * same(other) > answers.len());
        let suspected =
            answers.iter().filter(|(_, other)| majority.is_none_or(|(_, right)| other != right));
        Self { ranks: suspected.map(|(rank, _)| *rank).collect(), has_majority: majority.is_some() }
    }

    /// Returns `ranks` as suspects that differ only from each other. There is no majority among them.
    pub(crate) fn tied(mut ranks: Vec<usize>) -> Self {
        ranks.sort_unstable();
        ranks.dedup();
        Self { has_majority: ranks.len() == 1, ranks }
    }

    pub(super) fn is_one(&self) -> bool {
        self.ranks.len() == 1
    }

    /// Returns the message's subject and verb: ``rank 1 has another `weight` than the others``.
    pub(super) fn hold_another(&self, parameter: &str) -> String {
        let ranks = list_ranks(&self.ranks);
        match self {
            Self { has_majority: false, .. } => {
                format!("{ranks} differ in `{parameter}`{}", self.without_majority())
            }
            suspects if suspects.is_one() => {
                format!("{ranks} has another `{parameter}` than the others")
            }
            _ => format!("{ranks} have another `{parameter}` than the majority"),
        }
    }

    /// Returns the end of the message, which says so if there is no majority. Empty if there is one.
    pub(super) fn without_majority(&self) -> String {
        match self {
            Self { has_majority: true, .. } => String::new(),
            Self { ranks, .. } if ranks.len() == 2 => {
                "; with two ranks it is unknown which one is wrong".into()
            }
            _ => "; no majority agrees, so it is unknown which rank is wrong".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    fn suspects(answers: &[char]) -> (Vec<usize>, bool) {
        let answers: Vec<(usize, char)> = answers.iter().copied().enumerate().collect();
        let Suspects { ranks, has_majority } = Suspects::of(&answers);
        (ranks, has_majority)
    }

    #[test]
    fn suspects_are_the_minority_or_all_without_a_majority() {
        assert_eq!(suspects(&['a', 'b', 'a']), (vec![1], true));
        assert_eq!(suspects(&['b', 'a', 'a', 'a', 'c']), (vec![0, 4], true));
        assert_eq!(suspects(&['a', 'b']), (vec![0, 1], false));
        assert_eq!(suspects(&['a', 'b', 'c']), (vec![0, 1, 2], false));
        // The largest group is not a majority.
        assert_eq!(suspects(&['a', 'a', 'b', 'c']), (vec![0, 1, 2, 3], false));
    }

    #[test]
    fn replica_error_names_one_rank_only_with_a_majority() {
        let replicas = |answers: &[(usize, char)]| Error::ReplicasDiverged {
            parameter: "weight".into(),
            others: 0,
            suspects: Suspects::of(answers),
            step: 5,
            compared: Compared::AfterStep,
        };
        let tie = replicas(&[(0, 'a'), (1, 'b')]);
        let told = tie.to_string();
        assert!(
            told.starts_with(
                "after step 5 ranks 0 and 1 differ in `weight`; with two ranks it is unknown"
            ),
            "{told}"
        );
        let minority = replicas(&[(0, 'a'), (1, 'b'), (2, 'a')]);
        let told = minority.to_string();
        assert!(
            told.starts_with("after step 5 rank 1 has another `weight` than the others; "),
            "{told}"
        );
        let none = replicas(&[(0, 'a'), (1, 'b'), (2, 'c')]).to_string();
        assert!(none.contains("ranks 0-2 differ in `weight`; no majority agrees"), "{none}");
    }
}
