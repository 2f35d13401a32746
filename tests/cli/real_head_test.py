#!/usr/bin/env python3
"""Runs `logitless loss` (the command's path in LOGITLESS_CLI) on a trained head.

Real heads are looked for in LOGITLESS_DATA_DIR and skipped when they are not there.
"""

import json
import math
import os
import subprocess
import sys
import unittest
from pathlib import Path

CLI = os.environ.get("LOGITLESS_CLI", "")
DATA = Path(os.environ.get("LOGITLESS_DATA_DIR") or Path(__file__).resolve().parents[2].parent / "shared" / "data")
REAL_HEAD = DATA / "real_head_late.safetensors"


class RealHeadTest(unittest.TestCase):
    def loss(self, *arguments):
        done = subprocess.run([CLI, "loss", *map(str, arguments), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True, timeout=120, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return json.loads(done.stdout)

    def test_forward_of_a_slice(self):
        if not REAL_HEAD.exists():
            self.skipTest(f"{REAL_HEAD} is not there (LOGITLESS_DATA_DIR)")
        inputs = ["--hidden", f"{REAL_HEAD}:hidden", "--weight", f"{REAL_HEAD}:weight_q*weight_scale", "--targets",
                  f"{REAL_HEAD}:targets"]
        got = self.loss(*inputs, "--first", 256, "--plan", "forward")
        self.assertEqual((got["tokens"], got["vocab"], got["dtype"]), (256, 131072, "bf16"))
        self.assertTrue(1.0 < got["loss"] < 6.0, got["loss"])  # a trained head, far from log(131072) = 11.8
        self.assertLess(got["peak_bytes"], got["logits_bytes"] / 20)
        few = self.loss(*inputs, "--first", 4)
        exact = self.loss(*inputs, "--first", 4, "--kernel", "reference")
        self.assertTrue(math.isclose(few["loss"], exact["loss"], rel_tol=1e-5), (few["loss"], exact["loss"]))


if __name__ == "__main__":
    if not CLI:
        sys.exit("LOGITLESS_CLI: expected the path of the command, got nothing")
    unittest.main()
