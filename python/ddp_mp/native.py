"""The native library: fingerprints of tensors, and the program `ddp-mp-diff`."""

import ctypes
import functools
import os
import pathlib
import signal
import sys

# Room for the JSON of a fingerprint, which has about 200 bytes.
ROOM = 1024


class Part(ctypes.Structure):
    """A part of a tensor: its index, or -1 if the tensor is one part; its first element, and how many it has."""

    _fields_ = [("index", ctypes.c_int64), ("first", ctypes.c_size_t), ("len", ctypes.c_size_t)]


@functools.cache
def library():
    """Loads the library."""
    path = pathlib.Path(__file__).with_name("libddp_mp_native.so")
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"ddp_mp is not whole, install it again from a wheel: {error}") from None
    pointer, size, text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
    loaded.ddp_mp_part_of_step.argtypes = [size, ctypes.c_uint64]
    loaded.ddp_mp_part_of_step.restype = Part
    loaded.ddp_mp_fingerprint.argtypes = [pointer, size, text, ctypes.c_int64, text, size]
    loaded.ddp_mp_fingerprint.restype = size
    loaded.ddp_mp_diff.argtypes = [size, ctypes.POINTER(text)]
    return loaded


def fingerprint(tensor, step=None):
    """Returns the fingerprint of a tensor as JSON; with a step, of the part of it that is due in that step."""
    index, first, numel = -1, 0, tensor.numel()
    if step is not None:
        part = library().ddp_mp_part_of_step(numel, step)
        index, first, numel = part.index, part.first, part.len
    # Most can be read where they are.
    if not is_in_order(tensor):
        tensor = tensor.detach()
        flat = (tensor if is_strided(tensor) else tensor.to_dense()).reshape(-1)
        part = flat[first : first + numel].resolve_conj().resolve_neg()
        tensor, first = part.cpu().contiguous(), 0
    address, size = tensor.data_ptr(), tensor.element_size()
    if numel and not address:
        raise TypeError(f"a {type(tensor).__name__} has no elements in memory, so it has no fingerprint")
    text = ctypes.create_string_buffer(ROOM)
    dtype = str(tensor.dtype)[6:].encode()
    library().ddp_mp_fingerprint(address + first * size, numel * size, dtype, index, text, ROOM)
    return text.value.decode()


def is_strided(tensor):
    """Tells whether a tensor is neither sparse nor in another layout."""
    return str(tensor.layout) == "torch.strided"


def is_in_order(tensor):
    """Tells whether the elements lie in this machine's memory in row-major order, and as they are."""
    if not (tensor.is_cpu and is_strided(tensor)):
        return False
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def diff(arguments):
    """Runs the program `ddp-mp-diff` with these arguments, of which the first is its name. Returns the exit code."""
    sys.stdout.flush()
    texts = [os.fsencode(argument) for argument in arguments]
    return library().ddp_mp_diff(len(texts), (ctypes.c_char_p * len(texts))(*texts))


def main():
    """The command `ddp-mp-diff`."""
    # Ends at a signal as any program does, also in the library.
    for number in [signal.SIGINT, signal.SIGPIPE]:
        signal.signal(number, signal.SIG_DFL)
    try:
        library()
    except ImportError as error:
        # The exit code 1 says that the runs differ.
        print(f"ddp-mp-diff: error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(diff(["ddp-mp-diff", *sys.argv[1:]]))
