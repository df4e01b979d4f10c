//! Who is told of what happens in a run.

use std::fmt;
use std::sync::Arc;

use super::{Event, RanksActivity};
use crate::os::terminal::write_to_stderr;

/// Somebody who is told what happens in a run.
///
/// The ranks of a process share its observers, and call them from their threads.
///
/// ```
/// # use ddp_mp_engine as ddp_mp;
/// use std::sync::{Arc, Mutex};
///
/// use ddp_mp::prelude::*;
///
/// /// Keeps the loss of each epoch.
/// #[derive(Default)]
/// struct Losses(Mutex<Vec<f64>>);
///
/// impl Observer for Losses {
///     fn event(&self, event: &Event) -> anyhow::Result<()> {
///         if let Event::Epoch(epoch) = event && epoch.rank == 0 {
///             self.0.lock().expect("no rank has panicked").push(epoch.loss);
///         }
///         Ok(())
///     }
/// }
///
/// # fn main() -> anyhow::Result<()> {
/// let losses = Arc::new(Losses::default());
/// let dataset = Arc::new(TensorDataset::random(64, 20, Targets::Values(1), 1)?);
/// Spawn::new(2).observe(losses.clone()).run(move |rank| {
///     let group = rank.init_process_group(rank.backend())?;
///     let (vs, model) = ModelConfig::default().build(rank.device(), 0)?;
///     let ddp = DistributedDataParallel::new(model, &vs, group, DdpOptions::default())?;
///     let sgd: Box<dyn Optimizer> = Box::new(Sgd::new(ddp.flat_buffers(), SgdOptions::default())?);
///     let sampler = DistributedSampler::new(dataset.len(), rank.world_size(), rank.rank())?;
///     let loader = DataLoader::new(dataset.clone(), sampler, 8, rank.device())?;
///     let trainer = Trainer::new(ddp, sgd, Schedule::constant(0.1), loader, Loss::Mse)?;
///     Ok(trainer.observe(rank.observers().clone(), 50).train(3)?.steps)
/// })?;
/// assert_eq!(losses.0.lock().expect("no rank has panicked").len(), 3);
/// # Ok(())
/// # }
/// ```
///
/// A closure that takes an `&Event` observes, too.
pub trait Observer: Send + Sync {
    /// Returns what this observer needs of what is told only if somebody wants it.
    fn wants(&self) -> Wants {
        Wants::default()
    }

    /// Takes an event.
    ///
    /// # Errors
    /// An error fails the rank that has told the event. It is ignored for [`Event::Ended`] and [`Event::Failure`], which no
    /// rank tells, for a note or a warning, and for the fingerprint of a step that has failed.
    fn event(&self, event: &Event) -> anyhow::Result<()>;

    /// Takes the ranks, which are about to start, to ask what each does until [`Event::Ended`].
    #[allow(unused_variables)]
    fn watch(&self, ranks: &Arc<RanksActivity>) {}
}

impl<T: Observer + ?Sized> Observer for Arc<T> {
    fn wants(&self) -> Wants {
        (**self).wants()
    }

    fn event(&self, event: &Event) -> anyhow::Result<()> {
        (**self).event(event)
    }

    fn watch(&self, ranks: &Arc<RanksActivity>) {
        (**self).watch(ranks);
    }
}

impl<F: Fn(&Event) + Send + Sync> Observer for F {
    fn event(&self, event: &Event) -> anyhow::Result<()> {
        self(event);
        Ok(())
    }
}

/// What is told only if somebody wants it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wants {
    /// Notes and warnings. The engine writes them to stderr if nobody wants them.
    pub messages: bool,
    /// [`Event::Metrics`], for which all ranks reduce their numbers.
    pub metrics: bool,
    /// [`Event::Tensor`].
    pub tensors: bool,
    /// What ranks of other processes do, all the time: for [`Observer::watch`].
    pub activity: bool,
    /// The operations of [`Event::Ended`], of which more are kept then.
    pub operations: bool,
}

/// The observers of a run.
#[derive(Clone, Default)]
pub struct Observers(Vec<Arc<dyn Observer>>);

impl fmt::Debug for Observers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Observers({})", self.0.len())
    }
}

impl Observers {
    /// Adds an observer behind those that there are.
    #[doc(hidden)] // all ranks of a process need the same observers: those of `Spawn::observe`
    pub fn add(&mut self, observer: Arc<dyn Observer>) {
        self.0.push(observer);
    }

    /// Returns whether nobody is told anything.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns what any observer wants.
    pub fn wants(&self) -> Wants {
        let any = |what: fn(Wants) -> bool| self.0.iter().any(|observer| what(observer.wants()));
        Wants {
            messages: any(|it| it.messages),
            metrics: any(|it| it.metrics),
            tensors: any(|it| it.tensors),
            activity: any(|it| it.activity),
            operations: any(|it| it.operations),
        }
    }

    /// Tells all observers of `event`.
    ///
    /// # Errors
    /// The first error of an observer. The others have been told, too.
    pub fn tell(&self, event: &Event) -> anyhow::Result<()> {
        let told = self.0.iter().map(|observer| observer.event(event));
        told.fold(Ok(()), anyhow::Result::and)
    }

    /// Tells a note.
    pub fn note(&self, text: impl Into<String>) {
        self.message(&Event::Note { text: text.into() });
    }

    /// Tells a warning.
    pub fn warn(&self, text: impl Into<String>) {
        self.message(&Event::Warning { text: text.into() });
    }

    fn message(&self, event: &Event) {
        if let Event::Note { text } | Event::Warning { text } = event
            && !self.wants().messages
        {
            write_to_stderr(text);
        }
        let _ = self.tell(event); // who cannot take a message has nobody to say so to
    }

    /// Hands `ranks` to all observers, before they start.
    pub(crate) fn watch(&self, ranks: &Arc<RanksActivity>) {
        self.0.iter().for_each(|observer| observer.watch(ranks));
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    /// Keeps the kinds of its events, and cannot take a step.
    #[derive(Default)]
    struct Full(Mutex<Vec<String>>);

    impl Observer for Full {
        fn event(&self, event: &Event) -> anyhow::Result<()> {
            let json = serde_json::to_value(event)?;
            self.0.lock().push(json["event"].as_str().unwrap_or_default().into());
            anyhow::ensure!(!matches!(event, Event::Step { .. }), "disk full");
            Ok(())
        }
    }

    #[test]
    fn all_are_told_though_one_fails() {
        let both = [Arc::new(Full::default()), Arc::default()];
        let mut observers = Observers::default();
        both.iter().for_each(|observer| observers.add(observer.clone()));
        let step = Event::Step { step: 1, steps: 2 };
        assert_eq!(observers.tell(&step).unwrap_err().to_string(), "disk full");
        let notes = Arc::new(Mutex::new(Vec::new()));
        let taken = notes.clone();
        observers.add(Arc::new(move |event: &Event| {
            if let Event::Note { text } = event {
                taken.lock().push(text.clone());
            }
        }));
        assert_eq!(observers.wants(), Wants::default());
        observers.note("a note");
        assert_eq!(*notes.lock(), ["a note"]);
        for observer in both {
            assert_eq!(*observer.0.lock(), ["step", "note"]);
        }
    }
}
