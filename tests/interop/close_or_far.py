"""Measures whether `ddp-mp-diff --rtol` tells rounding from mistakes: close_or_far.py [SETUP ...]

SEED=N in the environment has other weights and data.

Right runs do the same with another order of sums, another precision or other kernels. All must be called close. Each wrong run
has one mistake, and every other one other kernels besides. All must be called far, with the stage and the tensor of the mistake.
"""

import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "python"))
import ddp_mp  # noqa: E402
from checks import check  # noqa: E402

STEPS = 30
SEED = int(os.environ.get("SEED", "0"))
DIFF = [sys.executable, "-c", "from ddp_mp.native import main; main()"]


def mlp(option):
    """Dense layers with dropout, one of them square."""
    activation = nn.GELU() if option("gelu") else nn.ReLU()
    layers = OrderedDict(
        first=nn.Linear(20, 64), act=activation, square=nn.Linear(64, 64), act2=nn.ReLU(),
        drop=nn.Dropout(0.2 if option("dropout") else 0.1), last=nn.Linear(64, 1))
    model = nn.Sequential(layers)
    with torch.no_grad():
        if option("init"):
            model.first.weight.mul_(1.02)
        if option("transposed"):
            model.square.weight.copy_(model.square.weight.t().clone())
    return model


def cnn(option):
    """Convolutions with batch norm. The bias of a convolution has no effect: its gradient is rounding."""
    padding = "reflect" if option("padding") else "zeros"
    pool = nn.AvgPool2d(2) if option("average pool") else nn.MaxPool2d(2)
    eps, momentum = (1e-3 if option("norm eps") else 1e-5), (0.2 if option("norm momentum") else 0.1)
    return nn.Sequential(OrderedDict(
        conv=nn.Conv2d(3, 8, 3, padding=1, padding_mode=padding), norm=nn.BatchNorm2d(8, eps=eps, momentum=momentum),
        act=nn.ReLU(), pool=pool, conv2=nn.Conv2d(8, 16, 3, padding=1), norm2=nn.BatchNorm2d(16), act2=nn.ReLU(),
        pool2=nn.MaxPool2d(2), flat=nn.Flatten(), head=nn.Linear(16 * 9, 10)))


class Residual(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs, outputs, stride, option):
        super().__init__()
        first = 1 if option("stride") else stride
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, first, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, stride // first, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride)
        self.factor, self.act_after = (0.9 if option("residual factor") else 1.0), not option("no activation")

    def forward(self, x):
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        y = self.short(x) + self.factor * y
        return F.relu(y) if self.act_after else y


def resnet(option):
    """Residual blocks."""
    none = lambda name: False  # noqa: E731
    return nn.Sequential(OrderedDict(
        stem=nn.Conv2d(3, 8, 3, padding=1), one=Residual(8, 8, 1, none), two=Residual(8, 16, 2, option),
        pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), head=nn.Linear(16, 10)))


class Attention(nn.Module):
    """Causal self-attention with four heads."""

    def __init__(self, width, option):
        super().__init__()
        self.qkv, self.out, self.option = nn.Linear(width, 3 * width), nn.Linear(width, width), option

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (it.view(batch, length, 4, -1).transpose(1, 2) for it in self.qkv(x).split(width, 2))
        scale = 1 / math.sqrt(q.shape[-1]) if not self.option("scale") else 0.5
        if self.option("plain attention"):
            weights = q @ k.transpose(-2, -1) * scale
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            y = weights.masked_fill(later, -math.inf).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=not self.option("no mask"), scale=scale)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, option):
        super().__init__()
        eps = 1e-3 if option("layer norm eps") else 1e-5
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(width, eps=eps), Attention(width, option), nn.LayerNorm(width)
        approximate = "tanh" if option("tanh gelu") else "none"
        self.fc, self.gelu, self.proj = nn.Linear(width, 4 * width), nn.GELU(approximate), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.proj(self.gelu(self.fc(self.ln2(x))))


class Gpt(nn.Module):
    """A decoder with a tied output layer."""

    def __init__(self, option, width=32):
        super().__init__()
        none = lambda name: option(name) if name == "plain attention" else False  # noqa: E731
        self.wte, self.wpe = nn.Embedding(50, width), nn.Embedding(33, width)
        self.blocks = nn.ModuleList([Block(width, none), Block(width, option)])
        self.ln_f, self.head, self.option = nn.LayerNorm(width), nn.Linear(width, 50, bias=False), option
        self.head.weight = self.wte.weight
        for name, parameter in self.named_parameters():
            with torch.no_grad():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.05)
                elif name.endswith("bias"):
                    parameter.zero_()

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1]) + int(self.option("positions"))
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x)).transpose(1, 2)


class Lstm(nn.Module):
    """Two recurrent layers."""

    def __init__(self, option):
        super().__init__()
        self.first, self.second, self.head = nn.LSTM(8, 32, batch_first=True), nn.LSTM(32, 32, batch_first=True), nn.Linear(32, 1)
        self.option = option
        if option("forget bias"):
            with torch.no_grad():
                self.first.bias_hh_l0[32:64] += 1

    def forward(self, x):
        x, _ = self.first(x)
        if self.option("detached"):
            x = x.detach()
        x, _ = self.second(x)
        return self.head(x.flip(1)[:, 0] if not self.option("first output") else x[:, 0])


def images(generator):
    images = torch.randn(16, 3, 12, 12, generator=generator)
    return images, (images.mean((1, 2, 3)) * 50).round().long() % 10


def numbers(generator):
    inputs = torch.randn(32, 20, generator=generator)
    return inputs, inputs[:, :3].sum(1, keepdim=True).sin()


def tokens(generator):
    inputs = torch.randint(50, (8, 32), generator=generator)
    return inputs, (3 * inputs + 1) % 50


def series(generator):
    inputs = torch.randn(16, 12, 8, generator=generator)
    return inputs, inputs.mean((1, 2), keepdim=True)[:, 0]


SETUPS = {
    "mlp": (mlp, numbers, "mse", "sgd"),
    "mlp adam": (mlp, numbers, "mse", "adam"),
    "cnn": (cnn, images, "cross entropy", "sgd"),
    "cnn adam": (cnn, images, "cross entropy", "adam"),
    "resnet": (resnet, images, "cross entropy", "adamw"),
    "gpt": (Gpt, tokens, "cross entropy", "adamw"),
    "lstm": (Lstm, series, "mse", "adam"),
}

# What does not change what is computed.
RIGHT = {
    "mlp": ["last digits", "bfloat16", "float64", "two threads"],
    "mlp adam": ["last digits", "bfloat16", "float64", "fused"],
    "cnn": ["last digits", "bfloat16", "float64", "channels last", "two threads"],
    "cnn adam": ["last digits", "bfloat16", "float64", "channels last", "fused"],
    "resnet": ["last digits", "bfloat16", "float64", "channels last", "fused", "no oneDNN"],
    "gpt": ["last digits", "bfloat16", "float64", "micro-batches", "fused", "plain attention", "two threads"],
    "lstm": ["last digits", "float64", "micro-batches", "fused", "no oneDNN"],
}

# Mistakes, each with the stage in which it is seen first, and the tensor.
WRONG = {
    "mlp": [
        ("init", "parameters", "first.weight"),
        ("transposed", "parameters", "square.weight"),
        ("gelu", "outputs", "act"),
        ("dropout", "outputs", "drop"),
        ("sum", "loss", ""),
        ("decay of a bias", "parameters", "last.bias"),
        ("momentum", "parameters", "first.weight"),
        ("clipped", "averages", "last.bias"),
        ("rate", "lr", ""),
        ("inputs scaled", "batch", "inputs"),
        ("other order", "batch", "inputs"),
        ("not divided", "backward", "last"),
    ],
    "mlp adam": [("betas", "parameters", "first.weight"), ("adamw", "parameters", "first.weight")],
    "cnn": [
        ("padding", "outputs", "conv"),
        ("norm eps", "outputs", "norm"),
        ("norm momentum", "buffers", "norm.running_mean"),
        ("average pool", "outputs", "pool"),
        ("label smoothing", "loss", ""),
        ("frozen norm", "outputs", "norm"),
    ],
    "resnet": [("stride", "outputs", "two.conv1"), ("residual factor", "outputs", "two"), ("no activation", "outputs", "two")],
    "gpt": [
        ("scale", "outputs", "blocks.1.attn.out"),
        ("no mask", "outputs", "blocks.1.attn.out"),
        ("positions", "outputs", "wpe"),
        ("tanh gelu", "outputs", "blocks.1.gelu"),
        ("layer norm eps", "outputs", "blocks.1.ln1"),
        ("no decay", "parameters", "wte.weight"),
        ("betas", "parameters", "wte.weight"),
    ],
    "lstm": [
        ("forget bias", "parameters", "first.bias_hh_l0"),
        ("detached", "gradients", "first.bias_hh_l0"),
        ("first output", "outputs", "head"),
    ],
}


def optimizer_of(kind, model, option):
    """The optimizer, with its mistakes."""
    named = list(model.named_parameters())
    decay = 0.0 if option("no decay") else 0.1
    options = {"lr": 0.05 if kind == "sgd" else 1e-3, "foreach": False if option("a loop of parameters") else None}
    if option("fused"):
        options["fused"] = True
    if kind == "sgd":
        last = named[-1][1]
        groups = [{"params": [it for _, it in named if it is not last]}, {"params": [last]}]
        groups[1]["weight_decay"] = 0.1 if option("decay of a bias") else 0.0
        return torch.optim.SGD(groups, momentum=0.8 if option("momentum") else 0.9, **options)
    if kind == "adam" and not option("adamw"):
        return torch.optim.Adam([it for _, it in named], betas=(0.9, 0.99 if option("betas") else 0.999), **options)
    options["betas"] = (0.9, 0.95 if option("betas") else 0.999)
    return torch.optim.AdamW([it for _, it in named], weight_decay=decay, **options)


def loss_of(kind, output, targets, option):
    if kind == "mse":
        return F.mse_loss(output, targets, reduction="sum" if option("sum") else "mean")
    return F.cross_entropy(output, targets, label_smoothing=0.1 if option("label smoothing") else 0.0)


def train(setup, file, *changes):
    """Trains a few steps, with changes, and records them."""
    option = changes.__contains__
    make, batch_of, loss, optimizer = SETUPS[setup]
    torch.manual_seed(SEED)
    torch.set_num_threads(2 if option("two threads") else 1)
    torch.backends.mkldnn.enabled = not option("no oneDNN")
    model = make(option)
    dtype = torch.float64 if option("float64") else torch.float32
    model.to(dtype=dtype)
    if option("last digits"):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 6e-8 * torch.randn(parameter.shape))
    if option("channels last"):
        model.to(memory_format=torch.channels_last)
    if option("frozen norm"):
        model.norm.eval()
    optimizer = optimizer_of(optimizer, model, option)
    recorder = ddp_mp.record(model, optimizer, file, modules=True)
    data = torch.Generator().manual_seed(SEED + 1)
    for step in range(STEPS):
        inputs, targets = batch_of(data)
        if option("inputs scaled"):
            inputs = inputs * 1.1
        if option("other order") and step >= 3:
            inputs, targets = inputs.flip(0), targets.flip(0)
        if inputs.is_floating_point():
            inputs = inputs.to(dtype)
        targets = targets.to(dtype) if targets.is_floating_point() else targets
        if option("rate"):
            optimizer.param_groups[0]["lr"] = 0.05 * (1 if step < 5 else 0.5)
        optimizer.zero_grad()
        torch.manual_seed(step)
        parts = 2 if option("micro-batches") else 1
        for part_inputs, part_targets in zip(inputs.chunk(parts), targets.chunk(parts)):
            recorder.batch(part_inputs, part_targets)
            with torch.autocast("cpu", torch.bfloat16, enabled=option("bfloat16")):
                value = loss_of(loss, model(part_inputs), part_targets, option)
            recorder.loss(value)
            (value / parts * (2 if option("not divided") else 1)).backward()
        if option("clipped"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    recorder.close()


def diff(a, b, *flags):
    """Compares two records. Returns the exit code, and what is printed."""
    environment = {"PYTHONPATH": str(REPOSITORY / "python"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([*DIFF, *flags, a, b], capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout + done.stderr


def first_far(text):
    """The stage and the first tensor that `ddp-mp-diff` names."""
    lines = re.split(r"is the first that differs:|The first jump is [^:]*:|The runs differ before step 0:", text)[-1].splitlines()
    for line in lines:
        found = re.match(r"  (\w+) +(.*)", line)
        if found and re.search(r" on |differs", found[2]) and not found[2].startswith(("the same", "close", "not compared")):
            tensor = re.search(r": `?([\w.]+)`?", found[2])
            return found[1], tensor[1] if tensor else ""
    return "", ""


def main():
    setups = sys.argv[1:] or SETUPS
    right = wrong = bad = 0
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for setup in setups:
            good = folder / f"{setup}.good"
            train(setup, good)
            for change in RIGHT[setup]:
                file = folder / f"{setup}.{change}"
                train(setup, file, change)
                code, text = diff(good, file, "--rtol")
                right += 1
                last = " ".join(text.split()[-40:])
                print(f"right {setup}: {change}: {'ok' if code == 0 else 'BAD ' + text}\n    {last}", flush=True)
                bad += code != 0
            for number, (change, stage, tensor) in enumerate(WRONG.get(setup, [])):
                besides = ["last digits"] if number % 2 else []
                file = folder / f"{setup}.{change}"
                train(setup, file, change, *besides)
                code, text = diff(good, file, "--rtol")
                found = first_far(text)
                wrong += 1
                is_right = code == 1 and found[0] == stage and found[1].startswith(tensor)
                bad += not is_right
                print(f"wrong {setup}: {change} {besides}: {'ok' if is_right else f'BAD {found} ' + text}", flush=True)
    print(f"{right} right and {wrong} wrong pairs, {bad} bad")
    check(not bad, "")


if __name__ == "__main__":
    main()
