//! How long two processes take to meet in the store and to form a group, once both have started.
//!
//!     cargo bench --bench rendezvous

#![allow(clippy::print_stdout)]

use std::env;
use std::io::{BufRead, BufReader, Write, stdin};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use ddp_mp::Backend;
use ddp_mp::ffi::cuda::Cuda;
use ddp_mp::launch::{JoinLaunchOptions, LaunchOptions, Nproc, detect};

const TIMEOUT: Duration = Duration::from_secs(60);
const ROUNDS: usize = 21;

fn main() -> anyhow::Result<()> {
    match (env::var("BENCH_PROCESS"), env::var("BENCH_PORT")) {
        (Ok(process), Ok(port)) => meet(process.parse()?, port.parse()?),
        _ => measure(),
    }
}

/// One of the two processes: says that it is there, waits for the word, and says how long it took.
fn meet(process: usize, port: u16) -> anyhow::Result<()> {
    let options = LaunchOptions {
        nnodes: Some(2),
        node_rank: Some(process),
        master_addr: Some("127.0.0.1".into()),
        master_port: Some(port),
        nproc: Nproc::Count(1),
        ..LaunchOptions::default()
    };
    let launch = detect(&|_| None, &options, 0)?;
    println!("ready");
    stdin().lock().lines().next().context("no word to go")??;
    let began = Instant::now();
    let options = JoinLaunchOptions { timeout: TIMEOUT, ..JoinLaunchOptions::default() };
    let joined_launch = launch.join(&Cuda::default(), options)?;
    joined_launch.spawn().timeout(TIMEOUT).run(move |rank| {
        let group = rank.init_process_group(Backend::Gloo)?;
        group.barrier()?;
        println!("{}", began.elapsed().as_secs_f64() * 1e3);
        Ok(())
    })?;
    Ok(())
}

fn measure() -> anyhow::Result<()> {
    let mut times = (0..ROUNDS).map(|_| round()).collect::<anyhow::Result<Vec<f64>>>()?;
    times.sort_unstable_by(f64::total_cmp);
    let (fastest, median, slowest) = (times[0], times[ROUNDS / 2], times[ROUNDS - 1]);
    println!("{median:.1} ms in the middle, {fastest:.1} to {slowest:.1} ms");
    Ok(())
}

/// The time of the slower one, in ms.
fn round() -> anyhow::Result<f64> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port().to_string();
    let start = |process: usize| {
        Command::new(env::current_exe()?)
            .envs([("BENCH_PROCESS", process.to_string()), ("BENCH_PORT", port.clone())])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
    };
    let mut children: [Child; 2] = [start(0)?, start(1)?];
    let mut outputs = Vec::new();
    for child in &mut children {
        let mut output = BufReader::new(child.stdout.take().context("no stdout")?).lines();
        output.next().context("it did not start")??;
        outputs.push(output);
    }
    for child in &mut children {
        child.stdin.take().context("no stdin")?.write_all(b"go\n")?;
    }
    let mut slowest: f64 = 0.;
    for (child, mut output) in children.iter_mut().zip(outputs) {
        slowest = slowest.max(output.next().context("it did not meet")??.parse()?);
        anyhow::ensure!(child.wait()?.success(), "it failed");
    }
    Ok(slowest)
}
