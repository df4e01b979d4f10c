"""Builds and runs the tests, and prints the ten that took longest.

run.py [--all | --fast] [FILTER ...]: Runs all unit tests, and the integration tests whose names contain a FILTER. Without
a FILTER it runs all integration tests and the documentation's examples. --all runs every case of the tests that have
many, and some cases of the tests of processes over TCP, too. --fast compiles without optimization and incrementally, for
integration tests that do not start the program, and runs no unit tests again that have passed since they were built.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import threading

INTEGRATION_TESTS = ["--package=ddp-mp-tests", "--test=tests"]
# With the package of the integration tests: cargo has one set of features for all packages of a command, so it compiles no
# dependency again. The tests of the engine compile in a third of the time without optimization; those of the other
# crates use the engine of the program.
UNIT_TESTS = ["--package=ddp-mp-tests", "--lib"]
ENGINE_TESTS = [*UNIT_TESTS, "--package=ddp-mp-engine", "--config=profile.release.package.ddp-mp-engine.opt-level=0"]
OTHER_TESTS = [*UNIT_TESTS, "--package=ddp-mp-compare", "--package=ddp-mp-views", "--package=ddp-mp"]
# Compiles each function that has changed, and no other.
CRATES = ["ddp-mp-compare", "ddp-mp-engine", "ddp-mp-views", "ddp-mp"]
FAST = [
    *("--lib", "--test=tests", "--config=profile.release.package.ddp-mp-engine.codegen-units=256"),
    *(f"--config=profile.release.package.{crate}.opt-level=0" for crate in CRATES),
]
# Most tests wait, for a time-out or for a process.
THREADS = 4 * len(os.sched_getaffinity(0))
# A file beside a program whose tests have passed ends with this.
PASSED = ".passed"
# Longer tests have a line that begins with this, and says why.
LONG_SECONDS, REASON = 5, "/// Long: "


def build(targets):
    """Returns the test programs of cargo's `targets`, each with the folder that it runs in."""
    command = ["cargo", "test", "--release", "--no-run", "--message-format=json-render-diagnostics", *targets]
    built = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if built.returncode != 0:
        sys.exit(built.returncode)
    messages = map(json.loads, built.stdout.splitlines())
    programs = [it for it in messages if it.get("executable") and it["profile"]["test"]]
    return [(it["executable"], os.path.dirname(it["manifest_path"])) for it in programs]


class Tests:
    """A test program that runs, whose output is printed as it comes."""

    def __init__(self, program, folder, filters, environment):
        self.stamp = program + PASSED
        # Only unstable options print how long a test took.
        options = ["-Zunstable-options", "--report-time", f"--test-threads={THREADS}"]
        environment = dict(environment, RUSTC_BOOTSTRAP="1")
        self.process = subprocess.Popen(
            [program, *options, *filters], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
        )
        self.seconds = {}
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            print(line, end="", flush=True)
            if timed := re.fullmatch(r"test (\S+) .*<([0-9.]+)s>\n", line):
                self.seconds[timed[1]] = float(timed[2])

    def end(self):
        """Waits for the end, and returns whether all tests passed."""
        self.reader.join()
        if self.process.wait() != 0:
            return False
        with open(self.stamp, "w", encoding="utf-8"):
            return True


def start(commands, filters, environment, fast=False):
    """Builds the test programs of cargo's `commands`, and then starts them: beside a compiler, both take longer. `filters`
    are for the integration tests. `fast` leaves out unit tests that have passed since they were built."""
    # Frames are larger without optimization.
    large_stack = dict(environment, RUST_MIN_STACK=str(16 << 20))
    started = []
    for program, folder in [program for targets in commands for program in build(targets)]:
        is_integration = os.path.basename(folder) == "tests"
        if fast and not is_integration and has_passed(program):
            continue
        of_it = environment if is_integration and not fast else large_stack
        started.append(Tests(program, folder, filters if is_integration else [], of_it))
    return started


def has_passed(program):
    """Returns whether a test program has passed since it was built."""
    stamp = program + PASSED
    return os.path.exists(stamp) and os.path.getmtime(stamp) > os.path.getmtime(program)


def says_why(test):
    """Returns whether the source says why an integration test takes long."""
    path = test.split("::")
    file = os.path.join("tests", f"{path[0]}.rs")
    if not os.path.exists(file):
        return True
    with open(file, encoding="utf-8") as source:
        above = source.read().split(f"fn {path[-1]}(")[0].rsplit("\n}\n", 1)[-1]
    return REASON in above


def main():
    arguments = argparse.ArgumentParser()
    kinds = arguments.add_mutually_exclusive_group()
    kinds.add_argument("--all", action="store_true")
    kinds.add_argument("--fast", action="store_true")
    arguments.add_argument("filters", nargs="*", metavar="FILTER")
    arguments = arguments.parse_args()
    # libtorch looks up the name of each client of a store. A lost query would cost 5 s.
    environment = dict(os.environ, RES_OPTIONS="timeout:1 attempts:1")
    over_tcp = dict(environment, DDP_MP_TESTS_TCP="1")
    if arguments.all:
        environment["DDP_MP_TESTS"] = "all"
    if arguments.fast:
        os.environ["CARGO_INCREMENTAL"] = "1"
        all_tests = start([FAST], arguments.filters, environment, fast=True)
    else:
        commands = [INTEGRATION_TESTS, ENGINE_TESTS, OTHER_TESTS]
        all_tests = start(commands, arguments.filters, environment)
    passed = [tests.end() for tests in all_tests]
    if arguments.all and not arguments.filters:
        print("Some cases of the tests of processes once more, over TCP:", flush=True)
        of_processes = ["gloo::", "processes::", "matrix::", "restarts::"]  # with spawn_processes
        passed.extend(tests.end() for tests in start([INTEGRATION_TESTS], of_processes, over_tcp))
    if not arguments.filters:
        passed.append(subprocess.run(["cargo", "test", "--release", "--doc"], check=False).returncode == 0)
    seconds = {test: time for tests in all_tests for test, time in tests.seconds.items()}
    print("The ten slowest tests:")
    for test in sorted(seconds, key=seconds.get, reverse=True)[:10]:
        # With all their cases many tests take longer.
        is_long = seconds[test] > LONG_SECONDS and not arguments.all
        note = f"  (add a `{REASON}` line that says why)" if is_long and not says_why(test) else ""
        print(f"{seconds[test]:8.1f} s  {test}{note}")
    if not all(passed):
        sys.exit("some tests failed; their output is above")


if __name__ == "__main__":
    main()
