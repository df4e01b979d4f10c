//! Collectives that gradients flow through, against values recorded from PyTorch.

use std::fs;
use std::rc::Rc;

use ddp_mp::process_group::functional;
use ddp_mp::{ProcessGroup, torch};
use serde::Deserialize;
use tch::{Device, Kind, Tensor};

use crate::harness::{ranks, repository};

/// What a rank has afterwards, and the gradients of its inputs. Outputs that PyTorch leaves open are null.
type OfRank = (Vec<Option<Vec<f64>>>, Vec<Vec<f64>>);

/// One call.
#[derive(Debug, Deserialize)]
struct Row {
    operation: String,
    root: Option<usize>,
    world_size: usize,
    ranks: Vec<OfRank>,
}

fn recorded() -> Vec<Row> {
    let text = fs::read_to_string(repository("tests/parity/functional.json")).unwrap();
    let file: serde_json::Value = serde_json::from_str(&text).unwrap();
    serde_json::from_value(file["rows"].clone()).unwrap()
}

/// As `small` in record.py.
fn small(rank: usize, index: usize, shape: &[i64], step: i64) -> Tensor {
    let numbers = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu));
    (numbers.remainder(step as f64) + (3 * rank) as f64 - index as f64 + 1.0).reshape(shape)
}

fn leaves(group: &ProcessGroup, shapes: &[Vec<i64>]) -> Vec<Tensor> {
    let leaf = |(index, shape): (usize, &Vec<i64>)| {
        small(group.rank(), index, shape, 5).set_requires_grad(true)
    };
    shapes.iter().enumerate().map(leaf).collect()
}

/// The inputs and the outputs of the call of `row`.
fn call(row: &Row, group: &Rc<ProcessGroup>) -> ddp_mp::Result<(Vec<Tensor>, Vec<Tensor>)> {
    let (me, count) = (group.rank(), group.world_size());
    let root = row.root.unwrap_or(0);
    let operation = row.operation.as_str();
    if operation == "all_to_all_single" {
        let rows: Vec<i64> = (0..count).map(|other| ((me + other) % 2 + 1) as i64).collect();
        let inputs = leaves(group, &[vec![rows.iter().sum(), 2]]);
        let output = functional::all_to_all_single(&inputs[0], Some(&rows), Some(&rows), group)?;
        return Ok((inputs, vec![output]));
    }
    let lists = ["scatter", "reduce_scatter", "all_to_all"];
    let inputs = if lists.contains(&operation) { count } else { 1 };
    let inputs = leaves(group, &vec![vec![2, 3]; inputs]);
    let one = &inputs[0];
    let outputs = match operation {
        "all_reduce" => vec![functional::all_reduce(one, group)?],
        "broadcast" => vec![functional::broadcast(one, root, group)?],
        "reduce" => vec![functional::reduce(one, root, group)?],
        "gather" => functional::gather(one, root, group)?,
        "scatter" => vec![functional::scatter(&inputs, root, group)?],
        "all_gather" => functional::all_gather(one, group)?,
        "all_gather_into_tensor" => vec![functional::all_gather_into_tensor(one, group)?],
        "reduce_scatter" => vec![functional::reduce_scatter(&inputs, group)?],
        "all_to_all" => functional::all_to_all(&vec![&[2, 3][..]; count], &inputs, group)?,
        other => panic!("no {other}"),
    };
    Ok((inputs, outputs))
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().reshape([-1])).unwrap()
}

/// Calls all, goes backward, and compares, to the bit.
pub(crate) fn compare(group: &Rc<ProcessGroup>) -> ddp_mp::Result<()> {
    let rows: Vec<Row> = recorded();
    let mut count = 0;
    for row in rows.iter().filter(|row| row.world_size == group.world_size()) {
        let (outputs, gradients) = &row.ranks[group.rank()];
        let (inputs, found) = call(row, group)?;
        let before: Vec<Vec<f64>> = inputs.iter().map(numbers).collect();
        assert_eq!(found.len(), outputs.len(), "{row:?}");
        let mut loss = Tensor::from(0f64);
        for (index, (found, output)) in found.iter().zip(outputs).enumerate() {
            let weight = small(group.rank(), index, &found.size(), 3);
            let term = (weight * found + found * found / 2.0).sum(Kind::Double);
            loss += if output.is_some() { term } else { term * 0.0 };
            if let Some(output) = output {
                assert_eq!(&numbers(found), output, "rank {} of {row:?}", group.rank());
            }
        }
        torch::backward(&loss)?;
        let found: Vec<Vec<f64>> = inputs.iter().map(|it| numbers(&it.grad())).collect();
        assert_eq!(&found, gradients, "gradients of rank {} of {row:?}", group.rank());
        assert_eq!(before, inputs.iter().map(numbers).collect::<Vec<_>>(), "inputs stay");
        count += 1;
    }
    assert_eq!(count, 6 + 4 * group.world_size());
    Ok(())
}

#[test]
fn every_collective_gives_pytorchs_values_and_gradients() {
    for world_size in 1..=3 {
        ranks(world_size, |_, group| Ok(compare(&group)?));
    }
}

#[test]
fn all_to_all_takes_tensors_of_any_shape() {
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
        torch::backward(&loss)?;
        for (to, input) in inputs.iter().enumerate() {
            let expected = Tensor::full_like(input, (10 * to + me) as f64);
            assert!(input.grad().equal(&expected), "{:?}", input.grad());
        }
        Ok(())
    });
}

#[test]
fn a_result_that_goes_unused_has_a_gradient_of_zeros() {
    ranks(2, |rank, group| {
        let mine = Tensor::from_slice(&[rank.rank() as f64]).set_requires_grad(true);
        let all = functional::all_gather(&mine, &group)?;
        torch::backward(&all[1].sum(Kind::Double))?;
        assert_eq!(numbers(&mine.grad()), [[0.0], [2.0]][rank.rank()]);
        Ok(())
    });
}

#[test]
fn the_gradient_of_a_gradient_goes_through_the_same_collectives() {
    ranks(2, |rank, group| {
        let mine = Tensor::from_slice(&[rank.rank() as f64 + 1.0]).set_requires_grad(true);
        let sum = functional::all_gather_into_tensor(&mine, &group)?.sum(Kind::Double);
        // Of (1 + 2)^3: twice 3 s^2 on each rank, and of the sum of both twice twice 6 s more.
        let first = Tensor::run_backward(&[&sum * &sum * &sum], &[&mine], true, true);
        assert_eq!(numbers(&first[0]), [2.0 * 27.0]);
        let second = Tensor::run_backward(&[first[0].sum(Kind::Double)], &[&mine], false, false);
        assert_eq!(numbers(&second[0]), [4.0 * 18.0]);
        Ok(())
    });
}

#[test]
fn wrong_arguments_are_refused_before_the_ranks_meet() {
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
            assert!(kinds.contains("different kinds"), "{kinds}");
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
