"""The programs of the pack, and how to start them on this machine."""

import ctypes
import dataclasses
import json
import os
import pathlib
import shlex
import signal
import struct
import subprocess
import tarfile
import tempfile
import time

HERE = pathlib.Path(__file__).parent.resolve()
# cuBLAS has the same bits in each run only with this, because the program uses several streams.
SAME_BITS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
# PyTorch finds its libraries itself.
OF_PYTORCH = {"LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}
SLOWER = 10  # how much more time a simulated GPU may take
# In the order in which cuda_calls.c has them, and how many of its functions each name is for.
CALLS = {
    "kernel launches": 4,
    "copies": 2,
    "host waits": 4,
    "allocator calls": 4,
    "event queries": 1,
    "event records": 2,
}


class CommandFailed(RuntimeError):
    """A command that failed, and what it had printed."""

    def __init__(self, name, ended):
        how = "still ran, and was ended" if ended.status is None else f"ended with {ended.status}"
        super().__init__(f"{name} {how}: {(ended.stdout[-700:] + ended.stderr[-800:]).strip()}")
        self.ended = ended


@dataclasses.dataclass
class Ended:
    """How a process has ended: `status` is None if it still ran at its limit, and was killed."""

    status: int | None
    stdout: str
    stderr: str


class Machine:
    """The programs of the pack, and how to start them here."""

    def __init__(self, scratch, simulated=None, ends=None):
        self.scratch, self.simulated = scratch, simulated
        self.ends = ends  # when the script has to end; None for no limit
        self.part_ends = None
        self.out = pathlib.Path(os.environ.get("OUT", HERE))
        self.program = scratch / "ddp-mp"

    def unpack(self, torch):
        """Unpacks the programs, and finds the libraries that they need beside `torch`, the module."""
        self.torch = torch
        with tarfile.open(HERE / "programs.tar.xz") as tar:
            tar.extractall(self.scratch, filter="data")
        torch_folder = pathlib.Path(torch.__file__).parent
        nvidia = torch_folder.parent / "nvidia"
        self.cudart = nvidia / "cu13" / "lib" / "libcudart.so.13"
        folders = [torch_folder / "lib", self.cudart.parent, nvidia / "cudnn" / "lib"]
        if self.simulated:
            folders.insert(0, self.simulated)
        known = os.environ.get("LD_LIBRARY_PATH")
        self.libraries = ":".join([*map(str, folders), *([known] if known else [])])

    def some(self, cases, kept):
        """Returns all cases on a GPU, and the first of them in a rehearsal."""
        return cases[:kept] if self.simulated else cases

    def begin_part(self, limit):
        """Gives the commands that follow so many seconds together."""
        self.part_ends = time.monotonic() + self.scaled(limit)

    def scaled(self, seconds):
        return seconds * (SLOWER if self.simulated else 1)

    def time_left(self):
        """Returns the seconds until this part, or the whole script, has to end."""
        return min((it for it in [self.ends, self.part_ends] if it is not None), default=float("inf")) - time.monotonic()

    def limit_of(self, limit):
        """Returns the seconds that a command may take; raises once the time is over."""
        if (left := self.time_left()) < 1:
            raise TimeoutError("no time was left")
        return min(self.scaled(limit), left)

    def environment(self, **more):
        found = {"LD_LIBRARY_PATH": self.libraries, "DDP_MP_PROGRAM": str(self.program)}
        return {**os.environ, **found, **more}

    def together(self, commands, limit=60, **more):
        """Runs commands, each with variables of its own, at the same time, and returns how each has ended."""
        limit, began = self.limit_of(limit), time.monotonic()
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            running = [self.start(*it, pathlib.Path(folder) / str(index), more) for index, it in enumerate(commands)]
            ended = [finish(*it, began + limit - time.monotonic()) for it in running]
        took = time.monotonic() - began
        print(f"    exit status {', '.join(str(it.status) for it in ended)} after {took:.1f} s", flush=True)
        return ended

    def start(self, command, variables, output, more):
        command, variables = list(map(str, command)), {**more, **variables}
        print(f"  $ {shlex.join([*(f'{name}={value}' for name, value in variables.items()), *command])}", flush=True)
        output.mkdir()
        files = [open(output / name, "w+", errors="replace") for name in ["stdout", "stderr"]]
        process = subprocess.Popen(
            command,
            env=self.environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=files[0],
            stderr=files[1],
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        return process, files

    def run(self, command, limit=60, **more):
        """Returns what a command prints; raises if it fails."""
        [ended] = self.together([(command, {})], limit, **more)
        if ended.status != 0:
            self.show([ended])
            raise CommandFailed(pathlib.Path(command[0]).name, ended)
        return ended.stdout

    def show(self, all_ended):
        """Prints the end of what processes have printed, and what NCCL has written into files of its own."""
        texts = [f"{it.stdout[-4000:]}{it.stderr[-4000:]}" for it in all_ended]
        for log in sorted(self.scratch.glob("nccl-*.log")):
            texts.append(f"{log.name}\n{log.read_text(errors='replace')[-2000:]}")
            log.unlink()
        for text in texts:
            print("    | " + text.strip().replace("\n", "\n    | "), flush=True)

    def train(self, flags, limit=60, **more):
        """Returns the events of a run."""
        return json_lines(self.run([self.program, "--log-format=json", *flags], limit, **more))

    def on_gpu(self, flags, limit=60, **more):
        """Returns the last event of a run on the GPU."""
        return end_on_gpu(self.train(flags, limit, **more))

    def on_cpu(self, flags, limit=60):
        """Returns the last event of the same run on the CPU."""
        return self.train(flags, limit, CUDA_VISIBLE_DEVICES="")[-1]

    def counted(self, start):
        """Returns what `start` returns, and how often the processes that it starts call CUDA, by the names of CALLS."""
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            # After the wrapper, which looks for the functions behind it.
            preload = f"{HERE / 'cuda_calls.so'}:{self.cudart}"
            result = start(CUDA_CALLS=str(pathlib.Path(folder) / "calls"), LD_PRELOAD=preload)
            counts = [0] * sum(CALLS.values())
            for file in pathlib.Path(folder).iterdir():
                of_process = struct.unpack(f"{len(counts)}Q", file.read_bytes())
                counts = [sum(pair) for pair in zip(counts, of_process)]
        named, at = {}, 0
        for name, width in CALLS.items():
            named[name] = sum(counts[at : at + width])
            at += width
        return result, named


def finish(process, files, left):
    """Waits for a process, kills it once no time is left, and returns how it has ended."""
    try:
        status = process.wait(max(0.1, left))
    except subprocess.TimeoutExpired:
        status = None
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    texts = []
    for file in files:
        file.seek(0)
        texts.append(file.read())
        file.close()
    return Ended(status, *texts)


def end_with_parent():
    """Has the kernel kill this process when its parent ends: no command outlives the script."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def open_driver():
    """Opens the driver, and raises if it is not there or has no GPU. It stays open: without persistence mode the driver sets
    the GPU up for each process anew, unless another one has it open."""
    try:
        result = ctypes.CDLL("libcuda.so.1").cuInit(0)
    except OSError as error:
        raise RuntimeError(f"no GPU can be used here: there is no NVIDIA driver ({error})") from None
    if result != 0:
        raise RuntimeError(f"no GPU can be used here: cuInit of the NVIDIA driver ends with {result}")


def json_lines(text):
    """The objects among the lines: NCCL_DEBUG and warnings print beside them."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def end_on_gpu(events):
    """Returns the last event of a run, which must have used the GPU: ranks of the threaded backend may take the CPU."""
    if events[0]["device"] != "GPU":
        raise RuntimeError(f"it ran on the {events[0]['device']}")
    return next(it for it in events if it["event"] == "end")


def check_near(here, there, tolerance=1e-3):
    """Kernels add up in other orders on a GPU."""
    if not abs(here - there) <= tolerance * abs(there):
        raise RuntimeError(f"the loss is {here}, and not about {there}")
