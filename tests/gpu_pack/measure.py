"""Tests and measures ddp-mp on this machine's GPU, beside PyTorch, and writes gpu-results.json and gpu-results.md.

measure.py [--simulated FOLDER]

It prints each command and how it ends. What a part has found is written when it ends, so that a part that takes too long
costs only itself and those after it. A part goes on after a command that fails, and then fails as a whole.
"""

import argparse
import datetime
import json
import os
import pathlib
import re
import shlex
import statistics
import struct
import subprocess
import sys
import tarfile
import tempfile
import time

from compare import FLAGS

HERE = pathlib.Path(__file__).parent.resolve()
EPOCHS = (2, 6)
WORK = [("linear", "float32"), ("mlp", "float32"), ("mlp", "bf16"), ("cnn", "float32"), ("cnn", "bf16")]
# In the order in which cuda_calls.c has them.
CALLS = {
    "kernel launches": 4,
    "copies": 2,
    "host waits": 4,
    "allocator calls": 4,
    "event queries": 1,
    "event records": 2,
}
LARGEST_PART = 150  # seconds, on a GPU
# cuBLAS has the same bits in each run only with this, because the program uses several streams.
SAME_BITS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


class Failures(Exception):
    """What failed in a part, beside what it has found."""

    def __init__(self, found, failures):
        super().__init__("; ".join(failures))
        self.found = found


class Attempts:
    """Runs one thing after the other, and keeps what failed."""

    def __init__(self):
        self.failures = []

    def run(self, name, action):
        """What `action` returns; None if it fails."""
        try:
            return action()
        except Exception as error:
            self.failures.append(f"{name}: {type(error).__name__}: {error}")
            return None

    def end(self, found):
        if self.failures:
            raise Failures(found, self.failures)
        return found


class Machine:
    """The programs of the pack, and how to start them here."""

    def __init__(self, scratch, simulated):
        import torch

        self.scratch, self.simulated, self.torch = scratch, simulated, torch
        self.steps = 20 if simulated else 1000  # of an epoch
        self.rows = []  # of the speed, once it is measured
        self.longest = 10 * LARGEST_PART if simulated else LARGEST_PART
        with tarfile.open(HERE / "programs.tar.xz") as tar:
            tar.extractall(scratch, filter="data")
        torch_folder = pathlib.Path(torch.__file__).parent
        nvidia = torch_folder.parent / "nvidia"
        # The name by which the program asks for NCCL.
        links = scratch / "lib"
        links.mkdir()
        nccl = nvidia / "nccl" / "lib" / "libnccl.so.2"
        if nccl.exists() and not simulated:
            (links / "libnccl.so").symlink_to(nccl)
        self.cudart = nvidia / "cu13" / "lib" / "libcudart.so.13"
        folders = [links, torch_folder / "lib", self.cudart.parent, nvidia / "cudnn" / "lib"]
        if simulated:
            folders.insert(0, simulated)
        known = os.environ.get("LD_LIBRARY_PATH")
        self.libraries = ":".join([*map(str, folders), *([known] if known else [])])

    def environment(self, **more):
        found = {"LD_LIBRARY_PATH": self.libraries, "DDP_MP_PROGRAM": str(self.scratch / "ddp-mp")}
        return {**os.environ, **found, **more}

    def run(self, command, limit=None, **more):
        """A command's output; its whole text where it fails."""
        command = list(map(str, command))
        variables = [f"{name}={value}" for name, value in more.items()]
        print(f"  $ {shlex.join([*variables, *command])}", flush=True)
        began = time.monotonic()
        try:
            done = subprocess.run(
                command, env=self.environment(**more), capture_output=True, text=True, timeout=limit or self.longest
            )
        except subprocess.TimeoutExpired as error:
            written = [text if isinstance(text, str) else (text or b"").decode() for text in (error.stdout, error.stderr)]
            print(f"    still ran after {error.timeout:.0f} s: {''.join(text[-2000:] for text in written)}", flush=True)
            raise RuntimeError(f"{command[0]} still ran after {error.timeout:.0f} s") from None
        print(f"    exit status {done.returncode} after {time.monotonic() - began:.1f} s", flush=True)
        if done.returncode != 0:
            text = f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
            print("    | " + text.strip().replace("\n", "\n    | "), flush=True)
            raise RuntimeError(f"{command[0]} ended with {done.returncode}: {text[-1500:]}")
        return done.stdout

    def events(self, flags, **more):
        lines = self.run([self.scratch / "ddp-mp", "--log-format=json", *flags], **more).splitlines()
        return [json.loads(line) for line in lines]

    def counted(self, start):
        """What `start` returns, and how often the processes that it starts call CUDA, by the names of CALLS."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            # After the wrapper, which looks for the functions behind it.
            preload = f"{HERE / 'cuda_calls.so'}:{self.cudart}"
            result = start(CUDA_CALLS=str(pathlib.Path(folder) / "calls"), LD_PRELOAD=preload)
            counts = [0] * sum(CALLS.values())
            for file in pathlib.Path(folder).iterdir():
                numbers = struct.unpack(f"{len(counts)}Q", file.read_bytes())
                counts = [sum(pair) for pair in zip(counts, numbers)]
        named, at = {}, 0
        for name, width in CALLS.items():
            named[name] = sum(counts[at : at + width])
            at += width
        return result, named


class Memory:
    """The most memory of the GPU that is in use meanwhile, in MiB beyond what was before."""

    COMMAND = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]

    def __enter__(self):
        self.most = None
        try:
            self.before = int(subprocess.run(self.COMMAND, capture_output=True, text=True, check=True).stdout.split()[0])
            self.watch = subprocess.Popen([*self.COMMAND, "--loop-ms=50"], stdout=subprocess.PIPE, text=True)
        except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
            self.watch = None
        return self

    def __exit__(self, *_):
        if self.watch:
            self.watch.terminate()
            used = [int(word) for word in self.watch.communicate()[0].split() if word.isdigit()]
            self.most = max(used, default=self.before) - self.before


def environment(machine):
    about = {
        "date": datetime.date.today().isoformat(),
        "simulated": bool(machine.simulated),
        "torch": machine.torch.__version__,
        "processor cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    report = json.loads(machine.run([machine.scratch / "ddp-mp", "env", "--log-format=json"]))
    if not report["gpus"] or report["gpu_problem"]:
        raise RuntimeError(f"no GPU can be used here: {report['gpu_problem'] or 'the driver shows none'}")
    about |= {"GPUs": report["gpus"], "NCCL": report["nccl"]}
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        about["nvidia-smi"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    except OSError:
        about["nvidia-smi"] = None
    return about


def tests(machine):
    """The tests that need a GPU, one by one. Where one is skipped for want of a second GPU, it says so."""
    program = machine.scratch / "tests-tests"
    names = re.findall(r"^(\S+): test$", machine.run([program, "cuda::", "--list"]), re.MULTILINE)
    attempts, skipped = Attempts(), []
    for name in names:
        text = attempts.run(name, lambda: machine.run([program, "--exact", name, "--nocapture"], limit=90, **SAME_BITS))
        skipped += re.findall(r"skipped (.*)", text or "")
    passed = len(names) - len(attempts.failures)
    return attempts.end({"result": f"{passed} of {len(names)} passed", "skipped": "; ".join(skipped) or "none"})


def options(machine):
    """The losses of many sets of options on the GPU, with one rank and with several that share it, and on the CPU."""
    test = [machine.scratch / "tests-gpus", "--ignored", "--exact", "--nocapture"]
    test.append("hardware::gpu_losses_match_the_cpu_of_this_machine")
    lines = machine.run(test, **SAME_BITS).splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    largest = max(rows, key=lambda row: row["difference"])
    equal = sum(row["difference"] == 0 for row in rows)
    where = f"{largest['difference']:.1e} ({largest['ranks']} ranks, {largest['backend']}, {largest['options']})"
    return {"runs": len(rows), "with equal losses": equal, "largest difference": where}


def speed_of_program(machine, kind, dtype, epochs):
    amp = ["--amp=bf16"] if dtype == "bf16" else []
    flags = ["--nproc-per-node=1", "--backend=nccl", f"--num-samples={32 * machine.steps}", f"--max-epochs={epochs}"]
    events, calls = machine.counted(lambda **more: machine.events([*flags, *FLAGS[kind], *amp], **more))
    speeds = [it["samples_per_second"] / 32 for it in events if it["event"] == "epoch"]
    return speeds[1:], calls


def speed_of_pytorch(machine, kind, dtype, epochs):
    command = [sys.executable, HERE / "pytorch_ddp.py", kind, dtype, machine.steps, epochs]
    command += ["cpu"] if machine.simulated else []
    libraries = {"LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}
    text, calls = machine.counted(lambda **more: machine.run(command, **libraries, **more))
    return json.loads(text)["steps_per_second"][1:], calls


def speed(machine):
    """Steps per second of one rank with NCCL, beside PyTorch's DistributedDataParallel: medians over the epochs of two
    runs each, in turns; and per step, by the difference of the two, the calls of CUDA."""
    attempts = Attempts()
    measured = [attempts.run(f"{kind} {dtype}", lambda: speed_of_model(machine, kind, dtype)) for kind, dtype in WORK]
    machine.rows = [row for row in measured if row]
    return attempts.end(machine.rows)


def speed_of_model(machine, kind, dtype):
    row = {"model": kind, "dtype": dtype}
    measured = {"PyTorch": (speed_of_pytorch, [], []), "ddp-mp": (speed_of_program, [], [])}
    for epochs in EPOCHS:
        for name, (measure, speeds, calls) in measured.items():
            with Memory() as memory:
                more, counts = measure(machine, kind, dtype, epochs)
            speeds += more
            calls.append(counts)
            row[f"{name} MiB"] = memory.most
    for name, (_, speeds, (few, many)) in measured.items():
        row[f"{name} steps/s"] = statistics.median(speeds)
        steps = machine.steps * (EPOCHS[1] - EPOCHS[0])
        row[f"{name} calls per step"] = {call: (many[call] - few[call]) / steps for call in CALLS}
    row["ratio"] = row["ddp-mp steps/s"] / row["PyTorch steps/s"]
    return row


def memory_after_warm_up(machine):
    """A step calls no function that allocates or frees memory of the GPU, or pins the host's: all GPUs may wait for that.
    A run may call a few more or less than another, as a whole."""
    if not machine.rows:
        raise RuntimeError("the speed was not measured")
    calls = {f"{row['model']} {row['dtype']}": row["ddp-mp calls per step"]["allocator calls"] for row in machine.rows}
    if any(abs(count) >= 0.01 for count in calls.values()):
        raise RuntimeError(f"calls of the allocator per step: {calls}")
    return {"calls of the allocator per step": "none"}


def parts_of_a_step(machine):
    attempts = Attempts()

    def part(kind, dtype):
        amp = ["--amp=bf16"] if dtype == "bf16" else []
        flags = ["--nproc-per-node=1", "--steps=300", "--log-format=json", *FLAGS[kind], *amp]
        row = json.loads(machine.run([machine.scratch / "ddp-mp", "bench", "step", *flags]))
        parts = ["us_per_step", "forward_us", "backward_us", "communication_us", "optimizer_us"]
        return {"model": kind, "dtype": dtype, **{part: row[part] for part in parts}}

    rows = [attempts.run(f"{kind} {dtype}", lambda: part(kind, dtype)) for kind, dtype in WORK]
    return attempts.end([row for row in rows if row])


# What one call costs the host: NCCL alone, through PyTorch.
PYTORCH_CALL = """
import time, torch, torch.distributed as dist
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(1024, device="cuda")
for count in [100, 2000]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
print((time.perf_counter() - began) / count * 1e6, flush=True)
dist.destroy_process_group()
"""


def time_of_a_call(machine):
    """An all_reduce of 4 KiB by one rank. ddp-mp's communicator does not block, so that NCCL starts a thread for each
    call; PyTorch's does."""
    attempts = Attempts()

    def of_program():
        flags = ["--nproc-per-node=1", "--backend=nccl", "--min-bytes=4K", "--max-bytes=4K", "--log-format=json"]
        text = machine.run([machine.scratch / "ddp-mp", "bench", "all-reduce", *flags])
        return json.loads(text.splitlines()[0])["time_us"]

    def of_pytorch():
        libraries = {"LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}
        return float(machine.run([sys.executable, "-c", PYTORCH_CALL], **libraries))

    found = {"ddp-mp": attempts.run("ddp-mp", of_program)}
    if not machine.simulated:
        found["PyTorch"] = attempts.run("PyTorch", of_pytorch)
    return attempts.end(found)


def ranks_on_one_gpu(machine):
    """Several ranks that share the GPU, through the threaded backend."""
    attempts = Attempts()

    def samples(kind, ranks):
        flags = [f"--nproc-per-node={ranks}", "--backend=threaded", f"--num-samples={32 * machine.steps}", "--max-epochs=3"]
        events = machine.events([*flags, *FLAGS[kind]])
        first = [it for it in events if it["event"] == "epoch" and it["rank"] == 0][1:]
        return {"model": kind, "ranks": ranks, "samples/s": statistics.median(it["samples_per_second"] for it in first)}

    cases = [(kind, ranks) for kind in ["linear", "mlp"] for ranks in [1, 2, 4]]
    rows = [attempts.run(f"{kind}, {ranks} ranks", lambda: samples(kind, ranks)) for kind, ranks in cases]
    return attempts.end([row for row in rows if row])


def lessons(machine):
    """Each lesson checks itself."""
    names = sorted(file.name for file in (machine.scratch / "lessons").iterdir())
    attempts = Attempts()
    for name in names:
        attempts.run(name, lambda: machine.run([machine.scratch / "lessons" / name], limit=60))
    return attempts.end({"ran": names})


def two_ranks_with_nccl(machine):
    """Two ranks on one GPU, in two processes: an experiment of NCCL's from 2.30.3 on."""
    pieces = sorted((HERE / "nccl").glob("libnccl.so.2.*"))
    library = os.environ.get("NCCL_LIBRARY")
    if pieces:
        library = machine.scratch / "libnccl.so.2"
        library.write_bytes(b"".join(piece.read_bytes() for piece in pieces))
    if not library and not machine.simulated:
        return {"left out": "no NCCL of 2.30.3 or later: name it as NCCL_LIBRARY, or put its pieces into nccl/"}
    more = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    if machine.simulated:
        more["SIM_NCCL_VERSION"] = "23007"
    else:
        folder = machine.scratch / "newer"
        folder.mkdir()
        (folder / "libnccl.so").symlink_to(library)
        (folder / "libnccl.so.2").symlink_to(library)
        more["LD_LIBRARY_PATH"] = f"{folder}:{machine.libraries}"
    flags = ["--max-epochs=2", "--model=mlp"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    text = machine.run([*torchrun, machine.scratch / "ddp-mp", "--log-format=json", "--nproc-per-node=1", "--backend=nccl", *flags], **more)
    end = next(it for it in map(json.loads, text.splitlines()) if it["event"] == "end")
    on_cpu = machine.events(["--nproc-per-node=2", *flags], CUDA_VISIBLE_DEVICES="")[-1]
    version = json.loads(machine.run([machine.scratch / "ddp-mp", "env", "--log-format=json"], **more))["nccl"]
    results = {"loss": end["loss"], "loss on the CPU": on_cpu["loss"], "replicas equal": end["replicas_equal"]}
    return {"NCCL": version, **results}


PARTS = {
    "environment": environment,
    "tests": tests,
    "losses on the GPU and on the CPU": options,
    "speed": speed,
    "memory after warm-up": memory_after_warm_up,
    "parts of a step of one rank, in microseconds": parts_of_a_step,
    "time of a call of NCCL by one rank, in microseconds": time_of_a_call,
    "ranks that share the GPU, with threads": ranks_on_one_gpu,
    "two ranks that share the GPU, with NCCL": two_ranks_with_nccl,
    "lessons": lessons,
}


def shown(value):
    return f"{value:.2f}" if isinstance(value, float) else "-" if value is None else str(value)


def table(rows):
    """Rows with the same keys, as Markdown."""
    lines = [" | ".join(rows[0]), " | ".join("---" for _ in rows[0])]
    lines += [" | ".join(shown(value) for value in row.values()) for row in rows]
    return "".join(f"| {line} |\n" for line in lines)


def flat(row):
    """The calls of a step as columns of their own."""
    calls = {}
    for name in ["PyTorch", "ddp-mp"]:
        calls |= {f"{name} {call}": count for call, count in row[f"{name} calls per step"].items()}
    return {"model": row["model"], "dtype": row["dtype"], **calls}


def page(results):
    simulated = results["environment"].get("result", {}).get("simulated")
    text = f"# ddp-mp on {'a simulated GPU: no figure here is a measurement' if simulated else 'a GPU'}\n"
    for name, part in results.items():
        text += f"\n## {name[0].upper()}{name[1:]}\n\n"
        found = part.get("result")
        if not part["ok"]:
            text += f"Failed: {part['error']}\n\n"
        if not found:
            continue
        if name == "speed":
            text += table([{key: it for key, it in row.items() if "calls" not in key} for row in found])
            if not simulated:
                text += "\nCalls of CUDA per step:\n\n" + table([flat(row) for row in found])
        elif isinstance(found, list):
            text += table(found)
        else:
            listed = lambda value: ", ".join(map(str, value)) if isinstance(value, list) else shown(value)
            text += "".join(f"- {key}: {listed(value)}\n" for key, value in found.items())
    return text


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--simulated", type=pathlib.Path, help="folder of the simulated GPU")
    parser.add_argument("--only", help="the part to run")
    options = parser.parse_args()
    simulated = options.simulated and options.simulated.resolve()
    out = pathlib.Path(os.environ.get("OUT", HERE))
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        machine = Machine(pathlib.Path(scratch), simulated)
        for name, part in PARTS.items():
            if options.only and name not in ["environment", options.only]:
                continue
            print(f"\n{name}", flush=True)
            began = time.monotonic()
            try:
                results[name] = {"ok": True, "result": part(machine)}
            except Failures as error:
                results[name] = {"ok": False, "error": str(error), "result": error.found}
            except Exception as error:  # the other parts may go well
                results[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            results[name]["seconds"] = time.monotonic() - began
            print(f"{name}: {'ok' if results[name]['ok'] else results[name]['error']}", flush=True)
            (out / "gpu-results.json").write_text(json.dumps(results, indent=1) + "\n")
            (out / "gpu-results.md").write_text(page(results))
    sys.exit(0 if all(part["ok"] for part in results.values()) else 1)


if __name__ == "__main__":
    main()
