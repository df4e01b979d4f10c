"""What the launchers' checks share: commands that are run and ended, and what came of them."""

import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "benches"))
from ports import free_port  # noqa: E402, F401

# No command here runs for so long, unless it hangs.
LIMIT = 180
FLAGS = ["--model=mlp", "--hidden=64,64", "--momentum=0.9", "--max-epochs=2", "--log-format=json"]
# Until it is ended.
ENDLESS = ["--max-epochs=1000000", "--num-samples=65536", "--log-format=json"]
# What is started here carries this, so that what is left of it can be found.
MARK = ("DDP_MP_LAUNCHERS", str(os.getpid()))


def fail(what):
    sys.exit(f"launchers.py: {what}")


def check(is_true, what):
    if not is_true:
        fail(what)


class Run:
    """A command, whose output is read as it comes."""

    def __init__(self, command, one_core=False):
        name, value = MARK
        core = {min(os.sched_getaffinity(0))}
        self.command = list(map(str, command))
        self.process = subprocess.Popen(
            self.command,
            env={**os.environ, name: value},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # As many threads in a rank as under torchrun: another number adds up in another order.
            preexec_fn=(lambda: os.sched_setaffinity(0, core)) if one_core else None,
        )
        self.lines = []
        self.coming = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.lines.append(line)
            self.coming.put(line)
        self.coming.put(None)

    def output(self):
        return f"{' '.join(self.command)}:\n{''.join(self.lines)}"

    def until(self, part):
        """Waits for a line with `part`; None waits for the end."""
        while (line := self.next_line()) is not None:
            if part is not None and part in line:
                return line
        check(part is None, f"there was no {part}: {self.output()}")

    def next_line(self):
        try:
            return self.coming.get(timeout=LIMIT)
        except queue.Empty:
            fail(f"nothing came for {LIMIT} s: {self.output()}")

    def end(self, code=0):
        """Waits for the end, which is to have this exit code."""
        self.until(None)
        ended = self.process.wait(LIMIT)
        check(code is None or ended == code, f"exit code {ended}, not {code}: {self.output()}")
        return self

    def text(self):
        return "".join(self.lines)

    def events(self, name):
        events = [json.loads(line) for line in self.lines if line.startswith("{")]
        return [event for event in events if event["event"] == name]

    def result(self):
        ends = self.end().events("end")
        check(len(ends) == 1, f"{len(ends)} ends: {self.output()}")
        return ends[0]


def left_over(mark):
    """Processes that were started here and are still there: their numbers and commands."""
    left = {}
    mark = "=".join(mark).encode()
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                left[int(process.name)] = command.decode()
        except OSError:
            pass  # it has ended
    return left


def end_what_is_left():
    for process in left_over(MARK):
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended


def passed(what, mark=MARK):
    left = left_over(mark)
    check(not left, f"{what}: these processes are left: {left}")
    print(f"launchers: {what}", flush=True)


def result_of(runs):
    """What the first of these processes, which has rank 0, comes to. All end well."""
    result = runs[0].result()
    for run in runs[1:]:
        run.end()
    return result


def threads(program, ranks, flags=FLAGS):
    return Run([program, f"--nproc-per-node={ranks}", *flags], one_core=True).result()


def same(found, expected, what):
    """To the bit."""
    for name in ["parameters_hash", "loss", "steps"]:
        text = f"{what}: {name} is {found[name]}, and in threads {expected[name]}"
        check(found[name] == expected[name], text)
    passed(f"{what}: parameters {found['parameters_hash']}, as those of threads")
