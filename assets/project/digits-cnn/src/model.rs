//! The model. Any `Module` or `ModuleT` of tch that creates its parameters with the path works.

use ddp_mp::prelude::*;
use tch::nn::{self, Path, SequentialT};

/// Number of pixels in a row of an image, and in a column.
pub const SIDE: i64 = 8;
/// Number of classes.
pub const DIGITS: i64 = 10;

/// Returns two convolutions, each of which halves the image, and a dense layer. `dropout` draws from the rank's own
/// random numbers.
pub fn net(path: &Path, channels: i64, dropout: Dropout) -> SequentialT {
    let same_size = nn::ConvConfig {
        padding: 1,
        ..Default::default()
    };
    let conv = |name, inputs, outputs| nn::conv2d(path / name, inputs, outputs, 3, same_size);
    let features = 2 * channels * (SIDE / 4) * (SIDE / 4);
    let head = nn::linear(path / "head", features, DIGITS, Default::default());
    nn::seq_t()
        .add_fn(|x| x.view([-1, 1, SIDE, SIDE]))
        .add(conv("0", 1, channels))
        .add_fn(|x| x.relu().max_pool2d_default(2))
        .add(conv("1", channels, 2 * channels))
        .add_fn(|x| x.relu().max_pool2d_default(2).flat_view())
        .add(dropout)
        .add(head)
}
