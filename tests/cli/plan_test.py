#!/usr/bin/env python3
"""Runs `logitless plan` for a GPU that need not exist (path of the command in LOGITLESS_CLI), and reads files of a
single tensor."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tensor_files import write_safetensors  # noqa: E402

CLI = os.environ.get("LOGITLESS_CLI", "")
SIZES = ["--tokens", "8192", "--dim", "4096", "--vocab", "128256"]


def run(*arguments):
    return subprocess.run([CLI, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=120,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})


class PlanTest(unittest.TestCase):
    def plan(self, *arguments):
        done = run("plan", *SIZES, "--json", *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout)

    def test_a_gpu_need_not_be_here(self):
        cpu, gpu = self.plan("--budget", "512MiB"), self.plan("--device", "cuda", "--budget", "512MiB")
        self.assertEqual((gpu["kernel"], gpu["threads"]), ("hopper", 0))
        self.assertLessEqual(gpu["workspace_bytes"], 512 << 20)
        self.assertNotIn(cpu["kernel"], ("hopper", "cublas"))
        self.assertEqual(self.plan("--device", "cuda", "--budget", "512MiB", "--capability", 90), gpu)
        self.assertEqual(self.plan("--device", "cpu", "--budget", "512MiB"), cpu)
        for arguments, kernel in ((["--capability", 80], "sm80"), (["--capability", 89], "sm86"),
                                  (["--dtype", "f16"], "hopper_f16"), (["--kernel", "cublas"], "cublas"),
                                  (["--dtype", "f32"], "cublas")):
            self.assertEqual(self.plan("--device", "cuda", *arguments)["kernel"], kernel, arguments)

    def test_rates_of_a_card(self):
        seconds = lambda *arguments: self.plan("--device", "cuda", "--plan", "dense", *arguments)["predicted_seconds"]
        self.assertEqual(seconds("--card", "H200"), seconds())
        self.assertEqual(seconds("--card", "A100"), seconds("--capability", 80))
        self.assertGreater(seconds("--card", "L4"), 1.3 * seconds("--card", "RTX 4090", "--capability", 89))
        self.assertGreater(seconds("--card", "H100"), seconds("--card", "H200"))

    def test_expected_ignored(self):
        for kernel, ratio in (("sm80", (0.25, 0.35)), ("cublas", (1.0, 1.0))):
            plans = [self.plan("--device", "cuda", "--kernel", kernel, "--expected-ignored", share) for share in (0, 0.75)]
            self.assertEqual([plan["expected_ignored"] for plan in plans], [0, 0.75])
            found = plans[1]["predicted_seconds"] / plans[0]["predicted_seconds"]
            self.assertTrue(ratio[0] <= found <= ratio[1], (kernel, found))

    def test_refusals(self):
        for arguments, message in (
                (["--device", "gpu"], "--device: expected cpu or cuda, got 'gpu'"),
                (["--capability", 90], "--capability: is of --device cuda"),
                (["--card", "A100"], "--card: is of --device cuda"),
                (["--expected-ignored", 0.5], "--expected-ignored: is of --device cuda"),
                (["--device", "cuda", "--expected-ignored", 2], r"expected_ignored: expected a number in \[0, 1\], got 2"),
                (["--device", "cuda", "--card", "abacus"], "--card: expected one of T4, A10, .*, got 'abacus'"),
                (["--device", "cuda", "--card", "A100", "--capability", 90], "--capability: expected the 80 of --card A100, got 90"),
                (["--device", "cuda", "--threads", 2], "--threads: cannot be given beside --device cuda"),
                (["--device", "cuda", "--capability", 9], "--capability: expected a whole number from 75 to 999, got '9'"),
                (["--device", "cuda", "--kernel", "avx2"], "kernel"),
                (["--device", "cuda", "--budget", "1KiB"], "a --budget|memory_budget")):
            done = run("plan", *SIZES, *arguments)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertRegex(done.stderr, f"logitless plan: .*({message})")

    def test_the_default_budget_is_not_an_example(self):
        for command in ("plan", "loss", "bench"):
            self.assertIn("default: the least that costs no", " ".join(run(command, "--help").stdout.split()))
            self.assertNotRegex(run(command, "--help").stdout, "default 512MiB|512MiB .default\\)")


class OneTensorTest(unittest.TestCase):
    def test_needs_no_name(self):
        numbers = {"hidden": ("F32", [4, 8], [0.5] * 32), "weight": ("F32", [30, 8], [0.25] * 240), "targets": ("I32", [4], [1, 2, 3, 4])}
        with tempfile.TemporaryDirectory() as folder:
            path, plain, named = Path(folder), [], []
            for name, tensor in numbers.items():
                write_safetensors(path / f"{name}.safetensors", {f"some.{name}": tensor})
                plain += [f"--{name}", path / f"{name}.safetensors"]
                named += [f"--{name}", f"{path / name}.safetensors:some.{name}"]
            done, expected = run("loss", *plain, "--json"), run("loss", *named, "--json")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(json.loads(done.stdout)["loss"], json.loads(expected.stdout)["loss"])
            write_safetensors(path / "weight.safetensors", {"a": numbers["weight"], "b": numbers["weight"]})
            done = run("loss", *plain)
            self.assertEqual(done.returncode, 2)
            self.assertRegex(done.stderr, "--weight: .*there are: '?\"?a'?\"?, '?\"?b")


if __name__ == "__main__":
    if not CLI:
        sys.exit("LOGITLESS_CLI: expected the path of the command, got nothing")
    unittest.main()
