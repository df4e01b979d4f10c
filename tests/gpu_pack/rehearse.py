"""Tries the pack of `make gpu-pack` on a machine without a GPU: it has to end at once and say why, to leave its results when
it is killed, and to pass on a simulated GPU.

rehearse.py PACK SIMULATED PYTHON

SIMULATED is the folder of the simulated GPU for the libtorch of the pack, and PYTHON has that torch.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

sys.path.append(str(pathlib.Path(__file__).parents[1] / "launchers"))
from runs import left_over  # noqa: E402

SECONDS_TO_END = 60  # without a GPU; an idle machine takes 10
PARTS_BEFORE_KILL = 3
QUIET = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}  # the log has what it prints


def check(is_true, what):
    if not is_true:
        sys.exit(f"rehearse.py: {what}")


class Rehearsal:
    def __init__(self, pack, simulated, python):
        self.run_sh, self.simulated = pack / "run.sh", ["--simulated", simulated]
        self.environment = {**os.environ, "PYTHON": str(python.absolute()), "SECONDS_LEFT": "1800"}
        for name in ["LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES"]:
            self.environment.pop(name, None)

    def start(self, out, *arguments, **more):
        environment = {**self.environment, "OUT": str(out), **more}
        return subprocess.Popen([self.run_sh, *arguments], env=environment, start_new_session=True, **QUIET)

    def without_gpu(self, out):
        began = time.monotonic()
        process = self.start(out)
        check(process.wait() == 1, f"without a GPU it ended with {process.returncode}")
        took = time.monotonic() - began
        check(took < SECONDS_TO_END, f"without a GPU it took {took:.0f} s")
        results = json.loads((out / "gpu-results.json").read_text())
        check(list(results) == ["environment"], f"without a GPU it went on: {list(results)}")
        check("no GPU can be used here" in results["environment"]["problem"], results)
        print(f"without a GPU: ended after {took:.0f} s: {results['environment']['problem']}", flush=True)

    def killed(self, out):
        token = f"rehearsal-{os.getpid()}"
        process = self.start(out, *self.simulated, REHEARSAL=token)
        results, file = {}, out / "gpu-results.json"
        while len(results) < PARTS_BEFORE_KILL:
            check(process.poll() is None, "it ended before it could be killed")
            time.sleep(0.1)
            results = json.loads(file.read_text()) if file.exists() else {}
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        results, page = json.loads(file.read_text()), (out / "gpu-results.md").read_text()
        whole = [name for name, part in results.items() if part["ok"]]
        check(len(whole) >= PARTS_BEFORE_KILL - 1, f"killed, it has left {results}")
        check("cut off" in page and "== tests and measurements" in (out / "gpu-run.log").read_text(), f"{page}")
        ends = time.monotonic() + 10
        while left_over(("REHEARSAL", token)):
            check(time.monotonic() < ends, "killed, it has left a process behind")
            time.sleep(0.1)
        print(f"killed: the results of {', '.join(whole)} are there", flush=True)

    def on_simulated_gpu(self, out):
        began = time.monotonic()
        status = self.start(out, *self.simulated).wait()
        log = (out / "gpu-run.log").read_text()
        check(status == 0 and log.endswith("-- exit status 0\n"), f"on a simulated GPU it ended with {status}:\n{log}")
        print((out / "gpu-results.md").read_text())
        print(f"on a simulated GPU: passed after {time.monotonic() - began:.0f} s")


def main():
    rehearsal = Rehearsal(*map(pathlib.Path, sys.argv[1:]))
    cases = [rehearsal.killed, rehearsal.on_simulated_gpu]
    if not pathlib.Path("/dev/nvidiactl").exists():
        cases.insert(0, rehearsal.without_gpu)
    for case in cases:
        with tempfile.TemporaryDirectory() as out:
            case(pathlib.Path(out))


if __name__ == "__main__":
    main()
