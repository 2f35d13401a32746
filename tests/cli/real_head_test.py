#!/usr/bin/env python3
"""Runs `logitless loss` (the command's path in LOGITLESS_CLI) on a trained head.

Real heads are read from LOGITLESS_DATA_DIR, and skipped if missing; bench/heads/README.md says how they are made.
"""

import json
import lzma
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

CLI = os.environ.get("LOGITLESS_CLI", "")
DATA = Path(os.environ.get("LOGITLESS_DATA_DIR") or Path(__file__).resolve().parents[2].parent / "shared" / "data")
REAL_HEAD = DATA / "real_head_late.safetensors"
PACKED_HEAD = DATA / "gpt2_131072.safetensors.xz"


def of(path):
    """Returns the options of the command for a file of a head."""
    return ["--hidden", f"{path}:hidden", "--weight", f"{path}:weight_q*weight_scale", "--targets", f"{path}:targets"]


class RealHeadTest(unittest.TestCase):
    def loss(self, *arguments):
        done = subprocess.run([CLI, "loss", *map(str, arguments), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True, timeout=120, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return json.loads(done.stdout)

    def test_forward_of_a_slice(self):
        if not REAL_HEAD.exists():
            self.skipTest(f"{REAL_HEAD} is not there (LOGITLESS_DATA_DIR)")
        inputs = of(REAL_HEAD)
        got = self.loss(*inputs, "--first", 256, "--plan", "forward")
        self.assertEqual((got["tokens"], got["vocab"], got["dtype"]), (256, 131072, "bf16"))
        self.assertTrue(1.0 < got["loss"] < 6.0, got["loss"])  # a trained head, far from log(131072) = 11.8
        self.assertLess(got["peak_bytes"], got["logits_bytes"] / 20)
        few = self.loss(*inputs, "--first", 4)
        exact = self.loss(*inputs, "--first", 4, "--kernel", "reference")
        self.assertTrue(math.isclose(few["loss"], exact["loss"], rel_tol=1e-5), (few["loss"], exact["loss"]))

    def test_the_packed_one_is_what_it_says(self):
        if not PACKED_HEAD.exists():
            self.skipTest(f"{PACKED_HEAD} is not there (LOGITLESS_DATA_DIR)")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "head.safetensors")
            with lzma.open(PACKED_HEAD) as packed, path.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
            with path.open("rb") as file:
                about = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))["__metadata__"]
            said = float(re.search(r"([0-9.]+) with these in 4 bits", about["loss"]).group(1))
            got = self.loss(*of(path), "--plan", "forward")
        self.assertEqual((got["tokens"], got["dim"], got["vocab"], got["dtype"]), (8192, 768, 131072, "bf16"))
        self.assertTrue(math.isclose(got["loss"], said, rel_tol=1e-4), (got["loss"], said))


if __name__ == "__main__":
    if not CLI:
        sys.exit("LOGITLESS_CLI: expected the path of the command, got nothing")
    unittest.main()
