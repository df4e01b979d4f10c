"""Has ranks in Rust and ranks of PyTorch in one group: each compares what it gets.

mixed_world.py MIXED_RANK             starts worlds of both, where MIXED_RANK is the rank in Rust
mixed_world.py RANK SIZE PORT         is a rank of PyTorch; rank 0 serves the store, and prints its port
"""

import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

TIMEOUT = timedelta(seconds=120)

# Who is which rank: R is Rust, P is PyTorch.
WORLDS = ["RP", "PR", "RPP", "PRR"]


def mine(rank, dtype):
    """What rank `rank` has: as whole numbers, so that sums are exact in every order."""
    return ((torch.arange(1000) * 7 + 1) * (rank + 1) % 1013).to(dtype)


def same(what, tensor, expected):
    if not torch.equal(tensor, expected):
        sys.exit(f"mixed_world.py: {what}: {tensor} is not {expected}")


def collectives(group, dtype):
    rank, size = group.rank(), group.size()
    every = [mine(rank, dtype) for rank in range(size)]
    zeros = lambda: [torch.zeros_like(tensor) for tensor in every]
    stack = torch.stack(every)

    for op, expected in [(ReduceOp.SUM, stack.sum(0)), (ReduceOp.MAX, stack.amax(0))]:
        tensor = mine(rank, dtype)
        group.allreduce([tensor], op).wait()
        same("all_reduce", tensor, expected)
    tensors = zeros()
    group.allgather(tensors, every[rank]).wait()
    same("all_gather", torch.stack(tensors), stack)
    for root in range(size):
        tensor = mine(rank, dtype)
        group.broadcast(tensor, root).wait()
        same("broadcast", tensor, every[root])
        tensor = mine(rank, dtype)
        group.reduce(tensor, root, ReduceOp.SUM).wait()
        tensors = zeros() if rank == root else []
        group.gather(tensors, every[rank], root).wait()
        if rank == root:
            same("reduce", tensor, stack.sum(0))
            same("gather", torch.stack(tensors), stack)
        tensor = torch.zeros_like(every[0])
        group.scatter(tensor, every if rank == root else [], root).wait()
        same("scatter", tensor, every[rank])
    tensor = torch.zeros_like(every[0])
    group._reduce_scatter_base(tensor, stack.view(-1)).wait()
    same("reduce_scatter", tensor, every[rank] * size)
    tensor = torch.zeros_like(stack)
    group.alltoall_base(tensor, stack + rank, [], []).wait()
    same("all_to_all", tensor, torch.stack([every[rank] + other for other in range(size)]))

    # Round the ring.
    following, last = (rank + 1) % size, (rank - 1) % size
    tensor = torch.zeros_like(every[0])
    if rank == 0:
        group.send([every[rank]], following, 3).wait()
        group.recv([tensor], last, 3).wait()
    else:
        group.recv([tensor], last, 3).wait()
        group.send([every[rank]], following, 3).wait()
    same("recv", tensor, every[last])


def be_rank(rank, size, port):
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=TIMEOUT, wait_for_workers=False)
    if rank == 0:
        print(store.port, flush=True)
    store.set(f"from {rank}", bytes([rank, 255]))
    last = store.get(f"from {size - 1}")
    if last != bytes([size - 1, 255]):
        sys.exit(f"mixed_world.py: the store has {last}")
    group = dist.ProcessGroupGloo(dist.PrefixStore("mixed", store), rank, size, TIMEOUT)
    for dtype in [torch.float32, torch.int64]:
        collectives(group, dtype)
    # No two orders of addition need have the same bits here, but all ranks must.
    total = (mine(rank, torch.float32) * 0.1).sin()
    group.allreduce([total]).wait()
    totals = [torch.zeros_like(total) for _ in range(size)]
    group.allgather(totals, total).wait()
    for other in totals:
        same("the bits of a sum", other, total)
    group.barrier().wait()


def run(world, program):
    command = {"R": [program], "P": [sys.executable, __file__]}
    ranks = []

    def start(rank, port, **options):
        arguments = [str(it) for it in (rank, len(world), port)]
        ranks.append(subprocess.Popen(command[world[rank]] + arguments, **options))
        return ranks[-1]

    try:
        port = start(0, 0, stdout=subprocess.PIPE, text=True).stdout.readline().strip()
        for rank in range(1, len(world)):
            start(rank, port)
        # Whoever fails takes the others along, within the timeout.
        if any([rank.wait() for rank in ranks]):
            sys.exit(f"mixed_world.py: {world} failed")
    finally:
        for rank in ranks:
            rank.kill()


def main():
    if len(sys.argv) == 4:
        return be_rank(*map(int, sys.argv[1:]))
    [program] = sys.argv[1:]
    names = {"R": "Rust", "P": "PyTorch"}
    for world in WORLDS:
        run(world, program)
        print(f"{', '.join(names[it] for it in world):24}have the same values")


if __name__ == "__main__":
    main()
