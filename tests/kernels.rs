//! Whether libtorch's kernels round here as where PyTorch's values were recorded.

use std::sync::OnceLock;

use tch::{Device, Kind, Tensor};

use crate::harness::ranks;
use crate::parity::{digest, flat, recorded};

/// Whether libtorch rounds here as where PyTorch's values were recorded: some steps of dense layers, convolutions and
/// attention give the same bits. Uses nothing of this crate but a rank, whose operations have one thread.
pub(crate) fn has_recorded_kernels() -> bool {
    static IS_SAME: OnceLock<bool> = OnceLock::new();
    *IS_SAME.get_or_init(|| {
        let digests =
            ranks(1, |_, _| Ok([dense_digest(), convolutions_digest(), attention_digest()]));
        recorded("kernels.json")["rows"][0] == serde_json::json!(digests[0])
    })
}

/// Small numbers that are the same everywhere.
fn numbers(rows: i64, columns: i64, modulus: i64, divisor: f64) -> Tensor {
    let values = Tensor::arange(rows * columns, (Kind::Int64, Device::Cpu)).remainder(modulus);
    ((values - modulus / 2).to_kind(Kind::Float) / divisor).view([rows, columns])
}

/// Steps `parameters` a few times, and returns a digest of their bits.
fn digest_after_steps<const N: usize>(
    parameters: [Tensor; N],
    loss: impl Fn(&[Tensor; N]) -> Tensor,
) -> String {
    let parameters = parameters.map(|parameter| parameter.set_requires_grad(true));
    for _ in 0..20 {
        let grads = Tensor::run_backward(&[loss(&parameters)], &parameters, false, false);
        for (parameter, grad) in parameters.iter().zip(grads) {
            let _ = tch::no_grad(|| parameter.shallow_clone().subtract_(&(grad * 0.1)));
        }
    }
    digest(parameters.iter().flat_map(flat).map(|value| value.to_bits() as usize))
}

fn dense_digest() -> String {
    let (inputs, targets) = (numbers(16, 20, 7, 10.0), numbers(16, 1, 5, 10.0));
    let layers = [numbers(64, 20, 11, 30.0), numbers(1, 64, 13, 30.0), numbers(1, 20, 11, 30.0)];
    digest_after_steps(layers, |[first, second, alone]| {
        let deep = inputs.matmul(&first.tr()).relu().matmul(&second.tr());
        deep.mse_loss(&targets, tch::Reduction::Mean)
            + inputs.matmul(&alone.tr()).mse_loss(&targets, tch::Reduction::Mean)
    })
}

fn convolutions_digest() -> String {
    let (images, targets) =
        (numbers(16, 64, 17, 10.0).view([16, 1, 8, 8]), numbers(16, 1, 5, 10.0));
    let filters = [
        numbers(8, 9, 11, 30.0).view([8, 1, 3, 3]),
        numbers(16, 72, 13, 30.0).view([16, 8, 3, 3]),
        numbers(1, 64, 7, 30.0),
    ];
    digest_after_steps(filters, |[first, second, last]| {
        let mut values = images.shallow_clone();
        for weight in [first, second] {
            let none = || None::<Tensor>;
            values = values.conv2d(weight, none(), [1, 1], [1, 1], [1, 1], 1);
            values = values.batch_norm(none(), none(), none(), none(), true, 0.1, 1e-5, true);
            values = values.relu().max_pool2d([2, 2], [2, 2], [0, 0], [1, 1], false);
        }
        values.flatten(1, -1).matmul(&last.tr()).mse_loss(&targets, tch::Reduction::Mean)
    })
}

fn attention_digest() -> String {
    let (tokens, targets) =
        (numbers(16 * 8, 64, 19, 10.0).view([16, 8, 64]), numbers(16, 1, 5, 10.0));
    let weights =
        [numbers(192, 64, 11, 60.0), numbers(256, 64, 13, 60.0), numbers(1, 256, 7, 60.0)];
    digest_after_steps(weights, |[first, second, last]| {
        let none = || None::<Tensor>;
        let heads = tokens.layer_norm([64], none(), none(), 1e-5, true).matmul(&first.tr());
        let heads = heads.split(64, 2);
        let [q, k, v] = [0, 1, 2].map(|part| heads[part].view([16, 8, 4, 16]).transpose(1, 2));
        let mixed =
            Tensor::scaled_dot_product_attention(&q, &k, &v, none(), 0.0, true, None, false);
        let mixed = mixed.transpose(1, 2).reshape([16, 8, 64]);
        let values = (&tokens + mixed).matmul(&second.tr()).gelu("none");
        let outputs = values.matmul(&last.tr()).mean_dim(1, false, None);
        outputs.mse_loss(&targets, tch::Reduction::Mean)
    })
}
