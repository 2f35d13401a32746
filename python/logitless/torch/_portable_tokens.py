"""The tokens that a portable call computes: all, or those that are not ignored."""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ._portable_rows import targets_of

COUNTED = 1 << 20  # targets in a pass over the weights of tokens
_WAITING = ("cuda", "mps", "xpu", "npu")  # devices on which the host may wait; others are lazy, or have no values
_LEAST_WORK = 1 << 33  # multiply-adds of a GEMM of all tokens, below which a wait may cost more than it saves


def is_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def may_count(device: torch.device, work: int) -> bool:
    """Returns whether the number of tokens that count may be read. work: multiply-adds of a GEMM of all tokens."""
    if is_cpu(device):
        return True
    if device.type not in _WAITING or work < _LEAST_WORK:
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


class Tokens(NamedTuple):
    """The tokens that are computed: all, or those of an index."""

    count: int
    index: Optional[Tensor]

    def take(self, t: Optional[Tensor], first: int, last: int) -> Optional[Tensor]:
        if t is None:
            return None
        return t[first:last] if self.index is None else t.index_select(0, self.index[first:last])

    def put(self, t: Optional[Tensor], first: int, last: int, values: Optional[Tensor]) -> None:
        if t is None:
            return
        if self.index is None:
            t[first:last].copy_(values)
        else:
            t.index_copy_(0, self.index[first:last], values.to(t.dtype))


def counted_tokens(targets: Tensor, ignore_index: int, vocab: int, work: int) -> Tokens:
    """Returns the tokens that are computed. On the CPU it raises ValueError for a target outside the vocabulary, as the
    library's kernels do; elsewhere such a token's outputs become NaN. work: as in ``may_count``."""
    tokens, per_token = targets.shape
    if not tokens or not may_count(targets.device, work):
        return Tokens(tokens, None)
    step = max(1, COUNTED // max(per_token, 1))
    rows = torch.zeros(tokens, dtype=torch.bool, device=targets.device)
    for first in range(0, tokens, step):
        found = targets_of(targets[first : first + step], ignore_index, vocab)
        if is_cpu(targets.device) and bool(found.bad.any()):
            row, k = found.bad.nonzero()[0].tolist()
            entry = f", entry {k}" if per_token > 1 else ""
            raise ValueError(
                f"target: {int(targets[first + row, k])} at position {first + row}{entry} is outside [0, {vocab}) and "
                f"not ignore_index {ignore_index}"
            )
        rows[first : first + step] = found.row | found.bad.any(1)
    index = rows.nonzero()[:, 0]  # the one synchronisation
    return Tokens(tokens, None) if len(index) == tokens else Tokens(len(index), index)
