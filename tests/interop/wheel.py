"""Installs the wheel into an environment of its own, and uses it there as its users do.

wheel.py WHEEL PROGRAM LIBTORCH SIMULATED_GPUS

The environment gets PyTorch from the Python that runs this. It lies outside the clone, and while it is used, the
libtorch of the clone is moved away. PROGRAM is what the wheel was built from, with the libtorch in the folder LIBTORCH.
SIMULATED_GPUS is the folder that `make simulated-gpus` builds.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile

import checks
from checks import check

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
LIMIT = 180
FLAGS = ["--model=mlp", "--hidden=64,64", "--max-epochs=2", "--log-format=json"]
TWO = ["--nproc-per-node=2", *FLAGS]
# Until it is ended.
ENDLESS = ["--max-epochs=1000000", "--num-samples=65536"]


def passed(what):
    print(f"wheel: {what}", flush=True)


def clean_environment(**variables):
    """Without the variables that could lead to a libtorch or a Python package of the clone. One core's threads, as
    torchrun sets it: another number of threads adds up in another order."""
    kept = {name: os.environ[name] for name in ["PATH", "HOME", "TMPDIR"] if name in os.environ}
    return {**kept, "OMP_NUM_THREADS": "1", **variables}


def run(*command, code=0, folder=None, **variables):
    return checks.run(*command, code=code, cwd=folder, env=clean_environment(**variables))


def parameters(done):
    """The hash of the trained parameters."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    [end] = [event for event in map(json.loads, lines) if event["event"] == "end"]
    return end["parameters_hash"]


def link_or_copy(source, target):
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def make_environment(folder, wheel):
    """Makes a virtual environment with the PyTorch of this Python, and installs the wheel. Returns the folders of its
    programs and of its packages."""
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin/python"
    where = "import sysconfig; print(sysconfig.get_path('platlib'))"
    packages = pathlib.Path(run(python, "-c", where).stdout.strip())
    for source in pathlib.Path(sysconfig.get_path("platlib")).iterdir():
        target = packages / source.name
        if source.is_dir() and not target.exists():
            no_headers = shutil.ignore_patterns("include")
            shutil.copytree(source, target, ignore=no_headers, copy_function=link_or_copy)
        elif source.is_file() and not target.exists():
            link_or_copy(source, target)
    # This PyTorch is without the CUDA packages, which pip would fetch.
    run(python, "-m", "pip", "install", "--no-index", "--no-deps", wheel)
    return folder / "bin", packages


@contextlib.contextmanager
def moved_away(libtorch):
    """Moves the clone's `.libtorch` away, if `libtorch` is in it. A libtorch of the user's own stays."""
    place = REPOSITORY / ".libtorch"
    away = REPOSITORY / ".libtorch.away"
    if place not in libtorch.parents:
        passed("the libtorch of the build is not the clone's, and stays where it is")
        yield False
        return
    # The lock that .cargo/fetch-libtorch.sh takes: it does not fetch what is only away.
    lock = os.open(REPOSITORY / ".cargo", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    if away.exists():  # of a run that was killed; another was fetched since
        shutil.rmtree(away)
    try:
        place.rename(away)
        yield True
    finally:
        away.rename(place)
        os.close(lock)


def check_glibc(wheel, file):
    """The wheel's name says which glibc a program or library in it needs."""
    symbols = run("objdump", "-T", file).stdout
    needed = max(int(minor) for minor in re.findall(r"\(GLIBC_2\.(\d+)", symbols))
    tag = re.search(r"-py3-none-manylinux_2_(\d+)_\w+\.whl$", wheel.name)
    check(tag, f"{wheel.name} does not name a glibc")
    # libstdc++ can make it newer than the functions of glibc do.
    text = f"{file.name} needs glibc 2.{needed}, and {wheel.name} names 2.{tag[1]}"
    check(int(tag[1]) >= needed, text)
    passed(text)


def check_paths(file, *others):
    """A program or library in the wheel says nothing of the machine that built it."""
    cargo = os.environ.get("CARGO_HOME", pathlib.Path.home() / ".cargo")
    contents = file.read_bytes()
    for path in [REPOSITORY, cargo, *others]:
        check(str(path).encode() not in contents, f"{file.name} names {path}")
    passed(f"{file.name} names no folder of the machine that built it")


def check_file(wheel, libtorch, packages):
    """What the wheel says of itself, and what its program says of the machine that built it."""
    [found] = importlib.metadata.distributions(name="ddp-mp", path=[str(packages)])
    keeps = 'safetensors[numpy]; extra == "keep"'
    check([it.replace("'", '"') for it in found.requires] == ["torch==2.13.*", keeps], f"it depends on {found.requires}")
    passed(f"{wheel.stat().st_size / 1e6:.1f} MB")
    for name in ["ddp-mp", "libddp_mp_native.so"]:
        file = packages / "ddp_mp" / name
        check_glibc(wheel, file)
        check_paths(file, libtorch, libtorch.resolve())
    dynamic = run("readelf", "-d", packages / "ddp_mp/ddp-mp").stdout
    [places] = re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", dynamic)
    relative = [place.startswith("$ORIGIN") for place in places.split(":")]
    check(all(relative), f"ddp-mp looks for libraries in {places}")


# A user's loop, once for each argument: FILE,WEIGHT_DECAY[,KEPT]. torchrun starts several ranks of it.
LOOP = """
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import ddp_mp

rank, ranks = (int(os.environ.get(name, default)) for name, default in [("RANK", 0), ("WORLD_SIZE", 1)])
if ranks > 1:
    dist.init_process_group("gloo")
for argument in sys.argv[1:]:
    file, decay, *kept = argument.split(",")
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("first", nn.Linear(4, 8))
    model.add_module("norm", nn.BatchNorm1d(8))
    model.add_module("last", nn.Linear(8, 1))
    if ranks > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=float(decay))
    recorder = ddp_mp.record(model, optimizer, file, keep=kept[0] if kept else None)
    for step in range(4):
        inputs = torch.rand(6, 4).chunk(ranks)[rank]
        targets = inputs.sum(1, keepdim=True)
        recorder.batch(inputs, targets)
        loss = nn.functional.mse_loss(model(inputs), targets)
        recorder.loss(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    recorder.close()
if ranks > 1:
    dist.destroy_process_group()
"""


def check_records(commands, folder):
    """Loops that are recorded and compared: equal, with another weight decay, on two ranks, and what is no record."""
    folder.mkdir()
    (folder / "loop.py").write_text(LOOP)
    python, diff = commands / "python", commands / "ddp-mp-diff"
    run(python, "loop.py", "first,0.01", folder=folder)
    run(python, "loop.py", "again,0.01", "changed,0.5", folder=folder)
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run(*torchrun, "loop.py", "first.two,0.01", "again.two,0.01", "changed.two,0.5", folder=folder)
    for end, ranks in [("", "rank 0"), (".two", "all ranks")]:
        found = run(diff, f"first{end}", f"again{end}", folder=folder).stdout
        check("Equal: the start and 4 steps" in found, found)
        found = run(diff, f"first{end}", f"changed{end}", code=1, folder=folder).stdout
        check("option weight_decay: A has 0.01, B has 0.5" in found and "averages    the same" in found, found)
        check(f"of 6 on {ranks}: `first.weight`, `first.bias`" in found, found)
    error = run(diff, "first", "loop.py", code=2, folder=folder).stderr
    check(re.fullmatch(r"ddp-mp-diff: error: loop\.py: .*\n", error), error)
    passed("records of equal loops are equal; another weight decay is found; what is no record is refused")


def check_signal(program, file):
    """The command becomes the program, which gets the signal."""
    process = subprocess.Popen(
        [program, *ENDLESS],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            process.stdout.readline()
            started = pathlib.Path(f"/proc/{process.pid}/exe").resolve()
            check(started == file, f"the process runs {started}, not {file}")
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=LIMIT)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what a failed check leaves
    code = process.returncode
    check(code == 128 + signal.SIGTERM, f"exit code {code} after SIGTERM")
    passed("the command is replaced by the program, which stops at a signal")


def check_gpus(program, stand_ins, folder, expected):
    """On simulated GPUs, without NCCL, and with the one that libtorch_cuda finds beside itself, as that of torch's wheel."""
    without = folder / "without"
    without.mkdir(parents=True)
    for name in ["libcuda.so.1", "libtorch_cuda.so"]:
        shutil.copy(stand_ins / name, without)
    error = run(program, *TWO, code=2, LD_LIBRARY_PATH=str(without), SIM_GPUS="2").stderr
    check("libnccl was not found" in error, f"without NCCL: {error}")
    lib = folder / "lib"
    lib.mkdir()
    for file in [stand_ins / "libcuda.so.1", stand_ins / "with_nccl/libtorch_cuda.so"]:
        shutil.copy(file, lib)
    shutil.copy(stand_ins / "libnccl.so.2", folder)
    for spawn in ["threads", "processes"]:
        done = run(program, *TWO, f"--spawn={spawn}", LD_LIBRARY_PATH=str(lib), SIM_GPUS="2")
        check('"nccl"' in done.stdout and "GPU:1" in done.stdout, f"no NCCL: {done.stdout}")
        check(parameters(done) == expected, f"{spawn} on GPUs: {done.stdout}")
    passed("simulated GPUs, with the NCCL of libtorch: the same parameters")


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    wheel, program, libtorch, stand_ins = (pathlib.Path(it).absolute() for it in sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder).resolve()
        expected = parameters(run(program, *TWO))
        commands, packages = make_environment(folder / "environment", wheel)
        check_file(wheel, libtorch, packages)
        file = packages / "ddp_mp/ddp-mp"
        command, python = commands / "ddp-mp", commands / "python"
        with moved_away(libtorch) as is_away:
            if is_away:
                run(program, "--version", code=127)  # the loader does not find libtorch
            loaded = json.loads(run(command, "env", "--log-format=json").stdout)["libtorch_folder"]
            check(os.path.realpath(loaded) == f"{packages}/torch/lib", f"libtorch is in {loaded}")

            run(command, "--max-epochs=2", folder=folder)
            torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            for what, start in {
                "ddp-mp": [command, *TWO],
                "python -m ddp_mp": [python, "-m", "ddp_mp", *TWO],
                "--spawn=processes": [command, *TWO, "--spawn=processes"],
                "torchrun --no-python": [*torchrun, "--no-python", command, *FLAGS],
                "torchrun -m ddp_mp": [*torchrun, "-m", "ddp_mp", *FLAGS],
            }.items():
                found = parameters(run(*start))
                check(found == expected, f"{what}: parameters {found}, in the clone {expected}")
                passed(f"{what}: parameters {found}, as in the clone")
            run(command, "--no-such-flag", code=2)
            check_records(commands, folder / "records")
            check_signal(command, file)
            check_gpus(command, stand_ins, folder / "gpus", expected)


if __name__ == "__main__":
    main()
