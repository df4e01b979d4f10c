//! Memory: it does not grow with the steps, and what is kept for the next tensors is bounded.

use std::env;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use ddp_mp::ffi::{keep_memory, keeps_memory, kept_memory};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tch::{Device, Kind, Tensor};

use crate::harness::{
    TIMEOUT, last_event, program, ranks, run_command, run_command_to, run_end, without_launcher,
    words,
};

const SWITCH: &str = "DDP_MP_KEEP_MEMORY";

/// The most that was resident in a run of so many steps.
fn peak(args: &[&str], steps: usize) -> f64 {
    let steps = format!("--max-steps={steps}");
    let always = ["--nproc-per-node=2", "--max-epochs=1000000", &steps];
    run_end(&[&always[..], args].concat())["peak_memory_bytes"].as_f64().unwrap()
}

/// Bytes that 2000 steps may take. A kilobyte for each would be 2 million.
const BOUND: f64 = 1.5e6;

fn assert_no_growth(args: &[&str]) {
    let (before, after) = (peak(args, 1000), peak(args, 3000));
    println!("{before} bytes after 1000 steps, {after} after 3000: {args:?}");
    assert!(after - before < BOUND, "{before} bytes after 1000 steps, {after} after 3000");
}

/// Long: it trains thousands of steps.
#[test]
fn memory_does_not_grow_after_1000_steps() {
    let metrics = tempfile::tempdir().unwrap();
    let metrics = format!("--metrics={}", metrics.path().join("metrics.jsonl").display());
    let mlp = ["--model=mlp", "--hidden=16", "--batch-size=8", "--num-samples=2048"];
    let all =
        ["--num-workers=1", "--amp=bf16", "--val-fraction=0.1", "--max-grad-norm=1", &metrics];
    assert_no_growth(&[&mlp[..], &all].concat());
    // The gradient of the second layer has 256 KiB, the smallest block that is kept.
    assert_no_growth(&["--model=mlp", "--hidden=256,256", "--batch-size=8", "--num-samples=2056"]);
}

/// Starts this test binary as `scene` of the test below, with the value of the switch if there is one, and returns
/// what it prints.
fn play(scene: &str, switch: Option<&str>) -> String {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["memory::child", "--exact", "--nocapture"]).env("DDP_MP_MEMORY", scene);
    without_launcher(&mut command).env_remove(SWITCH);
    command.envs(switch.map(|value| (SWITCH, value)));
    run_command_to(0, command).0
}

/// Nothing, unless a test below has started this process.
#[test]
fn child() {
    let Ok(scene) = env::var("DDP_MP_MEMORY") else { return };
    keep_memory();
    match scene.as_str() {
        "sizes" => many_sizes(),
        "run" => one_run(),
        "small" => small_blocks(),
        "fork" => forks(),
        _ => one_block(),
    }
}

const MIB: usize = 1 << 20;

fn uninitialised(bytes: usize) -> Tensor {
    Tensor::empty(bytes as i64, (Kind::Uint8, Device::Cpu))
}

/// Two ranks have 8 tensors each of up to 32 MiB. They have another size in each step. Nothing is written to them: only
/// their addresses count.
fn many_sizes() {
    let most_kept = ranks(2, |rank, _| {
        let (mut random, mut most) = (rank.rank() as u64 + 1, 0);
        for _ in 0..500 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let bytes = 2 * MIB + (random >> 33) as usize % (30 * MIB);
            let tensors: Vec<Tensor> = (0..8).map(|_| uninitialised(bytes)).collect();
            drop(tensors);
            most = most.max(kept_memory());
        }
        Ok(most)
    });
    let in_use = 2 * 8 * 32 * MIB;
    println!("{most_kept:?} kept");
    for kept in most_kept {
        assert!(kept > 8 * 2 * MIB, "{kept} bytes are kept");
        // All 32 classes of sizes together would take 6 times as much.
        assert!(kept < in_use * 3 / 2, "{kept} bytes are kept, {in_use} were in use");
    }
}

/// A rank allocates what the other frees.
fn one_run() {
    let (send, receive) = crossbeam::channel::bounded(1);
    let kept = ranks(2, move |rank, group| {
        if rank.rank() == 0 {
            let tensor = uninitialised(64 * MIB);
            let address = tensor.data_ptr() as usize;
            assert_eq!(address % 64, 0);
            send.send((tensor, address)).unwrap();
            group.barrier()?;
            let again = uninitialised(64 * MIB);
            assert_eq!(again.data_ptr() as usize, address, "the block that rank 1 has freed");
        } else {
            drop(receive.recv()?);
            group.barrier()?;
        }
        group.barrier()?;
        Ok(kept_memory())
    });
    assert!(kept.iter().all(|&kept| kept >= 64 * MIB), "{kept:?}");
    assert_eq!(kept_memory(), 0, "after the run");
}

/// The limit on the address space leaves no room for the small blocks while the large one is kept.
fn small_blocks() {
    drop(uninitialised(1024 * MIB));
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    let kib: u64 = size.trim().trim_end_matches(" kB").parse().unwrap();
    let limit = kib * 1024 + 64 * MIB as u64;
    let Rlimit { maximum, .. } = getrlimit(Resource::As);
    setrlimit(Resource::As, Rlimit { current: Some(limit), maximum }).unwrap();
    let small: Vec<Tensor> = (0..2048).map(|_| uninitialised(MIB / 8)).collect();
    assert_eq!(kept_memory(), 0, "{} small blocks", small.len());
}

/// Two threads allocate and free without pause. A child of fork allocates, too.
fn forks() {
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    drop(uninitialised(MIB));
                }
            });
        }
        for _ in 0..100 {
            let mut child = Command::new("true");
            // SAFETY: glibc's malloc works in a child of fork, and so must libtorch's allocator. The alarm ends a child
            // that waits for ever.
            unsafe {
                child.pre_exec(|| {
                    libc::alarm(TIMEOUT.as_secs() as u32 / 2);
                    drop(uninitialised(MIB));
                    libc::alarm(0);
                    Ok(())
                });
            }
            assert!(child.status().unwrap().success());
        }
        is_done.store(true, Ordering::Relaxed);
    });
}

fn one_block() {
    drop(uninitialised(64 * MIB));
    println!("keeps: {}, kept: {}", keeps_memory(), kept_memory() / MIB);
}

#[test]
fn kept_memory_is_bounded_shared_by_ranks_given_back_and_safe_beside_fork() {
    for scene in ["sizes", "run", "small", "fork"] {
        play(scene, None);
    }
}

#[test]
fn the_environment_turns_kept_memory_off() {
    for (switch, library, shown) in
        [(None, "keeps: true, kept: 64", "kept"), (Some("0"), "keeps: false, kept: 0", "returned")]
    {
        let stdout = play("block", switch);
        assert!(stdout.contains(library), "{stdout}");
        let mut command = program(&["env"]);
        command.env_remove(SWITCH);
        command.envs(switch.map(|value| (SWITCH, value)));
        let (_, stdout, _) = run_command(command);
        assert!(stdout.contains(&format!("  freed CPU memory    {shown}\n")), "{stdout}");
    }
}

#[test]
fn kept_memory_changes_no_bit() {
    let args = "--nproc-per-node=2 --model=mlp --hidden=512,512 --optimizer=adamw --num-samples=1000 \
                --batch-size=48 --log-format=json";
    let hashes = ["0", "1"].map(|switch| {
        let mut command = program(&words(args));
        command.env(SWITCH, switch);
        let (stdout, _) = run_command_to(0, command);
        last_event(&stdout)["parameters_hash"].as_str().unwrap().to_owned()
    });
    assert_eq!(hashes[0], hashes[1]);
}
