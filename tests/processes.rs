//! Several processes in one run: the same collectives, the same numbers, and an end to every wait.
//!
//! A test starts this very test binary again for each process; `child` is what it runs there.

use std::env;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::rc::Rc;
use std::thread;
use std::time::Duration;

use ddp_mp::ffi::cuda::Cuda;
use ddp_mp::launch::{JoinLaunchOptions, SharedMemory, detect};
use ddp_mp::process_group::c10d::TcpStore;
use ddp_mp::{Backend, DdpOptions, DistributedDataParallel, ProcessGroup, Rank, ReduceOp, Spawn};
use rustix::process::{Resource, Rlimit, setrlimit};
use serde_json::Value;
use tch::nn::{self, VarStore};
use tch::{Kind, Tensor};
use wait_timeout::ChildExt;

use crate::harness::{
    TIMEOUT, as_torchrun, free_port, in_parallel, join, program, read_until, run, run_command,
    run_command_to, run_end, run_to, send, shared_memory, some_of, without_launcher,
};
use crate::shared::surface::{self, Surface};
use crate::shared::{functional, groups, kinds, scene};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs the scene `name` in processes of so many ranks each; all must end well.
fn scene(name: &str, ranks: &[usize]) {
    for (code, output) in play(name, ranks) {
        assert_eq!(code, Some(0), "{name} {ranks:?}: {output}");
        assert!(output.contains("scene over"), "{name} {ranks:?}: {output}");
    }
}

/// How each of the processes of a scene ended, and what it wrote.
fn play(name: &str, ranks: &[usize]) -> Vec<(Option<i32>, String)> {
    play_with(name, ranks, &[])
}

/// As [`play`], with more variables in the environment.
pub(crate) fn play_with(
    name: &str,
    ranks: &[usize],
    variables: &[(&str, &Path)],
) -> Vec<(Option<i32>, String)> {
    let port = free_port();
    let start = |process: usize| {
        let mut command = scene::process("processes::child", name, process, ranks, port);
        command.envs(variables.iter().copied()).spawn().unwrap()
    };
    let told = |it: Output| (it.status.code(), text(&it.stdout) + &text(&it.stderr));
    join((0..ranks.len()).map(start).collect()).into_iter().map(told).collect()
}

/// Nothing, unless a test above has started this process for a scene.
#[test]
fn child() {
    let Some((name, options)) = scene::mine() else { return };
    let launch = detect(&|_| None, &options, 0).unwrap();
    let options = JoinLaunchOptions { timeout: TIMEOUT, ..JoinLaunchOptions::default() };
    let joined_launch = launch.join(&Cuda::default(), options).unwrap();
    assert_eq!(joined_launch.placement.backend, Backend::Gloo);
    let play: fn(&Rank, Rc<ProcessGroup>) = match &name[..] {
        "collectives" => collectives,
        "failing_backward" => failing_backward,
        "functional" => |_, group| functional::compare(&group).unwrap(),
        "groups" => |_, group| groups::compare(&group),
        "mismatch" => mismatch,
        "surface" => surface,
        "late" => late,
        "no_file_to_accept" | "no_file_to_connect" => few_files,
        other => panic!("no scene {other}"),
    };
    let spawn = joined_launch.spawn().timeout(TIMEOUT);
    let spawn = if name == "late" { spawn.grace_period(Duration::from_millis(50)) } else { spawn };
    spawn
        .run(move |rank| {
            let group = rank.init_process_group(Backend::Gloo)?;
            play(rank, group);
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{error}"));
    println!("scene over");
}

fn surface(rank: &Rank, group: Rc<ProcessGroup>) {
    let folder = env::var_os("DDP_MP_FOLDER").unwrap();
    let of_process = group.local_world_size();
    let seen = Surface::new(group, Backend::Gloo, of_process, Path::new(&folder)).run();
    println!("{}", surface::lines(rank.rank(), &seen));
}

/// Nothing, unless a test below has started this process: all that a program does to join its launch.
#[test]
fn from_env_child() {
    let Ok(scene) = env::var("DDP_MP_FROM_ENV") else { return };
    let spawn = match Spawn::from_env() {
        Ok(spawn) => spawn.timeout(TIMEOUT),
        Err(error) => return println!("\nrefused|{error}"),
    };
    let (launcher, world_size) = (spawn.launcher(), spawn.world_size());
    let again = (scene == "twice").then(|| spawn.clone());
    let lines = spawn.run(move |rank| {
        let group = rank.init_process_group(rank.backend())?;
        anyhow::ensure!(scene != "fails" || rank.rank() != 1, "out of luck");
        let mut sum = Tensor::from(1i64);
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        assert_eq!(
            (sum.int64_value(&[]), world_size),
            (rank.world_size() as i64, rank.world_size())
        );
        assert_eq!((rank.is_main(), rank.device()), (rank.rank() == 0, tch::Device::Cpu));
        Ok(format!(
            "\n{}|rank {} of {}, {} on node {} of {}, {}",
            launcher.unwrap_or("nothing"),
            rank.rank(),
            rank.world_size(),
            rank.local_rank(),
            rank.node_rank(),
            rank.nnodes(),
            group.backend()
        ))
    });
    match lines {
        Ok(lines) => println!("{}", lines.concat()),
        Err(error) => println!("\nfailed|{error}"),
    }
    if let Some(again) = again {
        println!("\nagain|{}", again.run(|_| Ok(())).unwrap_err());
    }
}

type Variables = Vec<(String, String)>;

fn variables(text: String) -> Variables {
    let pair = |it: &str| it.split_once('=').map(|(name, value)| (name.into(), value.into()));
    text.split(' ').filter_map(pair).collect()
}

/// Starts a process with each of these environments, and returns the lines that all of them print, sorted.
fn from_env(scene: &str, processes: Vec<Variables>) -> Vec<String> {
    let start = |variables: Variables| {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["processes::from_env_child", "--exact", "--nocapture"]);
        without_launcher(&mut command).envs(variables).env("DDP_MP_FROM_ENV", scene);
        piped(command)
    };
    let outputs = join(processes.into_iter().map(start).collect());
    let all: String = outputs.iter().map(|it| text(&it.stdout)).collect();
    let mut lines: Vec<String> =
        all.lines().filter(|it| it.contains('|')).map(Into::into).collect();
    lines.sort();
    assert!(!lines.is_empty(), "{outputs:?}");
    lines
}

#[test]
fn from_env_joins_under_every_launcher() {
    // Two processes of each, with the places of their ranks: the local rank, and the node.
    let torchrun = "RANK=@ WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=@ GROUP_WORLD_SIZE=2 \
                    MASTER_ADDR=127.0.0.1";
    let srun = "SLURM_PROCID=@ SLURM_LOCALID=@ SLURM_NODEID=0 SLURM_NTASKS=2 SLURM_NNODES=1 SLURM_JOB_ID=7 \
                SLURM_STEP_ID=0 SLURM_CPUS_PER_TASK=1 MASTER_ADDR=127.0.0.1";
    let mpirun = "OMPI_COMM_WORLD_RANK=@ OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=@ \
                  OMPI_COMM_WORLD_LOCAL_SIZE=2";
    let by_hand = "PET_NNODES=2 PET_NODE_RANK=@ MASTER_ADDR=127.0.0.1";
    // By hand a rank for each core.
    let cores = std::thread::available_parallelism().unwrap().get();
    let all: Vec<_> = (0..2).flat_map(|node| (0..cores).map(move |local| (local, node))).collect();
    let both = |of_each: &str| {
        let port = free_port();
        let of = |process: &str| of_each.replace('@', process) + &format!(" MASTER_PORT={port}");
        vec![variables(of("0")), variables(of("1"))]
    };
    let launchers = [
        ("torchrun", torchrun, 2, &[(0, 0), (0, 1)][..]),
        ("slurm", srun, 1, &[(0, 0), (1, 0)]),
        ("mpi", mpirun, 1, &[(0, 0), (1, 0)]),
        ("kubernetes", by_hand, 2, &all[..]),
    ];
    for (launcher, of_each, nodes, places) in some_of(launchers, 2) {
        let ranks = places.len();
        let line = |(rank, (local, node)): (usize, &(usize, usize))| {
            format!("{launcher}|rank {rank} of {ranks}, {local} on node {node} of {nodes}, gloo")
        };
        let mut expected: Vec<String> = places.iter().enumerate().map(line).collect();
        expected.sort();
        let mut lines = from_env("twice", both(of_each));
        // The processes have met for one run.
        assert!(lines.drain(..2).all(|it| it.contains("again|") && it.contains("for one run")));
        assert_eq!(lines, expected);
    }
    // Without a launcher a rank for each core, all in this process.
    let mut alone: Vec<String> = (0..cores)
        .map(|rank| format!("nothing|rank {rank} of {cores}, {rank} on node 0 of 1, threaded"))
        .collect();
    alone.sort();
    assert_eq!(from_env("", vec![Vec::new()]), alone);
}

#[test]
fn from_env_refuses_a_wrong_launch_as_the_program_does() {
    let wrong =
        variables("RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=9 LOCAL_RANK=4".into());
    let said = from_env("", vec![wrong.clone()]).concat();
    let mut command = program(&["--max-epochs=1"]);
    let (code, _, stderr) = run_command(std::mem::replace(command.envs(wrong), program(&[])));
    let why = said.strip_prefix("refused|").unwrap();
    assert!(code == Some(2) && stderr.contains(why), "{said}; {stderr}");
}

#[test]
fn error_file_of_torchrun_has_the_failure_of_a_rank() {
    let folder = tempfile::tempdir().unwrap();
    let port = free_port();
    let of_rank = |rank: usize| {
        let file = folder.path().join(rank.to_string());
        variables(format!(
            "RANK={rank} WORLD_SIZE=2 LOCAL_RANK={rank} LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port} \
             TORCHELASTIC_ERROR_FILE={}",
            file.display()
        ))
    };
    let lines = from_env("fails", vec![of_rank(0), of_rank(1)]);
    assert_eq!(lines.len(), 2, "{lines:?}");
    for (rank, line) in lines.iter().enumerate() {
        assert!(line.contains("rank 1") && line.contains("out of luck"), "{line}");
        let file = std::fs::read_to_string(folder.path().join(rank.to_string())).unwrap();
        let left: Value = serde_json::from_str(&file).unwrap();
        let report = left["message"]["message"].as_str().unwrap();
        assert!(report.contains("rank 1") && report.contains("out of luck"), "{report}");
    }
}

fn collectives(rank: &Rank, group: Rc<ProcessGroup>) {
    kinds::are_reduced(&group).unwrap();
    kinds::go_where_they_should(&group).unwrap();
    // A sum that rounds has the same bits on every rank. It is too large to go out whole.
    let index = Tensor::arange(100_001, (Kind::Float, tch::Device::Cpu));
    let mut sum = (index + rank.rank() as f64 * 78.233).sin();
    group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
    let mut first = sum.copy();
    group.broadcast(&mut first, 0).unwrap();
    assert!(sum.equal(&first));
    let has_sent = group.traffic().sent > 0;
    match shared_memory() {
        // The first rank of a process sends for all.
        SharedMemory::Off => {
            assert_eq!(has_sent, rank.local_rank() == 0 || group.local_world_size() == 1);
        }
        // On several hosts the first rank of each does.
        _ => assert!(has_sent || group.rank() > 0),
    }
}

/// Long: it calls everything with every kind of numbers.
#[test]
fn collectives_of_processes_are_right() {
    for ranks in some_of([&[1, 2, 1][..], &[1, 1], &[2, 2], &[3, 1]], 1) {
        scene("collectives", ranks);
    }
}

#[test]
fn subgroups_across_processes_reduce_over_their_members() {
    for ranks in some_of([&[2, 1, 3][..], &[2, 2]], 1) {
        scene("groups", ranks);
    }
}

fn mismatch(rank: &Rank, group: Rc<ProcessGroup>) {
    let (me, count) = (rank.rank(), rank.world_size());
    let len = if me == count - 1 { 100_001 } else { 100_000 };
    let mut tensor = Tensor::zeros([len], (Kind::Float, tch::Device::Cpu));
    let error = group.all_reduce(&mut tensor, ReduceOp::Sum).unwrap_err().to_string();
    assert!(error.contains("collective #0 differs between ranks"), "{error}");
    let all = match count {
        2 => "rank 0 called".into(),
        _ => format!("ranks 0, {} called", count - 2),
    };
    let others = format!("{all} all_reduce(sum) of float32 [100000] at {}:", file!());
    let odd =
        format!("; rank {} called all_reduce(sum) of float32 [100001] at {}:", count - 1, file!());
    assert!(error.contains(&others) && error.contains(&odd), "{error}");
    panic!("as expected");
}

#[test]
fn mismatched_calls_of_processes_are_reported() {
    for ranks in some_of([&[1, 1][..], &[1, 1, 1], &[2, 1]], 2) {
        for (code, stdout) in play("mismatch", ranks) {
            assert_eq!(code, Some(101), "{ranks:?}: {stdout}");
            assert!(stdout.contains("float32 [100001]"), "{ranks:?}: {stdout}");
        }
    }
}

/// Rank 1 can open no further file, and there is a message for it, or from it.
fn few_files(rank: &Rank, group: Rc<ProcessGroup>) {
    let accepts = scene::mine().unwrap().0 == "no_file_to_accept";
    let mut tensor = Tensor::zeros([100_000], (Kind::Float, tch::Device::Cpu));
    group.barrier().unwrap();
    if rank.rank() == 1 {
        let next = std::fs::File::open("/dev/null").unwrap().as_raw_fd() as u64;
        let none = Rlimit { current: Some(next), maximum: Some(next) };
        setrlimit(Resource::Nofile, none).unwrap();
    }
    let result = match (rank.rank(), accepts) {
        (0, true) => group.send(&tensor, 1, 0),
        (_, true) => group.recv(&mut tensor, None, 0).map(drop),
        (0, false) => group.barrier(),
        (_, false) => group.send(&tensor, 0, 0),
    };
    panic!("{}", result.unwrap_err());
}

#[test]
fn message_connection_without_an_open_file_names_the_limit() {
    for name in ["no_file_to_accept", "no_file_to_connect"] {
        for (code, told) in play(name, &[1, 1]) {
            assert_eq!(code, Some(101), "{name}: {told}");
            let remedy = "a connection for messages takes 1 more open files: Too many open files";
            assert!(
                told.contains(remedy) && told.contains("raise the limit with ulimit -n"),
                "{name}: {told}"
            );
            assert!(told.contains("rank 1") && !told.contains("waited"), "{name}: {told}");
        }
    }
}

/// The last rank still works long after the others have ended.
fn late(rank: &Rank, group: Rc<ProcessGroup>) {
    group.barrier().unwrap();
    if rank.rank() + 1 == rank.world_size() {
        std::thread::sleep(Duration::from_secs(4)); // its work: longer than the others' grace period
    }
}

#[test]
fn store_process_stays_until_the_others_are_done() {
    for ranks in some_of([&[1, 2][..], &[1, 1]], 1) {
        scene("late", ranks);
    }
}

/// A run of `args` in processes of so many ranks each.
fn start(args: &[&str], ranks: &[usize]) -> Vec<Child> {
    start_at(args, ranks).1
}

/// And the port of their store.
fn start_at(args: &[&str], ranks: &[usize]) -> (u16, Vec<Child>) {
    let ranks: Vec<String> = ranks.iter().map(|it| format!("--nproc-per-node={it}")).collect();
    let args: Vec<Vec<&str>> = ranks.iter().map(|ranks| [args, &[ranks]].concat()).collect();
    start_each(&args)
}

/// A process for each of these arguments, and the port of their store.
fn start_each(args: &[Vec<&str>]) -> (u16, Vec<Child>) {
    let port = free_port();
    let start = |(process, of_process): (usize, &Vec<&str>)| {
        let mut command = program(&[&of_process[..], &["--log-format=json"]].concat());
        if shared_memory() == SharedMemory::Off {
            command.arg("--shared-memory=off");
        }
        as_torchrun(&mut command, process, args.len(), port);
        piped(command)
    };
    (port, args.iter().enumerate().map(start).collect())
}

fn piped(mut command: Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits until the ranks have met, which rank 0's process says.
fn wait_for_start(children: &mut [Child]) {
    let mut first = String::new();
    let stdout = children[0].stdout.as_mut().unwrap();
    BufReader::new(stdout).read_line(&mut first).unwrap();
    assert!(first.contains("start"), "{first}");
}

/// Waits for processes, each of which must end with `code` and tell all of `told`.
#[track_caller]
fn all_tell(children: Vec<Child>, code: i32, told: &[&str]) {
    for output in join(children) {
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{stderr}");
        assert!(told.iter().all(|it| stderr.contains(it)), "{told:?}: {stderr}");
    }
}

/// The last event of rank 0's process, if all went well.
pub(crate) fn end(args: &[&str], ranks: &[usize]) -> Value {
    let outputs = join(start(args, ranks));
    for output in &outputs {
        assert!(output.status.success(), "{args:?} {ranks:?}: {}", text(&output.stderr));
    }
    serde_json::from_str(text(&outputs[0].stdout).lines().last().unwrap()).unwrap()
}

#[test]
fn processes_train_to_the_results_of_threads() {
    for args in some_of(
        [
            &["--model=mlp", "--hidden=300,300", "--momentum=0.9", "--bucket-cap-mb=0.2"][..],
            &["--max-epochs=2"],
            &["--model=cnn", "--in-features=64", "--sync-batch-norm", "--num-samples=500"],
            &["--model=mlp", "--hidden=300,300", "--optimizer=adamw", "--share-model"],
            &["--model=mlp", "--optimizer=adamw", "--strategy=dp", "--grad-accum-steps=2"],
            &["--dataset=digits", "--loss=cross-entropy", "--model=mlp", "--val-fraction=0.2"],
        ],
        1,
    ) {
        let threads = |ranks: &str| run_end(&[args, &[ranks]].concat());
        // One rank a process adds up in the order of threads: the same bits. Two go another way, on which several
        // buckets are in flight.
        let two = end(args, &[1, 1]);
        assert_eq!(
            two["parameters_hash"],
            threads("--nproc-per-node=2")["parameters_hash"],
            "{args:?}"
        );
        let threads = threads("--nproc-per-node=4");
        let alone = end(args, &[1, 1, 1, 1]);
        assert_eq!(alone["parameters_hash"], threads["parameters_hash"], "{args:?}");
        let pairs = end(args, &[2, 2]);
        let loss = |end: &Value| end["loss"].as_f64().unwrap();
        assert!((loss(&pairs) - loss(&threads)).abs() < 1e-4 * loss(&threads), "{args:?}");
        assert_eq!(end(args, &[2, 2])["parameters_hash"], pairs["parameters_hash"], "{args:?}");
    }
}

/// The failure that a run of these processes ends with, as each of them tells it.
pub(crate) fn failures(
    args: &[&str],
    ranks: &[usize],
    harm: impl FnOnce(&mut [Child]),
) -> Vec<(Option<i32>, String)> {
    let mut children = start(args, ranks);
    harm(&mut children);
    let told = |output: Output| (output.status.code(), text(&output.stderr));
    join(children).into_iter().map(told).collect()
}

#[test]
fn failure_on_any_process_is_reported_on_all() {
    let stages = ["rendezvous", "init", "broadcast", "step,step=9", "barrier"];
    let all = stages.iter().flat_map(|stage| [(stage, 0, 0), (stage, 2, 1)]);
    for (stage, rank, process) in some_of(all, 2) {
        let fault = format!("--inject-fault=error:rank={rank},at={stage}");
        let told = failures(&[&fault, "--grace-period=5s"], &[2, 2], |_| {});
        for (number, (code, stderr)) in told.iter().enumerate() {
            assert_eq!(*code, Some(1), "{fault}: {stderr}");
            let place = if number == process { ")" } else { " on " };
            let who = format!("rank {rank} (CPU:{rank}{place}");
            assert!(stderr.contains(&who), "{fault}: {stderr}");
            assert!(stderr.contains("injected by --inject-fault"), "{fault}: {stderr}");
            // What follows from it is no failure of its own.
            assert!(!stderr.contains("  then "), "{fault}: {stderr}");
        }
    }
}

/// Long: it waits for time-outs.
#[test]
fn killed_or_stopped_process_is_named() {
    let long = ["--max-epochs=1000000", "--grace-period=5s", "--timeout=12s"];
    let buckets = [&long[..], &["--model=mlp", "--hidden=500,500", "--bucket-cap-mb=0.1"]].concat();
    let all = [
        ("KILL", 1, &[1, 1][..], &long[..]),
        ("KILL", 0, &[1, 1], &long),
        ("KILL", 1, &[1, 1], &buckets),
        ("STOP", 1, &[1, 1], &buckets),
        ("KILL", 1, &[2, 2, 1], &long),
        ("STOP", 1, &[2, 2], &long),
    ];
    in_parallel(&some_of(all, 2), |&(signal, victim, ranks, args)| {
        let told = failures(args, ranks, |children| {
            wait_for_start(children);
            let send = |signal: &str| send(signal, children[victim].id());
            send(signal);
            if signal == "STOP" {
                // Until the others have ended.
                for (number, child) in children.iter_mut().enumerate() {
                    if number != victim {
                        assert!(child.wait_timeout(TIMEOUT).unwrap().is_some());
                    }
                }
                children[victim].kill().unwrap();
            }
        });
        let first: usize = ranks[..victim].iter().sum();
        // In shared memory a rank of the process may have arrived before it was stopped.
        let is_named = |stderr: &str| {
            let mut of_victim = first..first + ranks[victim];
            of_victim.any(|rank| stderr.contains(&format!("rank {rank} (CPU:{rank} on ")))
        };
        for (number, (code, stderr)) in told.iter().enumerate() {
            if number != victim {
                assert_eq!(*code, Some(1), "{signal} {victim} {ranks:?}: {stderr}");
                assert!(is_named(stderr), "{signal}: {stderr}");
            }
        }
    });
}

/// Each process waits for others in the store, or in Gloo, when one of its own ranks is not the one that is missing.
/// Long: it waits for time-outs.
#[test]
fn stall_is_blamed_on_the_stalled_rank() {
    let stages = ["rendezvous", "init", "step,step=5"];
    let victims = [(&[1, 1][..], 0), (&[1, 1], 1), (&[2, 2], 2), (&[2, 2], 3)];
    let all = victims.iter().flat_map(|victim| stages.map(|stage| (*victim, stage)));
    in_parallel(&some_of(all, 3), |&((ranks, victim), stage)| {
        let fault = format!("--inject-fault=stall:rank={victim},at={stage}");
        let args = [&fault, "--timeout=15s", "--grace-period=1s"];
        for (code, stderr) in failures(&args, ranks, |_| {}) {
            let what = format!("{fault} {ranks:?}: {stderr}");
            assert_eq!(code, Some(1), "{what}");
            let named = format!("rank {victim} (CPU:{victim}");
            let first = stderr.lines().find(|line| line.contains(" failed in ")).unwrap();
            assert!(first.starts_with(&format!("ddp-mp: {named}")), "{what}");
            assert!(!first.contains("failed in start"), "{what}");
        }
    });
}

/// What a terminal would take for a command, and a line that would look like one of the program's own.
#[test]
fn control_characters_of_other_processes_are_escaped() {
    let lie = "{\"rank\":1,\"tied\":[],\"at\":0,\"error\":\"\\u001b[2J\u{9b}1m\\nddp-mp: x\"}";
    let (port, mut children) = start_at(&["--max-epochs=1000000"], &[1, 1]);
    wait_for_start(&mut children);
    let store = TcpStore::connect("127.0.0.1", port, TIMEOUT).unwrap();
    store.set("ddp-mp/none/0/failure", lie.as_bytes()).unwrap();
    for output in join(children) {
        let stderr = text(&output.stderr);
        assert!(stderr.contains("\\u001b[2J\\u009b1m\\u000addp-mp: x"), "{stderr}");
        let harms = |c: char| c.is_control() && c != '\n';
        assert!(!stderr.contains(harms) && !text(&output.stdout).contains(harms), "{stderr:?}");
    }
    // From a file, and from the environment.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.csv");
    std::fs::write(&file, "x,y\n1,\u{1b}[31m2\n").unwrap();
    let (_, stderr) = run_to(2, &[&format!("--dataset=csv:{}", file.display())]);
    assert!(stderr.contains("[31m2") && !stderr.contains('\u{1b}'), "{stderr:?}");
    let mut command = program(&["env"]);
    command.envs([("RANK", "a\u{1b}[31mb"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")]);
    command.env("LOCAL_WORLD_SIZE", "1");
    // `env` reports what a run would refuse.
    let (stdout, _) = run_command_to(0, command);
    assert!(stdout.contains("[31mb") && !stdout.contains('\u{1b}'), "{stdout:?}");
}

/// Whoever reaches the store can write there.
#[test]
fn invalid_store_values_end_only_the_run() {
    // `src: launch::messages` refuses many more.
    let values =
        [&b"\xff\xfe"[..], br#"{"rank":2,"operation":"step","sequence":1,"error":"a lie"}"#];
    for value in some_of(values, 1) {
        let (port, mut children) = start_at(&["--max-epochs=1000000"], &[1, 1]);
        wait_for_start(&mut children);
        let store = TcpStore::connect("127.0.0.1", port, TIMEOUT).unwrap();
        store.set("ddp-mp/none/0/alive/1", b"nothing that can be read").unwrap();
        store.set("ddp-mp/none/0/failure", value).unwrap();
        all_tell(children, 1, &["store key \"failure\" holds an invalid message: "]);
    }
}

#[test]
fn missing_process_is_named() {
    // The second one never comes. The third waits for it, from the moment when the first has said what it runs.
    let port = free_port();
    let start = |number: usize, timeout: &str| {
        let mut command = program(&[timeout, "--nproc-per-node=1"]);
        as_torchrun(&mut command, number, 3, port);
        piped(command)
    };
    let first = start(0, "--timeout=1h");
    let store = TcpStore::connect("127.0.0.1", port, TIMEOUT).unwrap();
    store.get("ddp-mp/none/0/process/0", TIMEOUT).unwrap().expect("it waits for the others");
    let children = vec![first, start(2, "--timeout=4s")];
    all_tell(children, 1, &["process 1 of 3 did not connect within ", "connected: 0 (on "]);
    let by_hand = ["--node-rank=0", "--master-addr=127.0.0.1"];
    let (code, _, stderr) = run(&[&by_hand[..], &["--nnodes=4000000000"]].concat());
    assert!(
        code == Some(2) && stderr.contains("4000000000 processes exceed the maximum of 65536"),
        "{stderr}"
    );
}

/// Debian gives a machine's own name a loopback address.
#[test]
fn loopback_master_addr_is_warned_of_once() {
    let port = format!("--master-port={}", free_port());
    let start = |node: &str, addr: &str| {
        let place = [format!("--node-rank={node}"), format!("--master-addr={addr}")];
        let args = ["--nnodes=2", "--nproc-per-node=1", &place[0], &place[1], &port];
        piped(program(&args))
    };
    for (addr, times) in [("localhost", 1), ("127.0.0.1", 0)] {
        let [first, second] = join(vec![start("0", addr), start("1", addr)]).try_into().unwrap();
        for (output, times) in [(first, times), (second, 0)] {
            let stderr = text(&output.stderr);
            assert!(output.status.success(), "{stderr}");
            let warning = "--master-addr=localhost is the loopback address ";
            assert_eq!(stderr.matches(warning).count(), times, "{stderr}");
        }
    }
}

#[test]
fn taken_port_is_refused_with_a_remedy() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let by_hand = ["--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1"];
    let mut by_hand = program(&[&by_hand[..], &[&format!("--master-port={port}")]].concat());
    by_hand.env_remove("MASTER_PORT");
    let mut torchrun = program(&[]);
    as_torchrun(&mut torchrun, 0, 2, port);
    let mut slurm = program(&[]);
    slurm.envs(variables(format!(
        "SLURM_JOB_ID=4242 SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=2 \
         SLURM_NNODES=1 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
    )));
    let remedy = "give torchrun, or without it all processes, another --master-port or MASTER_PORT";
    for command in [by_hand, torchrun, slurm] {
        let (_, stderr) = run_command_to(1, command);
        let expected = format!("the port is in use, by another run perhaps; {remedy}");
        assert!(stderr.contains(&expected), "{stderr}");
    }
}

#[test]
fn server_that_is_no_store_is_named() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port();
    let serve = move || {
        // Until a client says that the test is over: libtorch's connects again and again.
        for client in server.incoming() {
            let mut client = client.unwrap();
            let _ = client.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
            let mut request = [0; 64];
            if client.read(&mut request).is_ok_and(|len| request[..len] == *b"over") {
                break;
            }
        }
    };
    let serve = thread::Builder::new().spawn(serve).unwrap();
    let place = ["--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1", "--timeout=4s"];
    let (_, stderr) =
        run_command_to(1, program(&[&place[..], &[&format!("--master-port={port}")]].concat()));
    assert!(stderr.contains("what listens there is not the store of a run"), "{stderr}");
    TcpStream::connect(("127.0.0.1", port)).unwrap().write_all(b"over").unwrap();
    serve.join().unwrap();
}

#[test]
fn signal_ends_the_wait_for_other_processes() {
    for (signal, code) in some_of([("TERM", 143), ("INT", 130)], 1) {
        // Somebody is there, who never answers.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = format!("--master-port={}", listener.local_addr().unwrap().port());
        let by_hand = ["--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1", &port];
        let mut waits = program(&by_hand).spawn().unwrap();
        let _connection = listener.accept().unwrap();
        send(signal, waits.id());
        let ended = waits.wait_timeout(TIMEOUT).unwrap();
        if ended.is_none() {
            waits.kill().unwrap();
        }
        assert_eq!(ended.expect("it goes on waiting").code(), Some(code));
    }
}

#[test]
fn wrong_input_found_by_rank_0_is_reported_on_all() {
    let folder = tempfile::tempdir().unwrap();
    let nothing = folder.path().join("nothing");
    let resume = format!("--resume={}", nothing.display());
    let told = failures(&[&resume], &[1, 2], |_| {});
    let why = format!("checkpoint {}: this path does not exist", nothing.display());
    assert_eq!(told[0].0, Some(2), "{}", told[0].1);
    assert_eq!(told[1].0, Some(1), "{}", told[1].1);
    assert!(told.iter().all(|(_, stderr)| stderr.contains(&why)), "{told:?}");
    assert!(told[1].1.contains("rank 0 (CPU:0 on "), "{}", told[1].1);
}

#[test]
fn unknown_addresses_and_interfaces_are_wrong_input() {
    for (addr, why) in [
        ("192.0.2.1", "that is not an address of this machine"), // nobody's, by RFC 5737
        ("0.0.0.0", "that stands for all interfaces of this machine"),
    ] {
        let addr = format!("--master-addr={addr}");
        let (_, stderr) = run_to(2, &["--nnodes=2", "--node-rank=0", &addr]);
        assert!(stderr.contains(&format!("{addr}: {why}")), "{stderr}");
    }
    for (interfaces, why) in
        [("eth99", "eth99 is not a network interface"), ("lo,", "an empty name")]
    {
        let port = format!("--master-port={}", free_port());
        let children = ["0", "1"].map(|node| {
            let node = format!("--node-rank={node}");
            let mut command = program(&["--nnodes=2", &node, "--master-addr=127.0.0.1", &port]);
            command.env("GLOO_SOCKET_IFNAME", interfaces);
            piped(command)
        });
        let told = format!("ddp-mp: GLOO_SOCKET_IFNAME={interfaces}: ");
        all_tell(children.into(), 2, &[&told, why]);
    }
}

/// A backward that fails in its midst, while the other rank is late with what has been started already.
fn failing_backward(rank: &Rank, group: Rc<ProcessGroup>) {
    const LEN: i64 = 100_000;
    let vs = VarStore::new(rank.device());
    let [first, last] =
        ["first", "last"].map(|name| vs.root().var(name, &[LEN], nn::Init::Const(1.0)));
    let of_model = last.shallow_clone();
    let model = nn::func(move |xs| {
        let mut inner = (xs * &first).exp();
        let outer = &inner * 2.0 * &of_model;
        // The gradient of `exp` is what comes from it, which is changed here: that of `first` cannot be had.
        let _ = tch::no_grad(|| inner.f_mul_scalar_(3.0)).unwrap();
        outer
    });
    // A bucket each.
    let (bucket_cap_mb, first_bucket_mb) = (1e-9, 1e-9);
    let options = DdpOptions { bucket_cap_mb, first_bucket_mb, ..DdpOptions::default() };
    let mut ddp = DistributedDataParallel::new(model, &vs, group.clone(), options).unwrap();
    let inputs = Tensor::full([LEN], rank.rank() as f64, (Kind::Float, rank.device()));
    let loss = ddp.forward(&inputs).sum(Kind::Float);
    group.barrier().unwrap();
    if rank.rank() == 1 {
        std::thread::sleep(std::time::Duration::from_millis(300)); // late, as a rank may be
    }
    let error = ddp.backward(&loss).unwrap_err().to_string();
    assert!(error.contains("inplace operation"), "{error}");
    let found = last.grad().mean(Kind::Double).double_value(&[]);
    let e = 1f64.exp();
    let expected = match shared_memory() {
        // What had been started is over: the mean of 2 and 2e.
        SharedMemory::Off => 1.0 + e,
        // Ranks that share memory reduce after backward.
        _ => 2.0 * e.powi(rank.rank() as i32),
    };
    assert!((found - expected).abs() < 1e-5, "{found}");
}

#[test]
fn failed_backward_leaves_nothing_in_flight() {
    scene("failing_backward", &[1, 1]);
}

/// Trained with other options, each would come to other numbers, and nobody would know.
#[test]
fn processes_with_different_options_are_refused() {
    let bench = &["bench", "step", "--batch-size=8"][..];
    for (args, each, told) in [
        (bench, ["--steps=2", "--steps=3", "--steps=2"], "is bench step --steps=2 for process 0"),
        // The one that serves the store must not be gone before the others have found out.
        (&[], ["--lr=0.2", "--lr=0.1", "--lr=0.1"], "--lr is 0.2 for process 0 (on "),
    ] {
        let (_, children) = start_each(&each.map(|it| [args, &[it]].concat()));
        all_tell(children, 2, &[told, " for process 1 (on "]);
    }
    // What is a process's own affair.
    let own = [vec!["--num-workers=1", "--timeout=50s"], vec!["--max-seconds=1h", "--timeout=60s"]];
    all_tell(start_each(&own).1, 0, &[]);
}

#[test]
fn processes_stop_save_and_resume_together() {
    let folder = tempfile::tempdir().unwrap();
    let dir = format!("--checkpoint-dir={}", folder.path().join("run").display());
    let args = ["--model=mlp", "--hidden=16", "--momentum=0.9"];
    // SIGTERM to the process that does not decide.
    let mut children = start(&[&args[..], &[&dir, "--max-epochs=1000000"]].concat(), &[1, 1]);
    let mut stdout = BufReader::new(children[0].stdout.take().unwrap());
    read_until("\"epoch\":0", &mut stdout);
    send("TERM", children[1].id());
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut stdout, &mut rest).unwrap();
    for output in join(children) {
        assert_eq!(output.status.code(), Some(143), "{}", text(&output.stderr));
    }
    let stopped: Value = serde_json::from_str(rest.lines().last().unwrap()).unwrap();
    assert_eq!(stopped["stopped"], "SIGTERM");
    // Epoch 0 was read above, and one more is for the rest.
    let is_epoch = |line: &&str| line.contains("\"event\":\"epoch\"");
    let epochs = rest.lines().filter(is_epoch).count() + 2;
    let length = format!("--max-epochs={epochs}");
    let whole = self::end(&[&args[..], &[&length]].concat(), &[1, 1]);
    assert!(stopped["steps"].as_u64() < whole["steps"].as_u64());
    let end = end(&[&args[..], &[&dir, "--resume=auto", &length]].concat(), &[1, 1]);
    assert_eq!(end["parameters_hash"], whole["parameters_hash"]);
    assert_eq!(end["steps"], whole["steps"]);
}
