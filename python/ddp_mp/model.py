"""What a training run is made of: the modules and tensors of a model, and the options of its optimizers."""

import dataclasses
import json
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# In these attributes torch.compile and activation checkpointing have the module that they wrap.
WRAPPED = ["_orig_mod", "_checkpoint_wrapped_module"]


def tensors_in(value):
    """Yields the tensors in nested tuples, lists, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        value = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif not isinstance(value, (tuple, list)):
        return
    for inner in value:
        yield from tensors_in(inner)


class Found(NamedTuple):
    """A module of a model."""

    name: str
    module: torch.nn.Module
    # What is called in its place, such as a wrapper; None if it is in what is compiled, which stays as it is.
    called: torch.nn.Module | None
    # Whether DDP replaces its buffers with those of rank 0 before the next forward pass.
    is_replaced: bool


def unwrapped(module):
    """Returns a module without the wrappers around it, and those, the outermost first."""
    wrappers = []
    while True:
        names = ["module"] if isinstance(module, DistributedDataParallel) else WRAPPED
        inner = [module._modules[name] for name in names if name in module._modules]
        if not inner:
            return module, wrappers
        wrappers.append(module)
        [module] = inner


def modules_in(module, name="", is_replaced=False, is_compiled=False, seen=None):
    """Yields all modules in the order of `named_modules`, with the names that they have without wrappers."""
    seen = set() if seen is None else seen
    inner, wrappers = unwrapped(module)
    if inner in seen:
        return
    seen.add(inner)
    of_ddp = [it for it in wrappers if isinstance(it, DistributedDataParallel)]
    is_replaced |= any(it.broadcast_buffers and dist.get_rank(it.process_group) > 0 for it in of_ddp)
    called = next(it for it in [*wrappers, inner] if it not in of_ddp)
    yield Found(name, inner, None if is_compiled else called, is_replaced)
    is_compiled |= any("_orig_mod" in it._modules for it in wrappers)
    for key, child in inner.named_children():
        yield from modules_in(child, f"{name}.{key}" if name else key, is_replaced, is_compiled, seen)


def refuse_sharded(modules, tensors):
    """Refuses a model of which each rank has a part."""
    sharded = [f"`{name}`" for name, tensor in tensors if type(tensor).__name__ == "DTensor"]
    if any(base.__name__ == "FullyShardedDataParallel" for module in modules for base in type(module).__mro__):
        sharded.insert(0, "the model")
    if sharded:
        raise TypeError(
            f"ddp_mp.record needs whole tensors on each rank, and {sharded[0]} is sharded (FSDP or tensor parallel):"
            " record a run with DistributedDataParallel or on one device instead, if need be of a smaller model"
        )


def without_wrappers(optimizer):
    """Returns an optimizer without what Lightning or accelerate have around it."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def is_plain(value):
    """Tells whether JSON has such a value."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def options_of(optimizers):
    """Names the options of the optimizers, of further groups of parameters those that differ from the first group's."""
    options = {}
    for number, optimizer in enumerate(optimizers):
        name, of_it = (f"optimizer {number}", f" of optimizer {number}") if number else ("optimizer", "")
        options[name] = type(optimizer).__name__
        for index, group in enumerate(optimizer.param_groups):
            # Without what a schedule has made of it.
            group = {**optimizer.defaults, **group, "lr": group.get("initial_lr", group.get("lr"))}
            of_group = f" of group {index}{of_it}" if index else of_it
            for key in optimizer.defaults:
                value = group[key].tolist() if isinstance(group[key], torch.Tensor) else group[key]
                if is_plain(value) and (index == 0 or value != options.get(key + of_it)):
                    options[key + of_group] = value
    return options


def computes_in(device):
    """Names the type in which this device computes now, if it is not that of the tensors."""
    if torch.is_autocast_enabled(device):
        return str(torch.get_autocast_dtype(device))[6:]
    if device != "cuda":
        return None
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    # PyTorch 2.9 has other names for it, and refuses the old ones in some cases.
    if hasattr(matmul, "fp32_precision"):
        is_tf32 = "tf32" in [matmul.fp32_precision, cudnn.conv.fp32_precision]
    else:
        is_tf32 = matmul.allow_tf32 or cudnn.allow_tf32
    return "tfloat32" if is_tf32 else None
