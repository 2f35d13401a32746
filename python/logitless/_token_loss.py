"""The loss of a token as an expression, and as the library computes it.

``formula`` repeats src/math/token_loss.h for graphs that a framework differentiates, compiles and shards. It accepts
arrays of PyTorch, JAX and numpy. ``of_library`` computes numbers, with which tests compare it.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from . import _library as c
from ._options import LOSS_TERMS, LossOptions, LossWeights


class Smoothing(NamedTuple):
    """Inputs of label smoothing for each token: V, and the sums of the classes' weights, alone and times their logits."""

    vocab: Any
    class_total: Any
    logit_sum: Any


def lse_square(options: LossOptions) -> float:
    """Returns the factor of lse^2 in the loss of a token."""
    return options.z_loss


def formula(xp: Any, options: LossOptions, lse: Any, nll: Any, weight: Any = None, rest: Smoothing | None = None):
    """Returns the loss of each token [N], before its token weight, for one target per token.

    xp: torch, jax.numpy or numpy. options: only the terms of the loss are read. lse: log-sum-exp. nll: lse - target
    logit; infinite if the target is masked, NaN if lse is +inf. weight: of the targets' classes. rest: required with label smoothing.
    """
    if weight is None:
        loss = (1.0 - options.label_smoothing) * nll if options.label_smoothing else nll
    else:
        mass = (1.0 - options.label_smoothing) * weight
        loss = mass * xp.where(mass == 0.0, 0.0, nll)  # avoids 0 * inf
    if options.label_smoothing:
        loss = loss + options.label_smoothing / rest.vocab * (rest.class_total * lse - rest.logit_sum)
    if lse_square(options):
        loss = loss + lse_square(options) * lse * lse
    return loss


def entry_weights(weights: LossWeights) -> Any:
    """Returns the weights [V] of logits in label smoothing's sum over the vocabulary; None: 1 each."""
    return weights.class_weight


def target_shares(xp: Any, weights: LossWeights, share: Any, ids: Any):
    """Multiplies the shares of targets [...] in the loss by their weights. share: 0 for a target that is ignored, whose
    id is any of the vocabulary."""
    if weights.class_weight is not None:
        share = xp.where(share == 0, share, share * weights.class_weight[ids])
    return share if weights.target_weight is None else share * weights.target_weight


def token_shares(xp: Any, weights: LossWeights, counted: Any, ids: Any, unit: Any):
    """Returns the weights of tokens [...] in the divisor of a mean; 0 for ignored ones. A token with weights of several
    targets counts once.

    counted: where a target is not ignored. ids: of the targets, for one per token, and any of the vocabulary where none
    counts. unit: a 1 in the dtype of the weights."""
    alone = weights.class_weight is not None and weights.target_weight is None
    return mean_weights(xp, counted, unit, weights.class_weight[ids] if alone else None, weights.token_weight)


def mean_weights(xp: Any, counted: Any, unit: Any, of_target: Any, of_token: Any):
    """Returns ``token_shares`` of the weights of each token's target and of itself, or None."""
    weight = unit if of_target is None else of_target
    return xp.where(counted, weight if of_token is None else weight * of_token, 0.0)


class TokenLosses(NamedTuple):
    """Losses in float64, and their partial derivatives by each input."""

    loss: np.ndarray  # [N]
    d_lse: np.ndarray  # [N]
    d_target_logit: np.ndarray  # [N, K]
    d_weighted_logit_sum: np.ndarray  # [N]; 0 without label smoothing


def of_library(
    options: LossOptions,
    lse: np.ndarray,
    target_logit: np.ndarray,
    target_weight: np.ndarray | None = None,
    token_weight: np.ndarray | None = None,
    rest: Smoothing | None = None,
) -> TokenLosses:
    """Calls logitless_token_losses on float64 arrays. lse, token_weight and rest.logit_sum are [N], target_logit and
    target_weight [N, K]. Only the terms of options are read. Raises ValueError with the library's message."""
    terms = c.new(c.LossTerms)
    for name in LOSS_TERMS:
        setattr(terms, name, getattr(options, name))
    inputs, outputs = c.new(c.TokenLossInputs), c.new(c.TokenLossOutputs)
    arrays = dict(lse=lse, target_logit=target_logit, target_weight=target_weight, token_weight=token_weight)
    inputs.vocab = 1
    if rest is not None:
        arrays["weighted_logit_sum"] = rest.logit_sum
        inputs.vocab, inputs.class_total = rest.vocab, rest.class_total
    made = TokenLosses(*(np.empty_like(a, order="C") for a in (lse, lse, target_logit, lse)))
    for struct, tensors in ((inputs, arrays), (outputs, made._asdict())):
        for name, array in tensors.items():
            if array is not None:
                setattr(struct, name, ctypes.pointer(_tensor(array)))
    c.check(c.lib.logitless_token_losses(ctypes.byref(terms), ctypes.byref(inputs), ctypes.byref(outputs)))
    return made


def _tensor(array: np.ndarray) -> c.Tensor:
    tensor = c.Tensor(data=array.ctypes.data, dtype=c.DTYPES[{"float64": "f64"}[array.dtype.name]], rank=array.ndim)
    tensor.shape[: array.ndim] = array.shape
    tensor.strides[: array.ndim] = [stride // array.itemsize for stride in array.strides]
    return tensor
