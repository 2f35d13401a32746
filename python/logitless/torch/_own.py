"""Data parallelism with a sharded vocabulary: each rank has a loss of its own tokens, and all ranks compute them
together."""

from __future__ import annotations


import numpy as np
import torch
from torch import Tensor

from .._options import LossOptions
from . import _ranks
from ._ops import _bits, dtypes_of, refuse_second_derivatives, run_cross_entropy, scaled


def _divisor(options: LossOptions, target, class_weight, token_weight, target_weight) -> Tensor | float:
    """Returns the divisor of a mean over this rank's tokens; infinite without tokens."""
    if options.reduction == "sum":
        return 1.0
    if options.normalizer:
        return options.normalizer
    valid = target != options.ignore_index
    if target_weight is not None:  # a token with several targets counts once
        count = valid.any(-1).double()
    else:
        count = valid.double()
        if class_weight is not None:
            vocab_id = torch.where(valid, target, 0).long().clamp(0, class_weight.shape[0] - 1)
            count = count * class_weight.double()[vocab_id]
    if token_weight is not None:
        count = count * token_weight.double()
    total = count.sum()
    return torch.where(total > 0, total, torch.inf)


class _OwnLoss(torch.autograd.Function):
    """The sum of this rank's losses, each times ``factor``. The forward computes gradients for an upstream gradient
    that is equal on all ranks. If it is not, the backward recomputes them."""

    @staticmethod
    def forward(
        ctx, hidden, weight, bias, target, class_weight, token_weight, target_weight, factor, options, compute, needs,
        argmax, vocab_shard,
    ):
        rest = (target, bias, class_weight, token_weight, target_weight)
        losses, lse, index, *gradients = run_cross_entropy(
            hidden, weight, *rest, factor, options, compute, needs, argmax, vocab_shard, waits=True
        )
        ctx.dtypes = dtypes_of(hidden, weight, bias)
        ctx.values = options, compute, needs, vocab_shard
        ctx.save_for_backward(hidden, weight, *rest, factor, *gradients)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lse, index)
        return _total(losses, factor), lse, index

    @staticmethod
    def backward(ctx, d_loss, *_):
        refuse_second_derivatives()
        options, compute, needs, vocab_shard = ctx.values
        group = _ranks.group_of(vocab_shard.group)
        every = _ranks.together(group, lambda: group.gather(np.array([d_loss.item()])))
        saved = ctx.saved_tensors  # read once, since each read under a checkpoint recomputes them
        (*inputs, factor), gradients = saved[:8], saved[8:]
        if (every == every[0]).all():
            gradients = scaled(gradients, d_loss, ctx.dtypes)
        else:
            again = lambda: run_cross_entropy(*inputs, factor * d_loss, options, compute, needs, False, vocab_shard)  # noqa: E731
            gradients = _ranks.raise_on_all_ranks(vocab_shard.group, again)[3:]
        d_hidden, d_weight, d_bias = (g if n else None for g, n in zip(gradients, _bits(needs)))
        return (d_hidden, d_weight, d_bias, *(None,) * 10)


def _total(losses: Tensor, factor: Tensor) -> Tensor:
    return (losses.double() * factor.double()).sum().float()


def cross_entropy(
    hidden, weight, target, bias, class_weight, token_weight, target_weight, options: LossOptions, argmax: bool,
    vocab_shard: _ranks.VocabShard,
):
    """Returns (loss, lse without a gradient, argmax or an empty tensor) of a mean or sum."""
    from .loss import _autocast, _cross_entropy, _needs, _plain

    divisor = _divisor(options, target, class_weight, token_weight, target_weight)
    factor = (torch.ones(hidden.shape[:-1], device=hidden.device) / divisor).float()
    if hidden.device.type != "cpu" and not target.is_floating_point():  # on the CPU the call itself raises
        bad = (target != options.ignore_index) & ((target < 0) | (target >= vocab_shard.vocab))
        factor = torch.where(bad.any(), torch.nan, factor)
    each = options._replace(reduction="none", normalizer=0.0)
    needs = _needs(hidden, weight, bias)
    tensors = (hidden, weight, target, bias, class_weight, token_weight, target_weight)
    if not needs or not _plain(*tensors):
        losses, lse, index = _cross_entropy(*tensors, each, argmax, vocab_shard)
        return _total(losses, factor), lse, index
    return _OwnLoss.apply(
        hidden, weight, bias, target, class_weight, token_weight, target_weight, factor, each,
        _autocast(hidden, weight), needs, argmax, vocab_shard,
    )
