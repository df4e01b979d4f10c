"""The speed of one rank beside PyTorch's DistributedDataParallel, and where its time goes."""

import dataclasses
import statistics
import subprocess
import sys

from compare import FLAGS
from machine import CALLS, HERE, OF_PYTORCH, end_with_parent, json_lines
from results import shown

# The most telling first: the time may end. `wide` keeps the GPU busy; the others show what a step costs the host. Each takes
# about 75 s, of which PyTorch's four starts are 45.
WORK = [("mlp", "float32"), ("wide", "bf16")]
MORE_WORK = [("cnn", "float32"), ("linear", "float32"), ("cnn", "bf16"), ("mlp", "bf16")]
REHEARSED = [("linear", "bf16")]
FLAGS = {**FLAGS, "wide": ["--model=mlp", "--hidden=8192,8192,8192"]}
EPOCHS = (2, 6)  # of the two runs, whose difference has no start


def batch_of(kind):
    return 4096 if kind == "wide" else 32


def steps_of(machine, kind):
    """Returns the steps of an epoch."""
    return 5 if machine.simulated else 100 if kind == "wide" else 500


def flags_of(kind, dtype):
    return [f"--batch-size={batch_of(kind)}", *FLAGS[kind], *(["--amp=bf16"] if dtype == "bf16" else [])]


class Memory:
    """The most memory of the GPU that is in use meanwhile, in MiB beyond what was before; None if nobody can say."""

    QUERY = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]

    def __enter__(self):
        self.most, self.watch = None, None
        try:
            before = subprocess.run(self.QUERY, capture_output=True, text=True, check=True, timeout=30)
            self.before = int(before.stdout.split()[0])
            self.watch = subprocess.Popen(
                [*self.QUERY, "--loop-ms=50"], stdout=subprocess.PIPE, text=True, preexec_fn=end_with_parent
            )
        except (OSError, subprocess.SubprocessError, IndexError, ValueError):
            pass
        return self

    def __exit__(self, *_):
        if self.watch:
            self.watch.terminate()
            used = [int(word) for word in self.watch.communicate()[0].split() if word.isdigit()]
            self.most = max(used, default=self.before) - self.before


def of_program(machine, kind, dtype, epochs, **more):
    """Returns the steps per second of each epoch but the first."""
    batch = batch_of(kind)
    flags = ["--nproc-per-node=1", "--backend=nccl", f"--num-samples={batch * steps_of(machine, kind)}"]
    events = machine.train([*flags, f"--max-epochs={epochs}", *flags_of(kind, dtype)], 60, **more)
    return [it["samples_per_second"] / batch for it in events if it["event"] == "epoch"][1:]


def of_pytorch(machine, kind, dtype, epochs, *tuned, **more):
    command = [sys.executable, HERE / "pytorch_ddp.py", kind, dtype, steps_of(machine, kind), batch_of(kind), epochs]
    command += ["cpu" if machine.simulated else "cuda", *tuned]
    [row] = json_lines(machine.run(command, 60, **(OF_PYTORCH | more)))
    return row["steps_per_second"][1:]


PROGRAMS = {
    "PyTorch": of_pytorch,
    "tuned": lambda *arguments, **more: of_pytorch(*arguments, "tuned", **more),
    "ddp-mp": of_program,
}


@dataclasses.dataclass
class Measured:
    """What is known about one program with one model."""

    speeds: list = dataclasses.field(default_factory=list)  # steps per second, of all epochs but the first of each run
    calls: list = dataclasses.field(default_factory=list)  # of CUDA, of each run
    mib: int | None = None

    def add(self, machine, train, kind, dtype, epochs):
        with Memory() as memory:
            speeds, calls = machine.counted(lambda **more: train(machine, kind, dtype, epochs, **more))
        print(f"    {', '.join(map(shown, speeds))} steps/s", flush=True)
        self.speeds += speeds
        self.calls.append(calls)
        self.mib = memory.most


def speed(machine, findings):
    """Steps per second of one rank with NCCL, beside PyTorch as it is and tuned: medians over the epochs of two runs each, in
    turns; and per step, by the difference of the two, the calls of CUDA. A program that fails leaves the others' numbers."""
    measure(machine, findings, REHEARSED if machine.simulated else WORK)


def speed_of_more_models(machine, findings):
    measure(machine, findings, MORE_WORK)


def measure(machine, findings, work):
    for kind, dtype in work:
        measured = {name: Measured() for name in PROGRAMS}
        for epochs in EPOCHS:
            for name, train in PROGRAMS.items():
                add = lambda: measured[name].add(machine, train, kind, dtype, epochs)
                findings.attempt(f"{kind} {dtype}, {name}", add)
        model = {"model": kind, "dtype": dtype}
        medians = {name: statistics.median(it.speeds) if it.speeds else None for name, it in measured.items()}
        row = {f"{name} steps/s": median for name, median in medians.items()} | ratios(medians)
        findings.row(model | row | {f"{name} MiB": it.mib for name, it in measured.items()})
        steps = steps_of(machine, kind) * (EPOCHS[1] - EPOCHS[0])
        add_calls(findings, model, steps, {name: it.calls for name, it in measured.items()})


def ratios(medians):
    ours = medians["ddp-mp"]
    ratio = lambda name: ours / medians[name] if ours and medians[name] else None
    return {"ratio": ratio("PyTorch"), "ratio to tuned": ratio("tuned")}


def add_calls(findings, model, steps, calls):
    """Adds the calls of CUDA per step. After warm-up, a step of ddp-mp must call no function that allocates or frees memory
    of the GPU, or pins the host's: all GPUs may wait for that."""
    for name, runs in calls.items():
        if len(runs) < 2:
            continue
        few, many = runs
        per_step = {call: (many[call] - few[call]) / steps for call in CALLS}
        findings.row({**model, "program": name, **per_step}, "Calls of CUDA per step")
        # A run may call a few more or less than another, as a whole.
        if name == "ddp-mp" and abs(per_step["allocator calls"]) >= 0.01:
            findings.fail(f"{' '.join(model.values())}: a step calls the allocator {per_step['allocator calls']} times")


def parts_of_a_step(machine, findings):
    """The parts of a step of one rank, in microseconds."""

    def part(kind, dtype):
        flags = ["--nproc-per-node=1", f"--steps={min(300, steps_of(machine, kind))}", "--log-format=json"]
        [row] = json_lines(machine.run([machine.program, "bench", "step", *flags, *flags_of(kind, dtype)]))
        parts = ["us_per_step", "forward_us", "backward_us", "communication_us", "optimizer_us"]
        findings.row({"model": kind, "dtype": dtype, **{part: row[part] for part in parts}})

    for kind, dtype in REHEARSED if machine.simulated else WORK + MORE_WORK:
        findings.attempt(f"{kind} {dtype}", lambda: part(kind, dtype))


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


def time_of_a_call(machine, findings):
    """An all_reduce of 4 KiB by one rank, in microseconds. NCCL does nothing for one rank: this is what either program adds
    to the call."""

    def ours():
        flags = ["--nproc-per-node=1", "--backend=nccl", "--min-bytes=4K", "--max-bytes=4K", "--log-format=json"]
        findings.fact("ddp-mp", json_lines(machine.run([machine.program, "bench", "all-reduce", *flags]))[0]["time_us"])

    def theirs():
        findings.fact("PyTorch", float(machine.run([sys.executable, "-c", PYTORCH_CALL], **OF_PYTORCH)))

    findings.attempt("ddp-mp", ours)
    if not machine.simulated:
        findings.attempt("PyTorch", theirs)
