//! The outputs of named layers, for the fingerprints of a run.

use std::cell::RefCell;
use std::fmt::Display;

use tch::Tensor;

/// A function that gets the name of a layer and its output.
pub(crate) type WatchOutput = Box<dyn FnMut(String, &Tensor)>;

thread_local! {
    /// What a forward pass on this rank's thread tells its outputs to.
    static WATCH: RefCell<Option<WatchOutput>> = const { RefCell::new(None) };
}

/// Tells whoever takes fingerprints of this rank what the layer with this name has returned. If nobody does, nothing happens.
///
/// Call it in the forward pass of your model. The comparison of two runs then names the first layer whose output differs. With the
/// names of PyTorch's `named_modules` this works for a run of PyTorch, too.
///
/// ```
/// # use ddp_mp_engine as ddp_mp;
/// use ddp_mp::models::layer_output;
/// use tch::nn::{Linear, Module};
/// use tch::Tensor;
///
/// #[derive(Debug)]
/// struct TwoLayers {
///     first: Linear,
///     second: Linear,
/// }
///
/// impl Module for TwoLayers {
///     fn forward(&self, inputs: &Tensor) -> Tensor {
///         let hidden = self.first.forward(inputs);
///         layer_output("first", &hidden);
///         let output = self.second.forward(&hidden.relu());
///         layer_output("second", &output);
///         output
///     }
/// }
/// ```
pub fn layer_output(layer: impl Display, output: &Tensor) {
    WATCH.with_borrow_mut(|watch| {
        if let Some(watch) = watch {
            watch(layer.to_string(), output);
        }
    });
}

/// Calls `watch` with each output of this thread, until [`stop_watching_outputs`].
pub(crate) fn watch_outputs(watch: WatchOutput) {
    WATCH.set(Some(watch));
}

/// Stops it.
pub(crate) fn stop_watching_outputs() {
    WATCH.set(None);
}
