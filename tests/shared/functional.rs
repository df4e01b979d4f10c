//! Collectives that gradients flow through, against values recorded from PyTorch.

use std::rc::Rc;

use ddp_mp::process_group::functional;
use ddp_mp::{ProcessGroup, ffi};
use serde::Deserialize;
use tch::{Device, Kind, Tensor};

/// What a rank has afterwards, and the gradient of its input.
type OfRank = (Vec<Vec<f64>>, Vec<f64>);

/// One call.
#[derive(Debug, Deserialize)]
struct Row {
    operation: String,
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
fn small(rank: usize, index: usize, shape: &[i64], step: i64) -> Tensor {
    let numbers = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu));
    (numbers.remainder(step as f64) + (3 * rank) as f64 - index as f64 + 1.0).reshape(shape)
}

pub(crate) fn numbers(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().to_device(Device::Cpu).reshape([-1])).unwrap()
}

/// Calls all, goes backward, and compares, to the bit.
pub(crate) fn compare(group: &Rc<ProcessGroup>) -> ddp_mp::Result<()> {
    let rows: Vec<Row> = recorded();
    let mut count = 0;
    for row in rows.iter().filter(|row| row.world_size == group.world_size()) {
        let (outputs, gradient) = &row.ranks[group.rank()];
        let on_device = |tensor: Tensor| tensor.to_device(group.device());
        let input = on_device(small(group.rank(), 0, &[2, 3], 5)).set_requires_grad(true);
        let before = numbers(&input);
        let found = match row.operation.as_str() {
            "all_reduce" => vec![functional::all_reduce(&input, group)?],
            "all_gather" => functional::all_gather(&input, group)?,
            other => panic!("no {other}"),
        };
        assert_eq!(&found.iter().map(numbers).collect::<Vec<_>>(), outputs, "{row:?}");
        let mut loss = Tensor::zeros([1], (Kind::Double, group.device()));
        for (index, found) in found.iter().enumerate() {
            let weight = on_device(small(group.rank(), index, &found.size(), 3));
            loss += (weight * found + found * found / 2.0).sum(Kind::Double);
        }
        ffi::backward(&loss)?;
        assert_eq!(&numbers(&input.grad()), gradient, "rank {} of {row:?}", group.rank());
        assert_eq!(before, numbers(&input), "the input stays");
        count += 1;
    }
    assert_eq!(count, 2);
    Ok(())
}
