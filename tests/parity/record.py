"""Records what PyTorch does, for the tests to compare with.

record.py          writes the *.json files beside it
record.py --check  compares them with what this PyTorch does now, and fails at a difference
"""

import argparse
import json
import os
import pathlib
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FOLDER = pathlib.Path(__file__).parent


def digest(numbers):
    """FNV-1a, 64 bits, over the numbers as 8 little-endian bytes each."""
    value = 0xCBF29CE484222325
    for number in numbers:
        for byte in number.to_bytes(8, "little"):
            value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


def sampler():
    """[samples, ranks, shuffle, drop_last, seed, epoch, digest of all ranks' indices in turn]"""
    rows = []
    for n in [*range(1, 25), 39, 100, 1001, 4096]:
        for ranks in [1, 2, 3, 4, 7, 64]:
            for drop_last in [False, True]:
                if drop_last and n < ranks:
                    continue  # PyTorch deals nothing then; here that is an error
                for shuffle, seed, epoch in [
                    (False, 0, 0),
                    *((True, seed, epoch) for seed in [0, 42, 2**33 + 7] for epoch in [0, 3]),
                ]:
                    indices = []
                    for rank in range(ranks):
                        one = DistributedSampler(range(n), ranks, rank, shuffle, seed, drop_last)
                        one.set_epoch(epoch)
                        indices += list(one)
                    rows.append([n, ranks, shuffle, drop_last, seed, epoch, digest(indices)])
    return rows


SAMPLES, BATCH, EPOCHS, LR, SEED = 200, 16, 3, 0.1, 7
MODELS = {"linear": [], "mlp": [24, 12]}


def build(hidden):
    torch.manual_seed(SEED)
    widths = [20, *hidden, 1]
    layers = []
    for fan_in, fan_out in zip(widths, widths[1:]):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1]) if hidden else layers[0]


def values(model):
    return {name: tensor.flatten().tolist() for name, tensor in model.state_dict().items()}


def train(rank, world_size, port, hidden, answers):
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    torch.manual_seed(SEED + 1)
    data = TensorDataset(torch.rand(SAMPLES, 20), torch.rand(SAMPLES, 1))
    order = DistributedSampler(data, seed=SEED)
    loader = DataLoader(data, batch_size=BATCH, sampler=order)
    model = build(hidden)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    losses = []
    for epoch in range(EPOCHS):
        order.set_epoch(epoch)
        total = torch.zeros(2, dtype=torch.float64)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = mse_loss(ddp(inputs), targets)
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(inputs), len(inputs)], dtype=torch.float64)
        dist.all_reduce(total)
        losses.append((total[0] / total[1]).item())
    if rank == 0:
        answers.put((losses, values(model)))
    # Leave together, and without the destructors: with Gloo's threads still running they abort the
    # process now and then ("terminate called without an active exception").
    dist.barrier()
    os._exit(0)


def training():
    """Initial parameters, and losses and parameters after training, for 1 to 3 ranks."""
    cases = []
    for name, hidden in MODELS.items():
        for world_size in [1, 2, 3]:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            answers = mp.get_context("spawn").SimpleQueue()
            mp.spawn(train, (world_size, port, hidden, answers), nprocs=world_size)
            losses, final = answers.get()
            cases.append(
                {
                    "model": name,
                    "hidden": hidden,
                    "world_size": world_size,
                    "initial": values(build(hidden)),
                    "losses": losses,
                    "final": final,
                }
            )
    settings = {"samples": SAMPLES, "batch": BATCH, "epochs": EPOCHS, "lr": LR, "seed": SEED}
    return settings | {"cases": cases}


def text(recorded):
    """JSON with a line for each row, so that a difference can be read."""
    lines = ["{", f' "torch": {json.dumps(torch.__version__)},']
    if isinstance(recorded, list):
        lines += [' "rows": [', ",\n".join(json.dumps(row) for row in recorded), " ]"]
    else:
        cases = recorded.pop("cases")
        lines += [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in recorded.items()]
        lines += [' "cases": [', ",\n".join(json.dumps(case) for case in cases), " ]"]
    return "\n".join([*lines, "}", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    different = False
    for name, record in [("sampler", sampler), ("training", training)]:
        file = FOLDER / f"{name}.json"
        now = text(record())
        if not check:
            file.write_text(now)
            continue
        known = file.read_text()
        rows = [row for row in zip(known.splitlines(), now.splitlines()) if row[0] != row[1]]
        print(f"{file.name}: {'as recorded' if known == now else f'{len(rows)} lines differ'}")
        for before, after in rows[:3]:
            print(f"  recorded {before[:100]}\n  now      {after[:100]}")
        different |= known != now
    sys.exit(different)


if __name__ == "__main__":
    main()
