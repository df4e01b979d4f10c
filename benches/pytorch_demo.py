"""The demo in PyTorch: mp.spawn, Gloo, DistributedDataParallel, one dense layer; the same work."""

import argparse

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ports import free_port
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(rank, world_size, port, args):
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    torch.manual_seed(1)
    data = TensorDataset(torch.rand(4096, 20), torch.rand(4096, 1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    model = DistributedDataParallel(torch.nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for epoch in range(args.max_epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
        line = f"CPU:{rank} | Epoch: {epoch} | Batchsize: {args.batch_size} | Steps: {len(loader)}"
        print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--nproc-per-node", type=int, default=2)
    args = parser.parse_args()
    mp.spawn(main, (args.nproc_per_node, free_port(), args), nprocs=args.nproc_per_node)
