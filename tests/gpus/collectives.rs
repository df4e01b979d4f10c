//! Every collective, message and group with NCCL: in one process, in two of one rank, and in two of two.
//!
//! A test starts this very test binary again for each process; `child` is what runs there.

use std::env;
use std::path::Path;
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;

use ddp_mp::ffi::cuda;
use ddp_mp::launch::{BackendChoice, JoinLaunchOptions, detect};
use ddp_mp::models::{ModelConfig, ModelKind};
use ddp_mp::{
    Backend, DataLoader, Dataset, DdpOptions, DistributedDataParallel, DistributedSampler,
    JoinOptions, Optimizer, ProcessGroup, ReduceOp, Sgd, SgdOptions, fork_rng, spawn,
};
use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};

use crate::harness::{TIMEOUT, free_port, join};
use crate::machine::{SHARES_GPUS, has_no_wait_behind_nccl, reports, simulate};
use crate::shared::power_sgd::{PowerSgd, PowerSgdOptions};
use crate::shared::surface::{self, Seen, Surface, from_lines, with_threads};
use crate::shared::{functional, groups, kinds, scene};

/// How many ranks each process has.
const LAYOUTS: [&[usize]; 3] = [&[4], &[1, 1], &[2, 2]];

/// Runs the scene `name` with a simulated GPU for each rank and a host for each process, and returns what they write.
/// Ranks leave groups, and the run, as soon as they are through: an abort would cut off what they have sent to other hosts.
fn play(name: &str, ranks: &[usize]) -> String {
    play_with(name, ranks, |process, command| {
        command.env("SIM_HOST", process.to_string()).env("SIM_NCCL_ABORT_CUTS", "1");
    })
}

/// The same on one host, after `prepare` for each process, by its number.
fn play_with(name: &str, ranks: &[usize], prepare: impl Fn(usize, &mut Command)) -> String {
    let folder = tempfile::tempdir().unwrap();
    let port = free_port();
    let start = |(process, count): (usize, &usize)| {
        let mut command = scene::process("collectives::child", name, process, ranks, port);
        simulate(&mut command, ranks.iter().sum());
        let first: usize = ranks[..process].iter().sum();
        let mine: Vec<String> = (first..first + count).map(|gpu| gpu.to_string()).collect();
        command.env("CUDA_VISIBLE_DEVICES", mine.join(","));
        command.env("DDP_MP_FOLDER", folder.path());
        prepare(process, &mut command);
        command.spawn().unwrap()
    };
    let mut all = String::new();
    for output in join(ranks.iter().enumerate().map(start).collect()) {
        let text =
            String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        let is_over = output.status.success() && text.contains("scene over");
        assert!(is_over, "{name} {ranks:?}: {}: {text}", output.status);
        all += &text;
    }
    all
}

/// The same, in which no host waits in libtorch behind a collective.
fn play_without_waits(name: &str, ranks: &[usize]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let told = play_with(name, ranks, |_, command| {
        command.env("SIM_REPORT", folder.path().join("%p.json"));
    });
    let reports = reports(folder.path());
    assert_eq!(reports.len(), ranks.len());
    reports.iter().for_each(|report| has_no_wait_behind_nccl(report, name));
    told
}

/// The variable with the backend of a scene, if it is not nccl.
const BACKEND: &str = "DDP_MP_BACKEND";

fn backend() -> Backend {
    env::var(BACKEND).map_or(Backend::Nccl, |name| name.parse().unwrap())
}

/// Nothing, unless a test of this file has started this process for a scene.
#[test]
fn child() {
    let Some((name, options)) = scene::mine() else { return };
    let cuda = cuda::load();
    let launch = detect(&|_| None, &options, cuda.usable()).unwrap();
    let backend = backend();
    let options = JoinLaunchOptions {
        backend: BackendChoice::Given(backend),
        timeout: TIMEOUT,
        ..JoinLaunchOptions::default()
    };
    let launched = launch.join(&cuda, options).unwrap();
    assert_eq!(launched.placement.backend, backend);
    let play = move |group: &Rc<ProcessGroup>| -> anyhow::Result<()> {
        match &name[..] {
            "asynchronous" => groups::asynchronous(group)?,
            "functional" => functional::compare(group)?,
            "groups" => groups::compare(group),
            "kinds" => {
                kinds::are_reduced(group)?;
                kinds::go_where_they_should(group)?;
            }
            "power_sgd" => println!("parameters {:016x}", with_power_sgd(group)?),
            "surface" => surface(group),
            "waits" => waits(group)?,
            other => panic!("no scene {other}"),
        }
        Ok(())
    };
    let spawn = launched.spawn().timeout(TIMEOUT);
    let played = spawn.run(move |rank| play(&rank.init_process_group(backend)?));
    played.unwrap_or_else(|error| panic!("{error}"));
    println!("scene over");
}

fn surface(group: &Rc<ProcessGroup>) {
    let folder = env::var_os("DDP_MP_FOLDER").unwrap();
    let of_process = group.local_world_size();
    let mut surface = Surface::new(group.clone(), backend(), of_process, Path::new(&folder));
    surface.shares_gpu = env::var_os(BACKEND).is_some();
    let seen = surface.run();
    println!("{}", surface::lines(group.rank(), &seen));
}

/// Trains with a communication hook that calls libtorch's linear algebra. Returns the hash of the parameters.
fn with_power_sgd(group: &Rc<ProcessGroup>) -> anyhow::Result<u64> {
    let config = ModelConfig { kind: ModelKind::Mlp, ..ModelConfig::default() };
    let (vs, model) = config.build(group.device(), 7)?;
    let options = DdpOptions { bucket_cap_mb: 0.001, ..DdpOptions::default() };
    let mut ddp = DistributedDataParallel::new(model, &vs, group.clone(), options)?;
    let options = PowerSgdOptions { start_iter: 1, ..PowerSgdOptions::default() };
    ddp.register_comm_hook(Box::new(PowerSgd::new(options)))?;
    let mut optimizer = Sgd::new(ddp.flat_buffers(), SgdOptions::default())?;
    for step in 0..6 {
        let seed = (step * group.world_size() + group.rank()) as u64;
        let inputs = fork_rng(seed, || Tensor::rand([32, 20], (Kind::Float, Device::Cpu)))?;
        ddp.zero_grad()?;
        group.synchronize()?; // the copy must not wait behind a collective
        let outputs = ddp.forward(&inputs.to_device(group.device()));
        ddp.backward(&outputs.square().mean(Kind::Float))?;
        optimizer.step(0.1)?;
    }
    Ok(ddp.parameters_hash()?)
}

/// libtorch loads its linear algebra in the first call, without a lock: threads must not make it at once.
#[test]
fn linear_algebra_of_threads_has_the_bits_of_cpu_ranks() {
    for count in [2, 3] {
        let on_cpu =
            spawn(count, |rank| with_power_sgd(&rank.init_process_group(Backend::Threaded)?));
        let told = play_without_waits("power_sgd", &[count]);
        for hash in on_cpu.unwrap() {
            let expected = format!("parameters {hash:016x}");
            assert_eq!(told.matches(&expected).count(), count, "{expected}: {told}");
        }
    }
}

/// Samples of different shapes: only the first fits the memory that is pinned for batches.
#[derive(Debug)]
struct Growing;

impl Dataset for Growing {
    fn len(&self) -> usize {
        8
    }

    fn get(&self, index: usize) -> anyhow::Result<(Tensor, Tensor)> {
        let row = Tensor::ones([index as i64 + 1], (Kind::Float, Device::Cpu));
        Ok((row, Tensor::from(index as f32)))
    }
}

/// Sends objects, loads batches, and trains with uneven inputs, always behind a launched all_reduce.
fn waits(group: &Rc<ProcessGroup>) -> anyhow::Result<()> {
    let (rank, device) = (group.rank(), group.device());
    let mut sum = Tensor::ones([4], (Kind::Float, device));
    let mut launch = || group.all_reduce(&mut sum, ReduceOp::Sum);
    launch()?;
    assert_eq!(group.all_gather_object(&rank)?, [0, 1]);
    launch()?;
    assert_eq!(group.gather_object(&rank, 0)?, (rank == 0).then(|| vec![0, 1]));
    launch()?;
    let mut list = if rank == 0 { vec![7] } else { Vec::new() };
    group.broadcast_object_list(&mut list, 0)?;
    launch()?;
    let scattered = group.scatter_object_list((rank == 0).then_some(&[5, 6][..]), 0)?;
    assert_eq!((list, scattered), (vec![7], [5, 6][rank]));
    launch()?;
    if rank == 0 {
        group.send_object_list(&["hello"], 1)?;
    } else {
        assert_eq!(group.recv_object_list::<String>(0)?, ["hello"]);
    }
    for (pins, workers) in [(true, 0), (true, 1), (false, 0), (false, 1)] {
        let sampler = DistributedSampler::new(8, 2, rank)?;
        let loader = DataLoader::new(Arc::new(Growing), sampler, 1, device)?;
        let loader = loader.num_workers(workers, 1, group);
        let loader = if pins { loader.pin_memory(group)? } else { loader };
        for batch in loader.epoch(0)? {
            let batch = batch?;
            assert_eq!(batch.inputs.device(), device);
            launch()?;
        }
    }
    launch()?;
    let vs = VarStore::new(device);
    let model = nn::seq().add(nn::linear(vs.root(), 3, 8, Default::default()));
    let model = model.add(nn::linear(vs.root(), 8, 1, Default::default()));
    let options = DdpOptions { bucket_cap_mb: 0.00001, ..DdpOptions::default() };
    let mut ddp = DistributedDataParallel::new(model, &vs, group.clone(), options)?;
    let samples = Tensor::ones([4, 3], (Kind::Float, device));
    ddp.join(JoinOptions::default(), |ddp| {
        for _ in 0..=rank {
            ddp.zero_grad()?;
            let loss = ddp.forward(&samples).square().mean(Kind::Float);
            ddp.backward(&loss)?;
        }
        Ok(())
    })
}

#[test]
fn objects_and_join_never_wait_behind_a_collective() {
    for ranks in [&[2][..], &[1, 1]] {
        play_without_waits("waits", ranks);
    }
}

#[test]
fn every_method_gives_the_same_with_nccl_and_threads() {
    for ranks in LAYOUTS {
        let seen: Seen = from_lines(&play("surface", ranks));
        assert_eq!(seen, with_threads(ranks.iter().sum(), Backend::Nccl), "{ranks:?}");
    }
}

/// The recorded values of `functional` are those of at most three ranks.
#[test]
fn every_dtype_group_and_asynchronous_form_is_right() {
    let few: [&[usize]; 5] = [&[1], &[2], &[3], &[1, 1], &[2, 1]];
    let grouped: [&[usize]; 3] = [&[4], &[2, 2], &[2, 1, 3]];
    for (name, layouts) in [
        ("kinds", &LAYOUTS[..]),
        ("asynchronous", &LAYOUTS),
        ("functional", &few),
        ("groups", &grouped),
    ] {
        layouts.iter().for_each(|ranks| drop(play(name, ranks)));
    }
}

/// Ranks that share a GPU: threads and processes with NCCL, and threads with their own backend. A stream of another rank
/// that is not waited for shows in the values.
#[test]
fn ranks_on_one_gpu_get_the_same() {
    const SHARED: [(Backend, &[usize]); 4] = [
        (Backend::Nccl, &[4]),
        (Backend::Nccl, &[2, 2]),
        (Backend::Nccl, &[1, 1]),
        (Backend::Threaded, &[4]),
    ];
    for (backend, ranks) in SHARED {
        let on_one_gpu = |_: usize, command: &mut Command| {
            command.env("CUDA_VISIBLE_DEVICES", "0").env(BACKEND, backend.name());
            command.env("SIM_SEED", "1").env("SIM_DELAY_MAX_US", "300");
            command.envs(SHARES_GPUS);
        };
        let seen: Seen = from_lines(&play_with("surface", ranks, on_one_gpu));
        assert_eq!(seen, with_threads(ranks.iter().sum(), backend), "{backend:?} {ranks:?}");
        for name in ["kinds", "asynchronous", "groups"] {
            if name != "groups" || ranks.iter().sum::<usize>() > 2 {
                play_with(name, ranks, on_one_gpu);
            }
        }
    }
}
