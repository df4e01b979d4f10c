//! A user's own callbacks of the trainer.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use anyhow::{Result, bail};
use ddp_mp::events::{Event, Fingerprint, Observer, Observers, StepFingerprint};
use ddp_mp::models::Model;
use ddp_mp::prelude::*;
use ddp_mp::trainer::FingerprintOptions;
use ddp_mp::views::Metrics;
use ddp_mp::{StopReason, StopRequest};

use crate::harness::{ranks, try_ranks};

/// Returns a trainer on 64 samples in batches of 4: on 2 ranks, 8 steps an epoch.
fn trainer(rank: &Rank, group: Rc<ProcessGroup>) -> Result<Trainer<Model>> {
    let (vs, model) = ModelConfig::default().build(rank.device(), 0)?;
    let ddp = DistributedDataParallel::new(model, &vs, group, DdpOptions::default())?;
    let sgd: Box<dyn Optimizer> = Box::new(Sgd::new(ddp.flat_buffers(), SgdOptions::default())?);
    let data = Arc::new(TensorDataset::random(64, 20, Targets::Values(1), 1)?);
    let sampler = DistributedSampler::new(data.len(), rank.world_size(), rank.rank())?;
    let loader = DataLoader::new(data, sampler, 4, rank.device())?;
    Ok(Trainer::new(ddp, sgd, Schedule::constant(0.1), loader, Loss::Mse)?)
}

/// Records each call.
struct Recorder(Rc<RefCell<Vec<String>>>);

impl Recorder {
    fn record(&self, call: String) -> Result<()> {
        self.0.borrow_mut().push(call);
        Ok(())
    }
}

impl<M> Callback<M> for Recorder {
    fn on_train_start(&mut self, context: &mut TrainContext<M>) -> Result<()> {
        self.record(format!("train from {}", context.state().step))
    }

    fn on_epoch_start(&mut self, context: &mut TrainContext<M>) -> Result<()> {
        self.record(format!("epoch {}", context.state().epoch))
    }

    fn on_step_start(&mut self, _: &mut TrainContext<M>, step: &mut Step) -> Result<()> {
        self.record(format!("step {} of {} samples", step.index, step.num_samples()))
    }

    fn on_before_backward(
        &mut self,
        _: &mut TrainContext<M>,
        step: &Step,
        batch: usize,
        loss: &mut Tensor,
    ) -> Result<()> {
        assert_eq!((step.losses.len(), loss.dim()), (batch, 0));
        self.record(format!("backward of batch {batch}"))
    }

    fn on_after_backward(&mut self, _: &mut TrainContext<M>, step: &mut Step) -> Result<()> {
        self.record(format!("{} losses", step.losses.len()))
    }

    fn on_step_end(&mut self, context: &mut TrainContext<M>, step: &Step) -> Result<()> {
        assert_eq!(context.state().step, step.index + 1);
        self.record(format!("step {} ends", step.index))
    }

    fn on_epoch_end(&mut self, context: &mut TrainContext<M>, epoch: &mut Epoch) -> Result<()> {
        assert!(context.state().epoch == epoch.epoch + 1 && epoch.loss.is_finite());
        self.record(format!("epoch {} of {} steps ends", epoch.epoch, epoch.steps))
    }

    fn on_train_end(&mut self, context: &mut TrainContext<M>) -> Result<()> {
        self.record(format!("train to {}", context.state().step))
    }
}

#[test]
fn callback_sees_each_step_on_each_rank() {
    let calls = ranks(2, |rank, group| {
        let calls = Rc::new(RefCell::new(Vec::new()));
        let options = TrainerOptions { accumulate: 2, ..TrainerOptions::default() };
        let trainer = trainer(rank, group)?.options(options)?;
        let mut trainer = trainer.callback(Recorder(calls.clone()));
        trainer.train(2)?;
        drop(trainer);
        Ok(calls.take())
    });
    let mut expected = vec!["train from 0".to_string()];
    for epoch in 0..2 {
        expected.push(format!("epoch {epoch}"));
        for step in 4 * epoch..4 * (epoch + 1) {
            expected.push(format!("step {step} of 8 samples"));
            expected.extend((0..2).map(|batch| format!("backward of batch {batch}")));
            expected.extend(["2 losses".to_string(), format!("step {step} ends")]);
        }
        expected.push(format!("epoch {epoch} of 4 steps ends"));
    }
    expected.push("train to 8".into());
    assert_eq!(calls, [expected.clone(), expected]);
}

/// Requests a stop on one rank, after step 5.
struct RequestStop {
    rank: usize,
}

impl<M> Callback<M> for RequestStop {
    fn on_step_end(&mut self, context: &mut TrainContext<M>, step: &Step) -> Result<()> {
        if (context.group().rank(), step.index) == (self.rank, 5) {
            context.request_stop()?;
        }
        Ok(())
    }
}

#[test]
fn stop_request_on_one_rank_stops_all_after_the_same_step() {
    for rank_that_stops in 0..3 {
        let stop = Arc::new(StopRequest::default());
        let ends = ranks(3, move |rank, group| {
            let callback = RequestStop { rank: rank_that_stops };
            let mut trainer = trainer(rank, group)?.share_stop(stop.clone()).callback(callback);
            let summary = trainer.train(10)?;
            Ok((summary.steps, summary.stopped))
        });
        // Rank 0 may have begun step 6 before the request.
        assert!((7..=8).contains(&ends[0].0), "{ends:?}");
        assert_eq!(ends, [(ends[0].0, Some(StopReason::Callback)); 3]);
    }
    // An error of a callback ends the run.
    let error = try_ranks(2, |rank, group| {
        trainer(rank, group)?.callback(RequestStop { rank: 1 }).train(1)
    });
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("rank 1") && error.contains("call Trainer::share_stop on all"),
        "{error}"
    );
}

/// Skips a step and ends training after another, on all ranks alike. Records the parameters after each step.
#[derive(Default)]
struct SkipAndStop {
    skipped: Option<u64>,
    last: u64,
    hashes: Rc<RefCell<Vec<u64>>>,
}

impl<M> Callback<M> for SkipAndStop {
    fn on_after_backward(&mut self, _: &mut TrainContext<M>, step: &mut Step) -> Result<()> {
        if Some(step.index) == self.skipped {
            step.skip();
        }
        Ok(())
    }

    fn on_step_end(&mut self, context: &mut TrainContext<M>, step: &Step) -> Result<()> {
        assert_eq!(step.is_skipped(), Some(step.index) == self.skipped);
        self.hashes.borrow_mut().push(context.ddp().parameters_hash()?);
        if step.index == self.last {
            context.end_training();
        }
        Ok(())
    }
}

#[test]
fn callback_can_skip_a_step_and_end_training() {
    let results = ranks(2, |rank, group| {
        let hashes = Rc::new(RefCell::new(Vec::new()));
        let callback = SkipAndStop { skipped: Some(1), last: 2, hashes: hashes.clone() };
        let mut trainer = trainer(rank, group)?.callback(callback);
        let summary = trainer.train(1)?;
        assert_eq!((summary.steps, summary.stopped), (3, Some(StopReason::Callback)));
        assert_eq!((summary.skipped_steps, trainer.state().skipped_samples), (1, 8));
        drop(trainer);
        Ok(hashes.take())
    });
    assert_eq!(results[0], results[1]);
    let hashes = &results[0];
    assert!(hashes[0] == hashes[1] && hashes[1] != hashes[2], "{hashes:?}");
}

#[test]
fn metrics_end_with_the_last_step() {
    let folder = tempfile::tempdir().unwrap();
    let rows = |name: &str, max_steps: Option<u64>, end_after: u64| -> Vec<(u64, f64)> {
        let path = folder.path().join(name);
        let metrics = Arc::new(Metrics::open(&path).unwrap());
        ranks(2, move |rank, group| {
            let mut observers = Observers::default();
            observers.add(metrics.clone());
            let options = TrainerOptions { max_steps, ..TrainerOptions::default() };
            let trainer = trainer(rank, group)?.observe(observers, 3).options(options)?;
            trainer.callback(SkipAndStop { last: end_after, ..SkipAndStop::default() }).train(2)
        });
        let text = std::fs::read_to_string(path).unwrap();
        let rows =
            text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        rows.map(|row| (row["step"].as_u64().unwrap(), row["loss"].as_f64().unwrap())).collect()
    };
    let whole = rows("whole", None, 99);
    let steps = |rows: &[(u64, f64)]| -> Vec<u64> { rows.iter().map(|row| row.0).collect() };
    assert_eq!(steps(&whole), [3, 6, 8, 11, 14, 16]);
    // Epochs of 8 steps; a stop that the trainer knows before, one by a callback, and each where a row is due.
    for (name, max_steps, end_after) in
        [("a", Some(10), 99), ("b", None, 9), ("c", Some(11), 99), ("d", None, 7), ("e", None, 10)]
    {
        let rows = rows(name, max_steps, end_after);
        let last = max_steps.unwrap_or(end_after + 1);
        assert_eq!(rows.last().unwrap().0, last);
        assert!(steps(&rows).is_sorted_by(|a, b| a < b), "{rows:?}");
        let before: Vec<_> = whole.iter().filter(|row| row.0 < last).copied().collect();
        assert_eq!(rows[..rows.len() - 1], before);
        assert!(rows.last().unwrap().1.is_finite());
    }
}

/// Keeps the fingerprints of steps.
#[derive(Default)]
struct Fingerprints(Mutex<Vec<StepFingerprint>>);

impl Observer for Fingerprints {
    fn event(&self, event: &Event) -> Result<()> {
        if let Event::Fingerprint { fingerprint: Fingerprint::Step(step) } = event {
            self.0.lock().unwrap().push(step.clone());
        }
        Ok(())
    }
}

/// Fails rank 1 at the start of step 3, while rank 0 ends step 2.
struct FailWhileRankEndsStep;

impl<M> Callback<M> for FailWhileRankEndsStep {
    fn on_step_start(&mut self, context: &mut TrainContext<M>, step: &mut Step) -> Result<()> {
        if (context.group().rank(), step.index) == (1, 3) {
            context.group().barrier()?;
            bail!("planned");
        }
        Ok(())
    }

    fn on_step_end(&mut self, context: &mut TrainContext<M>, step: &Step) -> Result<()> {
        if (context.group().rank(), step.index) == (0, 2) {
            context.group().barrier()?;
            // Rank 1 does not come to another one. Its failure ends the wait.
            context.group().barrier().unwrap_err();
        }
        Ok(())
    }
}

/// Rank 0 has made step 2, and may save its state.
#[test]
fn failure_while_a_rank_ends_its_step_leaves_that_step_whole_in_the_record() {
    let record = Arc::new(Fingerprints::default());
    let observer = record.clone();
    let error = try_ranks(2, move |rank, group| {
        let mut observers = Observers::default();
        observers.add(observer.clone());
        let trainer = trainer(rank, group)?.observe(observers, 1).callback(FailWhileRankEndsStep);
        let (program, options) = ("test".into(), serde_json::Map::new());
        let (every, whole, modules) = (1, false, false);
        let options = FingerprintOptions { every, whole, modules, program, options };
        trainer.fingerprint(options).train(1)
    });
    assert!(error.unwrap_err().to_string().contains("planned"));
    let mut lines = std::mem::take(&mut *record.0.lock().unwrap());
    lines.sort_by_key(|line| (line.rank, line.step));
    let steps: Vec<_> = lines.iter().map(|it| (it.rank, it.step, it.stopped)).collect();
    assert_eq!(
        steps,
        [
            (0, 0, false),
            (0, 1, false),
            (0, 2, false),
            (0, 3, true),
            (1, 0, false),
            (1, 1, false),
            (1, 2, false)
        ]
    );
    assert!(lines[2].parameters.iter().all(Option::is_some), "{:?}", lines[2]);
    assert_eq!(
        [&lines[2].averages, &lines[2].parameters],
        [&lines[6].averages, &lines[6].parameters]
    );
}
