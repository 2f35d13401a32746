"""A temperature for each token: its gradient, and the loss of tempered log-probabilities.

Hidden states are divided by it, in fp32, where the head then multiplies them as they are: in fp32, and beside a 16-bit
weight on a CPU. Else that would round, and a bias or a softcap stands between them and the logits. There the frameworks'
own operations divide the logits, in fp32.
"""

from __future__ import annotations

from typing import Any

from .._token_loss import formula, target_shares, token_shares
from .options import number


def scaled_options(temperature: Any, softcap: Any, logit_scale: Any) -> dict[str, Any]:
    """Returns softcap and logit_scale with one temperature for all tokens: softcap c of u, divided by t, is softcap c / t
    of u / t."""
    t = number("temperature", temperature, above=0.0)
    cap = None if softcap is None else number("softcap", softcap, above=0.0) / t
    return dict(softcap=cap, logit_scale=number("logit_scale", logit_scale) / t)


def of_counted(xp, temperature, target, ignore_index: int, shift: int = 0):
    """Returns the temperatures [...] with 1 where the token's targets [...] or [..., K], `shift` positions later, are all
    ignored: those of padding may be 0 or NaN, and gradients of hidden states are divided by them."""
    shape = tuple(temperature.shape)
    if target is None or tuple(target.shape[: len(shape)]) != shape or len(target.shape) > len(shape) + 1:
        return temperature  # the checks of the call name it
    valid = target != ignore_index
    valid = valid.any(-1) if len(target.shape) > len(shape) else valid
    if 0 < shift < shape[-1]:
        valid = xp.concatenate([valid[..., shift:], xp.full_like(valid[..., :shift], False)], -1)
    return xp.where(valid, temperature, 1.0)


def attached(xp, temperature, target, ignore_index: int, log_prob, entropy, lse, variance) -> tuple[Any, Any, Any]:
    """Returns log_prob, entropy and lse with their gradients by the temperature [...], which their values lack.

    d log p / dT = -(log p + H) / T, d lse / dT = -(lse - H) / T and dH / dT = Var(z) / T, with the entropy H of the
    tempered logits z.
    """
    t = xp.astype(temperature, lse.dtype)
    relative = (t - xp.stop_gradient(t)) / xp.stop_gradient(t)  # 0, with a derivative

    def with_derivative(value, slope):
        slope = xp.where(xp.isfinite(slope), slope, 0.0)
        shape = (..., None) if slope.ndim > relative.ndim else ...
        return value + relative[shape] * xp.stop_gradient(slope)

    h = entropy if log_prob.ndim == entropy.ndim else entropy[..., None]
    log_prob = with_derivative(log_prob, xp.where(target == ignore_index, 0.0, -(log_prob + h)))
    return log_prob, with_derivative(entropy, variance), with_derivative(lse, entropy - lse)


def loss(xp, options, log_prob, lse, target, weights):
    """Returns the loss of log-probabilities and log-sum-exps, as ``linear_cross_entropy`` defines it. target: [...], or
    [..., K] with weights of targets. options: LossOptions. weights: LossWeights, of the dtype of lse."""
    if options.label_smoothing:
        raise NotImplementedError(
            "label_smoothing: expected 0 beside a temperature for each token with bias or softcap, or in 16 bits beyond a "
            f"CPU's kernels, got {options.label_smoothing}"
        )
    valid = target != options.ignore_index
    ids = xp.astype(xp.where(valid, target, 0), xp.class_dtype)
    share = target_shares(xp, weights, xp.astype(valid, lse.dtype), ids)
    each = xp.where(share == 0, 0.0, -share * xp.where(share == 0, 0.0, log_prob))
    rows = valid
    if weights.target_weight is not None:
        each, rows = each.sum(-1), valid.any(-1)
    each = formula(xp, options, lse, each)
    each = xp.where(rows, each if weights.token_weight is None else each * weights.token_weight, 0.0)
    if options.reduction == "none":
        return each
    total = each.sum()
    if options.reduction == "mean":
        divisor = token_shares(xp, weights, rows, ids, xp.astype(rows, lse.dtype)).sum()
        total = total / (options.normalizer or xp.where(divisor == 0, 1.0, divisor))
    return total
