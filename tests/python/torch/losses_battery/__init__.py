"""Losses and layers as libraries write them, with one big value of logits, scores or activations. They are the
benchmark of autochunk (test_losses_battery.py, bench/compare/autochunk.py). Each is a plain function of tensors,
written from its published formula in the manner of its field, and none knows of autochunk."""

from losses_battery import (  # noqa: F401  (each registers its losses)
    attention,
    contrastive,
    distillation,
    language,
    layers,
    margins,
    narrow,
    preference,
    reinforcement,
    speech,
    vision,
)
from losses_battery.case import BENCH, CASES, SMALL, Case, Maker, Sizes

__all__ = ["BENCH", "CASES", "SMALL", "Case", "Maker", "Sizes"]
