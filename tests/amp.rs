//! Mixed precision: autocast of one thread, and steps that all ranks skip.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use ddp_mp::ddp::Compress;
use ddp_mp::ffi::{Autocast, backward};
use ddp_mp::models::{ModelConfig, ModelKind};
use ddp_mp::optim::{GradScaler, GradScalerOptions};
use ddp_mp::{
    AdamW, AdamWOptions, DdpOptions, DistributedDataParallel, Optimizer, Sgd, SgdOptions,
};
use serde_json::{Value, json};
use tch::nn::VarStore;
use tch::{Device, Kind, Reduction, Tensor};

use crate::harness::{buckets_of, last_event, ranks, run, run_to, some_of, wrapped};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// What products of matrices are computed in now, on this thread.
fn kind_now() -> Kind {
    let matrix = Tensor::eye(2, FLOAT);
    matrix.matmul(&matrix).kind()
}

#[test]
fn autocast_applies_to_its_thread_until_dropped() {
    let outer = Autocast::new(Device::Cpu, Kind::BFloat16).unwrap();
    assert_eq!(kind_now(), Kind::BFloat16);
    thread::scope(|scope| {
        scope.spawn(|| assert_eq!(kind_now(), Kind::Float));
    });
    {
        let _inner = Autocast::new(Device::Cpu, Kind::Half).unwrap();
        assert_eq!(kind_now(), Kind::Half);
    }
    assert_eq!(kind_now(), Kind::BFloat16);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _inner = Autocast::new(Device::Cpu, Kind::Half).unwrap();
        panic!("on purpose");
    }));
    assert!(panicked.is_err());
    assert_eq!(kind_now(), Kind::BFloat16);
    drop(outer);
    assert_eq!(kind_now(), Kind::Float);
    let error = Autocast::new(Device::Cpu, Kind::Int).unwrap_err().to_string();
    assert!(error.contains("autocast to Int: use BFloat16 or Half"), "{error}");
}

/// With libtorch's cache its gradients would be added in bfloat16, where 256 + 1 is 256.
#[test]
fn autocast_weight_used_twice_accumulates_in_float32() {
    let weight = Tensor::ones([1, 1], FLOAT).set_requires_grad(true);
    let sum = {
        let _autocast = Autocast::new(Device::Cpu, Kind::BFloat16).unwrap();
        let (large, small) = (Tensor::full([1, 1], 256., FLOAT), Tensor::ones([1, 1], FLOAT));
        large.matmul(&weight).to_kind(Kind::Float) + small.matmul(&weight)
    };
    backward(&sum.sum(Kind::Float)).unwrap();
    assert_eq!((weight.grad().kind(), f64::try_from(weight.grad()).unwrap()), (Kind::Float, 257.));
}

/// What the parameters are, bit for bit.
fn parameters(vs: &VarStore) -> Vec<Vec<f32>> {
    let flat = |tensor: &Tensor| Vec::try_from(tensor.detach().flatten(0, -1)).unwrap();
    vs.trainable_variables().iter().map(flat).collect()
}

/// What an optimizer keeps, bit for bit.
fn kept(optimizer: &dyn Optimizer) -> Vec<Vec<f32>> {
    let state = optimizer.state().unwrap();
    let tensors = state.iter().flat_map(|state| state.tensors.values());
    tensors.map(|tensor| Vec::try_from(tensor.flatten(0, -1)).unwrap()).collect()
}

#[test]
fn nonfinite_gradient_on_one_rank_skips_the_step_on_all() {
    // 1e5 is too large for the float16 that a gradient is sent in, and for nothing else.
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let cases = [(false, inf), (false, nan), (true, inf), (true, 1e5)];
    for (compressed, spoiled) in cases {
        for adamw in [false, true] {
            let all = ranks(3, move |rank, group| {
                let (kind, hidden) = (ModelKind::Mlp, vec![8, 8]);
                let config = ModelConfig { kind, hidden, ..ModelConfig::default() };
                let (vs, model) = config.build(Device::Cpu, 1)?;
                let options = buckets_of(1e-9); // one for each parameter
                let mut ddp = DistributedDataParallel::new(model, &vs, group.clone(), options)?;
                if compressed {
                    ddp.register_comm_hook(Box::new(Compress::fp16()))?;
                }
                let buffers = ddp.flat_buffers();
                let mut optimizer: Box<dyn Optimizer> = if adamw {
                    Box::new(AdamW::new(buffers, AdamWOptions::default())?)
                } else {
                    let options =
                        SgdOptions { momentum: 0.9, dampening: 0.5, ..SgdOptions::default() };
                    Box::new(Sgd::new(buffers, options)?)
                };
                let options = GradScalerOptions { init_scale: 64., ..GradScalerOptions::default() };
                let mut scaler = GradScaler::new(ddp.flat_buffers(), group, options)?;
                let mut stepped = Vec::new();
                for step in 0..6 {
                    ddp.zero_grad()?;
                    let inputs = Tensor::full([4, 20], 0.1 * f64::from(step + 1), FLOAT);
                    let targets = Tensor::full([4, 1], rank.rank() as f64, FLOAT);
                    let mut loss = ddp.forward(&inputs).mse_loss(&targets, Reduction::Mean);
                    if [0, 3].contains(&step) && rank.rank() == 1 {
                        loss *= spoiled;
                    }
                    let before = (parameters(&vs), kept(&*optimizer));
                    ddp.backward(&scaler.scale(&loss)?)?;
                    stepped.push(scaler.step(&mut *optimizer, 0.01)?);
                    scaler.update()?;
                    let changed = before != (parameters(&vs), kept(&*optimizer));
                    assert_eq!(changed, stepped[stepped.len() - 1], "step {step}");
                }
                let scale = scaler.state().unwrap().scale;
                Ok((stepped, scale, parameters(&vs), kept(&*optimizer)))
            });
            assert_eq!(all[0].0, [false, true, true, false, true, true], "{compressed} {spoiled}");
            assert_eq!(all[0].1, 16.);
            assert!(all[0].2.iter().flatten().all(|x| x.is_finite()));
            assert!(all.iter().all(|one| one == &all[0]), "replicas are the same");
        }
    }
}

/// A scaler for a linear model, and what it steps.
fn with_scaler(
    options: GradScalerOptions,
    f: impl Fn(&mut GradScaler, &mut Sgd, &VarStore) -> anyhow::Result<()> + Send + Sync + 'static,
) {
    ranks(1, move |rank, group| {
        let config = ModelConfig { in_features: 2, ..ModelConfig::default() };
        let (vs, model) = config.build(rank.device(), 0)?;
        let options_of_ddp = DdpOptions::default();
        let mut ddp = DistributedDataParallel::new(model, &vs, group.clone(), options_of_ddp)?;
        let inputs = Tensor::ones([3, 2], (Kind::Float, rank.device()));
        ddp.backward(&ddp.forward(&inputs).sum(Kind::Float))?;
        let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
        f(&mut GradScaler::new(ddp.flat_buffers(), group, options)?, &mut optimizer, &vs)
    });
}

#[test]
fn scaler_calls_out_of_order_are_refused() {
    with_scaler(GradScalerOptions::default(), |scaler, optimizer, _| {
        let message = |result: ddp_mp::Result<()>| result.unwrap_err().to_string();
        assert!(message(scaler.update()).contains("update needs gradients that were unscaled"));
        scaler.unscale_()?;
        assert!(message(scaler.unscale_()).contains("unscale_ has been called since"));
        scaler.step(optimizer, 0.1)?;
        let again = scaler.step(optimizer, 0.1).map(drop);
        assert!(message(again).contains("step has been called since"));
        scaler.update()?;
        scaler.unscale_()?;
        scaler.update()?; // without a step, as in PyTorch
        assert_eq!(scaler.state().unwrap().growth_tracker, 2);
        Ok(())
    });
}

#[test]
fn scaler_step_before_backward_is_refused() {
    ranks(2, |_, group| {
        let ([weight], mut ddp) = wrapped(&group, ["weight"], &[2], DdpOptions::default())?;
        let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
        let options = GradScalerOptions::default();
        let mut scaler = GradScaler::new(ddp.flat_buffers(), group, options)?;
        ddp.backward(&scaler.scale(&(&weight * f64::INFINITY).sum(Kind::Float))?)?;
        assert!(!scaler.step(&mut optimizer, 0.1)?);
        scaler.update()?;
        ddp.zero_grad()?;
        let error = scaler.step(&mut optimizer, 0.1).unwrap_err().to_string();
        let told = "there has been no backward since gradients were zeroed";
        assert!(error.contains(told), "{error}");
        ddp.backward(&scaler.scale(&weight.sum(Kind::Float))?)?;
        assert!(scaler.step(&mut optimizer, 0.1)?);
        Ok(())
    });
}

#[test]
fn disabled_scaler_only_steps() {
    let options = GradScalerOptions { enabled: false, ..GradScalerOptions::default() };
    with_scaler(options, |scaler, optimizer, vs| {
        let loss = Tensor::from(3f32);
        assert_eq!(scaler.scale(&loss)?, loss);
        let _ = vs.trainable_variables()[0].grad().fill_(f64::INFINITY);
        for _ in 0..2 {
            scaler.unscale_()?;
            assert!(scaler.step(optimizer, 0.1)?);
            scaler.update()?;
        }
        assert!(parameters(vs).iter().flatten().any(|x| x.is_infinite()));
        assert_eq!(scaler.state(), None);
        Ok(())
    });
}

#[test]
fn scaler_state_follows_pytorch_and_invalid_state_is_refused() {
    let options = GradScalerOptions { growth_interval: 3, ..GradScalerOptions::default() };
    with_scaler(options, |scaler, optimizer, _| {
        scaler.step(optimizer, 0.1)?;
        scaler.update()?;
        let state = scaler.state().unwrap();
        let expected = json!({
            "scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3,
            "_growth_tracker": 1
        });
        assert_eq!(serde_json::to_value(state)?, expected);
        for (key, value, complaint) in [
            ("scale", json!(0.0), "scale 0 is not from 2^-24"),
            ("scale", json!(1e39), "is not from 2^-24 to what float32 holds"),
            ("growth_factor", json!(1.0), "growth_factor 1 is not above 1"),
            ("backoff_factor", json!(1.0), "backoff_factor 1 is not between 0 and 1"),
            ("growth_interval", json!(0), "growth_interval is 0"),
            (
                "_growth_tracker",
                json!(3),
                "_growth_tracker of 3, which must be below its growth_interval of 3",
            ),
        ] {
            let mut wrong = expected.clone();
            wrong[key] = value;
            let error = scaler.load_state(&serde_json::from_value(wrong)?).unwrap_err().to_string();
            assert!(error.contains(complaint), "{key}: {error}");
            assert_eq!(scaler.state(), Some(state));
        }
        let other = json!({
            "scale": 8.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2,
            "_growth_tracker": 1
        });
        scaler.load_state(&serde_json::from_value(other)?)?;
        scaler.step(optimizer, 0.1)?;
        scaler.update()?;
        assert_eq!(scaler.state().map(|now| (now.scale, now.growth_tracker)), Some((32., 0)));
        Ok(())
    });
}

#[test]
fn scaler_refuses_float16_parameters_by_name() {
    ranks(1, |rank, group| {
        let vs = VarStore::new(rank.device());
        let half = Tensor::ones([2], (Kind::Half, Device::Cpu)).set_requires_grad(true);
        let _ = vs.root().add("scale", half, true);
        let ddp = DistributedDataParallel::new((), &vs, group.clone(), DdpOptions::default())?;
        let options = GradScalerOptions::default();
        let error = GradScaler::new(ddp.flat_buffers(), group, options).unwrap_err().to_string();
        assert!(error.starts_with("parameter `scale` is float16"), "{error}");
        Ok(())
    });
}

/// The `end` event of a run, and what it said on stderr.
fn end(args: &str) -> (Value, String) {
    let args: Vec<&str> = args.split_whitespace().chain(["--log-format=json"]).collect();
    let (stdout, stderr) = run_to(0, &args);
    (last_event(&stdout), stderr)
}

fn loss(args: &str) -> f64 {
    end(args).0["loss"].as_f64().unwrap()
}

#[test]
fn sync_batch_norm_under_amp_matches_one_rank() {
    let cnn = "--model=cnn --in-features=64 --channels=8,16 --out-features=4 --num-samples=256 \
               --loss=cross-entropy --lr=0.01";
    for amp in some_of(["fp16", "bf16"], 1) {
        let one = loss(&format!("{cnn} --amp={amp} --nproc-per-node=1 --batch-size=16"));
        let sync = format!("{cnn} --amp={amp} --nproc-per-node=2 --batch-size=8 --sync-batch-norm");
        let (sync, own) = (loss(&sync), loss(&sync.replace("--sync-batch-norm", "")));
        println!("{amp}: one rank {one}, two {sync}, two with statistics of their own {own}");
        // float16 skips a step on two ranks which it does not on one.
        assert!((sync - one).abs() < 1e-3, "{amp}: {sync} {one}");
        assert!((own - one).abs() > 2e-3, "{amp}: {own} {one}");
    }
}

#[test]
fn skipped_steps_are_counted_and_reported() {
    // The gradient of the output is twice the error times the scale: more than float16 holds at first.
    let args = "--nproc-per-node=2 --batch-size=1 --num-samples=64 --max-epochs=2 --amp";
    let (end, stderr) = end(&format!("{args}=fp16"));
    let skipped = end["skipped_steps"].as_u64().unwrap();
    let scale = end["scale"].as_f64().unwrap();
    assert!(skipped > 0 && skipped < 10 && end["steps"] == 64, "{end}");
    assert_eq!(scale, 65536. * 0.5f64.powi(skipped as i32));
    let note = format!(
        "ddp-mp: {skipped} of 64 steps skipped: scaled gradients were not finite; the loss scale is {scale} now"
    );
    assert!(stderr.contains(&note), "{stderr}");
    let (end, stderr) = self::end(&format!("{args}=bf16"));
    assert!(end.get("skipped_steps").is_none() && end.get("scale").is_none(), "{end}");
    assert!(!stderr.contains("skipped"), "{stderr}");
}

#[test]
fn run_without_finite_gradients_fails_with_a_remedy() {
    let (code, stdout, stderr) =
        run(&["--nproc-per-node=2", "--model=mlp", "--amp=fp16", "--lr=1e9", "--max-epochs=2"]);
    assert_eq!((code, &stdout[..]), (Some(1), "GPU_Count: 0\n"));
    assert!(stderr.contains("the gradients are not finite even with a loss scale of"), "{stderr}");
    assert!(stderr.contains("use a smaller --lr, --max-grad-norm, or --amp bf16"), "{stderr}");
}
