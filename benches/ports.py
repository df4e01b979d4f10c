"""Ports for servers, of which the tests in Rust have the same blocks (`free_port` of tests/harness.rs)."""

import functools
import itertools
import os
import socket

# Below the ports that the system gives to connections.
FIRST, LAST, LEN = 10_000, 29_000, 500


@functools.cache
def block():
    """The first port of a block that no other program has until this one ends, and a name that one process can have."""
    for first in range(FIRST, LAST, LEN):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0ddp-mp test ports {first}")
        except OSError:
            name.close()
            continue
        return first, name
    raise RuntimeError(f"all blocks of ports from {FIRST} to {LAST} are taken: end the programs that have them")


# Programs that run one after the other begin at different ports, as in Rust.
CALLS = itertools.count(97 * os.getpid())


def free_port():
    """Returns a port that nobody else takes before its server does, and that none of the last 500 calls has returned."""
    first, _ = block()
    for call in itertools.islice(CALLS, LEN):
        port = first + call % LEN
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"all ports from {first} to {first + LEN - 1} are taken")
