//! Optimizers on the buckets of a model: state that follows its parameters, groups, clipping.

use ddp_mp::models::{Model, ModelConfig, ModelKind};
use ddp_mp::optim::{OptimizerOptions, ParamSpan, ParameterState};
use ddp_mp::{
    AdamW, AdamWOptions, DdpOptions, DistributedDataParallel, Optimizer, ProcessGroup, Sgd,
    SgdOptions,
};
use std::rc::Rc;
use tch::nn::{Init, VarStore};
use tch::{Device, Kind, Reduction, Tensor};

use crate::harness::{buckets_of, ranks, wrapped};

type Ddp = DistributedDataParallel<Model>;

/// A small MLP; `cap` MiB a bucket.
fn model(group: &Rc<ProcessGroup>, cap: f64) -> anyhow::Result<(VarStore, Ddp)> {
    let hidden = vec![24, 12];
    let config = ModelConfig { kind: ModelKind::Mlp, hidden, ..ModelConfig::default() };
    let (vs, model) = config.build(Device::Cpu, 3)?;
    let options = buckets_of(cap);
    let ddp = DistributedDataParallel::new(model, &vs, group.clone(), options)?;
    Ok((vs, ddp))
}

/// Averaged gradients of a batch that depends on `step` and the rank.
fn backward(ddp: &mut Ddp, step: i64) -> anyhow::Result<()> {
    ddp.zero_grad()?;
    let rank = ddp.group().rank() as i64;
    let inputs = Tensor::arange(8 * 20, (Kind::Float, Device::Cpu)).view([8, 20]);
    let inputs = (inputs * 0.37 + (step * 7 + rank)).sin();
    let targets = inputs.narrow(1, 0, 1) * 2;
    let loss = ddp.forward(&inputs).mse_loss(&targets, Reduction::Mean);
    ddp.backward(&loss)?;
    Ok(())
}

fn optimizers() -> Vec<Box<dyn OptimizerOptions>> {
    let decays = ParamSpan::is_weight;
    let momentum = SgdOptions { momentum: 0.9, ..SgdOptions::default() };
    vec![
        Box::new(SgdOptions::default()),
        Box::new(momentum),
        Box::new(SgdOptions { nesterov: true, weight_decay: 0.1, decays, ..momentum }),
        Box::new(AdamWOptions { decays, ..AdamWOptions::default() }),
    ]
}

#[test]
fn optimizer_state_resumes_in_other_buckets() {
    ranks(2, |_, group| {
        for config in optimizers() {
            let (_vs, mut ddp) = model(&group, 25.)?;
            let mut optimizer = config.build(ddp.flat_buffers())?;
            // A bucket for each parameter: the same numbers lie elsewhere.
            let (_vs2, mut other) = model(&group, 1e-6)?;
            assert!(other.statistics().bucket_bytes.len() > 1);
            let mut first = config.build(other.flat_buffers())?;
            for step in 0..6 {
                backward(&mut ddp, step)?;
                optimizer.step(0.05)?;
                if step == 0 || step == 3 {
                    // Another optimizer, for the same model.
                    let state = first.state()?;
                    first = config.build(other.flat_buffers())?;
                    first.load_state(&state)?;
                }
                backward(&mut other, step)?;
                first.step(0.05)?;
            }
            assert_eq!(ddp.parameters_hash()?, other.parameters_hash()?, "{config:?}");
            let (one, two) = (optimizer.state()?, first.state()?);
            let names: Vec<&str> = one.iter().map(|state| &state.name[..]).collect();
            let expected = ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"];
            assert_eq!(names, expected, "in the order of their creation");
            for (ParameterState { name, tensors }, other) in one.iter().zip(&two) {
                assert_eq!((name, tensors.len()), (&other.name, other.tensors.len()));
                for (key, tensor) in tensors {
                    assert_eq!(tensor, &other.tensors[key], "{name} {key}");
                }
            }
            // From one layout to another.
            optimizer.load_state(&two)?;
            first.load_state(&one)?;
        }
        Ok(())
    });
}

#[test]
fn optimizer_state_that_does_not_fit_is_refused_by_name() {
    ranks(1, |_, group| {
        let (_vs, mut ddp) = model(&group, 25.)?;
        let momentum = SgdOptions { momentum: 0.9, ..SgdOptions::default() };
        let mut sgd = Sgd::new(ddp.flat_buffers(), momentum)?;
        let mut adamw = AdamW::new(ddp.flat_buffers(), AdamWOptions::default())?;
        backward(&mut ddp, 0)?;
        sgd.step(0.1)?;
        adamw.step(0.1)?;
        let refuses = |result: ddp_mp::Result<()>, told: &str| {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        };
        refuses(sgd.load_state(&adamw.state()?), "`exp_avg` for parameter `");
        refuses(adamw.load_state(&sgd.state()?), "`momentum_buffer` for parameter `");
        let mut state = sgd.state()?;
        state[0].name = "9.weight".into();
        refuses(sgd.load_state(&state), "has `9.weight`, which is not a parameter");
        refuses(sgd.load_state(&sgd.state()?[1..]), "has nothing for parameter `0.weight`");
        let mut state = adamw.state()?;
        state[1].tensors.insert("step".into(), Tensor::from(1.5f32));
        refuses(adamw.load_state(&state), "a `step` of 1.5 for parameter `0.bias`");
        let mut state = sgd.state()?;
        state[0].tensors.insert("momentum_buffer".into(), Tensor::from(7f32));
        refuses(sgd.load_state(&state), "of shape [] for parameter `0.weight` of shape");
        let nesterov = SgdOptions { nesterov: true, ..SgdOptions::default() };
        refuses(Sgd::new(ddp.flat_buffers(), nesterov).map(drop), "Nesterov momentum needs");
        Ok(())
    });
}

/// As in PyTorch: what backward has saved is no longer there.
#[test]
fn graph_from_before_a_step_is_refused() {
    ranks(1, |_, group| {
        for config in optimizers() {
            let (_vs, mut ddp) = model(&group, 0.001)?;
            let mut optimizer = config.build(ddp.flat_buffers())?;
            // Buckets are put together anew after the first.
            for step in 0..3 {
                backward(&mut ddp, step)?;
                let inputs = Tensor::ones([4, 20], (Kind::Float, Device::Cpu));
                let old = ddp.module().forward_t(&inputs, true).sum(Kind::Float);
                optimizer.step(0.1)?;
                let error = ddp_mp::ffi::backward(&old).unwrap_err().to_string();
                assert!(error.contains("modified by an inplace operation"), "{config:?}: {error}");
            }
        }
        Ok(())
    });
}

#[test]
fn step_increments_the_version_of_stepped_parameters_only() {
    ranks(1, |_, group| {
        for config in optimizers() {
            let options = DdpOptions { find_unused_parameters: true, ..DdpOptions::default() };
            let ([a, b], mut ddp) = wrapped(&group, ["a", "b"], &[5, 3], options)?;
            let mut optimizer = config.build(ddp.flat_buffers())?;
            for _ in 0..3 {
                ddp.zero_grad()?;
                ddp.backward(&a.square().sum(Kind::Float))?;
                let before = [&a, &b].map(Tensor::internal_version);
                optimizer.step(0.01)?;
                let now = [&a, &b].map(Tensor::internal_version);
                assert!(
                    now[0] > before[0] && now[1] == before[1],
                    "{config:?}: {before:?} {now:?}"
                );
            }
        }
        Ok(())
    });
}

#[test]
fn parameter_without_a_gradient_is_not_stepped() {
    /// Trains `a` in every step and `b` in those of `b_in` only, or `b` alone in as many.
    fn train(
        group: &Rc<ProcessGroup>,
        config: &dyn OptimizerOptions,
        names: &[&str],
        b_in: &[i64],
    ) -> anyhow::Result<Vec<(Tensor, ParameterState)>> {
        let vs = VarStore::new(Device::Cpu);
        let init = |name: &&str| vs.root().var(name, &[5, 3], Init::Const(0.5));
        let parameters: Vec<Tensor> = names.iter().map(init).collect();
        let options = DdpOptions { find_unused_parameters: true, ..DdpOptions::default() };
        let mut ddp = DistributedDataParallel::new((), &vs, group.clone(), options)?;
        let mut optimizer = config.build(ddp.flat_buffers())?;
        for step in 0..9 {
            let used: Vec<&Tensor> = parameters
                .iter()
                .zip(names)
                .filter(|(_, name)| **name == "a" || b_in.contains(&step))
                .map(|(parameter, _)| parameter)
                .collect();
            if used.is_empty() {
                continue;
            }
            // In the first of its steps, rank 1 alone uses `b`.
            let here = if group.rank() == 0 && step == b_in[0] && used.len() > 1 { 1 } else { 9 };
            let mut loss = Tensor::from(0f32);
            for parameter in used.iter().take(here) {
                let (rank, x) = (group.rank() as f64, step as f64);
                // The gradient of `b` is the same whether `a` is there or not.
                loss += (*parameter * (x + 1.) - rank).square().sum(Kind::Float);
            }
            if used.len() == 1 && names == ["b"] && group.rank() == 0 && step == b_in[0] {
                loss *= 0.;
            }
            ddp.zero_grad()?;
            ddp.backward(&loss)?;
            optimizer.step(0.01)?;
        }
        let values = parameters.into_iter().map(|p| p.detach().copy());
        Ok(values.zip(optimizer.state()?).collect())
    }
    ranks(2, |_, group| {
        for config in optimizers() {
            for b_in in [&[2, 3, 6][..], &[0, 8]] {
                let both = train(&group, &*config, &["a", "b"], b_in)?;
                let mut each = train(&group, &*config, &["a"], b_in)?;
                each.extend(train(&group, &*config, &["b"], b_in)?);
                for ((value, state), (alone, kept)) in both.iter().zip(&each) {
                    assert_eq!(value, alone, "{config:?} {b_in:?} {}", state.name);
                    assert!(state.tensors.keys().eq(kept.tensors.keys()));
                    for (key, tensor) in &state.tensors {
                        assert_eq!(tensor, &kept.tensors[key], "{config:?} {b_in:?} {key}");
                    }
                }
            }
            // As in PyTorch, there is no state for what was never stepped.
            let (value, state) = &train(&group, &*config, &["a", "b"], &[100])?[1];
            assert!(state.tensors.is_empty() && *value == Tensor::full_like(value, 0.5));
        }
        Ok(())
    });
}

#[test]
fn biases_do_not_decay_with_the_is_weight_filter() {
    ranks(1, |_, group| {
        for (decays, biases_stay) in
            [(ParamSpan::is_weight as fn(&ParamSpan) -> bool, true), (|_| true, false)]
        {
            let options = SgdOptions { weight_decay: 0.5, decays, ..SgdOptions::default() };
            let configs: [&dyn OptimizerOptions; 2] =
                [&options, &AdamWOptions { weight_decay: 0.5, decays, ..AdamWOptions::default() }];
            for config in configs {
                let (vs, mut ddp) = model(&group, 25.)?;
                let mut optimizer = config.build(ddp.flat_buffers())?;
                optimizer.step(0.1)?; // there are no gradients: nothing happens
                backward(&mut ddp, 0)?;
                ddp.flat_buffers().iter_mut().for_each(|buffer| drop(buffer.gradients.zero_()));
                let before: Vec<Tensor> =
                    vs.trainable_variables().iter().map(|t| t.detach().copy()).collect();
                optimizer.step(0.1)?; // all gradients are zero
                for (before, after) in before.iter().zip(vs.trainable_variables()) {
                    let stays = before.dim() == 1 && biases_stay;
                    let factor = if stays { 1.0 } else { 0.95 };
                    assert!((before * factor).allclose(&after.detach(), 1e-6, 0., false));
                }
            }
        }
        Ok(())
    });
}

#[test]
fn clip_grad_norm_limits_the_norm_equally_on_every_rank() {
    let norms = ranks(3, |_, group| {
        let mut results = Vec::new();
        for cap in [25., 1e-6] {
            let (_vs, mut ddp) = model(&group, cap)?;
            let norm_now = |ddp: &Ddp| {
                let squares =
                    ddp.flat_buffers().into_iter().map(|b| b.gradients.square().sum(Kind::Double));
                squares.map(|square| square.double_value(&[])).sum::<f64>().sqrt()
            };
            backward(&mut ddp, 1)?;
            let before = norm_now(&ddp);
            let norm = ddp.clip_grad_norm(before / 2.)?.double_value(&[]);
            assert!((norm / before - 1.).abs() < 1e-6);
            assert!((norm_now(&ddp) / (before / 2.) - 1.).abs() < 1e-5);
            // Short enough: not a bit changes.
            let halved = norm_now(&ddp);
            let _ = ddp.clip_grad_norm(before)?;
            assert_eq!(norm_now(&ddp), halved);
            results.push(norm.to_bits());
        }
        Ok(results)
    });
    assert!(norms.iter().flatten().all(|norm| norm == &norms[0][0]), "whatever rank or bucket");
}
