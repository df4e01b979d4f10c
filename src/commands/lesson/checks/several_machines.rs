//! The lessons about backends and several machines: ranks in several processes, against the ranks of one.

use std::io;
use std::net::TcpListener;

use anyhow::{Context, ensure};

use super::Found;
use crate::commands::lesson::answer::Answer;
use crate::launch::this_program;
use crate::os::{Ended, TiedChild, text_in};

/// The flags with which `ddp-mp` prints the hash of its parameters as JSON, and does not wait long for a lost process.
const FLAGS: [&str; 3] = ["--launch=local", "--log-format=json", "--timeout=60s"];

/// Two processes of `ddp-mp` with two ranks each: whether the parameters have the bits of one process with four.
pub(in super::super) fn two_by_two() -> anyhow::Result<Found> {
    let alone = train(&[&["--nproc-per-node=4"]])?;
    // Nobody listens on this port any more, and the system does not give it away again soon.
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let port = format!("--master-port={port}");
    let machine = |number| {
        let ranks = ["--nnodes=2", "--master-addr=127.0.0.1", "--nproc-per-node=2", &port];
        [&[number, "--shared-memory=off"][..], &ranks].concat() // two machines share none
    };
    let together = train(&[&machine("--node-rank=0"), &machine("--node-rank=1")])?;
    let answer = Answer::YesNo(alone == together);
    Ok(Found::new(answer, &[("one_process", &alone), ("two_machines", &together)]))
}

/// `--spawn=processes`, whose backend is `gloo`: whether the parameters have the bits that `threaded` gives.
pub(in super::super) fn backend() -> anyhow::Result<Found> {
    let threaded = train(&[&["--nproc-per-node=4", "--spawn=threads"]])?;
    let gloo = train(&[&["--nproc-per-node=4", "--spawn=processes"]])?;
    let answer = Answer::YesNo(threaded == gloo);
    Ok(Found::new(answer, &[("threaded", &threaded), ("gloo", &gloo)]))
}

/// Runs a process of `ddp-mp` for each of `machines`, which have these flags. Returns the hash of the parameters.
fn train(machines: &[&[&str]]) -> anyhow::Result<String> {
    let start = |flags: &&[&str]| {
        let stdout = tempfile::tempfile()?;
        let mut command = this_program()?;
        command.args(FLAGS).args(*flags).env("CUDA_VISIBLE_DEVICES", ""); // ranks on the CPU
        command.stdout(stdout.try_clone()?);
        Ok((TiedChild::spawn(&mut command)?, stdout))
    };
    let started = machines.iter().map(start).collect::<io::Result<Vec<_>>>();
    let mut outputs = Vec::new();
    for (process, stdout) in started.context("starting ddp-mp")? {
        let Ended { status, stderr } = process.wait().context("waiting for ddp-mp")?;
        ensure!(status.success(), "a process failed ({status}): {stderr}");
        outputs.push(stdout);
    }
    // The process of rank 0 prints the results.
    let text = text_in(outputs.first().context("there is no process")?)?;
    let mut events = text.lines().filter_map(|line| serde_json::from_str(line).ok());
    let hash = events.find_map(|event: serde_json::Value| {
        Some(event.get("parameters_hash")?.as_str()?.to_owned())
    });
    hash.context("ddp-mp printed no hash of its parameters")
}
