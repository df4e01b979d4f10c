"""Builds the Python wheel: wheel.py PROGRAM LIBTORCH OUT

The package has the launcher (python/ddp_mp) and the program. The program finds libtorch by a path relative to itself, in
the environment that the wheel is installed in.

PROGRAM is the built program, LIBTORCH the libtorch that it was built with, OUT the folder for the wheel.
"""

import glob
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
REQUIREMENTS = REPOSITORY / "python/requirements.txt"
TOOLS = REPOSITORY / ".tools/wheel"
# These come with torch: the wheel does not bring them.
OF_TORCH = ["libtorch_cpu.so", "libc10.so"]


def run(*command, **environment):
    path = {"PATH": f"{TOOLS}/bin:{os.environ['PATH']}", "PYTHONPATH": str(TOOLS)}
    command = [str(part) for part in command]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, **path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        sys.stderr.write(done.stdout)
        sys.exit(f"wheel: {' '.join(command)} failed, for the reason above")


def install_tools():
    complete, wanted = TOOLS / "complete", sys.version + REQUIREMENTS.read_text()
    if complete.exists() and complete.read_text() == wanted:
        return
    shutil.rmtree(TOOLS, ignore_errors=True)
    settings = {"PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    pip = [sys.executable, "-m", "pip"]
    install = ["install", "--quiet", "--prefix=", "--target", TOOLS, "-r", REQUIREMENTS]
    with tempfile.TemporaryDirectory() as folder:
        path = ""
        # Debian's Python has no pip. pip's wheel runs without being installed.
        if subprocess.run([*pip, "--version"], capture_output=True).returncode != 0:
            path = f"{folder}/pip.whl"
            run(REPOSITORY / ".cargo/fetch-pip.sh", path)
        run(*pip, *install, PYTHONPATH=path, **settings)
    complete.write_text(wanted)


def paths_of_this_machine(libtorch):
    """Folders that the compilers wrote into the program, for messages, with names to use instead."""
    cargo = pathlib.Path(os.environ.get("CARGO_HOME", pathlib.Path.home() / ".cargo"))
    paths = {}
    for path in [os.path.abspath(libtorch), os.path.realpath(libtorch)]:
        paths[path] = "torch"
    for path in glob.glob(f"{cargo}/registry/src/*"):
        paths[path] = "crates"
    paths[str(cargo)] = "cargo"
    paths[str(REPOSITORY)] = "ddp-mp"
    return dict(sorted(paths.items(), key=lambda item: -len(item[0])))


def without_paths(contents, paths):
    """Replaces paths by names. Slashes fill the rest, so that nothing in the program moves."""
    for path, name in paths.items():
        contents = contents.replace(path.encode(), name.encode().ljust(len(path), b"/"))
    return contents


def prepare(program, libtorch, files):
    """Puts into the folder `files` what the wheel has beside the launcher."""
    ours = files / "ddp-mp"
    shutil.copy(program, ours)
    run("patchelf", "--set-rpath", "$ORIGIN/../torch/lib", ours)
    paths = paths_of_this_machine(libtorch)
    ours.write_bytes(without_paths(ours.read_bytes(), paths))


def main():
    program, libtorch, out = sys.argv[1:]
    install_tools()
    with tempfile.TemporaryDirectory() as folder:
        files, built, repaired = (pathlib.Path(folder, it) for it in ["files", "built", "repaired"])
        files.mkdir()
        prepare(program, libtorch, files)
        hatchling = [sys.executable, "-m", "hatchling", "build", "--target=wheel"]
        run(*hatchling, "--directory", built, DDP_MP_FILES=str(files))
        [wheel] = built.glob("*.whl")
        # Names the oldest glibc that the program runs with in the wheel's tag.
        excluded = [f"--exclude={library}" for library in OF_TORCH]
        auditwheel = [sys.executable, "-m", "auditwheel", "repair", "--only-plat", *excluded]
        run(*auditwheel, f"--wheel-dir={repaired}", wheel)
        [wheel] = repaired.glob("*.whl")
        out = pathlib.Path(out)
        out.mkdir(exist_ok=True)
        for old in out.glob("ddp_mp-*.whl"):
            old.unlink()
        shutil.move(wheel, out)
    [wheel] = out.glob("*.whl")
    print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
