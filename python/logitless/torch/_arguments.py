"""One call under three names: ours, ``torch.nn.functional.linear_cross_entropy``'s and ``cut_cross_entropy``'s."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._library import parse_bytes
from .._options import LossOptions

# Ours, with the defaults.
DEFAULTS: dict[str, Any] = dict(
    bias=None,
    reduction="mean",
    ignore_index=-100,
    label_smoothing=0.0,
    class_weight=None,
    z_loss=0.0,
    softcap=None,
    logit_scale=1.0,
    normalizer=None,
    token_weight=None,
    target_weight=None,
    shift=False,
    accuracy=False,
    return_lse=False,
    memory_budget=None,
)
POSITIONS = ("hidden", "weight", "target", "bias")
ALIASES = {
    "input": "hidden",
    "e": "hidden",
    "linear_weight": "weight",
    "c": "weight",
    "targets": "target",
    "linear_bias": "bias",
}
# Arguments of the others that say how they compute. Here gradients are exact and sums are fp32, whatever they say;
# a value that asks for something else is refused.
_FIXED = {
    "accum_e_fp32": ((None, False, True), "sums are always fp32"),
    "accum_c_fp32": ((None, False, True), "sums are always fp32"),
    "filter_eps": ((None,), "no gradient is filtered; expected None"),
    "filter_e_grad": ((None, False), "no gradient is filtered; expected False"),
    "filter_c_grad": ((None, False), "no gradient is filtered; expected False"),
    "impl": ((None,), "the plan is chosen by memory_budget; expected None"),
    "vocab_parallel_options": ((None,), "give the weight as a DTensor; expected None"),
}
NAME = "linear_cross_entropy"


def bind(args: tuple, kwargs: dict) -> dict[str, Any]:
    """All arguments by our names. Raises TypeError as a signature would."""
    if len(args) > len(POSITIONS):
        raise TypeError(f"{NAME}: expected at most {len(POSITIONS)} positional arguments, got {len(args)}")
    bound = dict(zip(POSITIONS, args))
    for key, value in kwargs.items():
        name = ALIASES.get(key, key)
        if key == "weight" and ("weight" in bound or "linear_weight" in kwargs or "c" in kwargs):
            name = "class_weight"  # as PyTorch calls it, beside a linear weight
        if key == "options":
            _check_options(value)
            continue
        if key in _FIXED:
            allowed, why = _FIXED[key]
            if not any(value is a for a in allowed):
                raise NotImplementedError(f"{NAME}: {key}={value!r} is not supported: {why}")
            continue
        if name not in DEFAULTS and name not in POSITIONS:
            raise TypeError(f"{NAME}: there is no argument '{key}'")
        if name in bound:
            raise TypeError(f"{NAME}: '{name}' is given twice")
        bound[name] = value
    missing = [name for name in POSITIONS[:3] if name not in bound]
    if missing:
        raise TypeError(f"{NAME}: missing {', '.join(missing)}")
    if bound.get("ignore_index", 0) is None:  # PyTorch: the default
        bound["ignore_index"] = -100
    return {**DEFAULTS, **bound}


def _check_options(value) -> None:
    """PyTorch's chunking options: we chunk by memory_budget, so only ones that leave the choice open are taken."""
    if value is None:
        return
    open_values = {
        "allow_retain_graph": (False, True),
        "batch_chunk_size": (None,),
        "chunking_method": ("auto", None),
        "acc_policy": ("auto", "accurate"),
        "acc_dtype": (None, torch.float32),
    }
    for name, allowed in open_values.items():
        given = getattr(value, name, allowed[0])
        if not any(given is a or given == a for a in allowed):
            raise NotImplementedError(
                f"{NAME}: options.{name}={given!r} is not supported: the plan is chosen by memory_budget, sums are fp32"
            )


def number(name: str, value, low: float = -math.inf, what: str = "a number") -> float:
    if isinstance(value, Tensor) or isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected {what}, got {value!r}")
    if not (low <= value < math.inf and value > -math.inf):
        raise ValueError(f"{name}: expected {what}, got {value}")
    return float(value)


def loss_options(a: dict[str, Any]) -> LossOptions:
    """The plain options; normalizer may be a tensor, which is left to the caller."""
    if a["reduction"] not in ("none", "mean", "sum"):
        raise ValueError(f"reduction: expected 'none', 'mean' or 'sum', got {a['reduction']!r}")
    if isinstance(a["ignore_index"], bool) or not isinstance(a["ignore_index"], int):
        raise TypeError(f"ignore_index: expected an int, got {a['ignore_index']!r}")
    smoothing = number("label_smoothing", a["label_smoothing"], 0.0, "a number from 0 to 1")
    if smoothing > 1.0:
        raise ValueError(f"label_smoothing: expected a number from 0 to 1, got {smoothing}")
    softcap = 0.0 if a["softcap"] is None else number("softcap", a["softcap"], 0.0, "a number above 0, or None")
    scale = number("logit_scale", a["logit_scale"], what="a finite number that is not 0")
    if scale == 0.0:
        raise ValueError("logit_scale: expected a finite number that is not 0, got 0.0")
    normalizer = 0.0
    if a["normalizer"] is not None and not isinstance(a["normalizer"], Tensor):
        normalizer = number("normalizer", a["normalizer"], what="a number above 0")
        if normalizer <= 0.0:
            raise ValueError(f"normalizer: expected a number above 0, got {normalizer}")
    if a["normalizer"] is not None and a["reduction"] != "mean":
        raise ValueError(f"normalizer: goes with reduction 'mean', got {a['reduction']!r}")
    return LossOptions(
        a["reduction"],
        a["ignore_index"],
        smoothing,
        number("z_loss", a["z_loss"], 0.0, "a number from 0"),
        softcap,
        scale,
        normalizer,
        parse_bytes(a["memory_budget"]),
    )


def check_head(hidden, weight, bias) -> None:
    """What the engine takes of hidden, weight and bias, named as here."""
    for name, t in (("hidden", hidden), ("weight", weight)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(t).__name__}")
        if t.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise TypeError(f"{name}: expected float32, bfloat16, float16 or float64, got {t.dtype}")
        if t.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(f"{name}: expected a tensor on cpu or cuda, got {t.device}")
    if hidden.dim() < 1:
        raise ValueError("hidden: expected [..., D], got a scalar")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"weight: expected [V, {hidden.shape[-1]}], got {list(weight.shape)}")
    if hidden.device != weight.device:
        raise ValueError(f"weight: expected it on {hidden.device}, where hidden is, got {weight.device}")
    if bias is not None and list(bias.shape) != [weight.shape[0]]:
        raise ValueError(f"bias: expected [{weight.shape[0]}], got {list(bias.shape)}")
