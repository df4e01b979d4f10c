"""What the checks against other software share: how they fail, and how they run the program."""

import pathlib
import subprocess
import sys


def check(is_true, what):
    if not is_true:
        sys.exit(f"{pathlib.Path(sys.argv[0]).name}: {what}")


def run(*command, code=0, **options):
    """Runs a command, which is to end with this exit code."""
    command = [str(part) for part in command]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180, **options)
    shown = f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
    check(done.returncode == code, f"exit code {done.returncode}, not {code}: {shown}")
    return done
