//! Every collective, message and group with NCCL: in one process, in two of one rank, and in two of two.
//!
//! A test starts this very test binary again for each process; `child` is what runs there.

use std::env;
use std::path::Path;
use std::process::{Command, Stdio};
use std::rc::Rc;

use ddp_mp::launch::{Joining, LaunchOptions, Nproc, detect};
use ddp_mp::torch::cuda;
use ddp_mp::{Backend, ProcessGroup};

use crate::harness::{TIMEOUT, free_port, join};
use crate::machine::simulate;
use crate::shared::surface::{self, Seen, Surface, from_lines, with_threads};
use crate::shared::{coalesced, functional, groups, kinds};

/// How many ranks each process has.
const LAYOUTS: [&[usize]; 3] = [&[4], &[1, 1], &[2, 2]];

/// Runs the scene `name` with a simulated GPU for each rank, and returns what the processes write.
fn play(name: &str, ranks: &[usize]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let port = free_port();
    let start = |(process, count): (usize, &usize)| {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["collectives::child", "--exact", "--nocapture"]);
        simulate(&mut command, ranks.iter().sum());
        let first: usize = ranks[..process].iter().sum();
        let mine: Vec<String> = (first..first + count).map(|gpu| gpu.to_string()).collect();
        command.env("CUDA_VISIBLE_DEVICES", mine.join(","));
        command.env("DDP_MP_SCENE", format!("{name} {process} {} {count} {port}", ranks.len()));
        command.env("DDP_MP_FOLDER", folder.path());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
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

/// Nothing, unless a test of this file has started this process for a scene.
#[test]
fn child() {
    let Ok(scene) = env::var("DDP_MP_SCENE") else { return };
    let words: Vec<&str> = scene.split(' ').collect();
    let number = |place: usize| words[place].parse::<usize>().unwrap();
    let options = LaunchOptions {
        nnodes: Some(number(2)),
        node_rank: (number(2) > 1).then_some(number(1)),
        master_addr: Some("127.0.0.1".into()),
        master_port: Some(number(4) as u16),
        nproc: Nproc::Count(number(3)),
        ..LaunchOptions::default()
    };
    let cuda = cuda::load();
    let launch = detect(&|_| None, &options, cuda.usable()).unwrap();
    let launched = launch.join(&cuda, Joining { timeout: TIMEOUT, ..Joining::default() }).unwrap();
    assert_eq!(launched.placement.backend, Backend::Nccl);
    let play: fn(&Rc<ProcessGroup>) -> anyhow::Result<()> = match words[0] {
        "asynchronous" => |group| groups::asynchronous(group),
        "coalesced" => |group| Ok(coalesced::compare(group)?),
        "functional" => |group| Ok(functional::compare(group)?),
        "groups" => |group| {
            groups::compare(group);
            Ok(())
        },
        "kinds" => |group| {
            kinds::are_reduced(group)?;
            Ok(kinds::go_where_they_should(group)?)
        },
        "surface" => surface,
        other => panic!("no scene {other}"),
    };
    launched
        .spawn()
        .timeout(TIMEOUT)
        .run(move |rank| play(&rank.init_process_group(Backend::Nccl)?))
        .unwrap_or_else(|error| panic!("{error}"));
    println!("scene over");
}

fn surface(group: &Rc<ProcessGroup>) -> anyhow::Result<()> {
    let folder = env::var_os("DDP_MP_FOLDER").unwrap();
    let of_process = group.local_world_size();
    let seen = Surface::new(group.clone(), Backend::Nccl, of_process, Path::new(&folder)).run();
    println!("{}", surface::lines(group.rank(), &seen));
    Ok(())
}

#[test]
fn every_method_does_the_same_with_nccl_and_with_threads() {
    for ranks in LAYOUTS {
        let seen: Seen = from_lines(&play("surface", ranks));
        assert_eq!(seen, with_threads(ranks.iter().sum(), Backend::Nccl), "{ranks:?}");
    }
}

#[test]
fn every_kind_and_length() {
    for ranks in LAYOUTS {
        play("kinds", ranks);
    }
}

#[test]
fn several_tensors_in_one_collective() {
    for ranks in LAYOUTS {
        play("coalesced", ranks);
    }
}

/// The recorded values are those of at most three ranks.
#[test]
fn gradients_flow_through_collectives() {
    for ranks in [&[1][..], &[2], &[3], &[1, 1], &[2, 1]] {
        play("functional", ranks);
    }
}

#[test]
fn some_of_the_ranks_form_groups() {
    for ranks in [&[4][..], &[2, 2], &[2, 1, 3]] {
        play("groups", ranks);
    }
}

#[test]
fn every_operation_has_an_asynchronous_form() {
    for ranks in LAYOUTS {
        play("asynchronous", ranks);
    }
}
