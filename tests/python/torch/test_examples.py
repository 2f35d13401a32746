"""The examples run, and what they train improves."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples" / "python"


def run(name, *arguments):
    done = subprocess.run([sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(text, word):
    return [float(x) for x in re.findall(rf"{word} ([+-]?[0-9.]+)", text)]


def test_finetune_lazy_head():
    pytest.importorskip("transformers")
    lazy = run("finetune_lazy_head.py", "--steps", "11")
    losses = numbers(lazy, "loss")
    assert losses[-1] < losses[0] - 1 and "never made" in lazy
    plain = numbers(run("finetune_lazy_head.py", "--steps", "11", "--plain"), "loss")
    assert all(abs(a - b) < 1e-3 for a, b in zip(losses, plain))


def test_grpo_step():
    text = run("grpo_step.py", "--steps", "11")
    best, worst = numbers(text, "best answer"), numbers(text, "worst")
    assert best[-1] > 0.01 and worst[-1] < -0.01 and "DPO" in text


def test_topk_distillation():
    losses = numbers(run("topk_distillation.py", "--steps", "21"), "cross entropy")
    assert losses[-1] < losses[0] - 1
