"""Fetches an NCCL that lets two ranks share a GPU, and makes it small.

nccl.py FILE    writes FILE, a libnccl.so.2.xz with the machine code for H100 and H200 alone
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

import compressed
from prune_fatbin import prune

# From 2.30.3 on NCCL allows it. It is newer than the one that any torch of today brings.
WHEEL = "nvidia-nccl-cu13==2.30.7"
ARCHITECTURE = 90
FETCH_PIP = pathlib.Path(__file__).parents[2] / ".cargo" / "fetch-pip.sh"


def fetch(folder):
    """Returns the file of the wheel, in `folder`."""
    pip = [sys.executable, "-m", "pip"]
    environment = dict(os.environ)
    if subprocess.run([*pip, "--version"], capture_output=True).returncode != 0:
        # Debian's Python has none.
        environment["PYTHONPATH"] = str(folder / "pip.whl")
        subprocess.run([FETCH_PIP, environment["PYTHONPATH"]], check=True)
    download = [*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder, WHEEL]
    subprocess.run(download, env=environment, check=True)
    [wheel] = folder.glob("nvidia_nccl*.whl")
    return wheel


def main(file):
    print(f"gpu-pack: fetching {WHEEL} (about 216 MB)", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(fetch(pathlib.Path(folder))) as wheel:
            library = wheel.read("nvidia/nccl/lib/libnccl.so.2")
    partial = file.with_suffix(".partial")
    with compressed.create(partial) as out:
        out.write(prune(library, ARCHITECTURE))
    partial.rename(file)  # whole, or not there


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
