//! Ranks on CPUs of their own: they and the threads that they start stay there, and what is impossible is refused.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use ddp_mp::Spawn;
use ddp_mp::launch::BindChoice;
use serde_json::Value;

use crate::harness::{
    last_event, program, program_under, run, run_command, run_command_to, run_to, send, some_of,
};

/// Reads a list of CPUs such as `0-3,8`.
fn cpus(list: &str) -> Vec<usize> {
    let mut cpus = Vec::new();
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        cpus.extend(first.parse::<usize>().unwrap()..=last.parse().unwrap());
    }
    cpus
}

/// Returns the CPUs that a thread may use, from its `status` below /proc.
fn allowed(status: &str) -> Vec<usize> {
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    cpus(list.unwrap())
}

/// Returns the CPUs that this test may use. `None`, with a note, if ranks cannot be bound to CPUs of their own here.
fn here() -> Option<Vec<usize>> {
    let cpus = allowed(&fs::read_to_string("/proc/thread-self/status").unwrap());
    if cpus.len() < 2 {
        println!("skipped: one CPU is too few to bind ranks");
        return None;
    }
    Some(cpus)
}

/// Returns the name and the CPUs of each thread of a process.
fn threads(pid: u32) -> Vec<(String, Vec<usize>)> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let read = |task: fs::DirEntry| {
        let text = |name| fs::read_to_string(task.path().join(name)).ok(); // it may end meanwhile
        Some((text("comm")?.trim().to_owned(), allowed(&text("status")?)))
    };
    tasks.filter_map(|task| read(task.unwrap())).collect()
}

/// Returns the processes that `parent` has started.
fn children(parent: u32) -> Vec<u32> {
    let parent_of = |pid: u32| -> Option<u32> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
    };
    let names = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().file_name());
    let pids = names.filter_map(|name| name.to_str()?.parse().ok());
    pids.filter(|&pid| parent_of(pid) == Some(parent)).collect()
}

/// Whether a line reports that rank 1 has stalled. By then every rank has started all its threads.
fn says_stalled(line: &str) -> bool {
    line.starts_with("  rank 1 ") && line.contains(" last seen in step #3 ")
}

/// Runs two ranks until one has stalled in a step, and returns the threads of all processes then.
fn threads_of_a_run(
    args: &[&str],
    threads_per_rank: &str,
    proc_bind: &str,
) -> Vec<(String, Vec<usize>)> {
    let always =
        ["--nproc-per-node=2", "--num-workers=2", "--stall-warning=200ms", "--timeout=50s"];
    let model = ["--model=mlp", "--hidden=512", "--batch-size=64", "--num-samples=8192"];
    let hangs = ["--inject-fault=stall:rank=1,at=step,step=3"];
    let mut command = program(&[&always[..], &model, &hangs, args].concat());
    command.env("OMP_PROC_BIND", proc_bind);
    command.env("OMP_NUM_THREADS", threads_per_rank).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut told = Vec::new();
    for line in BufReader::new(child.stderr.take().unwrap()).lines() {
        let line = line.unwrap();
        // On a busy machine ranks are missed before one stalls. Then the program is asked again what they do.
        let asks = line.contains(" has not ended for ") || line.starts_with("  rank 1 last seen ");
        told.push(line);
        if says_stalled(&told[told.len() - 1]) {
            break;
        }
        if asks {
            send("USR2", child.id());
        }
    }
    let pids = [vec![child.id()], children(child.id())].concat();
    let threads = pids.into_iter().flat_map(threads).collect();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(told.last().is_some_and(|line| says_stalled(line)), "{told:?}");
    threads
}

#[test]
fn ranks_and_their_threads_stay_on_cpus_of_their_own() {
    let Some(here) = here() else { return };
    let online = cpus(&fs::read_to_string("/sys/devices/system/cpu/online").unwrap());
    for (args, threads_per_rank, proc_bind) in [
        (&["--bind=auto"][..], 1, "true"),
        (&["--bind=core"], 2, "false"),
        (&["--bind=core", "--spawn=processes"], 1, "close"),
    ] {
        if args.len() > 1 && here != online {
            println!("skipped: these processes have not been given the whole machine");
            continue;
        }
        let threads = threads_of_a_run(args, &threads_per_rank.to_string(), proc_bind);
        let of_rank = |rank: usize| {
            let names = [format!("rank{rank}"), format!("loader{rank}.")];
            let is_its = |name: &str| names.iter().any(|prefix| name.starts_with(prefix));
            let own = threads.iter().filter(|(name, _)| is_its(name));
            own.cloned().collect::<Vec<_>>()
        };
        let mut used = BTreeMap::new();
        for rank in 0..2 {
            let own = of_rank(rank);
            let count = |name: &str| own.iter().filter(|(own, _)| own.starts_with(name)).count();
            assert_eq!(count("loader"), 2, "{args:?}: {threads:?}");
            // libgomp's threads have the name of the thread that starts them.
            assert!(count("rank") >= threads_per_rank, "{args:?}: {threads:?}");
            for (_, cpus) in &own {
                assert_eq!(cpus, &own[0].1, "{args:?}: {threads:?}");
            }
            for &cpu in &own[0].1 {
                assert!(here.contains(&cpu), "{args:?}: {threads:?}");
                assert_eq!(used.insert(cpu, rank), None, "{args:?}: {threads:?}");
            }
        }
        assert_eq!(used.len(), here.len(), "{args:?}: {threads:?}");
        // The main thread, and those of the network to other processes.
        let mut main = threads.iter().filter(|(name, _)| name.starts_with("ddp-mp"));
        assert!(main.all(|(_, cpus)| *cpus == here), "{args:?}: {threads:?}");
    }
}

/// OpenMP would bind the main thread before `main`, and the process would seem to have one CPU.
#[test]
fn variables_that_make_openmp_bind_are_left_out_and_named() {
    let environment = |name: &str, value: &str| {
        let mut command = program(&["env", "--nproc-per-node=2"]);
        command.env(name, value);
        let (stdout, _) = run_command_to(0, command);
        stdout
    };
    let plain = environment("DDP_MP_NOTHING", "");
    let all = [
        ("OMP_PROC_BIND", "true"),
        ("OMP_PROC_BIND", "spread,close"),
        ("OMP_PLACES", "cores"),
        ("KMP_AFFINITY", "granularity=fine,compact,1,0"),
        ("GOMP_CPU_AFFINITY", "0"),
    ];
    for (name, value) in some_of(all, 3) {
        let note = format!("\n  OpenMP              {name} is left out, ");
        let bound = environment(name, value);
        let (before, after) = bound.split_once(&note).unwrap_or_else(|| panic!("{bound}"));
        let rest = after.split_once('\n').unwrap().1;
        assert_eq!(format!("{before}\n{rest}"), plain, "{name}={value}");
    }
    assert_eq!(environment("OMP_PROC_BIND", "false"), plain);
}

#[test]
fn a_bound_rank_has_its_number_of_threads_and_the_same_bits() {
    if here().is_none() {
        return;
    }
    let counts = Spawn::new(2).bind(BindChoice::Core).threads_per_rank(3);
    assert_eq!(counts.run(|_| Ok(tch::get_num_threads())).unwrap(), [3, 3]);
    let hashes = ["none", "core"].map(|bind| {
        let (stdout, _) = run_to(
            0,
            &["--nproc-per-node=2", "--max-epochs=1", "--log-format=json", "--bind", bind],
        );
        let end = last_event(&stdout);
        end["parameters_hash"].as_str().unwrap().to_owned()
    });
    assert_eq!(hashes[0], hashes[1]);
}

#[test]
fn env_shows_the_cpus_of_each_rank() {
    let Some(here) = here() else { return };
    let plan = |bind: &str| {
        let (_, stdout, _) = run(&["env", "--nproc-per-node=2", "--log-format=json", bind]);
        serde_json::from_str::<Value>(&stdout).unwrap()["plan"].clone()
    };
    let bound = plan("--bind=core");
    let blocks: Vec<Vec<usize>> =
        bound["cpus"].as_array().unwrap().iter().map(|list| cpus(list.as_str().unwrap())).collect();
    assert_eq!(blocks.len(), 2);
    let mut all = blocks.concat();
    all.sort_unstable();
    assert_eq!(all, here);
    let unbound = plan("--bind=none");
    assert_eq!((&unbound["cpus"], &unbound["unbound"]), (&Value::Null, &"--bind none".into()));
}

#[test]
fn ranks_are_not_bound_to_fewer_cpus_than_they_need() {
    let Some(here) = here() else { return };
    let cpu = here[0];
    let under = |args: &[&str]| -> Command {
        let args = [args, &["--nproc-per-node=2"]].concat();
        program_under(&format!("taskset -cp {cpu} $$ > /dev/null"), &args)
    };
    let fit = format!("do not fit the 1 CPU that this process may use ({cpu})");
    let (code, stdout, stderr) = run_command(under(&["env"]));
    let row = format!("  CPUs of ranks       not bound: 2 ranks with 1 thread each {fit}\n");
    assert!(code == Some(0) && stdout.contains(&row), "{stdout}{stderr}");
    run_command_to(0, under(&["--max-epochs=1"]));
    for args in [&["--bind=core"][..], &["--bind=core", "--spawn=processes"]] {
        let (code, stdout, stderr) = run_command(under(args));
        let refused = stderr.contains(&format!("--bind core: 2 ranks {fit}; use fewer ranks"));
        assert!(code == Some(2) && stdout.is_empty() && refused, "{stderr}");
    }
    let (code, _, stderr) = run_command(under(&["comm", "barrier", "--bind=core"]));
    assert!(code == Some(2) && stderr.contains(&fit), "{stderr}");
}
