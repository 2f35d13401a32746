"""docs/use/recipes/megatron.md: GPTModel's output layer and loss, by itself and with tensor and sequence parallelism."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", exc_type=ImportError)


@pytest.mark.parametrize("ranks", [1, 2])
def test_model(ranks):
    worker = Path(__file__).parent / "recipes/megatron_worker.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", str(worker)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "ok" in done.stdout, done.stdout + done.stderr
