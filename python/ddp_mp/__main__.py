"""`python -m ddp_mp`: becomes the program `ddp-mp` beside this file; in a package without it, runs `ddp-mp-diff`."""

import os
import sys

from . import native


def main():
    program = os.path.join(os.path.dirname(__file__), "ddp-mp")
    if not os.path.exists(program):
        native.main()
    # Not a child process, so signals and exit codes are the program's.
    os.execv(program, ["ddp-mp", *sys.argv[1:]])


if __name__ == "__main__":
    main()
