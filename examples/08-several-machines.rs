//! 08. Several machines: the same ranks in several processes, which find each other through a launcher's variables.
//!
//!     cargo run --release --example 08-several-machines
//!
//! Without a launcher it plays one: it starts itself twice, as on two machines. With one, on each machine,
//!
//!     torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=node0:29400 \
//!         --no-python target/release/examples/08-several-machines
//!
//! or by hand, with torchrun's flags as variables, and PET_NODE_RANK=1 on the second:
//!
//!     PET_NNODES=2 PET_NODE_RANK=0 MASTER_ADDR=node0 target/release/examples/08-several-machines

#![allow(clippy::print_stdout)]

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use std::{env, io, thread};

use anyhow::{Context, ensure};
use ddp_mp::launch::{BackendChoice, Launch, LaunchKind, LaunchOptions, World, detect, place};
use ddp_mp::models::ModelConfig;
use ddp_mp::process_group::c10d::TcpStore;
use ddp_mp::torch::cuda::{self, Cuda};
use ddp_mp::{
    Backend, DdpOptions, DistributedDataParallel, Optimizer, Rank, Sgd, SgdOptions, Spawn,
    fork_rng, spawn,
};
use tch::{Kind, Tensor, kind};
use wait_timeout::ChildExt;

/// How long anybody waits for another.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What every rank does, wherever it is. Returns who it is, and 64 bits over the parameters in the end.
fn train(rank: &Rank, backend: Backend) -> anyhow::Result<String> {
    let group = rank.init_process_group(backend)?;
    let (vs, model) = ModelConfig::default().build(rank.device(), 0)?; // one layer, 20 -> 1
    let mut ddp = DistributedDataParallel::new(model, &vs, group, DdpOptions::default())?;
    let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
    let inputs = fork_rng(rank.rank() as u64, || Tensor::rand([32, 20], kind::FLOAT_CPU))?
        .to_device(rank.device());
    for _step in 0..10 {
        ddp.zero_grad()?;
        ddp.backward(&(ddp.forward(&inputs) - 1.0).square().mean(Kind::Float))?;
        optimizer.step(0.01)?;
    }
    let (number, count, hash) = (rank.rank(), rank.world_size(), ddp.parameters_hash()?);
    Ok(format!("rank {number} of {count}: parameters {hash:016x}"))
}

/// One process of several: who it is, where its ranks run, whom it meets; from there on all is as in one process.
fn run(launch: &Launch, cuda: &Cuda) -> anyhow::Result<()> {
    let cores = thread::available_parallelism()?.get();
    let placement = place(launch.nproc, BackendChoice::Auto, cuda, &launch.share(cores))?
        .in_processes(launch.processes.count, BackendChoice::Auto)?; // nccl on GPUs, else gloo
    let world = World::meet(launch, &placement, TIMEOUT, None, Vec::new())?.map(Arc::new);
    let backend = placement.backend;
    let tell = |line| println!("{line}");
    Spawn::at(&placement).world(world).run(move |rank| train(rank, backend).map(tell))?;
    Ok(())
}

fn main() -> anyhow::Result<()> {
    let cuda = cuda::load(); // before anything else of libtorch
    let launch = detect(&|name| env::var(name).ok(), &LaunchOptions::default(), cuda.usable())?;
    if launch.kind != LaunchKind::Local {
        return run(&launch, &cuda);
    }
    let lines = spawn(2, |rank| train(rank, Backend::Threaded))?; // in the order of the ranks
    println!("two ranks in one process:\n    {}\n    {}", lines[0], lines[1]);

    // What torchrun's agents are for: a store to meet in, and variables that tell each process who it is.
    let store = TcpStore::serve("127.0.0.1", 0, TIMEOUT)?;
    let mut processes = Vec::new();
    for node in ["0", "1"] {
        let mut command = Command::new(env::current_exe()?);
        command.envs([("RANK", node), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")]);
        command.envs([("LOCAL_WORLD_SIZE", "1"), ("TORCHELASTIC_USE_AGENT_STORE", "True")]);
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", store.port().to_string());
        command.env("CUDA_VISIBLE_DEVICES", ""); // a machine with one GPU has none for a second process
        processes.push(command.stdout(Stdio::piped()).spawn()?);
    }
    println!("two processes with one rank each, as on two machines:");
    let ended = processes.iter_mut().zip(&lines).try_for_each(|(process, expected)| {
        let status = process.wait_timeout(TIMEOUT)?.context("a process does not end")?;
        let said = io::read_to_string(process.stdout.take().context("it has an output")?)?;
        print!("    {said}");
        ensure!(status.success() && said.trim() == *expected, "{status}; expected {expected}");
        Ok(())
    });
    // When one has failed, the other may still run.
    processes.iter_mut().for_each(|it| drop((it.kill(), it.wait())));
    ended
}
