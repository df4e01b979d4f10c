"""What is kept of a CUDA library: a made-up one, with code for two architectures."""

import struct
import unittest

from prune_fatbin import MAGIC, containers, entries, prune, sections

PTX, MACHINE_CODE = 1, 2


def entry(kind, architecture, code):
    code = code.ljust(16, b"-")
    return struct.pack("<HHIQ", kind, 0, 64, len(code)).ljust(28, b"\0") + struct.pack("<I", architecture).ljust(36, b"\0") + code


def container(*all_entries):
    content = b"".join(all_entries)
    return struct.pack("<IHHQ", MAGIC, 1, 16, len(content)) + content


def library(**contents):
    """A 64-bit ELF file with these sections."""
    names, body, headers = b"\0", b"", []
    for name, content in contents.items():
        headers.append((len(names), 1, 0, 0, 64 + len(body), len(content)))
        names, body = names + name.replace("fatbin_", ".nv_fatbin").encode() + b"\0", body + content
    headers.append((0, 3, 0, 0, 64 + len(body), len(names)))
    body += names
    begin = bytearray(64)
    struct.pack_into("<Q", begin, 0x28, 64 + len(body))
    struct.pack_into("<HHH", begin, 0x3A, 64, len(headers), len(headers) - 1)
    return bytes(begin) + body + b"".join(struct.pack("<IIQQQQ", *header).ljust(64, b"\0") for header in headers)


class Prune(unittest.TestCase):
    def setUp(self):
        old, new = entry(MACHINE_CODE, 80, b"old"), entry(MACHINE_CODE, 90, b"new")
        both = container(old, new, entry(PTX, 90, b"text"))
        self.new = new
        self.library = library(fatbin_=both + container(old), __nv_relfatbin=container(new), text=b"old and new")

    def test_only_the_code_for_one_architecture_is_left_and_nothing_moves(self):
        pruned = prune(self.library, 90)
        self.assertEqual(len(pruned), len(self.library))
        found = {name: (begin, size) for name, begin, size in sections(pruned)}
        begin, size = found[".nv_fatbin"]
        first, *others = containers(pruned, begin, begin + size)
        self.assertEqual(pruned[first[1] : first[2]], self.new)
        self.assertEqual(list(entries(pruned, first[1], first[2], 90)), [self.new])
        self.assertTrue(all(at == end for _, at, end in others))
        begin, size = found["__nv_relfatbin"]
        self.assertTrue(all(at == end for _, at, end in containers(pruned, begin, begin + size)))
        self.assertEqual((pruned.count(b"old"), pruned.count(b"new")), (1, 2))  # with those of the text

    def test_a_library_without_that_architecture_is_refused(self):
        with self.assertRaisesRegex(ValueError, "no machine code for sm_100"):
            prune(self.library, 100)


if __name__ == "__main__":
    unittest.main()
