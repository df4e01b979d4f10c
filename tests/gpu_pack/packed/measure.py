"""Tests and measures ddp-mp on this machine's GPU, beside PyTorch, and writes gpu-results.json and gpu-results.md.

measure.py [--seconds SECONDS] [--parts NAME,NAME...] [--simulated FOLDER]

It prints each command and how it ends. Both files are written anew after each finding, so that they are there however this
ends. A part goes on after a command that fails, and then fails as a whole. No part and no command goes on once its time is
over. Ends with 0 if all parts went well, or could not be tried here.
"""

import argparse
import dataclasses
import pathlib
import sys
import tempfile
import time
import typing

from beside_pytorch import parameters_beside_pytorch
from correctness import losses, more_losses, same_bits, tests
from environment import demo, environment, gpu_check
from machine import Machine
from results import Findings, LeftOut, reason, write
from speed import parts_of_a_step, speed, speed_of_more_models, time_of_a_call
from two_ranks import collectives, failures, losses_of_two_processes, torch_nccl, torchrun, two_threads


@dataclasses.dataclass
class Part:
    name: str
    run: typing.Callable
    seconds: int  # at most, on a GPU
    rehearsed: bool = True  # on a simulated GPU


# In an order in which the first minutes tell the most.
PARTS = [
    Part("environment", environment, 60),
    Part("GPU check", gpu_check, 60),
    Part("demo", demo, 40),
    Part("two processes with NCCL on one GPU", losses_of_two_processes, 120),
    Part("two threads with NCCL on one GPU", two_threads, 60),
    Part("two processes that torchrun starts", torchrun, 60),
    Part("two processes with the NCCL of this torch", torch_nccl, 60),
    Part("collectives of two ranks", collectives, 100),
    Part("losses on the GPU and on the CPU", losses, 150),
    Part("parameters of two ranks beside PyTorch", parameters_beside_pytorch, 60),
    Part("speed of one rank beside PyTorch", speed, 170),
    Part("failures of two ranks", failures, 100),
    Part("same bits", same_bits, 90),
    Part("losses of a gpt", more_losses, 60),
    Part("tests", tests, 90),
    Part("more speed of one rank beside PyTorch", speed_of_more_models, 330, rehearsed=False),
    Part("parts of a step in microseconds", parts_of_a_step, 60),
    Part("time of a call of NCCL in microseconds", time_of_a_call, 40),
]


def chosen(parts, beginnings, simulated):
    """Returns the parts whose names begin so, after the environment, which all need."""
    is_chosen = lambda part: part.run is environment or part.name.lower().startswith(tuple(beginnings))
    return [part for part in parts if is_chosen(part) and (part.rehearsed or not simulated)]


def run_part(part, machine, findings):
    """Runs a part, and keeps how it has ended."""
    began = time.monotonic()
    machine.begin_part(part.seconds)
    findings.changed()
    try:
        part.run(machine, findings)
    except LeftOut as why:
        findings.left_out = str(why)
    except Exception as error:  # the other parts may go well
        findings.fail(reason(error))
    findings.seconds = time.monotonic() - began
    findings.changed()


def run_parts(parts, machine):
    """Runs the parts in their order, and returns what each has found. Where the first fails, all others would."""
    found, began = {}, time.monotonic()
    for part in parts:
        findings = found[part.name] = Findings(lambda: write(machine.out, found, bool(machine.simulated)))
        print(f"\n{part.name}", flush=True)
        run_part(part, machine, findings)
        how = findings.problem() or (f"left out: {findings.left_out}" if findings.left_out else "ok")
        took = f"({findings.seconds:.0f} s, {time.monotonic() - began:.0f} s in all)"
        print(f"{part.name}: {how} {took}", flush=True)
        if part.run is environment and findings.problem():
            break
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, help="how long all may take")
    parser.add_argument("--parts", default="", help="the parts to run, by the beginnings of their names, with commas between")
    parser.add_argument("--simulated", type=pathlib.Path, help="folder of the simulated GPU")
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds if options.seconds else None
    simulated = options.simulated and options.simulated.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        machine = Machine(pathlib.Path(scratch), simulated, ends)
        found = run_parts(chosen(PARTS, options.parts.lower().split(","), simulated), machine)
    sys.exit(0 if all(it.problem() is None for it in found.values()) else 1)


if __name__ == "__main__":
    main()
