"""All-reduce over Gloo: float32, sum. Prints a JSON object for each size.

pytorch_all_reduce.py RANKS BYTES...                                 starts the ranks with mp.spawn
torchrun --nproc-per-node=RANKS pytorch_all_reduce.py RANKS BYTES... is one of the ranks
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ports import free_port


def seconds(all_reduce, tensor, iters):
    dist.barrier()
    began = time.perf_counter()
    for _ in range(iters):
        all_reduce(tensor)
    slowest = torch.tensor((time.perf_counter() - began) / iters, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def measure(rank, all_reduce, sizes):
    """Measures the function `all_reduce`; rank 0 prints the times."""
    for size in sizes:
        tensor = torch.zeros(size // 4)
        warm_up = seconds(all_reduce, tensor, 3)
        # As long as ddp-mp's bench: a quarter of a second, in five rounds.
        iters = max(1, int(0.05 / warm_up))
        times = sorted(seconds(all_reduce, tensor, iters) for _ in range(5))
        if rank == 0:
            print(json.dumps({"bytes": size, "time_us": times[2] * 1e6}), flush=True)


def end():
    """Leaves together, and without the destructors: with Gloo's threads still running they abort the process now and
    then."""
    dist.barrier()
    os._exit(0)


def main(rank, world_size, address, sizes):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    measure(rank, dist.all_reduce, sizes)
    end()


if __name__ == "__main__":
    ranks, *sizes = map(int, sys.argv[1:])
    if "LOCAL_RANK" in os.environ:  # torchrun started this process
        main(int(os.environ["RANK"]), ranks, "env://", sizes)
    mp.spawn(main, (ranks, f"tcp://127.0.0.1:{free_port()}", sizes), nprocs=ranks)
