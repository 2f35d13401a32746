"""Tests of bench/scaling: its commands for the GPUs, its report of their output, and a failing command."""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import scaling  # noqa: E402


class Scaling(unittest.TestCase):
    def dry_run(self, *arguments):
        done = subprocess.run([sys.executable, BENCH / "scaling.py", "--dry-run", *arguments], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.splitlines()

    def test_commands(self):
        lines = self.dry_run("--ranks", "4,1,2", "--real-head", "head.safetensors")
        self.assertEqual([line.split()[0] for line in lines], ["train_1", "head_2", "far_2", "train_2", "head_4", "far_4", "train_4", "links_4", "bits_4",
                                                              "fault_4"])
        self.assertIn("--ranks 4 --rounds 5 --steps 8 --row alone sp vp ft fw", next(line for line in lines if line.startswith("head_4")))
        lines = self.dry_run("--ranks", "8", "--only", "head", "far")
        self.assertEqual(lines[0], "not run: the far field, which wants a --real-head")
        self.assertEqual([line.split()[0] for line in lines[1:]], ["head_8"])

    def test_table(self):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder)
            row = {"ms": 10.6789, "efficiency": 0.9412}
            (out / "head_4.json").write_text(json.dumps({"alone": {"ms": 40.2}, "sp": row}), encoding="utf-8")
            for ranks, speed in ((1, 500000), (4, 1950000)):
                name = "logitless" if ranks == 1 else "logitless x4"
                (out / f"train_{ranks}.txt").write_text(f"round 1 {name:>12}: 1 tokens/s, 2 ms\n{name:>12}: {speed:9.0f} tokens/s, allocated\n",
                                                        encoding="utf-8")
            lines = scaling.table(out, [1, 4]).splitlines()
        self.assertEqual(lines[0], "| | 1 GPU | 4 GPUs |")
        self.assertIn("| a whole head on each |  | 40.20 ms |", lines)
        self.assertIn("| tokens spread |  | 10.68 ms, 0.94 |", lines)
        self.assertIn("| tokens on all |  |  |", lines)
        self.assertEqual(lines[-1], "| GPT-2 124M, tokens/s | 500000 | 1950000, 3.90 times one |")

    def test_a_command_that_fails(self):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as said:
            out = Path(folder)
            self.assertTrue(scaling.run("fine", [sys.executable, "-c", "print('hello')"], 60, out))
            self.assertEqual((out / "fine.txt").read_text(), "hello\n")
            self.assertFalse(scaling.run("bad", [sys.executable, "-c", "raise SystemExit(3)"], 60, out))
            self.assertFalse(scaling.run("late", [sys.executable, "-c", "import time; time.sleep(60)"], 0.5, out))
        self.assertIn("bad: failed (3)", said.getvalue())
        self.assertIn("late: failed (more than 0.5 s)", said.getvalue())


if __name__ == "__main__":
    unittest.main()
