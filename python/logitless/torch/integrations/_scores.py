"""What trainers read of tokens besides their log-probabilities."""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ..loss import Asked, linear_cross_entropy, token_log_probs

OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class TokenScores(NamedTuple):
    """Of tokens [N], float32 (float64 of float64); None where not asked for."""

    log_probs: Tensor  # with a gradient
    entropy: Optional[Tensor]  # with a gradient
    log_sum_sq_probs: Optional[Tensor]  # log(sum_v p_v^2)
    mean_logits: Optional[Tensor]  # over the words
    is_top1: Optional[Tensor]  # bool: the target is the first of the words with the largest logit


def score_tokens(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor], *, temperature: float,
    softcap: Optional[float], logit_scale: float, outputs: tuple[str, ...], memory_budget: int | str | None = None,
) -> TokenScores:
    """Scores of ``softcap(logit_scale * (hidden @ weight.T + bias)) / temperature``, which never exists as a whole.

    Args:
        hidden: [N, D]. weight: [V, D]. bias: [V] or None. target: [N], words.
        outputs: some of ``OUTPUTS``, and names that are always computed.

    One pass, or two or three: ``mean_logits`` under a softcap and ``log_sum_sq_probs`` take one each. Backward as
    ``linear_logprobs``, whose memory and errors these are.
    """
    scale, cap = logit_scale / temperature, None if softcap is None else softcap / temperature
    scaled = dict(softcap=cap, logit_scale=scale, memory_budget=memory_budget)
    top, entropies = "is_top1" in outputs, "entropy" in outputs
    # A gradient of the entropy would find what is kept of no use.
    asked = Asked(argmax=top, entropy=entropies, keep=False if entropies else None)
    log_probs, entropy, lse, word = token_log_probs(hidden, weight, target, bias, asked, ignore_index=_NONE, **scaled)
    squares = mean = None
    with torch.no_grad():
        if "mean_logits" in outputs:
            mean = _mean_logits(hidden, weight, target, bias, lse, scaled)
        if "log_sum_sq_probs" in outputs:  # sum p^2 = sum exp(2 z) / (sum exp z)^2
            twice = dict(softcap=None if cap is None else 2 * cap, logit_scale=2 * scale, memory_budget=memory_budget)
            alone = Asked(entropy=False)
            squares = token_log_probs(hidden, weight, target, bias, alone, ignore_index=_NONE, **twice)[2] - 2 * lse
    return TokenScores(log_probs, entropy if entropies else None, squares, mean, word == target if top else None)


_NONE = -(1 << 40)  # an ignore_index that no target is


def _mean_logits(hidden, weight, target, bias, lse, scaled) -> Tensor:
    """[N]. Without a softcap the mean of the words' logits is the logit of their mean, which takes no pass; with one,
    the cross entropy against the uniform distribution is lse less it."""
    if scaled["softcap"] is None:
        mean = lse.new_tensor(0.0) if bias is None else bias.mean(dtype=lse.dtype)
        return (hidden.to(lse.dtype) @ weight.mean(0, dtype=lse.dtype) + mean) * scaled["logit_scale"]
    uniform = linear_cross_entropy(
        hidden, weight, target, bias, reduction="none", ignore_index=_NONE, label_smoothing=1.0, **scaled
    )
    return lse - uniform
