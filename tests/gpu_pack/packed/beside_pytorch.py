"""The parameters of two ranks with NCCL, beside those of two processes of PyTorch's DistributedDataParallel."""

import sys

from machine import HERE, OF_PYTORCH, SAME_BITS
from safetensors_file import load
from two_ranks import must_succeed, shared_gpu, train, two_processes

STEPS, BATCH, HIDDEN, LR = 50, 8, "64,64", 0.05
CLOSE = 1e-5  # of parameters that are at most about 1


def parameters_beside_pytorch(machine, findings):
    """Both begin with the same parameters and take the same samples. There are two ranks, and two addends have one order: so
    the bits should be equal on one GPU with one NCCL."""
    shared, folder = shared_gpu(machine).checked_variables(), machine.scratch / "beside-pytorch"
    folder.mkdir()
    # It writes initial.safetensors, data.safetensors and trained.safetensors.
    command = [sys.executable, HERE / "pytorch_two_ranks.py", folder, "cpu" if machine.simulated else "cuda"]
    command += [STEPS, BATCH, HIDDEN, LR]
    must_succeed(machine, two_processes(machine, command, 60, **(shared | OF_PYTORCH | SAME_BITS)))
    flags = ["--model=mlp", f"--hidden={HIDDEN}", f"--dataset=safetensors:{folder / 'data.safetensors'}", "--no-shuffle"]
    flags += [f"--init-from={folder / 'initial.safetensors'}", f"--batch-size={BATCH}", f"--lr={LR}"]
    end = train(machine, [*flags, f"--checkpoint-dir={folder / 'saved'}"], **shared, **SAME_BITS)
    findings.fact("steps", end["steps"])
    [file] = (folder / "saved").glob("step-*/model.safetensors")
    compare(findings, *(load(it) for it in [folder / "initial.safetensors", folder / "trained.safetensors", file]))


def compare(findings, initial, theirs, ours):
    """Adds what is equal, and fails if the parameters are not close, or have not been trained."""
    if theirs.keys() != ours.keys():
        raise RuntimeError(f"PyTorch has {sorted(theirs)}, and ddp-mp {sorted(ours)}")
    pairs = [pair for name in theirs for pair in zip(theirs[name], ours[name], strict=True)]
    furthest = max(abs(here - there) for here, there in pairs)
    findings.fact("parameters", len(pairs))
    findings.fact("with equal bits", sum(here == there for here, there in pairs))
    findings.fact("largest difference", furthest)
    if theirs == initial:
        raise RuntimeError("PyTorch has trained nothing")
    if not furthest <= CLOSE:
        raise RuntimeError("the parameters are not those of PyTorch")
