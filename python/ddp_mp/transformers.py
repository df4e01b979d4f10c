"""Records a run of the Trainer of transformers: `Trainer(..., callbacks=[Record("run.record")])`."""

import torch
from transformers import TrainerCallback

from .recorder import record


class Record(TrainerCallback):
    """Records the steps of the optimizer into a new file, with the options of `ddp_mp.record`."""

    def __init__(self, file, **options):
        self.file, self.options = file, options

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **_):
        self.recorder = record(model, optimizer, self.file, **self.options)
        # No bound methods: a copy of the model would copy the recorder.
        before = lambda model, inputs, named: self.before_forward(model, inputs, named)  # noqa: E731
        after = lambda model, _, output: self.after_forward(model, output)  # noqa: E731
        hooks = [model.register_forward_pre_hook(before, with_kwargs=True), model.register_forward_hook(after)]
        self.recorder.handles += hooks

    def on_epoch_begin(self, args, state, control, **_):
        self.recorder.epoch(round(state.epoch))

    def on_train_end(self, args, state, control, **_):
        self.recorder.close()

    def before_forward(self, model, inputs, named):
        if model.training and not torch.compiler.is_compiling():
            self.recorder.batch(inputs, named)

    def after_forward(self, model, output):
        has_loss = isinstance(output, dict) and output.get("loss") is not None
        if model.training and has_loss and not torch.compiler.is_compiling():
            self.recorder.loss(output["loss"])
