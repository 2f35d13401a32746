"""Gumbel noise that is drawn from a counter, as an operator that autochunk lowers."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

_MOST = 1 - 2.0**-24  # of a uniform number, whose rounding may give 1
_STREAM = 1 << 31  # added to a counter for its second number: vocabulary ids are smaller


@torch.library.custom_op("logitless::gumbel", mutates_args=())
def gumbel(key: Tensor, counter: Tensor, vocab: int) -> Tensor:
    """Returns Gumbel noise [N, vocab], fp32, from -2.9 to 32.6.

    An element is a function of the key [2] int64, the low 32 bits of its token's counter [N] int64, and its vocabulary
    id. Two numbers of Threefry-2x32 (20 rounds; Salmon et al. 2011) make 46 random bits v, and the noise is
    -log(-log(1 - v)).
    """
    counters = (counter[:, None] << 32) + torch.arange(vocab, device=counter.device)
    first, more = (_random()(key[0], key[1], counters + stream) for stream in (0, _STREAM))
    uniform = (first + (more + 2.0**-24) * 2.0**-23).clamp(max=_MOST)
    return -torch.log(-torch.log1p(-uniform))


@functools.cache
def _random() -> Callable[..., Tensor]:
    from ._autochunk.helpers import HELPERS

    space = {"torch": torch}
    exec(HELPERS["_random"], space)
    return space["_random"]  # type: ignore[return-value]


@gumbel.register_fake
def _(key: Tensor, counter: Tensor, vocab: int) -> Tensor:
    return counter.new_empty((counter.shape[0], vocab), dtype=torch.float32)


def lowered(w, out, key, counter, vocab):
    """Lowers the operator to a tensor program."""
    number = torch.int64
    keys = [w.reshape(w.slice(key, 0, i, i + 1), ()) for i in range(2)]
    counters = w.add(
        w.scaled(w.broadcast(w.reshape(counter, (counter.shape[0], 1)), out.shape), 1 << 32),
        w.broadcast(w.iota((1, vocab), 1), out.shape),
    )
    first, more = (
        w.map("random", [*keys, w.add(counters, w.number(stream, number))], torch.float32) for stream in (0, _STREAM)
    )
    uniform = w.add(first, w.scaled(w.add(more, w.number(2.0**-24, torch.float32)), 2.0**-23))
    uniform = w.map("min", [uniform, w.number(_MOST, torch.float32, out.shape)], torch.float32)
    race = w.map("log1p", [w.map("neg", [uniform], torch.float32)], torch.float32)
    log = w.map("log", [w.map("neg", [race], torch.float32)], torch.float32)
    return w.map("neg", [log], torch.float32)
