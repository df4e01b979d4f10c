"""The rank of PyTorch for mixed_world.rs, which starts it.

mixed_world.py PORT
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)


def main(port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    # What init_process_group makes for the backend gloo, but for keys of its own in the store.
    group = dist.ProcessGroupGloo(dist.PrefixStore("world", store), 1, 2, TIMEOUT)

    tensor = torch.tensor([2.0, 20.0])
    group.allreduce([tensor]).wait()
    print(f"PyTorch rank 1: all_reduce of [2, 20] gives {tensor.tolist()}", flush=True)

    for root in range(group.size()):
        tensor = torch.tensor([7 * root])
        group.broadcast(tensor, root).wait()
        print(f"PyTorch rank 1: broadcast from {root} gives {tensor.item()}", flush=True)
    group.barrier().wait()


if __name__ == "__main__":
    main(int(sys.argv[1]))
