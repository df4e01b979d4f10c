"""Runs the program on inputs that were changed at random, and looks for runs that end badly.

Each input is a configuration, a data file, a checkpoint or a command line that works, with some bytes changed, cut off
or put elsewhere, or with a folder, a link, a pipe or a device in the place of a file. A run is a defect if it panics, ends by a
signal or with an exit code other than 0, 1 and 2, takes more than 20 s or 2 GB, fails without naming the culprit, or
changes an input. The same seed gives the same inputs.

    mutated_inputs.py PROGRAM [COUNT] [SEED]
"""

import collections
import concurrent.futures
import gzip
import hashlib
import os
import pathlib
import random
import resource
import shutil
import struct
import subprocess
import sys
import tempfile

SECONDS = 20
GIGABYTES = 2
SHORT = ["--num-samples=64", "--nproc-per-node=1", "--log-format=json"]
DATA = pathlib.Path(__file__).parent.parent / "data"

TOML = [
    'max_epochs = 1\nbatch_size = 16\nlr = 0.01\noptimizer = "adamw"\nweight_decay = 0.1\n',
    'model = "mlp"\nhidden = [8, 4]\nactivation = "tanh"\nloss = "cross-entropy"\nout_features = 3\ndataset = "random"\n',
    'schedule = "multi-step"\nmilestones = [1, 2]\ngamma = 0.5\ntimeout = "90s"\nval_fraction = 0.2\npatience = 2\n',
    'model = "gpt"\ndataset = "text:plain.csv"\nn_layer = 1\nn_head = 2\nn_embd = 8\nblock_size = 4\nno_bias = true\n',
    'inject_fault = "nan:rank=0,at=step,step=1"\nskip_nonfinite = 3\ngrad_accum_steps = 2\nmax_grad_norm = 1.0\nseed = 7\n',
]
WORDS = ["0", "-1", "1e999", "nan", "18446744073709551616", "9223372036854775807", '""', "[]", "[[", "{}", "true",
         "\0", "\xff", "'", '"', "\n", "=", ",", ":", "/", "..", "-", "--", "é", "\u202e", "a" * 5000, "%s", "$HOME", "*"]
FLAGS = """
    max-epochs batch-size model hidden activation dropout channels loss amp lr optimizer momentum weight-decay beta1
    eps schedule schedule-by milestones gamma warmup-steps n-layer n-head n-embd block-size max-grad-norm
    skip-nonfinite check-replicas-every dataset num-samples in-features out-features log-every val-fraction val-every
    num-workers prefetch-factor seed save-every save-every-epochs keep-last resume init-from max-steps patience
    nproc-per-node bucket-cap-mb grad-accum-steps comm-hook timeout grace-period stall-warning log-format language
    inject-fault backend strategy spawn bind config
""".split()
SWITCHES = """
    nesterov no-shuffle drop-last drop-last-batch scale-lr explain live static-graph check-collectives
    find-unused-parameters no-overlap sync-batch-norm no-bias
""".split()
VALUES = """
    0 1 2 7 -1 0.5 1e-3 1e30 nan inf mlp cnn gpt mse cross-entropy fp16 bf16 auto cpu gloo threaded nccl dp none 8,8
    1,2,3 10s 0s best random digits csv:plain.csv text:plain.csv npy:x.npy,y.npy step cosine zh json threads core
""".split()


def mutate(data, chance):
    """Changes bytes: flips, overwrites, cuts, repeats, inserts."""
    data = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        # Mostly near the beginning, where headers are.
        at = chance.randrange(chance.choice([min(len(data), 100), len(data)]) + 1)
        way = chance.randrange(8)
        if way == 0 and at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        elif way == 1 and at < len(data):
            data[at] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        elif way == 2:
            del data[at:]
        elif way == 3:
            del data[at:at + chance.randrange(1, 40)]
        elif way == 4:
            data[at:at] = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 20)))
        elif way == 5:
            data[at:at] = chance.choice(WORDS).encode()
        elif way == 6:
            data[at:at + 8] = struct.pack("<Q", chance.choice([0, 1, 2**31, 2**32, 2**40, 2**63, 2**64 - 1]))
        else:
            start = chance.randrange(len(data) + 1)
            data[at:at] = data[start:start + chance.randrange(1, 200)]
    return bytes(data)


def replace(path, chance, other):
    """Puts something that is no regular file, or one of another kind, where the file was."""
    def enormous():
        with open(path, "wb") as file:
            file.truncate(2**40)  # takes no room on the disk

    path.unlink(missing_ok=True)
    device = chance.choice(["/dev/zero", "/dev/random", "/dev/null", "/dev/full"])
    ways = [path.mkdir, lambda: os.mkfifo(path), lambda: path.write_bytes(b""), lambda: os.link(other, path), enormous]
    ways += [lambda to=to: path.symlink_to(to) for to in (other, path.name, device)]
    nothing = lambda: None
    chance.choice([*ways, nothing])()


def damage(path, chance, other):
    if chance.random() < 0.15:
        replace(path, chance, other)
    else:
        path.write_bytes(mutate(path.read_bytes(), chance))


def reword(text, chance):
    """Changes whole lines and values, so that more of it is understood."""
    lines = text.splitlines()
    for _ in range(chance.choice([1, 1, 2, 3])):
        at, way = chance.randrange(len(lines)), chance.randrange(4)
        if way == 0:
            name = chance.choice(FLAGS).replace("-", "_")
            lines.insert(at, f"{name} = {chance.choice(VALUES + WORDS)}")
        elif way == 1:
            lines[at] = lines[at].split(" = ")[0] + " = " + chance.choice(VALUES + WORDS)
        elif way == 2:
            lines[at] = lines[at].split(" = ")[0] + f' = "{chance.choice(VALUES)}"'
        else:
            del lines[at]
            lines.append("# the end")
    return "\n".join(lines) + "\n"


def config(folder, chance, _):
    path = folder / "run.toml"
    text = chance.choice(TOML)
    if chance.random() < 0.6:
        path.write_text(reword(text, chance))
    else:
        path.write_text(text)
        damage(path, chance, folder / "other")
    return ["--config", "run.toml"], ["run.toml", "--"]  # a key may be named as the flag that it is


def data_file(folder, chance, _):
    kind = chance.choice(["csv", "npy", "safetensors", "idx", "gz"])
    loss = chance.choice(["mse", "cross-entropy"])
    copied = {  # of which data, and under which name
        "csv": {"d.csv": ["plain.csv", "header.csv"]},
        "npy": {"x.npy": [it.name for it in DATA.glob("*.npy") if it.name[0] != "y"], "y.npy": ["y.i8.npy"]},
        "safetensors": {"d.safetensors": ["set.safetensors", "half.safetensors", "unaligned.safetensors"]},
    }.get(kind)
    if copied:
        for name, sources in copied.items():
            shutil.copy(DATA / chance.choice(sorted(sources)), folder / name)
        damage(folder / chance.choice(list(copied)), chance, folder / "other")
        flag, culprits = f"{kind}:{','.join(copied)}", list(copied)
    else:
        shutil.copytree(DATA / "idx", folder / "idx")
        if kind == "gz":
            for name in ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"]:
                plain = folder / "idx" / name
                inner = plain.read_bytes() if chance.random() < 0.7 else mutate(plain.read_bytes(), chance)
                (folder / "idx" / (name + ".gz")).write_bytes(gzip.compress(inner, mtime=0))
                plain.unlink()
        damage(chance.choice(sorted((folder / "idx").iterdir())), chance, folder / "other")
        flag, culprits = "idx:idx", ["idx"]
    # The sizes are those of the file, which the data says.
    return [f"--dataset={flag}", f"--loss={loss}", "--out-features=3"][:chance.choice([2, 3])], culprits + ["--"]


def checkpoint(folder, chance, template):
    shutil.copytree(template, folder / "run", symlinks=True)
    files = sorted(it for it in (folder / "run").rglob("*") if it.is_file())
    path = chance.choice(files)
    if chance.random() < 0.1:  # or a whole folder
        path = chance.choice(sorted((folder / "run").glob("step-*")))
        shutil.rmtree(path)
        replace(path, chance, folder / "other")
    elif chance.random() < 0.1:
        path.parent.rename(path.parent.with_name(chance.choice(["step-00000009", "step-3", "aside-1-step-00000004"])))
    else:
        damage(path, chance, folder / "other")
    way = chance.choice(["--resume=auto", "--resume=best", "--resume=step-00000002", "--init-from=run", None])
    flags = [it for it in [way] if it] + (["--checkpoint-dir=run"] if way != "--init-from=run" else [])
    return [*CHECKPOINT, "--max-epochs=3", *flags], ["run", "--", "safetensors", "trainer.json", "checkpoint"]


def command_line(folder, chance, _):
    shutil.copy(DATA / "plain.csv", folder / "plain.csv")
    flags = chance.choice([[], [], [], ["env"], ["sampler"], ["verify", "--steps=2"], ["comm", "all_reduce"], ["nonsense"]])
    flags = list(flags)
    for _ in range(chance.choice([1, 1, 2, 3])):
        if chance.random() < 0.2:
            flags.append("--" + chance.choice(SWITCHES))
            continue
        value = chance.choice(VALUES)
        if chance.random() < 0.3:
            value = chance.choice([value + chance.choice(WORDS), chance.choice(WORDS)])
        name = chance.choice(FLAGS)
        name = name if chance.random() < 0.95 else name[:-1]
        flags.append(f"--{name}={value}".replace("\0", ""))
    return flags, ["--", "ddp-mp", "config", "command", "error:"]


CHECKPOINT = ["--model=mlp", "--hidden=4", "--optimizer=adamw", "--val-fraction=0.1", "--save-every=2"]
KINDS = [config, data_file, checkpoint, command_line]


def contents(folder):
    """Of each file that the program only reads: what it is, and its bytes."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        text = ""
        if path.is_symlink():
            text = os.readlink(path)
        elif path.is_file():
            text = hashlib.sha256(path.read_bytes()).hexdigest() if status.st_size < 2**20 else str(status.st_size)
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_nlink if path.is_file() else 0, text)
    return found


def limit():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def one(program, seed, number, template):
    """Runs one input; returns its kind, the exit code, and what is wrong, if something is."""
    chance = random.Random(f"{seed} {number}")
    kind = KINDS[number % len(KINDS)]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "other").write_bytes(b"of others\n")
        flags, culprits = kind(folder, chance, template)
        before = contents(folder)
        if kind is command_line:
            # Last, so that a mistake in a number keeps no machine busy.
            arguments = flags if flags and not flags[0].startswith("--") else [*flags, "--max-seconds=5"]
        else:
            arguments = SHORT[1:] + (SHORT[:1] if kind in (config, checkpoint) else []) + flags
        environment = {"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}
        try:
            done = subprocess.run(
                [program, *arguments], cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True,
                timeout=SECONDS, preexec_fn=limit,
            )
            code, stderr, wrong = done.returncode, done.stderr, None
        except subprocess.TimeoutExpired as error:
            code, stderr, wrong = None, error.stderr or b"", f"ran longer than {SECONDS} s"
        stderr = stderr.decode(errors="replace")
        if wrong is None and "panicked" in stderr:
            wrong = "a panic"
        elif wrong is None and code not in (0, 1, 2):
            wrong = f"exit code {code}"
        elif wrong is None and code != 0 and not any(it in stderr for it in culprits):
            wrong = "the message does not name the culprit"
        if wrong is None:
            after = contents(folder)
            changed = [it for it in before if not written(it) or code == 2]
            changed = [it for it in changed if before[it] != after.get(it)]
            if changed:
                wrong = f"changed {changed}"
        return kind.__name__, code, wrong and f"input {number}: {wrong}\n  {' '.join(flags)!r}\n  {stderr[-600:]}"


def written(path):
    """Whether a run that works writes there: checkpoints, where it saves."""
    return path.startswith("run/") or path == "run"


def main():
    program = str(pathlib.Path(sys.argv[1]).resolve())
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 400
    seed = sys.argv[3] if len(sys.argv) > 3 else "1"
    tally, defects = collections.Counter(), []
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.run([program, *SHORT, *CHECKPOINT, "--max-epochs=2", "--checkpoint-dir=run"], cwd=folder, capture_output=True)
        assert made.returncode == 0, made.stderr.decode()
        template = pathlib.Path(folder) / "run"
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            runs = pool.map(lambda number: one(program, seed, number, template), range(count))
            for kind, code, defect in runs:
                tally[kind, code] += 1
                if defect:
                    defects.append(defect)
                    print(defect, flush=True)
    for (kind, code), times in sorted(tally.items(), key=str):
        print(f"{kind}: exit code {code}: {times}")
    for kind in KINDS:
        if count >= 400 and not tally[kind.__name__, 0]:
            defects.append(kind.__name__)
            print(f"no {kind.__name__} of {count} inputs works: they are not tried in earnest")
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"{count} inputs of seed {seed}, {len(defects)} defects, at most {memory:.2f} GB")
    sys.exit(1 if defects or memory > GIGABYTES else 0)


if __name__ == "__main__":
    main()
