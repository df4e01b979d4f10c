//! The model. Any `Module` or `ModuleT` of tch that creates its parameters with the path works.

use tch::nn::{self, Path, Sequential};

use crate::data::{CLASSES, INPUTS};

/// Returns a network with one hidden layer.
pub fn net(path: &Path, width: i64) -> Sequential {
    let linear =
        |name, inputs, outputs| nn::linear(path / name, inputs, outputs, Default::default());
    nn::seq()
        .add(linear("hidden", INPUTS, width))
        .add_fn(|x| x.tanh())
        .add(linear("out", width, CLASSES))
}
