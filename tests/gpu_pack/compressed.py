"""Files that xz reads. The large dictionary finds the code that all programs share, and so lets the fastest preset do."""

import lzma

FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 64 << 20}]


def create(file):
    """Opens a new file. What is written into it gets compressed."""
    return lzma.open(file, "wb", filters=FILTERS)
