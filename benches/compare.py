"""Runs PyTorch and ddp-mp alternately on the same work, and prints the ratios of the medians.

compare.py PROGRAM [PAIRS]
"""

import importlib.metadata
import inspect
import itertools
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

FOLDER = pathlib.Path(__file__).parent


def run(command):
    began = time.perf_counter()
    # In the root of the repository, where the configuration finds its data.
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    done = subprocess.run(command, cwd=FOLDER.parent, text=True, **quiet)
    return time.perf_counter() - began, done.stdout


def memory(command):
    """The most memory that any process of `command` took, in MB."""
    before = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], stdout=2, check=True);"
    after = "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6)"
    _, out = run([sys.executable, "-c", before + after, *map(str, command)])
    return float(out)


def demo(command):
    elapsed, out = run([*command, "--max-epochs=2", "--batch-size=32", "--nproc-per-node=2"])
    # PyTorch's processes write into each other's lines, and may abort when all is done (its Gloo threads
    # outlive them): what counts is that every rank came to the end of every epoch.
    if out.count("Batchsize: 32 | Steps: 64") != 4:
        sys.exit(f"not all work was done: {out}")
    return elapsed


def compare_demo(program, pairs):
    pair = lambda: (demo([sys.executable, FOLDER / "pytorch_demo.py"]), demo([program]))
    theirs, ours = (statistics.median(times) for times in zip(*(pair() for _ in range(pairs))))
    print(f"\n{'the whole demo, 2 ranks, 2 epochs':35}{'PyTorch':>12}{'ddp-mp':>12}{'ratio':>9}")
    print(f"{'':35}{theirs:10.2f} s{ours:10.3f} s{theirs / ours:9.1f}", flush=True)


STEPS = {"linear": 400, "mlp": 60, "cnn": 40, "gpt": 40}
GPT = FOLDER.parent / "configs" / "gpt.toml"
IMAGES = ["--in-features=784", "--out-features=10", "--loss=cross-entropy"]
FLAGS = {
    "linear": [],
    "mlp": ["--model=mlp", "--hidden=1024,1024,1024"],
    "cnn": ["--model=cnn", "--channels=16,32", *IMAGES],
    "gpt": [f"--config={GPT}"],  # which pytorch_step.py reads, too
}
# Options of DistributedDataParallel that save copies of gradients, and the models that are also measured with each.
DDP_OPTIONS = ["gradient_as_bucket_view", "batched_grad_copy"]
WITH_DDP_OPTIONS = ["mlp", "cnn"]


def options_of_this_pytorch():
    """Those of DDP_OPTIONS that this PyTorch has: batched_grad_copy exists from 2.12 on."""
    from torch.nn.parallel import DistributedDataParallel

    known = inspect.signature(DistributedDataParallel).parameters
    return [option for option in DDP_OPTIONS if option in known]


def pytorch_step(kind, ranks, *options):
    command = [sys.executable, FOLDER / "pytorch_step.py", kind, str(ranks), str(STEPS[kind]), *options]
    _, out = run(command)
    return json.loads(out)["us_per_step"]


def compare_step(program, pairs, kind, ranks):
    """Several ranks as threads, and as processes, as PyTorch's always are. A row with the name
    of one of DDP's options has the time of PyTorch with it."""
    spawns = ["threads"] if ranks == 1 else ["threads", "processes"]
    options = options_of_this_pytorch() if ranks == 2 and kind in WITH_DDP_OPTIONS else []
    theirs, ours = [], {spawn: [] for spawn in spawns}
    with_option = {option: [] for option in options}
    for _ in range(pairs):
        theirs.append(pytorch_step(kind, ranks))
        for option in options:
            with_option[option].append(pytorch_step(kind, ranks, option))
        flags = [f"--nproc-per-node={ranks}", f"--steps={STEPS[kind]}", "--log-format=json", *FLAGS[kind]]
        for spawn in spawns:
            _, out = run([program, "bench", "step", f"--spawn={spawn}", *flags])
            ours[spawn].append(json.loads(out)["us_per_step"])
    theirs = statistics.median(theirs)
    for spawn in spawns:
        mine = statistics.median(ours[spawn])
        name = f"{kind}, {ranks} {'rank' if ranks == 1 else spawn}"
        print(f"{name:>35}{theirs:9.0f} us{mine:9.1f} us{theirs / mine:9.1f}", flush=True)
    for option, times in with_option.items():
        print(f"{option:>35}{statistics.median(times):9.0f} us", flush=True)


def compare_memory(program):
    """One rank takes libtorch's memory; each further one its model, gradients and work space here, and a
    process of its own there."""
    work = lambda ranks: [f"--nproc-per-node={ranks}", "--steps=30"]
    ours = [memory([program, "bench", "step", *work(ranks), *FLAGS["mlp"]]) for ranks in [1, 4]]
    theirs = memory([sys.executable, FOLDER / "pytorch_step.py", "mlp", "2", "30"])
    print(f"\n{'memory, mlp':35}{'PyTorch':>12}{'ddp-mp':>12}")
    print(f"{'one rank':>35}{theirs:9.0f} MB{ours[0]:9.0f} MB")
    print(f"{'each further rank':>35}{theirs:9.0f} MB{(ours[1] - ours[0]) / 3:9.0f} MB", flush=True)


def compare_rendezvous():
    """Two processes that have started meet, and form a group."""
    _, out = run([sys.executable, FOLDER / "pytorch_rendezvous.py", "9"])
    theirs = json.loads(out)["median_ms"]
    _, out = run(["cargo", "bench", "--quiet", "--bench", "rendezvous"])
    ours = float(out.split()[0])
    print(f"\n{'two processes meet':35}{theirs:9.1f} ms{ours:9.1f} ms{theirs / ours:9.1f}", flush=True)


def processor():
    names = [line for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return names[0].split(":")[1].strip() if names else platform.machine()


def versions(program):
    """Names what is compared."""
    _, out = run([program, "env", "--log-format=json"])
    return f"PyTorch {importlib.metadata.version('torch')} and ddp-mp with libtorch {json.loads(out)['libtorch']}"


def main():
    program = os.path.abspath(sys.argv[1])
    pairs = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    print(f"{versions(program)}: medians of {pairs} pairs on {os.cpu_count()} cores of {processor()}", flush=True)
    compare_demo(program, pairs)
    print(f"\n{'a step with DDP, batch 32 or 16 texts':35}{'PyTorch':>12}{'ddp-mp':>12}{'ratio':>9}")
    for kind, ranks in itertools.product(STEPS, [1, 2]):
        compare_step(program, pairs, kind, ranks)
    compare_step(program, pairs, "linear", 4)
    compare_memory(program)
    compare_rendezvous()


if __name__ == "__main__":
    main()
