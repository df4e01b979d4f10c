"""Builds a Python wheel: wheel.py OUT                    ddp-mp-record
                       wheel.py OUT PROGRAM LIBTORCH   ddp-mp

Both have the package (python/ddp_mp) and the native library (python/native), which is built here, for an old glibc.

ddp-mp has the program, too. The program finds libtorch by a path relative to itself, in the environment that the wheel is
installed in.

OUT is the folder for the wheel, PROGRAM the built program, LIBTORCH the libtorch that it was built with.
"""

import glob
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
REQUIREMENTS = REPOSITORY / "python/requirements.txt"
TOOLS = REPOSITORY / ".tools/wheel"
# What the native library runs with: that of 2018, in RHEL 8 and Debian 10. PyTorch's wheels need it, too.
GLIBC = "2.28"
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


def build_library():
    """Builds the native library. Zig links it with the symbols of an old glibc, whatever glibc is here."""
    print(f"wheel: building the native library for glibc {GLIBC}; the first time takes a minute", file=sys.stderr)
    host = subprocess.check_output(["rustc", "--print=host-tuple"], text=True).strip()
    zigbuild = ["cargo-zigbuild", "zigbuild", "--release", f"--target={host}.{GLIBC}"]
    settings = {"CARGO_ZIGBUILD_ZIG_PATH": f"{TOOLS}/ziglang/zig", "CARGO_PROFILE_RELEASE_STRIP": "symbols"}
    run(*zigbuild, "--package=ddp-mp-native", **settings)
    target = os.environ.get("CARGO_TARGET_DIR", "target")
    return REPOSITORY / target / host / "release/libddp_mp_native.so"


def paths_of_this_machine(libtorch):
    """Folders that the compilers wrote into the files, for messages, with names to use instead."""
    cargo = pathlib.Path(os.environ.get("CARGO_HOME", pathlib.Path.home() / ".cargo"))
    paths = {}
    if libtorch:
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


def prepare(files, program, libtorch):
    """Puts into the folder `files` what the wheel has beside the Python code."""
    shutil.copy(build_library(), files)
    if program:
        shutil.copy(program, files / "ddp-mp")
        run("patchelf", "--set-rpath", "$ORIGIN/../torch/lib", files / "ddp-mp")
    paths = paths_of_this_machine(libtorch)
    for file in files.iterdir():
        file.write_bytes(without_paths(file.read_bytes(), paths))


def main():
    out, program, libtorch = sys.argv[1:] if len(sys.argv) > 2 else [sys.argv[1], None, None]
    install_tools()
    with tempfile.TemporaryDirectory() as folder:
        files, built, repaired = (pathlib.Path(folder, it) for it in ["files", "built", "repaired"])
        files.mkdir()
        prepare(files, program, libtorch)
        hatchling = [sys.executable, "-m", "hatchling", "build", "--target=wheel"]
        run(*hatchling, "--directory", built, DDP_MP_FILES=str(files))
        [wheel] = built.glob("*.whl")
        # Names the oldest glibc that the wheel runs with in its tag. The program's is that of this machine.
        glibc = [] if program else [f"--plat=manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"]
        excluded = [f"--exclude={library}" for library in OF_TORCH]
        auditwheel = [sys.executable, "-m", "auditwheel", "repair", "--only-plat", *glibc, *excluded]
        run(*auditwheel, f"--wheel-dir={repaired}", wheel)
        [wheel] = repaired.glob("*.whl")
        out = pathlib.Path(out)
        out.mkdir(exist_ok=True)
        for old in out.glob(f"{wheel.name.split('-')[0]}-*.whl"):
            old.unlink()
        wheel = pathlib.Path(shutil.move(wheel, out))
    print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
