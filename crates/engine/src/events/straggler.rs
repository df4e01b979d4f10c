//! Finds the straggler: the rank that the others waited for, and the phase that made it slow.

use serde::Serialize;

use crate::records::PhaseSeconds;

/// The rank that delayed the others.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Straggler {
    /// The rank.
    pub rank: usize,
    /// Seconds that the others waited for it: their collectives took this much longer than its own, on average.
    pub seconds: f64,
    /// The phase in which it was slower than the others: `data`, `forward`, `backward`, `optimizer` or `save`. `step`
    /// is the part of a step before these, and `outside` all other work outside of its steps.
    pub phase: &'static str,
    /// Seconds by which it was slower than the others in that phase, on average.
    pub phase_seconds: f64,
}

impl Straggler {
    /// Returns the phase in which it was slower, as the end of a sentence.
    pub fn phase_text(&self) -> String {
        match self.phase {
            OUTSIDE_PHASES => "outside of its steps".into(),
            phase => format!("in its phase {phase}"),
        }
    }
}

/// The phase of all time outside of the phases of [`PhaseSeconds`].
const OUTSIDE_PHASES: &str = "outside";

/// A delay below this fraction of the run is noise.
const MIN_STRAGGLER_SHARE: f64 = 0.1;

/// Returns the straggler among `ranks`, which are in rank order. `None` if all ranks were about equally fast in a run
/// of `elapsed` seconds. Of delays of fewer than `least` seconds there is none.
pub fn find_straggler(ranks: &[PhaseSeconds], elapsed: f64, least: f64) -> Option<Straggler> {
    let others = (ranks.len() as f64 - 1.0).max(1.0);
    let (rank, slow) = (ranks.iter().enumerate())
        .min_by(|(_, a), (_, b)| a.collectives.total_cmp(&b.collectives))?;
    let more = |of: fn(&PhaseSeconds) -> f64| {
        let all: f64 = ranks.iter().map(of).sum();
        of(slow) - (all - of(slow)) / others
    };
    let seconds = -more(|phases| phases.collectives);
    let phases = [
        ("step", more(|phases| phases.step)),
        ("data", more(|phases| phases.data)),
        ("forward", more(|phases| phases.forward)),
        ("backward", more(|phases| phases.backward)),
        ("optimizer", more(|phases| phases.optimizer)),
        ("save", more(|phases| phases.save)),
    ];
    // All ranks took the same time, so the rest of the difference lies outside of the phases. These seven values add up
    // to `seconds`: the largest is a good part of it, and never rounds to zero beside it.
    let rest = seconds - phases.iter().map(|(_, more)| more).sum::<f64>();
    let phases = phases.into_iter().chain([(OUTSIDE_PHASES, rest)]);
    let (phase, phase_seconds) = phases.max_by(|(_, a), (_, b)| a.total_cmp(b))?;
    let counts = ranks.len() > 1 && seconds > least.max(MIN_STRAGGLER_SHARE * elapsed);
    counts.then_some(Straggler { rank, seconds, phase, phase_seconds })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn straggler_is_the_rank_that_waits_least() {
        let quick =
            PhaseSeconds { data: 0.1, forward: 1.0, collectives: 3.0, ..Default::default() };
        let slow = PhaseSeconds { data: 2.1, forward: 1.1, collectives: 0.9, ..Default::default() };
        let found = find_straggler(&[quick, quick, slow, quick], 5.0, 1.0).unwrap();
        assert_eq!((found.rank, found.phase), (2, "data"));
        assert!((found.seconds - 2.1).abs() < 1e-9 && (found.phase_seconds - 2.0).abs() < 1e-9);
        assert_eq!(find_straggler(&[quick, quick, slow, quick], 50.0, 1.0), None);
        assert_eq!(find_straggler(&[quick, quick], 1.0, 1.0), None);
        let noise = PhaseSeconds { data: 1.0, collectives: 2.1, ..quick };
        assert_eq!(find_straggler(&[quick, noise], 1.0, 1.0), None);
        assert_eq!(find_straggler(&[slow], 1.0, 1.0), None);
        // Rank 0 saves, or is busy outside of all phases; either explains why the others waited for it.
        let saves = PhaseSeconds { save: 2.4, collectives: 0.5, ..quick };
        let found = find_straggler(&[saves, quick], 5.0, 1.0).unwrap();
        assert_eq!((found.rank, found.phase), (0, "save"));
        assert!((found.phase_seconds - 2.4).abs() < 1e-9);
        let busy = PhaseSeconds { forward: 1.001, collectives: 0.5, ..quick };
        let found = find_straggler(&[busy, quick], 5.0, 1.0).unwrap();
        assert_eq!((found.phase, found.phase_text()), ("outside", "outside of its steps".into()));
        assert!((found.phase_seconds - 2.499).abs() < 1e-9, "{found:?}");
        assert_eq!(find_straggler(&[], 1.0, 1.0), None);
    }
}
