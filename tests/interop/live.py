"""Drives `--live` in tmux: what is on the screen, each key, resizing, and the terminal afterwards.

live.py PROGRAM
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from tmux import Terminal

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "benches"))
from ports import free_port  # noqa: E402

SIZES = [(80, 24), (200, 60)]
SLOW = ["--max-epochs=1000", "--nproc-per-node=3", "--inject-fault=slow=50ms:rank=1,at=step"]
STALL = ["--max-epochs=1000", "--nproc-per-node=3", "--inject-fault=stall:rank=1,at=step,step=9"]
SHORT = ["--max-epochs=3", "--nproc-per-node=2", "--log-format=json"]
LAST_SCREEN = r"the run has ended; any key closes this view"
# What a shell leaves on when it starts a program, and a view turns off.
SETTINGS = ["icanon", "echo", "isig", "opost", "ixon"]


def check_terminal(terminal):
    """The terminal is as before: its settings, and the screen that the shell writes to."""
    terminal.type("stty -a")
    screen = terminal.wait_for(rf"(?s)(.*)code {terminal.typed}:0")[1].split()
    settings = {word.rstrip(";") for word in screen}
    assert settings.issuperset(SETTINGS), screen
    assert terminal.tmux("display-message", "-p", "#{alternate_on} #{cursor_flag}").split() == ["0", "1"]


def process_of(program, terminal):
    """The number of the process of the program that the shell has started."""
    shell = terminal.tmux("display-message", "-p", "#{pane_pid}").strip()
    command = ["pgrep", "-P", shell, pathlib.Path(program).name]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()


def threads(program, folder, size):
    with Terminal(*size, folder) as terminal:
        terminal.start(program, *SLOW, "--live")
        terminal.wait_for(r"the others wait for rank 1: in collectives \d+ % of the time")
        terminal.wait_for(r"0 CPU:0 W waits for rank 1")
        terminal.wait_for(r"1 CPU:1 S step #\d+")
        terminal.wait_for(r"WWWWWWWW")
        terminal.wait_for(r"S step D data F forward")
        terminal.wait_for(r"loss \d\.\d+  lr 1\.000e-3  \d+ samples/s")
        terminal.wait_for(r"\d+:\d\d left.*$")
        terminal.wait_for(r"CPU:2 \| Epoch: \d")  # an event
        terminal.keys("C-l")
        terminal.wait_for(r"^.0 CPU:0")
        # Resizing: down, where only one lane has room, and up.
        terminal.resize(50, 7)
        terminal.wait_for(r"(?s)\A(.*\n){6}q stop")
        for key, rank in [("Down", 1), ("j", 2), ("Up", 1), ("k", 0)]:
            terminal.keys(key)
            terminal.wait_for(rf"^.{rank} CPU:{rank}")
        terminal.resize(size[0] + 40, size[1])
        terminal.wait_for(r"events")
        terminal.resize(*size)
        terminal.keys("s")
        assert terminal.exit_code() == 0
        terminal.wait_for(r"stopped by key press after \d+ steps")
        check_terminal(terminal)


def processes(program, folder, size):
    with Terminal(*size, folder) as terminal:
        terminal.start(program, *SLOW, "--live", "--spawn=processes")
        terminal.wait_for(r"the others wait for rank 1")
        for rank in range(3):
            terminal.wait_for(rf"^.{rank} CPU:{rank} ")
        terminal.wait_for(r"CPU:0 \| Epoch: \d")
        terminal.keys("s")
        assert terminal.exit_code() == 0
        for rank in range(3):  # the lines of all processes are printed afterwards
            terminal.wait_for(rf"^CPU:{rank} \| Epoch: 0")
        check_terminal(terminal)


def several_machines(program, folder):
    """The terminal of rank 0's process shows the ranks of both, those of the other one from heartbeats."""
    run = [*SLOW, "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    with Terminal(120, 30, folder) as terminal:
        other = subprocess.Popen([program, *run, "--node-rank=1"], stdout=subprocess.DEVNULL)
        try:
            terminal.start(program, *run, "--node-rank=0", "--live")
            terminal.wait_for(r"the others wait for rank 1")
            for rank in range(3):
                terminal.wait_for(rf"^.{rank} CPU:{rank} ")
                terminal.wait_for(rf"^.{rank + 3} CPU:{rank} .*\d\.\d s ago: ")
            terminal.keys("s")
            assert terminal.exit_code() == 0
            assert other.wait(timeout=60) == 0, "all ranks stop after the same step"
        finally:
            other.kill()
            other.wait()
        check_terminal(terminal)


def ending_late(program):
    """The command of `program` that makes its processes take their time to end: whoever draws on, is seen."""
    late = ["strace", "-f", "-o", "/dev/null", "-e", "trace=exit_group"]
    late += ["-e", "inject=exit_group:delay_enter=300000"]
    if not shutil.which(late[0]) or subprocess.run([*late, "true"], check=False).returncode != 0:
        print("live: strace cannot be used, so the processes end as they do")
        return [program]
    return [*late, program]


def stalls(program, folder):
    command = ending_late(program)
    for spawn in ["threads", "processes"]:
        with Terminal(100, 24, folder) as terminal:
            terminal.start(*command, *STALL, "--live", f"--spawn={spawn}", "--stall-warning=2s")
            terminal.wait_for(r"0 CPU:0 W waits for rank 1 \d+\.\d s: all_reduce #")
            terminal.wait_for(r"2 CPU:2 W waits for rank 1 \d+\.\d s: all_reduce #")
            terminal.wait_for(r"all_reduce #\d+ .* has not ended for")
            # The step of a rank that stalls does not end, so a second Ctrl-C ends the process.
            terminal.keys("C-c")
            terminal.keys("C-c")
            assert terminal.exit_code() == 130
            check_terminal(terminal)


def ends(program, folder):
    """However a run ends, the terminal is as before."""
    kill = "--inject-fault=kill:rank=0,at=step,step=40"
    for options, code in [
        (["--inject-fault=error:rank=1,at=step,step=40"], 1),
        (["--inject-fault=panic:rank=1,at=step,step=40", "--spawn=processes"], 1),
        ([kill, "--spawn=processes"], 1),
        ([kill, "--max-restarts=1"], 0),
        (["--spawn=processes", "--max-steps=30"], 0),
    ]:
        with Terminal(90, 30, folder) as terminal:
            terminal.start(program, "--max-epochs=2", "--nproc-per-node=2", "--live", *options)
            assert terminal.exit_code() == code, options
            check_terminal(terminal)
    with Terminal(90, 30, folder) as terminal:  # an incomplete key: nobody waits for its rest
        slow = "--inject-fault=slow=50ms:rank=1,at=step"
        terminal.start(program, "--max-steps=60", "--nproc-per-node=2", "--live", slow)
        terminal.wait_for(r"W waits for rank 1")
        terminal.keys("-H", "1b", "5b")
        terminal.wait_for(LAST_SCREEN)
        terminal.keys("-H", "41")
        assert terminal.exit_code() == 0
        check_terminal(terminal)
    with Terminal(90, 30, folder) as terminal:  # signals of others
        terminal.start(program, *STALL, "--live")
        terminal.wait_for(r"W waits for rank 1 \d+\.\d s")
        process = process_of(program, terminal)
        for _ in range(2):
            subprocess.run(["kill", "-INT", process], check=True)
        assert terminal.exit_code() == 130
        check_terminal(terminal)


def last_screen(program, folder):
    """The last screen of a run that has ended by itself stays until a key, and the run's files are there by then."""
    for key in ["x", "C-c", "Enter"]:
        with Terminal(100, 24, folder) as terminal:
            terminal.start(program, "--max-steps=3", "--nproc-per-node=2", "--live", "--report=page.html")
            terminal.wait_for(LAST_SCREEN)
            terminal.wait_for(r"step 2 of 3 |step 3 of 3 ")
            terminal.wait_for(r"the report is in page.html")
            (folder / "page.html").unlink()
            terminal.keys(key)
            assert terminal.exit_code() == 0
            terminal.wait_for(r"^ddp-mp: the report is in page.html")
            check_terminal(terminal)
    with Terminal(100, 24, folder) as terminal:  # a signal, as that of a shell that ends
        terminal.start(program, "--max-steps=3", "--nproc-per-node=2", "--live")
        terminal.wait_for(LAST_SCREEN)
        subprocess.run(["kill", "-TERM", process_of(program, terminal)], check=True)
        assert terminal.exit_code() == 0
        check_terminal(terminal)


def same_results(program, folder):
    """The view changes nothing: stdout has the same events, and the parameters have the same bits."""

    def results(*options):
        with Terminal(90, 30, folder) as terminal:
            terminal.start(f"{program} {' '.join(SHORT)} {' '.join(options)} > results.json < /dev/null")
            assert terminal.exit_code() == 0
        events = [json.loads(line) for line in (folder / "results.json").read_text().splitlines()]
        hashes = [event["parameters_hash"] for event in events if event["event"] == "end"]
        assert len(hashes) == 1, events
        return [event["event"] for event in events], hashes

    for spawn in ["--spawn=threads", "--spawn=processes"]:
        assert results(spawn, "--live") == results(spawn), spawn


def without_screen(program, folder):
    """Where the view cannot be shown, a note says why, and the run goes on. Without a terminal: tests/live.rs."""
    command = f"{program} --live --max-epochs=1 --nproc-per-node=2"
    with Terminal(90, 30, folder) as terminal:
        terminal.start(f"env TERM=dumb script -qec '{command}' notes > /dev/null")
        assert terminal.exit_code() == 0
        notes = (folder / "notes").read_text()
        assert "--live: " in notes and "TERM=dumb" in notes, notes
    with Terminal(90, 30, folder) as terminal:
        terminal.type(f"set -m; {command} & wait $!")
        assert terminal.exit_code() == 0
        terminal.wait_for(r"--live: this process runs in the background")


def main(program):
    program = str(pathlib.Path(program).resolve())
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for size in SIZES:
            threads(program, folder, size)
            processes(program, folder, size)
            print(f"{size[0]}x{size[1]}: the straggler is named, all keys work, the terminal is as before", flush=True)
        for check in [several_machines, stalls, ends, last_screen, same_results, without_screen]:
            check(program, folder)
            print(f"{check.__name__}: ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
