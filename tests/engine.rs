//! What the DDP engine does with gradients: overlap, accumulation, unused parameters, hooks.

use std::cell::RefCell;
use std::rc::Rc;

use ddp_mp::ddp::{JoinOptions, hook_fn};
use ddp_mp::models::{Activation, Model, ModelConfig, ModelKind};
use ddp_mp::{
    AdamW, AdamWOptions, DdpOptions, DistributedDataParallel, Optimizer, ProcessGroup, Rank,
    ReduceOp, Sgd, SgdOptions,
};
use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};

use crate::harness::{buckets_of, ranks, try_ranks, wrapped};
use crate::shared::power_sgd::{PowerSgd, PowerSgdOptions};

/// Caps that give every parameter a bucket of its own.
const TINY: f64 = 1e-9;

fn mlp() -> ddp_mp::Result<(VarStore, Model)> {
    let (kind, activation, hidden) = (ModelKind::Mlp, Activation::Tanh, vec![9, 5]);
    let config = ModelConfig { kind, in_features: 6, activation, hidden, ..ModelConfig::default() };
    let (vs, model) = config.build(Device::Cpu, 1)?;
    // The generator is that of the process: another test that draws without its lock would change the parameters.
    for mut parameter in vs.trainable_variables() {
        let numbers = Tensor::arange(parameter.numel() as i64, (Kind::Float, Device::Cpu));
        let values = ((numbers * 0.91).sin() * 0.4).view_as(&parameter);
        tch::no_grad(|| parameter.copy_(&values));
    }
    Ok((vs, model))
}

fn batch(rank: usize, step: i64, len: i64) -> (Tensor, Tensor) {
    let numbers = Tensor::arange(len * 6, (Kind::Float, Device::Cpu)).view([len, 6]);
    let inputs = (numbers * 0.71 + rank as f64 * 5.3 + step as f64).sin();
    let targets = inputs.sum_dim_intlist([1i64].as_slice(), true, Kind::Float);
    (inputs, targets)
}

/// Trains for five steps, and returns the parameters' bits by name.
fn train(rank: &Rank, group: Rc<ProcessGroup>, options: DdpOptions) -> anyhow::Result<Vec<f32>> {
    let (vs, model) = mlp()?;
    let mut ddp = DistributedDataParallel::new(model, &vs, group, options)?;
    let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
    for step in 0..5 {
        let (inputs, targets) = batch(rank.rank(), step, 8);
        ddp.zero_grad()?;
        let loss = ddp.forward(&inputs).mse_loss(&targets, tch::Reduction::Mean);
        ddp.backward(&loss)?;
        optimizer.step(0.1)?;
    }
    flat(vs.trainable_variables().iter().map(Tensor::detach))
}

/// All numbers of these tensors.
fn flat(tensors: impl Iterator<Item = Tensor>) -> anyhow::Result<Vec<f32>> {
    let all: Vec<Tensor> = tensors.map(|it| it.flatten(0, -1)).collect();
    Ok(Vec::try_from(Tensor::cat(&all, 0))?)
}

#[test]
fn overlap_and_bucket_size_change_no_bit() {
    for world_size in 1..=3 {
        let with = |overlap, mb| {
            let options = DdpOptions { overlap, ..buckets_of(mb) };
            let all = ranks(world_size, move |rank, group| train(rank, group, options.clone()));
            assert!(all.iter().all(|one| one == &all[0]), "replicas are the same");
            all[0].clone()
        };
        let expected = with(Some(false), 25.);
        for overlap in [Some(true), Some(false), None] {
            for mb in [TINY, 200e-6, 25.] {
                assert_eq!(with(overlap, mb), expected, "{world_size} ranks, {overlap:?}, {mb}");
            }
        }
    }
}

#[test]
fn overlap_reduces_buckets_before_backward_ends() {
    let seen = ranks(2, |rank, group| {
        let (vs, model) = mlp()?;
        let mut order = Vec::new();
        for overlap in [true, false] {
            let options = DdpOptions { overlap: Some(overlap), ..buckets_of(TINY) };
            let mut ddp = DistributedDataParallel::new((), &vs, group.clone(), options)?;
            let reduced = Rc::new(RefCell::new(Vec::new()));
            let notes = reduced.clone();
            let first = vs.trainable_variables().remove(0);
            ddp.register_comm_hook(hook_fn("noting", move |bucket, group| {
                // Whether the first layer's gradient is there yet: it comes last.
                let begun = first.grad().defined();
                notes.borrow_mut().push((bucket.index, begun));
                group.all_reduce(bucket.gradients, ReduceOp::Avg)
            }))?;
            let (inputs, targets) = batch(rank.rank(), 0, 8);
            ddp.zero_grad()?;
            ddp.backward(&model.forward_t(&inputs, true).mse_loss(&targets, tch::Reduction::Mean))?;
            let statistics = ddp.statistics();
            assert_eq!(statistics.bucket_bytes.len(), 6);
            assert_eq!(statistics.overlapped > 0., overlap, "{statistics:?}");
            assert!(statistics.communication_us <= statistics.backward_us);
            order.push(reduced.take());
        }
        Ok(order)
    });
    for order in seen {
        let indices = |notes: &[(usize, bool)]| notes.iter().map(|n| n.0).collect::<Vec<_>>();
        assert_eq!(indices(&order[0]), [0, 1, 2, 3, 4, 5], "in the order of their index");
        assert_eq!(indices(&order[1]), [0, 1, 2, 3, 4, 5]);
        assert!(!order[0][0].1, "the first bucket goes out before the last gradient has come");
        assert!(order[1][0].1, "all gradients have come");
    }
}

#[test]
fn buckets_are_rebuilt_in_the_gradient_order_of_rank_0() {
    let all = ranks(2, |_, group| {
        let (parameters, mut ddp) = wrapped(&group, ["a", "b", "c"], &[3], buckets_of(TINY))?;
        let sizes = Rc::new(RefCell::new(Vec::new()));
        let notes = sizes.clone();
        ddp.register_comm_hook(hook_fn("noting", move |bucket, group| {
            notes.borrow_mut().push(bucket.gradients.double_value(&[0]));
            group.all_reduce(bucket.gradients, ReduceOp::Sum)
        }))?;
        let mut steps = Vec::new();
        for _ in 0..2 {
            ddp.zero_grad()?;
            // What is used last has its gradient first: c, a, b; the factors tell them apart.
            let [a, b, c] = &parameters;
            let loss = ((b * 2.).cumsum(0, Kind::Float).exp() * 0.).sum(Kind::Float)
                + (b * 2.).sum(Kind::Float);
            let loss = (loss * 1.) + (a * 1.).sum(Kind::Float);
            let loss = (loss * 1.) + (c * 3.).sum(Kind::Float);
            ddp.backward(&loss)?;
            steps.push(sizes.take());
        }
        Ok(steps)
    });
    assert_eq!(all[0], all[1]);
    assert_eq!(all[0][0], [3., 2., 1.], "the last parameter first");
    assert_eq!(all[0][1], [3., 1., 2.], "as the gradients came");
}

#[test]
fn unused_parameters_are_named_on_every_rank() {
    let error = try_ranks(3, |rank, group| {
        let vs = VarStore::new(rank.device());
        let root = vs.root();
        let used = root.var("used", &[2], nn::Init::Const(1.));
        let layer = &root / "layer";
        let [left, right] =
            ["left", "right"].map(|name| layer.var(name, &[2], nn::Init::Const(1.)));
        let mut ddp = DistributedDataParallel::new((), &vs, group, DdpOptions::default())?;
        ddp.backward(&(&used * &left * &right).sum(Kind::Float))?;
        let loss = if rank.rank() == 1 { used } else { used * left * right };
        let result = ddp.backward(&loss.sum(Kind::Float));
        let text = result.as_ref().unwrap_err().to_string();
        assert!(text.contains("no gradient on rank 1"), "{text}");
        assert!(text.contains("layer.left, layer.right; use them"), "{text}");
        Ok(result?)
    })
    .unwrap_err();
    assert_eq!(error.failure.rank, 1, "{error}");
    assert!(error.also_failed.is_empty(), "{error}");
}

#[test]
fn averaged_grad_refuses_gradients_of_no_sync() {
    ranks(2, |_, group| {
        let ([weight], mut ddp) = wrapped(&group, ["weight"], &[3], DdpOptions::default())?;
        let no_sync = ddp.no_sync();
        drop(ddp.no_sync()); // one within another ends nothing
        ddp.backward(&weight.sum(Kind::Float))?;
        drop(no_sync);
        let error = ddp.averaged_grad("weight").unwrap_err().to_string();
        assert!(error.contains("the last backward was within no_sync"), "{error}");
        ddp.backward(&weight.sum(Kind::Float))?;
        assert_eq!(ddp.averaged_grad("weight")?.unwrap(), Tensor::from_slice(&[2f32; 3]));
        Ok(())
    });
}

/// A bucket without elements is not reduced, so it cannot be the last one that a hook sees.
#[test]
fn comm_hook_sees_the_last_bucket_of_each_step() {
    ranks(2, |rank, group| {
        let vs = VarStore::new(rank.device());
        // Buckets begin with the parameter that was created last.
        let empty = vs.root().var("empty", &[0], nn::Init::Const(1.));
        let weights = ["a", "b"].map(|name| vs.root().var(name, &[3], nn::Init::Const(1.)));
        let options = buckets_of(TINY);
        let mut ddp = DistributedDataParallel::new((), &vs, group, options)?;
        let seen = Rc::new(RefCell::new(Vec::new()));
        let notes = seen.clone();
        ddp.register_comm_hook(hook_fn("noting", move |bucket, group| {
            notes.borrow_mut().push(bucket.is_last);
            group.all_reduce(bucket.gradients, ReduceOp::Sum)
        }))?;
        for _ in 0..2 {
            ddp.zero_grad()?;
            ddp.backward(&(&weights[0] + &weights[1] + empty.sum(Kind::Float)).sum(Kind::Float))?;
        }
        assert_eq!(*seen.borrow(), [false, true, false, true]);
        Ok(())
    });
}

#[test]
fn comm_hook_failure_is_one_of_its_rank() {
    for (overlap, panics, told) in [
        (true, false, "rank 1 (CPU:1) failed in its function: the cause"),
        (false, false, "rank 1 (CPU:1) failed in its function: the cause"),
        (true, true, "rank 1 (CPU:1) failed in its function: panicked"),
    ] {
        let error = try_ranks(2, move |rank, group| {
            let options = DdpOptions { overlap: Some(overlap), ..DdpOptions::default() };
            let ([weight], mut ddp) = wrapped(&group, ["weight"], &[3], options)?;
            let me = rank.rank();
            ddp.register_comm_hook(hook_fn("failing", move |bucket, group| {
                assert!(me == 0 || !panics, "on purpose");
                if me == 1 {
                    return Err(ddp_mp::Error::usage("the cause".into()));
                }
                group.all_reduce(bucket.gradients, ReduceOp::Sum)
            }))?;
            Ok(ddp.backward(&weight.sum(Kind::Float))?)
        });
        let error = error.unwrap_err().to_string();
        assert!(if panics { error.starts_with(told) } else { error == told }, "{error}");
    }
}

#[test]
fn backward_that_bypasses_ddp_is_refused() {
    ranks(2, |rank, group| {
        let ([weight], mut ddp) = wrapped(&group, ["weight"], &[3], DdpOptions::default())?;
        let loss = || weight.sum(Kind::Float) * (rank.rank() as i64 + 1);
        let error = loss().f_backward().unwrap_err().to_string();
        assert!(error.contains("call ddp.backward instead"), "{error}");
        let elsewhere = loss();
        let on_another = move || elsewhere.f_backward().unwrap_err().to_string();
        let error = std::thread::scope(|scope| scope.spawn(on_another).join().unwrap());
        assert!(error.contains("run it on the thread of their rank"), "{error}");
        ddp.zero_grad()?;
        ddp.backward(&loss())?; // nothing is left of the refused ones
        assert_eq!(weight.grad().double_value(&[0]), 1.5);
        Ok(())
    });
}

/// What ranks with so many batches each come to: one weight, whose gradient is the batch's number.
fn joined(batches: &'static [usize], options: JoinOptions, ddp_options: &DdpOptions) -> Vec<f64> {
    let ddp_options = ddp_options.clone();
    ranks(batches.len(), move |rank, group| {
        let ([weight, more], mut ddp) =
            wrapped(&group, ["weight", "more"], &[3], ddp_options.clone())?;
        let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
        for _ in 0..2 {
            ddp.join(options, |ddp| {
                for number in 0..batches[rank.rank()] {
                    ddp.zero_grad()?;
                    ddp.backward(
                        &((&weight + &more * 0.5) * (number + 1) as f64).sum(Kind::Float),
                    )?;
                    optimizer.step(1.)?;
                }
                Ok(())
            })?;
        }
        Ok(1. - weight.double_value(&[0]))
    })
}

#[test]
fn join_shadows_the_collectives_of_active_ranks() {
    let tiny = buckets_of(TINY);
    let find = DdpOptions { find_unused_parameters: true, ..DdpOptions::default() };
    let fixed = DdpOptions { static_graph: true, ..DdpOptions::default() };
    for options in [DdpOptions::default(), tiny, find, fixed] {
        for overlap in [Some(true), Some(false)] {
            let options = DdpOptions { overlap, ..options.clone() };
            // Divided by three always: (1 + 1) / 3 + (2 + 2) / 3 + 3 / 3, twice.
            let all = joined(&[0, 2, 3], JoinOptions::default(), &options);
            assert!(all.iter().all(|w| (w - 2. * 3.).abs() < 1e-5), "{all:?}, {options:?}");
            // Divided by those who are there: 1 + 2 + 3.
            let by_active =
                JoinOptions { divide_by_initial_world_size: false, ..JoinOptions::default() };
            let all = joined(&[3, 0, 2], by_active, &options);
            assert!(all.iter().all(|w| (w - 2. * 6.).abs() < 1e-5), "{all:?}, {options:?}");
            assert!(all.iter().all(|w| w.to_bits() == all[0].to_bits()), "the same model");
        }
    }
    assert_eq!(joined(&[0, 0], JoinOptions::default(), &DdpOptions::default()), [0., 0.]);
}

/// The last rank counts twice in its second backward. A gradient that this one does not use stays as it is.
#[test]
fn join_keeps_the_gradient_of_a_parameter_that_is_not_used() {
    ranks(2, |rank, group| {
        let options = DdpOptions { find_unused_parameters: true, ..DdpOptions::default() };
        let ([a, b], mut ddp) = wrapped(&group, ["a", "b"], &[1], options)?;
        let by_active =
            JoinOptions { divide_by_initial_world_size: false, ..JoinOptions::default() };
        ddp.join(by_active, |ddp| {
            ddp.backward(&(&a + &b).sum(Kind::Float))?;
            if rank.rank() == 1 {
                ddp.backward(&a.sum(Kind::Float))?;
                assert_eq!([&a, &b].map(|it| it.grad().double_value(&[0])), [2., 1.]);
            }
            Ok(())
        })
    });
}

#[test]
fn join_can_throw_on_uneven_inputs() {
    let error = try_ranks(3, |rank, group| {
        let ([weight], mut ddp) = wrapped(&group, ["weight"], &[3], DdpOptions::default())?;
        let options = JoinOptions { throw_on_early_termination: true, ..JoinOptions::default() };
        ddp.join(options, |ddp| {
            for _ in 0..=rank.rank() {
                ddp.backward(&weight.sum(Kind::Float))?;
            }
            Ok(())
        })
    })
    .unwrap_err();
    assert!(error.to_string().contains("1 of 3 ranks have run out of inputs"), "{error}");
}

#[test]
fn graph_from_before_a_bucket_rebuild_keeps_its_values() {
    ranks(2, |rank, group| {
        let gradients = |mb: f64| -> anyhow::Result<Vec<f32>> {
            let (vs, model) = mlp()?;
            let options = buckets_of(mb);
            let mut ddp = DistributedDataParallel::new(model, &vs, group.clone(), options)?;
            let loss = |step| {
                let (inputs, targets) = batch(rank.rank(), step, 8);
                ddp.forward(&inputs).mse_loss(&targets, tch::Reduction::Mean)
            };
            let (first, second) = (loss(0), loss(1));
            ddp.backward(&first)?; // and the buckets are put together anew
            ddp.zero_grad()?;
            ddp.backward(&second)?;
            flat(vs.trainable_variables().iter().map(Tensor::grad))
        };
        assert_eq!(gradients(TINY)?, gradients(25.)?);
        Ok(())
    });
}

#[test]
fn static_graph_that_changes_is_an_error() {
    for (uses_other_first, told) in [
        (true, "because the loss does not depend on them: other"),
        (false, "static_graph: `other` had no gradient in the first step"),
    ] {
        let error = try_ranks(2, move |_, group| {
            let options = DdpOptions { static_graph: true, ..DdpOptions::default() };
            let ([used, other], mut ddp) = wrapped(&group, ["used", "other"], &[2], options)?;
            let both = (&used * &other).sum(Kind::Float);
            let one = used.sum(Kind::Float);
            for loss in if uses_other_first { [both, one] } else { [one, both] } {
                ddp.backward(&loss)?;
            }
            Ok(())
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
    }
}

#[test]
fn parameter_used_only_within_no_sync_counts_as_used() {
    for find_unused_parameters in [true, false] {
        ranks(2, move |_, group| {
            let options = DdpOptions { find_unused_parameters, ..DdpOptions::default() };
            let ([a, b], mut ddp) = wrapped(&group, ["a", "b"], &[2], options)?;
            for _ in 0..2 {
                ddp.zero_grad()?;
                let guard = ddp.no_sync();
                ddp.backward(&(&a * &b).sum(Kind::Float))?;
                drop(guard);
                ddp.backward(&a.sum(Kind::Float))?;
                assert_eq!(Vec::<f32>::try_from(a.grad())?, [2.; 2]);
                assert_eq!(Vec::<f32>::try_from(b.grad())?, [1.; 2]);
            }
            Ok(())
        });
    }
}

#[test]
fn comm_hook_may_replace_the_bucket_tensor() {
    ranks(2, |rank, group| {
        let ([weight], mut ddp) = wrapped(&group, ["weight"], &[3], DdpOptions::default())?;
        ddp.register_comm_hook(hook_fn("another", |bucket, group| {
            let mut other = bucket.gradients.copy();
            group.all_reduce(&mut other, ReduceOp::Avg)?;
            *bucket.gradients = other;
            Ok(())
        }))?;
        for _ in 0..2 {
            ddp.zero_grad()?;
            ddp.backward(&(&weight * (rank.rank() as f64 + 1.)).sum(Kind::Float))?;
            assert_eq!(Vec::<f32>::try_from(weight.grad())?, [1.5; 3]);
        }
        Ok(())
    });
}

#[test]
fn model_can_be_wrapped_again() {
    ranks(2, |rank, group| {
        let vs = VarStore::new(rank.device());
        let weight = vs.root().var("weight", &[3], nn::Init::Const(1.));
        let wrap = || DistributedDataParallel::new((), &vs, group.clone(), DdpOptions::default());
        let mut ddp = wrap()?;
        for _ in 0..3 {
            ddp.zero_grad()?;
            ddp.backward(&(&weight * (rank.rank() as f64 + 1.)).sum(Kind::Float))?;
            assert_eq!(Vec::<f32>::try_from(weight.grad())?, [1.5; 3]);
            ddp = wrap()?; // the new one is there before the old one goes
        }
        Ok(())
    });
}

#[test]
fn ddp_options_that_differ_between_ranks_are_refused() {
    let error = try_ranks(2, |rank, group| {
        let bucket_cap_mb = 1. + rank.rank() as f64;
        let options = DdpOptions { bucket_cap_mb, ..DdpOptions::default() };
        Ok(wrapped(&group, ["weight"], &[3], options).map(drop)?)
    })
    .unwrap_err();
    let message = error.to_string();
    assert!(message.contains("rank 0 has DdpOptions { bucket_cap_mb: 1.0,"), "{message}");
    assert!(message.contains("rank 1 has DdpOptions { bucket_cap_mb: 2.0,"), "{message}");
}

#[test]
fn parameter_with_two_names_is_refused_with_both() {
    ranks(1, |rank, group| {
        let vs = VarStore::new(rank.device());
        let root = vs.root();
        let one = root.var("one", &[3], nn::Init::Const(1.));
        let _ = root.add("two", one.shallow_clone(), true);
        let result = DistributedDataParallel::new((), &vs, group, DdpOptions::default());
        let error = result.err().map_or_else(String::new, |error| error.to_string());
        assert!(error.contains("`one` and `two` are one parameter"), "{error}");
        Ok(())
    });
}

#[test]
fn static_graph_may_differ_between_ranks() {
    ranks(2, |rank, group| {
        for overlap in [true, false] {
            let options =
                DdpOptions { static_graph: true, overlap: Some(overlap), ..buckets_of(TINY) };
            let ([used, sometimes], mut ddp) =
                wrapped(&group, ["used", "sometimes"], &[2], options)?;
            for step in 0..4 {
                ddp.zero_grad()?;
                let loss = if rank.rank() == 0 { used.shallow_clone() } else { &used + &sometimes };
                ddp.backward(&loss.sum(Kind::Float))?;
                assert_eq!(Vec::<f32>::try_from(used.grad())?, [1.; 2], "step {step}");
                assert_eq!(Vec::<f32>::try_from(sometimes.grad())?, [0.5; 2], "step {step}");
            }
        }
        Ok(())
    });
}

#[test]
fn comm_hook_output_for_an_unused_parameter_is_ignored() {
    ranks(2, |_, group| {
        let options = DdpOptions { find_unused_parameters: true, ..DdpOptions::default() };
        let ([one, other], mut ddp) = wrapped(&group, ["one", "other"], &[8, 8], options)?;
        // With what it could not send before it comes a step later.
        ddp.register_comm_hook(Box::new(PowerSgd::new(PowerSgdOptions {
            start_iter: 0,
            ..PowerSgdOptions::default()
        })))?;
        let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
        let eye = Tensor::eye(8, (Kind::Float, Device::Cpu));
        let mut before = other.detach().copy();
        for step in 0..4 {
            ddp.zero_grad()?;
            let loss = if step < 2 { &one + &other } else { one.shallow_clone() };
            ddp.backward(&(loss * &eye).sum(Kind::Float))?;
            assert_eq!(other.grad().defined(), step < 2);
            if step == 2 {
                before = other.detach().copy();
                let alone = one.grad().norm().double_value(&[]);
                let norm = ddp.clip_grad_norm(1e9)?.double_value(&[]);
                assert!((norm - alone).abs() < 1e-6, "{norm} {alone}");
            }
            optimizer.step(0.1)?;
        }
        assert_eq!(other.detach(), before);
        Ok(())
    });
}

#[test]
fn sparse_gradients_become_dense() {
    ranks(2, |rank, group| {
        let vs = VarStore::new(rank.device());
        let config = nn::EmbeddingConfig { sparse: true, ..Default::default() };
        let table = nn::embedding(vs.root(), 4, 2, config);
        let mut ddp = DistributedDataParallel::new((), &vs, group, DdpOptions::default())?;
        for _ in 0..2 {
            ddp.zero_grad()?;
            let index = Tensor::from_slice(&[rank.rank() as i64, 3]);
            for is_last in [false, false, true] {
                let no_sync = (!is_last).then(|| ddp.no_sync());
                ddp.backward(&table.forward(&index).sum(Kind::Float))?;
                drop(no_sync);
            }
            let rows = table.ws.grad().sum_dim_intlist([1i64].as_slice(), false, Kind::Float);
            assert_eq!(Vec::<f32>::try_from(rows)?, [3., 3., 0., 6.]);
        }
        Ok(())
    });
}

#[test]
fn clip_grad_norm_without_gradients_returns_zero() {
    ranks(1, |_, group| {
        let ([weight], mut ddp) = wrapped(&group, ["weight"], &[4], DdpOptions::default())?;
        ddp.backward(&weight.sum(Kind::Float))?;
        assert_eq!(ddp.clip_grad_norm(9.)?.double_value(&[]), 2.);
        ddp.zero_grad()?;
        assert_eq!(ddp.clip_grad_norm(9.)?.double_value(&[]), 0.);
        Ok(())
    });
}

#[test]
fn optimizer_step_on_unaveraged_gradients_is_refused() {
    ranks(2, |_, group| {
        let ([weight], mut ddp) = wrapped(&group, ["weight"], &[2], DdpOptions::default())?;
        let mut sgd = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
        let mut adamw = AdamW::new(ddp.flat_buffers(), AdamWOptions::default())?;
        let optimizers: [&mut dyn Optimizer; 2] = [&mut sgd, &mut adamw];
        for optimizer in optimizers {
            ddp.zero_grad()?;
            let no_sync = ddp.no_sync();
            ddp.backward(&weight.sum(Kind::Float))?;
            drop(no_sync);
            let error = optimizer.step(1.).unwrap_err().to_string();
            let told = "call the last backward before a step outside of no_sync";
            assert!(error.contains(told), "{error}");
            assert_eq!(weight.double_value(&[0]), 1.);
        }
        ddp.backward(&weight.sum(Kind::Float))?; // both, averaged
        sgd.step(1.)?;
        assert_eq!(weight.double_value(&[0]), -1.);
        Ok(())
    });
}
