"""Samples and best entries of a vocabulary that is sharded over the ranks of a process group
(``_losses/sampling_over_ranks.py``): the call, and the exchanges of its ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .. import _library as c
from .._losses import sampling_over_ranks as formulas
from .._losses.chunks import ROWS, Sizes, block_bytes, plan_of
from .._losses.options import Head
from .._losses.sampling import Filters, with_noise
from . import _xp as xp, groups, quantized
from ._arguments import Arguments, named
from ._chunks import Operand, number_of
from .dtensor import Spread, local_arguments, spread_of
from .groups import raise_on_all_ranks, together
from .ranks import VocabShard, row_counts

_TEXT = 1024  # bytes in which a rank describes its call to the others
_OF_GPU = 512 << 20  # bytes of a chunk on a GPU without a budget, where fewer tokens leave it idle
_LEAST = 0xFFFFFFFF  # an id is subtracted from it, so that the least id is the largest number


# --- Exchanges.


class Ranks(NamedTuple):
    """The ranks of a call, as the formulas take them. Exchanges are enqueued on the device of their tensors."""

    process_group: Any
    begin: int  # this rank's first vocabulary entry
    vocab: int  # entries of all ranks
    width: int  # the most entries of a rank

    def _every(self, x: Tensor) -> Tensor:
        """Returns the tensors of all ranks [ranks, ...]."""
        size = self.process_group.size()
        every = x.new_empty((size * x.shape[0], *x.shape[1:]))
        groups._all_gather(every, x.contiguous(), self.process_group)
        return every.view(size, *x.shape)

    def own(self, z: Tensor) -> tuple[Tensor, Tensor]:
        if z.shape[1] == 0:
            return z.new_full((z.shape[0], 1), -torch.inf), torch.full((1,), self.vocab, device=z.device)
        return z, torch.arange(self.begin, self.begin + z.shape[1], device=z.device)

    def largest(self, x: Tensor) -> Tensor:
        return self._every(x).amax(0)

    def summed(self, x: Tensor) -> Tensor:
        return self._every(x).sum(0)

    def joined(self, x: Tensor) -> Tensor:
        return self._every(x).transpose(0, 1).flatten(1)

    def first_largest(self, x: Tensor, ids: Tensor) -> Tensor:
        value, at = x.max(-1)  # the first of equal ones, whose id is the least
        return _ids_of(self._every(_ordered(value, ids[at])).amax(0))

    def best(self, x: Tensor, ids: Tensor, k: int) -> Tensor:
        wanted = min(k, self.width)
        mine = _ordered(x, ids).topk(min(wanted, x.shape[1])).values
        if mine.shape[1] < wanted:
            mine = torch.nn.functional.pad(mine, (0, wanted - mine.shape[1]), value=torch.iinfo(torch.int64).min)
        return _ids_of(self.joined(mine).topk(k).values)


def _ordered(x: Tensor, ids: Tensor) -> Tensor:
    """Returns int64 with the order of x fp32, and that of falling ids where x is equal. NaN is the largest."""
    bits = torch.where(x.isnan(), torch.nan, x + 0.0).view(torch.int32)  # of one zero, and of a NaN with the sign 0
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits & 0x7FFFFFFF)
    return bits.to(torch.int64) << 32 | (_LEAST - ids)


def _ids_of(ordered: Tensor) -> Tensor:
    return _LEAST - (ordered & _LEAST)


def _process_group(name: str, device: torch.device) -> Any:
    """Returns the group that exchanges tensors of a device: one of the hosts for a CPU beside NCCL."""
    if device.type == "cpu" and not c.why_missing():
        return groups.group_of(name)._hosts
    return groups.process_group(name)


def _meet(name: str, own: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns how each rank describes its call. Raises the error of a rank that failed before."""
    group = groups.process_group(name)
    if c.why_missing():
        every: list[Any] = [None] * group.size()
        dist.all_gather_object(every, own, group=group)
        return every
    met = groups.group_of(name)
    row_counts(met, own["rows"])  # the exchange that a rank which failed before takes part in
    text = np.frombuffer(json.dumps(own).encode().ljust(_TEXT), np.uint8)
    return [json.loads(part.tobytes()) for part in met.gather(text)]


# --- One rank's part of a call.


class _Call(NamedTuple):
    """A call with everything but its tensors, as values that an operator takes."""

    group: str
    vocab: int
    begin: int  # this rank's first vocabulary entry
    softcap: float  # 0: none
    scale: float
    k: int  # top_k of a sampler, 0 for none; or the number of best entries
    flags: list[bool]  # the flags of ``Filters``; empty: the best entries are wanted
    budget: int  # bytes; 0: the default

    def described(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> dict[str, Any]:
        """Returns what all ranks must give alike, by the arguments' names."""
        hidden, weight = tensors["hidden"], tensors["weight"]
        same = dict(hidden=list(hidden.shape), weight=str(weight.dtype).removeprefix("torch."), sharding=self.vocab)
        same |= {"top_k" if self.flags else "k": self.k, "softcap": self.softcap, "logit_scale": self.scale}
        given = "bias", "logit_bias", "counter", "temperature", "top_p", "min_p"
        same |= {name: numbers.get(name, "given" if name in tensors else None) for name in given}
        return same | dict(memory_budget=self.budget)

    def agreed(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float], seed: int) -> tuple[Ranks, int]:
        """Returns the ranks of a call and the seed of the first. Raises ValueError on all ranks if they do not agree."""
        own = dict(same=self.described(tensors, numbers), rows=tensors["weight"].shape[0], seed=seed % (1 << 64))
        every = _meet(self.group, own)
        for name, first in every[0]["same"].items():
            values = [one["same"].get(name) for one in every]
            if any(value != first for value in values):
                raise ValueError(f"{name}: expected the same on all ranks, got {values}")
        group = _process_group(self.group, tensors["hidden"].device)
        return Ranks(group, self.begin, self.vocab, max(one["rows"] for one in every)), every[0]["seed"]


def _ids(call: _Call, tensors: Mapping[str, Tensor], numbers: Mapping[str, float] = {}, seed: int = 0) -> Tensor:
    """Returns the token ids [N] that the ranks sample, or their best entries [N, k]. Collective."""
    ranks, seed = call.agreed(tensors, numbers, seed)
    given: dict[str, Any] = {**tensors, **numbers}
    draws = bool(call.flags) and not call.flags[-1]
    if draws:  # the noise of the group's first rank
        given = with_noise(xp, given, ranks._every(given["key"])[0] if "key" in given else seed)
    hidden, weight = given["hidden"], given["weight"]
    if "logit_bias" in given:
        given["logit_bias"] = given["logit_bias"][call.begin : call.begin + weight.shape[0]]
    number, budget = number_of(weight.dtype), call.budget or (0 if hidden.device.type == "cpu" else _OF_GPU)
    block = block_bytes(budget)
    sizes = Sizes(
        "sample_over_ranks" if call.flags else "best_over_ranks", hidden.shape[0], ranks.width, hidden.shape[1],
        number.itemsize, False, 0 if weight.dtype == number else block,
    )
    size = plan_of(sizes, budget).tokens
    given["weight"] = Operand(weight, hidden.dtype, block)

    def of_chunk(first: int) -> Tensor:
        rows = {n: t[first : first + size] if n in ROWS and t.ndim else t for n, t in given.items()}
        if call.flags:
            return formulas.tokens(xp, ranks, rows, Filters(call.softcap, call.scale, call.k, *call.flags))
        return formulas.best_entries(xp, ranks, rows, call.softcap, call.scale, call.k)

    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        made = [of_chunk(first) for first in range(0, hidden.shape[0], size)]
    return torch.cat(made) if made else _empty(tensors, call)


def _empty(tensors: Mapping[str, Tensor], call: _Call) -> Tensor:
    hidden = tensors["hidden"]
    return hidden.new_empty((hidden.shape[0], *(() if call.flags else (call.k,))), dtype=torch.int64)


def _run(call: _Call, *given: Any) -> Tensor:
    if c.why_missing():
        return _ids(call, *given)
    return raise_on_all_ranks(call.group, lambda: together(groups.group_of(call.group), lambda: _ids(call, *given)))


@torch.library.custom_op(
    "logitless::ids_over_ranks", mutates_args=(),
    schema="(Tensor[] tensors, str names, str group, int vocab, int begin, float softcap, float scale, int k, bool[] flags, int budget) -> Tensor",
)  # fmt: skip
def _operator(tensors, names, *call):
    return _run(_Call(*call), dict(zip(names.split(","), tensors)))


@_operator.register_fake
def _(tensors, names, *call):
    return _empty(dict(zip(names.split(","), tensors)), _Call(*call))


def _enqueued(call: _Call, given: Mapping[str, Any], seed: int | Tensor | None) -> Tensor:
    """Returns ``_ids`` of a call's tensors and numbers, in a graph of torch.compile as an operator."""
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    numbers = {name: value for name, value in given.items() if name not in tensors}
    compiling = torch.compiler.is_compiling()
    if isinstance(seed, Tensor) or (compiling and seed is not None):
        tensors["key"] = xp.noise_key(seed, tensors["hidden"])
    if not compiling:
        return _run(call, tensors, numbers, seed if isinstance(seed, int) else 0)
    tensors |= {name: xp.as_like(value, tensors["hidden"].new_empty(0, dtype=torch.float32)) for name, value in numbers.items()}
    return torch.ops.logitless.ids_over_ranks(list(tensors.values()), ",".join(tensors), *call)


# --- The calls.


def spread(hidden: Any, weight: Any, bias: Any, sharding: Any) -> tuple[Arguments, Spread]:
    """Returns the arguments of a head, and how its ranks share a call: without a group unless each computes its part of
    the vocabulary for the same tokens."""
    a = named(hidden=xp.array("hidden", hidden), weight=xp.array("weight", weight), target=None, bias=bias, sharding=sharding)
    found = spread_of(a)
    if sharding is None and (found.dim < 0 or found.own or found.tokens is not None or weight.placements[found.dim].dim == 1):
        return a, Spread()
    return a, found


def group_name(hidden: Any, weight: Any, bias: Any, sharding: Any) -> str:
    """Returns the name of the group whose ranks compute a call together; empty for none."""
    if not isinstance(hidden, Tensor) or not isinstance(weight, Tensor):
        return getattr(getattr(sharding, "group", None), "group_name", "")
    return spread(hidden, weight, bias, sharding)[1].group


def _local(a: Arguments, of: Spread) -> tuple[dict[str, Any], VocabShard, tuple[int, ...]]:
    """Returns this rank's checked head, its vocabulary shard and the leading sizes of hidden."""
    a, shard = local_arguments(quantized.taken(a), of)
    if shard.tokens:
        raise NotImplementedError(
            "sharding: samples and best entries are of the same tokens on all ranks; expected tokens=False, weight='rows'"
        )
    if shard.vocab == 0 or a.weight.shape[-1] == 0:
        raise ValueError(f"weight: expected [V, D] with at least one row and column, got {[shard.vocab, *a.weight.shape[1:]]}")
    return xp.checked_head("", a.hidden, a.weight, a.bias), shard, tuple(a.hidden.shape[:-1])


def tokens(
    hidden: Any, weight: Any, bias: Any, seed: int | Tensor, check: Callable[..., Any], head: Head, sharding: Any
) -> Optional[Tensor]:
    """Returns the sampled token ids [...], or None where no ranks share the vocabulary. The caller raises errors on all
    ranks. check: completes the arguments and returns their filters."""
    a, of = spread(hidden, weight, bias, sharding)
    if not of.group and sharding is None:
        return None

    given, shard, lead = _local(a, of)
    given, form = check(given, lead, shard.vocab)
    if form.greedy and "logit_bias" not in given:
        return xp.largest_entries(hidden, weight, bias, head, sharding)
    flags = [form.top_p, form.min_p, form.greedy]
    call = _Call(shard.group, shard.vocab, shard.vocab_begin, form.softcap, form.scale, form.top_k, flags, _bytes(head))
    return _enqueued(call, given, None if form.greedy else seed).reshape(lead)


def best(
    hidden: Any, weight: Any, bias: Any, k: int, check: Callable[..., Any], head: Head, sharding: Any
) -> Optional[Tensor]:
    """Returns the ids [..., k] of the best entries, or None where no ranks share the vocabulary. check: returns softcap and
    scale, and checks the other arguments."""
    a, of = spread(hidden, weight, bias, sharding)
    if not of.group and sharding is None:
        return None

    def run() -> Tensor:
        given, shard, lead = _local(a, of)
        (softcap, scale), _ = check(lead, shard.vocab)
        call = _Call(shard.group, shard.vocab, shard.vocab_begin, softcap, scale, int(k), [], _bytes(head))
        return _enqueued(call, given, None).reshape(*lead, k)

    return raise_on_all_ranks(of.group, run)


def _bytes(head: Head) -> int:
    from .losses._formulas import _bytes

    return _bytes(head.memory_budget)
