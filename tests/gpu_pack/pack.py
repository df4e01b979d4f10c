"""Builds the folder that tests and measures ddp-mp on a machine with a GPU.

pack.py FOLDER PROGRAM EXAMPLES < messages of `cargo test --no-run --message-format=json`
"""

import json
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile

HERE = pathlib.Path(__file__).parent
LARGEST = 60 << 20


def test_programs():
    """The test programs by the names of their targets, as cargo tells them."""
    for line in sys.stdin:
        message = json.loads(line)
        if message.get("executable") and "test" in message["target"]["kind"]:
            yield f"tests-{message['target']['name']}", message["executable"]


def lessons(folder):
    """The lessons, which begin with a number: a file of cargo's own has a hash at its end."""
    for file in sorted(folder.glob("[0-9][0-9]-*")):
        source = HERE.parents[1] / "examples" / f"{file.name}.rs"
        if source.exists():
            yield f"lessons/{file.name}", file


def main():
    folder, program, examples = map(pathlib.Path, sys.argv[1:])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    programs = {"ddp-mp": program, **dict(test_programs()), **dict(lessons(examples))}
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(folder / "programs.tar.xz", "w:xz") as tar:
        stripped = pathlib.Path(scratch) / "stripped"
        for name, file in programs.items():
            subprocess.run(["strip", "-o", stripped, file], check=True)
            tar.add(stripped, name)
    for name in ["run.sh", "measure.py", "pytorch_ddp.py", "../../benches/compare.py", "../../benches/pytorch_step.py"]:
        shutil.copy(HERE / name, folder)
    wrapper = folder / "cuda_calls.so"
    flags = ["-O2", "-Wall", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", wrapper, HERE / "cuda_calls.c", "-ldl"], check=True)
    size = sum(file.stat().st_size for file in folder.rglob("*"))
    print(f"{folder}: {len(programs)} programs, {size / (1 << 20):.1f} MiB; on a machine with a GPU: ./run.sh")
    if size > LARGEST:
        sys.exit(f"{folder} is larger than {LARGEST >> 20} MiB; leave something out")


if __name__ == "__main__":
    main()
