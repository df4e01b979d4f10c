"""Has Prometheus' own client library parse the files of runs, and compares them with the run's metrics.

prometheus_reads.py PROGRAM
"""

import json
import pathlib
import sys
import tempfile

from prometheus_client.parser import text_string_to_metric_families

from checks import check, run

FLAGS = [
    *["--dataset=digits", "--model=mlp", "--loss=cross-entropy", "--max-grad-norm=1"],
    *["--val-fraction=0.2", "--max-epochs=2", "--log-every=10", "--nproc-per-node=2"],
]
KEYS = {
    "train": {
        "ddpmp_steps_total": "step",
        "ddpmp_epoch": "epoch",
        "ddpmp_loss": "loss",
        "ddpmp_learning_rate": "lr",
        "ddpmp_gradient_norm": "grad_norm",
        "ddpmp_samples_per_second": "samples_per_second",
    },
    "validation": {"ddpmp_validation_loss": "loss", "ddpmp_validation_accuracy": "accuracy"},
}


def read(file, run):
    """The samples by name and other labels than `run`; each metric has a help text and its type."""
    samples = {}
    for family in text_string_to_metric_families(file.read_text()):
        check(family.documentation, f"{family.name} has no help")
        for sample in family.samples:
            is_counter = sample.name.endswith("_total")
            kind = "counter" if is_counter else "gauge"
            check(family.type == kind, f"{sample.name} is a {family.type}")
            labels = dict(sample.labels)
            check(labels.pop("run") == run, f"{sample} is not of the run {run!r}")
            key = (sample.name, *sorted(labels.items()))
            check(key not in samples, f"{key} is there twice")
            samples[key] = sample.value
    return samples


def main():
    program = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        name = 'a "quoted" \\ name'
        file, metrics = folder / f"{name}.prom", folder / "metrics"
        files = [f"--prometheus={file}", f"--metrics={metrics}"]
        run(program, "--quiet", *FLAGS, *files)
        samples = read(file, name)
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        for event, keys in KEYS.items():
            last = [row for row in rows if row["event"] == event][-1]
            for metric, key in keys.items():
                check(samples[(metric,)] == last[key], f"{metric} is {samples[(metric,)]}, not {last[key]}")
        check(samples[("ddpmp_run_state", ("state", "done"))] == 1, "the run is not done")
        waits = [metric for metric, *_ in samples if metric == "ddpmp_rank_collective_seconds"]
        check(len(waits) == 2, f"{len(waits)} ranks")
    print(f"Prometheus' parser reads {len(samples)} samples")


if __name__ == "__main__":
    main()
