"""Records a training run of PyTorch as JSON lines of hashes, which `ddp-mp diff` reads."""

import functools
import json
import math
import pathlib
import platform

import torch
import torch.distributed as dist
import xxhash
from safetensors.torch import save
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel


def about(named):
    """Names the types and shapes of tensors."""
    return [{"name": n, "dtype": str(t.dtype)[6:], "shape": list(t.shape)} for n, t in named]


def hashed(tensor):
    """Hashes the values of a tensor."""
    values = tensor.detach().cpu().contiguous().reshape(-1)
    return f"{xxhash.xxh3_64_intdigest(values.view(torch.uint8).numpy()):016x}"


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



def recorders():
    """Returns the recorders whose optimizers a GradScaler may leave out: it does not call the optimizer of a step that it skips."""
    step = GradScaler.step
    if hasattr(step, "recorders"):
        return step.recorders
    known = []

    @functools.wraps(step)
    def step_or_skip(scaler, optimizer, *args, **kwargs):
        before = [(it, it.number) for it in known if it.optimizer is optimizer]
        result = step(scaler, optimizer, *args, **kwargs)
        for it, number in before:
            if it.number == number:
                it.skipped(optimizer)
        return result

    step_or_skip.recorders = known
    GradScaler.step = step_or_skip
    return known

class Recorder:
    """Writes a line for each recorded step of an optimizer, and the tensors of one step.

    Several backwards before a step must be in DDP's `no_sync`, but for the last one.
    """

    def __init__(self, model, optimizer, file, every, keep, keep_step):
        is_ddp = isinstance(model, DistributedDataParallel)
        self.model = model.module if is_ddp else model
        self.parameters = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        self.every, self.number, self.now = every, 0, 0
        there = dist.is_available() and dist.is_initialized()
        self.rank, world = (dist.get_rank(), dist.get_world_size()) if there else (0, 1)
        # Before the next forward, DDP replaces these with those of rank 0.
        replaced = is_ddp and model.broadcast_buffers and dist.get_rank(model.process_group) > 0
        self.replaced = {name for name, _ in self.model.named_buffers()} if replaced else set()
        self.kept_file = None if keep is None else new_file(keep, self.rank, world)
        self.file = open(new_file(file, self.rank, world), "xb", buffering=0)
        self.keep_step, self.kept, self.own = keep_step, {}, {}
        self.clear()
        plain = (int, float, str, bool, type(None))
        options = {k: v for k, v in optimizer.defaults.items() if isinstance(v, plain)}
        version = torch.__version__.split("+")[0]
        self.write({"event": "header", "format": 1, "program": f"PyTorch {version}", "libtorch": version,
                    "processor": processor(), "world_size": world, "every": every,
                    "options": {"optimizer": type(optimizer).__name__, **options},
                    "parameters": about(self.parameters), "buffers": about(self.buffers())})
        self.write({"event": "start", "step": 0, "rank": self.rank, **self.state(replaced=set())})
        for number, (_, parameter) in enumerate(self.parameters):
            parameter.register_hook(lambda gradient, number=number: self.own_gradient(number, gradient))
        self.model.register_forward_hook(self.output)
        optimizer.register_step_pre_hook(self.before)
        optimizer.register_step_post_hook(self.after)
        self.optimizer = optimizer
        recorders().append(self)

    def is_recorded(self):
        """Tells whether this step is recorded."""
        return self.number % self.every == 0

    def is_kept(self):
        """Tells whether the tensors of this step are kept."""
        return self.kept_file is not None and self.number == self.keep_step

    def clear(self):
        """Begins a step: forgets what the last one has left."""
        self.own.clear()
        self.batches, self.losses, self.indices = [], [], []
        self.counts = {"batch": 0, "output": 0, "loss": 0}
        self.keep("before", self.parameters)

    def keep(self, prefix, tensors):
        """Keeps copies of tensors, each under its name behind the prefix."""
        if self.is_kept():
            self.kept.update({f"{prefix}.{name}": t.detach().clone().contiguous() for name, t in tensors if t is not None})

    def keep_next(self, prefix, tensors):
        """Keeps the tensors of the next batch, under its number."""
        number = self.counts[prefix]
        self.counts[prefix] += 1
        self.keep(prefix, [(f"{number}{name}", tensor) for name, tensor in tensors])

    def write(self, line):
        """Writes a line as a whole."""
        self.file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def buffers(self):
        """Returns all tensors that are not trained, by name."""
        trained = {name for name, _ in self.parameters}
        return sorted((n, t) for n, t in self.model.state_dict().items() if n not in trained)

    def state(self, replaced):
        """Returns the hashes of the model's tensors, without the buffers that are replaced."""
        buffers = [None if name in replaced else hashed(tensor) for name, tensor in self.buffers()]
        return {"parameters": [hashed(p) for _, p in self.parameters], "buffers": buffers}

    def own_gradient(self, number, gradient):
        """Copies this rank's gradient before it is averaged, unscaled or clipped, with what earlier backwards left."""
        if self.is_recorded() or self.is_kept():
            before = self.parameters[number][1].grad
            self.own[number] = gradient.detach().clone() if before is None else before.detach() + gradient.detach()

    def output(self, module, _, output):
        """Keeps the output of a forward pass in training."""
        if module.training and isinstance(output, torch.Tensor):
            self.keep_next("output", [("", output)])

    def before(self, optimizer, *_):
        """Hashes the gradients, before the optimizer's step."""
        names = [name for name, _ in self.parameters]
        averages = [unscaled(p.grad, optimizer) for _, p in self.parameters]
        gradients = [self.own.get(i) for i in range(len(names))]
        self.keep("gradient", zip(names, gradients))
        self.keep("average", zip(names, averages))
        if self.is_recorded():
            self.lr = float(optimizer.param_groups[0]["lr"])
            self.averages = [None if t is None else hashed(t) for t in averages]
            self.gradients = [None if t is None else hashed(t) for t in gradients]

    def after(self, *_):
        """Writes the line of a step, after the optimizer's step."""
        if self.is_recorded():
            self.write({"event": "step", "step": self.number, "rank": self.rank, "epoch": self.now, "lr": self.lr,
                        "samples": self.indices or None, "batch": self.batches or None, "loss": self.losses,
                        "gradients": self.gradients, "averages": self.averages, **self.state(self.replaced)})
        self.keep("parameter", self.parameters)
        self.keep("buffer", [(name, tensor) for name, tensor in self.buffers() if name not in self.replaced])
        if self.is_kept():
            with open(self.kept_file, "xb") as file:
                file.write(save(self.kept))
            self.kept = {}
        self.number += 1
        self.clear()

    def skipped(self, optimizer):
        """Writes the line of a step that the loop leaves out, because its gradients are not finite, for example."""
        self.before(optimizer)
        self.after()

    def batch(self, inputs, *targets):
        """Adds the hashes of a batch."""
        if self.is_recorded():
            self.batches += map(hashed, [inputs, *targets])
        names = [".inputs", ".targets", *(f".more_inputs.{more}" for more in range(len(targets)))]
        self.keep_next("batch", zip(names, [inputs, *targets]))

    def loss(self, loss):
        """Adds a loss."""
        if self.is_recorded():
            value = loss.item() if isinstance(loss, torch.Tensor) else float(loss)
            self.losses.append(value if math.isfinite(value) else None)
        if isinstance(loss, torch.Tensor):
            self.keep_next("loss", [("", loss)])

    def samples(self, indices):
        """Adds the indices of the samples."""
        if self.is_recorded():
            self.indices += map(int, indices)

    def epoch(self, number):
        """Sets the number of the epoch."""
        self.now = number


def record(model, optimizer, file, every=1, keep=None, keep_step=0):
    """Records the steps of an optimizer into a new file; of several ranks, each into its own.

    Call it after the model is wrapped in DistributedDataParallel. Before `optimizer.step()` the loop may call `batch`,
    `loss`, `samples` and `epoch` of the returned recorder. `keep` is a new safetensors file, which gets all tensors of the
    step with the number `keep_step`; of several ranks, each writes its own. Steps that a GradScaler skips are recorded, too.
    Where the loop itself skips a step, it must call `skipped` of the recorder.
    """
    return Recorder(model, optimizer, file, every, keep, keep_step)
