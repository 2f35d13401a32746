"""The formula of lazy logits, in terms of rows of hidden states, a vocabulary range and a few numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, Optional

import torch
from torch import Tensor

from ._call import HeadCall
from ._parallel import replicated_on


@dataclass(frozen=True)
class Part:
    """``coefficient * linear(rows(hidden), weight, bias)``. ``steps`` computes it from the matrix product, as PyTorch
    would."""

    call: HeadCall
    rows: tuple[Callable, ...] = ()
    steps: tuple[Callable, ...] = ()
    coefficient: float = 1.0


@dataclass(frozen=True)
class Form:
    """``factor * log_softmax(softcap(scale * (sum of parts + shift)))``. The log_softmax, softcap and shift are
    optional.

    The rows of a part keep the vocabulary's dimension at the value's position, with D in place of V. ``steps`` computes
    the value from the sum of the parts, with the rounding of the called operations.
    """

    parts: tuple[Part, ...]
    vocab: int  # the vocabulary's dimension, counted from the front
    steps: tuple[Callable, ...] = ()
    vocab_range: Optional[tuple[int, int]] = None  # the vocabulary range; None: all
    scale: float = 1.0
    softcap: Optional[float] = None
    after_tanh: bool = False  # between the tanh of a softcap and the factor that completes it
    shift: Optional[Tensor] = None  # [V], added
    log: bool = False
    factor: float = 1.0
    detached: bool = False

    @staticmethod
    def of(call: HeadCall) -> Form:
        return Form((Part(call),), len(call.shape) - 1)

    @property
    def calls(self) -> tuple[HeadCall, ...]:
        return tuple(p.call for p in self.parts)

    @property
    def spread(self) -> bool:
        """True if ranks compute it together."""
        return any(c.spread for c in self.calls)

    @property
    def tracks(self) -> bool:
        """True if a gradient of the value reaches the calls."""
        return not self.detached and all(any(c.tracks) for c in self.calls)

    def with_rows(self, row: Callable, vocab: int) -> Form:
        return replace(self, parts=tuple(replace(p, rows=(*p.rows, row)) for p in self.parts), vocab=vocab)

    def with_step(self, step: Callable, **changes) -> Form:
        return replace(self, steps=(*self.steps, step), **changes)

    def value(self) -> Tensor:
        """Computes the value as real operations would. Returns a new tensor without a graph. Steps run with the
        vocabulary last."""
        total = None
        with torch.no_grad():
            for p in self.parts:
                hidden, weight, bias = self._head_of(p, p.call.gathered())
                z = p.call.linear(hidden, weight, bias)
                for step in p.steps:
                    z = step(z)
                total = z if total is None else total + z
            for step in self.steps:
                total = step(total)
            return total.movedim(-1, self.vocab)

    @staticmethod
    def _rows(part: Part, hidden: Tensor) -> Tensor:
        for row in part.rows:
            hidden = row(hidden)
        return hidden

    def _head_of(self, part: Part, arguments) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        hidden, weight, bias = arguments
        hidden = self._rows(part, hidden)
        if self.vocab_range is not None:
            vocab_range = slice(*self.vocab_range)
            weight, bias = weight[vocab_range], None if bias is None else bias[vocab_range]
        return hidden.movedim(self.vocab, -1), weight, bias

    def leaves(self, track: bool) -> list[tuple[Tensor, Tensor, Optional[Tensor]]]:
        """Returns each part's hidden, weight and bias, as leaves to differentiate by."""
        return [
            tuple(
                None if t is None else t.detach().requires_grad_(track and tracked)
                for t, tracked in zip(p.call.arguments(), p.call.tracks)
            )
            for p in self.parts
        ]

    def head(self, leaves) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        """Returns (hidden [..., D'], weight [V', D'], bias): one head of all parts, differentiable in ``leaves``. Parts
        are concatenated along D', which copies the weights if there are several. Raises NotImplementedError for
        DTensors with several parts, a vocabulary range or a shift."""
        if self.spread and (len(self.parts) > 1 or self.vocab_range is not None or self.shift is not None):
            raise NotImplementedError("lazy_head: logits of a DTensor head can be neither sliced, shifted nor summed over calls")
        rows, weights, biases = [], [], []
        for part, arguments in zip(self.parts, leaves):
            hidden, weight, bias = self._head_of(part, arguments)
            rows.append(hidden if part.coefficient == 1.0 else hidden * part.coefficient)
            weights.append(weight)
            if bias is not None:
                biases.append(bias if part.coefficient == 1.0 else bias * part.coefficient)
        if self.shift is not None:
            biases.append(self.shift)
        bias = biases[0] if biases else None
        if len(biases) > 1:
            number = torch.promote_types(weights[0].dtype, torch.float32)
            bias = sum(b.to(number) for b in biases)
        if len(rows) == 1:
            same = self.parts[0].call.same
            return replicated_on(weights[0], rows[0]) if same else rows[0], weights[0], bias
        return torch.cat(rows, -1), torch.cat(weights, -1), bias
