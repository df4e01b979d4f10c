//! Optimizers on the buckets of a model: state that follows its parameters.

use ddp_mp::models::{Model, ModelConfig, ModelKind};
use ddp_mp::optim::{OptimizerOptions, ParamSpan, ParameterState};
use ddp_mp::{
    AdamW, AdamWOptions, DdpOptions, DistributedDataParallel, Optimizer, ProcessGroup, Sgd,
    SgdOptions,
};
use std::rc::Rc;
use tch::nn::VarStore;
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
            // As in PyTorch, there is no state for what was never stepped.
            assert!(optimizer.state()?[1].tensors.is_empty(), "{config:?}");
        }
        Ok(())
    });
}
