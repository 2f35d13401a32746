"""Exchanges between the ranks of a divergence: sums, tokens, and rows of the teacher's head."""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..._losses.distillation import NONE
from ..groups import Group, _all_gather, group_of, process_group, raise_on_all_ranks, together
from ..ranks import row_counts


class Ranks(NamedTuple):
    """The tokens of a call over the ranks of a group."""

    group: Group
    counts: Optional[list[int]]  # each rank's tokens, if they are its own

    @property
    def process_group(self):
        return self.group.process_group

    def summed(self, t: Tensor, largest: bool = False) -> Tensor:
        """Returns the sum over ranks, or the largest value; t is used up."""
        t = t.contiguous()
        dist.all_reduce(t, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self.process_group)
        return t

    def gathered(self, t: Tensor) -> Tensor:
        """Returns the rows of all ranks' tokens."""
        if self.counts is None:
            return t
        most = max(self.counts)
        mine = t.new_zeros((most, *t.shape[1:]))
        mine[: t.shape[0]] = t
        every = t.new_empty((most * len(self.counts), *t.shape[1:]))
        _all_gather(every, mine, self.process_group)
        return torch.cat([part[:count] for part, count in zip(every.split(most), self.counts)]) if most else every

    def own(self, t: Tensor) -> Tensor:
        """Returns this rank's tokens of all ranks'."""
        return t if self.counts is None else t.split(self.counts)[self.group.communicator.rank]


@torch.library.custom_op("logitless::sum_over_ranks", mutates_args=(), schema="(Tensor value, str group) -> Tensor")
def sum_over_ranks(value, group):
    """Returns the sum over ranks, whose upstream gradient is the same on all ranks."""
    found = value.clone()
    dist.all_reduce(found, group=process_group(group))
    return found


sum_over_ranks.register_fake(lambda value, group: torch.empty_like(value))
sum_over_ranks.register_autograd(lambda ctx, gradient: (gradient, None))


@torch.library.custom_op(
    "logitless::rows_of_ids", mutates_args=(),
    schema="(Tensor[] tensors, Tensor ids, str group, SymInt begin, SymInt count) -> Tensor[]",
)  # fmt: skip
def rows_of_ids(tensors, ids, group, begin, count):
    """Returns rows ids[begin : begin + count] of tensors whose rows are concatenated in rank order; and first the mask
    [count] that is added to their logits, for ids below 0. Rows that are not there are 0. ids: of all entries, the same on
    all ranks."""
    return raise_on_all_ranks(group, lambda: _rows_of_ids(tensors, ids, group_of(group), begin, count))


@rows_of_ids.register_fake
def _(tensors, ids, group, begin, count):
    return [tensors[0].new_empty(count, dtype=torch.float32), *(t.new_empty((count, *t.shape[1:])) for t in tensors)]


def _rows_of_ids(tensors: list[Tensor], ids: Tensor, group: Group, begin: int, count: int) -> list[Tensor]:
    known = ids.cpu().numpy().astype(np.int64)
    counts = together(group, lambda: row_counts(group, tensors[0].shape[0]))
    check = int((known * (2 * np.arange(len(known)) + 1)).sum())
    widths = [math.prod(t.shape[1:]) * t.element_size() for t in tensors]
    facts = [begin, count, check, len(widths), widths[0], widths[-1]]
    parts = together(group, lambda: group.gather(np.array(facts)))
    if (parts[:, 2] != check).any():
        raise ValueError("teacher_ids: expected the same on all ranks")
    if (parts[:, 3:] != facts[3:]).any():
        raise ValueError("teacher_weight: expected columns and a dtype that are the same on all ranks, and a bias on all or none")
    ends = np.cumsum(counts)
    bad = known >= ends[-1]
    if bad.any() and ids.device.type == "cpu":
        raise ValueError(f"teacher_ids: expected token ids below {ends[-1]}, got {known[bad][0]}")
    owner = np.where((known < 0) | bad, -1, np.searchsorted(ends, known, side="right"))
    rank = group.communicator.rank
    wanted = [first + np.flatnonzero(owner[first : first + size] == rank) for first, size in parts[:, :2]]
    mine = owner[begin : begin + count]
    given = [np.flatnonzero(mine == source) for source in range(group.size)]
    device = tensors[0].device
    sent = torch.from_numpy(known[np.concatenate(wanted)] - (ends[rank] - counts[rank])).to(device)
    places = torch.from_numpy(np.concatenate(given)).to(device)
    mask = np.where(mine >= 0, 0.0, np.where(bad[begin : begin + count], np.nan, NONE)).astype(np.float32)
    found = [torch.from_numpy(mask).to(device)]
    for t in tensors:
        got = t.new_empty((len(places), *t.shape[1:]))
        dist.all_to_all_single(
            *(_bytes_of(x) for x in (got, t.index_select(0, sent))), [len(x) for x in given], [len(x) for x in wanted],
            group=group.process_group,
        )  # fmt: skip
        found.append(t.new_zeros((count, *t.shape[1:])).index_copy_(0, places, got))
    return found


def _bytes_of(t: Tensor) -> Tensor:
    """Returns the memory of rows: not every backend exchanges each dtype."""
    return t.reshape(t.shape[0], math.prod(t.shape[1:])).view(torch.uint8)
