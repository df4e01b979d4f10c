"""The commands with torchrun and mpirun in the README and the book, as they are written there."""

import os
import pathlib
import re
import shlex
import shutil

from runs import Run, check, passed

REPOSITORY = pathlib.Path(__file__).parents[2]


def commands():
    """Those in blocks of `sh`, with the page that each is in."""
    for page in [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/src/**/*.md"))]:
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.splitlines():
                if line.startswith(("torchrun ", "mpirun ")):
                    yield page.relative_to(REPOSITORY), line


def documented(program, folder, torchrun):
    found = dict.fromkeys(line for _, line in commands())
    check(len(found) >= 3, f"commands in the book: {list(found)}")
    here = os.getcwd()
    folder = pathlib.Path(folder) / "documented"
    folder.mkdir()
    os.chdir(folder)
    for line in found:
        launcher, *words = shlex.split(line)
        if launcher == "mpirun":
            if not shutil.which("mpirun"):
                print(f"launchers: skipped, without mpirun: {line}")
                continue
            launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe"]
        else:
            launcher = torchrun
        run = Run([*launcher, *(program if word == "ddp-mp" else word for word in words)])
        run.end()
        check("parameters " in run.text(), f"it did not train: {run.output()}")
        passed(f"as the book has it: {line}")
    os.chdir(here)
