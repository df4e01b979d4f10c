"""A training step in PyTorch: mp.spawn, Gloo, DistributedDataParallel. Prints the median as JSON.

pytorch_step.py linear|mlp|cnn|gpt RANKS STEPS [OPTION...]

An OPTION is one of DistributedDataParallel's that is True or False, such as gradient_as_bucket_view: it is set to True.
The optimizer is SGD. A gpt is that of configs/gpt.toml, with its batches, AdamW and clipping.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ports import free_port
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

HIDDEN = {"linear": [], "mlp": [1024, 1024, 1024]}


def build(kind, samples=32):
    """A model, its loss, and so many samples."""
    if kind == "gpt":
        import pytorch_gpt  # it reads files of the repository, which the pack for GPUs lacks

        return pytorch_gpt.build()
    if kind == "cnn":
        layers, channels_in = [nn.Unflatten(1, (1, 28, 28))], 1
        for channels in [16, 32]:
            layers += [nn.Conv2d(channels_in, channels, 3, padding=1), nn.BatchNorm2d(channels)]
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
            channels_in = channels
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels_in * 7 * 7, 10))
        return model, cross_entropy, torch.rand(samples, 28 * 28), torch.randint(10, (samples,))
    widths = [20, *HIDDEN[kind], 1]
    layers = []
    for fan_in, fan_out in zip(widths, widths[1:]):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1]), mse_loss, torch.rand(samples, 20), torch.rand(samples, 1)


def optimizer_of(kind, model):
    """The optimizer, and the largest norm of the gradients, if they are clipped."""
    if kind == "gpt":
        import pytorch_gpt

        return pytorch_gpt.optimizer_of(model)
    return torch.optim.SGD(model.parameters(), lr=0.001), None


def main(rank, world_size, port, kind, steps, options):
    torch.set_num_threads(max(1, os.cpu_count() // world_size))
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model, criterion, inputs, targets = build(kind)
    model = DistributedDataParallel(model, **dict.fromkeys(options, True))
    optimizer, max_norm = optimizer_of(kind, model)
    times = []
    for _ in range(20 + steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        times.append(time.perf_counter() - began)
    if rank == 0:
        times = sorted(times[20:])
        print(json.dumps({"us_per_step": times[len(times) // 2] * 1e6}), flush=True)
    dist.barrier()
    os._exit(0)  # Gloo's threads abort a process that ends with destructors now and then


if __name__ == "__main__":
    kind, ranks, steps, options = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    mp.spawn(main, (ranks, free_port(), kind, steps, options), nprocs=ranks)
