"""A terminal for tests: a shell in tmux, with a screen of a given size."""

import itertools
import re
import shlex
import subprocess
import time

NUMBERS = itertools.count()


class Terminal:
    """A shell in a tmux server of its own, which ends with it."""

    def __init__(self, columns, lines, folder, environment=()):
        self.typed = 0
        self.socket = f"ddp-mp-{time.time_ns()}-{next(NUMBERS)}"
        shell = ["env", *environment, "PS1=$ ", "bash", "--norc", "--noprofile"]
        self.tmux(
            *["-f", "/dev/null", "new-session", "-d", "-c", str(folder)],
            *["-x", str(columns), "-y", str(lines), shlex.join(shell)],
        )
        self.tmux("set-option", "-g", "status", "off")
        self.wait_for(r"^\$ *$")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.tmux("kill-server")

    def tmux(self, *arguments):
        command = ["tmux", "-u", "-L", self.socket, *arguments]
        return subprocess.run(command, check=True, text=True, timeout=30, stdout=subprocess.PIPE).stdout

    def screen(self, *, colours=False):
        """What is on the screen, as text; with the escape sequences of its colours if asked."""
        return self.tmux("capture-pane", "-p", *(["-e"] if colours else []))

    def start(self, *command):
        """Starts a command, whose exit code the shell prints."""
        self.type(shlex.join(command) if len(command) > 1 else command[0])

    def type(self, line):
        self.typed += 1  # the code of an earlier line may still be on the screen
        self.tmux("send-keys", "-l", f"clear; {line}; echo code {self.typed}:$?")
        self.keys("Enter")

    def keys(self, *keys):
        self.tmux("send-keys", *keys)

    def resize(self, columns, lines):
        self.tmux("resize-window", "-x", str(columns), "-y", str(lines))

    def wait_for(self, pattern, seconds=60):
        """Waits until `pattern` is on the screen, and returns its match."""
        deadline = time.monotonic() + seconds
        while True:
            screen = self.screen()
            found = re.search(pattern, screen, re.MULTILINE)
            if found:
                return found
            if time.monotonic() > deadline:
                raise AssertionError(f"{pattern!r} is not on the screen after {seconds} s:\n{screen}")
            time.sleep(0.05)  # tmux has no event for it

    def exit_code(self, seconds=60):
        return int(self.wait_for(rf"^code {self.typed}:(\d+)$", seconds)[1])
