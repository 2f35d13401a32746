"""Gumbel noise that is drawn from a counter, as an operator that autochunk lowers."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


@torch.library.custom_op("logitless::gumbel", mutates_args=())
def gumbel(key: Tensor, counter: Tensor, vocab: int) -> Tensor:
    """Returns Gumbel noise [N, vocab], fp32, as ``_autochunk/noise.py`` says. key: [2] int64. counter: [N]."""
    return gumbel_of_ids(key, counter, torch.arange(vocab, device=counter.device))


def gumbel_of_ids(key: Tensor, counter: Tensor, ids: Tensor) -> Tensor:
    """Returns the noise [N, n] of vocabulary ids [n]."""
    parts = key[0] + counter.to(torch.int64)[:, None]
    return uniform()(parts, key[1], ids[None]).neg_().log1p_().neg_().log_().neg_()


@functools.cache
def uniform() -> Callable[..., Tensor]:
    """Returns the function `uniform` of tensor programs: of two numbers of a key, and vocabulary entries."""
    from ._autochunk.helpers import HELPERS

    space = {"torch": torch}
    exec(HELPERS["_uniform"], space)
    return space["_uniform"]  # type: ignore[return-value]


@gumbel.register_fake
def _(key: Tensor, counter: Tensor, vocab: int) -> Tensor:
    return counter.new_empty((counter.shape[0], vocab), dtype=torch.float32)
