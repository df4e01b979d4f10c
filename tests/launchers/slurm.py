"""A real Slurm, of this machine alone: a controller and two nodes, in a folder of their own."""

import getpass
import os
import re
import shutil
import socket
import subprocess
import sys

from runs import ENDLESS, FLAGS, LIMIT, Run, check, free_port, passed, same, threads

# Slurm's nodes by names that lead to this machine wherever it runs, and with as many CPUs as there are tasks.
NODES = ["127.0.0.1", "127.0.0.2"]
CPUS = 4
PACKAGES = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}


class Cluster:
    """Its daemons, which nothing tells apart from those of two machines but the addresses."""

    def __init__(self, folder):
        self.folder = folder
        self.daemons = []

    def start(self):
        """Returns when a job of both nodes has run."""
        # Munge's socket is for all users.
        self.folder.mkdir()
        for parent in [self.folder, self.folder.parent]:
            parent.chmod(0o711)
        key = self.folder / "key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        (self.folder / "slurm.conf").write_text(self.configuration())
        os.environ.update([self.mark()])
        files = {"socket": "munge", "key-file": "key", "log-file": "munge.log"}
        files |= {"pid-file": "munge.pid", "seed-file": "seed"}
        files = [f"--{option}={self.folder / name}" for option, name in files.items()]
        self.daemon("munged", "--foreground", *files)
        self.daemon("slurmctld", "-D", "-c")
        for node in NODES:
            self.daemon("slurmd", "-D", "-N", node)
        Run(["srun", "--nodes=2", "true"]).end()

    def configuration(self):
        user, host, folder = getpass.getuser(), socket.gethostname().split(".")[0], self.folder
        nodes = [f"NodeName={node} NodeAddr=127.0.0.1 Port={free_port()} CPUs={CPUS}" for node in NODES]
        lines = f"""
            ClusterName=launchers
            SlurmctldHost={host}(127.0.0.1)
            SlurmctldPort={free_port()}
            SlurmUser={user}
            SlurmdUser={user}
            AuthInfo=socket={folder}/munge
            StateSaveLocation={folder}/state
            SlurmdSpoolDir={folder}/spool-%n
            SlurmctldPidFile={folder}/slurmctld.pid
            SlurmdPidFile={folder}/slurmd-%n.pid
            ProctrackType=proctrack/linuxproc
            TaskPlugin=task/none
            SelectType=select/linear
            SlurmdParameters=config_overrides
            PartitionName=all Nodes=ALL Default=YES
        """
        return "\n".join([line.strip() for line in lines.strip().splitlines()] + nodes) + "\n"

    def daemon(self, *command):
        with open(self.folder / f"{len(self.daemons)}-{command[0]}.log", "w") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.daemons.append(subprocess.Popen(command, **streams))

    def mark(self):
        """By which what it has started can be found."""
        return ("SLURM_CONF", str(self.folder / "slurm.conf"))

    def stop(self):
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(LIMIT)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def logs(self):
        return "".join(f"{log}:\n{log.read_text()}" for log in sorted(self.folder.glob("*.log")))


def slurm(program, folder):
    missing = [package for tool, package in PACKAGES.items() if not shutil.which(tool)]
    if missing:
        return print(f"launchers: skipped: Slurm, of which {', '.join(missing)} is not installed")
    cluster = Cluster(folder / "slurm")
    try:
        cluster.start()
        found(program)
        steps(program)
        batch(program, folder)
        failure(program)
        agreed_stop(program, folder)
    except SystemExit:
        print(cluster.logs(), file=sys.stderr)
        raise
    finally:
        cluster.stop()
        os.environ.pop("SLURM_CONF", None)
    passed("Slurm's controller and nodes have ended", cluster.mark())


def srun(nodes, tasks, *command, cpus=1):
    place = [f"--nodes={nodes}", f"--ntasks={tasks}", f"--cpus-per-task={cpus}"]
    return Run(["srun", *place, *command])


def found(program):
    """What a task sees of its step."""
    run = srun(2, 4, "--label", program, "env").end()
    for task in range(4):
        line = rf"{task}: launcher +slurm, process {task} of 4$"
        check(re.search(line, run.text(), re.MULTILINE), f"no {line}: {run.output()}")
    because = r"3: +because +SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4$"
    check(re.search(because, run.text(), re.MULTILINE), f"no {because}: {run.output()}")
    passed("srun: env says which task of its step it is")


def steps(program):
    for nodes, tasks in [(1, 2), (2, 4)]:
        run = srun(nodes, tasks, program, *FLAGS)
        same(run.result(), threads(program, tasks), f"srun --nodes={nodes} --ntasks={tasks}")
        [start] = run.events("start")
        check(start["nnodes"] == nodes, f"it began as {start}")
    run = srun(2, 2, program, "--nproc-per-node=2", *FLAGS, cpus=2)
    same(run.result(), threads(program, 4), "srun, one task a node with 2 threads each")


def batch(program, folder):
    """As the chapter on several machines has it."""
    script, output = folder / "batch.sh", folder / "batch.out"
    flags = " ".join(FLAGS)
    step = f"srun --cpus-per-task=1 --kill-on-bad-exit=1 {program} {flags}"
    options = ["--nodes=2", "--ntasks-per-node=1", f"--output={output}"]
    options = "\n".join(f"#SBATCH {option}" for option in options)
    script.write_text(f"#!/bin/bash\n{options}\n{step}\n")
    Run(["sbatch", script]).end()
    # The nodes are free when it has ended.
    srun(2, 2, "true").end()
    run = Run(["cat", output])
    same(run.result(), threads(program, 2), "sbatch, one task a node")


def failure(program):
    run = srun(2, 2, program, *FLAGS, "--inject-fault=error:rank=1,at=step,step=40")
    run.end(1)
    for where in [r"CPU:0", rf"CPU:0 on {re.escape(socket.gethostname())}, process \d+"]:
        who = rf"rank 1 \({where}\) failed in step #40: injected by"
        check(re.search(who, run.text()), f"no {who}: {run.output()}")
    passed("srun: a rank fails, and both tasks say which")


def agreed_stop(program, folder):
    """What `--signal=USR1@120` sends ahead of the time limit, sent without waiting for that."""
    flags = [*ENDLESS, f"--checkpoint-dir={folder}/slurm-stop"]
    ranks = [program, *flags]
    run = srun(2, 2, "--job-name=agreed", *ranks)
    run.until('"epoch":0')
    Run(["scancel", "--signal=USR1", "--name=agreed"]).end()
    stopped = run.result()
    check(stopped["stopped"] == "SIGUSR1", f"it ended as {stopped}")
    steps = stopped["steps"]
    same(stopped, threads(program, 2, [*ENDLESS, f"--max-steps={steps}"]), "srun and SIGUSR1")
    steps += 100
    run = srun(2, 2, *ranks, "--resume=auto", f"--max-steps={steps}")
    result, expected = run.result(), threads(program, 2, [*ENDLESS, f"--max-steps={steps}"])
    check("resuming from" in run.text(), f"it did not go on from a checkpoint: {run.output()}")
    same(result, expected, "srun again, which goes on from there")
