"""LOGITLESS_TEST_DEVICE=cuda runs the same tests on a GPU, LOGITLESS_BACKEND=portable with PyTorch's own operations."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
DEVICE = os.environ.get("LOGITLESS_TEST_DEVICE", "cpu")
if DEVICE != "cpu":
    collect_ignore_glob = ["test_recipes_*.py"]  # makes their libraries use the CPU
    torch.set_default_device(DEVICE)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False  # of convolutions


def pytest_configure(config):
    config.addinivalue_line("markers", "native: a test of the library's plans, memory or bits")


def pytest_collection_modifyitems(items):
    if os.environ.get("LOGITLESS_BACKEND") == "portable":
        skip = pytest.mark.skip(reason="about the library's plans, memory or bits; LOGITLESS_BACKEND=portable")
        for item in items:
            if item.get_closest_marker("native"):
                item.add_marker(skip)
