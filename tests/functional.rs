//! Collectives that gradients flow through, against values recorded from PyTorch.

use ddp_mp::ffi;
use ddp_mp::process_group::functional;
use tch::{Kind, Tensor};

use crate::harness::ranks;
use crate::shared::functional::{compare, leaves, numbers, small};

#[test]
fn functional_collectives_match_pytorch_values_and_gradients() {
    for world_size in 1..=3 {
        ranks(world_size, |_, group| Ok(compare(&group)?));
    }
}

#[test]
fn all_to_all_accepts_tensors_of_any_shape() {
    ranks(3, |rank, group| {
        let (me, count) = (rank.rank(), rank.world_size());
        // Of rank i for rank j: i + 1 rows of j + 1.
        let shapes = |from: usize, to: usize| vec![from as i64 + 1, to as i64 + 1];
        let sent: Vec<Vec<i64>> = (0..count).map(|to| shapes(me, to)).collect();
        let received: Vec<Vec<i64>> = (0..count).map(|from| shapes(from, me)).collect();
        let received: Vec<&[i64]> = received.iter().map(Vec::as_slice).collect();
        let inputs = leaves(&group, &sent);
        let outputs = functional::all_to_all(&received, &inputs, &group)?;
        let mut loss = Tensor::from(0f64);
        for (from, output) in outputs.iter().enumerate() {
            assert!(output.equal(&small(from, me, received[from], 5)), "{output:?}");
            loss += output.sum(Kind::Double) * (10 * me + from) as f64;
        }
        ffi::backward(&loss)?;
        for (to, input) in inputs.iter().enumerate() {
            let expected = Tensor::full_like(input, (10 * to + me) as f64);
            assert!(input.grad().equal(&expected), "{:?}", input.grad());
        }
        Ok(())
    });
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
        let sum = functional::all_gather_single(&mine, &group)?.sum(Kind::Double);
        // Of (1 + 2)^3: twice 3 s^2 on each rank, and of the sum of both twice twice 6 s more.
        let first = Tensor::run_backward(&[&sum * &sum * &sum], &[&mine], true, true);
        assert_eq!(numbers(&first[0]), [2.0 * 27.0]);
        let second = Tensor::run_backward(&[first[0].sum(Kind::Double)], &[&mine], false, false);
        assert_eq!(numbers(&second[0]), [4.0 * 18.0]);
        Ok(())
    });
}

#[test]
fn invalid_arguments_are_refused_before_any_exchange() {
    ranks(2, |rank, group| {
        let one = || Tensor::from_slice(&[1f64]);
        if rank.rank() == 1 {
            let refused = |error: ddp_mp::Error| error.to_string();
            let few = refused(functional::reduce_scatter(&[one()], &group).unwrap_err());
            assert!(few.contains("the list has 1 tensors, but there are 2 ranks"), "{few}");
            let none = refused(functional::scatter(&[], 0, &group).unwrap_err());
            assert!(none.contains("the list has 0 tensors"), "{none}");
            let kinds = [one(), Tensor::from_slice(&[1f32])];
            let kinds = refused(functional::reduce_scatter(&kinds, &group).unwrap_err());
            assert!(kinds.contains("different dtypes"), "{kinds}");
            let shapes = functional::all_to_all(&[&[1]], &[one(), one()], &group).unwrap_err();
            let expected = "all_to_all: output_shapes has 1 shapes, but there are 2 ranks";
            assert!(refused(shapes).starts_with(expected));
            let far = refused(functional::broadcast(&one(), 2, &group).unwrap_err());
            assert!(far.contains("src is rank 2"), "{far}");
        }
        assert_eq!(functional::all_reduce(&one(), &group)?.double_value(&[0]), 2.0);
        Ok(())
    });
}
