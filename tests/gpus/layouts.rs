//! Runs that share GPUs or change machines: ranks on one GPU, processes of a launcher, checkpoints that move.

use crate::machine::{
    SHARES_GPUS, cpu_events, end, events, gpu_events, on_gpus, results, under_torchrun,
};
use crate::same::args;

/// Several ranks on a GPU: threads that share memory, and threads and processes with NCCL, on one and on two GPUs.
#[test]
fn ranks_that_share_gpus_have_the_bits_of_cpu_ranks() {
    for (backend, gpus, ranks, row) in [
        ("threaded", 1, 3, "mlp"),
        ("threaded", 1, 2, "mlp --optimizer=adamw --grad-accum-steps=2 --comm-hook=fp16"),
        ("threaded", 1, 2, "cnn --sync-batch-norm --val-fraction=0.2"),
        ("threaded", 1, 2, "mlp --strategy=dp --num-workers=1"),
        ("threaded", 1, 4, "linear --exact-mean"),
        ("threaded", 1, 2, "mlp --share-model --optimizer=adamw"),
        (
            "threaded",
            1,
            3,
            "cnn --share-model --max-grad-norm=0.1 --momentum=0.9 --val-fraction=0.2",
        ),
        ("threaded", 1, 3, "mlp --zero --optimizer=adamw"),
        ("nccl", 1, 2, "mlp --bucket-cap-mb=0.001"),
        ("nccl", 1, 3, "mlp --optimizer=adamw --zero"),
        ("nccl", 2, 4, "mlp --max-epochs=2"),
        ("nccl", 1, 2, "cnn --sync-batch-norm --val-fraction=0.2"),
        ("nccl", 1, 2, "mlp --strategy=dp --num-workers=1"),
        ("nccl", 1, 2, "mlp --spawn=processes --bucket-cap-mb=0.001"),
        ("nccl", 2, 4, "mlp --spawn=processes"),
    ] {
        let count = format!("--nproc-per-node={ranks}");
        let on = format!("--backend={backend}");
        let shared = ["--log-format=json", &count, &on];
        let mut command = on_gpus(gpus, &[&args(row)[..], &shared].concat());
        command.envs(SHARES_GPUS);
        let (gpu, cpu) = (events(command), cpu_events(ranks, &args(row)));
        assert_eq!((&gpu[0]["device"], &gpu[0]["backend"]), (&"GPU".into(), &backend.into()));
        assert_eq!(
            results(&gpu),
            results(&cpu),
            "{ranks} ranks with {backend} on {gpus} GPUs, {row}"
        );
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
    // There is no GPU 1.
    let failed = &on(1, &["a", "b"], &["--inject-fault=error:rank=1,at=step,step=2"])[0];
    let stderr = String::from_utf8_lossy(&failed.stderr);
    assert!(stderr.contains("share a GPU, GPU-"), "{stderr}");
    assert!(stderr.contains("rank 1 (GPU:0 on ") && !stderr.contains("GPU:1"), "{stderr}");
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
