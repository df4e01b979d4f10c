"""Writes the small data files of tests/files.rs: run it with .pytorch/bin/python, with `safetensors` installed.

Each set has the samples x[i][j] = i + j / 4 and classes i % 3, whatever the kind and the format.
"""

import gzip
import pathlib
import struct

import numpy as np
from safetensors.numpy import save_file

here = pathlib.Path(__file__).parent
x = np.arange(6)[:, None] + np.arange(4) / 4
y = np.arange(6) % 3

for kind in ["f4", "f8", "f2"]:
    np.save(here / f"x.{kind}.npy", x.astype("<" + kind))
for kind in ["i1", "i2", "i4", "i8", "u1"]:
    np.save(here / f"y.{kind}.npy", y.astype("<" + kind))
np.save(here / "pixels.u1.npy", (x * 4).astype("u1").reshape(6, 2, 2))
np.save(here / "bools.b1.npy", x > 2)
np.save(here / "big-endian.npy", x.astype(">f4"))
np.save(here / "fortran.npy", np.asfortranarray(x.astype("f4")))
# Each number is its own place in C's order, modulo 2 for bools: numpy decides where it lies in the file.
(here / "orders").mkdir(exist_ok=True)
for number, kind in enumerate(["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "b1"]):
    for shape in [(24,), (6, 4), (3, 2, 4), (2, 3, 2, 2), (24, 1), (1, 24)]:
        array = np.arange(24).reshape(shape)
        array = array % 2 == 1 if kind == "b1" else array
        for byte_order, order in [("<", "F"), (">", "F"), (">", "C")]:
            if (byte_order, order) == ("<", "F") or (kind[1] != "1" and len(shape) < 4):
                endian = {"<": "little", ">": "big"}[byte_order]
                name = f"{kind}.{'x'.join(map(str, shape))}.{order}.{endian}.npy"
                np.save(here / "orders" / name, array.astype(byte_order + kind).copy(order=order))
for version in [2, 3]:
    with open(here / f"x.version-{version}.npy", "wb") as file:
        np.lib.format.write_array(file, x.astype("f4"), version=(version, 0))

save_file({"inputs": x.astype("f4"), "targets": y}, here / "set.safetensors")
# The bytes come last, and what is before them has an odd length: the inputs are not aligned.
save_file({"inputs": x.astype("f2").reshape(6, 2, 2), "targets": y.astype("i1")}, here / "half.safetensors")
data = x.astype("<f4").tobytes()
header = (
    '{"targets":{"dtype":"I8","shape":[6],"data_offsets":[0,6]},'
    '"inputs":{"dtype":"F32","shape":[6,4],"data_offsets":[6,102]}}'
).encode()
(here / "unaligned.safetensors").write_bytes(
    struct.pack("<Q", len(header)) + header + y.astype("i1").tobytes() + data
)


def idx(name, array):
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    (here / "idx").mkdir(exist_ok=True)
    packed = gzip.compress(header + array.tobytes(), mtime=0)
    (here / "idx" / (name + ".gz" if "t10k" in name else name)).write_bytes(
        packed if "t10k" in name else header + array.tobytes()
    )


pixels = (x * 4).astype("u1").reshape(6, 2, 2)
idx("train-images-idx3-ubyte", pixels)
idx("train-labels-idx1-ubyte", y.astype("u1"))
idx("t10k-images-idx3-ubyte", pixels[:3])
idx("t10k-labels-idx1-ubyte", y[:3].astype("u1"))

rows = [[*map(str, row), str(label)] for row, label in zip(x, y)]
(here / "plain.csv").write_text("".join(",".join(row) + "\n" for row in rows))
first = [[row[-1], *row[:-1]] for row in rows]
(here / "header.csv").write_text(
    "".join(", ".join(row) + "\n" for row in [["Label", "a", "b", "c", "d"], *first])
)
