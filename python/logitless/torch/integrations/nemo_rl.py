"""NeMo-RL's log-probabilities without logits, computed by the library.

With ``megatron_cfg.use_fused_linear_logprobs``, NeMo-RL's Megatron policies score tokens from the hidden states of a
GPTModel by ``nemo_rl.distributed.model_utils.ChunkedDistributedHiddenStatesToLogprobs``. ``patch()`` replaces it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any, Optional

import torch
from torch import Tensor

from ... import _library as c
from ..loss import linear_logprobs
from ..ranks import Sharding
from .megatron import Gathered

_MODULE = "nemo_rl.distributed.model_utils"
_NAME = "ChunkedDistributedHiddenStatesToLogprobs"
_PARAMETERS = (
    "tensor_parallel_hidden_states", "target", "output_weight_layer", "vocab_start_index", "vocab_end_index", "chunk_size",
    "tp_group", "inference_only",
)
_NONE = -(1 << 40)  # an ignore_index outside of any token id's range


class HiddenStatesToLogprobs:
    """Replaces NeMo-RL's function: ``apply`` has its arguments and result."""

    replaced: Any = None
    budget: int | str | None = None
    calls = 0  # calls that the library has served

    @classmethod
    def apply(
        cls, hidden: Tensor, target: Tensor, weight: Tensor, vocab_start: int, vocab_end: int, chunk_size: Optional[int],
        group: Any, inference_only: bool = False,
    ) -> Tensor:
        """Returns the log-probabilities [B, S] of all tokens, on every rank.

        hidden: [S / G, B, D], this rank's tokens of a sequence-parallel group of G. target: [B, S]. weight: [V / G, D], this
            rank's rows, of equal number on all ranks. chunk_size is ignored.
        """
        ranks, sharding = group.size(), None
        targets = target.transpose(0, 1).chunk(ranks)[group.rank()]
        if ranks > 1:
            rows = len(weight)
            sharding = Sharding(group, vocab=ranks * rows, vocab_begin=group.rank() * rows, tokens=True)
        cls.calls += 1
        with torch.set_grad_enabled(torch.is_grad_enabled() and not inference_only):
            found = linear_logprobs(
                hidden, weight, targets.contiguous(), ignore_index=_NONE, memory_budget=cls.budget, sharding=sharding
            )[0]
            return (Gathered.apply(found, group) if ranks > 1 else found).transpose(0, 1)


def patch(memory_budget: int | str | None = None) -> type[HiddenStatesToLogprobs]:
    """Makes the library compute these log-probabilities of this process's NeMo-RL. Returns the replacement, whose
    ``calls`` counts its calls. ``unpatch()`` undoes it.

    memory_budget: of a call, as in ``linear_logprobs``.

    Raises ImportError without NeMo-RL, and NotImplementedError for a version whose function has other arguments.
    """
    c.parse_bytes(memory_budget)
    module = importlib.import_module(_MODULE)
    found = getattr(module, _NAME, None)
    if found is not HiddenStatesToLogprobs:
        parameters = () if found is None else tuple(inspect.signature(found.forward).parameters)[1:]
        if parameters != _PARAMETERS:
            raise NotImplementedError(f"nemo_rl: expected {_MODULE}.{_NAME} of NeMo-RL 0.6, with arguments {list(parameters)}")
        HiddenStatesToLogprobs.replaced = found
        setattr(module, _NAME, HiddenStatesToLogprobs)
    HiddenStatesToLogprobs.budget = memory_budget
    return HiddenStatesToLogprobs


def patched() -> bool:
    """Returns whether the library computes these log-probabilities."""
    return getattr(sys.modules.get(_MODULE), _NAME, None) is HiddenStatesToLogprobs


def unpatch() -> None:
    """Undoes ``patch``; does nothing without one."""
    if patched():
        setattr(sys.modules[_MODULE], _NAME, HiddenStatesToLogprobs.replaced)
