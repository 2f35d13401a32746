"""Divergences of a vocabulary that is sharded over the ranks of a process group.

Each rank computes over its own vocabulary entries. Ranks exchange log-sum-exps and sums of each token, and the gradient
of hidden states; and, where each rank has its own tokens, the hidden states. The teacher's rows of other vocabulary ids
are sent to the ranks of their entries.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from ..._losses import distillation as shared
from ..._losses.head import divisor_of
from ..._losses.options import Head, choice, number
from .. import _chunks, _xp as xp, dtensor
from .._arguments import Arguments, named
from ..autograd import check_backward
from ..dtensor import Spread, local_arguments, spread_of
from ..groups import group_of, raise_on_all_ranks, together
from ..loss import linear_cross_entropy
from ..ranks import VocabShard, row_counts
from ._exchange import Ranks, rows_of_ids, sum_over_ranks
from ._formulas import _bytes, chunked

_UNCOUNTED = 1e4  # a normaliser of ignored tokens, whose probabilities are then 0


class _Call(NamedTuple):
    """A divergence with everything but its tensors, as values that an operator takes."""

    group: str
    own: bool  # each rank has its own tokens
    names: tuple[str, ...]  # of the tensors
    form: shared.Form
    budget: int
    executor: str
    wanted: tuple[str, ...]  # the tensors whose gradients are needed

    def run(self, what: str, given: dict[str, Tensor], form: shared.Form):
        return chunked(what, self.budget or None, self.executor)(given, tuple(form))

    def ranks(self, tokens: int) -> Ranks:
        """Returns the ranks of the call, with the numbers of their tokens. Collective."""
        group = group_of(self.group)
        counts = together(group, lambda: row_counts(group, tokens))
        if not self.own and len(set(counts)) > 1:
            raise ValueError(f"hidden: expected the same tokens on all ranks, got {counts}")
        return Ranks(group, counts if self.own else None)


def _gathered(ranks: Ranks, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors with those of each token of all ranks' tokens."""
    return {name: ranks.gathered(t) if name in _chunks.ROWS else t for name, t in given.items()}


class _Divergence(torch.autograd.Function):
    """The divergences [N] of this rank's tokens, with gradients by hidden, weight and bias."""

    @staticmethod
    def forward(ctx, call: _Call, *tensors: Tensor) -> Tensor:
        ranks = call.ranks(tensors[0].shape[0])
        ctx.given = _gathered(ranks, dict(zip(call.names, tensors)))
        ctx.call, ctx.ranks = call, ranks
        *statistics, loss = _statistics(call, ctx.given, ranks)
        ctx.save_for_backward(*statistics)
        return ranks.own(loss).clone()

    @staticmethod
    def backward(ctx, cotangent: Tensor):
        check_backward(cotangent)
        cotangent = ctx.ranks.gathered(cotangent.contiguous())
        made = _gradients(ctx.call, ctx.given, ctx.saved_tensors, cotangent, ctx.ranks)
        return None, *(made.get(name) for name in ctx.call.names)


def _gradients(
    call: _Call, given: dict[str, Tensor], statistics: tuple[Tensor, ...], cotangent: Tensor, ranks: Ranks
) -> dict[str, Tensor]:
    """Returns the wanted gradients. Statistics and cotangent are those of all ranks' tokens."""
    if given["weight"].shape[0]:
        with _chunks.recorded():
            leaves = {name: given[name].detach().requires_grad_() for name in call.wanted}
            given = {**given, **leaves, "rows": cotangent, **dict(zip(shared.STATISTICS, statistics))}
            total = call.run("divergence", given, call.form._replace(summed=True))
            made = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values()))))
    else:
        made = {name: torch.zeros_like(given[name]) for name in call.wanted}
    if "hidden" in made:
        dtype = made["hidden"].dtype
        wide = made["hidden"].to(torch.float32, copy=True)
        made["hidden"] = ranks.own(ranks.summed(wide)).to(dtype)
    return made


def _normaliser(call: _Call, given: dict[str, Tensor], of: str, cap: float, scale: float) -> Tensor:
    """Returns the log-sum-exps [N] of this rank's entries. of: "" or "teacher_"."""
    f, rows = call.form, given["rows"]
    if given[of + "weight"].shape[0] == 0:
        return rows.new_full(rows.shape, -torch.inf)
    if of and "teacher_mask" in given:
        return call.run("normaliser", {name: t for name, t in given.items() if name.startswith(of)}, f)
    head = Head(-100, cap / f.temperature if cap else None, scale / f.temperature, call.budget or None)
    operands = given[of + "hidden"], given[of + "weight"], torch.where(rows != 0, 0, -100), given.get(of + "bias")
    return xp.log_probs_and_lse(*operands, head)[1]


def _statistics(call: _Call, given: dict[str, Tensor], ranks: Ranks) -> tuple[Tensor, ...]:
    """Returns [N] each: both normalisers of the full vocabulary, the sum that gradients read, and the divergence."""
    f, counts = call.form, given["rows"] != 0
    heads = (("", f.softcap, f.scale), ("teacher_", f.teacher_softcap, f.teacher_scale))
    local = torch.stack([_normaliser(call, given, *head) for head in heads])
    top = ranks.summed(local.clone(), largest=True)
    whole = top + ranks.summed((local - top).exp()).log()
    normalisers = torch.where(counts, whole, _UNCOUNTED)
    if given["weight"].shape[0] == 0:
        made = local.new_zeros((3, local.shape[1]))
    else:
        of = {**given, "rows": counts.to(local.dtype), **dict(zip(shared.STATISTICS, normalisers))}
        made = torch.stack(call.run("divergence_sums", of, f))
    loss, own, mass = ranks.summed(made)
    return *normalisers, torch.where(counts, own / mass, 0.0), loss


# --- Operators for torch.compile. They save this rank's tensors alone, and gather hidden states once more backward.

_CALL = "str group, bool own, str names, str form, SymInt budget, str executor, str wanted"


def _flat(call: _Call) -> tuple:
    names, wanted = ",".join(call.names), ",".join(call.wanted)
    return call.group, call.own, names, repr(tuple(call.form)), call.budget, call.executor, wanted


def _call_of(group: str, own: bool, names: str, form: str, budget: int, executor: str, wanted: str) -> _Call:
    listed = tuple(names.split(",")), tuple(filter(None, wanted.split(",")))
    return _Call(group, own, listed[0], shared.Form(*ast.literal_eval(form)), budget, executor, listed[1])


@torch.library.custom_op("logitless::divergence", mutates_args=(), schema=f"(Tensor[] tensors, {_CALL}) -> Tensor[]")
def _forward(tensors, *flat):
    call = _call_of(*flat)

    def run():
        ranks = call.ranks(tensors[0].shape[0])
        found = _statistics(call, _gathered(ranks, dict(zip(call.names, tensors))), ranks)
        return [ranks.own(t).clone() for t in found]

    return raise_on_all_ranks(call.group, run)


@_forward.register_fake
def _(tensors, *flat):
    rows = tensors[_call_of(*flat).names.index("rows")]
    return [torch.empty_like(rows) for _ in range(4)]


@torch.library.custom_op(
    "logitless::divergence_backward", mutates_args=(),
    schema=f"(Tensor[] tensors, Tensor[] statistics, Tensor cotangent, {_CALL}) -> Tensor[]",
)  # fmt: skip
def _backward(tensors, statistics, cotangent, *flat):
    call = _call_of(*flat)

    def run():
        ranks = call.ranks(tensors[0].shape[0])
        given = _gathered(ranks, dict(zip(call.names, tensors)))
        of_all = [ranks.gathered(t.contiguous()) for t in (*statistics, cotangent)]
        made = _gradients(call, given, tuple(of_all[:-1]), of_all[-1], ranks)
        return [made[name].clone() for name in call.wanted]

    return raise_on_all_ranks(call.group, run)


@_backward.register_fake
def _(tensors, statistics, cotangent, *flat):
    call = _call_of(*flat)
    return [torch.empty_like(tensors[call.names.index(name)]) for name in call.wanted]


def _save(ctx, inputs, output) -> None:
    tensors, *ctx.flat = inputs
    ctx.save_for_backward(*tensors, *output[:3])


def _of_operator(ctx, cotangents):
    call, tensors = _call_of(*ctx.flat), ctx.saved_tensors[:-3]
    made = _backward(list(tensors), list(ctx.saved_tensors[-3:]), cotangents[3], *ctx.flat)
    found = dict(zip(call.wanted, made))
    return [found.get(name) for name in call.names], *(None,) * len(ctx.flat)


_forward.register_autograd(_of_operator, setup_context=_save)

# --- The call.


@contextlib.contextmanager
def _named(prefix: str):
    """Names the teacher's arguments in messages."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        raise type(error)(prefix + str(error)) from None


def spread_of_both(a: Arguments, teacher: Arguments) -> Spread:
    """Returns how ranks share the vocabulary of both models; no group if they do not, and then DTensors are gathered."""
    found, other = spread_of(a), spread_of(teacher)
    if a.sharding is None and (found[:2] != other[:2] or found.dim < 0 or _columns(a.weight, found)):
        return Spread()
    if a.sharding is not None and getattr(a.sharding, "weight", "rows") != "rows":
        raise NotImplementedError("sharding.weight: 'columns' have no divergences: each rank computes its own entries")
    return found


def _columns(weight: Any, spread: Spread) -> bool:
    return weight.placements[spread.dim].dim == 1


def _arguments(arrays: tuple[Any, ...], options: dict[str, Any]) -> tuple[Arguments, Arguments]:
    """Returns the arguments of both models' heads."""
    hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias = arrays
    sharding = options["sharding"]
    student = named(hidden=hidden, weight=weight, target=options["target"], bias=bias, sharding=sharding)
    return student, named(hidden=teacher_hidden, weight=teacher_weight, target=None, bias=teacher_bias, sharding=sharding)


def divergence(loss: Callable[..., shared.Call], arrays: tuple[Any, ...], options: dict[str, Any]) -> Optional[Tensor]:
    """Returns the loss over ranks, or None if the vocabulary is not sharded. loss: ``_losses/distillation.py``'s function."""
    a, teacher = _arguments(arrays, options)
    spread = spread_of_both(a, teacher)
    if not spread.group and options["sharding"] is None:
        return None
    return raise_on_all_ranks(spread.group, lambda: _divergence(loss, a, teacher, spread, options))


def _teacher(a: Arguments, spread: Spread, ids: Optional[Tensor], shard: VocabShard, rows: int) -> tuple[Arguments, Any]:
    """Returns the teacher's local arguments, of this rank's ``rows`` entries of the student; and a mask of entries that it
    has not, if ids are given."""
    with torch.no_grad(), _named("teacher_"):
        if ids is None:
            return local_arguments(a, spread)[0], None
        ids = xp.indices("ids", ids, (shard.vocab,))
        if a.sharding is not None:  # the teacher's rows are concatenated in rank order
            a = a._replace(sharding=a.sharding._replace(vocab=xp.array("weight", a.weight).shape[0], vocab_begin=0))
        a, _ = local_arguments(a, spread)
    with torch.no_grad():
        given = [a.weight] if a.bias is None else [a.weight, a.bias]
        mask, *found = rows_of_ids([t.detach() for t in given], ids, shard.group, shard.vocab_begin, rows)
    return a._replace(weight=found[0], bias=found[1] if len(found) > 1 else None), mask


def _local(
    loss: Callable[..., shared.Call], a: Arguments, other: Arguments, shard: VocabShard, mask: Any, options: dict[str, Any]
) -> shared.Call:
    """Returns the divergences of each token, of this rank's vocabulary entries."""
    plain = {**options, "reduction": "none", "normalizer": None, "weight_hard_loss": 0.0, "weight_soft_loss": 1.0}
    plain.update(target=a.target, all_vocab=shard.vocab, teacher_ids=None, teacher_mask=mask)
    return loss(xp, a.hidden, a.weight, other.hidden, other.weight, a.bias, other.bias, **plain)


def explained(loss: Callable[..., shared.Call], arrays: tuple[Any, ...], options: dict[str, Any]) -> Optional[str]:
    """Describes this rank's part of a loss over ranks, without a collective call; None if the vocabulary is not sharded."""
    a, teacher = _arguments(arrays, options)
    spread = spread_of_both(a, teacher)
    if not spread.group and options["sharding"] is None:
        return None
    if options["sharding"] is not None:
        a, teacher = (
            of._replace(sharding=options["sharding"]._replace(vocab=xp.array("weight", of.weight).shape[0], vocab_begin=0))
            for of in (a, teacher)
        )
    given, shard = local_arguments(a, spread)
    other, _ = local_arguments(teacher, spread)
    rows, mask = given.weight.shape[0], None
    if options["teacher_ids"] is not None:
        mask = torch.zeros(rows, device=other.weight.device)
        bias = None if other.bias is None else other.bias.new_empty(rows)
        other = other._replace(weight=other.weight.new_empty(rows, other.weight.shape[1]), bias=bias)
    call = _local(loss, given._replace(target=None), other, shard, mask, options)
    numbers = dict.fromkeys(shared.STATISTICS, call.given["rows"])
    plan = chunked("divergence", call.memory_budget, call.executor).explain(
        {**call.given, **numbers}, tuple(call.form._replace(summed=True))
    )
    whose = "all ranks' tokens are computed so" if shard.tokens else "all tokens"
    return (
        f"Over ranks: each computes its own vocabulary entries, after both models' log-sum-exps. This rank's {rows} entries "
        f"and {call.given['rows'].shape[0]} tokens ({whose}):\n{plan}"
    )


def _divergence(
    loss: Callable[..., shared.Call], a: Arguments, teacher: Arguments, spread: Spread, options: dict[str, Any]
) -> Tensor:
    hard, soft = (number(name, options[name], 0.0) for name in ("weight_hard_loss", "weight_soft_loss"))
    choice("reduction", options["reduction"], ("none", "mean", "sum"))
    given, shard = local_arguments(a, spread)
    other, mask = _teacher(teacher, spread, options["teacher_ids"], shard, given.weight.shape[0])
    call = _local(loss, given, other, shard, mask, options)
    if hard and given.target is None:
        raise ValueError(f"target: expected it with weight_hard_loss={hard}, got None")
    rows = call.given["rows"]
    call.given["rows"] = torch.where(rows != 0, 1.0, 0.0)
    names, tensors = tuple(call.given), tuple(call.given.values())
    grad = torch.is_grad_enabled()
    wanted = tuple(name for name in _chunks.GRADIENTS if grad and name in names and call.given[name].requires_grad)
    of = _Call(shard.group, shard.tokens, names, call.form, _bytes(call.memory_budget), call.executor, wanted)
    if torch.compiler.is_compiling():
        each = torch.ops.logitless.divergence(list(tensors), *_flat(of))[3]
    else:
        each = _Divergence.apply(of, *tensors)
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
        divisor = sum_over_ranks(valid.sum(), shard.group).clamp(min=1)
    total = each.sum() if divisor is None else each.sum() / divisor
    return sum_over_ranks(total, shard.group) if together_ else total
