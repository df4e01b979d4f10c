//! Losses, steps and parameters on simulated GPUs are those of CPU ranks, whatever the options.

use crate::machine::{cpu_events, end, gpu_events, in_parallel, results};

/// What the rows of the tables begin with.
const BASES: [(&str, &str); 6] = [
    ("linear", "--num-samples=500"),
    ("mlp", "--model=mlp --num-samples=401"),
    ("cnn", "--model=cnn --dataset=digits --loss=cross-entropy --num-samples=150"),
    ("images", "--model=cnn --in-features=64 --num-samples=150"),
    ("digits", "--model=mlp --dataset=digits --loss=cross-entropy --num-samples=300"),
    ("gpt", "--model=gpt --dataset=text:assets/shakespeare.txt --n-embd=32 --num-samples=60"),
];

/// Returns the arguments of a row such as `mlp --amp=fp16`.
pub(crate) fn args(row: &str) -> Vec<&str> {
    let mut words = row.split_whitespace();
    let name = words.next().unwrap();
    let base = BASES.iter().find(|(base, _)| *base == name).unwrap();
    base.1.split(' ').chain(words).collect()
}

pub(crate) const MODELS: &[(usize, &str)] = &[
    (1, "linear"),
    (2, "linear --loss=cross-entropy --out-features=4 --max-epochs=2"),
    (4, "mlp --activation=gelu --hidden=300,300 --bucket-cap-mb=0.1 --max-epochs=2"),
    (2, "mlp --dropout=0.3"),
    (3, "cnn --channels=8,16,8 --activation=gelu"),
    (2, "cnn --no-broadcast-buffers"),
    (4, "cnn --sync-batch-norm --val-fraction=0.25"),
    (2, "digits"),
];

/// Of the optimizer, of gradients, and of data.
pub(crate) const OPTIONS: &[(usize, &str)] = &[
    (2, "mlp --momentum=0.9 --nesterov --scale-lr --max-grad-norm=0.1"),
    (1, "mlp --optimizer=adamw --share-model"),
    (3, "mlp --optimizer=adamw --zero --exact-mean --max-epochs=2"),
    (2, "mlp --momentum=0.9 --zero --max-grad-norm=0.1 --bucket-cap-mb=0.001"),
    (3, "cnn --optimizer=adamw --no-decay-on-bias-and-norm --beta1=0.8 --beta2=0.9 --eps=0.001"),
    (2, "mlp --schedule=cosine --schedule-by=step --warmup-steps=3"),
    (2, "mlp --skip-nonfinite=5 --inject-fault=nan:rank=1,at=step,step=3"),
    (2, "mlp --check-replicas-every=2 --check-collectives --max-steps=5"),
    (2, "cnn --grad-accum-steps=2 --sync-batch-norm"),
    (2, "mlp --no-overlap --bucket-cap-mb=0.001 --comm-hook=fp16"),
    (2, "mlp --comm-hook=bf16 --grad-accum-steps=2"),
    (2, "mlp --find-unused-parameters --bucket-cap-mb=0.001 --grad-accum-steps=2"),
    (2, "mlp --static-graph --grad-accum-steps=2"),
    (3, "mlp --strategy=dp --grad-accum-steps=2"),
    (2, "mlp --num-workers=3 --prefetch-factor=4 --batch-size=7 --drop-last-batch"),
    (2, "cnn --val-fraction=0.2 --num-workers=2 --val-every=2 --patience=1 --max-epochs=4"),
];

pub(crate) const MIXED_PRECISION: &[(usize, &str)] = &[
    (3, "mlp --amp=fp16 --optimizer=adamw --grad-accum-steps=2 --max-grad-norm=0.1"),
    (2, "mlp --amp=bf16 --val-fraction=0.2 --num-workers=1 --strategy=dp"),
    (2, "images --amp=bf16 --sync-batch-norm"),
    (2, "images --amp=fp16"),
];

/// Not in [`MODELS`], whose rows read no file. With dropout, attention is computed step by step; without, CUDA has
/// other kernels for it, and other bits.
const TEXTS: &[(usize, &str)] =
    &[(3, "gpt --dropout=0.1 --optimizer=adamw --max-grad-norm=1 --no-bias --batch-size=8")];

const PROCESSES: &[(usize, &str)] = &[
    (3, "mlp --spawn=processes --zero --optimizer=adamw --num-workers=2 --max-epochs=2"),
    (2, "cnn --spawn=processes --sync-batch-norm"),
    (2, "mlp --spawn=processes --strategy=dp"),
    (2, "mlp --spawn=processes --amp=fp16 --check-collectives --find-unused-parameters"),
];

/// Each row is a number of ranks and their options.
#[test]
fn runs_have_the_bits_of_cpu_ranks() {
    let rows = [MODELS, OPTIONS, MIXED_PRECISION, TEXTS, PROCESSES].concat();
    in_parallel(&rows, |&(ranks, row)| {
        let args = args(row);
        let (gpu, cpu) = (gpu_events(ranks, &args), cpu_events(ranks, &args));
        assert_eq!((&gpu[0]["device"], &cpu[0]["device"]), (&"GPU".into(), &"CPU".into()));
        assert_eq!(gpu[0]["backend"], "nccl", "{row}");
        assert_eq!(results(&gpu), results(&cpu), "{ranks} ranks, {row}");
        assert!(end(&gpu)["parameters_hash"].is_string(), "{row}");
    });
}
