"""Makes known mistakes of loops on two ranks, and has `ddp-mp-diff` name the step and the cause: known_mistakes.py

Each is what people have reported of loops that train in parallel, made anew with a small model. None of them raises an error.
"""

import pathlib
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "python"), str(REPOSITORY / "benches")]
import ddp_mp  # noqa: E402
from checks import check  # noqa: E402
from ports import free_port  # noqa: E402

DIFF = [sys.executable, "-c", "from ddp_mp.native import main; main()"]
RANKS, EPOCHS, LENGTH, WORDS = 2, 2, 6, 11

# The mistakes, each with the step that is named, its first line that differs, and the cause.
MISTAKES = {
    "own tokens": (1, "loss        differs on all ranks", "divides by what each rank has itself, such as its tokens"),
    "wrapper bypassed": (0, "averages    5 of 5 on all ranks", "In B each rank steps with gradients of its own: they are not averaged"),
    "clipped before": (0, "averages    5 of 5 on all ranks", "In A all averages together have the norm 0.1"),
    "schedule by epoch": (1, "lr          differs on all ranks", "B's learning rate changes between epochs only"),
    "no set_epoch": (8, "samples     differs on all ranks", "B begins epoch 1 with the samples of the epoch before"),
}


class Tagger(nn.Module):
    """Says something about each word of a sentence."""

    def __init__(self):
        super().__init__()
        self.words, self.hidden, self.tags = nn.Embedding(WORDS, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, sentences):
        return self.tags(torch.tanh(self.hidden(self.words(sentences))))


def sentences():
    """Sentences of different lengths, and a tag for each word; -100 where a sentence has ended."""
    data = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (64, LENGTH), generator=data)
    lengths = torch.randint(1, LENGTH + 1, (64, 1), generator=data)
    tags = torch.where(torch.arange(LENGTH) < lengths, words % 3, -100)
    return TensorDataset(torch.arange(64), words, tags)


def loss_of(outputs, tags, mistake):
    """The mean over the words of all ranks."""
    total = nn.functional.cross_entropy(outputs.flatten(0, 1), tags.flatten(), ignore_index=-100, reduction="sum")
    count = (tags != -100).sum()
    if mistake == "own tokens":
        return total / count
    dist.all_reduce(count)
    return total / count * dist.get_world_size()  # the wrapper divides by it


def clip(model, mistake):
    if mistake == "clipped before":
        return
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def backward(model, loss, mistake):
    """Averages the gradients; by hand where the mistake is to clip before."""
    loss.backward()
    if mistake == "clipped before":
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def train_all(rank, folder, address):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    for mistake in [None, *MISTAKES]:
        train(folder, mistake)
    dist.barrier()
    dist.destroy_process_group()


def train(folder, mistake):
    torch.manual_seed(0)
    model = DistributedDataParallel(Tagger())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = sentences()
    sampler = DistributedSampler(data)
    recorder = ddp_mp.record(model, optimizer, folder / (mistake or "right"), modules=True)
    for epoch in range(EPOCHS):
        if mistake != "no set_epoch":
            sampler.set_epoch(epoch)
        recorder.epoch(epoch)
        for indices, words, tags in DataLoader(data, batch_size=4, sampler=sampler):
            recorder.samples(indices)
            recorder.batch(words, tags)
            forward = model.module if mistake in ["wrapper bypassed", "clipped before"] else model
            loss = loss_of(forward(words), tags, mistake)
            recorder.loss(loss)
            optimizer.zero_grad()
            backward(model, loss, mistake)
            clip(model, mistake)
            optimizer.step()
            if mistake != "schedule by epoch":
                schedule.step()
        if mistake == "schedule by epoch":
            schedule.step()


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        mp.spawn(train_all, (folder, f"tcp://127.0.0.1:{free_port()}"), nprocs=RANKS)
        for mistake, (step, line, cause) in MISTAKES.items():
            environment = {"PYTHONPATH": str(REPOSITORY / "python"), "PATH": "/usr/bin:/bin"}
            done = subprocess.run([*DIFF, "right", mistake], capture_output=True, text=True, env=environment, cwd=folder)
            words = " ".join(done.stdout.split())
            print(f"\n--- {mistake}\n{done.stdout}{done.stderr}", flush=True)
            check(done.returncode == 1, mistake)
            check(f"Step {step} is the first that differs" in done.stdout, mistake)
            check(line in done.stdout and cause in words, mistake)


if __name__ == "__main__":
    main()
