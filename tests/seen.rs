//! What can be seen of a run: who is missing where.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use crossbeam::channel::unbounded;
use ddp_mp::events::Event;
use ddp_mp::{Backend, Error, ProcessGroup, ReduceOp, Spawn};
use serde_json::Value;
use tch::Tensor;

use crate::harness::{
    TIMEOUT, events, in_parallel, last_event, output, program, run_end, run_to, send, some_of,
    words,
};
use crate::processes::failures;
use crate::spawn_processes::long_run;

/// Three ranks, as threads and as processes.
const LAYOUTS: [&[&str]; 2] =
    [&["--nproc-per-node=3"], &["--nproc-per-node=3", "--spawn=processes"]];

const SHORT: Duration = Duration::from_millis(40);

/// A wait that is reported. The ranks that have to wait arrive within this time.
const STALL: Duration = Duration::from_secs(2);

/// Returns an observer that hands each warning to `take`.
fn warned(take: impl Fn(&str) + Send + Sync) -> impl Fn(&Event) + Send + Sync {
    move |event| {
        if let Event::Warning { text } = event {
            take(text);
        }
    }
}

#[test]
fn stall_warning_names_the_missing_rank() {
    const MISSED: &str = "all_reduce #1 at tests/seen.rs:";
    let (tell, told) = unbounded::<String>();
    let (keep, texts) = unbounded::<String>();
    let spawn = Spawn::new(3).timeout(TIMEOUT).grace_period(SHORT).stall_warning(STALL).observe(
        warned(move |text| {
            let _ = (tell.send(text.into()), keep.send(text.into()));
        }),
    );
    spawn
        .run(move |rank| {
            let group = rank.init_process_group(Backend::Threaded)?;
            group.barrier()?;
            if rank.rank() == 2 {
                // It comes when it has been missed. On a busy machine ranks may have been missed before.
                while !told.recv()?.contains(MISSED) {}
            }
            Ok(group.all_reduce(&mut Tensor::from_slice(&[1i64]), ReduceOp::Sum)?)
        })
        .unwrap();
    let texts: Vec<String> = texts.iter().filter(|text| text.contains(MISSED)).collect();
    let [text] = &texts[..] else { panic!("it is told once: {texts:?}") };
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].contains(" has not ended for "), "{text}");
    assert!(lines[1].starts_with("  arrived: rank 0 ") && lines[1].contains("rank 1 "), "{text}");
    let missing =
        "  rank 2 has not entered all_reduce #1; last seen leaving barrier #0 at tests/seen.rs:";
    assert!(lines[2].starts_with(missing), "{text}");
    assert_eq!(lines.len(), 3, "{text}");
}

/// A rank may hang in a library until the grace period is over, or end the process.
#[test]
fn failure_is_shown_before_all_ranks_have_come_back() {
    let (tell, told) = unbounded::<String>();
    let forever = Duration::from_secs(3600);
    let spawn = Spawn::new(2).grace_period(forever);
    let error = spawn
        .stall_warning(forever)
        .observe(warned(move |text| drop(tell.send(text.into()))))
        .run(move |rank| {
            anyhow::ensure!(rank.rank() == 1, "lost");
            let text = told.recv()?; // it comes back when it has been missed
            anyhow::ensure!(
                text.starts_with("rank 0 (CPU:0) failed in its function: lost; 1 rank of "),
                "{text}"
            );
            Ok(())
        })
        .unwrap_err();
    assert!(error.also_failed.is_empty() && error.stuck.is_empty(), "{error}");
}

#[test]
fn observers_are_told_the_end_of_the_ranks_and_then_their_failure() {
    for fails in [false, true] {
        let (tell, told) = unbounded::<String>();
        let tell = move |event: &Event| match event {
            Event::Ended { .. } => drop(tell.send("ended".into())),
            Event::Failure { error, .. } => drop(tell.send(error.clone())),
            _ => {}
        };
        let spawn = Spawn::new(2).grace_period(SHORT).observe(tell);
        let ended = spawn.run(move |rank| {
            anyhow::ensure!(!fails || rank.rank() == 0, "lost");
            Ok(())
        });
        assert_eq!(ended.is_err(), fails);
        let expected = if fails { vec!["ended", "lost"] } else { vec!["ended"] };
        assert_eq!(told.iter().collect::<Vec<_>>(), expected);
    }
}

#[test]
fn failed_collective_is_over_in_the_status_dump() {
    let (ask, asks) = unbounded::<()>();
    let (tell, told) = unbounded::<String>();
    let (fail, failed) = unbounded::<()>();
    let (go, gone) = unbounded::<()>();
    let forever = Duration::from_secs(3600);
    let spawn = Spawn::new(2).timeout(TIMEOUT).grace_period(SHORT).dump_status_on(asks);
    spawn
        .stall_warning(forever)
        .observe(warned(move |text| drop(tell.send(text.into()))))
        .run(move |rank| {
            let group = rank.init_process_group(Backend::Threaded)?;
            let len = 4 + rank.rank();
            let mut tensor = Tensor::from_slice(&vec![1i64; len]);
            let result = group.all_reduce(&mut tensor, ReduceOp::Sum);
            assert!(matches!(result, Err(Error::Mismatch { .. })), "{result:?}");
            if rank.rank() == 0 {
                fail.send(())?;
                gone.recv()?;
            } else {
                failed.recv()?;
                ask.send(())?;
                let text = told.recv()?;
                go.send(())?;
                let over = " last seen leaving all_reduce #0 at tests/seen.rs:";
                anyhow::ensure!(text.matches(over).count() == 2, "{text}");
            }
            Ok(group.barrier()?)
        })
        .unwrap();
}

#[test]
fn object_collective_has_the_line_of_the_caller() {
    type Call = fn(&ProcessGroup) -> ddp_mp::Result<()>;
    let calls: [Call; 4] = [
        |group| group.all_gather_object(&1).map(drop),
        |group| group.gather_object(&1, 0).map(drop),
        |group| group.broadcast_object_list(&mut vec![1], 0),
        |group| group.scatter_object_list((group.rank() == 0).then_some(&[1, 2][..]), 0).map(drop),
    ];
    for call in calls {
        let spawn = Spawn::new(2).timeout(TIMEOUT).grace_period(SHORT);
        let result = spawn.run(move |rank| {
            let group = rank.init_process_group(Backend::Threaded)?;
            Ok(if rank.rank() == 0 { call(&group) } else { group.barrier() }?)
        });
        let error = result.unwrap_err().failure.error;
        assert_eq!(error.matches(" at tests/seen.rs:").count(), 2, "{error}");
    }
}

#[test]
fn sigusr2_prints_the_status_of_every_rank() {
    for args in [&["--nproc-per-node=2"][..], &["--nproc-per-node=2", "--spawn=processes"]] {
        let (mut child, _stdout) = long_run(args);
        send("USR2", child.id());
        let lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let mut table: Vec<String> = lines.filter(|it| it.starts_with("  rank ")).take(2).collect();
        table.sort();
        assert_eq!(table.len(), 2);
        for (rank, line) in table.iter().enumerate() {
            let seen = line.strip_prefix(&format!("  rank {rank} last seen ")).unwrap();
            assert!(
                seen.contains(" at crates/engine/src/") && line.ends_with(" s ago"),
                "{table:?}"
            );
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

#[test]
fn straggler_is_named_with_its_slow_phase() {
    // Twelve steps are slow. Other processes delay a step by far less.
    let slow = "--inject-fault=slow=150ms:rank=1,at=step,step=2 --num-samples=1344";
    for layout in LAYOUTS {
        let json = [&words(slow)[..], &["--log-format=json"], layout].concat();
        let end = last_event(&run_to(0, &json).0);
        let straggler = &end["straggler"];
        assert_eq!((straggler["rank"].as_u64(), &straggler["phase"]), (Some(1), &"step".into()));
        for key in ["seconds", "phase_seconds"] {
            assert!(straggler[key].as_f64() > Some(0.0), "{end}");
        }
        let waited = end["collective_seconds_by_rank"].as_array().unwrap();
        assert_eq!(waited.len(), 3);
    }
    let (_, stderr) = run_to(0, &words(&format!("{slow} --nproc-per-node=2")));
    let told = "ddp-mp: rank 1 was the straggler: the others waited ";
    assert!(stderr.contains(told) && stderr.contains(" in its phase step\n"), "{stderr}");
}

#[test]
fn each_mistake_is_reported_with_rank_step_and_cause() {
    let mistakes = [
        ("nan", &["in step 5 on rank 1 the loss is NaN for sample "][..]),
        ("desync", &["after step 5 rank 1 has another `weight` than the others;"]),
        (
            "wrong-shape",
            &[
                "rank 1 called all_reduce(sum) of float32 [7] at crates/engine/src/trainer/callbacks/fault_injection.rs:",
                "ranks 0, 2 called all_reduce(sum of 0.3333333333333333 * each) of float32 ",
                "] at crates/engine/src/trainer/mod.rs:",
            ],
        ),
    ];
    for (number, (kind, told)) in mistakes.into_iter().enumerate() {
        let fault = format!("--inject-fault={kind}:rank=1,at=step,step=5");
        for layout in some_of(LAYOUTS.into_iter().cycle().skip(number).take(LAYOUTS.len()), 1) {
            let (_, stderr) =
                run_to(1, &[&[&fault, "--check-replicas-every=1"][..], layout].concat());
            assert!(told.iter().all(|it| stderr.contains(it)), "{kind}: {stderr}");
            assert!(stderr.contains("ddp-mp: rank 1 (CPU:1"), "{kind}: {stderr}");
        }
    }
    // With a skipped sample training goes on, to the same parameters on all ranks, but to others: `verify` finds it.
    let hash = |fault: &[&str]| {
        let run = ["--nproc-per-node=2", "--check-replicas-every=1"];
        run_end(&[&run[..], fault].concat())["parameters_hash"].clone()
    };
    assert_ne!(hash(&["--inject-fault=skip-sample:rank=1,at=step,step=5"]), hash(&[]));
}

#[test]
fn killed_process_is_named_with_the_step_of_the_waiting_ranks() {
    let kill = "--inject-fault=kill:rank=1,at=step,step=5";
    let place = " (bucket 0) of backward #5 at crates/engine/src/trainer/mod.rs:";
    // The process that has started them sees how it has ended.
    let args = ["--nproc-per-node=3", "--spawn=processes", "--log-format=json"];
    let event = last_event(&run_to(1, &[&[kill], &args[..]].concat()).0);
    assert_eq!((&event["event"], &event["rank"]), (&"failure".into(), &1.into()));
    assert_eq!((&event["operation"], &event["sequence"]), (&"step".into(), &5.into()));
    let error = event["error"].as_str().unwrap();
    assert!(error.starts_with("rank 1 (process "), "{error}");
    let waits = |rank| format!(") was killed by SIGKILL; rank {rank} waits for it in ");
    assert!([0, 2].iter().any(|rank| error.contains(&waits(rank))), "{error}");
    assert!(error.contains(place), "{error}");
    // Nobody does, on several machines.
    let told = failures(&[kill], &[1, 1], |_| {});
    assert_eq!([told[0].0, told[1].0], [Some(1), None], "{told:?}");
    let stderr = &told[0].1;
    assert!(stderr.contains("ddp-mp: rank 1 (CPU:1 on "), "{stderr}");
    let lost = ") failed in step #5: all_reduce #";
    let seen = " of step #5: the connection to rank 1 (last seen: ";
    assert!(stderr.contains(lost) && stderr.contains(seen), "{stderr}");
    assert!(stderr.contains(") is lost: its process has ended"), "{stderr}");
    let mut lines = stderr.lines();
    let mine = lines.find(|it| it.starts_with("  rank 0 last seen in all_reduce #")).unwrap();
    assert!(mine.contains(place), "{stderr}");
}

/// Long: it waits for a time-out.
#[test]
fn stall_warning_covers_ranks_of_other_processes() {
    // The warning comes when all the others have arrived, and long before the time-out.
    let stall =
        ["--inject-fault=stall:rank=2,at=step,step=3", "--stall-warning=7s", "--timeout=14s"];
    let told = failures(&[&stall[..], &["--grace-period=1s"]].concat(), &[2, 2], |_| {});
    let seen = "last seen in step #3 at crates/engine/src/trainer/mod.rs:";
    for (here, (code, stderr)) in [[0, 1], [2, 3]].iter().zip(&told) {
        assert_eq!(*code, Some(1), "{stderr}");
        // On a busy machine there may be warnings of the start.
        let is_of_step =
            |it: &&str| it.contains(" (bucket 0) at ") && it.contains(" has not ended for ");
        let mut lines = stderr.lines().skip_while(|it| !is_of_step(it));
        assert!(
            lines.next().unwrap().contains(" (bucket 0) at crates/engine/src/trainer/mod.rs:"),
            "{here:?}: {stderr}"
        );
        let arrived = lines.next().unwrap();
        let all = arrived.strip_prefix("  arrived: rank 0 ").unwrap();
        assert!(all.contains(" ago, rank 1 ") && all.contains(" ago, rank 3 "), "{stderr}");
        let missing = lines.next().unwrap();
        assert!(missing.starts_with("  rank 2 has not entered all_reduce #"), "{stderr}");
        assert!(missing.contains(&format!(" (bucket 0); {seen}")), "{stderr}");
    }
    // Again in the end, by the first that has waited in vain: all four.
    let is_told = |text: &str| {
        text.matches(" of backward #3 at crates/engine/src/trainer/mod.rs:").count() == 3
    };
    let (_, stderr) = told.iter().find(|(_, stderr)| is_told(stderr)).unwrap();
    let table: Vec<&str> =
        stderr.lines().filter(|it| it.contains(" last seen in ") && it.ends_with(" ago")).collect();
    let of_rank = |rank: usize| {
        table.iter().rfind(|it| it.starts_with(&format!("  rank {rank} last seen in ")))
    };
    assert!(of_rank(2).unwrap().contains(seen), "{stderr}");
    for rank in [0, 1, 3] {
        assert!(
            of_rank(rank)
                .unwrap()
                .contains(" (bucket 0) of backward #3 at crates/engine/src/trainer/mod.rs:"),
            "{stderr}"
        );
    }
}

/// Ctrl-Z, `docker pause` and `scontrol suspend` stop all processes for longer than a rank may wait.
/// Long: it waits for longer than a time-out, which also limits the start on a busy machine.
#[test]
fn suspension_of_all_processes_is_not_a_stall() {
    const SUSPENDED: Duration = Duration::from_secs(14);
    let run = ["--nproc-per-node=2", "--max-steps=8", "--timeout=12s", "--stall-warning=11s"];
    // Its gradients do not fit into a socket.
    let model = ["--model=mlp", "--hidden=256", "--in-features=256"];
    let slow = ["--inject-fault=slow=500ms:rank=1,at=step,step=0", "--log-format=json"];
    let layouts: [&[&str]; 3] = [
        &["--spawn=threads"],
        &["--spawn=processes", "--shared-memory=auto"],
        &["--spawn=processes", "--shared-memory=off"],
    ];
    in_parallel(&layouts, |layout| {
        let mut command = program(&[&run[..], &model, &slow, layout].concat());
        // The system ignores SIGTSTP in a process group without a parent outside of it.
        command.process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut first = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut first).unwrap();
        // The terminal sends it to the first process, which the others follow.
        send("TSTP", child.id());
        thread::sleep(SUSPENDED);
        let state = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        assert!(state.contains(") T "), "{layout:?}: {state}");
        send("CONT", child.id());
        let output = output(child);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(0), "{layout:?}: {stderr}");
        assert!(!stderr.contains(" has not ended for "), "{layout:?}: {stderr}");
        // Rank 1 sleeps 4 s in all, and is not blamed for the suspension as well.
        let stdout = String::from_utf8(output.stdout).unwrap();
        let end = last_event(&stdout);
        assert_eq!(end["straggler"]["rank"], 1, "{layout:?}: {stdout}");
        let waited = end["straggler"]["seconds"].as_f64().unwrap();
        assert!(waited < SUSPENDED.as_secs_f64(), "{layout:?}: {stdout}");
    });
}

#[test]
fn diverged_replicas_fail_the_run_and_a_tie_blames_no_rank() {
    let fault = "--inject-fault=desync:rank=1,at=step,step=5";
    let at_end = "found when the replicas were compared at the end, after step";
    let tie = &format!(") differ: {at_end} 63: ranks 0 and 1 differ in `weight`");
    let minority = &format!(") differs: {at_end} 42: rank 1 has another `weight` than the others");
    for spawn in some_of(["--spawn=processes", "--spawn=threads"], 1) {
        let args = [fault, spawn, "--log-format=json"];
        let (stdout, stderr) = run_to(1, &[&args[..], &["--nproc-per-node=2"]].concat());
        assert!(stderr.contains(tie) && stderr.matches(at_end).count() == 1, "{stderr}");
        assert!(!stderr.contains(" failed in "), "{stderr}");
        assert!(stderr.contains("ddp-mp: ranks 0 (CPU:0"), "{stderr}");
        assert!(stderr.contains("; with two ranks it is unknown which one is wrong"), "{stderr}");
        let events = events(&stdout);
        let [.., end, failure] = &events[..] else { panic!("{stdout}") };
        assert_eq!((&end["event"], &end["replicas_equal"]), (&"end".into(), &false.into()));
        assert_eq!(failure["event"], "failure");
        assert_eq!(failure["operation"], "comparison of replicas");
        assert_eq!((&failure["rank"], &failure["ranks"]), (&Value::Null, &vec![0, 1].into()));
        let device = failure["device"].as_str().unwrap();
        assert!(device.starts_with("CPU:0") && device.contains(", CPU:1"), "{failure}");
        // A majority tells who is wrong.
        let (stdout, stderr) = run_to(1, &[&args[..], &["--nproc-per-node=3"]].concat());
        assert!(stderr.contains("ddp-mp: rank 1 (CPU:1"), "{stderr}");
        assert!(stderr.contains(minority), "{stderr}");
        let failure = last_event(&stdout);
        assert_eq!((&failure["rank"], &failure["ranks"]), (&1.into(), &Value::Null));
    }
    // People are not told of a success first.
    let folder = tempfile::tempdir().unwrap();
    let save = format!("--checkpoint-dir={}", folder.path().display());
    let args = [fault, &save, "--resume=auto", "--nproc-per-node=2", "--max-steps=9"];
    let (_, stderr) = run_to(1, &[&args[..], &["--val-fraction=0.1"]].concat());
    let of_success = ["ddp-mp: loss ", "ddp-mp: best", "ddp-mp: stopped by"];
    assert!(of_success.iter().all(|it| !stderr.contains(it)), "{stderr}");
    assert!(stderr.contains(" before a checkpoint was saved, after step 8:"), "{stderr}");
    assert!(stderr.contains("; --check-replicas-every 1 finds the step"), "{stderr}");
    // Several processes, of one rank and of several: each ends with the same error.
    for (ranks, told) in some_of([(&[2, 1][..], minority), (&[1, 1], tie)], 1) {
        for (code, stderr) in failures(&[fault], ranks, |_| {}) {
            assert_eq!(code, Some(1), "{stderr}");
            assert!(stderr.contains(told), "{stderr}");
        }
    }
    // Found on the way, a tie is one, too.
    let args = [fault, "--nproc-per-node=2", "--check-replicas-every=2"];
    let (_, stderr) = run_to(1, &args);
    let tie = "ranks 0 (CPU:0) and 1 (CPU:1) failed in step #5: after step 5 ranks 0 and 1 differ in `weight`";
    assert!(stderr.contains(tie), "{stderr}");
}
