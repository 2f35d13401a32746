"""A callback that makes the head of a Trainer's model lazy, for libraries whose users do not hold the model."""

from __future__ import annotations

from typing import Any, Optional

from transformers import TrainerCallback

from .._lazy import lazy_head
from ..far_field import FarFieldHead


class LazyHead(TrainerCallback):
    """Calls ``lazy_head`` on the model of a transformers Trainer (and its subclasses) at the end of its constructor,
    before the model is wrapped.

    args, trainer: given by ms-swift, whose trainers read all logits for the token accuracy of each step. Then that
        metric is left out.
    far_field, expected_ignored: as in ``lazy_head``.
    """

    def __init__(
        self, args: Any = None, trainer: Any = None, *, far_field: Optional[FarFieldHead | float] = None,
        expected_ignored: Optional[float] = None,
    ):
        self.far_field, self.expected_ignored = far_field, expected_ignored
        if hasattr(trainer, "_compute_acc"):
            trainer._compute_acc = lambda *given, **named: None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        lazy_head(model, far_field=self.far_field, expected_ignored=self.expected_ignored)
