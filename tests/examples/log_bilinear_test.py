"""Runs examples/log_bilinear.cpp on a small text: log_bilinear_test.py PROGRAM TEXT"""

import re
import subprocess
import sys
import unittest

PROGRAM, TEXT = sys.argv[1:]


def run(*arguments):
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=100, check=False)


class LogBilinear(unittest.TestCase):
    def test_the_loss_falls(self):
        done = run(TEXT, "60")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        losses = [float(loss) for loss in re.findall(r"^step .* loss ([0-9.]+)$", done.stdout, re.M)]
        self.assertEqual(len(losses), 10)
        self.assertLess(losses[-1], 0.8 * losses[0])
        self.assertRegex(done.stdout, r"\nheld out    loss [0-9.]+\n$")

    def test_a_text_that_is_not_there(self):
        done = run("nowhere.txt")
        self.assertEqual((done.returncode, done.stdout, done.stderr), (1, "", "example_log_bilinear: cannot read 'nowhere.txt'\n"))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
