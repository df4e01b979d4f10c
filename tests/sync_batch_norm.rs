//! The sum over all ranks that gradients flow through, and batch norm over all ranks.

use std::rc::Rc;

use ddp_mp::ddp::JoinOptions;
use ddp_mp::ffi::{backward, fork_rng};
use ddp_mp::models::{BatchNorm, ModelConfig, ModelKind};
use ddp_mp::process_group::functional::all_reduce;
use ddp_mp::{DdpOptions, DistributedDataParallel, Error, SyncBatchNorm};
use tch::nn::{BatchNormConfig, Init, ModuleT, VarStore};
use tch::{Device, Kind, Tensor};

use crate::harness::{ranks, try_ranks};

fn largest_difference(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size());
    if a.numel() == 0 { 0. } else { (a - b).abs().max().double_value(&[]) }
}

#[test]
fn failure_of_another_rank_ends_backward_with_the_cause() {
    let error = try_ranks(3, |rank, group| {
        let x = Tensor::from_slice(&[1f32]).set_requires_grad(true);
        let loss = all_reduce(&x, &group)?.sum(Kind::Float);
        if rank.rank() == 1 {
            anyhow::bail!("out of cheese");
        }
        let error = backward(&loss).unwrap_err();
        let Error::Cancelled { by: 1, cause } = &error else { panic!("{error}") };
        assert!(cause.contains("out of cheese"), "{cause}");
        // tch's own backward says it in libtorch's words.
        let again = all_reduce(&x, &group).unwrap_err();
        assert!(matches!(again, Error::Cancelled { by: 1, .. }), "{again}");
        Err::<(), _>(error.into())
    })
    .unwrap_err();
    assert_eq!(error.failure.rank, 1);
    assert!(error.failure.error.contains("out of cheese"), "{error}");
    assert!(error.also_failed.is_empty() && error.stuck.is_empty(), "{error}");
}

#[test]
fn backward_mismatch_is_an_error() {
    let mismatch = try_ranks(2, |rank, group| {
        let x = Tensor::from_slice(&[1f32]).set_requires_grad(true);
        let sum = all_reduce(&x, &group)?;
        if rank.rank() == 0 {
            backward(&sum.sum(Kind::Float))?;
        } else {
            group.barrier()?;
        }
        Ok(())
    })
    .unwrap_err();
    assert!(mismatch.failure.error.contains("differs between ranks"), "{mismatch}");
}

#[test]
fn graph_on_another_thread_is_refused() {
    ranks(1, |_, group| {
        let x = Tensor::from_slice(&[1f32]).set_requires_grad(true);
        let sum = all_reduce(&x, &group)?.sum(Kind::Float);
        let before = Rc::strong_count(&group);
        // As `spawn` does on a rank's thread; nothing is set here.
        let there = move || backward(&sum).unwrap_err();
        let error = std::thread::scope(|scope| scope.spawn(there).join().unwrap());
        assert!(error.to_string().contains("call it on the rank's own thread"), "{error}");
        assert_eq!(Rc::strong_count(&group), before, "not touched from there");
        Ok(())
    });
}

#[test]
fn graph_releases_its_group_when_dropped() {
    ranks(1, |_, group| {
        let before = Rc::strong_count(&group);
        let x = Tensor::from_slice(&[1f32]).set_requires_grad(true);
        let sum = all_reduce(&x, &group)?;
        assert_eq!(Rc::strong_count(&group), before + 1);
        drop(sum);
        assert_eq!(Rc::strong_count(&group), before);
        Ok(())
    });
}

const CHANNELS: i64 = 3;

/// What a batch norm leaves after two training steps and one evaluation.
#[derive(Default, Debug)]
struct Outcome {
    /// For each step the output and the gradient of the inputs.
    steps: Vec<(Tensor, Tensor)>,
    evaluated: Option<Tensor>,
    /// The parameters' gradients, if there are any, and the running statistics.
    rest: Vec<Tensor>,
}

/// Two steps on `inputs` of different values, with a loss whose gradient is different everywhere.
fn outcome(
    norm: &BatchNorm,
    inputs: &[Tensor; 2],
    loss_weight: &Tensor,
    forward: impl Fn(&Tensor, bool) -> Tensor,
) -> anyhow::Result<Outcome> {
    let mut outcome = Outcome::default();
    for inputs in inputs {
        let inputs = inputs.detach().set_requires_grad(true);
        let output = forward(&inputs, true);
        backward(&(output.square() * loss_weight).sum(output.kind()))?;
        outcome.steps.push((output.detach(), inputs.grad()));
    }
    outcome.evaluated = Some(forward(&inputs[0], false).detach());
    outcome.rest.extend(norm.weight.iter().chain(&norm.bias).map(Tensor::grad));
    outcome.rest.push(norm.running_mean.copy());
    outcome.rest.push(norm.running_var.copy());
    assert_eq!(norm.num_batches_tracked.int64_value(&[]), 2);
    Ok(outcome)
}

/// A layer whose weights and running statistics are not what one could confuse with nothing.
fn layer(kind: Kind, affine: bool) -> anyhow::Result<BatchNorm> {
    let mut vs = VarStore::new(Device::Cpu);
    let config = BatchNormConfig {
        ws_init: Init::Uniform { lo: 0.5, up: 2. },
        bs_init: Init::Uniform { lo: -1., up: 1. },
        momentum: 0.3,
        affine,
        ..BatchNorm::DEFAULT
    };
    let norm = fork_rng(3, || BatchNorm::new(&vs.root(), CHANNELS, config))??;
    if kind == Kind::Double {
        vs.double();
    }
    Ok(norm)
}

/// Compares ranks with so many samples each with one that has all. Returns the largest difference.
fn compare(
    counts: &'static [i64],
    tail: &'static [i64],
    kind: Kind,
    offset: f64,
    affine: bool,
) -> f64 {
    let differences = ranks(counts.len(), move |rank, group| {
        let total: i64 = counts.iter().sum();
        let shape = [&[total, CHANNELS], tail].concat();
        let draw = || Tensor::randn(&shape[..], (kind, Device::Cpu));
        let (first, second, loss_weight) = fork_rng(5, || (draw(), draw(), draw()))?;
        let inputs = [first * 2. + offset, second - 3. + offset];

        let alone = layer(kind, affine)?;
        let expected =
            outcome(&alone, &inputs, &loss_weight, |inputs, train| alone.forward_t(inputs, train))?;

        let start: i64 = counts[..rank.rank()].iter().sum();
        let mine = |whole: &Tensor| whole.narrow(0, start, counts[rank.rank()]);
        let sync = SyncBatchNorm::convert(layer(kind, affine)?, &group);
        let inputs = [mine(&inputs[0]), mine(&inputs[1])];
        let mut found =
            outcome(sync.batch_norm(), &inputs, &mine(&loss_weight), |inputs, train| {
                sync.forward_t(inputs, train)
            })?;
        // The parameters' gradients are sums over the samples: over those of all ranks here, which
        // DistributedDataParallel does otherwise.
        if affine {
            for gradient in &mut found.rest[..2] {
                *gradient = all_reduce(gradient, &group)?;
            }
        }

        let mut largest = 0f64;
        let mut differ = |what: &str, found: &Tensor, expected: &Tensor| {
            let scale = expected.abs().max().double_value(&[]).max(1.);
            let is_whole = found.size() == expected.size();
            let expected = if is_whole { expected.shallow_clone() } else { mine(expected) };
            let difference = largest_difference(found, &expected) / scale;
            let rank = rank.rank();
            println!("{kind:?} {counts:?} {tail:?} {offset} rank {rank} {what}: {difference:e}");
            largest = largest.max(difference);
        };
        for (found, expected) in found.steps.iter().zip(&expected.steps) {
            differ("output", &found.0, &expected.0);
            differ("input gradient", &found.1, &expected.1);
        }
        differ("evaluated", &found.evaluated.unwrap(), &expected.evaluated.unwrap());
        for (found, expected) in found.rest.iter().zip(&expected.rest) {
            differ("gradients and statistics", found, expected);
        }
        Ok(largest)
    });
    differences.into_iter().fold(0., f64::max)
}

#[test]
fn sync_batch_norm_matches_one_batch_of_all_samples() {
    for (kind, affine) in [(Kind::Float, true), (Kind::Float, false), (Kind::Double, true)] {
        let alone = compare(&[6], &[4, 5], kind, 0., affine);
        assert_eq!(alone, 0., "one rank: the same kernels");
        for counts in [&[4, 4][..], &[1, 7], &[3, 0], &[0, 5], &[2, 0, 4], &[5, 1, 2], &[1, 1]] {
            for tail in [&[4, 5][..], &[], &[7], &[2, 3, 2]] {
                let difference = compare(counts, tail, kind, 0., affine);
                // Of two samples each is the mean plus or minus half of their distance, whatever that is: the
                // gradients are nothing but what is left of a cancellation.
                let worse = if counts == [1, 1] && tail.is_empty() { 1e3 } else { 1. };
                let bound = worse * if kind == Kind::Float { 2e-6 } else { 1e-12 };
                assert!(difference < bound, "{kind:?} {counts:?} {tail:?}: {difference:e}");
            }
        }
    }
}

#[test]
fn large_mean_loses_no_precision() {
    // float32 itself has a step of 6e-5 near 1000.
    let difference = compare(&[5, 1, 2], &[4, 5], Kind::Float, 1000., true);
    assert!(difference < 6e-5, "{difference:e}");
}

#[test]
fn empty_batch_on_all_ranks_keeps_running_statistics() {
    ranks(2, |_, group| {
        let vs = VarStore::new(Device::Cpu);
        let norm = SyncBatchNorm::new(&vs.root(), 2, SyncBatchNorm::DEFAULT, &group)?;
        let nothing = Tensor::zeros([0, 2, 3], (Kind::Float, Device::Cpu));
        assert_eq!(norm.forward_t(&nothing, true).size(), [0, 2, 3]);
        assert_eq!(Vec::<f32>::try_from(&norm.batch_norm().running_mean)?, [0., 0.]);
        assert_eq!(Vec::<f32>::try_from(&norm.batch_norm().running_var)?, [1., 1.]);
        Ok(())
    });
}

#[test]
fn half_precision_output_keeps_its_dtype() {
    ranks(2, |rank, group| {
        let vs = VarStore::new(Device::Cpu);
        let norm = SyncBatchNorm::new(&vs.root(), 2, SyncBatchNorm::DEFAULT, &group)?;
        let inputs = Tensor::from_slice(&[300f32, 1., 301., 2.]).view([2, 2]);
        let inputs = (inputs + rank.rank() as f64 * 4.).to_kind(Kind::BFloat16);
        let output = norm.forward_t(&inputs, true);
        assert_eq!(output.kind(), Kind::BFloat16);
        assert!(output.abs().max().double_value(&[]) < 2.);
        Ok(())
    });
}

#[test]
fn forward_error_is_no_panic() {
    // Another number of channels on rank 1, and no channels.
    for (shapes, words) in [
        ([&[4, 2][..], &[4, 3]], ["differs between ranks", ""]),
        ([&[4], &[4]], ["sync_batch_norm", "(N, C, ...)"]),
    ] {
        let error = try_ranks(2, move |rank, group| {
            let vs = VarStore::new(Device::Cpu);
            let norm = SyncBatchNorm::new(&vs.root(), 2, SyncBatchNorm::DEFAULT, &group)?;
            let _ = norm.forward_t(&Tensor::ones(shapes[rank.rank()], tch::kind::FLOAT_CPU), true);
            Ok(())
        });
        let error = error.unwrap_err().to_string();
        let told = words.iter().all(|word| error.contains(word));
        assert!(told && !error.contains("panic"), "{error}");
    }
}

#[test]
fn join_with_sync_batch_norm_is_a_mismatch() {
    let error = try_ranks(2, |rank, group| {
        let sizes = ModelConfig { in_features: 64, hidden: vec![4], ..ModelConfig::default() };
        let config = ModelConfig { kind: ModelKind::Cnn, ..sizes };
        let (vs, model) = config.build(Device::Cpu, 1)?;
        let model = model.convert_sync_batchnorm(&group);
        let mut ddp = DistributedDataParallel::new(model, &vs, group, DdpOptions::default())?;
        let images = Tensor::ones([2, 64], (Kind::Float, Device::Cpu));
        ddp.join(JoinOptions::default(), |ddp| {
            for _ in 0..=rank.rank() {
                ddp.backward(&ddp.forward(&images).square().mean(Kind::Float))?;
            }
            Ok(())
        })
    })
    .unwrap_err();
    assert!(error.to_string().contains("differs between ranks"), "{error}");
}
