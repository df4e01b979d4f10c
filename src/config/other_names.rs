//! The names that other programs use for the options of this one.

use self::Advice::{Call, Do};

/// What to do instead of another program's option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// Use this option, perhaps with a value. Without dashes.
    Call(&'static str),
    /// No option stands for it: what to do.
    Do(&'static str),
}

/// The names in PyTorch's examples, torchrun, accelerate, Lightning and the Hugging Face Trainer, without dashes. Commands
/// differ in their options: of several rows with a name, the first whose option a command has applies.
const OTHER_NAMES: [(Advice, &str); 69] = [
    (
        Call("nproc-per-node"),
        "accelerator devices gpu gpus gpus-per-node n np nproc nprocs num-gpus num-processes ranks world-size",
    ),
    (Call("max-epochs"), "epochs num-epochs num-train-epochs"),
    (Call("num-samples"), "limit-train-batches samples"),
    (Call("resume"), "checkpoint ckpt-path resume-from-checkpoint"),
    (Call("amp"), "dtype mixed-precision precision"),
    (Call("amp=bf16"), "bf16"),
    (Call("amp=fp16"), "fp16 use-amp"),
    (Call("backend"), "ddp-backend dist-backend distributed-backend"),
    (Call("batch-size"), "batch bs micro-batch-size per-device-train-batch-size train-batch-size"),
    (Call("beta1"), "adam-beta1"),
    (Call("beta2"), "adam-beta2"),
    (Call("bind"), "bind-to numa-binding"),
    (Call("block-size"), "context-length"),
    (Call("bucket-cap-mb"), "bucket-cap ddp-bucket-cap-mb"),
    (Call("config"), "config-file"),
    (Call("dataset"), "data data-dir data-path dataset-name train-data"),
    (Call("drop-last-batch"), "dataloader-drop-last"),
    (Call("eps"), "adam-epsilon"),
    (Call("eta-min"), "min-lr"),
    (Call("find-unused-parameters"), "ddp-find-unused-parameters find-unused"),
    (
        Call("grad-accum-steps"),
        "accumulate-grad-batches accumulation-steps gradient-accumulation-steps",
    ),
    (Call("hidden"), "hidden-size"),
    (Call("in-features"), "input-size"),
    (Call("init-from"), "load-weights pretrained weights"),
    (Call("keep-last"), "save-total-limit"),
    (Call("log-every"), "log-every-n-steps log-interval logging-steps print-freq"),
    (Call("loss"), "criterion"),
    (Call("lr"), "learning-rate"),
    (Call("master-addr"), "main-process-ip master master-ip"),
    (Call("master-port"), "main-process-port"),
    (Call("max-grad-norm"), "clip-grad clip-grad-norm grad-clip gradient-clip-val"),
    (Call("max-seconds"), "max-time"),
    (Call("max-steps"), "max-iters max-train-steps"),
    (Call("max-steps=1"), "dry-run"),
    (Call("model"), "arch model-name network"),
    (Call("n-embd"), "d-model"),
    (Call("n-head"), "num-heads"),
    (Call("n-layer"), "num-layers"),
    (Call("nnodes"), "nodes num-machines num-nodes"),
    (Call("no-broadcast-buffers"), "ddp-broadcast-buffers"),
    (Call("node-rank"), "machine-rank"),
    (Call("num-tokens"), "max-new-tokens"),
    (Call("num-workers"), "dataloader-num-workers threads workers"),
    (Call("optimizer"), "optim"),
    (Call("out-features"), "num-classes"),
    (Call("patience"), "early-stopping-patience"),
    (Call("prefetch-factor"), "dataloader-prefetch-factor"),
    (Call("save-every"), "checkpoint-interval save-steps"),
    (Call("schedule"), "lr-scheduler lr-scheduler-type scheduler"),
    (Call("sync-batch-norm"), "sync-batchnorm sync-bn"),
    (Call("tensorboard"), "log-dir logdir logging-dir"),
    (Call("timeout"), "ddp-timeout"),
    (Call("val-every"), "check-val-every-n-epoch eval-interval eval-steps val-check-interval"),
    (Call("val-fraction"), "validation-split"),
    (Call("warmup-steps"), "warmup-iters"),
    (Call("weight-decay"), "wd"),
    (Call("zero"), "deepspeed deepspeed-config fsdp zero-stage"),
    (Call("world-size"), "gpus nproc-per-node ranks"),
    (Call("epoch"), "epochs"),
    (Call("len"), "num-samples samples"),
    (Call("checkpoint-dir"), "checkpoint default-root-dir out-dir output-dir save-dir save-model"),
    (
        Do("leave it out: the ranks start and find each other by themselves"),
        "ddp distributed multi-gpu multiprocessing-distributed no-python rdzv-backend rdzv-conf rdzv-id standalone start-method",
    ),
    (
        Do("leave it out on one machine; several machines meet at --master-addr and --master-port"),
        "dist-url init-method rdzv-endpoint",
    ),
    (
        Do("leave it out: the program gives out the ranks; --node-rank tells machines apart"),
        "global-rank local-rank rank",
    ),
    (
        Do(
            "leave it out for all GPUs; --nproc-per-node=cpu trains on CPU cores, and CUDA_VISIBLE_DEVICES chooses GPUs",
        ),
        "cpu cuda device device-ids gpu-id gpu-ids no-accel no-cuda use-cpu use-cuda",
    ),
    (
        Do(
            "leave it out, or give it to torchrun, as in 'torchrun [ITS OPTIONS] --no-python PROGRAM [OPTIONS]'",
        ),
        "duplicate-stderr-filters duplicate-stdout-filters event-log-handler local-addr local-ranks-filter logs-specs monitor-interval redirects role run-path signals-to-handle tee use-agent-store virtual-local-rank",
    ),
    (
        Do(
            "give it to mpirun; or start the program on each machine, with --nnodes, --node-rank and --master-addr",
        ),
        "H host hostfile hosts machinefile",
    ),
    (
        Do("leave it out: the program does this by default"),
        "broadcast-buffers gradient-as-bucket-view shuffle",
    ),
    (Do("leave it out: this program runs no Python file"), "m module script"),
];

/// Returns what to do instead of another program's option `name`, if it has `-` and no leading dashes. `is_known` tells
/// whether a command has an option. `None` if the name is not known.
pub(crate) fn advice_on(name: &str, is_known: impl Fn(&str) -> bool) -> Option<Advice> {
    let is_here = |advice: &Advice| match advice {
        Call(option) => is_known(option.split('=').next().unwrap_or(option)),
        Do(_) => true,
    };
    let rows = OTHER_NAMES.iter().filter(|(_, names)| names.split(' ').any(|other| other == name));
    rows.map(|(advice, _)| *advice).find(is_here)
}

/// The likeness above which a name is taken for a misspelling of another.
pub(crate) const ENOUGH: f64 = 0.6;

/// Returns how alike two names are, from 0 (nothing in common) to 1 (equal).
pub(crate) fn likeness(a: &str, b: &str) -> f64 {
    strsim::normalized_damerau_levenshtein(a, b)
}

/// Returns all that stands for another program's options.
pub fn all_advice() -> impl Iterator<Item = Advice> {
    OTHER_NAMES.iter().map(|(advice, _)| *advice)
}
