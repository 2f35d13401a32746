"""The loss of a token as an expression, and as the library computes it.

``formula`` repeats src/math/token_loss.h for graphs that a framework differentiates, compiles and shards. It accepts
arrays of PyTorch, JAX and numpy. ``of_library`` computes numbers, with which tests compare it.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from . import _library as c
from ._options import LOSS_TERMS, LossOptions


class Smoothing(NamedTuple):
    """Inputs of label smoothing for each token: V, the sum of the class weights, and sum_j class_weight_j * logit_j."""

    vocab: Any
    class_total: Any
    logit_sum: Any


def lse_square(options: LossOptions) -> float:
    """Returns the factor of lse^2 in the loss of a token."""
    return options.z_loss


def formula(xp: Any, options: LossOptions, lse: Any, nll: Any, class_weight: Any = None, rest: Smoothing | None = None):
    """Returns the loss of each token [N], before its token weight, for one target per token.

    xp: torch, jax.numpy or numpy. options: only the terms of the loss are read. lse: log-sum-exp. nll: lse - target
    logit; infinite if the target is masked, NaN if lse is +inf. class_weight: of the targets. rest: required with label smoothing.
    """
    if class_weight is None:
        loss = (1.0 - options.label_smoothing) * nll if options.label_smoothing else nll
    else:
        mass = (1.0 - options.label_smoothing) * class_weight
        loss = mass * xp.where(mass == 0.0, 0.0, nll)  # avoids 0 * inf
    if options.label_smoothing:
        loss = loss + options.label_smoothing / rest.vocab * (rest.class_total * lse - rest.logit_sum)
    if lse_square(options):
        loss = loss + lse_square(options) * lse * lse
    return loss


def mean_weights(xp: Any, counted: Any, unit: Any, class_weight: Any = None, token_weight: Any = None):
    """Returns the weights of tokens [...] in the divisor of a mean; 0 for ignored ones.

    counted: where a target is not ignored. unit: a 1 in the dtype of the weights. class_weight: [...] of the targets, for
    one target per token. A token with several counts once."""
    weight = unit if class_weight is None else class_weight
    return xp.where(counted, weight if token_weight is None else weight * token_weight, 0.0)


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
