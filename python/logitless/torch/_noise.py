"""Gumbel noise that is drawn from a counter, as an operator that autochunk lowers."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .._autochunk.noise import MOST, STEP


@torch.library.custom_op("logitless::gumbel", mutates_args=())
def gumbel(key: Tensor, counter: Tensor, vocab: int) -> Tensor:
    """Returns Gumbel noise [N, vocab], fp32, as ``_autochunk/noise.py`` says. key: [2] int64. counter: [N]."""
    parts, ids = key[0] + counter.to(torch.int64)[:, None], torch.arange(vocab, device=counter.device)[None]
    first, more = (_random()(parts, key[1] + stream, ids) for stream in (0, 1))
    return -torch.log(-torch.log1p(-(first + (more + STEP / 2) * STEP).clamp(max=MOST)))


@functools.cache
def _random() -> Callable[..., Tensor]:
    from ._autochunk.helpers import HELPERS

    space = {"torch": torch}
    exec(HELPERS["_random"], space)
    return space["_random"]  # type: ignore[return-value]


@gumbel.register_fake
def _(key: Tensor, counter: Tensor, vocab: int) -> Tensor:
    return counter.new_empty((counter.shape[0], vocab), dtype=torch.float32)
