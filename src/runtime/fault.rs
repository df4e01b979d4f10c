//! Fault injection: makes a rank fail, to see and to test how the others react. Faults within a training step are in
//! `trainer/callbacks/fault_injection.rs`.

use std::fmt;
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use serde_with::SerializeDisplay;
use signal_hook::consts::SIGKILL;
use strum::{EnumIter, EnumString, IntoEnumIterator, IntoStaticStr, VariantNames};

use crate::error::{Error, Result};

/// The kind of failure of a rank. Its name on the command line is that of the variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumIter, EnumString, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "kebab-case")]
pub enum FaultKind {
    /// The rank's function returns an error.
    Error,
    /// The rank panics.
    Panic,
    /// The rank hangs for ever and ignores cancellation.
    Stall,
    /// Kills the rank's process with all of its ranks, as the system does when it is out of memory.
    Kill,
    /// Overwrites the first sample of the rank's batch with NaN.
    Nan,
    /// Changes the rank's first parameter after the step, so that it differs from all other ranks'.
    Desync,
    /// The rank calls an extra collective with a shape of its own.
    WrongShape,
    /// The rank skips the step's first sample and uses the next one twice, like a faulty sampler.
    SkipSample,
    /// Flips one bit of the rank's tensors, as a bad core or memory does.
    #[strum(disabled, to_string = "flip=BIT")]
    // it has values, which `Fault` reads and writes
    Flip(Flip),
    /// The rank sleeps for this long, in this step and in every later one.
    #[strum(disabled, to_string = "slow=50ms")]
    // it has a value, which `Fault` reads and writes
    Slow(Duration),
}

impl FaultKind {
    /// Returns whether the trainer injects this fault (see `ProcessGroup::planned_fault`), which requires a step.
    fn needs_step(self) -> bool {
        use FaultKind::{Desync, Flip, Nan, SkipSample, WrongShape};
        matches!(self, Nan | Desync | WrongShape | SkipSample | Flip(_))
    }
}

/// A bit to flip, once in a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flip {
    /// The number of the bit: from 0, through all tensors of the place in their order.
    pub bit: u64,
    /// The tensors.
    pub place: FlipPlace,
}

/// The tensors of a step, one bit of which is flipped.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, EnumIter, EnumString, IntoStaticStr, VariantNames,
)]
#[strum(serialize_all = "lowercase")]
pub enum FlipPlace {
    /// The inputs and targets, before the forward pass.
    Batch,
    /// The rank's own gradients, before they are averaged.
    #[default]
    Gradient,
    /// The averaged gradients, before the optimizer's step.
    Average,
    /// The parameters, after the step.
    Parameter,
    /// The buffers, after the step.
    Buffer,
}

/// The place in a run at which a rank fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumIter, EnumString, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "lowercase")]
pub enum FaultSite {
    /// Before the rendezvous.
    Rendezvous,
    /// Before the rank joins the process group.
    Init,
    /// Before rank 0's model is copied to all.
    Broadcast,
    /// At the start of a training step.
    Step,
    /// Before the first barrier, at the end of the run.
    Barrier,
}

/// A planned failure, written `KIND:rank=R,at=STAGE[,step=N][,in=PLACE]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, SerializeDisplay)]
pub struct Fault {
    /// The kind of failure.
    pub kind: FaultKind,
    /// The rank that fails.
    pub rank: usize,
    /// The place.
    pub at: FaultSite,
    /// For [`FaultSite::Step`]: the step of the run, from 0; else 0.
    pub step: u64,
}

/// Reads a `KIND` or `STAGE`.
fn parse<T: FromStr + VariantNames>(what: &str, name: &str) -> Result<T> {
    name.parse().map_err(|_| {
        Error::usage(format!("{what} {name:?} is not one of {}", T::VARIANTS.join(", ")))
    })
}

/// Parses a time such as `50ms`.
fn milliseconds(time: &str) -> Result<Duration> {
    let number = time.strip_suffix("ms").and_then(|number| number.parse().ok());
    number.map(Duration::from_millis).ok_or_else(|| {
        Error::usage(format!("slow={time}: write in milliseconds how much longer, as slow=50ms"))
    })
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            FaultKind::Slow(time) => write!(f, "slow={}ms", time.as_millis())?,
            FaultKind::Flip(Flip { bit, .. }) => write!(f, "flip={bit}")?,
            kind => f.write_str(kind.into())?,
        }
        let at: &str = self.at.into();
        write!(f, ":rank={},at={at}", self.rank)?;
        if self.at == FaultSite::Step {
            write!(f, ",step={}", self.step)?;
        }
        match self.kind {
            FaultKind::Flip(Flip { place, .. }) => write!(f, ",in={}", <&str>::from(place)),
            _ => Ok(()),
        }
    }
}

impl FromStr for Fault {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let form = || {
            Error::usage(format!(
                "write KIND:rank=R,at=STAGE[,step=N][,in=PLACE], where KIND is one of {}, and STAGE one of {}",
                FaultKind::VARIANTS.join(", "),
                FaultSite::VARIANTS.join(", ")
            ))
        };
        let number = |key: &str, value: &str| -> Result<u64> {
            value.parse().map_err(|_| Error::usage(format!("{key}={value} is not a number from 0")))
        };
        let (kind, rest) = text.split_once(':').ok_or_else(form)?;
        let mut kind = match kind.split_once('=') {
            Some(("slow", time)) => FaultKind::Slow(milliseconds(time)?),
            Some(("flip", bit)) => {
                FaultKind::Flip(Flip { bit: number("flip", bit)?, ..Flip::default() })
            }
            _ => parse("KIND", kind)?,
        };
        let (mut rank, mut at, mut step, mut place) = (None, None, None, None);
        for item in rest.split(',') {
            match item.split_once('=').ok_or_else(form)? {
                ("rank", value) if rank.is_none() => rank = Some(number("rank", value)?),
                ("at", value) if at.is_none() => at = Some(parse("STAGE", value)?),
                ("step", value) if step.is_none() => step = Some(number("step", value)?),
                ("in", value) if place.is_none() => place = Some(parse("PLACE", value)?),
                (key @ ("rank" | "at" | "step" | "in"), _) => {
                    return Err(Error::usage(format!("{key} is given twice")));
                }
                (key, _) => {
                    return Err(Error::usage(format!(
                        "unknown key {key:?}; keys: rank, at, step, in"
                    )));
                }
            }
        }
        let (Some(rank), Some(at)) = (rank, at) else { return Err(form()) };
        match (&mut kind, place) {
            (FaultKind::Flip(flip), Some(place)) => flip.place = place,
            (_, None) => {}
            _ => return Err(Error::usage("in goes with flip=BIT only".into())),
        }
        if kind.needs_step() && at != FaultSite::Step {
            let kind = match kind {
                FaultKind::Flip(_) => "flip=BIT",
                kind => kind.into(),
            };
            return Err(Error::usage(format!("{kind} goes with at=step only")));
        }
        if step.is_some() && at != FaultSite::Step {
            return Err(Error::usage("step goes with at=step only".into()));
        }
        Ok(Self { kind, rank: rank as usize, at, step: step.unwrap_or(0) })
    }
}

impl Fault {
    /// Returns the kinds and stages, for the help.
    pub(crate) fn forms() -> String {
        let kinds = |in_step: bool| {
            let kinds = FaultKind::iter().filter(|kind| kind.needs_step() == in_step);
            kinds.map(<&str>::from).collect::<Vec<_>>().join(", ")
        };
        format!(
            "KIND: {}, slow=50ms (this step and all later ones); with at=step also {}, flip=BIT (in=PLACE). STAGE: {}. \
             PLACE: {}",
            kinds(false),
            kinds(true),
            FaultSite::VARIANTS.join(", "),
            FlipPlace::VARIANTS.join(", ")
        )
    }

    /// Checks that the fault can happen in a run of `world_size` ranks and `steps` steps of `samples` samples per rank.
    ///
    /// # Errors
    /// [`Error::Input`] with the remedy.
    pub(crate) fn check(&self, world_size: usize, steps: u64, samples: u64) -> Result<()> {
        let problem = match self.kind {
            _ if self.rank >= world_size => format!(
                "there is no rank {}; this run has ranks 0 to {}",
                self.rank,
                world_size - 1
            ),
            FaultKind::Stall if world_size == 1 => {
                "no other rank would notice that the only rank stalls; use 2 ranks or more".into()
            }
            FaultKind::SkipSample if samples < 2 => {
                "skip-sample puts another sample of the step in its place, and a step has only one; use a larger \
                 --batch-size"
                    .into()
            }
            _ if self.at == FaultSite::Step && self.step >= steps => format!(
                "there is no step {}; this run has steps 0 to {}",
                self.step,
                steps - 1
            ),
            _ => return Ok(()),
        };
        Err(Error::usage(problem))
    }

    /// Triggers the fault if it is planned for this place.
    pub(crate) fn trigger(&self, rank: usize, at: FaultSite, step: u64) -> Result<()> {
        if (self.rank, self.at) != (rank, at) {
            return Ok(());
        }
        match self.kind {
            FaultKind::Slow(time) => {
                if step >= self.step {
                    thread::sleep(time);
                }
                Ok(())
            }
            // The trainer injects these.
            FaultKind::Nan
            | FaultKind::Desync
            | FaultKind::WrongShape
            | FaultKind::SkipSample
            | FaultKind::Flip(_) => Ok(()),
            _ if step != self.step => Ok(()),
            FaultKind::Error => Err(Error::Fault(self.to_string())),
            FaultKind::Panic => panic!("injected by --inject-fault {self}"),
            FaultKind::Kill => {
                signal_hook::low_level::raise(SIGKILL)
                    .map_err(|error| Error::Fault(format!("{self}: {error}")))?;
                never()
            }
            FaultKind::Stall => never(),
        }
    }
}

fn never() -> ! {
    loop {
        thread::park();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fault_display_parses_back_to_the_same_fault() {
        let slow = FaultKind::Slow(Duration::from_millis(1500));
        let flips = FlipPlace::iter().map(|place| FaultKind::Flip(Flip { bit: 1 << 40, place }));
        for kind in FaultKind::iter().chain([slow]).chain(flips) {
            for at in FaultSite::iter() {
                if kind.needs_step() && at != FaultSite::Step {
                    continue;
                }
                let step = if at == FaultSite::Step { 17 } else { 0 };
                let fault = Fault { kind, rank: 3, at, step };
                assert_eq!(fault.to_string().parse::<Fault>().unwrap(), fault);
            }
        }
    }

    #[test]
    fn invalid_fault_is_refused_with_a_reason() {
        for (text, reason) in [
            ("", "write KIND:"),
            ("error", "write KIND:"),
            ("error:", "write KIND:"),
            ("error", "KIND is one of error, panic, stall, kill, nan"),
            ("error", "STAGE one of rendezvous, init, broadcast, step, barrier"),
            ("error:rank=0", "write KIND:"),
            (
                "explode:rank=0,at=step",
                "is not one of error, panic, stall, kill, nan, desync, wrong-shape, skip-sample, flip=BIT, \
                 slow=50ms",
            ),
            ("nan:rank=0,at=init", "nan goes with at=step only"),
            ("slow:rank=0,at=step", "is not one of"),
            ("slow=:rank=0,at=step", "slow=: write in milliseconds"),
            ("slow=5s:rank=0,at=step", "slow=5s: write in milliseconds"),
            ("error:rank=0,at=lunch", "is not one of rendezvous, init"),
            ("error:rank=-1,at=init", "rank=-1 is not a number from 0"),
            ("error:rank=0,rank=1,at=init", "rank is given twice"),
            ("error:rank=0,at=init,step=1", "step goes with at=step only"),
            ("error:rank=0,at=init,when=now", "unknown key \"when\""),
            ("flip=x:rank=0,at=step", "flip=x is not a number from 0"),
            ("flip=7:rank=0,at=init", "flip=BIT goes with at=step only"),
            ("flip=7:rank=0,at=step,in=loss", "is not one of batch, gradient, average"),
            ("error:rank=0,at=step,in=batch", "in goes with flip=BIT only"),
        ] {
            let error = text.parse::<Fault>().unwrap_err().to_string();
            assert!(error.contains(reason), "{text:?} gave {error:?}");
        }
    }
}
