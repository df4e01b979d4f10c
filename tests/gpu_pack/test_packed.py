"""What the scripts of the pack decide: which parts run, when they stop, what they leave, and whether numbers are right."""

import contextlib
import io
import pathlib
import sys
import tempfile
import time
import unittest
from unittest import mock

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE / "packed"), str(HERE.parents[1] / "benches")]

import beside_pytorch  # noqa: E402
import measure  # noqa: E402
from environment import check_torch  # noqa: E402
from machine import CALLS, CommandFailed, Machine, check_near, json_lines  # noqa: E402
from measure import Part, chosen, run_parts  # noqa: E402
from results import Findings, page, table  # noqa: E402
from speed import add_calls, ratios  # noqa: E402
from two_ranks import collectives, losses_of_two_processes  # noqa: E402


class Quiet(unittest.TestCase):
    """With a folder of its own, and without the output of what is tested."""

    def setUp(self):
        contexts = contextlib.ExitStack()
        self.addCleanup(contexts.close)
        self.folder = pathlib.Path(contexts.enter_context(tempfile.TemporaryDirectory()))
        contexts.enter_context(contextlib.redirect_stdout(io.StringIO()))

    def machine(self, **options):
        machine = Machine(self.folder, **options)
        machine.out, machine.libraries = self.folder, ""
        return machine


class Parts(Quiet):
    def test_another_torch_is_refused_with_the_command_that_builds_for_it(self):
        check_torch("2.11.0", "2.11.0+cu130")
        for other in ["2.13.0+cu130", "2.11.0a0+git", "2.11.1"]:
            with self.assertRaisesRegex(RuntimeError, "GPU_TORCH=2.1"):
                check_torch("2.11.0", other)

    def test_the_environment_comes_before_the_parts_that_are_chosen(self):
        names = lambda *arguments: [part.name for part in chosen(measure.PARTS, *arguments)]
        self.assertEqual(names(["speed", "demo"], False), ["environment", "demo", "speed of one rank beside PyTorch"])
        self.assertEqual(names([""], False), [part.name for part in measure.PARTS])
        left_out = [part.name for part in measure.PARTS if not part.rehearsed]
        self.assertEqual([it for it in names([""], False) if it not in left_out], names([""], True))

    def test_all_parts_end_if_the_environment_fails_and_none_if_another_does(self):
        def fail(machine, findings):
            raise ValueError("broken")

        parts = [Part("first", fail, 9), Part("second", lambda machine, findings: findings.fact("found", 1), 9)]
        found = run_parts(parts, self.machine())
        self.assertEqual(found["first"].problem(), "ValueError: broken")
        self.assertEqual((found["second"].problem(), found["second"].facts), (None, {"found": 1}))
        with mock.patch.object(measure, "environment", fail):
            self.assertEqual(list(run_parts(parts, self.machine())), ["first"])

    def test_what_is_left_out_is_no_failure(self):
        def in_a_case(machine, findings):
            findings.attempt("a case", lambda: collectives(machine, findings))

        # Two ranks need an NCCL that lets them share the GPU.
        parts = [Part("losses", losses_of_two_processes, 9), Part("a part", in_a_case, 9)]
        found = run_parts(parts, self.machine())
        for findings in found.values():
            self.assertIn("no NCCL of 2.30.3 or later", findings.left_out)
            self.assertIsNone(findings.problem())
        self.assertEqual(page(found, False).count("**left out**: no NCCL"), 2)

    def test_no_command_starts_once_the_time_is_over(self):
        machine = self.machine(ends=time.monotonic())
        found = run_parts([Part("part", lambda machine, findings: machine.run(["true"]), 9)], machine)
        self.assertEqual(found["part"].problem(), "no time was left")
        machine = self.machine(ends=time.monotonic() + 100)
        machine.begin_part(5)
        self.assertLess(machine.limit_of(60), 6)


class Commands(Quiet):
    def test_what_is_late_is_killed_and_what_it_has_printed_is_kept(self):
        command = ["sh", "-c", "echo begun; sleep 60"]
        began = time.monotonic()
        with self.assertRaisesRegex(CommandFailed, "sh still ran, and was ended: begun"):
            self.machine().run(command, limit=1)
        late, other = self.machine().together([(command, {}), (["sh", "-c", "echo $NAME >&2; exit 3"], {"NAME": "b"})], 1)
        self.assertLess(time.monotonic() - began, 20)
        self.assertEqual((late.status, late.stdout), (None, "begun\n"))
        self.assertEqual((other.status, other.stderr), (3, "b\n"))

    def test_lines_of_nccl_are_no_events(self):
        self.assertEqual(json_lines('NCCL INFO\n{"loss": 1}\n'), [{"loss": 1}])


class Results(Quiet):
    def test_rows_may_have_different_columns(self):
        self.assertEqual(table([{"a": 1}, {"b": None, "a": 0.25}]), "| a | b |\n| --- | --- |\n| 1 | - |\n| 0.25 | - |\n")

    def test_a_loss_that_is_far_or_no_number_fails(self):
        check_near(1.0005, 1.0)
        for here in [1.01, float("nan")]:
            with self.assertRaises(RuntimeError):
                check_near(here, 1.0)

    def test_a_step_that_allocates_fails(self):
        few, many = ({"allocator calls": count} for count in [10, 410])
        for name, runs, problem in [("ddp-mp", [few, many], True), ("PyTorch", [few, many], False), ("ddp-mp", [few], False)]:
            findings = Findings()
            runs = [dict.fromkeys(CALLS, 0) | run for run in runs]
            add_calls(findings, {"model": "mlp"}, 400, {name: runs})
            self.assertEqual(bool(findings.failures), problem)

    def test_a_program_that_failed_has_no_ratio(self):
        self.assertEqual(ratios({"ddp-mp": 3.0, "PyTorch": 2.0, "tuned": None}), {"ratio": 1.5, "ratio to tuned": None})

    def test_parameters_are_compared_one_by_one(self):
        initial, trained = {"0.weight": (0.0, 0.0)}, {"0.weight": (0.5, 0.25)}
        findings = Findings()
        beside_pytorch.compare(findings, initial, trained, {"0.weight": (0.5, 0.25 + 1e-7)})
        self.assertEqual((findings.facts["parameters"], findings.facts["with equal bits"]), (2, 1))
        for theirs, ours in [(trained, {"0.weight": (0.5, 0.3)}), (initial, initial), (trained, {"0.bias": (0.5,)})]:
            with self.assertRaises(RuntimeError):
                beside_pytorch.compare(Findings(), initial, theirs, ours)


if __name__ == "__main__":
    unittest.main()
