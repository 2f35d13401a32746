"""Divergences of a vocabulary that is sharded over the ranks of a process group.

Each rank computes over its own vocabulary entries. Ranks exchange log-sum-exps and sums of each token, and the gradient
of hidden states; and, where each rank has its own tokens, the hidden states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from ..._losses import distillation as shared
from ..._losses.head import divisor_of
from ..._losses.options import Head, choice, number
from .. import _chunks, _xp as xp, dtensor
from .._arguments import Arguments, named
from ..autograd import refuse_second_derivatives
from ..dtensor import Spread, local_arguments, spread_of
from ..groups import Group, _all_gather, group_of, raise_on_all_ranks, together
from ..loss import linear_cross_entropy
from ..ranks import row_counts
from ._formulas import chunked

_UNCOUNTED = 1e4  # a normaliser of ignored tokens, whose probabilities are then 0


class _Ranks(NamedTuple):
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


class _Total(torch.autograd.Function):
    """Returns the sum over ranks, whose upstream gradient is the same on all ranks."""

    @staticmethod
    def forward(ctx, value: Tensor, ranks: _Ranks) -> Tensor:
        return ranks.summed(value.clone())

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None


class _Divergence(torch.autograd.Function):
    """The divergences [N] of this rank's tokens, with gradients by hidden, weight and bias."""

    @staticmethod
    def forward(ctx, call: shared.Call, ranks: _Ranks, hidden: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        given = {name: ranks.gathered(t) if name in _chunks.ROWS else t for name, t in call.given.items()}
        ctx.given, ctx.call, ctx.ranks = given, call, ranks
        *statistics, loss = _statistics(call, given, ranks)
        ctx.save_for_backward(*statistics)
        return ranks.own(loss).clone()

    @staticmethod
    def backward(ctx, cotangent: Tensor):
        refuse_second_derivatives()
        call, ranks, given = ctx.call, ctx.ranks, ctx.given
        cotangent = ranks.gathered(cotangent.contiguous())
        leaves: dict[str, Tensor] = {}
        for name, needed in zip(_chunks.GRADIENTS, ctx.needs_input_grad[2:]):
            if needed:
                leaves[name] = given[name].detach().requires_grad_()
        if given["weight"].shape[0]:
            given = {**given, **leaves, "rows": cotangent, **dict(zip(shared.STATISTICS, ctx.saved_tensors))}
            with torch.enable_grad():
                total = chunked("divergence", call.memory_budget, call.executor)(given, tuple(call.form._replace(summed=True)))
            made = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values()))))
        else:
            made = {name: torch.zeros_like(t) for name, t in leaves.items()}
        if "hidden" in made:
            dtype = made["hidden"].dtype
            wide = made["hidden"].to(torch.float32, copy=True)
            made["hidden"] = ranks.own(ranks.summed(wide)).to(dtype)
        return None, None, *(made.get(name) for name in _chunks.GRADIENTS)


def _statistics(call: shared.Call, given: dict[str, Tensor], ranks: _Ranks) -> tuple[Tensor, ...]:
    """Returns [N] each: both normalisers of the full vocabulary, the sum that gradients read, and the divergence."""
    f, counts = call.form, given["rows"] != 0
    heads = (("", f.softcap, f.scale), ("teacher_", f.teacher_softcap, f.teacher_scale))
    empty = given["weight"].shape[0] == 0
    target = torch.where(counts, 0, -100)
    found = []
    for name, cap, scale in heads:
        if empty:
            found.append(given["rows"].new_full(given["rows"].shape, -torch.inf))
            continue
        head = Head(-100, cap / f.temperature if cap else None, scale / f.temperature, call.memory_budget)
        operands = given[name + "hidden"], given[name + "weight"], target, given.get(name + "bias")
        found.append(xp.log_probs_and_lse(*operands, head)[1])
    local = torch.stack(found)
    top = ranks.summed(local.clone(), largest=True)
    whole = top + ranks.summed((local - top).exp()).log()
    normalisers = torch.where(counts, whole, _UNCOUNTED)
    if empty:
        made = torch.zeros_like(local)
    else:
        of = {**given, "rows": counts.to(local.dtype), **dict(zip(shared.STATISTICS, normalisers))}
        made = torch.stack(chunked("divergence_sums", call.memory_budget, call.executor)(of, tuple(f)))
    loss, own = ranks.summed(made)
    return *normalisers, own, loss


@contextlib.contextmanager
def _named(prefix: str):
    """Names the teacher's arguments in messages."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        raise type(error)(prefix + str(error)) from None


def spread_of_both(a: Arguments, teacher: Arguments, has_ids: bool) -> Spread:
    """Returns how ranks share the vocabulary of both models; no group if they do not, and then DTensors are gathered."""
    found, other = spread_of(a), spread_of(teacher)
    if a.sharding is None and (has_ids or found[:2] != other[:2] or found.dim < 0 or _columns(a.weight, found)):
        return Spread()
    if a.sharding is not None and getattr(a.sharding, "weight", "rows") != "rows":
        raise NotImplementedError("sharding.weight: 'columns' have no divergences: each rank computes its own entries")
    if a.sharding is not None and has_ids:
        raise NotImplementedError("teacher_ids: expected None beside sharding, since entries of the teacher are on other ranks")
    return found


def _columns(weight: Any, spread: Spread) -> bool:
    return weight.placements[spread.dim].dim == 1


def divergence(loss: Callable[..., shared.Call], arrays: tuple[Any, ...], options: dict[str, Any]) -> Optional[Tensor]:
    """Returns the loss over ranks, or None if the vocabulary is not sharded. loss: ``_losses/distillation.py``'s function."""
    hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias = arrays
    a = named(hidden=hidden, weight=weight, target=options["target"], bias=bias, sharding=options["sharding"])
    teacher = named(
        hidden=teacher_hidden, weight=teacher_weight, target=None, bias=teacher_bias, sharding=options["sharding"]
    )
    if torch.compiler.is_compiling():
        if options["sharding"] is not None:
            raise NotImplementedError("sharding: divergences take it in eager calls")
        return None
    spread = spread_of_both(a, teacher, options["teacher_ids"] is not None)
    if not spread.group and options["sharding"] is None:
        return None
    return raise_on_all_ranks(spread.group, lambda: _divergence(loss, a, teacher, spread, options))


def _divergence(
    loss: Callable[..., shared.Call], a: Arguments, teacher: Arguments, spread: Spread, options: dict[str, Any]
) -> Tensor:
    hard, soft = (number(name, options[name], 0.0) for name in ("weight_hard_loss", "weight_soft_loss"))
    choice("reduction", options["reduction"], ("none", "mean", "sum"))
    given, shard = local_arguments(a, spread)
    with torch.no_grad(), _named("teacher_"):
        other, _ = local_arguments(teacher, spread)
    group = group_of(spread.group)
    plain = {**options, "reduction": "none", "normalizer": None, "weight_hard_loss": 0.0, "weight_soft_loss": 1.0}
    plain.update(target=given.target, all_vocab=shard.vocab)
    call = loss(xp, given.hidden, given.weight, other.hidden, other.weight, given.bias, other.bias, **plain)
    if hard and given.target is None:
        raise ValueError(f"target: expected it with weight_hard_loss={hard}, got None")
    tokens = call.given["hidden"].shape[0]
    counts = together(group, lambda: row_counts(group, tokens))
    if not shard.tokens and len(set(counts)) > 1:
        raise ValueError(f"hidden: expected the same tokens on all ranks, got {counts}")
    ranks = _Ranks(group, counts if shard.tokens else None)
    rows = call.given["rows"]
    call.given["rows"] = torch.where(rows != 0, 1.0, 0.0)
    each = _Divergence.apply(call, ranks, *(call.given.get(name) for name in _chunks.GRADIENTS))
    each = torch.where(rows != 0, soft * each * rows, 0.0)
    if hard:
        nll = linear_cross_entropy(
            a.hidden, a.weight, a.target, a.bias, reduction="none", ignore_index=options["ignore_index"],
            softcap=options["softcap"], logit_scale=options["logit_scale"], memory_budget=options["memory_budget"],
            sharding=a.sharding,
        )
        each = each + hard * dtensor.replicated("target", nll).reshape(-1)
    if options["reduction"] == "none":
        return each.reshape(call.lead)
    together_ = shard.tokens and not spread.own  # the loss is over the tokens of all ranks
    valid = rows != 0
    divisor = divisor_of(xp, options["reduction"], options["normalizer"], valid)
    if divisor is not None and options["normalizer"] is None and together_:
        divisor = ranks.summed(valid.sum()).clamp(min=1)
    total = each.sum() if divisor is None else each.sum() / divisor
    return _Total.apply(total, ranks) if together_ else total
