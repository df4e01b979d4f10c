//! Fault injection: makes a rank fail, to see and to test how the others react. Faults within a training step are in
//! `trainer/callbacks/fault_injection.rs`.

use std::fmt;
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use serde_with::SerializeDisplay;
use signal_hook::consts::SIGKILL;
use signal_hook::low_level::raise;
use strum::{EnumString, VariantNames};

use crate::error::{Error, Result};
use crate::operation::Operation;

/// The kind of failure of a rank. Its name on the command line is that of the variant.
#[derive(Debug, Clone, Copy, PartialEq, EnumString, VariantNames)]
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
    /// The rank sleeps for this long, in this step and in every later one.
    #[strum(to_string = "slow=50ms")]
    Slow(Duration),
    /// Overwrites the first sample of the rank's batch with NaN.
    Nan,
    /// Changes the rank's first parameter after the step, so that it differs from all other ranks'.
    Desync,
    /// The rank calls an extra collective with a shape of its own.
    WrongShape,
    /// The rank skips the step's first sample and uses the next one twice, like a faulty sampler.
    SkipSample,
    /// Flips the bit of this number once, as a bad core or memory does. Bits count from 0 through all tensors of the place, in
    /// their order.
    #[strum(to_string = "flip=BIT")]
    Flip(u64, FlipPlace),
}

impl FaultKind {
    /// Returns whether the trainer injects this fault, which requires a step.
    pub(crate) fn needs_step(self) -> bool {
        use FaultKind::{Desync, Flip, Nan, SkipSample, WrongShape};
        matches!(self, Nan | Desync | WrongShape | SkipSample | Flip(..))
    }
}

/// The tensors of a step, one bit of which is flipped.
#[derive(Debug, Clone, Copy, Default, PartialEq, EnumString, VariantNames)]
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

/// The names of the operations before which a rank can fail. A step is one of training; a broadcast copies rank 0's model to
/// all; the first barrier is at the end of the run.
const STAGES: [&str; 5] = ["rendezvous", "init", "broadcast", "step", "barrier"];

/// A planned failure, written `KIND:rank=R,at=STAGE[,step=N][,in=PLACE]`.
#[derive(Debug, Clone, PartialEq, SerializeDisplay)]
pub struct Fault {
    /// The fault as it was written.
    text: String,
    /// What happens to the rank.
    pub kind: FaultKind,
    /// The rank.
    pub rank: usize,
    /// The operation before which the rank fails.
    at: Operation,
    /// The step of the run, from 0; 0 in another operation.
    pub(crate) step: u64,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Reads a part of a fault, such as a name or a number.
fn parse<T: FromStr>(part: &str) -> Result<T> {
    part.parse().map_err(|_| wrong(part))
}

fn wrong(part: &str) -> Error {
    let form = "KIND:rank=R,at=STAGE[,step=N][,in=PLACE]";
    Error::usage(format!("{part:?} is wrong; write {form}. {}", Fault::NAMES))
}

impl FromStr for Fault {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (name, rest) = text.split_once(':').ok_or_else(|| wrong(text))?;
        let (mut rank, mut at, mut step, mut place) = (None, None::<Operation>, None, None);
        for item in rest.split(',') {
            match item.split_once('=') {
                Some(("rank", value)) if rank.is_none() => rank = Some(parse(value)?),
                Some(("at", value)) if at.is_none() && STAGES.contains(&value) => {
                    at = Some(parse(value)?);
                }
                Some(("step", value)) if step.is_none() => step = Some(parse(value)?),
                Some(("in", value)) if place.is_none() => place = Some(parse(value)?),
                _ => return Err(wrong(item)),
            }
        }
        let (Some(rank), Some(at)) = (rank, at) else { return Err(wrong(text)) };
        let kind = match name.split_once('=') {
            Some(("flip", bit)) => FaultKind::Flip(parse(bit)?, place.unwrap_or_default()),
            Some(("slow", time)) => {
                let milliseconds = time.strip_suffix("ms").ok_or_else(|| wrong(name))?;
                FaultKind::Slow(Duration::from_millis(parse(milliseconds)?))
            }
            _ => parse(name)?,
        };
        if (kind.needs_step() || step.is_some()) && at != Operation::Step {
            let what = if kind.needs_step() { name } else { "step" };
            return Err(Error::usage(format!("{what} goes with at=step only")));
        }
        if place.is_some() && !matches!(kind, FaultKind::Flip(..)) {
            return Err(Error::usage("in goes with flip=BIT only".into()));
        }
        Ok(Self { text: text.into(), kind, rank, at, step: step.unwrap_or(0) })
    }
}

impl Fault {
    /// All names, for the help and for errors.
    pub const NAMES: &str = "\
        KIND: error, panic, stall, kill, slow=50ms (this step and all later ones); with at=step also nan, desync, \
        wrong-shape, skip-sample, flip=BIT (in=PLACE). STAGE: rendezvous, init, broadcast, step, barrier. PLACE: batch, \
        gradient, average, parameter, buffer";

    /// Checks that the fault can happen in a run of `world_size` ranks and `steps` steps of `samples` samples per rank.
    ///
    /// # Errors
    /// The problem with its remedy.
    pub fn check(&self, world_size: usize, steps: u64, samples: u64) -> Result<(), String> {
        let (rank, step) = (self.rank, self.step);
        Err(match self.kind {
            _ if rank >= world_size => {
                format!("there is no rank {rank}; this run has ranks 0 to {}", world_size - 1)
            }
            FaultKind::Stall if world_size == 1 => {
                "no other rank would notice that the only rank stalls; use 2 ranks or more".into()
            }
            FaultKind::SkipSample if samples < 2 => {
                "skip-sample puts another sample of the step in its place, and a step has only one; use a larger \
                 --batch-size"
                    .into()
            }
            _ if self.at == Operation::Step && step >= steps => {
                format!("there is no step {step}; this run has steps 0 to {}", steps - 1)
            }
            _ => return Ok(()),
        })
    }

    /// Triggers the fault if it is planned for this rank, operation and step. The trainer injects those within a step.
    pub(crate) fn trigger(&self, rank: usize, at: Operation, step: u64) -> Result<()> {
        match self.kind {
            _ if (self.rank, self.at) != (rank, at) || step < self.step => {}
            FaultKind::Slow(time) => thread::sleep(time),
            _ if step > self.step => {}
            FaultKind::Error => return Err(Error::Fault(self.to_string())),
            FaultKind::Panic => panic!("injected by --inject-fault {self}"),
            FaultKind::Kill | FaultKind::Stall => {
                if self.kind == FaultKind::Kill {
                    raise(SIGKILL).map_err(|error| Error::Fault(format!("{self}: {error}")))?;
                }
                loop {
                    thread::park();
                }
            }
            _ => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_names_are_listed() {
        let [kinds, stages, places] = [FaultKind::VARIANTS, &STAGES, FlipPlace::VARIANTS];
        for name in kinds.iter().chain(stages).chain(places) {
            let mut words = Fault::NAMES.split([' ', ',', '.', ';']);
            assert!(words.any(|word| word == *name), "{name}");
        }
    }

    #[test]
    fn fault_is_read_with_its_values_and_shown_as_it_was_written() {
        let read = |text: &str| text.parse::<Fault>().unwrap();
        let slow = read("slow=1500ms:at=step,rank=3");
        assert_eq!(slow.kind, FaultKind::Slow(Duration::from_millis(1500)));
        assert_eq!((slow.rank, slow.at, slow.step), (3, Operation::Step, 0));
        assert_eq!(slow.to_string(), "slow=1500ms:at=step,rank=3");
        let flip = |more: &str| read(&format!("flip=1099511627776:rank=0,at=step,step=17{more}"));
        let [unsaid, buffer] = [flip(""), flip(",in=buffer")];
        assert_eq!(unsaid.kind, FaultKind::Flip(1 << 40, FlipPlace::Gradient));
        assert_eq!((buffer.kind, buffer.step), (FaultKind::Flip(1 << 40, FlipPlace::Buffer), 17));
        for stage in STAGES {
            assert_eq!(read(&format!("kill:rank=1,at={stage}")).at.to_string(), stage);
        }
    }

    #[test]
    fn invalid_fault_is_refused_with_a_reason() {
        for (text, reason) in [
            ("", "\"\" is wrong; write KIND:"),
            ("error", "\"error\" is wrong"),
            ("error:", "\"\" is wrong"),
            ("error:rank=0", "\"error:rank=0\" is wrong"),
            ("explode:rank=0,at=step", "\"explode\" is wrong"),
            ("nan:rank=0,at=init", "nan goes with at=step only"),
            ("slow:rank=0,at=step", "\"slow\" is wrong"),
            ("slow=:rank=0,at=step", "\"slow=\" is wrong"),
            ("slow=5s:rank=0,at=step", "\"slow=5s\" is wrong"),
            ("slow=xms:rank=0,at=step", "\"x\" is wrong"),
            ("error:rank=0,at=lunch", "\"at=lunch\" is wrong"),
            ("error:rank=0,at=all_reduce", "\"at=all_reduce\" is wrong"),
            ("error:rank=-1,at=init", "\"-1\" is wrong"),
            ("error:rank=0,rank=1,at=init", "\"rank=1\" is wrong"),
            ("error:rank=0,at=init,step=1", "step goes with at=step only"),
            ("error:rank=0,at=init,when=now", "\"when=now\" is wrong"),
            ("flip:rank=0,at=step", "\"flip\" is wrong"),
            ("flip=BIT:rank=0,at=step", "\"BIT\" is wrong"),
            ("flip=7:rank=0,at=init", "flip=7 goes with at=step only"),
            ("flip=7:rank=0,at=step,in=loss", "\"loss\" is wrong"),
            ("error:rank=0,at=step,in=batch", "in goes with flip=BIT only"),
        ] {
            let error = text.parse::<Fault>().unwrap_err().to_string();
            assert!(error.starts_with(reason), "{text:?} gave {error:?}");
        }
    }
}
