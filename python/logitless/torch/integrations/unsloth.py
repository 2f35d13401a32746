"""unsloth's fused cross entropy, computed by the library.

unsloth's models, and the code that it generates for others, train by ``unsloth_zoo.loss_utils.unsloth_fused_ce_loss``,
which takes hidden states and ``lm_head.weight`` and never calls the head. ``patch()`` replaces it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from ... import _library as c
from ..._options import share
from ..loss import linear_cross_entropy
from ._replace import replace_everywhere

_MODULE = "unsloth_zoo.loss_utils"
_NAME = "unsloth_fused_ce_loss"
_PARAMETERS = ("trainer", "hidden_states", "lm_head_weight", "lm_head_bias", "labels", "mask", "n_items", "scaling")
_KNOWN = frozenset(("ignore_index", "logit_scale_multiply", "logit_scale_divide", "logit_softcapping", "label_smoothing", "n_chunks"))

_replaced: Optional[Callable] = None
_options: dict[str, Any] = {}  # of the loss


def unsloth_fused_ce_loss(
    trainer: Any, hidden_states: Tensor, lm_head_weight: Tensor, lm_head_bias: Optional[Tensor], labels: Tensor,
    mask: Optional[Tensor] = None, n_items: int | Tensor | None = None, scaling: Any = None, target_gb: Any = None,
    torch_compile: bool = True, overwrite: bool = False, shift_labels: bool = True, **kwargs: Any,
) -> Tensor:
    """unsloth's function of this name. Returns the sum of the cross entropies over n_items, or over their number.

    hidden_states: [B, T, D]. lm_head_weight: [V, D]. labels: [B, T], of this position if shift_labels. mask: [B, T], 0
        where a label does not count. kwargs: ignore_index, label_smoothing, and the scales and softcap of the logits.
    scaling, target_gb, torch_compile and overwrite are ignored: gradients follow the upstream gradient, and the workspace
        follows from the budget of ``patch``. With other arguments the replaced function is called.
    """
    if any(kwargs[name] is not None for name in set(kwargs) - _KNOWN):
        return _replaced(
            trainer, hidden_states, lm_head_weight, lm_head_bias, labels, mask, n_items, scaling, target_gb, torch_compile,
            overwrite, shift_labels, **kwargs,
        )
    ignored = int(kwargs.get("ignore_index", -100))
    targets = labels.to(lm_head_weight.device)
    if mask is not None:
        targets = targets.masked_fill(mask.to(targets.device) == 0, ignored)
    if shift_labels:
        targets = torch.nn.functional.pad(targets[..., 1:], (0, 1), value=ignored)
    hidden = hidden_states.to(lm_head_weight.device, lm_head_weight.dtype)
    scale = float(kwargs.get("logit_scale_multiply") or 1.0) / float(kwargs.get("logit_scale_divide") or 1.0)
    total = linear_cross_entropy(
        hidden, lm_head_weight, targets, lm_head_bias, reduction="sum", ignore_index=ignored, logit_scale=scale,
        softcap=kwargs.get("logit_softcapping") or None, label_smoothing=float(kwargs.get("label_smoothing") or 0.0),
        **_options,
    )
    count = (targets != ignored).sum() if n_items is None else n_items
    if isinstance(count, Tensor):
        return total / count.to(total.device).reshape(-1)[0].clamp(min=1)
    return total / max(count, 1)


def patch(memory_budget: int | str | None = None, *, expected_ignored: float = 0.0) -> Callable:
    """Makes the library compute the fused loss of this process's unsloth, in models that exist already, too. Returns the
    replacement. ``unpatch()`` undoes it.

    memory_budget, expected_ignored: of a call of the head, as in ``linear_cross_entropy``.

    Raises ImportError without unsloth, and NotImplementedError for a version whose loss has other arguments.
    """
    global _replaced, _options
    c.parse_bytes(memory_budget)
    options = dict(memory_budget=memory_budget, expected_ignored=share("expected_ignored", expected_ignored))
    found = getattr(importlib.import_module(_MODULE), _NAME, None)
    if found is not unsloth_fused_ce_loss:
        parameters = () if found is None else tuple(inspect.signature(found).parameters)
        if parameters[: len(_PARAMETERS)] != _PARAMETERS:
            raise NotImplementedError(f"unsloth_zoo: expected {_MODULE}.{_NAME} of 2026.10, with arguments {list(parameters)}")
        _replaced = found
        replace_everywhere(_NAME, found, unsloth_fused_ce_loss)
    _options = options
    return unsloth_fused_ce_loss


def patched() -> bool:
    """Returns whether the library computes unsloth's fused loss."""
    return getattr(sys.modules.get(_MODULE), _NAME, None) is unsloth_fused_ce_loss


def unpatch() -> None:
    """Undoes ``patch``; does nothing without one."""
    if patched():
        replace_everywhere(_NAME, unsloth_fused_ce_loss, _replaced)
