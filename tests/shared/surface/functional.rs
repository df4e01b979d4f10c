//! Collectives that gradients flow through.

use ddp_mp::process_group::functional;
use ddp_mp::{ReduceOp, ffi};
use tch::Kind;

use super::{Surface, numbers, reduced};

pub(super) fn functional_all_reduce(it: &Surface) {
    let mine = it.mine(3, Kind::Float).set_requires_grad(true);
    let sum = functional::all_reduce(&mine, &it.group).unwrap();
    let expected = reduced(ReduceOp::Sum, &it.of_all(3));
    it.is(&sum.detach(), &expected);
    // Each rank's loss is sum^2, and each depends on `mine` with the gradient 2 * sum.
    ffi::backward(&sum.square().sum(Kind::Float)).unwrap();
    let factor = 2.0 * it.size() as f64;
    it.is(&mine.grad(), &expected.iter().map(|sum| factor * sum).collect::<Vec<_>>());
    // Without requires_grad it only sums.
    let sum = functional::all_reduce(&it.mine(3, Kind::Int64), &it.group).unwrap();
    it.is(&sum, &expected);
    assert!(!sum.requires_grad());
}

/// Rank `r` multiplies rank `j`'s tensor with `r + 10 j`, and its loss is the sum of that.
pub(super) fn functional_all_gather(it: &Surface) {
    let weight = |rank: usize, result: usize| rank as f64 + 10.0 * result as f64;
    let mine = it.mine(3, Kind::Float).set_requires_grad(true);
    let results = functional::all_gather(&mine, &it.group).unwrap();
    let mut loss = mine.sum(Kind::Float) * 0.0;
    for (rank, result) in results.iter().enumerate() {
        it.is(&result.detach(), &numbers(rank, 3));
        loss += result.sum(Kind::Float) * weight(it.me(), rank);
    }
    ffi::backward(&loss).unwrap();
    let of_all: f64 = (0..it.size()).map(|rank| weight(rank, it.me())).sum();
    it.is(&mine.grad(), &[of_all; 3]);
}
