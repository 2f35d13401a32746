#!/usr/bin/env python3
"""Runs `logitless bench --report` on a CPU and `logitless calibrate` without a GPU (path of the command in
LOGITLESS_CLI)."""

import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

CLI = os.environ.get("LOGITLESS_CLI", "")
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def run(*arguments):
    return subprocess.run([CLI, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=280,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})


def bytes_of(text):
    number, unit = text.split()
    return float(number) * UNITS[unit]


class BenchReportTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = Path(self.folder.name) / "page.md"

    def report(self, *arguments):
        done = run("bench", "--report", self.path, *arguments)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(done.stdout, f"wrote {self.path}\n")
        return self.path.read_text(encoding="utf-8")

    def test_a_page_of_the_cpu(self):
        page = self.report("--device", "cpu", "--repeat", 1, "--memory", "24MiB", "--threads", 2)
        self.assertRegex(page, r"^# logitless bench: .+\n")
        self.assertRegex(page, r"\| processor \| .+ \|\n\| threads \| 2 \|\n\| memory \| .+ available \|\n"
                               r"\| library \| logitless \d+\.\d+\.\d+ \(.+\) \|\n\| command \| `.*--report.*` \|\n"
                               r"\| date \| \d{4}-\d\d-\d\d \d\d:\d\d UTC \|\n")
        self.assertNotIn("## Rates", page)  # of a GPU
        self.assertIn("\nbf16, loss and both gradients, medians of 1 ", page)
        heads = page.split("\n### ")[1:]
        self.assertEqual([head.splitlines()[0] for head in heads],
                         ["1024 tokens x 512 x 16032 vocabulary entries", "1024 tokens x 288 x 32000 vocabulary entries",
                          "4096 tokens x 96 x 6288 vocabulary entries"])
        for head in heads:
            tokens, dim, vocab = map(int, re.search(r"^Reduced to (\d+) tokens x (\d+) x (\d+) vocabulary entries, for memory\.$",
                                                    head, re.M).groups())
            tensors = 2 * 2 * (tokens + vocab) * dim
            self.assertLessEqual(tensors + 2 * tokens * vocab, 24 << 20)
            seconds, flops = re.search(r"^Three matrix products: (\S+ [mu]?s), (\S+) TFLOP/s\.$", head, re.M).groups()
            self.assertGreater(float(flops), 0)
            self.assertRegex(seconds, r"^[\d.]+ [mu]?s$")
            rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in head.splitlines() if line.startswith("| ")]
            self.assertEqual(rows[0], ["kernel", "budget", "plan", "time", "ratio", "predicted", "workspace", "peak"])
            self.assertEqual([row[1] for row in rows[1:3]], ["default", "256 MiB"])
            self.assertEqual(rows[1][0], rows[2][0])
            for kernel, _, plan, time, ratio, _, workspace, peak in rows[1:]:
                self.assertNotIn(kernel, ("reference", "scalar"))
                self.assertIn(plan, ("dense", "recompute", "stored"))
                self.assertRegex(time, r"^[\d.]+ (s|ms|us)$")
                self.assertGreater(float(ratio), 0)
                gradients = tensors / 2
                self.assertAlmostEqual(bytes_of(peak) / (bytes_of(workspace) + gradients + 4), 1, delta=0.02)

    def test_memory_for_nothing(self):
        page = self.report("--repeat", 1, "--memory", 1)
        self.assertEqual(page.count("\nNot run: even its smallest part does not fit the memory.\n"), 3)
        # A page is replaced, another file is not.
        self.report("--repeat", 1, "--memory", 2)
        self.path.write_text("notes\n")
        done = run("bench", "--report", self.path)
        self.assertEqual(done.returncode, 2)
        self.assertIn("is no page of this command, and would be lost: expected a new name", done.stderr)
        self.assertEqual(self.path.read_text(), "notes\n")

    def test_refusals(self):
        beside = "cannot be given beside --report, which has heads of its own"
        for arguments, message in (
                (["--device", "cuda"], "--device: is of --report"),
                (["--memory", "1GiB"], "--memory: is of --report"),
                (["--report", self.path, "--tokens", 3], f"--tokens: {beside}"),
                (["--report", self.path, "--budget", "1MiB"], f"--budget: {beside}"),
                (["--report", self.path, "--kernel", "sm80"], f"--kernel: {beside}"),
                (["--report", self.path, "--json"], f"--json: {beside}"),
                (["--report", self.path, "--device", "gpu"], "--device: expected cpu or cuda, got 'gpu'"),
                (["--report", self.path, "--device", "cuda", "--threads", 2], "--threads: cannot be given beside --device cuda"),
                (["--report", Path(self.folder.name)], "is a folder"),
                (["--report", Path(self.folder.name) / "none" / "page.md"], "there is no folder")):
            with self.subTest(arguments=arguments):
                done = run("bench", *arguments)
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertIn(message, done.stderr)
                self.assertFalse(self.path.exists())

    def test_without_a_gpu(self):
        done = run("bench", "--device", "cuda", "--report", self.path)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertRegex(done.stderr, r"^logitless bench: --device cuda: this (machine|build) has no CUDA")
        self.assertFalse(self.path.exists())
        done = run("calibrate")
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertRegex(done.stderr, r"^logitless calibrate: no GPU to measure: this (machine|build) has no CUDA")
        done = run("calibrate", "--refresh", "--json")
        self.assertEqual(done.returncode, 1)
        error = json.loads(done.stdout)
        self.assertEqual((error["command"], error["exit_code"]), ("calibrate", 1))
        self.assertIn("no GPU to measure", error["error"])
        self.assertEqual(run("calibrate", "--card", "A100").returncode, 2)


if __name__ == "__main__":
    if not CLI:
        sys.exit("LOGITLESS_CLI: expected the path of the command, got nothing")
    unittest.main()
