//! 03. All-reduce by hand: every rank has some numbers, and in the end every rank has their sum.
//!
//!     cargo run --release --example 03-all-reduce-by-hand
//!
//! In Python this is `dist.all_reduce(tensor)`. It is all that data parallelism needs.

#![allow(clippy::print_stdout)]

use anyhow::ensure;
use ddp_mp::prelude::*;

const RANKS: usize = 4;
const LEN: i64 = 1 << 16;

/// The obvious way: all send theirs to rank 0, which adds them up and sends the sum to all. The more ranks there are,
/// the more goes through rank 0, while the others wait.
fn through_rank_0(group: &ProcessGroup, tensor: &mut Tensor) -> anyhow::Result<()> {
    if group.rank() > 0 {
        group.send(tensor, 0, 0)?;
        group.recv(tensor, Some(0), 0)?;
        return Ok(());
    }
    let mut theirs = tensor.zeros_like();
    for src in 1..group.world_size() {
        group.recv(&mut theirs, Some(src), 0)?;
        *tensor += &theirs;
    }
    (1..group.world_size()).try_for_each(|dst| Ok(group.send(tensor, dst, 0)?))
}

/// The ring: the tensor is cut into as many chunks as there are ranks, and in each turn every rank sends one of them to
/// its right while another comes from its left. After n - 1 turns of adding up, each rank has the whole sum of one chunk;
/// after n - 1 more, in which these go round, of all. However many ranks there are, each sends less than twice its tensor.
fn ring(group: &ProcessGroup, tensor: &mut Tensor) -> anyhow::Result<()> {
    let (me, ranks) = (group.rank(), group.world_size());
    let (left, right) = ((me + ranks - 1) % ranks, (me + 1) % ranks);
    let mut chunks = tensor.chunk(ranks as i64, 0); // views, and of one size, as the ranks divide LEN
    let mut theirs = chunks[0].zeros_like();
    for turn in 0..2 * (ranks - 1) {
        let (from_me, from_left) = (me + 2 * ranks - turn, me + 2 * ranks - turn - 1);
        // Does not wait for the receiver: if all waited for theirs, nobody would come to receive.
        let sent = group.isend(&chunks[from_me % ranks], right, 0)?;
        group.recv(&mut theirs, Some(left), 0)?;
        sent.wait()?;
        let chunk = &mut chunks[from_left % ranks];
        if turn < ranks - 1 { *chunk += &theirs } else { chunk.copy_(&theirs) }
    }
    Ok(())
}

/// The library's: here, too, each rank adds up one part, but in the order of the ranks.
fn all_reduce(group: &ProcessGroup, tensor: &mut Tensor) -> anyhow::Result<()> {
    Ok(group.all_reduce(tensor, ReduceOp::Sum)?)
}

type Way = fn(&ProcessGroup, &mut Tensor) -> anyhow::Result<()>;
const WAYS: [(&str, Way); 3] =
    [("all_reduce", all_reduce), ("through rank 0", through_rank_0), ("ring", ring)];

fn main() -> anyhow::Result<()> {
    spawn(RANKS, |rank| {
        let group = rank.init_process_group(Backend::Threaded)?;
        let fractions =
            fork_rng(rank.rank() as u64, || Tensor::rand([LEN], (Kind::Float, Device::Cpu)))?;
        let whole = (&fractions * 100.0).floor();
        let sum = |way: Way, tensor: &Tensor| -> anyhow::Result<Tensor> {
            let mut sum = tensor.copy();
            way(&group, &mut sum)?;
            Ok(sum)
        };
        let expected = sum(all_reduce, &fractions)?;
        if rank.rank() == 0 {
            println!("{RANKS} ranks add up {LEN} numbers each, {} KiB", (4 * LEN) >> 10);
            println!("                KiB sent by rank 0, 1, 2, 3   sums unlike all_reduce's");
        }
        for (name, way) in WAYS {
            let before = group.traffic().sent;
            let sums = sum(way, &fractions)?;
            let sent = group.all_gather_object(&((group.traffic().sent - before) >> 10))?;
            let others = sums.not_equal_tensor(&expected).sum(Kind::Int64).int64_value(&[]);
            let by = (&sums - &expected).abs().max().double_value(&[]);
            if rank.rank() == 0 {
                println!("{name:14}  {sent:4?}          {others:5}, by {by:.1e} at most");
            }
            // Each sum is made once and copied, so all ranks have the same bits, whichever way it went. That must be:
            // replicas that differ by one bit go on to differ by more.
            let mut all: [Tensor; RANKS] = std::array::from_fn(|_| sums.zeros_like());
            group.all_gather(&mut all, &sums)?;
            ensure!(all.iter().all(|theirs| *theirs == sums), "{name}: the ranks differ");
            // (a + b) + c, once it is rounded, is not a + (b + c): the ring begins each chunk at another rank.
            ensure!(others == 0 || name == "ring", "{name} adds in the order of the ranks");
            // Whole numbers (not too large) are not rounded, so their order does not matter.
            ensure!(sum(way, &whole)? == sum(all_reduce, &whole)?, "{name}: whole numbers differ");
        }
        Ok(())
    })?;
    Ok(())
}
