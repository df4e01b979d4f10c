//! Advice: conclusions from a run's times, and what to try next.

use engine::events::{End, Straggler};
use engine::records::PhaseSeconds;

/// The conditions of a run that its end does not tell.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Conditions<'a> {
    pub straggler: Option<&'a Straggler>,
    /// Fraction of the reductions' time that was hidden behind backward. `None` without reductions.
    pub overlapped: Option<f64>,
    pub batch_size: usize,
    pub num_workers: usize,
    /// The mean loss of the first quarter of the run, and of the last; `None` if it was recorded too rarely.
    pub losses: Option<[f64; 2]>,
    pub lr: f64,
}

/// Returns the fraction of the steps' time that the ranks spend outside collectives, neither communicating nor waiting
/// there, from 0 to 1. `None` without steps. This does not show how fast a single rank would be: ranks that share cores
/// slow each other down outside collectives too.
pub(crate) fn outside_collectives(phases: &[PhaseSeconds]) -> Option<f64> {
    let own: f64 = phases.iter().map(PhaseSeconds::own).sum();
    let collectives: f64 = phases.iter().map(|rank| rank.collectives).sum();
    (own + collectives > 0.0).then(|| own / (own + collectives))
}

/// A smaller fraction of the time than this is not mentioned.
const MIN_ADVICE_SHARE: f64 = 0.2;

/// A step that is shorter than this, in microseconds, is mostly overhead.
const SHORT_STEP: f64 = 1000.0;

/// A loss that keeps more than this fraction of its first value has hardly moved.
const NO_PROGRESS_RATIO: f64 = 0.95;

/// Above this size an all-reduce is bound by bandwidth, not latency.
const BANDWIDTH_BOUND_BYTES: usize = 1 << 20;

/// Returns what to try next after a run that ended with `end`, each a sentence, the most important first. None if nothing
/// stands out.
pub(crate) fn advice(end: &End, run: Conditions<'_>) -> Vec<String> {
    let phases = end.phases();
    let Some(outside) = outside_collectives(&phases) else { return Vec::new() };
    let total: f64 = phases.iter().map(|rank| rank.own() + rank.collectives).sum();
    let data = phases.iter().map(|rank| rank.data).sum::<f64>() / total;
    let mut advice = Vec::new();
    advice.extend(run.straggler.map(on_straggler));
    advice.extend((data > MIN_ADVICE_SHARE).then(|| on_data(data, run.num_workers)));
    advice.extend(run.losses.and_then(|losses| on_loss(losses, run.lr)));
    let lost = 1.0 - outside;
    if phases.len() > 1 && lost > MIN_ADVICE_SHARE {
        advice.extend(on_collectives(lost, end, run));
        advice.extend(on_buckets(end, run.overlapped));
    }
    advice
}

/// Returns the advice on a straggler.
fn on_straggler(straggler: &Straggler) -> String {
    let (Straggler { rank, seconds, .. }, phase_text) = (straggler, straggler.phase_text());
    let remedy = if straggler.phase == "save" {
        "Save less often, with a larger --save-every or --save-every-epochs, or on a faster disk."
    } else {
        "Look at what it does there, or at what else runs on its device."
    };
    format!(
        "Rank {rank} was the straggler: it delayed the others by {seconds:.1} s {phase_text}. {remedy}"
    )
}

/// Returns the advice after a run that spent the fraction `share` of its steps on getting data.
fn on_data(share: f64, num_workers: usize) -> String {
    let percent = 100.0 * share;
    let remedy = match num_workers {
        0 => ": try --num-workers 2".into(),
        workers => {
            format!(", with --num-workers {workers}: try more, or a larger --prefetch-factor")
        }
    };
    format!("{percent:.0} % of the steps' time goes into getting data{remedy}.")
}

/// Returns the advice on a loss that hardly moved from the first quarter of a run to the last.
fn on_loss([first, last]: [f64; 2], lr: f64) -> Option<String> {
    (last > NO_PROGRESS_RATIO * first).then(|| {
        format!(
            "The loss hardly moved: from {first:.4} in the first quarter of the run to {last:.4} in the last. Unless \
             the model has learned all it can, try a higher --lr (now {lr})."
        )
    })
}

/// Returns the advice after a run that lost the fraction `share` of its steps' time in collectives. `None` if a straggler
/// explains it, and steps are not short.
fn on_collectives(share: f64, end: &End, run: Conditions<'_>) -> Option<String> {
    let percent = 100.0 * share;
    if end.us_per_step < SHORT_STEP {
        let (step, batch) = (end.us_per_step, run.batch_size);
        return Some(format!(
            "{percent:.0} % of the steps' time goes into collectives, and a step is only {step:.0} us long: a larger \
             --batch-size (now {batch}) or fewer ranks help a model this small."
        ));
    }
    let smaller = if bucket_bytes(end) >= BANDWIDTH_BOUND_BYTES {
        ", and --comm-hook bf16 makes them smaller"
    } else {
        ""
    };
    run.straggler.is_none().then(|| {
        format!(
            "{percent:.0} % of the steps' time goes into collectives: a larger --batch-size or --grad-accum-steps makes \
             fewer of them{smaller}."
        )
    })
}

/// Returns the advice on buckets whose reductions could be hidden behind backward. `None` if they are, or cannot be.
fn on_buckets(end: &End, overlapped: Option<f64>) -> Option<String> {
    if bucket_bytes(end) < BANDWIDTH_BOUND_BYTES || !end.can_overlap {
        return None;
    }
    if end.statistics.bucket_bytes.len() == 1 {
        let advice = "All gradients are in one bucket, which can only go out when backward is through: a smaller \
                      --bucket-cap-mb lets the first go out earlier.";
        return Some(advice.into());
    }
    let percent = 100.0 * overlapped.filter(|share| *share < 0.5)?;
    Some(format!(
        "Only {percent:.0} % of the communication was hidden behind backward: another --bucket-cap-mb may hide more."
    ))
}

/// Returns the bytes of all gradients.
fn bucket_bytes(end: &End) -> usize {
    end.statistics.bucket_bytes.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::ddp::DdpStatistics;
    use engine::events::RankEnd;

    fn with_buckets(bucket_bytes: Vec<usize>) -> DdpStatistics {
        DdpStatistics { bucket_bytes, ..DdpStatistics::default() }
    }

    fn end(phases: &[PhaseSeconds]) -> End {
        let rank = |phases: &PhaseSeconds| RankEnd { phases: *phases, ..RankEnd::default() };
        End {
            ranks: phases.iter().map(rank).collect(),
            us_per_step: 5000.0,
            statistics: with_buckets(vec![4 << 20]),
            can_overlap: true,
            seconds: 10.0,
            ..End::default()
        }
    }

    fn conditions<'a>() -> Conditions<'a> {
        Conditions {
            straggler: None,
            overlapped: None,
            batch_size: 32,
            num_workers: 0,
            losses: Some([1.0, 0.5]),
            lr: 0.001,
        }
    }

    /// Returns the advice after a run with these times, under the usual conditions.
    fn usual(phases: &[PhaseSeconds]) -> Vec<String> {
        advice(&end(phases), conditions())
    }

    #[test]
    fn advice_names_the_loss_and_the_remedy() {
        let well =
            PhaseSeconds { forward: 4.0, backward: 5.0, collectives: 1.0, ..Default::default() };
        assert_eq!(outside_collectives(&[well, well]), Some(0.9));
        assert_eq!(outside_collectives(&[]), None);
        assert!(usual(&[]).is_empty());
        assert!(usual(&[well, well]).is_empty() && usual(&[well]).is_empty());

        let waiting = PhaseSeconds { collectives: 9.0, ..well };
        let told = usual(&[waiting, waiting]);
        assert!(
            told[0].starts_with("50 % of the steps' time goes into collectives: a larger"),
            "{told:?}"
        );
        assert!(told[1].contains("in one bucket"), "{told:?}");
        let statistics = with_buckets(vec![1 << 20; 4]);
        let four_buckets = End { statistics, ..end(&[waiting, waiting]) };
        let told = advice(&four_buckets, Conditions { overlapped: Some(0.2), ..conditions() });
        assert!(told[1].starts_with("Only 20 % of the communication"), "{told:?}");
        let statistics = with_buckets(vec![84]);
        let short = End { us_per_step: 50.0, statistics, ..end(&[waiting, waiting]) };
        let told = advice(&short, conditions());
        assert!(told.len() == 1 && told[0].contains("only 50 us long"), "{told:?}");

        let hungry = PhaseSeconds { data: 9.0, ..well };
        assert!(usual(&[hungry, hungry])[0].ends_with("try --num-workers 2."));
        let told =
            advice(&end(&[well, well]), Conditions { losses: Some([2.31, 2.30]), ..conditions() })
                .remove(0);
        let expected = "The loss hardly moved: from 2.3100 in the first quarter of the run to 2.3000 in the last.";
        assert!(told.starts_with(expected), "{told}");
        assert!(told.ends_with("try a higher --lr (now 0.001)."), "{told}");
        let held = Straggler { rank: 1, seconds: 2.0, phase: "data", phase_seconds: 2.0 };
        let told =
            advice(&end(&[well, well]), Conditions { straggler: Some(&held), ..conditions() });
        assert!(told[0].starts_with(
            "Rank 1 was the straggler: it delayed the others by 2.0 s in its phase data"
        ));
    }
}
