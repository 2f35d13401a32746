"""Logits of some tokens in PyTorch's operations: their statistics over blocks of the vocabulary, the losses and outputs
that follow, and the gradients.

Nothing here synchronises with a device, and everything is computed in the logits' dtype.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .._options import LossOptions
from .._token_loss import lse_square

_MASKED = -1e30  # the logarithm of an exponential that is 0


def _finite(top: Tensor) -> Tensor:
    """Returns what is subtracted from logits before the exponential: their maximum, or 0 if it is infinite or NaN."""
    return torch.where(top.isfinite(), top, 0.0)


def _rescaled(total: Tensor, factor: Tensor) -> Tensor:
    return torch.where(total == 0, 0.0, total * factor)  # avoids 0 * inf


class Targets(NamedTuple):
    """Targets of some tokens. ids that are not valid are 0."""

    ids: Tensor  # int64 [n, K]
    valid: Tensor  # bool [n, K]: neither ignored nor outside the vocabulary
    row: Tensor  # bool [n]: a target is valid
    bad: Tensor  # bool [n, K]: outside the vocabulary, and not ignore_index

    def within(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Returns the ids relative to a block of the vocabulary (0 outside of it), and whether they are in it."""
        here = self.valid & (self.ids >= first) & (self.ids < first + count)
        return torch.where(here, self.ids - first, 0), here


def targets_of(given: Tensor, ignore_index: int, vocab: int) -> Targets:
    """Returns the targets [n, K]."""
    ids = given.to(torch.int64)
    outside = (ids < 0) | (ids >= vocab)
    valid = (ids != ignore_index) & ~outside
    return Targets(torch.where(valid, ids, 0), valid, valid.any(1), outside & (ids != ignore_index))


class Statistics:
    """Statistics of the logits of n tokens, over the blocks of the vocabulary that were added.

    The exponential of a single target is kept apart from the sum of the others. So 1 - p of a confident token has all
    its digits.
    """

    def __init__(
        self, targets: Targets, entropy: bool = False, argmax: bool = False, weights: Optional[Tensor] = None,
        variance: bool = False,
    ):
        """weights: of the vocabulary, for the weighted sum of all logits; None: not wanted. variance: of the logits,
        beside the entropy."""
        self.targets, self.entropy, self.argmax, self.weights = targets, entropy, argmax, weights
        self.variance = variance
        self.apart = targets.ids.shape[1] == 1
        self.top: Optional[Tensor] = None  # [n]: the largest logit
        self.total: Tensor  # [n]: sum of exp(z - shift), without the target's if it is kept apart
        self.target: Tensor  # [n, K]: logits of targets
        self.spread: Optional[Tensor] = None  # [n]: sum of exp(z - shift) (z - shift)
        self.square: Optional[Tensor] = None  # [n]: sum of exp(z - shift) (z - shift)^2
        self.weighted: Optional[Tensor] = None  # [n]: sum of weights (z - shift)
        self.mass: Tensor | float = 0.0  # the sum of weights so far
        self.index: Optional[Tensor] = None  # [n]

    @property
    def shift(self) -> Tensor:
        return _finite(self.top)

    def add(self, z: Tensor, first: int) -> None:
        """Adds a block of logits [n, v] that begins at an entry. It overwrites them with exp(z - shift of the block),
        0 for a target that is kept apart."""
        count = z.shape[1]
        empty = count == 0
        if empty:
            z, count = z.new_full((z.shape[0], 1), -math.inf), 1
        top, index = z.max(1) if self.argmax else (z.amax(1), None)
        shift = _finite(top)
        ids, here = self.targets.within(first, count)
        of_target = z.gather(1, ids)
        z.sub_(shift[:, None])
        weighted, mass = None if self.weights is None else z.new_zeros(z.shape[0]), 0.0
        if self.weights is not None and not empty:
            of_block = self.weights[first : first + count]
            weighted, mass = torch.mv(z, of_block), of_block.sum()
        if self.apart:
            z.scatter_(1, ids, torch.where(here, -math.inf, of_target - shift[:, None]))
        z.exp_()
        spread = square = None
        if self.entropy:
            each = torch.special.xlogy(z, z)
            spread = each.sum(1)
            square = each.mul_(z.log().clamp_(min=_MASKED)).sum(1) if self.variance else None
        self._merge(top, z.sum(1), torch.where(here, of_target, 0.0), spread, square, weighted, mass, index, first)

    def _merge(self, top, total, target, spread, square, weighted, mass, index, first) -> None:
        if self.top is None:
            self.top, self.total, self.target, self.spread, self.weighted = top, total, target, spread, weighted
            self.square, self.mass = square, mass
            self.index = index if index is None or not first else index + first
            return
        both = torch.maximum(self.top, top)
        shift = _finite(both)
        old, new = self.shift - shift, _finite(top) - shift
        if square is not None:
            square = _rescaled(square + new * (2 * spread + new * total), new.exp())
            self.square = _rescaled(self.square + old * (2 * self.spread + old * self.total), old.exp()) + square
        if spread is not None:
            spread = _rescaled(spread + new * total, new.exp())
            self.spread = _rescaled(self.spread + old * self.total, old.exp()) + spread
        if weighted is not None:
            self.weighted = self.weighted + old * self.mass + weighted + new * mass
            self.mass = self.mass + mass
        if index is not None:
            self.index = torch.where(top > self.top, index + first, self.index)
        self.total = _rescaled(self.total, old.exp()) + _rescaled(total, new.exp())
        self.target = self.target + target
        self.top = both

    def over_ranks(self, group) -> None:
        """Merges the statistics of the ranks of a process group, each of a range of the vocabulary. Collective."""
        from torch.distributed import ReduceOp, all_reduce

        mine, both = self.top, self.top.clone()
        all_reduce(both, ReduceOp.MAX, group)
        old = _finite(mine) - _finite(both)
        sums = [self.target, _rescaled(self.total, old.exp())[:, None]]
        if self.spread is not None:
            sums.append(_rescaled(self.spread + old * self.total, old.exp())[:, None])
        if self.weighted is not None:
            sums += [(self.weighted + old * self.mass)[:, None], torch.zeros_like(mine)[:, None] + self.mass]
        summed = torch.cat(sums, 1)
        all_reduce(summed, ReduceOp.SUM, group)
        found = iter(summed.split([part.shape[1] for part in sums], 1))
        self.target, self.total = next(found), next(found)[:, 0]
        if self.spread is not None:
            self.spread = next(found)[:, 0]
        if self.weighted is not None:
            self.weighted, self.mass = next(found)[:, 0], next(found)[:, 0]
        if self.index is not None:
            index = torch.where(mine == both, self.index, torch.iinfo(torch.int64).max)
            all_reduce(index, ReduceOp.MIN, group)
            self.index = index
        self.top = both

    def outputs(self) -> Outputs:
        """Returns what follows from the statistics of the whole vocabulary."""
        shift = self.shift
        u = self.target - shift[:, None]
        e = u.exp()
        total, spread, square = self.total, self.spread, self.square
        if self.apart:
            found = self.targets.valid[:, 0]
            of_target = torch.where(found, e[:, 0], 0.0)
            total = total + of_target
            if spread is not None:
                spread = spread + torch.where(of_target == 0, 0.0, of_target * u[:, 0])
            if square is not None:
                square = square + torch.where(of_target == 0, 0.0, of_target * u[:, 0] ** 2)
        log_total = total.log()
        lse = shift + log_total
        log_prob = u - log_total[:, None]
        if self.apart:
            near = -torch.log1p(self.total[:, None] / e)
            log_prob = torch.where(e >= self.total[:, None], near, log_prob)
        infinite = lse == math.inf  # a softmax with +inf is NaN
        log_prob = torch.where(infinite[:, None], math.nan, log_prob)
        total = torch.where(infinite, math.nan, total)
        mean = None if spread is None else spread / total
        entropy = None if mean is None else log_total - mean
        return Outputs(shift, total, lse, log_prob, mean, entropy, None if square is None else square / total - mean**2)


class Outputs(NamedTuple):
    """Numbers of n tokens over the whole vocabulary."""

    shift: Tensor  # [n]: subtracted from logits before the exponential
    total: Tensor  # [n]: sum of exp(z - shift)
    lse: Tensor  # [n]
    log_prob: Tensor  # [n, K]
    mean: Optional[Tensor]  # [n]: expectation of z - shift
    entropy: Optional[Tensor]  # [n]
    variance: Optional[Tensor]  # [n]: of the logits


class Slopes(NamedTuple):
    """The gradient by the logits z_j with probabilities p_j: p_j (softmax + logit (z_j - shift)) + uniform weights_j,
    plus ``target`` at the targets."""

    softmax: Tensor  # [n]
    target: Tensor  # [n, K]
    both: Tensor  # [n]: softmax plus the first target, without their cancellation
    logit: Optional[Tensor] = None  # [n]
    uniform: Optional[Tensor] = None  # [n]

    def times(self, factor: Tensor | float) -> Slopes:
        of_row = factor[:, None] if isinstance(factor, Tensor) and factor.dim() else factor
        scaled = (None if t is None else t * (of_row if t.dim() == 2 else factor) for t in self)
        return Slopes(*scaled)


def token_losses(
    options: LossOptions, outputs: Outputs, statistics: Statistics, vocab: int, weights: Optional[Tensor],
    token_weight: Optional[Tensor], target_weight: Optional[Tensor],
) -> tuple[Tensor, Slopes]:
    """Returns the loss of each token [n] and its derivatives: the formula of src/math/token_loss.h.

    weights: of classes [V], or None.
    """
    targets, lse = statistics.targets, outputs.lse
    share = targets.valid.to(lse.dtype) * (1.0 - options.label_smoothing)
    if weights is not None:
        share = share * weights[targets.ids]
    if target_weight is not None:
        share = share * target_weight
    loss = -torch.where(share == 0, 0.0, share * outputs.log_prob).sum(1)
    rest, uniform = torch.zeros_like(lse), None
    if options.label_smoothing:
        each = options.label_smoothing / vocab
        mass = statistics.mass
        loss = loss + each * (mass * (lse - outputs.shift) - statistics.weighted)
        rest = rest + each * mass
        uniform = torch.full_like(lse, -each)
    square = lse_square(options)
    if square:
        loss = loss + square * lse * lse
        rest = rest + 2.0 * square * lse
    scale = targets.row.to(lse.dtype) if token_weight is None else torch.where(targets.row, token_weight, 0.0)
    loss = torch.where(scale == 0, 0.0, scale * loss)
    return loss, Slopes(share.sum(1) + rest, -share, rest, None, uniform).times(scale)


def output_slopes(
    outputs: Outputs, targets: Targets, d_log_prob: Optional[Tensor], d_entropy: Optional[Tensor],
    d_lse: Optional[Tensor],
) -> Slopes:
    """Returns the derivatives for cotangents of a head's outputs, which may be None."""
    rest, logit = torch.zeros_like(outputs.lse), None
    target = torch.zeros_like(outputs.log_prob)
    if d_log_prob is not None:
        target = torch.where(targets.valid, d_log_prob, 0.0)
    if d_lse is not None:
        rest = rest + torch.where(targets.row, d_lse, 0.0)
    if d_entropy is not None:
        logit = -torch.where(targets.row, d_entropy, 0.0)
        rest = rest - logit * outputs.mean
    return Slopes(rest - target.sum(1), target, rest, logit)


def exponentials(z: Tensor, shift: Tensor) -> None:
    """Overwrites logits z [n, v] with exp(z - shift)."""
    z.sub_(shift[:, None]).exp_()


def logit_gradients(
    e: Tensor, first: int, statistics: Statistics, outputs: Outputs, slopes: Slopes, capped: Optional[Tensor]
) -> None:
    """Overwrites the exponentials [n, v] of a block that begins at ``first`` with the gradients of the logits before
    their softcap. capped: tanh of them, which is overwritten, or None."""
    total = outputs.total
    if slopes.logit is not None:
        factor = e.log().clamp_(min=_MASKED).mul_((slopes.logit / total)[:, None])
        e.mul_(factor.add_((slopes.softmax / total)[:, None]))
    else:
        e.mul_((slopes.softmax / total)[:, None])
    weights = statistics.weights
    if slopes.uniform is not None:
        e.addr_(slopes.uniform, weights[first : first + e.shape[1]])
    targets = statistics.targets
    ids, here = targets.within(first, e.shape[1])
    if not statistics.apart:
        e.scatter_add_(1, ids, torch.where(here, slopes.target, 0.0))
    elif e.shape[1]:
        log_prob = outputs.log_prob[:, 0]
        entry = slopes.softmax * log_prob.expm1() + slopes.both
        if slopes.logit is not None:
            u = (statistics.target[:, 0] - outputs.shift).clamp(min=_MASKED)
            entry = entry + slopes.logit * log_prob.exp() * u
        if slopes.uniform is not None:
            entry = entry + slopes.uniform * weights[targets.ids[:, 0]]
        e.scatter_(1, ids, torch.where(here, entry[:, None], e.gather(1, ids)))
    if capped is not None:
        e.mul_(capped.mul_(capped).neg_().add_(1.0))
