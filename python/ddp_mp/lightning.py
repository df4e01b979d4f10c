"""Records a run of Lightning: `Trainer(callbacks=[Record("run.record")])`."""

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from .recorder import record


class Record(Callback):
    """Records the steps of all optimizers into a new file, with the options of `ddp_mp.record`."""

    def __init__(self, file, **options):
        self.file, self.options = file, options

    def on_train_start(self, trainer, pl_module):
        self.recorder = record(trainer.model, trainer.optimizers, self.file, **self.options)

    def on_train_epoch_start(self, trainer, pl_module):
        self.recorder.epoch(trainer.current_epoch)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.recorder.batch(batch)

    def on_before_backward(self, trainer, pl_module, loss):
        self.recorder.loss(loss)

    def on_train_end(self, trainer, pl_module):
        self.recorder.close()
