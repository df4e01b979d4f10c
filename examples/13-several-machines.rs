//! 13. Several machines: the same ranks in several processes, which a launcher's environment variables connect.
//!
//!     cargo run --release --example 13-several-machines
//!
//! Without a launcher, it launches itself twice, as on two machines. With torchrun, run this on each machine:
//!
//!     torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=node0:29400 \
//!         --no-python target/release/examples/13-several-machines
//!
//! By hand, pass torchrun's flags as variables, with PET_NODE_RANK=1 on the second machine:
//!
//!     PET_NNODES=2 PET_NODE_RANK=0 MASTER_ADDR=node0 target/release/examples/13-several-machines

#![allow(clippy::print_stdout)]

use std::env;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::ensure;
use ddp_mp::prelude::*;
use ddp_mp::process_group::c10d::TcpStore;

/// Trains on one rank. Returns a line with its rank number and the hash of its final parameters.
fn train(rank: &Rank) -> anyhow::Result<String> {
    let group = rank.init_process_group(rank.backend())?; // nccl, gloo or threaded
    let (vs, model) = ModelConfig::default().build(rank.device(), 0)?; // one layer, 20 -> 1
    let mut ddp = DistributedDataParallel::new(model, &vs, group, DdpOptions::default())?;
    let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
    let inputs = fork_rng(rank.rank() as u64, || Tensor::rand([32, 20], tch::kind::FLOAT_CPU))?
        .to_device(rank.device());
    for _step in 0..10 {
        ddp.zero_grad()?;
        ddp.backward(&(ddp.forward(&inputs) - 1.0).square().mean(Kind::Float))?;
        optimizer.step(0.01)?;
    }
    let (number, count, hash) = (rank.rank(), rank.world_size(), ddp.parameters_hash()?);
    Ok(format!("rank {number} of {count}: parameters {hash:016x}"))
}

fn main() -> anyhow::Result<()> {
    let launched = Spawn::from_env()?; // must be first, because it looks for GPUs
    if launched.launcher().is_some() {
        launched.run(train)?.iter().for_each(|line| println!("{line}"));
        return Ok(());
    }
    let lines = spawn(2, train)?;
    println!("two ranks in one process:\n    {}\n    {}", lines[0], lines[1]);

    // torchrun's agents provide the same: a store for the rendezvous, and variables with the rank of each process.
    let store = TcpStore::serve("127.0.0.1", 0, Duration::from_secs(60))?;
    let start = |node| {
        let mut command = Command::new(env::current_exe()?);
        command.envs([("RANK", node), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")]);
        command.envs([("LOCAL_WORLD_SIZE", "1"), ("TORCHELASTIC_USE_AGENT_STORE", "True")]);
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", store.port().to_string());
        command.env("CUDA_VISIBLE_DEVICES", ""); // a machine with one GPU has no second one for the other process
        command.stdout(Stdio::piped()).spawn()
    };
    println!("two processes with one rank each, as on two machines:");
    for (process, expected) in [start("0")?, start("1")?].into_iter().zip(&lines) {
        let output = process.wait_with_output()?; // if one process fails, the other fails too
        let printed = String::from_utf8_lossy(&output.stdout);
        print!("    {printed}");
        ensure!(printed.trim() == *expected, "{}; expected {expected}", output.status);
    }
    Ok(())
}
