"""Trains one model with PyTorch's DistributedDataParallel and NCCL on one GPU, and prints the speed of each epoch as JSON.

pytorch_ddp.py linear|mlp|cnn|wide float32|bf16 STEPS BATCH EPOCHS cuda|cpu [tuned]

The data lie on the GPU in the order in which they are used: a step takes a slice. On the CPU it uses Gloo. `tuned` has
gradients in buckets, a static graph and a fused optimizer.
"""

import json
import os
import sys
import time

import pytorch_step
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

pytorch_step.HIDDEN["wide"] = [8192, 8192, 8192]


def main(kind, dtype, steps, batch, epochs, device, tuned):
    on_gpu = device == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model, criterion, inputs, targets = pytorch_step.build(kind, batch * steps)
    model, inputs, targets = model.to(device), inputs.to(device), targets.to(device)
    options = {"gradient_as_bucket_view": True, "static_graph": True} if tuned else {}
    model = DistributedDataParallel(model, device_ids=[0] if on_gpu else None, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, fused=True if tuned else None)
    speeds = []
    for _ in range(epochs):
        began, total = time.perf_counter(), torch.zeros((), device=device)
        for at in range(0, batch * steps, batch):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == "bf16"):
                loss = criterion(model(inputs[at : at + batch]), targets[at : at + batch])
            loss.backward()
            optimizer.step()
            total += loss.detach()
        total.item()  # waits for the GPU
        speeds.append(steps / (time.perf_counter() - began))
    print(json.dumps({"steps_per_second": speeds}), flush=True)
    if on_gpu:
        dist.destroy_process_group()
    os._exit(0)  # Gloo's threads abort a process that ends with destructors now and then


if __name__ == "__main__":
    kind, dtype, steps, batch, epochs, device, *tuned = sys.argv[1:]
    main(kind, dtype, int(steps), int(batch), int(epochs), device, bool(tuned))
