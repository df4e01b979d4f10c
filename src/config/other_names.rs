//! The names that other programs use for the options of this one.

/// Options of PyTorch's examples, torchrun, Lightning and the Hugging Face Trainer, without dashes, and the
/// equivalent options here. Commands differ in their options: the first one that a command has applies.
const OTHER_NAMES: [(&str, &[&str]); 128] = [
    ("accelerator", &["nproc-per-node"]),
    ("accumulate-grad-batches", &["grad-accum-steps"]),
    ("accumulation-steps", &["grad-accum-steps"]),
    ("adam-beta1", &["beta1"]),
    ("adam-beta2", &["beta2"]),
    ("adam-epsilon", &["eps"]),
    ("arch", &["model"]),
    ("batch", &["batch-size"]),
    ("bf16", &["amp=bf16"]),
    ("bind-to", &["bind"]),
    ("bs", &["batch-size"]),
    ("bucket-cap", &["bucket-cap-mb"]),
    ("check-val-every-n-epoch", &["val-every"]),
    ("checkpoint", &["resume", "checkpoint-dir"]),
    ("checkpoint-interval", &["save-every"]),
    ("ckpt-path", &["resume"]),
    ("clip-grad", &["max-grad-norm"]),
    ("clip-grad-norm", &["max-grad-norm"]),
    ("config-file", &["config"]),
    ("context-length", &["block-size"]),
    ("criterion", &["loss"]),
    ("d-model", &["n-embd"]),
    ("data", &["dataset"]),
    ("data-dir", &["dataset"]),
    ("data-path", &["dataset"]),
    ("dataloader-drop-last", &["drop-last-batch"]),
    ("dataloader-num-workers", &["num-workers"]),
    ("dataloader-prefetch-factor", &["prefetch-factor"]),
    ("dataset-name", &["dataset"]),
    ("ddp-backend", &["backend"]),
    ("ddp-broadcast-buffers", &["no-broadcast-buffers"]),
    ("ddp-bucket-cap-mb", &["bucket-cap-mb"]),
    ("ddp-find-unused-parameters", &["find-unused-parameters"]),
    ("ddp-timeout", &["timeout"]),
    ("deepspeed", &["zero"]),
    ("deepspeed-config", &["zero"]),
    ("default-root-dir", &["checkpoint-dir"]),
    ("devices", &["nproc-per-node"]),
    ("dist-backend", &["backend"]),
    ("distributed-backend", &["backend"]),
    ("dry-run", &["max-steps=1"]),
    ("dtype", &["amp"]),
    ("early-stopping-patience", &["patience"]),
    ("epochs", &["max-epochs", "epoch"]),
    ("eval-interval", &["val-every"]),
    ("eval-steps", &["val-every"]),
    ("find-unused", &["find-unused-parameters"]),
    ("fp16", &["amp=fp16"]),
    ("fsdp", &["zero"]),
    ("gpu", &["nproc-per-node"]),
    ("gpus", &["nproc-per-node", "world-size"]),
    ("gpus-per-node", &["nproc-per-node"]),
    ("grad-clip", &["max-grad-norm"]),
    ("gradient-accumulation-steps", &["grad-accum-steps"]),
    ("gradient-clip-val", &["max-grad-norm"]),
    ("hidden-size", &["hidden"]),
    ("input-size", &["in-features"]),
    ("learning-rate", &["lr"]),
    ("limit-train-batches", &["num-samples"]),
    ("load-weights", &["init-from"]),
    ("log-dir", &["tensorboard"]),
    ("log-every-n-steps", &["log-every"]),
    ("log-interval", &["log-every"]),
    ("logdir", &["tensorboard"]),
    ("logging-dir", &["tensorboard"]),
    ("logging-steps", &["log-every"]),
    ("lr-scheduler", &["schedule"]),
    ("lr-scheduler-type", &["schedule"]),
    ("machine-rank", &["node-rank"]),
    ("main-process-ip", &["master-addr"]),
    ("main-process-port", &["master-port"]),
    ("master", &["master-addr"]),
    ("master-ip", &["master-addr"]),
    ("max-iters", &["max-steps"]),
    ("max-new-tokens", &["num-tokens"]),
    ("max-time", &["max-seconds"]),
    ("max-train-steps", &["max-steps"]),
    ("micro-batch-size", &["batch-size"]),
    ("min-lr", &["eta-min"]),
    ("mixed-precision", &["amp"]),
    ("model-name", &["model"]),
    ("n", &["nproc-per-node"]),
    ("network", &["model"]),
    ("nodes", &["nnodes"]),
    ("np", &["nproc-per-node"]),
    ("nproc", &["nproc-per-node"]),
    ("nproc-per-node", &["world-size"]),
    ("nprocs", &["nproc-per-node"]),
    ("num-classes", &["out-features"]),
    ("num-epochs", &["max-epochs"]),
    ("num-gpus", &["nproc-per-node"]),
    ("num-heads", &["n-head"]),
    ("num-layers", &["n-layer"]),
    ("num-machines", &["nnodes"]),
    ("num-nodes", &["nnodes"]),
    ("num-processes", &["nproc-per-node"]),
    ("num-samples", &["len"]),
    ("num-train-epochs", &["max-epochs"]),
    ("numa-binding", &["bind"]),
    ("optim", &["optimizer"]),
    ("out-dir", &["checkpoint-dir"]),
    ("output-dir", &["checkpoint-dir"]),
    ("per-device-train-batch-size", &["batch-size"]),
    ("precision", &["amp"]),
    ("pretrained", &["init-from"]),
    ("print-freq", &["log-every"]),
    ("ranks", &["nproc-per-node", "world-size"]),
    ("resume-from-checkpoint", &["resume"]),
    ("samples", &["num-samples", "len"]),
    ("save-dir", &["checkpoint-dir"]),
    ("save-model", &["checkpoint-dir"]),
    ("save-steps", &["save-every"]),
    ("save-total-limit", &["keep-last"]),
    ("scheduler", &["schedule"]),
    ("sync-batchnorm", &["sync-batch-norm"]),
    ("sync-bn", &["sync-batch-norm"]),
    ("threads", &["num-workers"]),
    ("train-batch-size", &["batch-size"]),
    ("train-data", &["dataset"]),
    ("use-amp", &["amp=fp16"]),
    ("val-check-interval", &["val-every"]),
    ("validation-split", &["val-fraction"]),
    ("warmup-iters", &["warmup-steps"]),
    ("wd", &["weight-decay"]),
    ("weights", &["init-from"]),
    ("workers", &["num-workers"]),
    ("world-size", &["nproc-per-node"]),
    ("zero-stage", &["zero"]),
];

/// Returns the equivalent here of another program's option `name`, perhaps with a value: the first for which
/// `is_known` holds. Both names have `-` and no leading dashes. `None` if there is none.
pub fn option_of_other_name(name: &str, is_known: impl Fn(&str) -> bool) -> Option<&'static str> {
    let (_, options) = OTHER_NAMES.iter().find(|(other, _)| *other == name)?;
    options.iter().copied().find(|option| is_known(option.split('=').next().unwrap_or(option)))
}

/// Options of torchrun, accelerate and PyTorch's examples that no option here stands for, without dashes, and what to do.
const WITHOUT_OPTION: [(&[&str], &str); 8] = [
    (
        &[
            "ddp",
            "distributed",
            "multi-gpu",
            "multiprocessing-distributed",
            "no-python",
            "rdzv-backend",
            "rdzv-conf",
            "rdzv-id",
            "standalone",
            "start-method",
        ],
        "leave it out: the ranks start and find each other by themselves",
    ),
    (
        &["dist-url", "init-method", "rdzv-endpoint"],
        "leave it out on one machine; several machines meet at --master-addr and --master-port",
    ),
    (
        &["global-rank", "local-rank", "rank"],
        "leave it out: the program gives out the ranks; --node-rank tells machines apart",
    ),
    (
        &[
            "cpu",
            "cuda",
            "device",
            "device-ids",
            "gpu-id",
            "gpu-ids",
            "no-accel",
            "no-cuda",
            "use-cpu",
            "use-cuda",
        ],
        "leave it out for all GPUs; --nproc-per-node=cpu trains on CPU cores, and CUDA_VISIBLE_DEVICES chooses GPUs",
    ),
    (
        &[
            "duplicate-stderr-filters",
            "duplicate-stdout-filters",
            "event-log-handler",
            "local-addr",
            "local-ranks-filter",
            "logs-specs",
            "monitor-interval",
            "redirects",
            "role",
            "run-path",
            "signals-to-handle",
            "tee",
            "use-agent-store",
            "virtual-local-rank",
        ],
        "leave it out, or give it to torchrun, as in 'torchrun [ITS OPTIONS] --no-python PROGRAM [OPTIONS]'",
    ),
    (
        &["H", "host", "hostfile", "hosts", "machinefile"],
        "give it to mpirun; or start the program on each machine, with --nnodes, --node-rank and --master-addr",
    ),
    (
        &["broadcast-buffers", "gradient-as-bucket-view", "shuffle"],
        "leave it out: the program does this by default",
    ),
    (&["m", "module", "script"], "leave it out: this program runs no Python file"),
];

/// Returns what to do in place of another program's option `name`, which no option here stands for. The name has `-` and
/// no leading dashes. `None` if that is not known.
pub(crate) fn without_option(name: &str) -> Option<&'static str> {
    WITHOUT_OPTION.iter().find(|(names, _)| names.contains(&name)).map(|(_, remedy)| *remedy)
}

/// The likeness above which a name is taken for a misspelling of another.
pub(crate) const ENOUGH: f64 = 0.6;

/// Returns how alike two names are, from 0 (nothing in common) to 1 (equal).
pub(crate) fn likeness(a: &str, b: &str) -> f64 {
    strsim::normalized_damerau_levenshtein(a, b)
}

/// Returns all options that stand for another name.
pub fn options_with_other_names() -> impl Iterator<Item = &'static str> {
    OTHER_NAMES.iter().flat_map(|(_, options)| *options).copied()
}
