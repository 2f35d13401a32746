import os
import re
import subprocess
import sys
from pathlib import Path

from jax_oracle import ON_CPU

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "python" / "jax_training_step.py"


def test_the_training_step_lowers_the_loss_without_logits():
    run = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "8"], env=os.environ, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    first, last = map(float, re.search(r"loss: ([\d.]+) at first, ([\d.]+) after 8 steps", run.stdout).groups())
    assert last < first - 1.0
    with_logits = float(re.search(r"with logits +([\d.]+) MiB", run.stdout).group(1))
    without = float(re.search(r"without logits +([\d.]+) MiB", run.stdout).group(1))
    assert without < with_logits / (10 if ON_CPU else 5)
