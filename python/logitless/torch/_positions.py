"""A separate head for each position: a weight of more than two dimensions, as in PyTorch's linear_cross_entropy."""

from __future__ import annotations

import math
from typing import Any, Callable

import torch
from torch import Tensor

from .._options import DEFAULT, PER_TOKEN, LossWeights
from .._token_loss import token_shares
from ._arguments import Arguments


def _check(a: Arguments, want_target: list[int]) -> None:
    hidden, weight, target, bias = a.hidden, a.weight, a.target, a.bias
    beside = f"beside weight {list(weight.shape)}"
    if hidden.dim() != 2:
        raise ValueError(f"hidden: expected [N, {weight.shape[-1]}] {beside}, got {list(hidden.shape)}")
    if weight.shape[-1] != hidden.shape[1] or 0 in weight.shape[1:-1]:
        raise ValueError(f"weight: expected [V, d_1, ..., d_K, {hidden.shape[1]}], no d 0, got {list(weight.shape)}")
    if list(target.shape) != want_target:
        raise ValueError(f"target: expected {want_target} {beside}, got {list(target.shape)}")
    if bias is not None and bias.shape != weight.shape[:-1]:
        raise ValueError(f"bias: expected {list(weight.shape[:-1])}, got {list(bias.shape)}")
    refused = {"shift": a.shift, "accuracy": a.accuracy, **{name: getattr(a.weights, name) for name in PER_TOKEN}}
    for name, given in refused.items():
        if given is not None and given is not False:
            raise NotImplementedError(f"{name}: does not go with a weight of {weight.dim()} dimensions")


def _counted(target: Tensor, weights: LossWeights, ignore_index: int, number: torch.dtype) -> Tensor:
    """Returns the divisor of a mean: the weighted number of targets that are not ignored."""
    valid = target != ignore_index
    weights = LossWeights(*(None if t is None else t.to(number) for t in weights))
    unit = torch.ones((), dtype=number, device=target.device)
    return token_shares(torch, weights, valid, torch.where(valid, target, 0).long(), unit).sum()


def cross_entropy(loss_of: Callable[[Arguments], Any], a: Arguments) -> Any:
    """linear_cross_entropy with a head for each position.

    The bound arguments are hidden [N, D], weight [V, d_1, ..., d_K, D] and bias [V, d_1, ..., d_K]. The target is
    [N, d_1, ..., d_K], or probabilities [N, V, d_1, ..., d_K]. Values per token are [N, d_1, ..., d_K].

    ``loss_of`` is the call with a weight [V, D]; it is made once for each position. Extra memory: one workspace, and a
    gradient of hidden for each position until they are summed.
    """
    hidden, weight, target, bias = a.hidden, a.weight, a.target, a.bias
    tokens, vocab, places = hidden.shape[0], weight.shape[0], list(weight.shape[1:-1])
    soft = target.is_floating_point()
    _check(a, [tokens, vocab, *places] if soft else [tokens, *places])
    heads = math.prod(places)
    columns = zip(
        hidden.expand(heads, *hidden.shape).unbind(0),
        weight.reshape(vocab, heads, -1).unbind(1),
        target.reshape(tokens, vocab, heads).unbind(2) if soft else target.reshape(tokens, heads).unbind(1),
        (None,) * heads if bias is None else bias.reshape(vocab, heads).unbind(1),
    )
    # The mean is over all positions; a divisor near the true one keeps 16-bit gradients in range.
    total = max(1, tokens * heads)
    own_mean = a.reduction == "mean" and a.normalizer is None
    part = a._replace(normalizer=float(total)) if own_mean else a
    results = []
    for x, w, y, b in columns:
        found = loss_of(part._replace(hidden=x, weight=w, target=y, bias=b))
        results.append(found if isinstance(found, tuple) else (found,))
    losses, *others = (torch.stack(parts, -1) for parts in zip(*results))
    if a.reduction == "none":
        loss = losses.reshape(tokens, *places)
    else:
        loss = losses.sum()
    if own_mean and not soft:
        ignore_index = DEFAULT.ignore_index if a.ignore_index is None else a.ignore_index
        count = _counted(target, a.weights, ignore_index, loss.dtype)
        loss = loss * torch.where(count > 0, total / count, 0.0)
    return (loss, *[other.reshape(tokens, *places) for other in others]) if others else loss
