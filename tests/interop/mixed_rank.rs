//! A rank of `mixed_world.py` in Rust: the same calls, and its own look at what came out.
//!
//! mixed_rank RANK SIZE PORT

#![allow(clippy::print_stdout)]

use std::env;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ddp_mp::ReduceOp;
use ddp_mp::process_group::c10d::{ProcessGroupGloo, TcpStore};
use tch::{Device, Kind, Tensor};

const TIMEOUT: Duration = Duration::from_secs(120);

/// What rank `rank` has: as whole numbers, so that sums are exact in every order.
fn mine(rank: usize, kind: Kind) -> Tensor {
    ((Tensor::arange(1000, (Kind::Int64, Device::Cpu)) * 7 + 1) * (rank as i64 + 1))
        .remainder(1013)
        .to_kind(kind)
}

fn same(what: &str, tensor: &Tensor, expected: &Tensor) -> Result<()> {
    ensure!(tensor == expected, "{what}: {tensor:?} is not {expected:?}");
    Ok(())
}

fn main() -> Result<()> {
    let numbers: Vec<usize> = env::args().skip(1).map(|it| it.parse()).collect::<Result<_, _>>()?;
    let [rank, size, port] = numbers[..] else { anyhow::bail!("mixed_rank RANK SIZE PORT") };
    let store = if rank == 0 {
        let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT)?;
        println!("{}", store.port());
        store
    } else {
        TcpStore::connect("127.0.0.1", port as u16, TIMEOUT)?
    };
    store.set(&format!("from {rank}"), &[rank as u8, 255])?;
    let last = store.get(&format!("from {}", size - 1), TIMEOUT)?;
    ensure!(last == Some(vec![size as u8 - 1, 255]), "the store has {last:?}");

    let group = ProcessGroupGloo::new(&store, "mixed", rank, size, TIMEOUT)?;
    for kind in [Kind::Float, Kind::Int64] {
        collectives(&group, kind).with_context(|| format!("rank {rank}, {kind:?}"))?;
    }
    // No two orders of addition need have the same bits here, but all ranks must.
    let mut sum = (mine(rank, Kind::Float) * 0.1).sin();
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    let mut sums: Vec<Tensor> = (0..size).map(|_| sum.zeros_like()).collect();
    group.all_gather(&mut sums, &sum)?;
    sums.iter().try_for_each(|other| same("the bits of a sum", other, &sum))?;
    group.barrier()?;
    Ok(())
}

fn collectives(group: &ProcessGroupGloo, kind: Kind) -> Result<()> {
    let (rank, size) = (group.rank(), group.size());
    let all: Vec<Tensor> = (0..size).map(|rank| mine(rank, kind)).collect();
    let zeros = || -> Vec<Tensor> { all.iter().map(Tensor::zeros_like).collect() };
    let stack = Tensor::stack(&all, 0);
    let (sum, max) = (stack.sum_dim_intlist(0, false, kind), stack.amax(0, false));

    for (op, expected) in [(ReduceOp::Sum, &sum), (ReduceOp::Max, &max)] {
        let mut tensor = mine(rank, kind);
        group.all_reduce(&mut tensor, op)?;
        same("all_reduce", &tensor, expected)?;
    }
    let mut tensors = zeros();
    group.all_gather(&mut tensors, &all[rank])?;
    same("all_gather", &Tensor::stack(&tensors, 0), &stack)?;
    for root in 0..size {
        let mut tensor = mine(rank, kind);
        group.broadcast(&mut tensor, root)?;
        same("broadcast", &tensor, &all[root])?;
        let mut tensor = mine(rank, kind);
        group.reduce(&mut tensor, root, ReduceOp::Sum)?;
        let mut tensors = zeros();
        group.gather(&all[rank], (rank == root).then_some(&mut tensors[..]), root)?;
        if rank == root {
            same("reduce", &tensor, &sum)?;
            same("gather", &Tensor::stack(&tensors, 0), &stack)?;
        }
        let mut tensor = all[0].zeros_like();
        group.scatter(&mut tensor, (rank == root).then_some(&all[..]), root)?;
        same("scatter", &tensor, &all[rank])?;
    }
    let mut tensor = all[0].zeros_like();
    group.reduce_scatter_single(&mut tensor, &stack.view([-1]), ReduceOp::Sum)?;
    same("reduce_scatter", &tensor, &(&all[rank] * size as i64))?;
    let mut tensor = stack.zeros_like();
    group.all_to_all_single(&mut tensor, &(&stack + rank as i64), None, None)?;
    let parts: Vec<Tensor> = (0..size).map(|from| &all[rank] + from as i64).collect();
    same("all_to_all", &tensor, &Tensor::stack(&parts, 0))?;

    // Round the ring.
    let (next, last) = ((rank + 1) % size, (rank + size - 1) % size);
    let mut tensor = all[0].zeros_like();
    if rank == 0 {
        group.send(&all[rank], next, 3)?;
        group.recv(&mut tensor, last, 3)?;
    } else {
        group.recv(&mut tensor, last, 3)?;
        group.send(&all[rank], next, 3)?;
    }
    same("recv", &tensor, &all[last])
}
