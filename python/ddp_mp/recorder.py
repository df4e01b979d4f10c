"""Records a training run of PyTorch as JSON lines of fingerprints, which `ddp-mp diff` and `ddp-mp-diff` read."""

import functools
import json
import math
import pathlib
import platform
import weakref

import torch
import torch.distributed as dist
from torch.amp import GradScaler

from . import native
from .model import computes_in, modules_in, options_of, refuse_sharded, tensors_in, without_wrappers

COMPACT = (",", ":")


def about(tensor):
    """Names the type and the shape of a tensor."""
    return {"dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape)}


def listed(fingerprints):
    """Returns fingerprints as a list in JSON."""
    return f"[{','.join(it or 'null' for it in fingerprints)}]"


def unscaled(gradient, optimizer):
    """Returns a gradient without the scale that a fused optimizer removes itself, in its step with a GradScaler."""
    scale = getattr(optimizer, "grad_scale", None)
    return gradient if gradient is None or scale is None else gradient / scale.to(gradient.device)


def processor():
    """Names this machine's processor."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(": ", 1)[1] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def new_file(name, rank, world):
    """Returns the path of a rank's file, which must not exist yet."""
    path = pathlib.Path(name)
    if world > 1:
        path = path.with_name(f"{path.stem}.{rank}{path.suffix}")
    if path.exists():
        raise FileExistsError(f"{path} exists: remove it, or record to another file")
    return path


def saver():
    """Returns what makes a file of tensors."""
    try:
        import numpy  # noqa: F401, which safetensors needs, but not before it saves
        from safetensors.torch import save
    except ImportError:
        raise ImportError("to keep tensors, ddp_mp.record needs two packages: pip install safetensors numpy") from None
    return save


def recorders():
    """Returns all recorders. A GradScaler tells them when it skips a step, in which it does not call the optimizer."""
    step = GradScaler.step
    if hasattr(step, "recorders"):
        return step.recorders
    known = weakref.WeakSet()

    @functools.wraps(step)
    def step_or_skip(scaler, optimizer, *args, **kwargs):
        inner = without_wrappers(optimizer)
        before = [(it, it.made) for it in known if inner in it.optimizers]
        result = step(scaler, optimizer, *args, **kwargs)
        for it, made in before:
            if it.made == made:
                it.skipped(inner)
        return result

    step_or_skip.recorders = known
    GradScaler.step = step_or_skip
    return known


class Recorder:
    """Writes a line for each recorded step of the optimizers, and the tensors of one step.

    Several backwards before a step must be in DDP's `no_sync`, but for the last one.
    """

    def __init__(self, model, optimizers, file, every, keep, keep_step, modules, whole):
        native.library()
        self.save = None if keep is None else saver()
        self.optimizers = [without_wrappers(it) for it in optimizers]
        self.every, self.whole, self.keep_step, self.modules = every, whole, keep_step, modules
        self.number, self.made, self.now, self.kept, self.handles, self.watching = 0, 0, 0, {}, [], []
        self.find_tensors(list(modules_in(model)))
        there = dist.is_available() and dist.is_initialized()
        self.rank, world = (dist.get_rank(), dist.get_world_size()) if there else (0, 1)
        version = torch.__version__.split("+")[0]
        header = {"event": "header", "format": 2, "program": f"PyTorch {version}", "libtorch": version,
                  "processor": processor(), "world_size": world, "every": every, "whole": whole,
                  "options": options_of(self.optimizers),
                  "parameters": [{"name": name, **about(tensor)} for name, tensor in self.parameters],
                  "buffers": [{"name": name, **about(tensor)} for name, tensor in self.buffers()]}
        start = self.state(None, self.buffers())
        # Nothing is written before all is right.
        self.kept_file = None if keep is None else new_file(keep, self.rank, world)
        self.file = open(new_file(file, self.rank, world), "xb", buffering=0)
        self.write(header)
        self.write({"event": "start", "step": 0, "rank": self.rank}, **start)
        self.clear()
        for optimizer in self.optimizers:
            handles = [optimizer.register_step_pre_hook(self.before), optimizer.register_step_post_hook(self.after)]
            self.handles += handles
        recorders().add(self)

    def find_tensors(self, modules):
        """Finds the tensors of the model, and the modules that are called."""
        self.model, parameters, others, self.replaced = modules[0].module, {}, {}, set()
        for name, module, _, is_replaced in modules:
            prefix = f"{name}." if name else ""
            for key, tensor in module._parameters.items():
                # Layers may share it.
                if tensor is not None and parameters.setdefault(tensor, prefix + key) == prefix + key:
                    others[prefix + key] = module._parameters, key
            for key, tensor in module._buffers.items():
                if tensor is not None and key not in module._non_persistent_buffers_set:
                    others[prefix + key] = module._buffers, key
                    self.replaced |= {prefix + key} if is_replaced else set()
        self.parameters = [(name, tensor) for tensor, name in parameters.items() if tensor.requires_grad]
        trained = {name for name, _ in self.parameters}
        self.others = sorted((name, place) for name, place in others.items() if name not in trained)
        refuse_sharded([it.module for it in modules], [*self.parameters, *self.buffers()])
        if not self.modules:
            # The first child sees autocast, too, if a framework or the model itself begins it.
            modules = modules[:1] + [it for it in modules[1:] if list(it.module.parameters())][:1]
        self.names = {it.called: it.name for it in modules if it.called is not None}
        devices = [tensor.device.type for _, tensor in self.parameters]
        self.device = next((it for it in devices if torch.amp.is_autocast_available(it)), "cpu")

    def hooks(self):
        """Registers the hooks of the model, and yields their handles."""
        # They are no bound methods, because a copy of the model would copy the recorder. Those of tensors do not keep
        # it, because garbage collection does not see that.
        it = weakref.ref(self)
        for index, (_, parameter) in enumerate(self.parameters):
            own_gradient = functools.partial(lambda index, _: it() and it().own_gradient(index), index)
            yield parameter.register_post_accumulate_grad_hook(own_gradient)
        for module in self.names:
            yield module.register_forward_hook(lambda module, _, output: self.output(module, output))

    def watch(self, watches):
        """Adds the hooks of the model, or removes them: in steps that are not recorded they would cost time."""
        if watches and not self.watching:
            self.watching = list(self.hooks())
        elif not watches:
            for handle in self.watching:
                handle.remove()
            self.watching = []

    def close(self):
        """Ends the record: removes all hooks."""
        self.watch(False)
        for handle in self.handles:
            handle.remove()
        self.file.close()
        self.kept_file = None
        recorders().discard(self)

    def is_recorded(self):
        """Tells whether this step is recorded."""
        return self.number % self.every == 0 and not self.file.closed

    def is_kept(self):
        """Tells whether the tensors of this step are kept."""
        return self.number == self.keep_step and self.kept_file is not None

    def is_seen(self):
        """Tells whether this step is recorded or kept."""
        return self.is_recorded() or self.is_kept()

    def clear(self):
        """Begins a step: forgets what the last one has left."""
        self.batches, self.losses, self.indices, self.outputs, self.output_gradients = [], [], [], [], []
        self.own, self.gradients, self.averages, self.returned, self.computes_in = {}, {}, {}, {}, None
        self.waiting, self.left = set(self.optimizers), set(range(len(self.parameters)))
        self.counts = {"batch": 0, "output": 0, "loss": 0}
        self.watch(self.is_seen())
        self.keep("before", self.parameters)

    def keep(self, prefix, tensors):
        """Keeps copies of tensors, each under its name behind the prefix."""
        if self.is_kept():
            tensors = [(name, tensor) for name, tensor in tensors if tensor is not None]
            self.kept.update({f"{prefix}.{name}": tensor.detach().clone().contiguous() for name, tensor in tensors})

    def keep_next(self, prefix, tensors):
        """Keeps the tensors of the next batch, under its number."""
        number = self.counts[prefix]
        self.counts[prefix] += 1
        self.keep(prefix, [(f"{number}{name}", tensor) for name, tensor in tensors])

    def write(self, line, **texts):
        """Writes a line as a whole. The texts are JSON already."""
        texts = "".join(f',"{name}":{text}' for name, text in texts.items())
        self.file.write(f"{json.dumps(line, separators=COMPACT)[:-1]}{texts}}}\n".encode())

    def fingerprint(self, tensor):
        """Returns the fingerprint of a tensor, or of the part of it that is due."""
        return native.fingerprint(tensor, None if self.whole else self.number)

    def of_module(self, name, tensor):
        """Returns the fingerprint of what a module has returned, or of its gradient."""
        of_it = json.dumps({"module": name, **about(tensor)}, separators=COMPACT)
        return f"{of_it[:-1]},{self.fingerprint(tensor)[1:]}"

    def buffers(self):
        """Returns all tensors that are not trained, by name."""
        return [(name, place[key]) for name, (place, key) in self.others]

    def state(self, step, buffers):
        """Returns the fingerprints of the model's tensors."""
        made = [[native.fingerprint(tensor, step) for _, tensor in self.parameters]]
        made.append([None if tensor is None else native.fingerprint(tensor, step) for _, tensor in buffers])
        return dict(zip(["parameters", "buffers"], map(listed, made)))

    def output(self, module, output):
        """Takes what a module returns in training."""
        if torch.compiler.is_compiling():
            return
        # Activation checkpointing calls modules once more, in backward.
        is_backward = torch._C._current_graph_task_id() >= 0
        if module not in self.names or is_backward or not (self.model.training and torch.is_grad_enabled()):
            return
        name = self.names[module]
        self.computes_in = self.computes_in or computes_in(self.device)
        if name == "" and isinstance(output, torch.Tensor):
            self.keep_next("output", [("", output)])
        if not self.modules or not self.is_recorded():
            return
        for tensor in tensors_in(output):
            known, version = self.returned.get(id(tensor), (lambda: None, 0))
            if known() is tensor and version == tensor._version:
                continue
            self.returned[id(tensor)] = weakref.ref(tensor), tensor._version
            self.outputs.append(self.of_module(name, tensor))
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self.output_gradient, name, self.number))

    def output_gradient(self, name, number, gradient):
        """Takes the gradient of what a module has returned."""
        if number == self.number and self.is_recorded() and gradient is not None:
            self.output_gradients.append(self.of_module(name, gradient))

    def own_gradient(self, index):
        """Takes this rank's gradient before it is averaged, unscaled or clipped, with what earlier backwards left."""
        gradient = self.parameters[index][1].grad
        if gradient is not None:
            made = self.fingerprint(gradient) if self.is_recorded() else None
            self.own[index] = made, gradient.detach().clone() if self.is_kept() else None

    def take(self, indices, optimizer=None):
        """Takes the gradients of parameters as the optimizer gets them, and the own ones that they were made of."""
        for index in indices:
            name, parameter = self.parameters[index]
            average, (own, kept) = unscaled(parameter.grad, optimizer), self.own.get(index, (None, None))
            self.keep("gradient", [(name, kept)])
            self.keep("average", [(name, average)])
            if self.is_recorded():
                self.gradients[index] = own
                self.averages[index] = None if average is None else self.fingerprint(average)

    def take_all_of(self, optimizer):
        """Takes the gradients of an optimizer's parameters, and the learning rate."""
        theirs = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        theirs = {index for index, (_, parameter) in enumerate(self.parameters) if id(parameter) in theirs}
        self.take(theirs, optimizer)
        self.left -= theirs
        if optimizer is self.optimizers[0]:
            self.lr = float(optimizer.param_groups[0].get("lr", 0))

    def before(self, optimizer, arguments, named):
        """Takes the gradients before the optimizer's step: after its closure, if it has one that makes them."""
        if not self.is_seen():
            return None
        closure = named.get("closure", arguments[1] if len(arguments) > 1 else None)
        if closure is None:
            return self.take_all_of(optimizer)

        def closure_and_gradients():
            result = closure()
            self.take_all_of(optimizer)
            return result

        return arguments[:1], {**named, "closure": closure_and_gradients}

    def after(self, optimizer, *_):
        """Ends an optimizer's step; after that of the last one, writes the line of the step."""
        self.made += 1
        self.waiting.discard(optimizer)
        if self.waiting:
            return
        if self.is_seen():
            self.end()
        self.number += 1
        self.clear()

    def end(self):
        """Writes what is known at the end of a step."""
        self.take(self.left)
        buffers = [(name, None if name in self.replaced else tensor) for name, tensor in self.buffers()]
        if self.is_recorded():
            self.write_step(buffers)
        self.keep("parameter", self.parameters)
        self.keep("buffer", buffers)
        if self.is_kept():
            with open(self.kept_file, "xb") as file:
                file.write(self.save(self.kept))
            self.kept = {}

    def write_step(self, buffers):
        """Writes the line of a step."""
        line = {"event": "step", "step": self.number, "rank": self.rank, "epoch": self.now, "lr": self.lr}
        if self.computes_in is not None:
            line["computes_in"] = self.computes_in
        line.update(samples=self.indices or None, loss=self.losses)
        texts = {"batch": listed(self.batches) if self.batches else "null"}
        if self.modules:
            texts.update(outputs=listed(self.outputs), output_gradients=listed(self.output_gradients))
        indices = range(len(self.parameters))
        for name, made in [("gradients", self.gradients), ("averages", self.averages)]:
            texts[name] = listed(map(made.get, indices))
        self.write(line, **texts, **self.state(None if self.whole else self.number, buffers))

    def skipped(self, optimizer):
        """Ends a step that the loop leaves out, because its gradients are not finite, for example."""
        optimizer = without_wrappers(optimizer)
        if self.is_seen():
            self.take_all_of(optimizer)
        self.after(optimizer)

    def batch(self, *batch):
        """Adds the tensors of a batch, which may be in lists and dicts: the inputs, the targets, and more inputs."""
        if not self.is_seen():
            return
        tensors = list(tensors_in(batch))
        if self.is_recorded():
            self.batches += map(self.fingerprint, tensors)
        names = [".inputs", ".targets", *(f".more_inputs.{more}" for more in range(len(tensors)))]
        self.keep_next("batch", zip(names, tensors))

    def loss(self, loss):
        """Adds a loss."""
        if self.is_recorded():
            value = loss.item() if isinstance(loss, torch.Tensor) else float(loss)
            self.losses.append(value if math.isfinite(value) else None)
        if self.is_kept() and isinstance(loss, torch.Tensor):
            self.keep_next("loss", [("", loss)])

    def samples(self, indices):
        """Adds the indices of the samples."""
        if self.is_recorded():
            self.indices += map(int, indices.tolist() if isinstance(indices, torch.Tensor) else indices)

    def epoch(self, number):
        """Sets the number of the epoch."""
        self.now = int(number)


def record(model, optimizer, file, every=1, keep=None, keep_step=0, modules=False, whole=False):
    """Records the steps of an optimizer, or of several, into a new file; of several ranks, each into its own.

    Call it after the model is wrapped in DistributedDataParallel. Before `optimizer.step()` the loop may call `batch`,
    `loss`, `samples` and `epoch` of the returned recorder, and `close` after the last step. With several optimizers a
    step ends when each of them has made its own. Steps that a GradScaler skips are recorded, too. Where the loop itself
    skips a step, it must call `skipped`.

    `keep` is a new safetensors file, which gets all tensors of the step with the number `keep_step`; of several ranks,
    each writes its own. With `modules` the record also has what each module returns, and the gradient of that; of what
    is compiled, only what it returns as a whole. Of a tensor with more than 32768 elements a step has one part in turn,
    but for `whole`.
    """
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"every={every!r}: record every step (1), or every N-th")
    optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    return Recorder(model, optimizers, file, every, keep, keep_step, modules, whole)
