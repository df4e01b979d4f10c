//! 03. All-reduce by hand: every rank has a tensor, and afterwards every rank has the sum of all tensors.
//!
//!     cargo run --release --example 03-all-reduce-by-hand
//!
//! In Python this is `dist.all_reduce(tensor)`. It is the only collective that a training step needs.

#![allow(clippy::print_stdout)]

use anyhow::ensure;
use ddp_mp::prelude::*;

const RANKS: usize = 4; // exercise
const LEN: i64 = 1 << 16;

/// The simplest algorithm: all ranks send their tensor to rank 0, which adds them up and sends the sum back. With more
/// ranks, rank 0 sends and receives more, while the others wait.
fn through_rank_0(group: &ProcessGroup, tensor: &mut Tensor) -> anyhow::Result<()> {
    if group.rank() > 0 {
        group.send(tensor, 0, 0)?;
        group.recv(tensor, Some(0), 0)?;
        return Ok(());
    }
    let mut received = tensor.zeros_like();
    for src in 1..group.world_size() {
        group.recv(&mut received, Some(src), 0)?;
        *tensor += &received;
    }
    (1..group.world_size()).try_for_each(|dst| Ok(group.send(tensor, dst, 0)?))
}

/// The ring algorithm. The tensor is split into a chunk per rank. In each turn every rank sends one chunk to its right
/// neighbour and receives another from its left. In the first n - 1 turns (reduce-scatter) the ranks add what they
/// receive. In the next n - 1 turns (all-gather) the sums go round. Each rank sends less than twice its tensor.
fn ring(group: &ProcessGroup, tensor: &mut Tensor) -> anyhow::Result<()> {
    let (rank, ranks) = (group.rank(), group.world_size());
    let (left, right) = ((rank + ranks - 1) % ranks, (rank + 1) % ranks);
    let mut chunks = tensor.chunk(ranks as i64, 0); // views of equal size, because the number of ranks divides LEN
    let mut received = chunks[0].zeros_like();
    for turn in 0..2 * (ranks - 1) {
        let (to_right, from_left) = (rank + 2 * ranks - turn, rank + 2 * ranks - turn - 1);
        // A blocking send would deadlock: every rank would wait for a receiver, and none would receive.
        let work = group.isend(&chunks[to_right % ranks], right, 0)?;
        group.recv(&mut received, Some(left), 0)?;
        work.wait()?;
        let chunk = &mut chunks[from_left % ranks];
        if turn < ranks - 1 { *chunk += &received } else { chunk.copy_(&received) }
    }
    Ok(())
}

/// The library's all-reduce. Each rank also adds up one part, but in the order of the ranks.
fn all_reduce(group: &ProcessGroup, tensor: &mut Tensor) -> anyhow::Result<()> {
    Ok(group.all_reduce(tensor, ReduceOp::Sum)?)
}

type Algorithm = fn(&ProcessGroup, &mut Tensor) -> anyhow::Result<()>;
const ALGORITHMS: [(&str, Algorithm); 3] =
    [("all_reduce", all_reduce), ("through rank 0", through_rank_0), ("ring", ring)];

fn main() -> anyhow::Result<()> {
    spawn(RANKS, |rank| {
        let group = rank.init_process_group(Backend::Threaded)?;
        let fractions =
            fork_rng(rank.rank() as u64, || Tensor::rand([LEN], (Kind::Float, Device::Cpu)))?;
        let whole = (&fractions * 100.0).floor();
        let sum = |algorithm: Algorithm, tensor: &Tensor| -> anyhow::Result<Tensor> {
            let mut sum = tensor.copy();
            algorithm(&group, &mut sum)?;
            Ok(sum)
        };
        let expected = sum(all_reduce, &fractions)?;
        if rank.rank() == 0 {
            println!("{RANKS} ranks add up {LEN} numbers each, {} KiB", (4 * LEN) >> 10);
            println!("                KiB sent by rank 0, 1, 2, ...   sums unlike all_reduce's");
        }
        for (name, algorithm) in ALGORITHMS {
            let before = group.traffic().sent;
            let sums = sum(algorithm, &fractions)?;
            let sent = group.all_gather_object(&((group.traffic().sent - before) >> 10))?;
            let others = sums.not_equal_tensor(&expected).sum(Kind::Int64).int64_value(&[]);
            let by = (&sums - &expected).abs().max().double_value(&[]);
            if rank.rank() == 0 {
                println!("{name:14}  {sent:4?}          {others:5}, by {by:.1e} at most");
            }
            // Each sum is computed once and then copied, so all ranks have the same bits with every algorithm. This
            // matters, because replicas that differ by one bit diverge further with every step.
            let mut all: [Tensor; RANKS] = std::array::from_fn(|_| sums.zeros_like());
            group.all_gather(&mut all, &sums)?;
            ensure!(all.iter().all(|other| *other == sums), "{name}: the ranks differ");
            // Rounded sums depend on the order, and the ring starts each chunk at another rank.
            ensure!(others == 0 || name == "ring", "{name} adds in the order of the ranks");
            // Sums of small whole numbers are exact, so their order does not matter.
            let is_exact = sum(algorithm, &whole)? == sum(all_reduce, &whole)?;
            ensure!(is_exact, "{name}: whole numbers differ");
        }
        Ok(())
    })?;
    Ok(())
}
