"""Scores of tokens that trainers read besides log-probabilities."""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..loss import Asked, linear_cross_entropy, token_log_probs

OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class TokenScores(NamedTuple):
    """Scores of tokens [N], float32 (float64 for float64 inputs); None for those not asked for."""

    log_probs: Tensor  # with a gradient
    entropy: Optional[Tensor]  # with a gradient
    log_sum_sq_probs: Optional[Tensor]  # log(sum_v p_v^2)
    mean_logits: Optional[Tensor]  # mean over the vocabulary
    is_top1: Optional[Tensor]  # bool: the target is the first entry with the largest logit


def score_tokens(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor], *, temperature: float,
    softcap: Optional[float], logit_scale: float, outputs: tuple[str, ...], memory_budget: int | str | None = None,
) -> TokenScores:
    """Returns scores from the logits ``softcap(logit_scale * (hidden @ weight.T + bias)) / temperature``, which are not
    stored.

    Args:
        hidden: [N, D]. weight: [V, D]. bias: [V] or None. target: [N], token ids.
        outputs: some of ``OUTPUTS``; other names are computed anyway.

    It takes one GEMM, and one more each for ``mean_logits`` under a softcap and for ``log_sum_sq_probs``. Backward,
    memory and errors are those of ``linear_logprobs``.
    """
    scale, cap = logit_scale / temperature, None if softcap is None else softcap / temperature
    scaled = dict(softcap=cap, logit_scale=scale, memory_budget=memory_budget)
    top, entropies = "is_top1" in outputs, "entropy" in outputs
    # Under a softcap, saved exponentials do not serve a gradient of the entropy.
    asked = Asked(argmax=top, entropy=entropies, keep=False if entropies and cap is not None else None)
    log_probs, entropy, lse, vocab_id = token_log_probs(hidden, weight, target, bias, asked, ignore_index=_NONE, **scaled)
    squares = mean = None
    with torch.no_grad():
        if "mean_logits" in outputs:
            mean = _mean_logits(hidden, weight, target, bias, lse, scaled)
        if "log_sum_sq_probs" in outputs:  # sum p^2 = sum exp(2 z) / (sum exp z)^2
            twice = dict(softcap=None if cap is None else 2 * cap, logit_scale=2 * scale, memory_budget=memory_budget)
            alone = Asked(entropy=False)
            squares = token_log_probs(hidden, weight, target, bias, alone, ignore_index=_NONE, **twice)[2] - 2 * lse
    return TokenScores(log_probs, entropy if entropies else None, squares, mean, vocab_id == target if top else None)


_NONE = -(1 << 40)  # an ignore_index outside of any target's range


def _mean_logits(hidden, weight, target, bias, lse, scaled) -> Tensor:
    """Returns the mean logits [N]. Without a softcap, the mean logit is the logit of the mean row, which takes no GEMM
    over the vocabulary. With one, it is lse minus the cross entropy against the uniform distribution."""
    if scaled["softcap"] is None:
        mean = 0.0 if bias is None else bias.mean(dtype=lse.dtype)
        with torch.autocast(hidden.device.type, enabled=False):  # whose dtype would round the product
            return (hidden.to(lse.dtype) @ weight.mean(0, dtype=lse.dtype) + mean) * scaled["logit_scale"]
    uniform = linear_cross_entropy(
        hidden, weight, target, bias, reduction="none", ignore_index=_NONE, label_smoothing=1.0, **scaled
    )
    return lse - uniform
