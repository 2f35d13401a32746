"""Tests that tools/run_tests.py counts ctest's results, rejects an empty run, and fails when a test does."""

import json
import os
import stat
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "tools/run_tests.py"

# Stands for ctest: writes the given JUnit file and listing, and exits with the given status.
FAKE_CTEST = """#!{python}
import json, os, sys
folder = os.path.dirname(os.path.abspath(__file__))
if "--show-only=json-v1" in sys.argv:
    print(open(folder + "/listing.json").read())
else:
    open(folder + "/arguments.json", "w").write(json.dumps(sys.argv[1:]))
    if os.path.exists(folder + "/junit.xml"):
        open(sys.argv[sys.argv.index("--output-junit") + 1], "w").write(open(folder + "/junit.xml").read())
    sys.exit({status})
"""

CASES = {
    "pass": '<testcase name="{0}" status="run"/>',
    "fail": '<testcase name="{0}" status="fail"><failure message="Failed"/></testcase>',
    "skip": '<testcase name="{0}" status="notrun"><skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/></testcase>',
    "missing": '<testcase name="{0}" status="notrun"><skipped message="Unable to find executable"/></testcase>',
    "disabled": '<testcase name="{0}" status="disabled"/>',
}


def run(cases, *arguments, status=0, labels=("fast",), write_junit=True):
    """Returns the finished script on a ctest that reports these (name, kind) pairs, and the arguments of ctest."""
    with tempfile.TemporaryDirectory() as folder:
        ctest = Path(folder, "ctest")
        ctest.write_text(FAKE_CTEST.format(python=sys.executable, status=status))
        ctest.chmod(ctest.stat().st_mode | stat.S_IXUSR)
        Path(folder, "CMakeCache.txt").write_text(f"CMAKE_CTEST_COMMAND:INTERNAL={ctest}\n")
        properties = [{"name": "LABELS", "value": list(labels)}] if labels else []
        listing = {"tests": [{"name": name, "properties": properties} for name, _ in cases]}
        Path(folder, "listing.json").write_text(json.dumps(listing))
        if write_junit:
            body = "".join(CASES[kind].format(name) for name, kind in cases)
            Path(folder, "junit.xml").write_text(f"<testsuite>{body}</testsuite>")
        result = subprocess.run([sys.executable, str(SCRIPT), "--build-dir", folder, *arguments],
                                capture_output=True, text=True, check=False)
        called = Path(folder, "arguments.json")
        return result, json.loads(called.read_text()) if called.exists() else None


def last_line(result):
    return result.stdout.splitlines()[-1]


class RunTests(unittest.TestCase):
    def test_all_passed(self):
        result, called = run([("a", "pass"), ("b", "pass")])
        self.assertEqual((result.returncode, last_line(result)), (0, "2 passed, 0 failed"))
        self.assertEqual(called[called.index("--label-regex") + 1], "^(fast|slow)$")
        self.assertIn("--output-on-failure", called)

    def test_skipped_and_disabled_are_neither(self):
        result, _ = run([("a", "pass"), ("b", "skip"), ("c", "disabled")])
        self.assertEqual((result.returncode, last_line(result)), (0, "1 passed, 0 failed, 2 skipped"))

    def test_a_failure_fails_and_is_named(self):
        result, _ = run([("a", "pass"), ("b", "fail")], status=8)
        self.assertEqual((result.returncode, last_line(result)), (1, "1 passed, 1 failed"))
        self.assertIn("FAILED b\n", result.stdout)

    def test_a_program_that_was_not_built_failed(self):
        result, _ = run([("a", "pass"), ("b", "missing")], status=8)
        self.assertEqual((result.returncode, last_line(result)), (1, "1 passed, 1 failed"))

    def test_nothing_ran(self):
        for cases in ([], [("a", "skip")]):
            with self.subTest(cases=cases):
                result, _ = run(cases)
                self.assertEqual(result.returncode, 1)
                self.assertIn("no test ran", result.stdout)
                self.assertTrue(last_line(result).startswith("0 passed, 0 failed"))

    def test_ctest_that_dies_is_a_failure(self):
        result, _ = run([], status=1, write_junit=False)
        self.assertEqual((result.returncode, last_line(result)), (1, "0 passed, 1 failed"))

    def test_a_test_without_a_label_is_a_failure(self):
        for labels in ((), ("fsat",)):
            with self.subTest(labels=labels):
                result, _ = run([("a", "pass")], labels=labels)
                self.assertEqual((result.returncode, last_line(result)), (1, "1 passed, 1 failed"))
                self.assertIn("has none of the labels", result.stdout)

    def test_totals_are_added_to_the_file(self):
        with tempfile.TemporaryDirectory() as folder:
            totals = os.path.join(folder, "totals")
            run([("a", "pass"), ("b", "skip")], "--totals", totals)
            run([("a", "pass"), ("b", "fail")], "--totals", totals, "--labels", "threads", status=8)
            self.assertEqual(Path(totals).read_text(), "1 0 1\n1 1 0 b\n")

    def test_a_folder_that_is_no_build_tree(self):
        with tempfile.TemporaryDirectory() as folder:
            result = subprocess.run([sys.executable, str(SCRIPT), "--build-dir", folder], capture_output=True, text=True,
                                    check=False)
            self.assertEqual(result.returncode, 1)
            self.assertIn("not a configured build tree", result.stderr)


if __name__ == "__main__":
    unittest.main()
