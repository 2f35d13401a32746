"""Data parallelism with a sharded vocabulary: each rank has a loss of its own tokens, and all ranks compute them
together."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .._options import LossWeights
from .._token_loss import token_shares
from . import autograd
from .groups import group_of, raise_on_all_ranks, together
from .run import EAGER, INPUTS, dtypes_of, run_cross_entropy


def _divisor(options, target, vocab: int, weights: LossWeights) -> Tensor | float:
    """Returns the divisor of a mean over this rank's tokens; infinite without tokens."""
    if options.reduction == "sum":
        return 1.0
    if options.normalizer:
        return options.normalizer
    valid = target != options.ignore_index
    ids = torch.where(valid, target, 0).long().clamp(0, vocab - 1)
    counted = valid if weights.target_weight is None else valid.any(-1)
    weights = LossWeights(*(None if t is None else t.double() for t in weights))
    unit = torch.ones((), dtype=torch.float64, device=target.device)
    total = token_shares(torch, weights, counted, ids, unit).sum()
    return torch.where(total > 0, total, torch.inf)


def _total(losses: Tensor, factor: Tensor) -> Tensor:
    return (losses.double() * factor.double()).sum().float()


class OwnLoss(autograd.Function):
    """The sum of this rank's losses, each times ``factor``. The forward computes gradients for an upstream gradient
    that is equal on all ranks. If it is not, the backward recomputes them."""

    @staticmethod
    def forward(ctx, *inputs):
        hidden, weight, _, bias, *_, factor, form = inputs
        losses, lse, index, *gradients = run_cross_entropy(*inputs, waits=True)
        ctx.dtypes, ctx.form = dtypes_of(hidden, weight, bias), form
        ctx.save_for_backward(*inputs[:-1], *gradients)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lse, index)
        return _total(losses, factor), lse, index

    @staticmethod
    def backward(ctx, d_loss, *_):
        autograd.check_backward(d_loss)
        form, name = ctx.form._replace(argmax=False), ctx.form.shard.group
        group = group_of(name)
        every = together(group, lambda: group.gather(np.array([d_loss.item()])))
        saved = ctx.saved_tensors  # read once, since each read under a checkpoint recomputes them
        (*inputs, factor), gradients = saved[: INPUTS + 1], saved[INPUTS + 1 :]
        if (every == every[0]).all():
            gradients = autograd.scaled(gradients, d_loss, ctx.dtypes)
        else:
            gradients = raise_on_all_ranks(name, lambda: run_cross_entropy(*inputs, factor * d_loss, form))[3:]
        d_hidden, d_weight, d_bias = autograd.needed(gradients, form.needs)
        return d_hidden, d_weight, None, d_bias, *(None,) * (INPUTS - 2)


_own_loss = autograd.eager_apply(OwnLoss)


def cross_entropy(*inputs):
    """Returns (loss, lse without a gradient, argmax or an empty tensor) of a mean or sum. inputs: as for
    ``autograd.cross_entropy``."""
    *tensors, form = inputs
    hidden, target, options = tensors[0], tensors[2], form.options
    divisor = _divisor(options, target, form.shard.vocab, LossWeights(*tensors[4:INPUTS]))
    factor = (torch.ones(hidden.shape[:-1], device=hidden.device) / divisor).float()
    if hidden.device.type != "cpu" and not target.is_floating_point():  # on the CPU the call itself raises
        bad = (target != options.ignore_index) & ((target < 0) | (target >= form.shard.vocab))
        factor = torch.where(bad.any(), torch.nan, factor)
    form = form._replace(options=options._replace(reduction="none", normalizer=0.0))
    if form.way == EAGER and form.needs:
        return _own_loss(*tensors[:INPUTS], factor, form)
    losses, lse, index, *_ = autograd.cross_entropy(*tensors, form)
    return _total(losses, factor), lse, index
