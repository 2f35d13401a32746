"""Options of the calls of the C ABI, as values that both frameworks hand on and compare."""

from __future__ import annotations

from typing import NamedTuple

from . import _library as c


class LossOptions(NamedTuple):
    """Of a loss, as the C ABI names them; 0 stands for none."""

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    logit_scale: float = 1.0
    normalizer: float = 0.0
    memory_budget: int = 0  # bytes; 0: the library's default; below 0 a hint of so many, which the least plan may exceed


class HeadOptions(NamedTuple):
    """Of a head, likewise."""

    ignore_index: int = -100
    softcap: float = 0.0
    logit_scale: float = 1.0
    memory_budget: int = 0


def struct_of(options: LossOptions | HeadOptions):
    """The struct of the C ABI; the budget belongs to the plan's request and is left out."""
    struct = c.new(c.CrossEntropyOptions if isinstance(options, LossOptions) else c.HeadOptions)
    for name, value in options._asdict().items():
        if name != "memory_budget":
            setattr(struct, name, c.REDUCTIONS[value] if name == "reduction" else value)
    return struct
