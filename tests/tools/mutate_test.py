"""Tests that tools/mutate.py names exactly the mutants that a test misses, and restores the files."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import mutate  # noqa: E402

SOURCE = '''\
def clamp(x, low, high):
    """Returns x == low for x < low."""  # x == low
    if x < low:
        return low
    return high if x > high else x
'''


def edits(name, text):
    return [(m.line, m.after.strip()) for m in mutate.mutants_of(Path(name), text)]


class Mutants(unittest.TestCase):
    def test_change_code_and_neither_comments_nor_strings(self):
        self.assertEqual(edits("a.py", SOURCE), [
            (3, "if x <= low:"), (4, "return None"), (5, "return high if x >= high else x"), (5, "return None")])

    def test_of_python_compile(self):
        for _, line in edits("a.py", "def f(a):\n    g(a)\n    return (a and\n            not a)\n"):
            self.assertNotEqual(line, "return None")

    def test_of_cpp_skip_comments_strings_and_the_preprocessor(self):
        text = '#if A && B\n  check(a && b, "a && b");  // a && b\n#endif\n'
        self.assertEqual(edits("a.cpp", text), [(2, 'check(a || b, "a && b");  // a && b')])

    def test_of_cpp_leave_statements_out(self):
        self.assertIn((1, ""), edits("a.cpp", "  total += x;\n"))
        self.assertNotIn((1, ""), edits("a.cpp", "  return total;\n"))


class Runs(unittest.TestCase):
    def run_on(self, test, *arguments):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "clamp.py")
            path.write_text(SOURCE)
            for command in (["init", "-q"], ["add", "."],
                            ["-c", "user.name=t", "-c", "user.email=t@example.com", "commit", "-qm", "t"]):
                subprocess.run(["git", *command], cwd=folder, check=True)
            done = subprocess.run([sys.executable, ROOT / "tools" / "mutate.py", "clamp.py", "--test",
                                   f"{sys.executable} -c 'from clamp import clamp; {test}'", *arguments],
                                  cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            self.assertEqual(path.read_text(), SOURCE)
            return done

    def test_name_the_survivors(self):
        done = self.run_on("assert clamp(0, 1, 3) == 1 and clamp(2, 1, 3) == 2")
        self.assertEqual(done.returncode, 1, done.stderr)
        survivors = done.stdout.split("survived\n")[1].splitlines()
        self.assertEqual([s.split(":")[1] for s in survivors], ["3", "5"])

    def test_refuse_a_test_that_fails_without_a_mutant(self):
        done = self.run_on("assert clamp(0, 1, 3) == 0")
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertIn("the test command fails", done.stderr)

    def test_refuse_lines_that_are_no_range(self):
        self.assertIn("expected A-B", self.run_on("pass", "--lines", "7").stderr)


if __name__ == "__main__":
    unittest.main()
