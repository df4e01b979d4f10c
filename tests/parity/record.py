"""Records what PyTorch does, for the tests to compare with.

record.py          writes the *.json files beside it
record.py --check  compares them with what this PyTorch does now, whatever its version, and fails at a difference
"""

import argparse
import itertools
import json
import math
import os
import pathlib
import sys
import tempfile
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.nn import functional as collectives_with_gradient
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from gpt import Gpt, contexts, loss_of

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path.append(str(FOLDER.parents[1] / "benches"))
from ports import free_port  # noqa: E402


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


def kernels():
    """[digests of the bits after some steps of dense layers, convolutions, and attention]: on another processor libtorch
    may have other kernels, which round otherwise"""

    def numbers(rows, columns, modulus, divisor):
        values = torch.arange(rows * columns).remainder(modulus) - modulus // 2
        return (values.float() / divisor).view(rows, columns)

    def digest_after_steps(parameters, loss_of_parameters):
        for parameter in parameters:
            parameter.requires_grad_()
        for _ in range(20):
            grads = torch.autograd.grad(loss_of_parameters(), parameters)
            with torch.no_grad():
                for parameter, grad in zip(parameters, grads):
                    parameter -= grad * 0.1
        bits = torch.cat([parameter.detach().flatten() for parameter in parameters]).view(torch.int32)
        return digest(number & 0xFFFFFFFF for number in bits.tolist())

    inputs, targets = numbers(16, 20, 7, 10), numbers(16, 1, 5, 10)
    layers = [numbers(64, 20, 11, 30), numbers(1, 64, 13, 30), numbers(1, 20, 11, 30)]

    def dense():
        first, second, alone = layers
        outputs = [(inputs @ first.t()).relu() @ second.t(), inputs @ alone.t()]
        return mse_loss(outputs[0], targets) + mse_loss(outputs[1], targets)

    images = numbers(16, 64, 17, 10).view(16, 1, 8, 8)
    filters = [numbers(8, 9, 11, 30).view(8, 1, 3, 3), numbers(16, 72, 13, 30).view(16, 8, 3, 3), numbers(1, 64, 7, 30)]

    def convolutions():
        values = images
        for weight in filters[:2]:
            values = nn.functional.conv2d(values, weight, padding=1)
            values = nn.functional.batch_norm(values, None, None, training=True)
            values = nn.functional.max_pool2d(values.relu(), 2)
        return mse_loss(values.flatten(1) @ filters[2].t(), targets)

    tokens = numbers(16 * 8, 64, 19, 10).view(16, 8, 64)
    weights = [numbers(192, 64, 11, 60), numbers(256, 64, 13, 60), numbers(1, 256, 7, 60)]

    def attention():
        heads = nn.functional.layer_norm(tokens, [64]) @ weights[0].t()
        heads = [part.view(16, 8, 4, 16).transpose(1, 2) for part in heads.split(64, 2)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(16, 8, 64)
        values = nn.functional.gelu((tokens + mixed) @ weights[1].t())
        return mse_loss((values @ weights[2].t()).mean(1), targets)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    digests = [
        digest_after_steps(layers, dense),
        digest_after_steps(filters, convolutions),
        digest_after_steps(weights, attention),
    ]
    torch.set_num_threads(threads)
    return [digests]


BATCH, LR, SEED = 16, 0.1, 7


def build(hidden):
    torch.manual_seed(SEED)
    widths = [20, *hidden, 1]
    layers = []
    for fan_in, fan_out in zip(widths, widths[1:]):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1]) if hidden else layers[0]


def build_cnn(side, channels, classes):
    torch.manual_seed(SEED)
    model, channels_in = [nn.Unflatten(1, (1, side, side))], 1
    for channels_out in channels:
        model += [nn.Conv2d(channels_in, channels_out, 3, padding=1)]
        model += [nn.BatchNorm2d(channels_out), nn.ReLU(), nn.MaxPool2d(2)]
        channels_in = channels_out
    pixels = (side >> len(channels)) ** 2
    return nn.Sequential(*model, nn.Flatten(), nn.Linear(channels_in * pixels, classes))


def flat(tensor):
    """As many digits as tell one float32 from the others."""
    return [float(f"{number:.9g}") for number in tensor.flatten().tolist()]


def values(model):
    return {name: flat(tensor) for name, tensor in model.state_dict().items()}


def decaying_weights(model):
    """The groups of an optimizer in which only weights decay, not biases and norms."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1]},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


def sgd_or_adamw(name, parameters, **options):
    is_adamw = name.startswith("adamw")
    kind = torch.optim.AdamW if is_adamw else torch.optim.SGD
    return kind(parameters, lr=LR / 10 if is_adamw else LR, **options)


def state_of(optimizer, model, numbers=flat):
    """What the optimizer keeps of each parameter."""
    named = [(name, optimizer.state[parameter].items()) for name, parameter in model.named_parameters()]
    return {f"{name}/{key}": numbers(value) for name, items in named for key, value in items if value is not None}


def rank_process(rank, world_size, port, answer, f, arguments):
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    returned = f(*arguments)
    if rank == 0:
        pathlib.Path(answer).write_text(json.dumps(returned))
    # Leave together, and without the destructors: with Gloo's threads still running they abort the
    # process now and then ("terminate called without an active exception").
    dist.barrier()
    os._exit(0)


def ranks(world_size, f, *arguments):
    """Runs `f` on so many ranks, and returns what rank 0 returned."""
    with tempfile.TemporaryDirectory() as folder:
        answer = os.path.join(folder, "answer.json")
        mp.spawn(rank_process, (world_size, free_port(), answer, f, arguments), nprocs=world_size)
        return json.loads(pathlib.Path(answer).read_text())


SIDE, CHANNELS, CLASSES = 8, [4, 6], 3
MODELS = {
    "linear": lambda: build([]),
    "mlp": lambda: build([24, 12]),
    "small mlp": lambda: build([8, 8]),
    # These do not fill whole vector registers: kernels take their paths for the rest.
    "odd mlp": lambda: build([13, 9]),
    "cnn": lambda: build_cnn(SIDE, CHANNELS, CLASSES),
}
SGD = {"kind": "sgd", "lr": 0.1}
MOMENTUM = {"kind": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
ADAMW = {"kind": "adamw", "lr": 0.01}
POWER_SGD = {"start_powerSGD_iter": 5, "matrix_approximation_rank": 1}


def ddp_cases(world_size):
    """What is trained on so many ranks: five epochs of ten steps, unless a case says otherwise. The data
    set doesn't divide by the ranks, nor a rank's share by the batches."""

    def case(name, model, optimizer, **options):
        sizes = {"samples": 79 * world_size - 1, "batch": 8, "epochs": 5}
        case = {"name": name, "world_size": world_size, "model": model, "optimizer": optimizer}
        return case | sizes | options

    for model in ["linear", "mlp", "odd mlp", "cnn"]:
        # A cnn's larger steps can come so close to a fork (which of four pixels is the largest) that the
        # last bit decides: at 0.1 three ranks end elsewhere with some orders of addition.
        yield case(f"{model} sgd", model, SGD | {"lr": 0.05} if model == "cnn" else SGD)
        yield case(f"{model} adamw", model, ADAMW)
    # Three steps an epoch: of four batches, of four and of two.
    yield case("no_sync", "small mlp", MOMENTUM, accumulate=4, epochs=17)
    yield case("clipping", "small mlp", MOMENTUM, max_norm=0.5)
    if world_size == 1:
        # All samples of a step at once: what the ranks' batches are with SyncBatchNorm, which PyTorch
        # refuses on the CPU.
        yield case("sync batch norm", "cnn", SGD, sync_batch_norm=True, samples=240, batch=24)
        return
    last, everyone = [world_size - 1], list(range(world_size))
    for where, ranks, every in [("one rank", last, 2), ("all ranks", everyone, 3)]:
        for optimizer in [MOMENTUM, ADAMW]:
            name = f"unused on {where} {optimizer['kind']}"
            yield case(name, "small mlp", optimizer, skip={"ranks": ranks, "every": every})
    never = {"ranks": everyone, "every": 1}
    yield case("static graph", "small mlp", MOMENTUM, static_graph=True, skip=never)
    for name, divide in [("join", True), ("join dividing by those left", False)]:
        join = {"divide_by_initial_world_size": divide}
        yield case(name, "small mlp", SGD, join=join)
    for hook in ["fp16", "bf16", "power_sgd"]:
        yield case(hook, "small mlp", MOMENTUM, hook=hook)
    yield case("zero", "small mlp", MOMENTUM, zero=True)
    yield case("zero no_sync", "small mlp", MOMENTUM, zero=True, accumulate=4, epochs=17)
    yield case("zero adamw", "mlp", ADAMW, zero=True, max_norm=0.5)


class Skipping(nn.Sequential):
    """An mlp whose middle layer this rank leaves out in every so many steps, from the first on."""

    def skip(self, ranks, every):
        self.every = every if dist.get_rank() in ranks else None
        self.step = 0
        return self

    def forward(self, inputs):
        skips = self.every is not None and self.step % self.every == 0
        self.step += 1
        first, relu, middle, _, last = self
        hidden = relu(first(inputs))
        return last(hidden if skips else relu(middle(hidden)))


def train(case):
    """Trains a model on this rank, and returns the mean loss of every epoch, and the final values."""
    option = case.get
    model = MODELS[case["model"]]()
    if skip := option("skip"):
        model = Skipping(*model).skip(**skip)
    torch.manual_seed(SEED + 1)
    samples = case["samples"]
    if case["model"] == "cnn":
        data = torch.rand(samples, SIDE * SIDE), torch.randint(CLASSES, (samples,))
    else:
        data = torch.rand(samples, 20), torch.rand(samples, 1)
    loss_of = cross_entropy if case["model"] == "cnn" else mse_loss
    data = TensorDataset(*data)
    order = DistributedSampler(data, seed=SEED)
    loader = DataLoader(data, batch_size=case["batch"], sampler=order)
    static_graph = option("static_graph", False)
    find_unused = skip is not None and not static_graph
    ddp = DistributedDataParallel(model, find_unused_parameters=find_unused, static_graph=static_graph)
    match option("hook"):
        case "fp16":
            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        case "bf16":
            ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
        case "power_sgd":
            state = powerSGD_hook.PowerSGDState(None, **POWER_SGD)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    settings = dict(case["optimizer"])
    kind = torch.optim.AdamW if settings.pop("kind") == "adamw" else torch.optim.SGD
    if option("zero"):
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=kind, **settings)
    else:
        optimizer = kind(ddp.parameters(), **settings)
    losses = []
    for epoch in range(case["epochs"]):
        order.set_epoch(epoch)
        total = torch.zeros(2, dtype=torch.float64)
        batches = list(loader)
        if option("join"):
            batches = batches[: len(batches) - 2 * dist.get_rank()]
        accumulate = option("accumulate", 1)
        with ddp.join(enable=option("join") is not None, **option("join", {})):
            for of_step in (batches[i:][:accumulate] for i in range(0, len(batches), accumulate)):
                optimizer.zero_grad()
                for inputs, targets in of_step:
                    is_last = inputs is of_step[-1][0]
                    with nullcontext() if is_last else ddp.no_sync():
                        loss = loss_of(ddp(inputs), targets)
                        (loss / len(of_step)).backward()
                    count = len(inputs)
                    total += torch.tensor([loss.item() * count, count], dtype=torch.float64)
                if max_norm := option("max_norm"):
                    nn.utils.clip_grad_norm_(ddp.parameters(), max_norm)
                optimizer.step()
        dist.all_reduce(total)
        losses.append((total[0] / total[1]).item())
    return {"losses": losses, "final": values(model)}


def train_all():
    return [case | train(case) for case in ddp_cases(dist.get_world_size())]


def ddp():
    """Losses and final values of real DistributedDataParallel over Gloo, with as many processes as there
    are ranks."""
    initial = {name: values(make()) for name, make in MODELS.items()}
    settings = {"seed": SEED, "side": SIDE, "channels": CHANNELS, "classes": CLASSES}
    cases = [case for world_size in [1, 2, 3] for case in ranks(world_size, train_all)]
    return settings | {"power_sgd": POWER_SGD, "initial": initial, "cases": cases}


# Backwards after each other: whether gradients are zeroed before, whether this one stays on its rank, and which of
# the parameters a, b and c no rank uses, or the last rank alone.
def backward(zero=False, no_sync=False, unused="", last_rank_unused=""):
    step = {"zero": zero, "no_sync": no_sync, "unused": unused}
    return step | {"last_rank_unused": last_rank_unused}


GRADIENT_CASES = {
    "used in the first of two": [backward(zero=True), backward(unused="b")],
    "used in the second of two": [backward(zero=True, unused="b"), backward()],
    "used in the first of two by all, then not by the last rank": [
        backward(zero=True),
        backward(last_rank_unused="b"),
        backward(unused="b", last_rank_unused="c"),
    ],
    "used in the first of two by all but the last rank": [
        backward(zero=True, last_rank_unused="bc"),
        backward(unused="b"),
        backward(unused="bc"),
    ],
    "zeroed in between": [
        backward(zero=True),
        backward(zero=True, unused="b"),
        backward(unused="c"),
        backward(zero=True, unused="ac"),
    ],
    "kept over no_sync": [backward(zero=True, unused="c"), backward(no_sync=True, unused="bc"), backward(unused="b")],
    "used within no_sync only": [
        backward(zero=True, unused="c"),
        backward(no_sync=True, unused="c"),
        backward(unused="bc"),
    ],
    "two steps": [
        backward(zero=True),
        backward(unused="b"),
        backward(zero=True, unused="b"),
        backward(unused="a", last_rank_unused="b"),
    ],
}


class Terms(nn.Module):
    """A sum of some of three parameters, of 3 numbers each."""

    def __init__(self):
        super().__init__()
        for name in "abc":
            self.register_parameter(name, nn.Parameter(torch.ones(3)))

    def forward(self, names, factor):
        return sum((getattr(self, name).square() * (ord(name) - 96)).sum() * factor for name in names)


def gradients_of(model):
    """The first number of each gradient, on each rank; null where there is none."""
    of_rank = [None if p.grad is None else flat(p.grad)[0] for p in model.parameters()]
    all_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, of_rank)
    return all_ranks


def gradients_after(steps, **options):
    ddp, rank = DistributedDataParallel(Terms(), **options), dist.get_rank()
    is_last = rank == dist.get_world_size() - 1
    after = []
    for number, step in enumerate(steps):
        if step["zero"]:
            ddp.zero_grad()
        unused = step["unused"] + (step["last_rank_unused"] if is_last else "")
        with ddp.no_sync() if step["no_sync"] else nullcontext():
            ddp(sorted({*"abc"} - {*unused}), (rank + 1) / 8 * 3**number).backward()
        after.append(gradients_of(ddp))
    return after


def retained(forward_between):
    """Two backwards through one graph. PyTorch averages in the second one only after another forward."""
    ddp = DistributedDataParallel(Terms())
    loss = ddp("abc", (dist.get_rank() + 1) / 8)
    loss.backward(retain_graph=True)
    first = gradients_of(ddp)
    if forward_between:
        ddp("abc", 1)
    loss.backward()
    return [first, gradients_of(ddp)]


def all_gradients():
    world_size = dist.get_world_size()
    cases = []
    for name, steps in GRADIENT_CASES.items():
        after = gradients_after(steps, find_unused_parameters=True)
        cases.append({"name": name, "world_size": world_size, "steps": steps, "after": after})
    for name, forward_between in [("retain_graph", True), ("retain_graph, no forward", False)]:
        after = retained(forward_between)
        cases.append({"name": name, "world_size": world_size, "steps": [], "after": after})
    return cases


def gradients():
    """What each rank has in `grad` after each of several backwards."""
    return {"cases": [case for size in [1, 2, 3] for case in ranks(size, all_gradients)]}


TEXT = FOLDER.parents[1] / "assets" / "shakespeare.txt"
GPT_SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16}
GPT_BATCH, GPT_EPOCHS = 4, 5
# nanoGPT's, with a larger learning rate and a shorter warm-up for so few steps.
GPT_ADAMW = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
GPT_SCHEDULE = {"warmup": 10, "start_factor": 0.01, "eta_min": 0.001}
GPT_MAX_NORM = 1.0


def bits(*tensors):
    """A digest of every bit of float32 tensors."""
    tensors = [tensor.detach().flatten() for tensor in tensors]
    return digest(number % 2**32 for number in torch.cat(tensors).view(torch.int32).tolist())


def some(name, tensor):
    """The norm of a tensor in float64, and a few of its numbers."""
    tensor = tensor.detach().flatten()
    if name.endswith("c_attn.bias"):
        # Without that of the keys: softmax takes it away, and its gradient is what rounding leaves.
        queries, _, values = tensor.chunk(3)
        tensor = torch.cat([queries, values])
    return [tensor.double().norm().item(), *flat(tensor[:: len(tensor) // 4])]


def new_gpt(bias):
    torch.manual_seed(SEED)
    return Gpt(**GPT_SIZES, bias=bias)


def gpt_data(samples):
    return TensorDataset(*contexts(TEXT.read_bytes(), samples, GPT_SIZES["block_size"]))


def initial_gpt(bias):
    """Digests of the initial parameters, and the loss of a batch with 8 times those, for logits that differ, in
    bfloat16 as well."""
    torch.set_num_threads(1)
    model = new_gpt(bias)
    parameters = {name: bits(parameter) for name, parameter in model.named_parameters()}
    inputs, targets = gpt_data(GPT_BATCH)[:]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 8
        loss = loss_of(model(inputs), targets).item()
        with torch.autocast("cpu", torch.bfloat16):
            half = loss_of(model(inputs), targets).item()
    return {"bias": bias, "parameters": parameters, "float32": loss, "bfloat16": half}


def train_gpt(case):
    """Trains a GPT on this rank: epochs of ten steps, of which the last has a shorter batch."""
    model, data = new_gpt(case["bias"]), gpt_data(case["samples"])
    order = DistributedSampler(data, seed=SEED)
    loader = DataLoader(data, batch_size=GPT_BATCH, sampler=order)
    ddp = DistributedDataParallel(model)
    parameters = list(ddp.parameters())
    optimizer = torch.optim.AdamW(decaying_weights(ddp), **GPT_ADAMW, fused=case["fused"])
    schedulers = torch.optim.lr_scheduler
    warmup, start_factor, eta_min = GPT_SCHEDULE.values()
    rise = schedulers.LinearLR(optimizer, start_factor, total_iters=warmup)
    fall = schedulers.CosineAnnealingLR(optimizer, GPT_EPOCHS * len(loader) - warmup, eta_min)
    schedule = schedulers.SequentialLR(optimizer, [rise, fall], milestones=[warmup])
    losses = []
    for epoch in range(GPT_EPOCHS):
        order.set_epoch(epoch)
        total = torch.zeros(2, dtype=torch.float64)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_of(ddp(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, GPT_MAX_NORM)
            optimizer.step()
            schedule.step()
            total += torch.tensor([loss.item() * len(inputs), len(inputs)], dtype=torch.float64)
        dist.all_reduce(total)
        losses.append((total[0] / total[1]).item())
    final = {name: some(name, parameter) for name, parameter in model.named_parameters()}
    return {"losses": losses, "bits": bits(*parameters), "final": final}


def train_gpts():
    world_size = dist.get_world_size()
    samples = 39 * world_size - 1  # not divisible by the ranks, nor a rank's share by the batches
    sizes = {"world_size": world_size, "samples": samples}
    choices = itertools.product([True, False], [False, True])
    cases = [sizes | {"bias": bias, "fused": fused} for bias, fused in choices]
    return [case | train_gpt(case) for case in cases]


def gpt():
    """Losses and values of a GPT on a text, with real DistributedDataParallel over Gloo."""
    settings = {"seed": SEED, "batch": GPT_BATCH, "epochs": GPT_EPOCHS, "max_norm": GPT_MAX_NORM}
    settings |= GPT_SIZES | GPT_ADAMW | GPT_SCHEDULE
    settings |= {"initial": [initial_gpt(bias) for bias in [True, False]]}
    return settings | {"cases": [case for size in [1, 2, 3] for case in ranks(size, train_gpts)]}


NOISE, HIDDEN, SAMPLE, GAN_STEPS, GAN_LR = 4, 6, 3, 8, 0.2


def waves(rank, step, columns):
    """Inputs that every language computes alike."""
    numbers = torch.arange(BATCH * columns, dtype=torch.float64)
    return (numbers * 0.71 + rank * 5.3 + step).sin().float().view(BATCH, columns)


def two_models(is_gan):
    """Losses, and what two models come to whose parameters one backward reaches. A GAN's discriminator has a loss of
    its own besides; without one the two are one model in two parts."""
    torch.manual_seed(SEED)
    first = nn.Sequential(nn.Linear(NOISE, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, SAMPLE))
    second = nn.Sequential(nn.Linear(SAMPLE, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    initial = [values(first), values(second)]
    first, second = DistributedDataParallel(first), DistributedDataParallel(second)
    optimizers = [torch.optim.SGD(model.parameters(), lr=GAN_LR) for model in [first, second]]
    rank, losses = dist.get_rank(), []
    for step in range(GAN_STEPS):
        noise = waves(rank, step, NOISE)
        first.zero_grad()
        second.zero_grad()
        loss = second(first(noise)).sub(1).square().mean()
        loss.backward()
        losses.append(loss.item())
        if not is_gan:
            optimizers[1].step()
        optimizers[0].step()
        if is_gan:
            second.zero_grad()
            real = second(waves(rank, step + 0.5, SAMPLE)).sub(1).square().mean()
            loss = real + second(first(noise).detach()).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizers[1].step()
    final = [values(first.module), values(second.module)]
    return {"initial": initial, "losses": losses, "final": final}


def both_of_two_models():
    world_size = dist.get_world_size()
    rows = [{"name": name, "world_size": world_size} for name in ["gan", "two parts"]]
    return [row | two_models(row["name"] == "gan") for row in rows]


def models():
    """One backward through two DistributedDataParallel models."""
    cases = [case for world_size in [1, 2, 3] for case in ranks(world_size, both_of_two_models)]
    settings = {"batch": BATCH, "noise": NOISE, "hidden": HIDDEN, "sample": SAMPLE}
    return settings | {"steps": GAN_STEPS, "lr": GAN_LR, "cases": cases}


OPTIMIZERS = {
    "sgd": {},
    "sgd momentum": {"momentum": 0.9, "dampening": 0.1},
    "sgd nesterov": {"momentum": 0.9, "nesterov": True},
    "sgd weight_decay": {"weight_decay": 0.01},
    "sgd momentum weight_decay groups": {"momentum": 0.9, "weight_decay": 0.01},
    "sgd nesterov clip": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.001},
    "adamw": {},
    "adamw groups": {"betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1},
    "adamw clip": {},
}
STEPS, MAX_NORM = 25, 1.8
ODD_HIDDEN = [5, 3]  # widths that fill no vector of a processor


SCALER = {"init_scale": 1024.0, "growth_interval": 3}
# The first step is skipped: what an optimizer keeps must not begin with it.
NOT_FINITE = {0: "inf", 1: "-inf", 6: "nan", 13: "inf", 14: "nan"}


def optimize(name, options, scaled=False):
    """Losses, norms before clipping, parameters and optimizer state after so many steps. With a scaler some gradients
    are not finite, and there are scales and growth trackers instead of norms."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED + 1)
    inputs, targets = torch.rand(BATCH, 20), torch.rand(BATCH, 1)
    model = build(ODD_HIDDEN)
    groups = decaying_weights(model) if "groups" in name else model.parameters()
    optimizer = sgd_or_adamw(name, groups, **options)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, **SCALER)
    losses, norms, scales = [], [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        if scaled and step in NOT_FINITE:
            next(model.parameters()).grad[0, 0] = float(NOT_FINITE[step])
        if "clip" in name:
            scaler.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.state_dict())
    if not scaled:
        return {"losses": losses, "norms": norms, "final": values(model), "state": state_of(optimizer, model)}
    trace = [[loss, state["scale"], state["_growth_tracker"]] for loss, state in zip(losses, scales)]
    kept = state_of(optimizer, model, lambda tensor: tensor.flatten().tolist())
    return {"trace": trace, "final": values(model), "state": kept, "state_dict": scales[-1]}


def optimizers():
    """What PyTorch's optimizers make of an mlp, on one process and always the same batch."""
    cases = [{"name": name, "options": options} | optimize(name, options) for name, options in OPTIMIZERS.items()]
    settings = {"batch": BATCH, "steps": STEPS, "lr": LR, "max_norm": MAX_NORM, "seed": SEED}
    return settings | {"hidden": ODD_HIDDEN, "cases": cases}


HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
HALF_NUMEL, HALF_STEPS = 100, 8  # whole vectors of a processor, and a rest


def half(dtype, name, options):
    """A parameter of half precision and its state, after steps with gradients that are exact in each dtype."""
    torch.set_num_threads(1)
    numbers = torch.arange(HALF_NUMEL)
    parameter = nn.Parameter((numbers % 17 / 16 - 0.5).to(HALF[dtype]))
    fused = {"fused": True} if name.startswith("adamw") else {}
    optimizer = sgd_or_adamw(name, [parameter], **fused, **options)
    for step in range(HALF_STEPS):
        parameter.grad = (numbers * (step + 3) % 29 / 16 - 0.875).to(HALF[dtype])
        optimizer.step()
    state = {key: flat(value) for key, value in optimizer.state[parameter].items() if value is not None}
    return {"dtype": dtype, "name": name, "options": options, "final": flat(parameter), "state": state}


def half_precision():
    """What PyTorch's optimizers make of a parameter of half precision on a CPU."""
    rows = [row for row in OPTIMIZERS.items() if "clip" not in row[0] and "groups" not in row[0]]
    rows += [("adamw all options", OPTIMIZERS["adamw groups"])]
    cases = [half(dtype, name, options) for dtype in HALF for name, options in rows]
    return {"lr": LR, "numel": HALF_NUMEL, "steps": HALF_STEPS, "cases": cases}


def autocast(kind, init_scale):
    """Losses, scales and parameters of an mlp in mixed precision, of which float32 differs by `without`."""

    def run(enabled):
        torch.manual_seed(SEED + 1)
        inputs, targets = torch.rand(BATCH, 20), torch.rand(BATCH, 1)
        model = build(WIDE_HIDDEN)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale, enabled=init_scale is not None)
        losses, scales = [], []
        for _ in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", kind, enabled=enabled):
                loss = mse_loss(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
            scales.append(scaler.get_scale())
        return losses, scales, values(model)

    losses, scales, final = run(True)
    return {"losses": losses, "scales": scales, "final": final, "without": run(False)[0]}


WIDE_HIDDEN = [32, 16]


def amp():
    """GradScaler on float32 gradients, and autocast on the CPU, each on one process."""
    torch.set_num_threads(1)
    momentum = {"momentum": 0.9, "dampening": 0.1}
    scalers = {"sgd": {}, "sgd momentum": momentum, "sgd momentum clip": momentum, "adamw": {}}
    cases = [{"name": name, "options": options} | optimize(name, options, True) for name, options in scalers.items()]
    kinds = {"bfloat16": (torch.bfloat16, None), "float16": (torch.float16, 2.0**24)}
    cases += [{"name": name} | autocast(*arguments) for name, arguments in kinds.items()]
    settings = {"batch": BATCH, "steps": STEPS, "lr": LR, "max_norm": MAX_NORM, "seed": SEED}
    settings |= SCALER | {"not_finite": NOT_FINITE}
    return settings | {"hidden": ODD_HIDDEN, "wide": WIDE_HIDDEN, "cases": cases}


def schedules():
    """The learning rate of every step, a scheduler's step each."""
    schedulers = torch.optim.lr_scheduler
    milestones = {"milestones": [3, 7, 8], "gamma": 0.5}
    cosine = {"T_max": 12, "eta_min": 0.01}
    made = {
        "constant": lambda o: schedulers.ConstantLR(o, factor=1.0),
        "multi-step": lambda o: schedulers.MultiStepLR(o, **milestones),
        "cosine": lambda o: schedulers.CosineAnnealingLR(o, **cosine),
    }
    cases = []
    for (kind, make), warmup in itertools.product(made.items(), [0, 5]):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=LR)
        schedule = make(optimizer)
        if warmup:
            rise = schedulers.LinearLR(optimizer, start_factor=1 / 3, total_iters=warmup)
            schedule = schedulers.SequentialLR(optimizer, [rise, schedule], milestones=[warmup])
        lrs = []
        for _ in range(20):
            lrs.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        cases.append({"schedule": kind, "warmup": warmup, "lrs": lrs})
    return {"lr": LR} | milestones | cosine | {"cases": cases}


# What Gloo has: no all_to_all of lists. It refuses every int16, averages of what is not floats, and
# bitwise operations on floats.
REDUCTIONS = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"]
OTHERS = ["broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter"]
OTHERS += ["all_to_all_single", "all_to_all_single with splits"]
KINDS = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool".split()
OPS = "sum avg product min max band bor bxor".split()
# Not recorded: Gloo adds and multiplies bools as bytes, and True + True leaves a 2 in a bool. Here
# that is an error.
ODD = [("bool", "sum"), ("bool", "product")]
LENGTH = 3  # of one rank's part


def numbers(rank, length, kind):
    """(rank + 1) * (i + 1), wrapped into -3 to 3: every kind holds the product of five ranks. In
    uint8 what is negative wraps, and bool says what is positive."""
    whole = ((rank + 1) * torch.arange(1, length + 1) + 3) % 7 - 3
    return whole > 0 if kind == torch.bool else whole.to(kind)


def collective(operation, kind, op):
    """This rank's output, flat; empty where the operation leaves none: `reduce` leaves something
    unspecified on other ranks than `dst`."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    root = world_size // 2
    one, many = (numbers(rank, length, kind) for length in [LENGTH, LENGTH * world_size])
    part, whole = torch.zeros_like(one), torch.zeros_like(many)
    inputs, outputs = list(many.split(LENGTH)), list(whole.split(LENGTH))
    mine, none = rank == root, one[:0]
    # Rank a sends (a + 2 * b + 1) % 3 to rank b.
    sent = [(rank + 2 * other + 1) % 3 for other in range(world_size)]
    received = [(other + 2 * rank + 1) % 3 for other in range(world_size)]
    split, unequal = torch.zeros(sum(received), dtype=kind), numbers(rank, sum(sent), kind)
    call, output = {
        "all_reduce": (lambda: dist.all_reduce(one, op), one),
        "reduce": (lambda: dist.reduce(one, root, op), one if mine else none),
        "reduce_scatter": (lambda: dist.reduce_scatter(part, inputs, op), part),
        "reduce_scatter_tensor": (lambda: dist.reduce_scatter_tensor(part, many, op), part),
        "broadcast": (lambda: dist.broadcast(one, root), one),
        "all_gather": (lambda: dist.all_gather(outputs, one), whole),
        "all_gather_into_tensor": (lambda: dist.all_gather_into_tensor(whole, one), whole),
        "gather": (lambda: dist.gather(one, outputs if mine else None, root), whole if mine else none),
        "scatter": (lambda: dist.scatter(part, inputs if mine else None, root), part),
        "all_to_all_single": (lambda: dist.all_to_all_single(whole, many), whole),
        "all_to_all_single with splits": (lambda: dist.all_to_all_single(split, unequal, received, sent), split),
    }[operation]
    call()
    return output


def all_collectives():
    rows = []
    reductions = itertools.product(REDUCTIONS, KINDS, OPS)
    for operation, kind, op in [*reductions, *itertools.product(OTHERS, KINDS, [None])]:
        if (kind, op) in ODD:
            continue
        try:
            reduce_op = op and getattr(dist.ReduceOp, op.upper())
            output = collective(operation, getattr(torch, kind), reduce_op)
        except RuntimeError:
            continue  # Gloo does not have it, on any rank
        outputs = [None] * dist.get_world_size()
        # As whole numbers, where they are, to keep the file small.
        short = [int(value) if value == int(value) else value for value in output.tolist()]
        dist.all_gather_object(outputs, short)
        rows.append([operation, kind, op, dist.get_world_size(), outputs])
    return rows


def collectives():
    """[operation, kind, op, ranks, [what is in each rank's output afterwards]]"""
    return [row for world_size in range(1, 6) for row in ranks(world_size, all_collectives)]


def small(rank, index, shape, step):
    """Small whole numbers, so that every sum and product is exact."""
    numbers = torch.arange(math.prod(shape), dtype=torch.float64) % step
    return (numbers + 3 * rank - index + 1).reshape(shape)


def all_functional():
    rows = []
    rank, count = dist.get_rank(), dist.get_world_size()
    for operation in ["all_reduce", "all_gather"]:
        one = small(rank, 0, [2, 3], 5).requires_grad_()
        outputs = getattr(collectives_with_gradient, operation)(one)
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        weighted = enumerate(outputs)
        sum(
            (small(rank, index, output.shape, 3) * output + output * output / 2).sum() for index, output in weighted
        ).backward()
        of_all = [None] * count
        dist.all_gather_object(of_all, [[output.flatten().tolist() for output in outputs], one.grad.flatten().tolist()])
        rows.append([operation, count, of_all])
    return rows


def functional():
    """[operation, ranks, [of each rank: [its outputs, the gradient of its input]]]"""
    return [row for world_size in range(1, 4) for row in ranks(world_size, all_functional)]


def version_line(version):
    return f' "torch": {json.dumps(version)},'


def text(recorded):
    """JSON with a line for each row, so that a difference can be read."""
    lines = ["{", version_line(torch.__version__)]
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
    records = [sampler, kernels, ddp, gpt, gradients, models, optimizers, half_precision]
    records += [amp, schedules, collectives, functional]
    for record in records:
        name = record.__name__
        file = FOLDER / f"{name}.json"
        now = text(record())
        if not check:
            file.write_text(now)
            continue
        known = file.read_text()
        recorded_from = json.loads(known)["torch"]
        known = known.replace(version_line(recorded_from), version_line(torch.__version__), 1)
        rows = [row for row in zip(known.splitlines(), now.splitlines()) if row[0] != row[1]]
        outcome = "as recorded" if known == now else f"{len(rows)} lines differ from those"
        print(f"{file.name}: PyTorch {torch.__version__}: {outcome} from {recorded_from}", flush=True)
        for before, after in rows[:3]:
            print(f"  recorded {before[:100]}\n  now      {after[:100]}")
        different |= known != now
    sys.exit(different)


if __name__ == "__main__":
    main()
