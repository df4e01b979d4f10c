"""Trains an MLP with two processes of PyTorch's DistributedDataParallel, and writes what it began with and what it has learned.

pytorch_two_ranks.py FOLDER cuda|cpu STEPS BATCH HIDDEN,... LR

Rank 0 writes initial.safetensors, data.safetensors and trained.safetensors. The samples are taken in their order, as
DistributedSampler with shuffle=False gives them to the ranks.
"""

import os
import pathlib
import sys

import pytorch_step
import torch
import torch.distributed as dist
from safetensors_file import save
from torch.nn.parallel import DistributedDataParallel


def main(folder, device, steps, batch, hidden, lr):
    # Both ranks have the first GPU.
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    pytorch_step.HIDDEN["mlp"] = list(map(int, hidden.split(",")))
    model, criterion, inputs, targets = pytorch_step.build("mlp", ranks * steps * batch)
    if rank == 0:
        save(model.state_dict(), folder / "initial.safetensors")
        save({"inputs": inputs, "targets": targets}, folder / "data.safetensors")
    parallel = DistributedDataParallel(model.to(device), device_ids=[0] if device == "cuda" else None)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=lr, fused=True)  # as ddp-mp has it
    for indices in torch.arange(rank, len(inputs), ranks).split(batch):
        optimizer.zero_grad()
        loss = criterion(parallel(inputs[indices].to(device)), targets[indices].to(device))
        loss.backward()
        optimizer.step()
    if rank == 0:
        save(model.cpu().state_dict(), folder / "trained.safetensors")
    dist.barrier()
    os._exit(0)  # Gloo's threads abort a process that ends with destructors now and then


if __name__ == "__main__":
    folder, device, steps, batch, hidden, lr = sys.argv[1:]
    main(pathlib.Path(folder), device, int(steps), int(batch), hidden, float(lr))
