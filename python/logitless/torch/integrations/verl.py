"""verl's fused kernels, computed by the library.

With ``use_fused_kernels`` and the backend "torch" or "liger", verl's model forwards compute log-probabilities and
entropies with ``verl.utils.experimental.torch_functional.FusedLinearForPPO``. They look it up at each call, and
``patch()`` replaces it. verl's workers are separate processes: call it in each, for example through ``external_lib`` of
the model's configuration.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

from ... import _library as c
from ..loss import linear_logprobs

_MODULE = "verl.utils.experimental.torch_functional"
_NAME = "FusedLinearForPPO"
_PARAMETERS = ("hidden_states", "vocab_weights", "input_ids", "temperature")
_NONE = -(1 << 40)  # an ignore_index outside of any token id's range

_budget: int | str | None = None


class FusedLinearForPPO(nn.Module):
    """verl's class of this name. ``impl_backend`` names the verl kernels that it replaces. ``chunk_size`` is ignored:
    the workspace follows from the budget of ``patch``."""

    replaced: Any = None
    calls = 0  # calls of all instances that the library has served

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch"):
        super().__init__()
        if impl_backend not in ("torch", "liger"):
            raise ValueError(f"impl_backend: expected 'torch' or 'liger', got {impl_backend!r}")

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float | Tensor = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Returns (log-probabilities, entropies) [...], float32, of softmax(hidden_states @ vocab_weights.T /
        temperature).

        hidden_states: [..., D]. vocab_weights: [V, D]. input_ids: [...], the token id that follows each position.
        temperature: a number, or a tensor of one, or [...] or [..., 1] of each token.
        """
        if isinstance(temperature, Tensor):
            if temperature.numel() == 1:
                temperature = temperature.item()
            elif temperature.dim() > input_ids.dim() and temperature.shape[-1] == 1:
                temperature = temperature[..., 0]
        if not torch.is_autocast_enabled(hidden_states.device.type):
            vocab_weights = vocab_weights.to(hidden_states.dtype)
        type(self).calls += 1
        log_probs, entropy, _ = linear_logprobs(
            hidden_states, vocab_weights, input_ids, ignore_index=_NONE, temperature=temperature, memory_budget=_budget
        )
        return log_probs, entropy


def patch(memory_budget: int | str | None = None) -> type[FusedLinearForPPO]:
    """Makes the library compute the fused kernels of this process's verl. Returns the replacement, whose ``calls``
    counts its calls. ``unpatch()`` undoes it.

    memory_budget: of a call, as in ``linear_logprobs``.

    Raises ImportError without verl, and NotImplementedError for a version that calls its fused kernels differently.
    """
    global _budget
    c.parse_bytes(memory_budget)
    module = importlib.import_module(_MODULE)
    found = getattr(module, _NAME, None)
    if found is not FusedLinearForPPO:
        parameters = () if found is None else tuple(inspect.signature(found.forward).parameters)[1:]
        if parameters != _PARAMETERS:
            what = f"with arguments {list(parameters)}" if parameters else "which is not there"
            raise NotImplementedError(f"verl: expected {_MODULE}.{_NAME} of verl 0.9, {what}")
        FusedLinearForPPO.replaced = found
        setattr(module, _NAME, FusedLinearForPPO)
    _budget = memory_budget
    return FusedLinearForPPO


def patched() -> bool:
    """Returns whether the library computes verl's fused kernels."""
    return getattr(sys.modules.get(_MODULE), _NAME, None) is FusedLinearForPPO


def unpatch() -> None:
    """Undoes ``patch``; does nothing without one."""
    module = importlib.import_module(_MODULE)
    if getattr(module, _NAME, None) is FusedLinearForPPO:
        setattr(module, _NAME, FusedLinearForPPO.replaced)
