//! A failure costs no step: a surviving rank saves the state after its last step, and the run goes on from there.

use std::fs;
use std::sync::Arc;

use ddp_mp::SpawnError;
use ddp_mp::checkpoint::{Checkpoint, CheckpointDir, TrainerState};
use ddp_mp::data::{DataLoader, DistributedSampler, Targets, TensorDataset};
use ddp_mp::trainer::{Amp, Callback, SaveEvery, Step, TrainContext, TrainerOptions};
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::Value;

use crate::checkpoint::trainer_of_program;
use crate::harness::{
    in_parallel, last_event, program_under, run_command, run_end, run_to, runs_every_case, some_of,
    try_ranks,
};
use crate::layouts::run_in;
use crate::spawn_processes::events;

/// Options, each with other things that belong to the state.
const OPTIONS: [&str; 10] = [
    "--model=linear --momentum=0.9",
    "--model=mlp --optimizer=adamw",
    "--model=mlp --max-grad-norm=0.5 --schedule=cosine",
    "--model=cnn --in-features=64 --momentum=0.9",
    "--model=cnn --in-features=64 --sync-batch-norm --skip-nonfinite=3",
    "--model=mlp --amp=fp16 --optimizer=adamw",
    "--model=mlp --amp=bf16 --grad-accum-steps=2",
    "--model=mlp --val-fraction=0.2 --patience=9",
    "--exact-mean --num-samples=501",
    "--model=mlp --share-model --optimizer=adamw",
];

const RUN: &str = "--max-epochs=2 --batch-size=16 --num-samples=512 --seed=3";

/// The flags of a run with `options`, whose own values come last.
fn flags(options: &str) -> Vec<&str> {
    let own = |flag: &&str| {
        let name = flag.split('=').next().unwrap();
        flag.is_empty() || !options.contains(&format!("{name}="))
    };
    RUN.split_whitespace().filter(own).chain(options.split_whitespace()).collect()
}

/// What training comes to: the hash, the loss, and the number of steps.
fn result(end: &Value) -> [Value; 3] {
    ["parameters_hash", "loss", "steps"].map(|key| end[key].clone())
}

fn cases() -> u32 {
    if runs_every_case() { 40 } else { 5 }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    /// Long: it waits for a time-out.
    #[test]
    fn restart_repeats_no_step_but_the_failed_one(
        options in select(&OPTIONS[..]), ranks in 2..4_usize, rank in 0..3_usize, step in any::<u64>(),
        (kind, spawn) in select(vec![
            ("error", "--spawn=threads"), ("panic", "--spawn=threads"), ("stall", "--spawn=threads"),
            ("error", "--spawn=processes"), ("panic", "--spawn=processes"), ("kill", "--spawn=processes"),
            ("stall", "--spawn=processes"),
        ]),
        in_memory in any::<bool>(),
    ) {
        // Processes have no common model.
        let spawn = if options.contains("share") { "--spawn=threads" } else { spawn };
        let kind = if spawn == "--spawn=threads" && kind == "kill" { "error" } else { kind };
        let nproc = format!("--nproc-per-node={ranks}");
        let folder = tempfile::tempdir().unwrap();
        let dir = format!("--checkpoint-dir={}", folder.path().join("run").display());
        let timeout = if kind == "stall" { "--timeout=8s" } else { "--timeout=50s" };
        let whole = [&flags(options)[..], &[&nproc]].concat();
        let expected = run_end(&whole);
        let step = 1 + step % (expected["steps"].as_u64().unwrap() - 1);
        let fault = format!("--inject-fault={kind}:rank={},at=step,step={step}", rank % ranks);
        let more = [spawn, "--max-restarts=1", "--grace-period=2s", timeout, &fault, &dir];
        let more = &more[..more.len() - usize::from(in_memory)];
        let (code, events, stderr) = events(&[&whole[..], more].concat());
        let what = format!("{more:?} {whole:?}: {stderr}");
        prop_assert_eq!(code, Some(0), "{}", &what);
        prop_assert_eq!(result(events.last().unwrap()), result(&expected), "{}", &what);
        // A rank has saved this step, unless an epoch has ended with it and it was saved then.
        let told = format!("restart 1 of 1, at step #{step}, from the state that rank ");
        let resumed = format!("/step-{step:08}: epoch ");
        prop_assert!(stderr.contains(&told) || !in_memory, "{}", &what);
        prop_assert!(stderr.contains(&resumed), "{}", &what);
    }
}

/// Long: it runs several hosts' processes.
#[test]
fn hosts_that_are_left_save_the_step_for_any_layout() {
    let hosts: [(&[usize], usize); 3] = [(&[2, 2], 0), (&[2, 2], 3), (&[1, 1, 2], 1)];
    for (counts, killed) in some_of(hosts, 1) {
        for options in some_of(["--model=cnn --in-features=64", "--model=mlp --optimizer=adamw"], 1)
        {
            let folder = tempfile::tempdir().unwrap();
            let dir = format!("--checkpoint-dir={}", folder.path().join("run").display());
            let fault = format!("--inject-fault=kill:rank={killed},at=step,step=7");
            let whole = flags(options);
            let ended =
                run_in((counts, "--shared-memory=off"), &[&whole[..], &[&dir, &fault]].concat());
            let stderr: String =
                ended.iter().map(|host| String::from_utf8_lossy(&host.stderr)).collect();
            assert!(stderr.contains(" has saved the state after 7 steps"), "{counts:?}: {stderr}");
            let resume = [&whole[..], &[&dir, "--resume=auto"]].concat();
            let resumed = &run_in((&[4], "--spawn=threads"), &resume)[0];
            let stderr = String::from_utf8_lossy(&resumed.stderr);
            assert!(stderr.contains("step-00000007: epoch 0, step 7"), "{stderr}");
            let end = last_event(std::str::from_utf8(&resumed.stdout).unwrap());
            let nproc = [&whole[..], &["--nproc-per-node=4"]].concat();
            assert_eq!(result(&end), result(&run_end(&nproc)), "{counts:?} {options}: {stderr}");
        }
    }
}

/// Fails at the end of a step.
struct Fails {
    at: Option<u64>,
}

impl<M> Callback<M> for Fails {
    fn on_step_end(&mut self, _: &mut TrainContext<M>, step: &Step) -> anyhow::Result<()> {
        anyhow::ensure!(Some(step.index) != self.at, "this rank fails");
        Ok(())
    }
}

/// Trains two ranks in a program. Rank 1 fails at the end of step `fails_at`, if there is one.
fn train(
    dir: Option<&CheckpointDir>,
    fails_at: Option<u64>,
    from: Option<Checkpoint>,
) -> Result<(TrainerState, u64), Box<SpawnError>> {
    let data = Arc::new(TensorDataset::random(66, 20, Targets::Values(1), 1).unwrap());
    let (dir, from) = (dir.cloned(), from.map(Arc::new));
    let trained = try_ranks(2, move |rank, group| {
        let sampler = DistributedSampler::new(data.len(), 2, rank.rank())?;
        let validation = DataLoader::new(data.clone(), sampler, 8, rank.device())?;
        let mut trainer = trainer_of_program(rank, group, &data, 8, from.as_deref())?
            .validation(validation, 1)
            .checkpoints(dir.clone(), SaveEvery::default(), Default::default());
        if rank.rank() == 1 {
            trainer = trainer.callback(Fails { at: fails_at });
        }
        if let Some(from) = &from {
            trainer.resume(from)?;
        }
        trainer.train(3)?;
        Ok((trainer.state().clone(), trainer.ddp().parameters_hash()?))
    })?;
    Ok(trained.into_iter().next().unwrap())
}

/// Rank 0 has begun to end the epoch, whose mean loss takes a collective. In the next start it fails again.
#[test]
fn failure_at_the_end_of_an_epoch_loses_neither_its_loss_nor_its_validation() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let open = || CheckpointDir::open(&run, 9).unwrap();
    let newest = || Checkpoint::read(&CheckpointDir::newest_in(&run).unwrap().unwrap()).unwrap();
    let (mut whole, hash) = train(None, None, None).unwrap();
    assert_eq!(whole.step, 15);
    let places = [(9, (10, 1, 5, 66)), (12, (13, 2, 3, 48))];
    for (fails_at, expected) in places {
        let from = (fails_at > 9).then(newest);
        let error = train(Some(&open()), Some(fails_at), from).unwrap_err();
        assert_eq!(error.failure.rank, 1, "{error}");
        let saved = newest();
        let state = saved.state();
        let place = (state.step, state.epoch, state.epoch_steps, state.samples_seen);
        assert_eq!((place, state.after_failure, state.loss_sums.len()), (expected, Some(0), 2));
    }
    // The second start has ended the epoch, and saved that as the best.
    let ended = Checkpoint::read(&run.join("step-00000010")).unwrap();
    assert_eq!((ended.state().epoch, ended.state().after_failure), (2, None));
    let (mut resumed, resumed_hash) = train(Some(&open()), None, Some(newest())).unwrap();
    assert_eq!(resumed_hash, hash);
    for state in [&mut whole, &mut resumed] {
        // What the run was saved with.
        (state.world_size, state.num_samples, state.batch_size) = (0, 0, 0);
        (state.max_epochs, state.total_steps) = (0, 0);
    }
    assert_eq!(resumed, whole);
    assert_eq!(newest().state().after_failure, None);
}

/// Rank 1 fails as soon as it has made step 6. Rank 0 has the averages of that step, and goes on when the run has failed.
struct FailsBetween {
    rank: usize,
}

impl<M> Callback<M> for FailsBetween {
    fn on_after_backward(
        &mut self,
        context: &mut TrainContext<M>,
        step: &mut Step,
    ) -> anyhow::Result<()> {
        while step.index == 6 && self.rank == 0 && context.group().synchronize().is_ok() {
            std::thread::yield_now();
        }
        Ok(())
    }

    fn on_step_start(&mut self, _: &mut TrainContext<M>, step: &mut Step) -> anyhow::Result<()> {
        anyhow::ensure!(step.index < 7 || self.rank == 0, "rank 1 fails");
        Ok(())
    }
}

#[test]
fn rank_that_has_the_averages_completes_its_step() {
    let with = |change: fn(&mut TrainerOptions)| {
        let mut options = TrainerOptions::default();
        change(&mut options);
        options
    };
    let all = [
        TrainerOptions::default(),
        with(|it| it.amp = Amp::Fp16),
        with(|it| it.max_grad_norm = Some(0.5)),
        with(|it| it.skip_nonfinite = Some(3)),
        with(|it| it.exact_mean = true),
    ];
    let data = Arc::new(TensorDataset::random(256, 20, Targets::Values(1), 1).unwrap());
    for options in all {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let (dir, data, trained_with) =
            (CheckpointDir::open(&run, 9).unwrap(), data.clone(), options.clone());
        let failed = try_ranks(2, move |rank, group| {
            let trainer = trainer_of_program(rank, group, &data, 8, None)?;
            let mut trainer = trainer
                .options(trained_with.clone())?
                .checkpoints(Some(dir.clone()), SaveEvery::default(), Default::default())
                .replace_batches(FailsBetween { rank: rank.rank() }); // before all other callbacks
            trainer.train(1)
        });
        assert_eq!(failed.unwrap_err().failure.rank, 1, "{options:?}");
        let newest = CheckpointDir::newest_in(&run).unwrap().unwrap();
        let saved = TrainerState::read(&newest).unwrap();
        assert_eq!((saved.step, saved.after_failure), (7, Some(0)), "{options:?}");
    }
}

#[test]
fn state_that_cannot_be_saved_is_named_and_older_checkpoints_stay() {
    let [zero, full] =
        ["--zero --nproc-per-node=2", "--nproc-per-node=2 --model=mlp --hidden=90,90"];
    let cases = [
        ("true", zero, "with --zero each rank has only its own partition of the optimizer's state"),
        ("ulimit -f 32", full, "File too large (os error 27)"),
    ];
    in_parallel(&cases, |&(limit, options, why)| {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("run");
        let save = format!("--checkpoint-dir={}", dir.display());
        let fault = "--inject-fault=error:rank=1,at=step,step=5";
        let args: Vec<&str> = options.split(' ').chain([fault, &*save]).collect();
        let (code, _, stderr) = run_command(program_under(limit, &args));
        assert_eq!(code, Some(1), "{stderr}");
        let told = "rank 0 cannot save the state after 5 steps: ";
        let line = stderr.lines().find(|line| line.contains(told)).unwrap_or(&stderr);
        assert!(line.contains(why), "{stderr}");
        let names: Vec<_> = fs::read_dir(&dir).unwrap().map(|it| it.unwrap().file_name()).collect();
        assert_eq!(names, [".lock"], "{stderr}");
    });
}

#[test]
fn record_of_a_restarted_run_is_that_of_an_undisturbed_one() {
    let folder = tempfile::tempdir().unwrap();
    let record = |name: &str| folder.path().join(name).display().to_string();
    let (whole, run) =
        (record("whole"), [&flags("--model=mlp")[..], &["--nproc-per-node=3"]].concat());
    run_to(0, &[&run[..], &[&format!("--record={whole}")]].concat());
    let ways = [("error", "--spawn=threads"), ("kill", "--spawn=processes")];
    in_parallel(&some_of(ways, 1), |&(kind, spawn)| {
        let restarted = record(kind);
        let fault = format!("--inject-fault={kind}:rank=1,at=step,step=9");
        let more = [spawn, "--max-restarts=1", &fault, &format!("--record={restarted}")];
        run_to(0, &[&run[..], &more].concat());
        let (stdout, _) = run_to(0, &["diff", &whole, &restarted]);
        // A rank that was slower than the failure may not have made the step before.
        let equal = ["22 steps (0 to 21)", "21 steps (0 to 21)"];
        let equal = equal.map(|steps| format!("Equal: the start and {steps}.\n"));
        assert!(equal.iter().any(|equal| stdout.contains(equal)), "{stdout}");
    });
}

#[test]
fn only_rank_that_fails_saves_its_state() {
    let more =
        ["--nproc-per-node=1", "--max-restarts=1", "--inject-fault=error:rank=0,at=step,step=9"];
    let (code, events, stderr) = events(&[&flags("--model=mlp")[..], &more].concat());
    assert_eq!(code, Some(0), "{stderr}");
    let expected = run_end(&[&flags("--model=mlp")[..], &more[..1]].concat());
    assert_eq!(result(events.last().unwrap()), result(&expected));
    assert!(
        stderr.contains("restart 1 of 1, at step #9, from the state that rank 0 has saved"),
        "{stderr}"
    );
    assert!(stderr.contains("rank 0 (CPU:0) failed in step #9: "), "{stderr}");
}

#[test]
fn state_in_memory_is_no_checkpoint_of_the_user() {
    let run = ["--nproc-per-node=2", "--max-restarts=1"];
    let (_, stderr) = run_to(0, &[&run[..], &["--max-steps=5"]].concat());
    let told = "after 5 steps; nothing is saved, because there is no --checkpoint-dir";
    assert!(stderr.contains(told), "{stderr}");
    // The weights of the first start are not those of the next one.
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let rows: String = (0..20).map(|row| format!("{row},{},{}\n", row % 3, row % 7)).collect();
    fs::write(path("data.csv"), rows).unwrap();
    let data = format!("--dataset=csv:{}", path("data.csv"));
    let run = [&run[..], &[&data, "--batch-size=2"]].concat();
    run_to(
        0,
        &[&run[..], &["--max-steps=2", &format!("--checkpoint-dir={}", path("run"))]].concat(),
    );
    let from = format!("--init-from={}", path("run"));
    let fault = "--inject-fault=error:rank=1,at=step,step=3";
    let (_, stderr) = run_to(0, &[&run[..], &[&from, fault]].concat());
    assert!(stderr.contains("restart 1 of 1, at step #3, "), "{stderr}");
}
