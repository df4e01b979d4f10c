//! What DistributedDataParallel costs on one rank: the same loop with it and without, in turns.
//!
//!     cargo bench

#![allow(clippy::print_stdout)]

use std::time::{Duration, Instant};

use ddp_mp::models::{Model, ModelConfig, ModelKind};
use ddp_mp::{Backend, DdpOptions, DistributedDataParallel, Optimizer, Sgd, SgdOptions, spawn};
use tch::nn::{self, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};

const BATCH: i64 = 32;
const LR: f64 = 0.001;
const ROUNDS: usize = 40;

/// How long a step takes: the median of `steps` steps.
fn median(steps: usize, mut step: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let mut times = Vec::with_capacity(steps);
    for _ in 0..steps {
        let began = Instant::now();
        step()?;
        times.push(began.elapsed());
    }
    times.sort_unstable();
    Ok(Duration::as_secs_f64(&times[steps / 2]) * 1e6)
}

fn main() -> anyhow::Result<()> {
    let config = |kind, in_features, out_features, widths: &[i64]| ModelConfig {
        kind,
        in_features,
        out_features,
        hidden: widths.to_vec(),
        ..ModelConfig::default()
    };
    let models = [
        ("linear", config(ModelKind::Linear, 20, 1, &[]), 500),
        ("mlp of 2.1 M", config(ModelKind::Mlp, 20, 1, &[1024, 1024, 1024]), 8),
        ("cnn, 28 x 28", config(ModelKind::Cnn, 28 * 28, 10, &[16, 32]), 8),
    ];
    println!("{:24}{:>14}{:>14}{:>9}", "a step, batch 32", "without DDP", "one rank", "cost");
    for (name, config, steps) in models {
        spawn(1, move |rank| {
            let inputs = Tensor::rand([BATCH, config.in_features], (Kind::Float, Device::Cpu));
            let targets = Tensor::zeros([BATCH], (Kind::Int64, Device::Cpu));
            let loss = |output: Tensor| match config.out_features {
                1 => output.square().mean(Kind::Float),
                _ => output.cross_entropy_for_logits(&targets),
            };

            let (vs, plain) = config.build(rank.device(), 0)?;
            let mut sgd = nn::Sgd::default().build(&vs, LR)?;

            let group = rank.init_process_group(Backend::Threaded)?;
            let (ddp_vs, model): (VarStore, Model) = config.build(rank.device(), 0)?;
            let mut ddp =
                DistributedDataParallel::new(model, &ddp_vs, group, DdpOptions::default())?;
            let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;

            let (mut without, mut with) = (Vec::new(), Vec::new());
            // In turns and the median of the ratios: what else the machine does meets both.
            for _ in 0..=ROUNDS {
                without.push(median(steps, || {
                    sgd.zero_grad();
                    loss(plain.forward_t(&inputs, true)).f_backward()?;
                    sgd.step();
                    Ok(())
                })?);
                with.push(median(steps, || {
                    ddp.zero_grad()?;
                    ddp.backward(&loss(ddp.forward(&inputs)))?;
                    Ok(optimizer.step(LR)?)
                })?);
            }
            let middle = |mut times: Vec<f64>| {
                times.remove(0); // the first round warms up
                times.sort_unstable_by(f64::total_cmp);
                times[times.len() / 2]
            };
            let ratios = with.iter().zip(&without).map(|(with, without)| with / without).collect();
            let (cost, without, with) =
                (100. * (middle(ratios) - 1.), middle(without), middle(with));
            println!("{name:>24}{without:11.1} us{with:11.1} us{cost:+8.1} %");
            Ok(())
        })?;
    }
    Ok(())
}
