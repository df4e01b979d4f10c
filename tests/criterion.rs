//! Losses, metrics, counts and steps of one's own in the trainer.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use ddp_mp::SpawnError;
use ddp_mp::prelude::*;
use ddp_mp::records::ValidationMetrics;
use ddp_mp::trainer::Amp;
use tch::nn::{Linear, VarStore};

use crate::harness::{linear, try_ranks};
use crate::own_model::numbers;

/// Keeps each epoch.
struct Keep(Rc<RefCell<Vec<Epoch>>>);

impl<M> Callback<M> for Keep {
    fn on_epoch_end(&mut self, _: &mut TrainContext<M>, epoch: &mut Epoch) -> anyhow::Result<()> {
        self.0.borrow_mut().push(epoch.clone());
        Ok(())
    }
}

/// What a rank trains: its parameters, the wrapped model, the optimizer, and the order of its samples.
type Parts = (VarStore, DistributedDataParallel<Linear>, Box<dyn Optimizer>, DistributedSampler);

/// Returns them, with the parameters of a checkpoint if there is one.
fn parts(rank: &Rank, group: Rc<ProcessGroup>, from: Option<&Checkpoint>) -> anyhow::Result<Parts> {
    let vs = VarStore::new(rank.device());
    let model = linear(vs.root(), 3, 1);
    if let Some(from) = from {
        from.load_model(&vs)?;
    }
    let ddp = DistributedDataParallel::new(model, &vs, group, DdpOptions::default())?;
    let sgd: Box<dyn Optimizer> = Box::new(Sgd::new(ddp.flat_buffers(), SgdOptions::default())?);
    let sampler = DistributedSampler::new(20, rank.world_size(), rank.rank())?.shuffle(false);
    Ok((vs, ddp, sgd, sampler))
}

/// What a rank has after two epochs.
#[derive(Debug, PartialEq)]
struct Outcome {
    hash: u64,
    losses: Vec<f64>,
    validations: Vec<ValidationMetrics>,
    /// Samples and tokens per second in the last epoch.
    rates: (f64, Option<f64>),
}

/// Trains on [`numbers`] for two epochs, each rank on batches of up to 3 samples; a rank may have none.
fn train(
    world_size: usize,
    criterion: impl Into<Criterion>,
    options: TrainerOptions,
) -> Result<Vec<Outcome>, Box<SpawnError>> {
    train_with(world_size, criterion, options, Ok)
}

/// Trains as [`train`] does, with the trainer that `change` returns.
fn train_with(
    world_size: usize,
    criterion: impl Into<Criterion>,
    options: TrainerOptions,
    change: impl Fn(Trainer<Linear>) -> anyhow::Result<Trainer<Linear>> + Send + Sync + 'static,
) -> Result<Vec<Outcome>, Box<SpawnError>> {
    let (criterion, dataset) = (criterion.into(), Arc::new(numbers()));
    try_ranks(world_size, move |rank, group| {
        let (_vs, ddp, sgd, sampler) = parts(rank, group, None)?;
        let load = |sampler| DataLoader::new(dataset.clone(), sampler, 3, rank.device());
        let validation = load(sampler.clone().uneven())?;
        let loader = load(sampler.without_padding())?.in_step(true);
        let epochs = Rc::default();
        let trainer = Trainer::new(ddp, sgd, Schedule::constant(0.01), loader, criterion.clone())?
            .options(options.clone())?
            .validation(validation, 1);
        let mut trainer = change(trainer.callback(Keep(Rc::clone(&epochs))))?;
        trainer.train(2)?;
        let epochs = epochs.borrow();
        let last = epochs.last().unwrap();
        Ok(Outcome {
            hash: trainer.ddp().parameters_hash()?,
            losses: epochs.iter().map(|epoch| epoch.loss).collect(),
            validations: epochs.iter().filter_map(|epoch| epoch.validation.clone()).collect(),
            rates: (last.samples_per_second, last.tokens_per_second),
        })
    })
}

fn exact_mean() -> TrainerOptions {
    TrainerOptions { exact_mean: true, ..TrainerOptions::default() }
}

fn mse(output: &Tensor, targets: &Tensor) -> Tensor {
    output.mse_loss(targets, Reduction::Mean)
}

#[test]
fn own_loss_has_the_bits_of_the_built_in_one() {
    let bf16 = TrainerOptions { amp: Amp::Bf16, ..exact_mean() };
    let accumulating = TrainerOptions { accumulate: 2, max_grad_norm: Some(0.5), ..exact_mean() };
    for options in [exact_mean(), bf16, accumulating] {
        let expected = train(3, Loss::Mse, options.clone()).unwrap();
        let parts = |output: &Tensor, targets: &Tensor| {
            [("mse", mse(output, targets)), ("size", output.square().mean(Kind::Float))]
        };
        for own in [Criterion::own(mse), Criterion::own(parts)] {
            for (expected, outcome) in expected.iter().zip(train(3, own, options.clone()).unwrap())
            {
                assert_eq!((outcome.hash, &outcome.losses), (expected.hash, &expected.losses));
                let losses = |outcome: &Outcome| -> Vec<f64> {
                    outcome.validations.iter().map(|validation| validation.loss).collect()
                };
                assert_eq!(losses(&outcome), losses(expected));
            }
        }
    }
}

#[test]
fn parts_and_metrics_are_means_over_the_samples_of_all_ranks() {
    // With 25 ranks some have no samples, and know no names.
    for world_size in [1, 3, 25] {
        let criterion = Criterion::own(|output: &Tensor, targets: &Tensor| {
            [("loss", mse(output, targets)), ("target", targets.mean(Kind::Float))]
        })
        .metric("squared target", |_, targets| targets.square().mean(Kind::Float).view([1]))
        .metric("nothing", |_, targets| targets.mean(Kind::Float) * f64::NAN);
        for outcome in train(world_size, criterion, exact_mean()).unwrap() {
            let ValidationMetrics { metrics, accuracy, .. } = &outcome.validations[1];
            let names: Vec<&str> = metrics.keys().map(String::as_str).collect();
            assert_eq!(names, ["nothing", "squared target", "target"]);
            assert!(accuracy.is_none() && metrics["nothing"].is_nan());
            assert!((metrics["target"] - 9.5).abs() < 1e-5, "{metrics:?}");
            assert!((metrics["squared target"] - 123.5).abs() < 1e-4, "{metrics:?}");
            let json = serde_json::to_value(&outcome.validations[1]).unwrap();
            assert!(json["metrics"]["nothing"].is_null(), "{json}");
        }
    }
    // Beside a built-in loss too; without names there is no key.
    let classes =
        Criterion::from(Loss::Mse).metric("target", |_, targets| targets.mean(Kind::Float));
    let outcome = train(2, classes, exact_mean()).unwrap().remove(0);
    assert!((outcome.validations[0].metrics["target"] - 9.5).abs() < 1e-5);
    let outcome = train(2, Loss::Mse, exact_mean()).unwrap().remove(0);
    let json = serde_json::to_value(&outcome.validations[0]).unwrap();
    assert!(json.get("metrics").is_none(), "{json}");
}

/// A loss whose gradient is that of the mean output, and that is the mean target.
fn mean_target(output: &Tensor, targets: &Tensor) -> Tensor {
    let mean = output.mean(Kind::Float);
    &mean - mean.detach() + targets.mean(Kind::Float)
}

/// The sum of the batch's targets, and one more.
fn sum_of_targets(batch: &Batch) -> usize {
    batch.targets.sum(Kind::Double).double_value(&[]) as usize + 1
}

#[test]
fn count_weighs_losses_gradients_and_rates() {
    let criterion = || Criterion::own(mean_target).count(sum_of_targets);
    let outcomes = train(2, criterion(), exact_mean()).unwrap();
    // The batches of each rank, by their samples.
    let batches = [
        vec![0, 2, 4],
        vec![1, 3, 5],
        vec![6, 8, 10],
        vec![7, 9, 11],
        vec![12, 14, 16],
        vec![13, 15, 17],
        vec![18],
        vec![19],
    ];
    let (mut sum, mut all) = (0., 0.);
    for batch in &batches {
        let total = batch.iter().sum::<i32>();
        let count = f64::from(total + 1);
        sum += count * f64::from(total) / batch.len() as f64;
        all += count;
    }
    for outcome in &outcomes {
        for loss in outcome.losses.iter().chain(outcome.validations.iter().map(|it| &it.loss)) {
            assert!((loss - sum / all).abs() < 1e-4, "{loss} and {}", sum / all);
        }
    }
    let of_rank = f64::from(batches.iter().step_by(2).flatten().sum::<i32>() + 4);
    let (samples, tokens) = outcomes[0].rates;
    assert!((tokens.unwrap() / samples - of_rank / 10.).abs() < 1e-9, "{:?}", outcomes[0].rates);

    // A count of the samples changes nothing, and any other count does.
    let plain = train(2, Criterion::own(mean_target), exact_mean()).unwrap().remove(0);
    let samples = Criterion::own(mean_target).count(Batch::len);
    let samples = train(2, samples, exact_mean()).unwrap().remove(0);
    assert_eq!((samples.hash, &samples.losses), (plain.hash, &plain.losses));
    assert_ne!(outcomes[0].hash, plain.hash);
}

/// Trains an epoch, or its first steps, from a checkpoint if there is one, and saves each step in `dir`. Returns the
/// loss of each epoch.
fn epochs_in(
    dir: &CheckpointDir,
    criterion: Criterion,
    max_steps: Option<u64>,
    from: Option<Arc<Checkpoint>>,
    world_size: usize,
) -> Result<Vec<f64>, Box<SpawnError>> {
    let dir = dir.clone();
    let results = try_ranks(world_size, move |rank, group| {
        let (_vs, ddp, sgd, sampler) = parts(rank, group, from.as_deref())?;
        let loader = DataLoader::new(Arc::new(numbers()), sampler, 5, rank.device())?;
        let criterion = criterion.clone();
        let epochs = Rc::default();
        let options = TrainerOptions { max_steps, ..TrainerOptions::default() };
        let every = SaveEvery { steps: Some(1), epochs: None };
        let mut trainer = Trainer::new(ddp, sgd, Schedule::constant(0.0), loader, criterion)?
            .options(options)?
            .callback(Keep(Rc::clone(&epochs)))
            .checkpoints(dir.clone(), every, Default::default());
        if let Some(from) = &from {
            trainer.resume(from)?;
        }
        trainer.train(1)?;
        let losses: Vec<f64> = epochs.borrow().iter().map(|epoch: &Epoch| epoch.loss).collect();
        Ok(losses)
    });
    Ok(results?.remove(0))
}

fn counted() -> Criterion {
    Criterion::own(mean_target).count(sum_of_targets)
}

fn newest(dir: &CheckpointDir) -> Checkpoint {
    Checkpoint::read(&dir.newest().unwrap().unwrap()).unwrap()
}

#[test]
fn count_is_resumed_with_the_epoch() {
    let folder = tempfile::tempdir().unwrap();
    let dir = CheckpointDir::open(folder.path(), 9).unwrap();
    let epochs = |max_steps, from, world_size| {
        epochs_in(&dir, counted(), max_steps, from, world_size).unwrap()
    };
    assert!(epochs(Some(1), None, 2).is_empty());
    let saved = newest(&dir);
    // The samples 0, 2, ..., 8 and 1, 3, ..., 9.
    assert_eq!(saved.state().counts, [21, 26]);
    let saved = Arc::new(saved);
    let means = [(21., 4.), (26., 5.), (71., 14.), (76., 15.)];
    let expected = means.iter().map(|(count, mean)| count * mean).sum::<f64>()
        / means.iter().map(|(count, _)| count).sum::<f64>();
    let resumed = epochs(None, Some(saved.clone()), 2);
    assert!((resumed[0] - expected).abs() < 1e-5, "{resumed:?} and {expected}");
    // Another number of ranks: the batches are now 10 to 14 and 15 to 19.
    let means = [(21., 4.), (26., 5.), (61., 12.), (86., 17.)];
    let expected = means.iter().map(|(count, mean)| count * mean).sum::<f64>() / 194.;
    let resumed = epochs(None, Some(saved), 1);
    assert!((resumed[0] - expected).abs() < 1e-5, "{resumed:?} and {expected}");
}

#[test]
fn resuming_within_an_epoch_needs_the_same_count() {
    let plain = || Criterion::own(mean_target);
    let cases = [
        (counted(), plain(), "by the count of a criterion, and this run by its samples, so"),
        (plain(), counted(), "by its samples, and this run by the count of a criterion, so"),
    ];
    for (before, after, told) in cases {
        let folder = tempfile::tempdir().unwrap();
        let dir = CheckpointDir::open(folder.path(), 9).unwrap();
        epochs_in(&dir, before.clone(), Some(1), None, 2).unwrap();
        let saved = Arc::new(newest(&dir));
        let error = epochs_in(&dir, after.clone(), None, Some(saved.clone()), 2).unwrap_err();
        assert!(error.to_string().contains(told), "{error}");
        // At the end of an epoch there is no mean to continue.
        assert_eq!(epochs_in(&dir, before, None, Some(saved), 2).unwrap().len(), 1);
        let saved = Arc::new(newest(&dir));
        assert_eq!(epochs_in(&dir, after, None, Some(saved), 2).unwrap(), [0.; 0]);
    }
}

fn own<L: Into<LossParts> + 'static>(loss: fn(&Tensor, &Tensor) -> L) -> Criterion {
    Criterion::own(loss)
}

/// A loss whose parts are all the same.
fn named<const N: usize>(names: [&'static str; N]) -> Criterion {
    Criterion::own(move |output: &Tensor, targets: &Tensor| {
        names.map(|it| (it, mse(output, targets)))
    })
}

#[test]
fn mistakes_in_closures_are_one_message_that_names_the_closure() {
    let metric = |name, metric: fn(&Tensor, &Tensor) -> Tensor| {
        Criterion::from(Loss::Mse).metric(name, metric)
    };
    let cases = [
        (
            own(|output, targets| output - targets),
            "the loss has shape [3, 1]; return one number, such as its mean; this happened for samples",
        ),
        (
            own(|output, targets| mse(output, targets).detach()),
            "the loss has no gradient; compute it from the model's output",
        ),
        (
            own(|_, _| -> [(&'static str, Tensor); 0] { [] }),
            "the loss has no parts; return at least the one",
        ),
        (
            own(|output, targets| {
                [("mse", mse(output, targets)), ("rest", output.shallow_clone())]
            }),
            "the loss `rest` has shape [3, 1]; return one number",
        ),
        (named(["mse", "kl", "kl"]), "the name `kl` is there twice"),
        (
            metric("f1", mse).metric("f1", mse),
            "the name `f1` is there twice, among the loss, its parts and the metrics",
        ),
        (
            named(["total", "loss"]),
            "has the name `loss`, under which the first part is shown; give it another name",
        ),
        (
            Criterion::from(Loss::CrossEntropy).metric("accuracy", mse),
            "the name `accuracy` is there twice",
        ),
        (
            Criterion::from(Loss::CrossEntropy),
            "cross-entropy over one class is always 0, and the model returns the shape [3, 1]; the model must return \
             one number for each class; this happened for samples",
        ),
        (
            metric("hits", |output, targets| output.eq_tensor(targets)),
            "the metric `hits` has shape [3, 1]; return one number, such as its mean; this happened for samples ",
        ),
        (
            metric("hits", |_, _| panic!("no hits")),
            "the metric `hits` panicked at tests/criterion.rs:",
        ),
        (
            metric("hits", |_, _| {
                let every = std::hint::black_box(0);
                Tensor::from((0..9).step_by(every).count() as f32) // panics in the standard library
            }),
            "step != 0",
        ),
        (own(|_, _| -> Tensor { panic!("no loss") }), "the loss panicked at tests/criterion.rs:"),
        (
            Criterion::from(Loss::Mse).count(|_| 0),
            "the count of a batch of 3 samples is 0; return at least 1",
        ),
        (
            Criterion::from(Loss::Mse).count(|_| panic!("uncountable")),
            "the count panicked at tests/criterion.rs:",
        ),
    ];
    for (criterion, told) in cases {
        let about = format!("{criterion:?}");
        let error = train(2, criterion, exact_mean()).unwrap_err().to_string();
        assert!(error.starts_with("rank ") && error.contains(told), "{about}: {error}");
        for noise in ["/rustc/", "/registry/", "library/", "pthread", "start_thread", "ddp_mp::"] {
            assert!(!error.contains(noise), "{noise}: {error}");
        }
    }
}

/// Ranks whose loaders do not know each other's samples count them.
#[test]
fn exact_mean_needs_no_loaders_in_step() {
    let train = |world_size: usize, batch_size: usize| {
        let dataset = Arc::new(numbers());
        let weights = try_ranks(world_size, move |rank, group| {
            let (vs, ddp, sgd, sampler) = parts(rank, group, None)?;
            let sampler = sampler.without_padding();
            let loader = DataLoader::new(dataset.clone(), sampler, batch_size, rank.device())?;
            let trainer = Trainer::new(ddp, sgd, Schedule::constant(0.001), loader, Loss::Mse)?;
            trainer.options(exact_mean())?.train(3)?;
            Ok(Vec::<f32>::try_from(vs.trainable_variables()[0].detach().flatten(0, -1))?)
        });
        weights.unwrap().remove(0)
    };
    // 7, 7 and 6 samples.
    let (three, alone) = (train(3, 7), train(1, 20));
    let largest = three.iter().zip(&alone).map(|(a, b)| (a - b).abs()).fold(0., f32::max);
    assert!(largest < 1e-6, "{three:?} {alone:?}");
}

#[test]
fn own_step_skips_a_loss_that_is_not_finite_as_the_built_in_one_does() {
    // In training, sample 4 has the loss -inf; its gradient is finite.
    let in_training = |output: &Tensor, targets: &Tensor| {
        let loss = mse(output, targets);
        if output.requires_grad() {
            loss + (targets - 4.).abs().log().mean(Kind::Float)
        } else {
            loss
        }
    };
    let built_in = Criterion::own(in_training);
    let run = |criterion: Criterion, has_own_step: bool, options: TrainerOptions| {
        train_with(2, criterion, options, move |trainer| {
            if !has_own_step {
                return Ok(trainer);
            }
            Ok(trainer.step(move |context, batch| {
                let loss = in_training(&context.forward(batch, true), &batch.targets);
                context.backward(&loss)?;
                Ok(loss)
            }))
        })
    };
    for options in [TrainerOptions::default(), exact_mean()] {
        let skipping = TrainerOptions { skip_nonfinite: Some(2), ..options.clone() };
        let expected = run(built_in.clone(), false, skipping.clone()).unwrap();
        let found = run(Loss::Mse.into(), true, skipping).unwrap();
        for (found, expected) in found.iter().zip(&expected) {
            assert!(found.losses.iter().all(|loss| loss.is_finite()), "{found:?}");
            assert_eq!((found.hash, &found.losses), (expected.hash, &expected.losses));
        }
        // It is there once in each epoch.
        let too_few = TrainerOptions { skip_nonfinite: Some(1), ..options };
        for has_own_step in [false, true] {
            let error = run(built_in.clone(), has_own_step, too_few.clone()).unwrap_err();
            let told = "in step 4 on rank 0 the loss is -inf for sample";
            assert!(error.to_string().contains(told), "{has_own_step}: {error}");
        }
    }
}

/// Checks how a run of two ranks fails that has this step. Returns the error.
#[track_caller]
fn fails<L: Into<LossParts> + 'static>(
    told: &str,
    options: TrainerOptions,
    step: impl Fn(&mut TrainContext<Linear>, &Batch) -> anyhow::Result<L> + Send + Sync + 'static,
) -> String {
    let step = Arc::new(step);
    let outcomes = train_with(2, Loss::Mse, options, move |trainer| {
        let step = step.clone();
        Ok(trainer.step(move |context, batch| step(context, batch)))
    });
    let error = outcomes.unwrap_err().to_string();
    assert!(error.contains(told), "{error}");
    error
}

fn loss_of(context: &TrainContext<Linear>, batch: &Batch) -> Tensor {
    mse(&context.forward(batch, true), &batch.targets)
}

#[test]
fn mistakes_in_a_step_are_one_message() {
    let plain = TrainerOptions::default;
    let told = "the step has not averaged the gradients";
    fails(told, plain(), |context, batch| Ok(loss_of(context, batch)));
    fails(told, plain(), |context, batch| {
        let loss = loss_of(context, batch);
        let _no_sync = context.ddp().no_sync();
        context.backward(&loss)?;
        Ok(loss)
    });
    let told = "the step has averaged the gradients more than once; hold";
    fails(told, plain(), |context, batch| {
        for _ in 0..2 {
            let loss = loss_of(context, batch);
            context.backward(&loss)?;
        }
        Ok(loss_of(context, batch))
    });
    let told = "exact_mean averages them over the samples; call";
    fails(told, exact_mean(), |context, batch| {
        let loss = loss_of(context, batch);
        context.ddp_mut().backward(&loss)?;
        Ok(loss)
    });
    fails("the loss has shape [3, 1]; return one number", plain(), |context, batch| {
        let output = context.forward(batch, true);
        context.backward(&mse(&output, &batch.targets))?;
        Ok(output)
    });
    let told = "the step panicked at tests/criterion.rs:";
    let error = fails(told, plain(), |_, _| -> anyhow::Result<Tensor> { panic!("no idea") });
    assert!(error.contains(": no idea; this happened for samples "), "{error}");
    let told = "failed in step #0: no data";
    let error = fails(told, plain(), |_, _| -> anyhow::Result<Tensor> { anyhow::bail!("no data") });
    assert!(error.starts_with("rank "), "{error}");
    // A value that is not finite, which comes from the data or not.
    fails("the loss is inf for samples ", plain(), |context, batch| {
        let loss = loss_of(context, batch) * f64::INFINITY;
        context.backward(&loss)?;
        Ok(loss)
    });
    let skipping = TrainerOptions { skip_nonfinite: Some(0), ..plain() };
    let error = fails("` is not finite for", skipping, |context, batch| {
        let loss = loss_of(context, batch);
        context.backward(&(&loss * f64::INFINITY))?;
        Ok(loss)
    });
    assert!(error.contains("the gradient of `"), "{error}");
}
