//! The checks of the exercises that run `ddp-mp`: now, on ranks of this machine's CPU. They read its results.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;

use anyhow::{Context, ensure};
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::answer::Answer;
use super::lessons::Found;
use engine::checkpoint::{Checkpoint, CheckpointDir, TensorFile, TrainerState};
use engine::launch::this_program;
use engine::os::{Ended, TemporaryFolder, TiedChild, text_in};

/// Returns a field of the first event of this name among what `ddp-mp` has printed.
fn get<T: DeserializeOwned>(events: &[Value], event: &str, field: &str) -> anyhow::Result<T> {
    let value = events.iter().find(|value| value["event"] == event).map(|it| it[field].clone());
    let value = value.and_then(|value| serde_json::from_value(value).ok());
    value.with_context(|| format!("ddp-mp printed no {field} of an event {event}"))
}

/// Runs `ddp-mp` with these flags.
fn run(flags: &[&str]) -> anyhow::Result<Vec<Value>> {
    run_machines(&[flags])
}

/// Runs a process of `ddp-mp` for each of `machines`, which have these flags. Returns the JSON objects that the first
/// prints.
fn run_machines(machines: &[&[&str]]) -> anyhow::Result<Vec<Value>> {
    let start = |flags: &&[&str]| {
        let stdout = tempfile::tempfile()?;
        let mut command = this_program()?;
        command.args(["--launch=local", "--log-format=json", "--timeout=60s"]).args(*flags);
        command.env("CUDA_VISIBLE_DEVICES", "").stdout(stdout.try_clone()?);
        Ok((TiedChild::spawn(&mut command)?, stdout))
    };
    let started: io::Result<Vec<_>> = machines.iter().map(start).collect();
    let mut texts = Vec::new();
    for (process, stdout) in started.context("starting ddp-mp")? {
        let Ended { status, stderr } = process.wait().context("waiting for ddp-mp")?;
        // A run whose replicas differ at the end fails, and has printed all before.
        ensure!(matches!(status.code(), Some(0 | 1)), "a process failed ({status}): {stderr}");
        texts.push(text_in(&stdout)?);
    }
    Ok(texts[0].lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
}

/// Returns the hash of the parameters that this run prints.
fn hash(machines: &[&[&str]]) -> anyhow::Result<String> {
    get(&run_machines(machines)?, "end", "parameters_hash")
}

pub(super) fn demo() -> anyhow::Result<Found> {
    let steps: u64 = get(&run(&["--nproc-per-node=3"])?, "end", "steps")?;
    let samples = 4096u64.div_ceil(3);
    let last_batch = (samples - 1) % 32 + 1;
    let numbers = json!({ "samples": samples, "steps": steps, "last_batch": last_batch });
    Ok((Answer::Whole(vec![steps]), numbers))
}

pub(super) fn update() -> anyhow::Result<Found> {
    let folder = TemporaryFolder::new().context("creating a folder for tensors")?;
    let file = folder.path().join("kept");
    let keep = format!("--keep={}", file.to_string_lossy());
    run(&["--nproc-per-node=2", "--lr=0.01", "--max-steps=1", &keep])?;
    let kept = TensorFile::read(&file)?.tensors()?;
    let [before, gradient, after] = ["before", "average", "parameter"]
        .map(|it| kept[&format!("{it}.weight")].double_value(&[0, 18]));
    let [b, g, a] = [format!("{before:.8}"), format!("{gradient:.6}"), format!("{after:.8}")];
    Ok((Answer::Decimal(after), json!({ "before": b, "gradient": g, "after": a })))
}

pub(super) fn batch() -> anyhow::Result<Found> {
    let of = |flags: &[&str]| -> anyhow::Result<(f64, String)> {
        let events = run(flags)?;
        Ok((get(&events, "end", "loss")?, get(&events, "end", "parameters_hash")?))
    };
    let (loss_of_two, hash_of_two) = of(&["--nproc-per-node=2", "--batch-size=32"])?;
    let (loss_of_one, hash_of_one) = of(&["--nproc-per-node=1", "--batch-size=64"])?;
    let answer = Answer::YesNo(hash_of_two == hash_of_one);
    let numbers = json!({
        "loss_of_two": format!("{loss_of_two:.6}"),
        "loss_of_one": format!("{loss_of_one:.6}"),
        "hash_of_two": hash_of_two,
        "hash_of_one": hash_of_one,
    });
    Ok((answer, numbers))
}

pub(super) fn backend() -> anyhow::Result<Found> {
    let threaded = hash(&[&["--nproc-per-node=4", "--spawn=threads"]])?;
    let gloo = hash(&[&["--nproc-per-node=4", "--spawn=processes"]])?;
    let answer = Answer::YesNo(threaded == gloo);
    Ok((answer, json!({ "threaded": threaded, "gloo": gloo })))
}

pub(super) fn straggler() -> anyhow::Result<Found> {
    let events = run(&["--nproc-per-node=2", "--inject-fault=slow=20ms:rank=1,at=step"])?;
    let [rank_0, rank_1]: [f64; 2] = get(&events, "end", "collective_seconds_by_rank")?;
    let answer = Answer::Whole(vec![u64::from(rank_1 > rank_0)]);
    let [rank_0, rank_1] = [rank_0, rank_1].map(|seconds| format!("{seconds:.2}"));
    Ok((answer, json!({ "seconds_of_0": rank_0, "seconds_of_1": rank_1 })))
}

pub(super) fn desync() -> anyhow::Result<Found> {
    let fault = "--inject-fault=desync:rank=1,at=step,step=5";
    let events = run(&["--nproc-per-node=3", fault, "--check-replicas-every=4"])?;
    let step: u64 = get(&events, "failure", "sequence")?;
    let rank: u64 = get(&events, "failure", "rank")?;
    let numbers = json!({ "step": step, "rank": rank, "steps": step + 1 });
    Ok((Answer::Whole(vec![step]), numbers))
}

pub(super) fn bad_core() -> anyhow::Result<Found> {
    let folder = TemporaryFolder::new().context("creating a folder for records")?;
    // The ranks and the hashes of their parameters after step 5.
    let record = |name: &str, more: &[&str]| -> anyhow::Result<Vec<Value>> {
        let file = folder.path().join(name);
        let record = format!("--record={}", file.to_string_lossy());
        run(&[&["--nproc-per-node=3", "--max-steps=10", &record], more].concat())?;
        let text = fs::read_to_string(file).context("reading a record")?;
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let of_step = lines.filter(|line| line["event"] == "step" && line["step"] == 5);
        Ok(of_step.map(|line| json!([line["rank"], line["parameters"]])).collect())
    };
    let good = record("good", &[])?;
    let with_flip = |place: &str| -> anyhow::Result<usize> {
        // A bit of the fraction: a flip of the exponent could make the loss infinite, and so end the run in this step.
        let flip = format!("--inject-fault=flip=22:rank=2,at=step,step=5,in={place}");
        Ok(record(place, &[&flip])?.iter().filter(|rank| !good.contains(rank)).count())
    };
    let (with_gradient, with_parameter) = (with_flip("gradient")?, with_flip("parameter")?);
    let numbers = json!({ "with_gradient": with_gradient, "with_parameter": with_parameter });
    Ok((Answer::Whole(vec![with_parameter as u64]), numbers))
}

pub(super) fn lost_rank() -> anyhow::Result<Found> {
    let folder = TemporaryFolder::new().context("creating a folder for checkpoints")?;
    let dir = folder.path().join("run");
    let save = format!("--checkpoint-dir={}", dir.to_string_lossy());
    let fault = "--inject-fault=kill:rank=1,at=step,step=20";
    let ranks = ["--nproc-per-node=3", "--spawn=processes"];
    let after_failure = hash(&[&[&ranks[..], &["--max-restarts=1", &save, fault]].concat()])?;
    let whole = hash(&[&ranks])?;
    let saved = fs::read_dir(dir).context("listing the checkpoints")?;
    let saved = saved.filter_map(|it| TrainerState::read(&it.ok()?.path()).ok());
    let step = saved.filter(|state| state.after_failure.is_some()).map(|state| state.step).next();
    let step = step.context("no rank has saved its state after the failure")?;
    let numbers = json!({ "step": step, "after_failure": after_failure, "whole": whole });
    Ok((Answer::Whole(vec![step]), numbers))
}

pub(super) fn overlap() -> anyhow::Result<Found> {
    // The percentage of communication that backward hides, with small and with large buckets.
    let hidden = |latency: &str, steps: u64, batch: &str| -> anyhow::Result<[f64; 2]> {
        let network = format!("--simulate-cluster=bandwidth=2Gbit/s,latency={latency}");
        let steps = format!("--max-steps={steps}");
        let model = ["--model=mlp", "--in-features=512", "--hidden=512,512,512,512,512"];
        let of_bucket = |bucket: &str| -> anyhow::Result<f64> {
            let more = ["--out-features=512", batch, "--nproc-per-node=2"];
            let flags = [&model[..], &more, &["--max-epochs=9", &network, &steps, bucket]].concat();
            Ok(100.0 * get::<f64>(&run(&flags)?, "end", "overlapped")?)
        };
        Ok([of_bucket("--bucket-cap-mb=1")?, of_bucket("--bucket-cap-mb=100")?])
    };
    // Many short steps are less disturbed by other processes. A small batch keeps backward far below 50 ms, on a slow
    // machine, too.
    let near = hidden("20us", 20, "--batch-size=512")?;
    let far = hidden("50ms", 3, "--batch-size=64")?;
    let better = |[small, large]: [f64; 2]| if small > large { 1 } else { 100 };
    let answer = Answer::Whole(vec![better(near), better(far)]);
    let [near, far] = [near, far].map(|both| both.map(|percent| format!("{percent:.0}")));
    let numbers = json!({
        "near_small": near[0],
        "near_large": near[1],
        "far_small": far[0],
        "far_large": far[1],
    });
    Ok((answer, numbers))
}

pub(super) fn checkpoints() -> anyhow::Result<Found> {
    let folder = TemporaryFolder::new().context("creating a folder for checkpoints")?;
    let path = folder.path().join("run");
    let dir = format!("--checkpoint-dir={}", path.to_string_lossy());
    run(&["--nproc-per-node=2", "--save-every=7", "--max-steps=45", &dir])?;
    let newest = CheckpointDir::newest_in(&path)?.context("the run has saved no checkpoint")?;
    let step = Checkpoint::read(&newest)?.state().step;
    let name = newest.file_name().unwrap_or_default().to_string_lossy();
    Ok((Answer::Whole(vec![step]), json!({ "step": step, "checkpoint": name })))
}

pub(super) fn traffic() -> anyhow::Result<Found> {
    // The bytes of a step: those of two runs, without what both send at their start.
    let sent = |ranks: &str| -> anyhow::Result<u64> {
        let of = |steps: &str| -> anyhow::Result<u64> {
            let events =
                run(&["--model=mlp", "--hidden=256,256", "--nproc-per-node", ranks, steps])?;
            Ok(get::<Vec<u64>>(&events, "end", "bytes_sent_by_rank")?[0])
        };
        Ok((of("--max-steps=12")? - of("--max-steps=2")?) / 10)
    };
    let (of_four, of_eight) = (sent("4")?, sent("8")?);
    let factor = of_eight as f64 / of_four as f64;
    let (four, eight, times) = (of_four >> 10, of_eight >> 10, format!("{factor:.3}"));
    let numbers = json!({ "of_four": four, "of_eight": eight, "factor": times });
    Ok((Answer::Decimal(factor), numbers))
}

/// Returns a port of this machine, with a socket that keeps it from other programs. The socket does not listen, so that a
/// store still can: both let others use their address.
fn reserve_port() -> io::Result<(OwnedFd, u16)> {
    let socket =
        net::socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    net::sockopt::set_socket_reuseaddr(&socket, true)?;
    net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0))?;
    let port = SocketAddrV4::try_from(net::getsockname(&socket)?)?.port();
    Ok((socket, port))
}

pub(super) fn two_by_two() -> anyhow::Result<Found> {
    let alone = hash(&[&["--nproc-per-node=4"]])?;
    let (_reserved, port) = reserve_port().context("reserving a port")?;
    let port = format!("--master-port={port}");
    let machine = |number| {
        let ranks = ["--nnodes=2", "--master-addr=127.0.0.1", "--nproc-per-node=2", &port];
        [&[number, "--shared-memory=off"][..], &ranks].concat() // two machines share none
    };
    let together = hash(&[&machine("--node-rank=0"), &machine("--node-rank=1")])?;
    let answer = Answer::YesNo(alone == together);
    Ok((answer, json!({ "one_process": alone, "two_machines": together })))
}
