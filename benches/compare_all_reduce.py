"""Runs all_reduce in ddp-mp, Open MPI, Gloo and DeepSpeed alternately on the ranks of this machine, and prints tables.

compare_all_reduce.py PROGRAM [ROUNDS]

Every peer adds float32 in place, with the same ranks and sizes. A round starts each peer once, and takes the median of
five measurements of each size. The tables have the median and the spread of the rounds.
"""

import importlib.metadata
import importlib.util
import json
import mmap
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from compare import processor, versions

FOLDER = pathlib.Path(__file__).parent
SIZES = {
    4: "4 B",
    64: "64 B",
    1 << 10: "1 KB",
    16 << 10: "16 KB",
    256 << 10: "256 KB",
    4 << 20: "4 MB",
    64 << 20: "64 MB",
}
OURS = "ddp-mp"
# Seconds after which a peer counts as hung.
LIMIT = 300
# The machine is busy above this load average, or if other programs took more cores than this.
BUSY_LOAD, BUSY_CORES = 1, 0.2


def times(peer, output, errors=""):
    """Returns the microseconds of each size, from a JSON object in each line."""
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    found = {row["bytes"]: row["time_us"] for row in rows}
    if list(found) != list(SIZES) or any(row.get("wrong") for row in rows):
        sys.exit(f"{peer}: wrong results or missing sizes: {output}{errors}")
    return found


def measure(peer, command):
    """Runs `command`, and returns the microseconds of each size."""
    # `timeout` also ends the ranks that the command started. The exit code does not count: PyTorch's processes abort
    # now and then when all is done.
    command = ["timeout", "--kill-after=10", LIMIT, *command]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return times(peer, done.stdout, done.stderr)


def build_with_open_mpi(binary):
    """Builds `binary`, and installs Open MPI for that if need be. Returns why it could not, `None` if it could."""
    build = ["mpicc", "-O2", "-Wall", "-o", binary, FOLDER / "mpi_all_reduce.c"]
    builds = lambda: shutil.which("mpicc") and subprocess.run(build, capture_output=True).returncode == 0
    if builds():
        return None
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return "no mpicc can build mpi_all_reduce.c; install openmpi-bin and libopenmpi-dev (Debian's names)"
    for step in [["update"], ["install", "-y", "--no-install-recommends", "openmpi-bin", "libopenmpi-dev"]]:
        done = subprocess.run(["apt-get", "-qq", *step], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            return f"apt-get {step[0]} failed: {done.stderr.strip()}"
    return None if builds() else "mpicc cannot build mpi_all_reduce.c"


def build_deepspeed():
    """Compiles DeepSpeed's operations. Returns why it could not, `None` if it could."""
    if not importlib.util.find_spec("deepspeed"):
        return f"it is not installed; {sys.executable} -m pip install deepspeed"
    done = subprocess.run([sys.executable, FOLDER / "deepspeed_all_reduce.py"], capture_output=True, text=True)
    return (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1] if done.returncode else None


def skipped_peers(mpi_binary):
    """Builds what peers need, the program of Open MPI as `mpi_binary`. Returns the peers that cannot run, and prints
    why."""
    problems = {"Open MPI": build_with_open_mpi(mpi_binary), "DeepSpeed": build_deepspeed()}
    skipped = {peer: why_not for peer, why_not in problems.items() if why_not}
    for peer, why_not in skipped.items():
        print(f"skipped: {peer}: {why_not}", flush=True)
    return skipped


def peers(program, ranks, mpi_binary, skipped):
    """Returns the command of each peer by its name."""
    sizes = list(SIZES)
    ours = [program, "bench", "all-reduce", "--log-format=json", f"--nproc-per-node={ranks}"]
    step = sizes[1] // sizes[0]
    ours += [f"--min-bytes={sizes[0]}", f"--max-bytes={sizes[-1]}", f"--step-factor={step}"]
    commands = {OURS: ours, f"{OURS}, processes": [*ours, "--spawn=processes"]}
    if "Open MPI" not in skipped:
        version = subprocess.check_output(["mpirun", "--version"], text=True).split()[3]
        # Shared memory only: Open MPI 5 knows vader, its name until then, as another name of sm.
        start = ["mpirun", "--mca", "pml", "ob1", "--mca", "btl", "self,vader"]
        start += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        start += ["--oversubscribe"] if ranks > os.cpu_count() else []
        commands[f"Open MPI {version}"] = [*start, "-n", ranks, mpi_binary, *sizes]
    gloo = [FOLDER / "pytorch_all_reduce.py", ranks, *sizes]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    commands["Gloo, mp.spawn"] = [sys.executable, *gloo]
    commands["Gloo, torchrun"] = [sys.executable, *torchrun, *gloo]
    if "DeepSpeed" not in skipped:
        version = importlib.metadata.version("deepspeed")
        commands[f"DeepSpeed {version}"] = [sys.executable, FOLDER / "deepspeed_all_reduce.py", ranks, *sizes]
    return commands


def rounds_of(commands, rounds):
    """Returns, for each peer, the times of each round. Each round begins with another peer."""
    found = {peer: [] for peer in commands}
    order = list(commands.items())
    for _ in range(rounds):
        for peer, command in order:
            found[peer].append(measure(peer, command))
        order = order[1:] + order[:1]
    return found


def digits(us):
    return f"{us:.0f}" if us >= 100 else f"{us:.3g}"


def cell(values):
    return f"{digits(statistics.median(values))} ({digits(min(values))} to {digits(max(values))})"


def table(title, found):
    """Returns the lines of the table and the verdict. A ratio above 1 means that ddp-mp is faster."""
    others = [peer for peer in found if peer != OURS]
    lines = [f"{title:7}{OURS:>27}" + "".join(f"{peer:>27}{'ratio':>7}" for peer in others)]
    behind = []
    for size, name in SIZES.items():
        ours = [one_round[size] for one_round in found[OURS]]
        line = f"{name:7}{cell(ours):>27}"
        for peer in others:
            theirs = [one_round[size] for one_round in found[peer]]
            ratio = statistics.median(theirs) / statistics.median(ours)
            overlap = max(ours) >= min(theirs) and max(theirs) >= min(ours)
            line += f"{cell(theirs):>27}{'~' * overlap + digits(ratio):>7}"
            if ratio <= 1:
                behind.append(f"{peer} at {name} ({digits(ratio)})")
        lines.append(line)
    if behind:
        return [*lines, f"by the medians, {OURS} is not faster than {', '.join(behind)}"]
    return [*lines, f"by the medians, {OURS} is faster at every size than {', '.join(others)}"]


def core_seconds():
    """Returns the core seconds that all programs and the host took, and those that this program's commands took."""
    user, nice, system, _, _, irq, softirq, steal = map(int, open("/proc/stat").readline().split()[1:9])
    own = [resource.getrusage(who) for who in [resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN]]
    taken = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return taken, sum(usage.ru_utime + usage.ru_stime for usage in own)


def load(before, after, others):
    """Returns lines about the load. The average at the end includes the ranks, so the one at the start and the cores
    of other programs decide whether the machine was busy."""
    averages = f"load average {before:.2f} at the start, {after:.2f} at the end (with the ranks)"
    lines = [f"{averages}; other programs took {others:.2f} cores"]
    if before > BUSY_LOAD or others > BUSY_CORES:
        lines.append("WARNING: the machine was busy with other programs; measure where nothing else runs")
    return lines


def shared_memory_of_gloo():
    """Returns whether this PyTorch's Gloo has the shared-memory all-reduce of pytorch/gloo#458, the function
    `gloo::shm`. Gloo merged it in January 2026 and reverted it in February (#490)."""
    torch = pathlib.Path(importlib.util.find_spec("torch").origin).parent
    with open(torch / "lib/libtorch_cpu.so", "rb") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
            return library.find(b"_ZN4gloo3shm") >= 0


def main(program, rounds):
    before, began = os.getloadavg()[0], time.perf_counter()
    all_before, own_before = core_seconds()
    has = "has a" if shared_memory_of_gloo() else "has no"
    print(f"{versions(program)}: all_reduce of float32 (sum) on {os.cpu_count()} cores of {processor()}")
    print(f"median (min to max) of {rounds} rounds in us; ratio: above 1, {OURS} is faster; ~: the spreads overlap")
    print(f"PyTorch's Gloo {has} shared-memory all-reduce", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mpi_binary = pathlib.Path(folder) / "mpi_all_reduce"
        skipped = skipped_peers(mpi_binary)
        for ranks in [2, 4]:
            found = rounds_of(peers(program, ranks, mpi_binary, skipped), rounds)
            print("\n".join(["", *table(f"{ranks} ranks", found)]), flush=True)
    all_after, own_after = core_seconds()
    others = (all_after - all_before - own_after + own_before) / (time.perf_counter() - began)
    print("\n".join(["", *load(before, os.getloadavg()[0], others)]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5)
