//! Collectives that gradients flow through, against values recorded from PyTorch.

use ddp_mp::ffi;
use ddp_mp::process_group::functional;
use tch::{Kind, Tensor};

use crate::harness::ranks;
use crate::shared::functional::{compare, numbers};

#[test]
fn functional_collectives_match_pytorch_values_and_gradients() {
    for world_size in 1..=3 {
        ranks(world_size, |_, group| Ok(compare(&group)?));
    }
}

#[test]
fn unused_result_has_a_zero_gradient() {
    ranks(2, |rank, group| {
        let mine = Tensor::from_slice(&[rank.rank() as f64]).set_requires_grad(true);
        let all = functional::all_gather(&mine, &group)?;
        ffi::backward(&all[1].sum(Kind::Double))?;
        assert_eq!(numbers(&mine.grad()), [[0.0], [2.0]][rank.rank()]);
        Ok(())
    });
}

#[test]
fn second_derivative_passes_through_the_collectives() {
    ranks(2, |rank, group| {
        let mine = Tensor::from_slice(&[rank.rank() as f64 + 1.0]).set_requires_grad(true);
        let all = functional::all_gather(&mine, &group)?;
        let sum = (&all[0] + &all[1]).sum(Kind::Double);
        // Of (1 + 2)^3: twice 3 s^2 on each rank, and of the sum of both twice twice 6 s more.
        let first = Tensor::run_backward(&[&sum * &sum * &sum], &[&mine], true, true);
        assert_eq!(numbers(&first[0]), [2.0 * 27.0]);
        let second = Tensor::run_backward(&[first[0].sum(Kind::Double)], &[&mine], false, false);
        assert_eq!(numbers(&second[0]), [4.0 * 18.0]);
        Ok(())
    });
}
