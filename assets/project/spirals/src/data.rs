//! The data set: points in the plane on two spiral arms. The target of a point is the number of its arm.

use ddp_mp::prelude::*;
use tch::kind::{FLOAT_CPU, INT64_CPU};

/// Number of values of a sample.
pub const INPUTS: i64 = 2;
/// Number of classes.
pub const CLASSES: i64 = 2;

/// Returns `points` points on each arm.
pub fn spirals(points: i64) -> anyhow::Result<TensorDataset> {
    let along = Tensor::linspace(0.3, 2.5, points, FLOAT_CPU);
    let arm = |turn: f64| {
        let angle = &along * 2.5 + turn;
        Tensor::stack(&[&along * angle.cos(), &along * angle.sin()], 1)
    };
    let inputs = Tensor::cat(&[arm(0.), arm(std::f64::consts::PI)], 0);
    let targets = Tensor::arange(CLASSES * points, INT64_CPU); // 0, 0, ..., 1, 1
    Ok(TensorDataset::new(
        inputs,
        targets.divide_scalar_mode(points, "floor"),
    )?)
}
