//! Your own program: lesson 7's model and data set, with all flags, files and commands of `ddp-mp`.
//!
//!     cargo run --release --example own_program

use std::process::ExitCode;

use ddp_mp::App;
use ddp_mp::prelude::*;
use tch::nn::{self, Path};

/// Returns points in the plane on two spiral arms. The target of a point is the number of its arm.
fn spirals(points_per_arm: i64) -> anyhow::Result<TensorDataset> {
    let along = Tensor::linspace(0.3, 2.5, points_per_arm, tch::kind::FLOAT_CPU);
    let arm = |turn: f64| {
        let angle = &along * 2.5 + turn;
        Tensor::stack(&[&along * angle.cos(), &along * angle.sin()], 1)
    };
    let inputs = Tensor::cat(&[arm(0.), arm(std::f64::consts::PI)], 0);
    let targets = Tensor::arange(2 * points_per_arm, tch::kind::INT64_CPU) // 0, 0, ..., 1, 1
        .divide_scalar_mode(points_per_arm, "floor");
    Ok(TensorDataset::new(inputs, targets)?)
}

/// Returns the model. Any `Module` with its parameters below the path works.
fn model(path: &Path) -> nn::Sequential {
    nn::seq()
        .add(nn::linear(path / "in", 2, 64, Default::default()))
        .add_fn(|x| x.tanh())
        .add(nn::linear(path / "middle", 64, 64, Default::default()))
        .add_fn(|x| x.tanh())
        .add(nn::linear(path / "out", 64, 2, Default::default()))
}

fn main() -> ExitCode {
    App::new("spirals", env!("CARGO_PKG_VERSION"))
        .model(|path, _| model(path))
        .dataset(|_| spirals(1000))
        .loss(|output, targets| output.cross_entropy_for_logits(targets))
        .metric("accuracy", |output, targets| output.accuracy_for_logits(targets))
        .defaults("max-epochs = 16\nbatch-size = 50\nlr = 0.5\nval-fraction = 0.1")
        .run()
}
