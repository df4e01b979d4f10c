//! Runs that share GPUs or change machines: ranks on one GPU, processes of a launcher, checkpoints that move.

use crate::machine::{
    SHARES_GPUS, cpu_events, end, events, gpu_events, on_gpus, parsed, results, under_torchrun,
};
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

/// A rank of a launcher's with NCCL.
const ONE_RANK: [&str; 3] = ["--backend=nccl", "--nproc-per-node=1", "--max-steps=4"];

/// NCCL refuses two ranks of one host on a GPU. Processes with different `NCCL_HOSTID` are of two hosts for it.
#[test]
fn processes_of_two_nccl_hosts_share_a_gpu() {
    let on = |gpus: usize, hosts: &[&str], more: &[&str]| {
        under_torchrun(hosts.len(), |process| {
            let mut command = on_gpus(gpus, &[&ONE_RANK[..], &["--timeout=20s"], more].concat());
            command.env("NCCL_HOSTID", hosts[process]);
            command
        })
    };
    // The latter: more processes than GPUs, and more than one GPU.
    for output in [on(1, &["a", "b"], &[]), on(2, &["0", "1", "2", "3"], &[])].concat() {
        assert!(output.status.success(), "{output:?}");
    }
    let refused = &on(1, &["a", "a"], &[])[0];
    let stderr = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("have the same GPU"), "{stderr}");
    // There is no GPU 1.
    let failed = &on(1, &["a", "b"], &["--inject-fault=error:rank=1,at=step,step=2"])[0];
    let stderr = String::from_utf8_lossy(&failed.stderr);
    assert!(stderr.contains("share a GPU, GPU-"), "{stderr}");
    assert!(stderr.contains("rank 1 (GPU:0 on ") && !stderr.contains("GPU:1"), "{stderr}");
}

/// Each process has an NCCL of its own: if that of one refuses, all say so.
#[test]
fn processes_that_disagree_on_sharing_end_alike() {
    for output in under_torchrun(2, |process| {
        let mut command = on_gpus(1, &ONE_RANK);
        command.envs(SHARES_GPUS);
        if process == 1 {
            command.env_remove("NCCL_MULTI_RANK_GPU_ENABLE");
        }
        command
    }) {
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
        let outputs = under_torchrun(ranks, |_| {
            on_gpus(ranks, &[&args(row)[..], &["--log-format=json"]].concat())
        });
        for output in &outputs {
            assert!(output.status.success(), "{row}: {output:?}");
        }
        let gpu = parsed(&String::from_utf8_lossy(&outputs[0].stdout));
        let cpu = cpu_events(ranks, &args(row));
        for key in ["parameters_hash", "loss", "steps"] {
            assert_eq!(end(&gpu)[key], end(&cpu)[key], "{ranks} processes, {row}");
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
        let run = |on_gpu: bool, more: &[&str]| {
            let args = [&args(row)[..], &["--max-epochs=2"], more].concat();
            if on_gpu { gpu_events(2, &args) } else { cpu_events(2, &args) }
        };
        let expected = run(false, &[]);
        for first_on_gpu in [true, false] {
            let folder = tempfile::tempdir().unwrap();
            let save = format!("--checkpoint-dir={}", folder.path().join("run").display());
            // A schedule depends on how long the whole run is: it stops in the midst of that.
            let steps = end(&expected)["steps"].as_u64().unwrap() / 2;
            let stop = format!("--max-steps={steps}");
            run(first_on_gpu, &[&save, &stop]);
            let found = run(!first_on_gpu, &[&save, "--resume=auto"]);
            for key in ["parameters_hash", "loss", "scale"] {
                let (found, expected) = (&end(&found)[key], &end(&expected)[key]);
                assert_eq!(found, expected, "{key}, {row}, first on a GPU: {first_on_gpu}");
            }
        }
    }
}

#[test]
fn init_from_accepts_parameters_of_the_other_device() {
    let folder = tempfile::tempdir().unwrap();
    for (name, run) in [("gpu", gpu_events as fn(usize, &[&str]) -> _), ("cpu", cpu_events)] {
        let [save, from] = ["checkpoint-dir", "init-from"]
            .map(|flag| format!("--{flag}={}", folder.path().join(name).display()));
        run(2, &[&args("mlp")[..], &[&save]].concat());
        let next = [&args("mlp")[..], &[&from]].concat();
        assert_eq!(results(&gpu_events(2, &next)), results(&cpu_events(2, &next)), "{name}");
    }
}
