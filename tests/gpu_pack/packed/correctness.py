"""Whether the GPU gives the numbers of the CPU, and the same bits in each order of its work."""

import json
import re

from machine import HERE, SAME_BITS, check_near, json_lines


def losses(machine, findings):
    """The losses of about 40 sets of options, with one rank and with several that share the GPU. A set that fails, or that
    is late, leaves the others' results."""
    test = [machine.scratch / "tests-gpus", "--ignored", "--exact", "--nocapture"]
    test.append("hardware::gpu_losses_match_the_cpu_of_this_machine")
    all_cases = {} if machine.simulated else {"DDP_MP_TESTS": "all"}
    [ended] = machine.together([(test, SAME_BITS | all_cases)], 150)
    rows = json_lines(ended.stdout)
    (machine.out / "gpu-losses.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if rows:
        largest = max(rows, key=lambda row: row["difference"])
        findings.fact("sets of options", len(rows))
        findings.fact("with equal losses", sum(row["difference"] == 0 for row in rows))
        where = f"{largest['ranks']} ranks, {largest['backend']}, {largest['options']}"
        findings.fact("largest difference", f"{largest['difference']:.1e} ({where})")
    if ended.status != 0 or not rows:
        machine.show([ended])
        findings.fail(f"exit status {ended.status}: {ended.stderr[-1500:].strip()}")


GPT = f"--model=gpt --dataset=text:{HERE / 'shakespeare.txt'} --n-embd=32 --num-samples=60"
# Of the model that tests/gpus/same.rs leaves to this, because it reads a file: ranks, backend, flags.
MORE_LOSSES = [
    (1, "nccl", "--optimizer=adamw --amp=bf16"),
    (1, "nccl", "--max-epochs=2 --optimizer=adamw --max-grad-norm=1"),
    (2, "threaded", "--max-epochs=2 --optimizer=adamw"),
]


def more_losses(machine, findings):
    def compare(ranks, backend, options):
        flags = [f"--nproc-per-node={ranks}", *GPT.split(), *options.split()]
        here = machine.on_gpu([*flags, f"--backend={backend}"], **SAME_BITS)["loss"]
        there = machine.on_cpu(flags)["loss"]
        findings.row({"ranks": ranks, "backend": backend, "options": options, "loss": here, "CPU": there})
        check_near(here, there, 3e-2 if "amp" in options else 1e-3)

    for ranks, backend, options in machine.some(MORE_LOSSES, 2):
        findings.attempt(f"{ranks} ranks, {backend}, {options}", lambda: compare(ranks, backend, options))


# Orders of work and places of memory that must not change a bit: a missing wait between streams would.
SCHEDULES = {
    "first": {},
    "again": {},
    "each kernel awaited": {"CUDA_LAUNCH_BLOCKING": "1"},
    "no memory used again": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    "one hardware queue": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
}


# What is trained in each of them. A kernel that adds up in another order each time would show, too, most likely in the CNN:
# cuDNN has such kernels, which the program leaves out.
REPEATED = {
    "MLP": [
        *["--model=mlp", "--hidden=512,512,512", "--num-samples=2000", "--bucket-cap-mb=0.3", "--optimizer=adamw"],
        *["--nproc-per-node=1", "--backend=nccl", "--comm-hook=bf16", "--num-workers=2"],
    ],
    "GPT": [*GPT.split(), "--optimizer=adamw", "--nproc-per-node=2", "--backend=threaded"],
    "CNN": [
        *["--model=cnn", "--dataset=digits", "--loss=cross-entropy", "--optimizer=adamw"],
        *["--nproc-per-node=2", "--backend=threaded"],
    ],
}


def same_bits(machine, findings):
    hashes = {}

    def run(model, name, variables):
        of_this = machine.on_gpu(REPEATED[model], **SAME_BITS, **variables)["parameters_hash"]
        findings.fact(f"{model}, {name}", of_this)
        if of_this != hashes.setdefault(model, of_this):
            raise RuntimeError("other bits than before")

    for model in REPEATED:
        for name, variables in machine.some(list(SCHEDULES.items()), 2):
            findings.attempt(f"{model}, {name}", lambda: run(model, name, variables))


def tests(machine, findings):
    """The tests that need a GPU, one by one. Those that need a second one are skipped, and say so."""
    program = machine.scratch / "tests-tests"
    names = re.findall(r"^(\S+): test$", machine.run([program, "cuda::", "--list"]), re.MULTILINE)
    passed, skipped = [], []
    for name in machine.some(names, 1):
        run = lambda: machine.run([program, "--exact", name, "--nocapture"], 90, **SAME_BITS)
        text = findings.attempt(name, run)
        if text is not None:
            (skipped if "skipped " in text else passed).append(name.removeprefix("cuda::"))
    for what, found in {"passed": passed, "skipped": skipped}.items():
        findings.fact(what, f"{len(found)}{': ' if found else ''}{', '.join(found)}")
