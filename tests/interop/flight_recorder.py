"""Has PyTorch's `torchfrtrace` analyse the flight recorders of runs: sound ones, a rank that stalls, one that differs.

flight_recorder.py PROGRAM
"""

import pathlib
import pickle
import re
import subprocess
import sys
import tempfile

ANALYSIS = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
RUN = ["--timeout=3s", "--grace-period=1s"]


def check(is_true, what):
    if not is_true:
        sys.exit(f"flight_recorder.py: {what}")


def found(pattern, text):
    match = re.search(pattern, text)
    check(match, f"{pattern!r} is not in {text}")
    return match[1]


def analysis(folder, *options):
    command = [*ANALYSIS, str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    check(done.returncode == 0, f"{command}: {done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def recorded(program, folder, *options, code, ranks=3):
    """Runs the program, and returns what it says about its ranks."""
    command = [program, *RUN, f"--nproc-per-node={ranks}", f"--flight-recorder={folder}", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    check(done.returncode == code, f"{options}: exit code {done.returncode}: {done.stderr}")
    return done.stderr


def sound(program, folder, spawn):
    recorded(program, folder, spawn, "--max-steps=20", code=0)
    database = folder.parent / "database"
    told = analysis(folder, f"--output={database}")
    check("Culprit" not in told and "missing ranks" not in told, told)
    with open(database, "rb") as file:
        _, contents = pickle.load(file)
    collectives = contents.collectives
    check(all(one.pass_check and one.expected_ranks == {0, 1, 2} for one in collectives), collectives)
    names = {one.collective_name for one in collectives}
    check({"gloo:all_reduce", "gloo:broadcast"} <= names, names)
    of_step = [one for one in collectives if one.collective_frames[0]["filename"] == "src/trainer/mod.rs"]
    check(len(of_step) == 20, f"{len(of_step)} all_reduces of buckets in 20 steps")
    # 21 gradients of 4 bytes. The bucket begins each parameter on a boundary for vectors.
    check(all(84 <= one.input_sizes[0][0] <= 256 for one in of_step), of_step)


def long(program, folder, spawn):
    """Only the newest records are kept. Where they begin is for each rank to say."""
    recorded(program, folder, spawn, "--max-epochs=200", "--max-steps=8000", code=0)
    told = analysis(folder)
    check("Culprit" not in told and "missing ranks" not in told, told)
    with open(folder / "rank_0", "rb") as file:
        entries = pickle.load(file)["entries"]
    check(entries[0]["record_id"] > 300 and len(entries) > 80, f"{len(entries)} entries: {entries[:1]}")


def shared(program, folder, spawn):
    """The collectives of one copy for all ranks, whose parts differ in length."""
    recorded(program, folder, spawn, "--max-steps=20", "--share-model", "--model=mlp", code=0)
    told = analysis(folder)
    check("Culprit" not in told and "mismatch" not in told, told)


def again(program, folder, spawn):
    """The files of an earlier run do not stay: neither those of more ranks, nor those of a rank that is killed."""
    recorded(program, folder, spawn, "--max-steps=20", code=0, ranks=4)
    recorded(program, folder, spawn, "--max-steps=20", "--inject-fault=kill:rank=1,at=step,step=7", code=1)
    files = sorted(file.name for file in folder.iterdir())
    check(files == ["rank_0", "rank_2"], files)


def stalled(program, folder, spawn):
    said = recorded(program, folder, spawn, "--inject-fault=stall:rank=1,at=step,step=7", code=1)
    number = found(r"waited 3s in all_reduce #(\d+) for rank 1", said)
    told = analysis(folder, "--allow-incomplete-ranks")
    check(f"Not all ranks joining collective, sequence number: {number}\n" in told, told)
    check("missing ranks: {1}" in told and "all_reduce at src/trainer/mod.rs" in told, told)


def different(program, folder, spawn):
    said = recorded(program, folder, spawn, "--inject-fault=wrong-shape:rank=1,at=step,step=7", code=1)
    number = found(r"collective #(\d+) differs between ranks", said)
    told = analysis(folder)
    check(f"Collective sequence number: {number} has errors" in told, told)
    check("Culprit rank 1; Error type: SIZE_OR_SYNTAX_MISMATCH" in told, told)


def main(program):
    program = str(pathlib.Path(program).resolve())
    threads, processes = "--spawn=threads", "--spawn=processes"
    for case, spawns in [
        (sound, [threads, processes]),
        (long, [threads]),
        (shared, [threads]),
        (again, [processes]),
        (stalled, [threads, processes]),
        (different, [threads, processes]),
    ]:
        for spawn in spawns:
            with tempfile.TemporaryDirectory() as folder:
                case(program, pathlib.Path(folder) / "recorder", spawn)
        print(f"{case.__name__}: ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
