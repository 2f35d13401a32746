"""TRL's trainers, with scores computed by the library.

TRL (from 1.16) gives a model a fused head. ``model(..., labels=labels, fused_lm_head=True)`` scores the tokens from the
backbone's hidden states and ``lm_head.weight``, tile by tile. It never calls the head, so ``lazy_head`` has no effect
there. ``patch()`` replaces the tiles by the library. SFT, DPO, GRPO, KTO, RLOO and other trainers on that head then use
it without changes.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from typing import Any, Optional

import torch
from torch import Tensor

from ... import _library as c
from ._scores import OUTPUTS, score_tokens

_NAME = "_ChunkedLogProbFunction"
# The parameters of ChunkedLogProbFunction.forward after ctx.
_PARAMETERS = (
    "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale", "outputs",
)


class FusedScores:
    """Replaces ``trl.kernels.ChunkedLogProbFunction``: ``apply`` has its arguments and results."""

    def __init__(self, replaced: Any, memory_budget: int | str | None):
        self.replaced, self.memory_budget = replaced, memory_budget
        self.calls = 0  # calls that the library has served

    def apply(
        self, hidden: Tensor, weight: Tensor, bias: Optional[Tensor], targets: Tensor, temperature: float, chunk_size: int,
        final_logit_softcapping: Optional[float] = None, logit_scale: float = 1.0, outputs: tuple[str, ...] = OUTPUTS,
    ) -> tuple[Optional[Tensor], ...]:
        """Returns (log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1) [N], float32, None if not in
        ``outputs``.

        hidden: [N, D]. weight: [V, D]. bias: [V] or None. targets: [N]. A weight of another dtype than hidden is cast
            outside of autocast, as TRL casts its tiles; it then exists in both dtypes. chunk_size is ignored; the
            workspace follows from memory_budget.

        Raises NotImplementedError for a weight that DeepSpeed's ZeRO-3 shards, which is available in the forward alone.
        """
        if hasattr(weight, "ds_status"):
            raise NotImplementedError(
                "lm_head.weight: expected a parameter that is whole from the forward to the backward, got one that DeepSpeed "
                "ZeRO-3 shards; use ZeRO-2 or FSDP2, or logitless.torch.integrations.trl.unpatch()"
            )
        if not torch.is_autocast_enabled(hidden.device.type):
            weight = weight.to(hidden.dtype)
            bias = None if bias is None else bias.to(hidden.dtype)
        self.calls += 1
        return tuple(
            score_tokens(
                hidden, weight, targets, bias, temperature=temperature, softcap=final_logit_softcapping or None,
                logit_scale=logit_scale, outputs=outputs, memory_budget=self.memory_budget,
            )
        )


def patch(memory_budget: int | str | None = None) -> FusedScores:
    """Makes the library compute the fused heads of this process's TRL, including those of existing trainers. Returns
    the replacement, whose ``calls`` counts its calls. ``unpatch()`` undoes it.

    memory_budget: of a call of the head, as in ``linear_logprobs``.

    Raises ImportError without TRL, and NotImplementedError for a version with another fused head.
    """
    c.parse_bytes(memory_budget)
    utils = _utils()
    found = getattr(utils, _NAME, None)
    if isinstance(found, FusedScores):
        found = found.replaced
    parameters = () if found is None else tuple(inspect.signature(found.forward).parameters)[1:]
    if parameters != _PARAMETERS:
        what = f"with arguments {list(parameters)}" if parameters else "which is not there"
        raise NotImplementedError(
            f"trl {_version()}: expected trl.trainer.utils.{_NAME} of TRL 1.16, {what}; where the trainer reads the model's "
            "logits use logitless.torch.lazy_head(model)"
        )
    made = FusedScores(found, memory_budget)
    setattr(utils, _NAME, made)
    return made


def unpatch() -> None:
    """Undoes ``patch``; does nothing without one."""
    utils = _utils()
    found = getattr(utils, _NAME, None)
    if isinstance(found, FusedScores):
        setattr(utils, _NAME, found.replaced)


def patched() -> bool:
    """Returns whether the library computes TRL's fused heads."""
    return isinstance(getattr(sys.modules.get("trl.trainer.utils"), _NAME, None), FusedScores)


def _utils() -> Any:
    return importlib.import_module("trl.trainer.utils")


@functools.cache
def _version() -> str:
    return getattr(importlib.import_module("trl"), "__version__", "of unknown version")
