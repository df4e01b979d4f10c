"""Builds the folder that tests and measures ddp-mp on a machine with a GPU.

pack.py FOLDER PROGRAM NCCL < messages of `cargo test --no-run --message-format=json`

NCCL is the file that nccl.py makes.
"""

import contextlib
import json
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile

import compressed

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
# Beside the scripts in packed/.
FILES = [
    *(ROOT / "benches" / name for name in ["compare.py", "pytorch_step.py", "ports.py"]),
    ROOT / "assets" / "shakespeare.txt",
]
LARGEST = 40 << 20  # bytes


def test_programs():
    """The test programs by the names of their targets, as cargo tells them."""
    for line in sys.stdin:
        message = json.loads(line)
        if message.get("executable") and "test" in message["target"]["kind"]:
            yield f"tests-{message['target']['name']}", message["executable"]


def add_programs(file, programs):
    with contextlib.ExitStack() as contexts:
        stripped = pathlib.Path(contexts.enter_context(tempfile.TemporaryDirectory())) / "stripped"
        out = contexts.enter_context(compressed.create(file))
        tar = contexts.enter_context(tarfile.open(fileobj=out, mode="w"))
        for name, program in programs.items():
            subprocess.run(["strip", "-o", stripped, program], check=True)
            tar.add(stripped, name)


def about(program):
    """What the program was built from, as it says itself."""
    report = subprocess.run([program, "env", "--log-format=json"], check=True, capture_output=True, text=True).stdout
    report = json.loads(report)
    return {"torch": report["libtorch"].split("+")[0], "commit": report["commit"]}


def main():
    folder, program, nccl = map(pathlib.Path, sys.argv[1:])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    programs = {"ddp-mp": program, **dict(test_programs())}
    add_programs(folder / "programs.tar.xz", programs)
    for file in [*sorted((HERE / "packed").glob("*.*")), *FILES, nccl]:
        shutil.copy(file, folder)
    wrapper = ["cc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", folder / "cuda_calls.so"]
    subprocess.run([*wrapper, HERE / "cuda_calls.c", "-ldl"], check=True)
    origin = about(program)
    (folder / "pack.json").write_text(json.dumps(origin) + "\n")
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {len(programs)} programs of {origin['commit']}, {size / (1 << 20):.1f} MiB")
    print(f"On a machine with a GPU and torch {origin['torch']}: ./run.sh")
    if size > LARGEST:
        sys.exit(f"{folder} is larger than {LARGEST >> 20} MiB; leave something out")


if __name__ == "__main__":
    main()
