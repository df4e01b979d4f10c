"""Files of float32 tensors in the format safetensors, whose own package is not everywhere."""

import ctypes
import json
import math
import struct


def save(tensors, file):
    """Writes a dictionary of tensors on the CPU."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        tensor = tensor.detach().float().contiguous()
        begin = len(data)
        data += ctypes.string_at(tensor.data_ptr(), 4 * tensor.numel())
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def load(file):
    """Returns the values of each tensor, as tuples. Their shapes are left out."""
    content = file.read_bytes()
    [length] = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    values = {}
    for name, about in header.items():
        if about["dtype"] != "F32":
            raise ValueError(f"{name} is {about['dtype']}, and only F32 is read")
        begin = 8 + length + about["data_offsets"][0]
        values[name] = struct.unpack_from(f"<{math.prod(about['shape'])}f", content, begin)
    return values
