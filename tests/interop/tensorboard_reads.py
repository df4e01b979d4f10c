"""Has TensorBoard itself read the files of a run, and compares them with the run's metrics.

tensorboard_reads.py PROGRAM
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from checks import check, run

EPOCHS = 3
FLAGS = [
    *["--dataset=digits", "--model=cnn", "--channels=8,16", "--loss=cross-entropy"],
    *["--optimizer=adamw", "--lr=0.005", "--max-grad-norm=1", "--val-fraction=0.2"],
    *[f"--max-epochs={EPOCHS}", "--log-every=10", "--nproc-per-node=2", "--save-every-epochs=1"],
]
METRICS = {"train": ["loss", "lr", "grad_norm", "step_us", "samples_per_second"], "validation": ["loss", "accuracy"]}


def scalars(board, metrics):
    """Each number of the metrics is there once, at its step, as a float32; and no other."""
    expected = {}
    for line in metrics:
        for name in METRICS[line["event"]]:
            point = (line["step"], np.float32(line[name]))
            expected.setdefault(f"{line['event']}/{name}", []).append(point)
    check(set(board.Tags()["scalars"]) == set(expected), f"the tags are {board.Tags()['scalars']}")
    for tag, points in expected.items():
        read = [(point.step, np.float32(point.value)) for point in board.Scalars(tag)]
        check(read == points, f"{tag} is {read}, and in the metrics {points}")
    return sum(map(len, expected.values()))


def histograms(board, checkpoints):
    """Each tensor of the model has one after each epoch: that of the checkpoint of this step."""
    names = {f"model/{name}" for name in checkpoints[0][1]}
    check(set(board.Tags()["histograms"]) == names, f"the tags are {board.Tags()['histograms']}")
    for tag in names:
        read = board.Histograms(tag)
        check(len(read) == len(checkpoints), f"{len(read)} of {tag}")
        for event, (step, model) in zip(read, checkpoints):
            found, tensor = event.histogram_value, model[tag.removeprefix("model/")]
            tensor = tensor.astype(np.float64)
            check(event.step == step, f"{tag} is of step {event.step}, not {step}")
            known = [tensor.size, tensor.size, tensor.min(), tensor.max()]
            shown = [found.num, sum(found.bucket), found.min, found.max]
            check(shown == known, f"{tag} has {shown} instead of {known}")
            sums = [found.sum, found.sum_squares]
            check(np.allclose(sums, [tensor.sum(), (tensor**2).sum()], rtol=1e-9), f"{tag}: {sums}")
    return len(names) * len(checkpoints)


def resumed(program, folder):
    """Steps that come again after a resume are there once: those of the later run. No step goes back in time."""
    board, saved = folder / "board", folder / "saved"
    common = ["--nproc-per-node=2", "--log-every=5", f"--tensorboard={board}"]
    first = [f"--checkpoint-dir={saved}", "--save-every=20", "--max-steps=32"]
    second = [f"--resume={saved}/step-00000020", "--max-steps=41", "--lr=0.5"]
    for more in first, second:
        run(program, *common, *more)
    board = EventAccumulator(str(board), size_guidance={"scalars": 0})
    board.Reload()
    rates = [(event.step, round(event.value, 3)) for event in board.Scalars("train/lr")]
    expected = [(step, 0.001) for step in range(5, 25, 5)]
    expected += [(step, 0.5) for step in [25, 30, 35, 40, 41]]
    check(rates == expected, f"the learning rates are {rates}")


def main():
    program = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        resumed(program, pathlib.Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        board, metrics, saved = (folder / name for name in ["board", "metrics", "saved"])
        files = [f"--tensorboard={board}", f"--metrics={metrics}", f"--checkpoint-dir={saved}"]
        run(program, *FLAGS, *files)
        everything = {"scalars": 0, "histograms": 0}
        board = EventAccumulator(str(board), size_guidance=everything)
        board.Reload()
        metrics = [json.loads(line) for line in metrics.read_text().splitlines()]
        steps = [line["step"] for line in metrics if line["event"] == "validation"]
        check(len(steps) == EPOCHS, f"validated after {steps}")
        models = [saved / f"step-{step:08}" / "model.safetensors" for step in steps]
        checkpoints = list(zip(steps, map(load_file, models)))
        counts = [scalars(board, metrics), histograms(board, checkpoints)]
    print("TensorBoard reads {} scalars and {} histograms".format(*counts))


if __name__ == "__main__":
    main()
