//! Collectives that gradients flow through, against values recorded from PyTorch.

use std::rc::Rc;

use ddp_mp::process_group::functional;
use ddp_mp::{ProcessGroup, ffi};
use serde::Deserialize;
use tch::{Device, Kind, Tensor};

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
    // In the program, because the pack for a GPU runs this where the repository is not there.
    let text = include_str!("../parity/functional.json");
    let file: serde_json::Value = serde_json::from_str(text).unwrap();
    serde_json::from_value(file["rows"].clone()).unwrap()
}

/// As `small` in record.py.
pub(crate) fn small(rank: usize, index: usize, shape: &[i64], step: i64) -> Tensor {
    let numbers = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu));
    (numbers.remainder(step as f64) + (3 * rank) as f64 - index as f64 + 1.0).reshape(shape)
}

pub(crate) fn leaves(group: &ProcessGroup, shapes: &[Vec<i64>]) -> Vec<Tensor> {
    let leaf = |(index, shape): (usize, &Vec<i64>)| {
        small(group.rank(), index, shape, 5).to_device(group.device()).set_requires_grad(true)
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

pub(crate) fn numbers(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().to_device(Device::Cpu).reshape([-1])).unwrap()
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
        let mut loss = Tensor::zeros([1], (Kind::Double, group.device()));
        for (index, (found, output)) in found.iter().zip(outputs).enumerate() {
            let weight = small(group.rank(), index, &found.size(), 3).to_device(group.device());
            let term = (weight * found + found * found / 2.0).sum(Kind::Double);
            loss += if output.is_some() { term } else { term * 0.0 };
            if let Some(output) = output {
                assert_eq!(&numbers(found), output, "rank {} of {row:?}", group.rank());
            }
        }
        ffi::backward(&loss)?;
        let found: Vec<Vec<f64>> = inputs.iter().map(|it| numbers(&it.grad())).collect();
        assert_eq!(&found, gradients, "gradients of rank {} of {row:?}", group.rank());
        assert_eq!(before, inputs.iter().map(numbers).collect::<Vec<_>>(), "inputs stay");
        count += 1;
    }
    assert_eq!(count, 6 + 4 * group.world_size());
    Ok(())
}
