"""Starts the program over several processes as its users do, with the real launchers, and checks the outcome.

launchers.py PROGRAM SIMULATED_GPUS [torchrun]

torchrun is that of the Python that runs this. mpirun and Slurm are tried where they are installed, and several
hosts, as network namespaces, where this may make them: what is skipped is said. With the word `torchrun` these three
are left out. SIMULATED_GPUS is the folder that `make simulated-gpus` builds.
"""

import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

from documented import documented
from faults import STAGES, faults
from hosts import several_hosts
from runs import ENDLESS, FLAGS, Run, check, end_what_is_left, free_port, passed, result_of, same, threads
from run import INTEGRATION_TESTS, build
from slurm import slurm

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def static():
    return ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]


def torchrun(program):
    for ranks in [2, 4]:
        expected = threads(program, ranks)
        count = f"--nproc-per-node={ranks}"
        for place in [["--standalone"], static()]:
            run = Run([*TORCHRUN, *place, "--no-python", count, program, *FLAGS])
            same(run.result(), expected, f"torchrun {place[0]} {count}")
        launch = [sys.executable, "-m", "torch.distributed.launch", "--use-env", "--no-python"]
        run = Run([*launch, *static(), count, program, *FLAGS])
        same(run.result(), expected, f"torch.distributed.launch {count}")

    both = ["--no-python", "--nproc-per-node=2", program, "--nproc-per-node=2", *FLAGS]
    run = Run([*TORCHRUN, "--standalone", *both])
    same(run.result(), expected, "torchrun, 2 processes with 2 threads each")

    place = static()
    command = [*place, "--no-python", "--nproc-per-node=2", program, *FLAGS]
    nodes = [Run([*TORCHRUN, "--nnodes=2", f"--node-rank={node}", *command]) for node in range(2)]
    same(result_of(nodes), expected, "two agents of torchrun with 2 processes each")


def torchrun_without_a_port(program):
    """Two at once: from torch 2.12 on, torchrun takes a free port on one machine."""
    runs = [Run([*TORCHRUN, "--no-python", "--nproc-per-node=2", program, *FLAGS]) for _ in range(2)]
    expected = threads(program, 2)
    for result in [run.result() for run in runs]:
        same(result, expected, "one of two torchruns that choose their ports")


def torchrun_prefixes(program):
    """What the ranks print, with the prefix that torchrun is told to put before each line."""
    prefix = ["env", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=${role_name}/${rank}: "]
    run = Run([*prefix, *TORCHRUN, "--tee=3", "--no-python", "--nproc-per-node=2", program, *FLAGS]).end()
    lines = [line.partition("default/0: ")[2] for line in run.lines]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    ends = [event for event in events if event["event"] == "end"]
    check(len(ends) == 1, f"{len(ends)} ends with the prefix of rank 0: {run.output()}")
    same(ends[0], threads(program, 2), "torchrun --tee=3 with a prefix for each line")


def torchrun_is_ended(program):
    """torchrun passes SIGTERM on to its ranks, and kills those that are there after --shutdown-timeout seconds."""
    start = [*TORCHRUN, "--no-python", "--nproc-per-node=2"]
    run = Run([*start, program, *ENDLESS])
    run.until('"epoch":0')
    run.process.terminate()
    run.end(None)
    ends = run.events("end")
    check(len(ends) == 1 and ends[0]["stopped"], f"the run has not stopped: {run.output()}")
    passed("torchrun is ended: the ranks agree on a last step")

    # Without a time-out of its own the other rank would wait for the one that stalls.
    stall = ["--inject-fault=stall:rank=1,at=step,step=20", "--timeout=10m", "--stall-warning=1s"]
    run = Run([*start, "--shutdown-timeout=3", program, *ENDLESS, *stall])
    run.until(" has not ended for ")
    began = time.monotonic()
    run.process.terminate()
    run.end(None)
    took = time.monotonic() - began
    check(3 <= took < 25, f"the ranks were there for {took:.0f} s: {run.output()}")
    passed(f"torchrun --shutdown-timeout=3 with a rank that stalls: all have ended after {took:.0f} s")


def torchrun_on_gpus(program, on_gpus):
    run = Run([*TORCHRUN, "--standalone", "--no-python", "--nproc-per-node=2", *on_gpus, *FLAGS])
    same(run.result(), threads(program, 2), "torchrun with 2 simulated GPUs")


def restart(program, folder):
    """A rank fails. The other saves the last whole step, torchrun starts both again, and they go on from there."""
    for number, (kind, rank) in enumerate([("error", 1), ("kill", 0)]):
        fault = f"--inject-fault={kind}:rank={rank},at=step,step=40"
        saving = [f"--checkpoint-dir={folder}/restart{number}", "--resume=auto"]
        start = [*TORCHRUN, "--standalone", "--no-python", "--nproc-per-node=2"]
        run = Run([*start, "--max-restarts=1", program, *FLAGS, *saving, fault])
        result = run.result()
        check(run.events("failure"), f"nothing failed: {run.output()}")
        place = list(resumed_from(run.text(), run.output()))
        check(place == [0, 40], f"it went on from epoch and step {place}: {run.output()}")
        same(result, threads(program, 2), f"torchrun --max-restarts=1, {kind} of rank {rank} in step 40")


def resumed_from(text, output):
    """The epoch and the step from which a run has gone on."""
    went_on = re.search(r"resuming from \S+: epoch (\d+), step (\d+)", text)
    check(went_on, f"it did not go on from a checkpoint: {output}")
    return map(int, went_on.groups())


def elastic(program, folder):
    """One of two agents leaves, and the other goes on alone with the samples that are left."""
    samples, batch, epochs = 131072, 32, 3
    flags = [f"--num-samples={samples}", f"--batch-size={batch}", f"--max-epochs={epochs}"]
    flags += [f"--checkpoint-dir={folder}/elastic", "--save-every=100", "--resume=auto"]
    place = ["--nnodes=1:2", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=elastic"]
    place.append(f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    command = ["--no-python", "--nproc-per-node=1", program, *flags, "--log-format=json"]
    # The one that stays has the agents' own store.
    conf = "--rdzv-conf=last_call_timeout=10,is_host="
    stays, leaves = [Run([*TORCHRUN, *place, f"{conf}{host}", *command]) for host in [1, 0]]
    stays.until('"epoch":0')
    leaves.process.terminate()
    leaves.end(None)
    stays.end()
    sizes = [event["world_size"] for event in stays.events("start") + leaves.events("start")]
    check(sorted(sizes) == [1, 2], f"worlds of {sizes}: {stays.output()}{leaves.output()}")
    epoch, step = resumed_from(stays.text(), stays.output())
    # Two ranks make half of one's steps.
    of_two = samples // batch // 2
    left = samples * (epochs - epoch) // batch - 2 * (step - epoch * of_two)
    steps = stays.events("end")[-1]["steps"]
    check(steps == step + left, f"{steps} steps, not {step} and {left}: {stays.output()}")
    passed(f"torchrun --nnodes=1:2, left by an agent: {step} steps of two ranks, {left} of one")


def joined(program, folder):
    """A third agent joins two. What stops then is no failure, for which there would be no restart."""
    samples, batch, epochs = 134400, 32, 16
    flags = [f"--num-samples={samples}", f"--batch-size={batch}", f"--max-epochs={epochs}"]
    flags += [f"--checkpoint-dir={folder}/joined", "--save-every=1000", "--resume=auto"]
    place = ["--nnodes=2:3", "--max-restarts=0", "--rdzv-backend=c10d", "--rdzv-id=joined"]
    place += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"]
    command = ["--no-python", "--nproc-per-node=1", program, *flags, "--log-format=json"]
    # Otherwise the agents keep the store of their first round, which the new one does not know, and all fail after a
    # minute. Tried with torch 2.13 and 2.15.
    start = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", *TORCHRUN, *place]
    conf = "--rdzv-conf=last_call_timeout=2,is_host="
    agents = [Run([*start, f"{conf}{host}", *command]) for host in [1, 0]]
    # The third imports PyTorch meanwhile, which may take longer than the training, and waits for a writer.
    gate = f"{folder}/gate"
    os.mkfifo(gate)
    waits = "import sys, torch.distributed.run as run; open(sys.argv[1]).close(); run.main(sys.argv[2:])"
    start = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", TORCHRUN[0], "-c", waits, gate, *place]
    agents.append(Run([*start, f"{conf}0", *command]))
    first = agents[0]
    first.until('"epoch":0')
    os.open(gate, os.O_RDWR)  # does not wait for the agent, which may have failed; open until this program ends
    outputs = lambda: "".join(agent.output() for agent in agents)
    for agent in agents:
        agent.until(None)
    for agent in agents:
        check(agent.process.wait(60) == 0, f"an agent failed: {outputs()}")
    sizes = [event["world_size"] for agent in agents for event in agent.events("start")]
    check(sorted(sizes) == [2, 3], f"worlds of {sizes}: {outputs()}")
    epoch, step = resumed_from("".join(agent.text() for agent in agents), outputs())
    of = lambda samples, ranks: -(-(-(-samples // ranks)) // batch)
    left = samples - 2 * batch * (step - epoch * of(samples, 2))
    expected = step + of(left, 3) + (epochs - epoch - 1) * of(samples, 3)
    steps = [event["steps"] for agent in agents for event in agent.events("end")]
    check(max(steps) == expected, f"{steps} steps, not {expected}: {outputs()}")
    passed(f"torchrun --nnodes=2:3, joined by an agent: {step} steps of two ranks, {expected - step} of three")


def mpirun(program):
    if not (found := shutil.which("mpirun")):
        return print("launchers: skipped: mpirun, which is not installed (openmpi-bin in Debian)")
    start = [found, "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    start += ["-x", f"MASTER_PORT={free_port()}", "-x", "OMP_NUM_THREADS=1"]
    for ranks in [2, 4]:
        run = Run([*start, "-n", ranks, program, *FLAGS])
        same(run.result(), threads(program, ranks), f"mpirun -n {ranks}")


def main(program, simulated_gpus, only=None):
    program = pathlib.Path(program).resolve()
    check(program.is_file(), f"{program} is no program")
    on_gpus = ["env", "SIM_GPUS=2", f"LD_LIBRARY_PATH={pathlib.Path(simulated_gpus).resolve()}", program]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder:
        try:
            torchrun(program)
            torchrun_without_a_port(program)
            torchrun_prefixes(program)
            torchrun_is_ended(program)
            restart(program, folder)
            faults([program], "CPU", apart=2)
            torchrun_on_gpus(program, on_gpus)
            faults(on_gpus, "GPU", apart=len(STAGES))  # tests/gpus tries all of them
            elastic(program, folder)
            joined(program, folder)
            documented(program, folder, TORCHRUN)
            if only is None:
                mpirun(program)
                slurm(program, pathlib.Path(folder))
                [tests] = build(INTEGRATION_TESTS)
                several_hosts(program, tests)
        finally:
            end_what_is_left()
    print(f"launchers: all passed, with the torchrun of PyTorch {importlib.metadata.version('torch')}")


if __name__ == "__main__":
    is_usage = len(sys.argv) >= 3 and sys.argv[3:] in [[], ["torchrun"]]
    check(is_usage, "give it the program, the folder of the simulated GPUs, and torchrun if only that is to be tried")
    main(*sys.argv[1:])
