"""LOGITLESS_TEST_DEVICE=cuda runs the same tests on a GPU."""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
DEVICE = os.environ.get("LOGITLESS_TEST_DEVICE", "cpu")
if DEVICE != "cpu":
    collect_ignore_glob = ["test_recipes_*.py"]  # makes their libraries use the CPU
    torch.set_default_device(DEVICE)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False  # of convolutions
