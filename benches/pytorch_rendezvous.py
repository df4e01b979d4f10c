"""How long two processes take to form a group with PyTorch, once both have started. Prints ms as JSON.

pytorch_rendezvous.py ROUNDS
"""

import json
import os
import sys
import time

import torch.distributed as dist
import torch.multiprocessing as mp
from ports import free_port


def main(rank, port, start, times):
    start.wait()
    began = time.perf_counter()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    dist.barrier()
    times.put((time.perf_counter() - began) * 1e3)
    start.wait()
    times.close()
    times.join_thread()
    os._exit(0)  # Gloo's threads abort a process that ends with destructors now and then


if __name__ == "__main__":
    slowest = []
    for _ in range(int(sys.argv[1])):
        context = mp.get_context("spawn")
        times = context.Queue()
        mp.spawn(main, (free_port(), context.Barrier(2), times), nprocs=2)
        slowest.append(max(times.get(), times.get()))
    print(json.dumps({"median_ms": sorted(slowest)[len(slowest) // 2]}))
