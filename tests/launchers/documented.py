"""The commands with torchrun and mpirun in the README and the book, as they are written there.

Those for two machines run on this one: `node0` is its loopback address, and a machine has one rank.
"""

import os
import pathlib
import re
import shlex
import shutil

from runs import Run, check, free_port, passed

REPOSITORY = pathlib.Path(__file__).parents[2]
AS_ROOT = ["--allow-run-as-root"] if os.geteuid() == 0 else []


def commands():
    """Those in blocks of `sh`, each once."""
    found = {}
    for page in [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/src/**/*.md"))]:
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith(("torchrun ", "mpirun ")):
                    found[line] = True
    return list(found)


def on_one_machine(line, folder):
    """How often a command runs at a time, and as what, where the hosts of the book are this machine."""
    machines = 2 if "--nnodes=2" in line else 1
    port = free_port()
    for there, here in [
        ("node0:29400", f"127.0.0.1:{port} --rdzv-conf=is_host={{host}} --local-addr=127.0.0.1"),
        ("MASTER_ADDR=node0", f"MASTER_ADDR=127.0.0.1 -x MASTER_PORT={port}"),
        ("--nproc-per-node=8", "--nproc-per-node=1"),
        ("mpirun -n 16", "mpirun -n 2"),
        ("/shared/", f"{folder}/"),
    ]:
        line = line.replace(there, here)
    return [shlex.split(line.replace("{host}", str(int(host == 0)))) for host in range(machines)]


def documented(program, folder, torchrun):
    lines = commands()
    check(len(lines) >= 5, f"commands in the book: {lines}")
    here = os.getcwd()
    folder = pathlib.Path(folder) / "documented"
    folder.mkdir()
    (folder / "hosts").write_text("localhost slots=8\n")
    os.chdir(folder)
    for line in lines:
        if line.startswith("mpirun ") and not shutil.which("mpirun"):
            print(f"launchers: skipped, without mpirun: {line}")
            continue
        runs = []
        for launcher, *words in on_one_machine(line, folder):
            start = torchrun if launcher == "torchrun" else [launcher, "--oversubscribe", *AS_ROOT]
            runs.append(Run([*start, *(program if word == "ddp-mp" else word for word in words)]))
        text = "".join(run.end().text() for run in runs)
        check("parameters " in text, f"it did not train: {text}")
        passed(f"as the book has it: {line}")
    os.chdir(here)
