"""Checks what compare_all_reduce.py makes of the peers' output. It starts none of them.

python3 -m unittest discover --start-directory benches
"""

import json
import unittest
import unittest.mock

from compare_all_reduce import OURS, SIZES, build_deepspeed, load, table, times


def output(**keys):
    rows = [json.dumps({"bytes": size, "time_us": index + 1.5, **keys}) for index, size in enumerate(SIZES)]
    return "\n".join(["a line of a launcher", *rows])


def rounds(*values):
    return [dict.fromkeys(SIZES, value) for value in values]


class Times(unittest.TestCase):
    def test_reads_each_size_and_skips_other_lines(self):
        self.assertEqual(times("peer", output(wrong=0)), {size: i + 1.5 for i, size in enumerate(SIZES)})

    def test_refuses_wrong_results_and_missing_sizes(self):
        for bad in [output(wrong=1), output().rpartition("\n")[0], "", output() + '\n{"bytes": 7, "time_us": 1}']:
            with self.assertRaisesRegex(SystemExit, "peer: wrong results or missing sizes"):
                times("peer", bad)


class DeepSpeed(unittest.TestCase):
    def test_says_how_to_install_it(self):
        with unittest.mock.patch("importlib.util.find_spec", return_value=None):
            self.assertRegex(build_deepspeed(), "^it is not installed; .* -m pip install deepspeed$")


class Table(unittest.TestCase):
    def test_has_median_spread_and_ratio_of_each_size(self):
        head, *rows, verdict = table("2 ranks", {OURS: rounds(2, 1, 3), "MPI": rounds(250, 400, 100)})
        self.assertEqual(head.split(), ["2", "ranks", OURS, "MPI", "ratio"])
        self.assertEqual([row[:7].strip() for row in rows], list(SIZES.values()))
        for row in rows:
            self.assertEqual(row[7:].split(), "2 (1 to 3) 250 (100 to 400) 125".split())
        self.assertEqual(verdict, "by the medians, ddp-mp is faster at every size than MPI")

    def test_names_each_peer_and_size_that_is_as_fast(self):
        found = {OURS: rounds(2, 2, 2), "MPI": rounds(9, 9, 9), "Gloo": rounds(9, 9, 9)}
        for one_round in found["MPI"]:
            one_round[64] = 2
        _, *_, verdict = table("2 ranks", found)
        self.assertEqual(verdict, "by the medians, ddp-mp is not faster than MPI at 64 B (1)")

    def test_marks_spreads_that_overlap(self):
        marked = lambda ours, theirs: "~" in table("", {OURS: rounds(*ours), "MPI": rounds(*theirs)})[1]
        self.assertTrue(marked([1, 2, 5], [4, 6, 7]))
        self.assertTrue(marked([4, 6, 7], [1, 2, 5]))
        self.assertFalse(marked([1, 2, 3], [4, 6, 7]))


class Load(unittest.TestCase):
    def test_warns_of_load_at_the_start_and_of_other_programs(self):
        says_busy = lambda *loads: any("WARNING" in line for line in load(*loads))
        self.assertFalse(says_busy(0.9, 2.5, 0.1))
        self.assertTrue(says_busy(1.1, 2.5, 0.1))
        self.assertTrue(says_busy(0.9, 2.5, 0.3))


if __name__ == "__main__":
    unittest.main()
