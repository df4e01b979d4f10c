//! The model. Any `Module` with its parameters in a `VarStore` works.

use tch::nn::{self, Module, VarStore};

use crate::data::{CLASSES, INPUTS};

/// Returns a network with one hidden layer.
pub fn model(vs: &VarStore) -> impl Module + use<> {
    let root = vs.root();
    nn::seq()
        .add(nn::linear(&root / "hidden", INPUTS, 64, Default::default()))
        .add_fn(|x| x.tanh())
        .add(nn::linear(&root / "out", 64, CLASSES, Default::default()))
}
