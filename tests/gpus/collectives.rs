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
use ddp_mp::{
    Backend, DataLoader, Dataset, DdpOptions, DistributedDataParallel, DistributedSampler,
    JoinOptions, ProcessGroup, ReduceOp,
};
use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};

use crate::harness::{TIMEOUT, free_port, join};
use crate::machine::{Log, SHARES_GPUS, simulate};
use crate::shared::surface::{self, Seen, Surface, from_lines, with_threads};
use crate::shared::{functional, groups, kinds, scene};

/// How many ranks each process has.
const LAYOUTS: [&[usize]; 3] = [&[4], &[1, 1], &[2, 2]];

/// Plays the scene `name` with a simulated GPU for each rank, and returns what the processes write.
fn play(name: &str, ranks: &[usize]) -> String {
    play_with(name, ranks, |_| {})
}

/// The same, after `prepare` for each process.
fn play_with(name: &str, ranks: &[usize], prepare: impl Fn(&mut Command)) -> String {
    let folder = tempfile::tempdir().unwrap();
    let port = free_port();
    let start = |(process, count): (usize, &usize)| {
        let mut command = scene::process("collectives::child", name, process, ranks, port);
        simulate(&mut command, ranks.iter().sum());
        let first: usize = ranks[..process].iter().sum();
        let mine: Vec<String> = (first..first + count).map(|gpu| gpu.to_string()).collect();
        command.env("CUDA_VISIBLE_DEVICES", mine.join(","));
        command.env("DDP_MP_FOLDER", folder.path());
        prepare(&mut command);
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
            "linear_algebra" => {
                let matrix = Tensor::ones([8, 4], (Kind::Float, group.device()));
                drop(Tensor::f_linalg_qr(&matrix, "reduced")?);
            }
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

/// libtorch loads its linear algebra in the first call, without a lock: the ranks of a process must not come to that.
#[test]
fn linear_algebra_is_loaded_before_ranks_need_it() {
    play("linear_algebra", &[2]);
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

/// A host that waits in libtorch behind a collective notices neither a failure nor a timeout.
#[test]
fn objects_and_join_never_wait_behind_a_collective() {
    for ranks in [&[2][..], &[1, 1]] {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("log");
        play_with("waits", ranks, |command| {
            command.env("SIM_LOG", &file);
        });
        let log = Log::read(&file);
        assert_eq!(log.contexts().len(), ranks.len());
        assert_eq!(log.waits_behind_nccl(), [""; 0], "{ranks:?}");
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
    for (name, layouts) in [
        ("kinds", [&[4][..], &[1, 1]]),
        ("asynchronous", [&[4], &[2, 2]]),
        ("functional", [&[3], &[2, 1]]),
        ("groups", [&[4], &[2, 1, 3]]),
    ] {
        layouts.into_iter().for_each(|ranks| drop(play(name, ranks)));
    }
}

/// Ranks that share a GPU, with NCCL and with the backend of threads. A stream of another rank that is not waited for
/// shows in the values.
#[test]
fn ranks_on_one_gpu_get_the_same() {
    for (backend, ranks) in [(Backend::Nccl, &[2, 2][..]), (Backend::Threaded, &[4])] {
        let on_one_gpu = |command: &mut Command| {
            command.env("CUDA_VISIBLE_DEVICES", "0").env(BACKEND, backend.name());
            command.env("SIM_SEED", "1").env("SIM_DELAY_MAX_US", "300").envs(SHARES_GPUS);
        };
        let seen: Seen = from_lines(&play_with("surface", ranks, on_one_gpu));
        assert_eq!(seen, with_threads(ranks.iter().sum(), backend), "{backend:?} {ranks:?}");
        for name in ["kinds", "asynchronous", "groups"] {
            play_with(name, ranks, on_one_gpu);
        }
    }
}
