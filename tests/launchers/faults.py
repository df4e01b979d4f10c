"""Faults under torchrun: each names the rank in torchrun's own report, and leaves nobody behind."""

import os
import re
import sys

from runs import Run, check, passed

KINDS = ["error", "panic", "kill", "stall"]
STAGES = ["rendezvous", "init", "broadcast", "step,step=0", "step,step=9", "barrier"]
RANKS = 2
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]


def faults(start, device, apart):
    """Each kind meets one of the ranks at every `apart`th stage; with DDP_MP_TESTS=all it meets all of them at all stages.
    `device` is the kind of the ranks' devices."""
    is_all = os.environ.get("DDP_MP_TESTS") == "all"
    runs = 0
    for index, kind in enumerate(KINDS):
        for number, stage in enumerate(STAGES):
            if not is_all and (number + index) % apart != 0:
                continue
            for rank in range(RANKS) if is_all else [(number + index // 2) % RANKS]:
                fault(start, device, kind, stage, rank)
                runs += 1
    passed(f"torchrun and --inject-fault, ranks on {device}s: {runs} runs, the rank named in each")


def fault(start, device, kind, stage, rank):
    flags = ["--max-epochs=2", "--num-samples=400", "--grace-period=1s"]
    # A stall alone is found by waiting.
    flags.append("--timeout=5s" if kind == "stall" else "--timeout=50s")
    flags.append(f"--inject-fault={kind}:rank={rank},at={stage}")
    run = Run([*TORCHRUN, f"--nproc-per-node={RANKS}", *start, *flags]).end(1)
    report = run.text().partition("Root Cause")[2]
    if kind == "kill":
        # It says nothing itself: torchrun sees by which signal it ended.
        who = rf"rank +: {rank} .*\n *exitcode +: -9 "
    else:
        who = rf"traceback *: rank {rank} \({device}:{rank}( on \S+, process \d+)?\) failed in "
    check(re.search(who, report), f"torchrun does not report rank {rank}: {run.output()}")
