"""What is on this machine, and whether its GPU can be used at all."""

import datetime
import json
import os
import subprocess
import sys

from machine import HERE, json_lines, open_driver


def check_torch(wanted, found):
    """The programs are for one version of libtorch."""
    if found.split("+")[0] != wanted:
        raise RuntimeError(
            f"this pack is for torch {wanted}, and here is torch {found}: no program of it would run. On the machine that "
            f"builds it: make gpu-pack GPU_TORCH={found.split('+')[0]} GPU_TCH=(the tch for it)"
        )


def environment(machine, findings):
    try:
        import torch
    except ImportError as error:
        raise RuntimeError(f"{sys.executable} has no torch ({error}): name another one, PYTHON=... ./run.sh") from None
    pack = json.loads((HERE / "pack.json").read_text())
    for name, value in {
        "date": datetime.date.today().isoformat(),
        "simulated": bool(machine.simulated),
        "commit of ddp-mp": pack["commit"],
        "torch of the pack": pack["torch"],
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda,
        "processor cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }.items():
        findings.fact(name, value)
    check_torch(pack["torch"], torch.__version__)
    if not machine.simulated:
        open_driver()
    machine.unpack(torch)
    [report] = json_lines(machine.run([machine.program, "env", "--log-format=json"]))
    if not report["gpus"] or report["gpu_problem"]:
        raise RuntimeError(f"no GPU can be used here: {report['gpu_problem'] or 'the driver shows none'}")
    findings.fact("GPUs", report["gpus"])
    findings.fact("NCCL", report["nccl"] or report["nccl_problem"])
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        about = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        about = None
    findings.fact("nvidia-smi", about)


def gpu_check(machine, findings):
    """What `ddp-mp env` finds about each GPU, a row for each of its checks."""
    command = [machine.program, "env", "--check-gpus", "--log-format=json"]
    [ended] = machine.together([(command, {})])
    for row in json_lines(ended.stdout):
        findings.row({name: value for name, value in row.items() if value is not None})
    if ended.status != 0:
        findings.fail(f"exit status {ended.status}: {ended.stderr[-1500:].strip()}")


def demo(machine, findings):
    """The first command of the README, as it prints; then with two ranks that share the GPU."""
    command = [machine.program, "--max-epochs=2", "--batch-size=32"]
    for more in [[], ["--nproc-per-node=2", "--backend=threaded"]]:
        text = findings.attempt(" ".join(more) or "one rank", lambda: machine.run([*command, *more]))
        if text is not None:
            findings.keep_output(f"$ ddp-mp {' '.join([*command[1:], *more])}\n{text}")
            if "GPU:0" not in text:
                findings.fail("no rank says that it is on GPU:0")
