"""Records PyTorch loops with ddp_mp.record, and compares them with each other and with ddp-mp: records.py PROGRAM

A wrong port of a small model has one change. `ddp-mp diff` must find each of five in the layer that is wrong.
"""

import itertools
import json
import os
import pathlib
import signal
import sys
import tempfile
from collections import OrderedDict

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "python"))
sys.path += [str(REPOSITORY / "tests" / "parity"), str(REPOSITORY / "benches")]
import ddp_mp  # noqa: E402
from checks import check, run  # noqa: E402
from ports import free_port  # noqa: E402
import record as parity  # noqa: E402
from record import CHANNELS, CLASSES, SIDE  # noqa: E402

STEPS, BATCH = 6, 8


def build():
    """A convolution, a batch norm and three dense layers, one of them square."""
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(1, 4, 3),
            norm=nn.BatchNorm2d(4),
            flat=nn.Flatten(),
            first=nn.Linear(144, 16),
            tanh=nn.Tanh(),
            square=nn.Linear(16, 16),
            last=nn.Linear(16, 1),
        )
    )


def train(file, change=None):
    """Trains a few steps and records them. Keeps the tensors of the first one."""
    model, reduction, decay_bias = build(), "mean", 0.0
    with torch.no_grad():
        if change == "initialisation":
            model.first.weight.mul_(1.5)
        if change == "transposed":
            model.square.weight.copy_(model.square.weight.t().clone())
    if change == "momentum":
        model.norm.momentum = 0.9
    if change == "sum":
        reduction = "sum"
    if change == "decay":
        decay_bias = 0.1
    last_bias = [model.last.bias]
    others = [parameter for parameter in model.parameters() if parameter is not last_bias[0]]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": last_bias, "weight_decay": decay_bias}]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    recorder = ddp_mp.record(model, optimizer, file, keep=file.with_suffix(".safetensors"))
    data = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        inputs = torch.rand(BATCH, 1, 8, 8, generator=data)
        targets = inputs.mean((1, 2, 3)).unsqueeze(1)
        recorder.batch(inputs, targets)
        loss = nn.functional.mse_loss(model(inputs), targets, reduction=reduction)
        recorder.loss(loss)
        loss.backward()
        optimizer.step()


def diff(program, a, b, code):
    """What `ddp-mp diff` prints of two records."""
    return run(program, "diff", a, b, code=code).stdout


def step_lines(file):
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [line for line in lines if line["event"] == "step"]


def equal_and_wrong_ports(program, folder):
    for name in ["good", "again"]:
        train(folder / name)
    check("Equal: the start and 6 steps" in diff(program, folder / "good", folder / "again", 0), "equal runs differ")
    for change, first, tensor, kept in [
        ("initialisation", "The runs differ before step 0", "`first.weight`", "before.first.weight"),
        ("transposed", "The runs differ before step 0", "`square.weight`", "before.square.weight"),
        ("sum", "loss        differs on rank 0", "`last.bias`", "loss.0"),
        ("decay", "parameters  1 of 10 on rank 0: `last.bias`", "`last.bias`", "parameter.last.bias"),
        ("momentum", "on rank 0: `norm.running_mean`", "`norm.running_var`", "buffer.norm.running_mean"),
    ]:
        train(folder / change, change=change)
        found = diff(program, folder / "good", folder / change, 1)
        check(first in found and tensor in found, f"{change}: {found}")
        found = diff(program, folder / "good.safetensors", folder / f"{change}.safetensors", 1)
        row = found.splitlines()[5].split()
        check(row[0] == kept and float(row[-2]) > 0, f"{change}: {found}")
        print(f"records: the wrong port `{change}` is found", flush=True)


# What a right port may have besides: the model, what the loop does, the flags of ddp-mp, and a part of the output.
PORTS = {
    "plain": ("mlp", {"momentum": 0}, []),
    "clip": ("mlp", {"clip": 0.1}, ["--max-grad-norm=0.1"]),
    "clip and accumulate": ("mlp", {"clip": 0.1, "batches": 2}, ["--max-grad-norm=0.1", "--grad-accum-steps=2"]),
    "bfloat16": ("mlp", {"amp": torch.bfloat16, "clip": 0.1}, ["--amp=bf16", "--max-grad-norm=0.1"]),
    # The first steps overflow, and are skipped.
    "float16": ("mlp", {"amp": torch.float16}, ["--amp=fp16"]),
    # The optimizer unscales the gradients itself. Its momentum would begin with memory that nothing was written to, because
    # the first step is skipped.
    "float16 and fused": ("mlp", {"amp": torch.float16, "fused": True, "momentum": 0}, ["--amp=fp16"]),
    "float16 and clip": ("mlp", {"amp": torch.float16, "clip": 0.1}, ["--amp=fp16", "--max-grad-norm=0.1"]),
    "float16 and accumulate": ("mlp", {"amp": torch.float16, "batches": 2}, ["--amp=fp16", "--grad-accum-steps=2"]),
    "batch norm": ("cnn", {}, []),
    "batch norm and accumulate": ("cnn", {"batches": 2}, ["--grad-accum-steps=2"]),
    "own buffers": ("cnn", {"ddp": {"broadcast_buffers": False}}, ["--no-broadcast-buffers"]),
    "cosine": ("mlp", {"schedule": "cosine"}, ["--schedule=cosine"]),
    "warm-up": ("mlp", {"schedule": "warm-up"}, ["--warmup-steps=5"]),
    "milestones": ("mlp", {"schedule": "milestones"}, ["--schedule=multi-step", "--milestones=1,2"]),
    "zero": ("mlp", {"zero": True, "clip": 0.1}, ["--zero", "--max-grad-norm=0.1"]),
    "shared model": ("mlp", {"clip": 0.1}, ["--share-model", "--max-grad-norm=0.1"]),
    "modules": ("mlp", {"record": {"modules": True}}, ["--record-modules"]),
    # Each step has a part of the largest weight.
    "parts": ("wide mlp", {"clip": 0.1}, ["--max-grad-norm=0.1"]),
    "whole": ("wide mlp", {"clip": 0.1, "record": {"whole": True}}, ["--max-grad-norm=0.1", "--record-whole"]),
}
HIDDEN = {"mlp": [24, 12], "wide mlp": [300, 300]}
MODELS = {**parity.MODELS, "wide mlp": lambda: parity.build(HIDDEN["wide mlp"])}
EPOCHS, SAMPLES, LR = 3, 64, 0.07


def ports_on_rank(rank, ranks, address, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    for name in PORTS:
        train_port(rank, ranks, folder / name, name)
    dist.barrier()
    dist.destroy_process_group()


def train_port(rank, ranks, folder, name):
    """A usual training loop of PyTorch."""
    kind, does, _ = PORTS[name]
    model = MODELS[kind]()
    if ranks > 1:
        model = nn.parallel.DistributedDataParallel(model, **does.get("ddp", {}))
    if "zero" in does and ranks > 1:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=LR, momentum=0.9)
    else:
        momentum = does.get("momentum", 0.9)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum, fused=does.get("fused"))
    amp = does.get("amp")
    scaler = torch.amp.GradScaler("cpu", enabled=amp is torch.float16)
    kept = folder / f"{ranks}.theirs.safetensors"
    options = does.get("record", {})
    recorder = ddp_mp.record(model, optimizer, folder / f"{ranks}.theirs", keep=kept, keep_step=2, **options)
    by_step = does.get("schedule") == "warm-up"
    schedulers = torch.optim.lr_scheduler
    schedule = {
        "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, T_max=EPOCHS),
        "warm-up": lambda: schedulers.LinearLR(optimizer, start_factor=1 / 3, total_iters=5),
        "milestones": lambda: schedulers.MultiStepLR(optimizer, [1, 2], gamma=0.1),
    }.get(does.get("schedule"), lambda: None)()
    inputs, targets = (torch.from_numpy(numpy.load(folder / file)) for file in ["x.npy", "y.npy"])
    loss_of = nn.functional.cross_entropy if kind == "cnn" else nn.functional.mse_loss
    batches = torch.arange(rank, SAMPLES, ranks).split(BATCH)
    of_step = does.get("batches", 1)
    for epoch in range(EPOCHS):
        recorder.epoch(epoch)
        for first in range(0, len(batches), of_step):
            optimizer.zero_grad()
            for number, rows in enumerate(batches[first : first + of_step]):
                recorder.samples(rows)
                recorder.batch(inputs[rows], targets[rows])
                syncs = ranks == 1 or number + 1 == of_step
                with torch.enable_grad() if syncs else model.no_sync():
                    with torch.autocast("cpu", amp, enabled=amp is not None):
                        loss = loss_of(model(inputs[rows]), targets[rows])
                    recorder.loss(loss)
                    scaler.scale(loss / of_step).backward()
            if "clip" in does:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), does["clip"])
            scaler.step(optimizer)
            scaler.update()
            if schedule and by_step:
                schedule.step()
        if schedule and not by_step:
            schedule.step()


def port_files(folder, name):
    """Writes the data and the first state of a port, and returns the flags that read them."""
    kind, _, _ = PORTS[name]
    folder.mkdir()
    torch.manual_seed(0)
    inputs = torch.rand(SAMPLES, SIDE * SIDE if kind == "cnn" else 20)
    targets = torch.randint(CLASSES, (SAMPLES,)) if kind == "cnn" else 10 * torch.rand(SAMPLES, 1)
    numpy.save(folder / "x.npy", inputs.numpy())
    numpy.save(folder / "y.npy", targets.numpy())
    state = MODELS[kind]().state_dict().items()
    save_file({name: tensor.contiguous() for name, tensor in state}, folder / "start.safetensors")
    files = [f"--dataset=npy:{folder}/x.npy,{folder}/y.npy", f"--init-from={folder}/start.safetensors"]
    if kind == "cnn":
        return [*files, "--model=cnn", f"--channels={CHANNELS[0]},{CHANNELS[1]}", "--loss=cross-entropy"]
    return [*files, "--model=mlp", f"--hidden={','.join(map(str, HIDDEN[kind]))}"]


def right_ports(program, folder):
    """Loops of PyTorch and runs of the program that do the same, on one rank and on two."""
    files = {name: port_files(folder / name, name) for name in PORTS}
    common = [f"--max-epochs={EPOCHS}", f"--batch-size={BATCH}", f"--lr={LR}", "--no-shuffle", "--quiet"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for name, (_, does, _) in PORTS.items():
        train_port(0, 1, folder / name, name)
        start, first = map(json.loads, (folder / name / "1.theirs").read_text().splitlines()[1:3])
        is_skipped = first["parameters"] == start["parameters"]
        check(is_skipped == (does.get("amp") is torch.float16), f"{name}: whether the first step is skipped")
    mp.spawn(ports_on_rank, (2, f"tcp://127.0.0.1:{free_port()}", folder), nprocs=2)
    for (name, (_, does, flags)), ranks in itertools.product(PORTS.items(), [1, 2]):
        here = folder / name
        # The tensors of the last rank: rank 0 is seldom wrong alone.
        kept = [f"--keep={here}/{ranks}.kept", "--keep-step=2", f"--keep-rank={ranks - 1}"]
        momentum = f"--momentum={does.get('momentum', 0.9)}"
        ours = [f"--nproc-per-node={ranks}", momentum, f"--record={here}/{ranks}.ours", *kept]
        command = [program, *common, *files[name], *flags, *ours]
        run(*command, env=environment)
        found = diff(program, here / f"{ranks}.theirs", here / f"{ranks}.ours", 0)
        steps = EPOCHS * SAMPLES // BATCH // ranks // does.get("batches", 1)
        check(f"Equal: the start and {steps} steps" in found, f"{name}: {found}")
        theirs = f"2.theirs.{ranks - 1}.safetensors" if ranks > 1 else "1.theirs.safetensors"
        found = diff(program, here / theirs, here / f"{ranks}.kept", 0)
        # Batch, output and loss; and of six parameters the values before and after, the own and the averaged gradient.
        check(name != "plain" or found.endswith("\nEqual: 28 tensors.\n"), found)
        if ranks > 1:
            print(f"records: a right port is equal: {name}", flush=True)


def train_and_die(file):
    train(file)
    os.kill(os.getpid(), signal.SIGKILL)


def killed_and_refused(folder):
    train(folder / "once")
    try:
        train(folder / "once")
        check(False, "an existing file is overwritten")
    except FileExistsError as error:
        check("remove it, or record to another file" in str(error), error)
    killed = mp.get_context("spawn").Process(target=train_and_die, args=(folder / "killed",))
    killed.start()
    killed.join(120)
    check(killed.exitcode == -signal.SIGKILL, f"exit code {killed.exitcode}")
    check(len(step_lines(folder / "killed")) == STEPS, "the record of a killed run is not whole")
    print("records: whole after a kill, and never overwritten", flush=True)


def main():
    torch.set_num_threads(1)
    program = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        equal_and_wrong_ports(program, folder)
        right_ports(program, folder)
        killed_and_refused(folder)


if __name__ == "__main__":
    main()
