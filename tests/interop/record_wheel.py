"""Uses the wheel ddp-mp-record as a user does, beside each of several PyTorch versions: record_wheel.py WHEEL PYTHON...

Each PYTHON has a PyTorch and more. An environment gets of these what PyTorch itself needs, and the wheel.
"""

import importlib.metadata
import pathlib
import re
import shutil
import sys
import tempfile
import time

from checks import check
from wheel import LOOP, check_glibc, check_paths, check_records, link_or_copy, passed, run

# Bytes. It has no libtorch.
LARGEST = 3_000_000
# What .cargo/fetch-libtorch.sh fetches.
CUDA = ["nvidia-cuda-runtime", "nvidia-cuda-cupti"]
PYTORCH = ["torch", *CUDA, *(f"{name}-cu12" for name in CUDA)]


def packages_of(python):
    """The folder of a Python's packages."""
    where = "import sysconfig; print(sysconfig.get_path('platlib'))"
    return pathlib.Path(run(python, "-c", where).stdout.strip())


def add(source, target, wanted):
    """Adds packages, and what they need as far as it is there, from one folder of packages to another."""
    known = {name_of(it.name): it for it in importlib.metadata.distributions(path=[str(source)])}
    waiting, tops = list(wanted), set()
    for name in waiting:  # which grows
        if name not in known:
            continue
        tops |= {file.parts[0] for file in known[name].files}
        needed = [name_of(it) for it in known[name].requires or [] if "extra ==" not in it]
        waiting += [it for it in needed if it not in waiting]
    for top in sorted(tops - {"..", "__pycache__"}):
        if (source / top).is_dir():
            no_headers = shutil.ignore_patterns("include")
            shutil.copytree(source / top, target / top, ignore=no_headers, copy_function=link_or_copy, dirs_exist_ok=True)
        elif (source / top).exists() and not (target / top).exists():
            link_or_copy(source / top, target / top)


def name_of(requirement):
    """The name of a package, as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def check_wheel(wheel, packages):
    """What the wheel says of itself."""
    size = wheel.stat().st_size
    check(size <= LARGEST, f"{wheel.name} has {size} bytes")
    passed(f"{size / 1e6:.2f} MB")
    [found] = importlib.metadata.distributions(name="ddp-mp-record", path=[str(packages)])
    check([it.partition(";")[2].strip().replace("'", '"') for it in found.requires] == ['extra == "keep"'], found.requires)
    [command] = found.entry_points
    check(command.name == "ddp-mp-diff", command)
    library = packages / "ddp_mp/libddp_mp_native.so"
    check_glibc(wheel, library)
    check_paths(library)


def check_kept(commands, folder, source, packages):
    """A loop keeps tensors where the packages of the extra are, and says what is missing where they are not."""
    folder.mkdir()
    (folder / "loop.py").write_text(LOOP)
    python, diff = commands / "python", commands / "ddp-mp-diff"
    error = run(python, "loop.py", "none,0,none.safetensors", code=1, folder=folder).stderr
    check("ImportError: " in error and "safetensors" in error.splitlines()[-1], error)
    check(not (folder / "none").exists(), "a refused loop leaves a record")
    add(source, packages, ["safetensors", "numpy"])
    loops = ["first,0,first.safetensors", "again,0,again.safetensors", "changed,0.5,changed.safetensors"]
    run(python, "loop.py", *loops, folder=folder)
    run(diff, "first.safetensors", "again.safetensors", folder=folder)
    found = run(diff, "first.safetensors", "changed.safetensors", code=1, folder=folder).stdout
    check("parameter.first.weight" in found and "average.first.weight" not in found, found)
    passed("the extra keeps tensors, and without it that is refused")


def check_broken(commands, packages):
    """A library that does not fit the platform is named."""
    library = packages / "ddp_mp/libddp_mp_native.so"
    library.unlink()
    library.write_bytes(b"\x7fELF of another platform")
    error = run(commands / "ddp-mp-diff", "a", "b", code=2).stderr
    check(re.fullmatch(rf"ddp-mp-diff: error: .*{library.name}.*\n", error), error)
    error = run(commands / "python", "-c", "from ddp_mp import native; native.library()", code=1).stderr
    check(error.splitlines()[-1].startswith("ImportError: ") and library.name in error, error)
    passed("a library of another platform is refused")


def check_beside(wheel, beside, folder):
    """All of it beside one PyTorch."""
    source = packages_of(beside)
    run(beside, "-m", "venv", folder / "environment")
    commands = folder / "environment/bin"
    packages = packages_of(commands / "python")
    run(commands / "python", "-m", "pip", "install", "--no-index", wheel)
    check_wheel(wheel, packages)
    # Of the wheel, this part needs no PyTorch.
    run(commands / "ddp-mp-diff", "--version")
    add(source, packages, PYTORCH)
    version = run(commands / "python", "-c", "import torch; print(torch.__version__)").stdout.strip()
    passed(f"beside PyTorch {version}")
    run(commands / "python", "-c", "import numpy", code=1)
    check_records(commands, folder / "records")
    check_kept(commands, folder / "kept", source, packages)
    check_broken(commands, packages)


def main():
    wheel, *pythons = (pathlib.Path(it).absolute() for it in sys.argv[1:])
    for python in pythons:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            check_beside(wheel, python, pathlib.Path(folder).resolve())
        passed(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
