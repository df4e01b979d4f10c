//! Against values that tests/parity/record.py recorded from PyTorch; `make parity` records them anew and
//! compares.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use ddp_mp::models::{ModelConfig, ModelKind};
use ddp_mp::trainer::{Loss, Trainer};
use ddp_mp::{
    DataLoader, Dataset, DdpOptions, DistributedDataParallel, DistributedSampler, ProcessGroup,
    ReduceOp, Sgd, Targets,
};
use serde::Deserialize;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::harness::{ranks, repository};

fn recorded(name: &str) -> Value {
    let text = fs::read_to_string(repository("tests/parity").join(name)).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// FNV-1a, 64 bits, over the numbers as 8 little-endian bytes each.
fn digest(numbers: impl Iterator<Item = usize>) -> String {
    let bytes = numbers.flat_map(|number| (number as u64).to_le_bytes());
    let step = |value: u64, byte| (value ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    format!("{:016x}", bytes.fold(0xcbf2_9ce4_8422_2325, step))
}

#[test]
fn the_sampler_deals_in_pytorch_s_order() {
    let recorded = recorded("sampler.json");
    let rows = recorded["rows"].as_array().unwrap();
    assert!(rows.len() > 1000);
    for row in rows {
        let (len, world_size, shuffle, drop_last, seed, epoch, expected): (
            usize,
            usize,
            bool,
            bool,
            u64,
            u64,
            String,
        ) = serde_json::from_value(row.clone()).unwrap();
        let indices = (0..world_size).flat_map(|rank| {
            let sampler = DistributedSampler::new(len, world_size, rank).unwrap();
            let sampler = sampler.shuffle(shuffle).seed(seed).drop_last(drop_last).unwrap();
            let indices = sampler.indices(epoch).unwrap();
            assert_eq!(indices.len(), sampler.num_samples());
            indices
        });
        assert_eq!(digest(indices), expected, "{row}");
    }
}

#[derive(Deserialize)]
struct Case {
    hidden: Vec<i64>,
    world_size: usize,
    initial: BTreeMap<String, Vec<f32>>,
    losses: Vec<f64>,
    r#final: BTreeMap<String, Vec<f32>>,
}

#[test]
fn training_ends_where_pytorch_ends() {
    let recorded = recorded("training.json");
    let number = |key: &str| recorded[key].as_u64().unwrap();
    let (seed, batch, epochs) = (number("seed"), number("batch") as usize, number("epochs"));
    let (samples, lr) = (number("samples") as i64, recorded["lr"].as_f64().unwrap());
    let cases: Vec<Case> = serde_json::from_value(recorded["cases"].clone()).unwrap();
    for Case { hidden, world_size, initial, losses, r#final } in cases {
        let kind = if hidden.is_empty() { ModelKind::Linear } else { ModelKind::Mlp };
        let model = ModelConfig { kind, in_features: 20, out_features: 1, hidden };
        let dataset = Arc::new(Dataset::random(samples, 20, Targets::Values(1), seed + 1).unwrap());
        let trained = ranks(world_size, move |rank, group| {
            let (vs, model) = model.build(rank.device(), seed)?;
            #[allow(clippy::disallowed_methods)] // into a map with an order of its own
            let values = || -> anyhow::Result<BTreeMap<String, Vec<f32>>> {
                let flat = |tensor: Tensor| Vec::<f32>::try_from(tensor.detach().flatten(0, -1));
                vs.variables().into_iter().map(|(name, t)| Ok((name, flat(t)?))).collect()
            };
            let before = values()?;
            let options = DdpOptions::default();
            let ddp = DistributedDataParallel::new(model, &vs, group, options)?;
            let optimizer = Sgd::new(ddp.flat_buffers(), lr);
            let sampler =
                DistributedSampler::new(dataset.len(), rank.world_size(), rank.rank())?.seed(seed);
            let loader = DataLoader::new(&dataset, sampler, batch, rank.device())?;
            let mut trainer = Trainer::new(ddp, optimizer, loader, Loss::Mse)?;
            let summary = trainer.train(epochs, |_| Ok(()))?;
            Ok((before, summary, values()?))
        });
        let (before, summary, after) = &trained[0];
        assert_eq!(before, &initial, "the same seed gives PyTorch's parameters, bit for bit");
        assert_eq!(
            summary.steps,
            epochs * (samples as u64).div_ceil(world_size as u64).div_ceil(batch as u64)
        );
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-6 * b.abs().max(1e-2);
        assert!(close(summary.first_loss, losses[0]), "{} {}", summary.first_loss, losses[0]);
        let last = losses[losses.len() - 1];
        assert!(close(summary.last_loss, last), "{} {last}", summary.last_loss);
        for (name, expected) in &r#final {
            let largest =
                after[name].iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0., f32::max);
            println!("{world_size} ranks, {name}: largest difference {largest:e}");
            // One rank runs the same kernels on the same numbers: not a bit may differ. With more, Gloo
            // adds the ranks' gradients in an order of its own.
            let bound = if world_size == 1 { 0. } else { 1e-6 };
            assert!(largest <= bound, "{world_size} ranks, {name}: {largest:e}");
        }
        assert_eq!(after.len(), r#final.len());
    }
}

/// What one collective left on every rank.
#[derive(Deserialize, Debug)]
struct Row {
    operation: String,
    kind: String,
    op: Option<String>,
    world_size: usize,
    outputs: Vec<Vec<f64>>,
}

fn kind(name: &str) -> Kind {
    match name {
        "float64" => Kind::Double,
        "float32" => Kind::Float,
        "float16" => Kind::Half,
        "bfloat16" => Kind::BFloat16,
        "int64" => Kind::Int64,
        "int32" => Kind::Int,
        "int8" => Kind::Int8,
        "uint8" => Kind::Uint8,
        "bool" => Kind::Bool,
        _ => panic!("{name}"),
    }
}

fn reduce_op(name: &str) -> ReduceOp {
    use ReduceOp::{Avg, Band, Bor, Bxor, Max, Min, Product, Sum};
    let ops = [Sum, Avg, Product, Min, Max, Band, Bor, Bxor];
    ops.into_iter().find(|op| op.to_string() == name).unwrap()
}

/// record.py's: (rank + 1) * (i + 1), wrapped into -3 to 3; bool says what is positive.
fn numbers(rank: usize, len: usize, kind: Kind) -> Tensor {
    let count = Tensor::arange(len as i64, (Kind::Int64, Device::Cpu)) + 1;
    let whole = (count * (rank as i64 + 1) + 3).remainder(7) - 3;
    if kind == Kind::Bool { whole.gt(0) } else { whole.to_kind(kind) }
}

/// This rank's output, flat; record.py's function of this name tells more.
fn collective(group: &ProcessGroup, row: &Row) -> anyhow::Result<Tensor> {
    const LEN: usize = 3;
    let (rank, world_size, kind) = (group.rank(), group.world_size(), kind(&row.kind));
    let op = || reduce_op(row.op.as_ref().unwrap());
    let root = world_size / 2;
    let is_root = rank == root;
    let (mut one, many) = (numbers(rank, LEN, kind), numbers(rank, LEN * world_size, kind));
    let (mut part, mut whole, none) = (one.zeros_like(), many.zeros_like(), one.narrow(0, 0, 0));
    let inputs = many.split(LEN as i64, 0);
    let mut outputs = whole.split(LEN as i64, 0);
    Ok(match row.operation.as_str() {
        "all_reduce" => {
            group.all_reduce(&mut one, op())?;
            one
        }
        "reduce" => {
            group.reduce(&mut one, root, op())?;
            if is_root { one } else { none }
        }
        "reduce_scatter" => {
            group.reduce_scatter(&mut part, &inputs, op())?;
            part
        }
        "reduce_scatter_tensor" => {
            group.reduce_scatter_tensor(&mut part, &many, op())?;
            part
        }
        "broadcast" => {
            group.broadcast(&mut one, root)?;
            one
        }
        "all_gather" => {
            group.all_gather(&mut outputs, &one)?;
            whole
        }
        "all_gather_into_tensor" => {
            group.all_gather_into_tensor(&mut whole, &one)?;
            whole
        }
        "gather" => {
            group.gather(&one, is_root.then_some(&mut outputs[..]), root)?;
            if is_root { whole } else { none }
        }
        "scatter" => {
            group.scatter(&mut part, is_root.then_some(&inputs[..]), root)?;
            part
        }
        "all_to_all_single" => {
            group.all_to_all_single(&mut whole, &many, None, None)?;
            whole
        }
        "all_to_all_single with splits" => {
            let splits = |f: fn(usize, usize) -> usize| -> Vec<i64> {
                (0..world_size).map(|other| f(rank, other) as i64).collect()
            };
            let sent = splits(|rank, other| (rank + 2 * other + 1) % 3);
            let received = splits(|rank, other| (other + 2 * rank + 1) % 3);
            let input = numbers(rank, sent.iter().sum::<i64>() as usize, kind);
            let mut output = Tensor::zeros([received.iter().sum()], (kind, Device::Cpu));
            group.all_to_all_single(&mut output, &input, Some(&received), Some(&sent))?;
            output
        }
        other => panic!("{other}"),
    })
}

#[test]
fn collectives_leave_what_gloo_leaves() {
    let rows: Vec<Row> =
        serde_json::from_value(recorded("collectives.json")["rows"].clone()).unwrap();
    let rows = Arc::new(rows);
    let counts = (1..=5).map(|world_size| {
        let rows = rows.clone();
        let counts = ranks(world_size, move |rank, group| {
            let mut count = 0;
            for row in rows.iter().filter(|row| row.world_size == world_size) {
                let output = collective(&group, row)?.to_kind(Kind::Double);
                assert_eq!(Vec::<f64>::try_from(output)?, row.outputs[rank.rank()], "{row:?}");
                count += 1;
            }
            Ok(count)
        });
        counts[0]
    });
    let count: usize = counts.sum();
    assert!(count == rows.len() && count > 1000, "{count} of {} rows", rows.len());
}
