"""Logits of some tokens in PyTorch's operations: their statistics over blocks of the vocabulary, the losses and outputs
that follow, and the gradients.

Nothing here synchronises with a device, and everything is computed in the logits' dtype.
"""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import Tensor

from .._options import LossOptions, LossWeights
from .._token_loss import lse_square, target_shares

MASKED = -1e30  # the logarithm of an exponential that is 0


def finite(top: Tensor) -> Tensor:
    """Returns what is subtracted from logits before the exponential: their maximum, or 0 if it is infinite or NaN."""
    return torch.where(top.isfinite(), top, 0.0)


def rescaled(total: Tensor, factor: Tensor) -> Tensor:
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


class Sums(NamedTuple):
    """Sums over the logits z of n tokens, in blocks of the vocabulary."""

    top: Tensor  # [n]: the largest logit
    total: Tensor  # [n]: sum of exp(z - shift), without the target's if it is kept apart
    target: Tensor  # [n, K]: logits of targets
    spread: Optional[Tensor] = None  # [n]: sum of exp(z - shift) (z - shift)
    square: Optional[Tensor] = None  # [n]: sum of exp(z - shift) (z - shift)^2
    weighted: Optional[Tensor] = None  # [n]: sum of weights (z - shift)
    mass: Optional[Tensor] = None  # []: sum of weights
    index: Optional[Tensor] = None  # [n]: the largest logit's

    @property
    def shift(self) -> Tensor:
        return finite(self.top)


def merged(a: Sums, b: Sums) -> Sums:
    """Returns the sums over two blocks, of which ``a`` is the first."""
    top = torch.maximum(a.top, b.top)
    old, new = finite(a.top) - finite(top), finite(b.top) - finite(top)
    spread = square = weighted = mass = index = None
    if a.square is not None:
        square = rescaled(a.square + old * (2 * a.spread + old * a.total), old.exp())
        square = square + rescaled(b.square + new * (2 * b.spread + new * b.total), new.exp())
    if a.spread is not None:
        spread = rescaled(a.spread + old * a.total, old.exp()) + rescaled(b.spread + new * b.total, new.exp())
    if a.weighted is not None:
        weighted, mass = a.weighted + old * a.mass + b.weighted + new * b.mass, a.mass + b.mass
    if a.index is not None:
        index = torch.where(b.top > a.top, b.index, a.index)
    total = rescaled(a.total, old.exp()) + rescaled(b.total, new.exp())
    return Sums(top, total, a.target + b.target, spread, square, weighted, mass, index)


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
        self.sums: Optional[Sums] = None

    def add(self, z: Tensor, first: int) -> None:
        """Adds a block of logits [n, v] that begins at an entry. It overwrites them with exp(z - shift of the block),
        0 for a target that is kept apart."""
        count = z.shape[1]
        empty = count == 0
        if empty:
            z, count = z.new_full((z.shape[0], 1), -math.inf), 1
        top, index = z.max(1) if self.argmax else (z.amax(1), None)
        shift = finite(top)
        ids, here = self.targets.within(first, count)
        of_target = z.gather(1, ids)
        z.sub_(shift[:, None])
        weighted = mass = None
        if self.weights is not None:
            weighted, mass = z.new_zeros(z.shape[0]), z.new_zeros(())
            if not empty:
                of_block = self.weights[first : first + count]
                weighted, mass = torch.mv(z, of_block), of_block.sum()
        if self.apart:
            z.scatter_(1, ids, torch.where(here, -math.inf, of_target - shift[:, None]))
        z.exp_()
        spread = square = None
        if self.entropy:
            each = torch.special.xlogy(z, z)
            spread = each.sum(1)
            square = each.mul_(z.log().clamp_(min=MASKED)).sum(1) if self.variance else None
        target = torch.where(here, of_target, 0.0)
        index = None if index is None else index + first
        found = Sums(top, z.sum(1), target, spread, square, weighted, mass, index)
        self.sums = found if self.sums is None else merged(self.sums, found)

    def over_ranks(self, group) -> None:
        """Merges the statistics of the ranks of a process group, each of a range of the vocabulary. Collective."""
        from torch.distributed import ReduceOp, all_reduce

        s = self.sums
        mine, both = s.top, s.top.clone()
        all_reduce(both, ReduceOp.MAX, group)
        old = finite(mine) - finite(both)
        sums = [s.target, rescaled(s.total, old.exp())[:, None]]
        if s.spread is not None:
            sums.append(rescaled(s.spread + old * s.total, old.exp())[:, None])
        if s.weighted is not None:
            sums += [(s.weighted + old * s.mass)[:, None], torch.zeros_like(mine)[:, None] + s.mass]
        summed = torch.cat(sums, 1)
        all_reduce(summed, ReduceOp.SUM, group)
        found = iter(summed.split([part.shape[1] for part in sums], 1))
        target, total = next(found), next(found)[:, 0]
        spread, weighted, mass, index = s.spread, s.weighted, s.mass, s.index
        if spread is not None:
            spread = next(found)[:, 0]
        if weighted is not None:
            weighted, mass = next(found)[:, 0], next(found)[:, 0]
        if index is not None:
            index = torch.where(mine == both, index, torch.iinfo(torch.int64).max)
            all_reduce(index, ReduceOp.MIN, group)
        self.sums = Sums(both, total, target, spread, None, weighted, mass, index)

    def outputs(self) -> Outputs:
        """Returns what follows from the statistics of the whole vocabulary."""
        s = self.sums
        shift = s.shift
        u = s.target - shift[:, None]
        e = u.exp()
        total, spread, square = s.total, s.spread, s.square
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
            near = -torch.log1p(s.total[:, None] / e)
            log_prob = torch.where(e >= s.total[:, None], near, log_prob)
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
    options: LossOptions, outputs: Outputs, statistics: Statistics, vocab: int, weights: LossWeights
) -> tuple[Tensor, Slopes]:
    """Returns the loss of each token [n] and its derivatives: the formula of src/math/token_loss.h."""
    targets, lse = statistics.targets, outputs.lse
    share = target_shares(torch, weights, targets.valid.to(lse.dtype) * (1.0 - options.label_smoothing), targets.ids)
    loss = -torch.where(share == 0, 0.0, share * outputs.log_prob).sum(1)
    rest, uniform = torch.zeros_like(lse), None
    if options.label_smoothing:
        each = options.label_smoothing / vocab
        mass = statistics.sums.mass
        loss = loss + each * (mass * (lse - outputs.shift) - statistics.sums.weighted)
        rest = rest + each * mass
        uniform = torch.full_like(lse, -each)
    square = lse_square(options)
    if square:
        loss = loss + square * lse * lse
        rest = rest + 2.0 * square * lse
    scale = targets.row.to(lse.dtype) if weights.token_weight is None else torch.where(targets.row, weights.token_weight, 0.0)
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


class Entries(NamedTuple):
    """The gradient by the logits z_j: exp(z_j - shift) (softmax + logit (z_j - shift)) + uniform weights_j, plus ``target``
    at the targets, or ``target`` itself at a single one."""

    shift: Tensor  # [n]
    softmax: Tensor  # [n]
    logit: Optional[Tensor]  # [n]
    uniform: Optional[Tensor]  # [n]
    target: Tensor  # [n, K]
    valid: Tensor  # bool [n, K]: there is a target


def entries_of(statistics: Statistics, outputs: Outputs, slopes: Slopes) -> Entries:
    targets, total = statistics.targets, outputs.total
    target = slopes.target
    if statistics.apart:
        log_prob = outputs.log_prob[:, 0]
        entry = slopes.softmax * log_prob.expm1() + slopes.both
        if slopes.logit is not None:
            u = (statistics.sums.target[:, 0] - outputs.shift).clamp(min=MASKED)
            entry = entry + slopes.logit * log_prob.exp() * u
        if slopes.uniform is not None:
            entry = entry + slopes.uniform * statistics.weights[targets.ids[:, 0]]
        target = entry[:, None]
    logit = None if slopes.logit is None else slopes.logit / total
    return Entries(outputs.shift, slopes.softmax / total, logit, slopes.uniform, target, targets.valid)


class RowForm(NamedTuple):
    """Everything in the numbers of tokens that is not a tensor."""

    # (options, statistics, outputs, *numbers) to the values of tokens that a call returns, or None, and the slopes of
    # their logits, or None.
    of: Callable[..., tuple[tuple, Optional[Slopes]]]
    options: Any
    entropy: bool
    argmax: bool
    variance: bool
    scale: float  # of the products, which is in the slopes' result


def finished(
    form: RowForm, statistics: Statistics, inverse: Optional[Tensor], numbers: tuple
) -> tuple[tuple, Optional[Entries]]:
    """Returns the values of tokens, and the gradients of their products if those are needed. inverse: temperatures'."""
    outputs = statistics.outputs()
    values, slopes = form.of(form.options, statistics, outputs, *numbers)
    if slopes is None:
        return values, None
    slopes = slopes.times(form.scale)
    return values, entries_of(statistics, outputs, slopes if inverse is None else slopes.times(inverse))


def exponentials(z: Tensor, shift: Tensor) -> None:
    """Overwrites logits z [n, v] with exp(z - shift)."""
    z.sub_(shift[:, None]).exp_()


def logit_gradients(e: Tensor, first: int, statistics: Statistics, entries: Entries, capped: Optional[Tensor]) -> None:
    """Overwrites the exponentials [n, v] of a block that begins at ``first`` with the gradients of the logits before
    their softcap. capped: tanh of them, which is overwritten, or None."""
    if entries.logit is not None:
        factor = e.log().clamp_(min=MASKED).mul_(entries.logit[:, None])
        e.mul_(factor.add_(entries.softmax[:, None]))
    else:
        e.mul_(entries.softmax[:, None])
    if entries.uniform is not None:
        e.addr_(entries.uniform, statistics.weights[first : first + e.shape[1]])
    ids, here = statistics.targets.within(first, e.shape[1])
    if not statistics.apart:
        e.scatter_add_(1, ids, torch.where(here, entries.target, 0.0))
    elif e.shape[1]:
        e.scatter_(1, ids, torch.where(here, entries.target, e.gather(1, ids)))
    if capped is not None:
        e.mul_(capped.mul_(capped).neg_().add_(1.0))
