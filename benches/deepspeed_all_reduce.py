"""All-reduce over DeepSpeed's shared memory: float32, sum. Prints a JSON object for each size.

deepspeed_all_reduce.py                 compiles DeepSpeed's operations, which takes about a minute the first time
deepspeed_all_reduce.py RANKS BYTES...  starts the ranks with mp.spawn

Of DeepSpeed's collectives on the CPU, inference_all_reduce alone uses shared memory. The others use Gloo.
"""

import os
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ports import free_port
from pytorch_all_reduce import end, measure

os.environ["DS_ACCELERATOR"] = "cpu"  # which DeepSpeed reads when it is imported
# DeepSpeed starts ninja, which pip has installed beside this Python.
os.environ["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"

import deepspeed
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder


def main(rank, world_size, port, sizes):
    torch.set_num_threads(1)
    # DeepSpeed uses shared memory if as many ranks are on this machine, LOCAL_SIZE, as there are in all.
    variables = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_SIZE": world_size}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})
    deepspeed.init_distributed("gloo", rank=rank, world_size=world_size, auto_mpi_discovery=False, verbose=False)
    dist.barrier()
    # All ranks have opened all files. DeepSpeed would leave them behind.
    pathlib.Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{port}_{rank}").unlink()
    measure(rank, deepspeed.comm.inference_all_reduce, sizes)
    end()


if __name__ == "__main__":
    # Each rank would compile the operations.
    if ShareMemCommBuilder().load().vector_kernel_level() < 1:
        sys.exit("its operations for float32 need AVX2, which this CPU lacks")
    if len(sys.argv) > 1:
        ranks, *sizes = map(int, sys.argv[1:])
        mp.spawn(main, (ranks, free_port(), sizes), nprocs=ranks)
