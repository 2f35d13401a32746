"""Log-probabilities of tokens and sequences, and checks of tensors that the losses share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from ... import _losses
from ..._losses import Function, Head
from .. import _distributed, _memory
from ..loss import Asked, token_log_probs


_NUMBERS = ("normalizer", "kl")  # arguments that may be one-element tensors, also on the CPU


def takes(defaults: Mapping[str, Any]) -> Callable[[Function], Function]:
    """``_losses.takes`` for a function of tensors, which must all be on the device of the first, its hidden states."""

    def decorated(function: Function) -> Function:
        names = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            named = {**dict(zip(names, args)), **given}
            first = named.get(names[0])
            if isinstance(first, Tensor):
                for name, value in named.items():
                    _check_memory(name, value, first.device, names[0])
            return function(*args, **given)

        return _losses.takes(defaults)(call)  # type: ignore[return-value]

    return decorated


def _check_memory(name: str, value: Any, device: torch.device, beside: str) -> None:
    if isinstance(value, Tensor):
        check = _memory.check_number if name in _NUMBERS else _memory.check
        check(name, value, device, beside)
    elif isinstance(value, tuple):
        for part, t in getattr(value, "_asdict", dict)().items():
            _check_memory(f"{name}.{part}", t, device, beside)


class Tokens(NamedTuple):
    """Outputs of the head for the tokens [B, T] of some sequences; 0 for ignored tokens. An entropy that is not wanted
    is empty."""

    logps: Tensor
    entropy: Tensor
    valid: Tensor  # bool

    def sums(self, average: bool = False) -> Tensor:
        """Returns [B]: the log-probability of each sequence, or its mean over the sequence's tokens (0 without tokens).
        """
        total = self.logps.sum(-1)
        return total / self.valid.sum(-1).clamp(min=1) if average else total


def tensor(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    return value


def shaped(name: str, value: Any, *shapes: tuple[int, ...]) -> Tensor:
    """Returns a checked tensor of one of the shapes."""
    if tuple(tensor(name, value).shape) not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name}: expected {wanted}, got {list(value.shape)}")
    return value


def sequences(hidden: Any, target: Any, even: bool = False) -> None:
    """Checks hidden [B, T, D] and target [B, T]. ``even``: B must be even."""
    if tensor("hidden", hidden).dim() != 3:
        raise ValueError(f"hidden: expected [B, T, D], got {list(hidden.shape)}")
    shaped("target", target, tuple(hidden.shape[:2]))
    if target.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"target: expected int32 or int64, got {target.dtype}")
    if even and (hidden.shape[0] % 2 or hidden.shape[0] == 0):
        raise ValueError(
            f"hidden: expected [2 B, T, D], the chosen sequences and then the rejected ones, got {list(hidden.shape)}"
        )


def shifted(target: Tensor, ignore_index: int) -> Tensor:
    """Shifts targets by one: each position's target is that of the next position, and the last has none. hidden is not
    copied."""
    return torch.cat([target[:, 1:], torch.full_like(target[:, :1], ignore_index)], 1)


def tokens(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor], head: Head, entropy: Optional[bool] = None
) -> Tokens:
    """Computes the head's outputs. entropy: None if it is not wanted, else whether it has a gradient."""
    _distributed.replicated("hidden", hidden)
    target = _distributed.replicated("target", target)
    asked = Asked(entropy=entropy is not None, keep=False if entropy else None)
    logps, found, _, _ = token_log_probs(hidden, weight, target, bias, asked, **head._asdict())
    return Tokens(logps, found, target != head.ignore_index)


class Reference(NamedTuple):
    """The hidden states and head of a reference model. A head that is not given is the policy's, as with adapters that
    are disabled for the reference."""

    hidden: Optional[Tensor]
    weight: Optional[Tensor]
    bias: Optional[Tensor]

    def tokens(self, weight: Tensor, target: Tensor, bias: Optional[Tensor], head: Head) -> Tokens:
        """Returns the reference's log-probabilities, without a gradient: one GEMM."""
        hidden = tensor("ref_hidden", self.hidden)
        if tuple(hidden.shape[:-1]) != tuple(target.shape):
            raise ValueError(f"ref_hidden: expected {list(target.shape) + ['D']}, got {list(hidden.shape)}")
        if self.weight is not None and tensor("ref_weight", self.weight).shape[0] != weight.shape[0]:
            raise ValueError(f"ref_weight: expected [{weight.shape[0]}, D], got {list(self.weight.shape)}")
        with torch.no_grad():
            if self.weight is None:
                return tokens(hidden, weight, target, bias if self.bias is None else self.bias, head)
            return tokens(hidden, self.weight, target, self.bias, head)

    def check(self, given: str, given_value: Any) -> bool:
        """Returns whether there is a reference. Raises if parts of it are missing, or if log-probabilities are given
        too."""
        for name, value in (("ref_weight", self.weight), ("ref_bias", self.bias)):
            if value is not None and self.hidden is None:
                raise ValueError(f"ref_hidden: expected it beside {name}, got None")
        if self.hidden is not None and given_value is not None:
            raise ValueError(f"{given}: expected None beside ref_hidden, got a tensor; give one of the two")
        return self.hidden is not None
