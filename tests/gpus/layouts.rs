//! Runs that share GPUs or change machines: ranks on one GPU, checkpoints that move.

use crate::machine::{SHARES_GPUS, cpu_events, end, events, gpu_events, on_gpus, results};
use crate::same::args;

/// Several ranks on a GPU: threads that share memory, and threads and processes with NCCL, on one and on two GPUs.
#[test]
fn ranks_that_share_gpus_have_the_bits_of_cpu_ranks() {
    for (backend, gpus, ranks, row) in [
        ("threaded", 1, 3, "mlp --optimizer=adamw --grad-accum-steps=2 --zero"),
        ("threaded", 1, 2, "cnn --sync-batch-norm --val-fraction=0.2"),
        ("threaded", 1, 2, "mlp --strategy=dp --num-workers=1"),
        ("threaded", 1, 3, "cnn --share-model --max-grad-norm=0.1 --momentum=0.9"),
        ("nccl", 1, 3, "mlp --optimizer=adamw --zero"),
        ("nccl", 2, 4, "mlp --spawn=processes --bucket-cap-mb=0.001"),
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

/// The first half of a run on one, the second half on the other: as if it had never moved.
#[test]
fn checkpoints_move_between_gpu_and_cpu() {
    for row in [
        "mlp --optimizer=adamw --zero --schedule=cosine --schedule-by=step --warmup-steps=3",
        "mlp --amp=fp16 --momentum=0.9 --dropout=0.2",
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
