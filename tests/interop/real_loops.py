"""Records usual loops of PyTorch with ddp_mp.record, and finds a mistake in each: real_loops.py [NAME ...]

Each loop runs twice, and once with a mistake. The first two records must be equal, and `ddp-mp-diff` must name the
mistake in the third. Without NAME all loops run.
"""

import json
import logging
import os
import pathlib
import sys
import tempfile
from collections import OrderedDict
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "python"))
sys.path.append(str(REPOSITORY / "benches"))
import ddp_mp  # noqa: E402
from checks import check, run  # noqa: E402
from ports import free_port  # noqa: E402

STEPS, BATCH, RANKS = 4, 8, 2


class Skipped(Exception):
    """A loop that cannot run here, with the reason."""


def dense(**more):
    """Two dense layers, and what is to be between them."""
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(first=nn.Linear(8, 16), act=nn.GELU(), **more, last=nn.Linear(16, 1)))


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


def samples(rank=0):
    """The inputs and targets of all steps."""
    inputs = torch.rand(STEPS, BATCH, 8, generator=torch.Generator().manual_seed(rank))
    return inputs, inputs.sum(2, keepdim=True)


def fit(model, optimizer, file, rank=0, forward=nullcontext, before_step=lambda: None, **options):
    """A usual loop, recorded."""
    recorder = ddp_mp.record(model, optimizer, file, **options)
    for inputs, targets in zip(*samples(rank)):
        recorder.batch(inputs, targets)
        optimizer.zero_grad()
        with forward():
            loss = mse_loss(model(inputs), targets)
        recorder.loss(loss)
        loss.backward()
        before_step()
        optimizer.step()
    recorder.close()


def plain(file, wrong):
    model = dense()
    fit(model, sgd(model, nesterov=wrong), file)


def clipping(file, wrong):
    model = dense()
    fit(model, sgd(model), file, before_step=lambda: clip_grad_norm_(model.parameters(), 0.2 if wrong else 0.1))


def groups(file, wrong):
    model = dense()
    groups = [{"params": model.first.parameters()}, {"params": model.last.parameters(), "weight_decay": 0.2 + wrong}]
    fit(model, torch.optim.AdamW(groups, lr=0.01), file)


def batch_norm(file, wrong):
    model = dense(norm=nn.BatchNorm1d(16, momentum=0.2 if wrong else 0.1))
    fit(model, sgd(model), file)


def bfloat16(file, wrong):
    model = dense()
    if wrong:
        in_float32 = torch.autocast("cpu", enabled=False)(model.last.forward)
        model.last.forward = lambda inputs: in_float32(inputs.float())
    fit(model, sgd(model), file, forward=lambda: torch.autocast("cpu", torch.bfloat16), modules=True)
    check(all(line["computes_in"] == "bfloat16" for line in step_lines(file)), "the type of autocast is not recorded")


def compiled(file, wrong):
    model = dense()
    optimizer = sgd(model, nesterov=wrong)
    try:
        fit(torch.compile(model), optimizer, file, modules=True)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        raise Skipped("torch.compile has no compiler here") from error
    modules = [[it["module"] for it in line["outputs"]] for line in step_lines(file)]
    check(modules == STEPS * [[""]], f"the outputs of the compiled model are of {modules}")


def frozen_and_tied(file, wrong):
    torch.manual_seed(0)
    model = nn.Sequential(
        OrderedDict(embedding=nn.Embedding(10, 8), frozen=nn.Linear(8, 8), head=nn.Linear(8, 10, bias=False))
    )
    model.head.weight = model.embedding.weight
    model.frozen.requires_grad_(False)
    with torch.no_grad():
        model.frozen.bias += 1e-3 * wrong
    # The optimizer may have frozen parameters, or none of some that are trained.
    optimizer = sgd(model)
    recorder = ddp_mp.record(model, optimizer, file)
    for step in range(STEPS):
        tokens = torch.arange(step, step + 6) % 10
        optimizer.zero_grad()
        cross_entropy(model(tokens), (tokens + 1) % 10).backward()
        optimizer.step()
    recorder.close()
    header = all_lines(file)[0]
    names = [[tensor["name"] for tensor in header[kind]] for kind in ["parameters", "buffers"]]
    check(names == [["embedding.weight"], ["frozen.bias", "frozen.weight"]], f"the tensors are {names}")


def skipped_steps(file, wrong):
    """The scale is too large for the first step, which the scaler leaves out."""
    model = dense()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    recorder = ddp_mp.record(model, optimizer, file)
    for inputs, targets in zip(*samples()):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = mse_loss(model(inputs), targets)
        recorder.loss(loss)
        scaler.scale(loss).backward()
        if not wrong:
            scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    recorder.close()
    states = [line["parameters"] for line in all_lines(file)[1:]]
    are_skipped = [before == after for before, after in zip(states, states[1:])]
    check(are_skipped[0] and not are_skipped[-1] and len(are_skipped) == STEPS, f"steps are skipped: {are_skipped}")


def gan(file, wrong):
    """Two optimizers, and a gradient of the discriminator that no optimizer uses."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"generator": dense(), "discriminator": nn.Linear(1, 1)})
    generator, discriminator = model.values()
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.01, betas=(0.5 if wrong else 0.9, 0.999))
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=0.01)
    recorder = ddp_mp.record(model, [of_discriminator, of_generator], file, modules=True)
    for inputs, real in zip(*samples()):
        recorder.batch({"noise": inputs, "real": [real]})
        made = generator(inputs)
        judged = [(discriminator(real), 1.0), (discriminator(made.detach()), 0.0)]
        losses = [binary_cross_entropy_with_logits(it, torch.full_like(it, label)) for it, label in judged]
        of_discriminator.zero_grad()
        sum(losses).backward()
        of_discriminator.step()
        loss = -discriminator(made).mean()
        recorder.loss(loss)
        of_generator.zero_grad()
        loss.backward()
        of_generator.step()
    recorder.close()
    names = ["generator.first", "generator.act", "generator.last", *3 * ["discriminator"]]
    for line in step_lines(file):
        check([it["module"] for it in line["outputs"]] == names, f"the modules are {line['outputs']}")
        check(line["gradients"] == line["averages"], "the gradients are not those of the optimizers' steps")


class Blocks(nn.Module):
    """Blocks whose activations are forgotten, and computed again in backward."""

    def __init__(self, forgets, wrong=False):
        super().__init__()
        torch.manual_seed(0)
        acts = [nn.GELU(), nn.GELU(approximate="tanh" if wrong else "none")]
        self.blocks = nn.ModuleList(nn.Sequential(OrderedDict(dense=nn.Linear(8, 8), act=act)) for act in acts)
        self.last, self.forgets = nn.Linear(8, 1), forgets

    def forward(self, inputs):
        for block in self.blocks:
            inputs = checkpoint(block, inputs, use_reentrant=False) if self.forgets else block(inputs)
        return self.last(inputs)


def checkpointing(file, wrong):
    model = Blocks(forgets=file.name != "again", wrong=wrong)
    fit(model, sgd(model), file, modules=True)
    for line in step_lines(file):
        lens = [len(line[of_modules]) for of_modules in ["outputs", "output_gradients"]]
        check(lens == [5, 5], f"{lens} outputs and gradients of 5 modules")


def lightning(file, wrong):
    try:
        import lightning.pytorch as pl
    except ImportError as error:
        raise Skipped(error) from error
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    from ddp_mp.lightning import Record

    class Dense(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = dense()

        def training_step(self, batch):
            inputs, targets = batch
            return mse_loss(self.net(inputs), targets)

        def configure_optimizers(self):
            return sgd(self)

    options = ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"]
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.2 if wrong else 0.1,
        callbacks=[Record(file, modules=True)],
        **dict.fromkeys(options, False),
    )
    data = TensorDataset(*(tensors.flatten(0, 1) for tensors in samples()))
    trainer.fit(Dense(), DataLoader(data, batch_size=BATCH))
    lines = step_lines(file)
    check([line["epoch"] for line in lines] == [0, 0, 1, 1], f"the epochs of the steps: {lines}")
    check(all(len(line["loss"]) == 2 and len(line["batch"]) == 4 for line in lines), f"two batches a step: {lines}")


def transformers(file, wrong):
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    try:
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
    except ImportError as error:
        raise Skipped(error) from error
    from ddp_mp.transformers import Record

    torch.manual_seed(0)
    tokens = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1}
    size = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 16, **tokens}
    model = GPT2LMHeadModel(GPT2Config(**size, activation_function="relu" if wrong else "gelu"))
    tokens = torch.randint(50, (4 * STEPS, 12))
    arguments = TrainingArguments(
        output_dir=str(file.with_suffix(".out")),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        use_cpu=True,
        bf16=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data = [{"input_ids": it, "labels": it} for it in tokens]
    Trainer(model, arguments, train_dataset=data, callbacks=[Record(file, modules=True)]).train()
    lines = step_lines(file)
    check(all(len(line["loss"]) == 1 and len(line["batch"]) >= 2 for line in lines), f"a batch of each step: {lines}")
    check(all(line["computes_in"] == "bfloat16" for line in lines), "the type of autocast is not recorded")


def ddp(file, wrong, rank):
    model = DistributedDataParallel(dense(norm=nn.BatchNorm1d(16)))
    if wrong:
        model.register_comm_hook(None, fp16_compress_hook)
    fit(model, sgd(model), file, rank)


def bucket_view(file, wrong, rank):
    model = DistributedDataParallel(dense(norm=nn.BatchNorm1d(16)), gradient_as_bucket_view=True)
    fit(model, sgd(model, nesterov=wrong), file, rank)


def without_ddp(file, wrong, rank):
    """What each rank does alone, to compare its own gradients with."""
    model = dense(norm=nn.BatchNorm1d(16))
    fit(model, sgd(model, nesterov=wrong), file, rank)


def accumulation(file, wrong, rank):
    """Two batches in each step."""
    model = DistributedDataParallel(dense())
    optimizer = sgd(model)
    recorder = ddp_mp.record(model, optimizer, file)
    for number, (inputs, targets) in enumerate(zip(*samples(rank))):
        recorder.batch(inputs, targets)
        is_last = number % 2 == 1
        with nullcontext() if is_last else model.no_sync():
            loss = mse_loss(model(inputs), targets)
            recorder.loss(loss)
            (loss if wrong else loss / 2).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    recorder.close()


# What `ddp-mp-diff` says of the mistake.
LOOPS = {
    plain: ["option nesterov: A has false, B has true", "parameters  4 of 4 on rank 0: `first.weight`"],
    clipping: ["gradients   the same", "averages    4 of 4 on rank 0: `last.bias`"],
    groups: ["option weight_decay of group 1: A has 0.2, B has 1.2", "parameters  2 of 4 on rank 0: `last.weight`"],
    batch_norm: ["parameters  the same", "buffers     2 of 3 on rank 0: `norm.running_mean`"],
    bfloat16: ["outputs     differs on rank 0: `last`"],
    compiled: ["averages    the same", "parameters  4 of 4 on rank 0: `first.weight`"],
    frozen_and_tied: ["The runs differ before step 0", "buffers     1 of 2 on rank 0: `frozen.bias`"],
    skipped_steps: ["gradients   the same", "averages    4 of 4 on rank 0: `last.bias`"],
    gan: ["option betas of optimizer 1", "parameters  4 of 6 on rank 0: `generator.first.weight`"],
    checkpointing: ["outputs     differs on rank 0: `blocks.1.act`"],
    lightning: ["gradients   the same", "averages    4 of 4 on rank 0: `net.last.bias`"],
    transformers: ["batch       the same", "outputs     differs on rank 0: `transformer.h.0.mlp.act`"],
}
LOOPS_ON_RANKS = {
    ddp: ["gradients   the same", "averages    6 of 6 on all ranks: `last.bias`"],
    bucket_view: ["averages    the same", "parameters  6 of 6 on all ranks: `first.weight`"],
    without_ddp: ["averages    the same", "parameters  6 of 6 on all ranks: `first.weight`"],
    accumulation: ["loss        the same", "gradients   4 of 4 on all ranks: `last.bias`"],
}
# The last part of a file's name, and whether the loop has the mistake.
RUNS = {"once": False, "again": False, "wrong": True}


def all_lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def step_lines(file):
    return [line for line in all_lines(file) if line["event"] == "step"]


def diff(*arguments, code):
    """What `ddp-mp-diff` prints."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "python")}
    return run(sys.executable, "-m", "ddp_mp", *arguments, code=code, env=environment).stdout


def compare(folder, expected):
    found = diff(folder / "once", folder / "again", code=0)
    check("Equal: the start and" in found, f"{folder.name}: two equal runs: {found}")
    found = diff(folder / "once", folder / "wrong", code=1)
    for text in expected:
        check(text in found, f"{folder.name}: {text!r} is not in: {found}")
    print(f"real_loops: the mistake is found: {folder.name}", flush=True)


def try_alone(loop, folder):
    """Tries a loop that needs no other rank."""
    try:
        for name, wrong in RUNS.items():
            loop(folder / name, wrong)
        compare(folder, LOOPS[loop])
    except Skipped as reason:
        print(f"real_loops: skipped {folder.name}: {reason}", flush=True)


def refused_if_sharded(folder):
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        from torch.distributed._composable.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh

    model = dense()
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    try:
        ddp_mp.record(model, sgd(model), folder / "sharded")
        check(False, "a sharded model is recorded")
    except TypeError as error:
        check("`first.weight` is sharded" in str(error), error)
    check(not list(folder.glob("sharded*")), "there is a file of a sharded model")


def on_rank(rank, address, folder, loops):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    for loop in loops:
        for name, wrong in RUNS.items():
            loop(folder / loop.__name__ / name, wrong, rank)
    refused_if_sharded(folder)
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(folder, loops):
    mp.spawn(on_rank, (f"tcp://127.0.0.1:{free_port()}", folder, loops), nprocs=RANKS)
    for loop in loops:
        compare(folder / loop.__name__, LOOPS_ON_RANKS[loop])
    if not {ddp, bucket_view, without_ddp} <= set(loops):
        return
    found = diff(folder / "ddp/once", folder / "bucket_view/once", code=0)
    check("Equal: the start and 4 steps" in found, f"gradient_as_bucket_view changes: {found}")
    for rank in range(RANKS):
        first, alone = [step_lines(folder / loop / f"once.{rank}")[0] for loop in ["ddp", "without_ddp"]]
        check(first["gradients"] == alone["gradients"], f"the gradients of rank {rank} are not its own")
        check(first["averages"] != alone["averages"], f"the gradients of rank {rank} are not averaged")


def main():
    torch.set_num_threads(1)
    names = sys.argv[1:] or [loop.__name__ for loop in [*LOOPS, *LOOPS_ON_RANKS]]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for name in names:
            (folder / name).mkdir()
        loops = [loop for loop in LOOPS_ON_RANKS if loop.__name__ in names]
        if loops:
            on_ranks(folder, loops)
        for loop in LOOPS:
            if loop.__name__ in names:
                try_alone(loop, folder / loop.__name__)
        if (folder / "plain/once").exists() and (folder / "compiled/once").exists():
            found = diff("--rtol", folder / "plain/once", folder / "compiled/once", code=0)
            check("Equal: the start" in found and "Close: " in found, f"a compiled model is not close: {found}")


if __name__ == "__main__":
    main()
