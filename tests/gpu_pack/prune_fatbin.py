"""Keeps the machine code for one GPU architecture in a CUDA library, and makes the rest zeros, so that it compresses.

The section .nv_fatbin is a row of containers. Each begins with a header (magic 0xBA55ED50 u32, version u16, header size u16,
size u64), and so does each entry in it (kind u16: 1 PTX, 2 machine code; version u16; header size u32; size u64; ...;
architecture u32 at 28). What is kept moves to the front of its container, and the container's size shrinks: no address
changes. Those of __nv_relfatbin, from which the driver links code for GPUs that have none in .nv_fatbin, become empty.
"""

import struct

MAGIC = 0xBA55ED50
MACHINE_CODE = 2
SMALLEST_ENTRY = 64  # bytes of an entry's header


def prune(library, architecture):
    """Returns the library with the code for `architecture` (such as 90 for sm_90) alone."""
    library, kept = bytearray(library), 0
    for name, begin, size in sections(library):
        if name not in ["__nv_relfatbin", ".nv_fatbin"]:
            continue
        for at, first, end in containers(library, begin, begin + size):
            code = b""
            if name == ".nv_fatbin":
                code = b"".join(entries(library, first, end, architecture))
            library[first:end] = code.ljust(end - first, b"\0")
            struct.pack_into("<Q", library, at + 8, len(code))
            kept += len(code)
    if kept == 0:
        raise ValueError(f"the library has no machine code for sm_{architecture}")
    return bytes(library)


def sections(elf):
    """Yields the name, the offset and the size of each section of a 64-bit ELF file."""
    [table] = struct.unpack_from("<Q", elf, 0x28)
    width, count, of_names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + index * width) for index in range(count)]
    names = headers[of_names][4]
    for name, _, _, _, offset, size in headers:
        begin = names + name
        yield elf[begin : elf.index(0, begin)].decode(), offset, size


def containers(library, at, end):
    """Yields where each container begins, and where its entries begin and end."""
    while at + 16 <= end:
        magic, _, header, size = struct.unpack_from("<IHHQ", library, at)
        if magic != MAGIC:
            at += 8  # they are aligned
            continue
        first = at + header
        yield at, first, first + size
        at = first + size


def entries(library, at, end, architecture):
    """Yields the entries with machine code for `architecture`."""
    while at + SMALLEST_ENTRY <= end:
        kind, _, header, size = struct.unpack_from("<HHIQ", library, at)
        [built_for] = struct.unpack_from("<I", library, at + 28)
        if kind == MACHINE_CODE and built_for == architecture:
            yield bytes(library[at : at + header + size])
        at += header + size
