"""Runs the demo in PyTorch and here alternately, as whole processes, and prints the ratio of the medians.

compare.py PROGRAM [PAIRS]
"""

import pathlib
import statistics
import subprocess
import sys
import time

FOLDER = pathlib.Path(__file__).parent


def seconds(command):
    began = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    elapsed = time.perf_counter() - began
    # PyTorch's processes write into each other's lines, and may abort when all is done (its Gloo threads
    # outlive them): what counts is that every rank came to the end of every epoch.
    return elapsed, done.stdout.count("Batchsize: 32 | Steps: 64")


def main():
    program = sys.argv[1]
    pairs = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    flags = ["--max-epochs=2", "--batch-size=32", "--nproc-per-node=2"]
    theirs, ours = [], []
    for _ in range(pairs):
        their_time, their_epochs = seconds([sys.executable, FOLDER / "ddp_mp.py", *flags])
        our_time, our_epochs = seconds([program, *flags])
        if (their_epochs, our_epochs) != (4, 4):
            sys.exit(f"not all work was done: {their_epochs} and {our_epochs} of 4 epochs")
        theirs.append(their_time)
        ours.append(our_time)
    their_median, our_median = statistics.median(theirs), statistics.median(ours)
    print("the whole demo, 2 ranks, 2 epochs      PyTorch     ddp-mp    ratio")
    print(f"median of {pairs} pairs                      {their_median:6.2f} s   {our_median:6.3f} s", end="")
    print(f"   {their_median / our_median:5.1f}")


if __name__ == "__main__":
    main()
