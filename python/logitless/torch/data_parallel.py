"""Data parallelism with a sharded vocabulary: each rank has a loss of its own tokens, and all ranks compute them
together."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .._token_loss import mean_weights
from . import autograd
from .groups import group_of, raise_on_all_ranks, together
from .run import EAGER, dtypes_of, run_cross_entropy


def _divisor(options, target, class_weight, token_weight, target_weight) -> Tensor | float:
    """Returns the divisor of a mean over this rank's tokens; infinite without tokens."""
    if options.reduction == "sum":
        return 1.0
    if options.normalizer:
        return options.normalizer
    valid, of_class = target != options.ignore_index, None
    if target_weight is not None:
        valid = valid.any(-1)
    elif class_weight is not None:
        of_class = class_weight.double()[torch.where(valid, target, 0).long().clamp(0, class_weight.shape[0] - 1)]
    of_token = None if token_weight is None else token_weight.double()
    total = mean_weights(torch, valid, torch.ones((), dtype=torch.float64, device=target.device), of_class, of_token).sum()
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
        autograd.refuse_second_derivatives()
        form, name = ctx.form._replace(argmax=False), ctx.form.shard.group
        group = group_of(name)
        every = together(group, lambda: group.gather(np.array([d_loss.item()])))
        saved = ctx.saved_tensors  # read once, since each read under a checkpoint recomputes them
        (*inputs, factor), gradients = saved[:8], saved[8:]
        if (every == every[0]).all():
            gradients = autograd.scaled(gradients, d_loss, ctx.dtypes)
        else:
            gradients = raise_on_all_ranks(name, lambda: run_cross_entropy(*inputs, factor * d_loss, form))[3:]
        d_hidden, d_weight, d_bias = autograd.needed(gradients, form.needs)
        return d_hidden, d_weight, None, d_bias, *(None,) * 5


_own_loss = autograd.eager_apply(OwnLoss)


def cross_entropy(*inputs):
    """Returns (loss, lse without a gradient, argmax or an empty tensor) of a mean or sum. inputs: as for
    ``autograd.cross_entropy``."""
    *tensors, form = inputs
    hidden, target, options = tensors[0], tensors[2], form.options
    factor = (torch.ones(hidden.shape[:-1], device=hidden.device) / _divisor(options, target, *tensors[4:7])).float()
    if hidden.device.type != "cpu" and not target.is_floating_point():  # on the CPU the call itself raises
        bad = (target != options.ignore_index) & ((target < 0) | (target >= form.shard.vocab))
        factor = torch.where(bad.any(), torch.nan, factor)
    form = form._replace(options=options._replace(reduction="none", normalizer=0.0))
    if form.way == EAGER and form.needs:
        return _own_loss(*tensors[:7], factor, form)
    losses, lse, index, *_ = autograd.cross_entropy(*tensors, form)
    return _total(losses, factor), lse, index
