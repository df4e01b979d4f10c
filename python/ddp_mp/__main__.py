"""The command `ddp-mp`, also as `python -m ddp_mp`: becomes the program beside this file."""

import os
import sys


def main():
    # Not a child process, so signals and exit codes are the program's.
    program = os.path.join(os.path.dirname(__file__), "ddp-mp")
    os.execv(program, ["ddp-mp", *sys.argv[1:]])


if __name__ == "__main__":
    main()
