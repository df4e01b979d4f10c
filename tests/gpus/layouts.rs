//! Runs that share GPUs or change machines: ranks on one GPU, processes of a launcher, checkpoints that move.

use std::process::Stdio;

use crate::harness::{as_torchrun, free_port, join};
use crate::machine::{SHARES_GPUS, cpu_events, end, events, gpu_events, on_gpus, results};
use crate::same::args;

#[test]
fn ranks_on_one_gpu_have_the_bits_of_cpu_ranks() {
    for (ranks, row) in [
        (3, "mlp"),
        (2, "mlp --optimizer=adamw --grad-accum-steps=2 --comm-hook=fp16"),
        (2, "cnn --sync-batch-norm --val-fraction=0.2"),
        (2, "mlp --strategy=dp --num-workers=1"),
        (4, "linear --exact-mean"),
        (2, "mlp --share-model --optimizer=adamw"),
        (3, "cnn --share-model --max-grad-norm=0.1 --momentum=0.9 --val-fraction=0.2"),
        (3, "mlp --zero --optimizer=adamw"),
    ] {
        let count = format!("--nproc-per-node={ranks}");
        let shared = [&args(row)[..], &["--backend=threaded", &count]].concat();
        let (gpu, cpu) = (gpu_events(1, &shared), cpu_events(ranks, &args(row)));
        assert_eq!((&gpu[0]["device"], &gpu[0]["backend"]), (&"GPU".into(), &"threaded".into()));
        assert_eq!(results(&gpu), results(&cpu), "{ranks} ranks on one GPU, {row}");
    }
}

/// Several ranks with NCCL on a GPU: threads and processes, on one and on two GPUs.
#[test]
fn ranks_on_one_gpu_with_nccl_have_the_bits_of_cpu_ranks() {
    for (gpus, ranks, row) in [
        (1, 2, "mlp --bucket-cap-mb=0.001"),
        (1, 3, "mlp --optimizer=adamw --zero"),
        (2, 4, "mlp --max-epochs=2"),
        (1, 2, "cnn --sync-batch-norm --val-fraction=0.2"),
        (1, 2, "mlp --strategy=dp --num-workers=1"),
        (1, 2, "mlp --spawn=processes --bucket-cap-mb=0.001"),
        (2, 4, "mlp --spawn=processes"),
    ] {
        let count = format!("--nproc-per-node={ranks}");
        let shared = ["--backend=nccl", &count, "--log-format=json"];
        let mut command = on_gpus(gpus, &[&args(row)[..], &shared].concat());
        command.envs(SHARES_GPUS);
        let (gpu, cpu) = (events(command), cpu_events(ranks, &args(row)));
        assert_eq!((&gpu[0]["device"], &gpu[0]["backend"]), (&"GPU".into(), &"nccl".into()));
        assert_eq!(results(&gpu), results(&cpu), "{ranks} ranks on {gpus} GPUs, {row}");
    }
}

/// NCCL refuses two ranks of one host on a GPU. Processes with different `NCCL_HOSTID` are of two hosts for it.
#[test]
fn processes_of_two_nccl_hosts_share_a_gpu() {
    let both = |hosts: [&'static str; 2], fault: &'static str| {
        let port = free_port();
        let start = |process: usize| {
            let args = ["--backend=nccl", "--nproc-per-node=1", "--max-steps=4", "--timeout=20s"];
            let mut command = on_gpus(1, &[&args[..], &[fault]].concat());
            as_torchrun(&mut command, process, 2, port);
            command.env("NCCL_HOSTID", hosts[process]);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        join((0..2).map(start).collect())
    };
    const NO_FAULT: &str = "--seed=0";
    for output in both(["a", "b"], NO_FAULT) {
        assert!(output.status.success(), "{output:?}");
    }
    // More processes than GPUs, and more than one GPU.
    let port = free_port();
    let start = |process: usize| {
        let mut command = on_gpus(2, &["--backend=nccl", "--nproc-per-node=1", "--max-steps=4"]);
        as_torchrun(&mut command, process, 4, port);
        command.env("NCCL_HOSTID", process.to_string());
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    for output in join((0..4).map(start).collect()) {
        assert!(output.status.success(), "{output:?}");
    }
    let refused = &both(["a", "a"], NO_FAULT)[0];
    let stderr = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("have the same GPU"), "{stderr}");
    // There is no GPU 1.
    let failed = &both(["a", "b"], "--inject-fault=error:rank=1,at=step,step=2")[0];
    let stderr = String::from_utf8_lossy(&failed.stderr);
    assert!(stderr.contains("share a GPU, GPU-"), "{stderr}");
    assert!(stderr.contains("rank 1 (GPU:0 on ") && !stderr.contains("GPU:1"), "{stderr}");
}

/// Each process has an NCCL of its own: if that of one refuses, all say so.
#[test]
fn processes_that_disagree_on_sharing_end_alike() {
    let port = free_port();
    let start = |process: usize| {
        let mut command = on_gpus(1, &["--backend=nccl", "--nproc-per-node=1", "--max-steps=4"]);
        as_torchrun(&mut command, process, 2, port);
        command.envs(SHARES_GPUS);
        if process == 1 {
            command.env_remove("NCCL_MULTI_RANK_GPU_ENABLE");
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    for output in join((0..2).map(start).collect()) {
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains("unless NCCL_MULTI_RANK_GPU_ENABLE=1 is set"), "{stderr}");
        assert!(!stderr.contains("GPU:1"), "{stderr}");
    }
}

#[test]
fn torchrun_processes_have_the_bits_of_cpu_ranks() {
    for (ranks, row) in [
        (2, "mlp --max-epochs=2"),
        (3, "mlp --bucket-cap-mb=0.001 --optimizer=adamw"),
        (2, "mlp --share-model --momentum=0.9"),
        (3, "mlp --zero --optimizer=adamw --max-epochs=2"),
        (2, "cnn --sync-batch-norm --val-fraction=0.2"),
        (2, "mlp --strategy=dp --grad-accum-steps=2"),
    ] {
        let port = free_port();
        let start = |process| {
            let mut command = on_gpus(ranks, &[&args(row)[..], &["--log-format=json"]].concat());
            as_torchrun(&mut command, process, ranks, port);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let outputs = join((0..ranks).map(start).collect());
        for output in &outputs {
            assert!(output.status.success(), "{row}: {output:?}");
        }
        let stdout = String::from_utf8_lossy(&outputs[0].stdout);
        let last = [serde_json::from_str(stdout.lines().last().unwrap()).unwrap()];
        let cpu = cpu_events(ranks, &args(row));
        for key in ["parameters_hash", "loss", "steps"] {
            assert_eq!(end(&last)[key], end(&cpu)[key], "{ranks} processes, {row}");
        }
    }
}

/// The first half of a run on one, the second half on the other: as if it had never moved.
#[test]
fn checkpoints_move_between_gpu_and_cpu() {
    for row in [
        "mlp --momentum=0.9 --dropout=0.2",
        "mlp --optimizer=adamw --schedule=cosine --schedule-by=step --warmup-steps=3",
        "mlp --optimizer=adamw --zero",
        "mlp --amp=fp16",
        "cnn --sync-batch-norm --val-fraction=0.2 --optimizer=adamw",
    ] {
        let run = |on_gpu: bool, epochs: &str, more: &[&str]| {
            let args = [&args(row)[..], &[epochs], more].concat();
            if on_gpu { gpu_events(2, &args) } else { cpu_events(2, &args) }
        };
        let expected = run(false, "--max-epochs=2", &[]);
        for first_on_gpu in [true, false] {
            let folder = tempfile::tempdir().unwrap();
            let save = format!("--checkpoint-dir={}", folder.path().join("run").display());
            // A schedule depends on how long the whole run is: it stops in the midst of that.
            let steps = end(&expected)["steps"].as_u64().unwrap() / 2;
            let stop = format!("--max-steps={steps}");
            run(first_on_gpu, "--max-epochs=2", &[&save, &stop]);
            let found = run(!first_on_gpu, "--max-epochs=2", &[&save, "--resume=auto"]);
            for key in ["parameters_hash", "loss", "scale"] {
                assert_eq!(
                    end(&found)[key],
                    end(&expected)[key],
                    "{key}, {row}, first on a simulated GPU: {first_on_gpu}"
                );
            }
        }
    }
}

#[test]
fn init_from_accepts_parameters_of_the_other_device() {
    let folder = tempfile::tempdir().unwrap();
    for (saves_on_gpu, name) in [(true, "gpu"), (false, "cpu")] {
        let save = format!("--checkpoint-dir={}", folder.path().join(name).display());
        let from = format!("--init-from={}", folder.path().join(name).display());
        let row = args("mlp");
        let saved = [&row[..], &[&save]].concat();
        if saves_on_gpu {
            gpu_events(2, &saved)
        } else {
            cpu_events(2, &saved)
        };
        let next = [&row[..], &[&from]].concat();
        assert_eq!(results(&gpu_events(2, &next)), results(&cpu_events(2, &next)), "{name}");
    }
}
