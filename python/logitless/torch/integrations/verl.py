"""verl's fused kernels, computed by the library.

With ``use_fused_kernels``, verl's model forwards compute log-probabilities and entropies by one of two names, and
``patch()`` replaces both. ``verl.utils.experimental.torch_functional.FusedLinearForPPO`` is that of the FSDP engine with
the backends "torch" and "liger". ``verl.utils.kernel.linear_cross_entropy`` is that of the Megatron engine, and of the
backend "triton". verl's workers are separate processes: call it in each, for example through ``external_lib`` of the
model's configuration.
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
from ..ranks import Sharding
from ._replace import replace_everywhere

_MODULE = "verl.utils.experimental.torch_functional"
_NAME = "FusedLinearForPPO"
_PARAMETERS = ("hidden_states", "vocab_weights", "input_ids", "temperature")
_KERNEL_MODULE = "verl.utils.kernel.linear_cross_entropy"
_KERNEL = "linear_cross_entropy"
_KERNEL_PARAMETERS = ("hidden", "weight", "labels", "temperature", "reduction", "dist_process_group")
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


class _SumOfRanks(torch.autograd.Function):
    """The identity; its gradient, which is complete on each of ``ranks`` ranks, becomes a part that sums up to it."""

    @staticmethod
    def forward(ctx, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d_x: Tensor):
        return d_x / ctx.ranks, None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """verl's function of this name. Returns (log-probabilities, entropies) [N], float32, of softmax(hidden @ weight.T /
    temperature).

    hidden: [..., D], N tokens, the same on all ranks. weight: [V / G, D], this rank's rows, of equal number on the G ranks
        of dist_process_group (None: [V, D]). labels: [...], N token ids. reduction: "none".

    The gradient of hidden is complete on each rank. Megatron's default gather of sequence-parallel hidden states sums the
    gradients of its ranks: below one, each rank's is 1 / G of the complete one.
    """
    if reduction != "none":
        raise ValueError(f"reduction: expected 'none', got {reduction!r}")
    hidden, labels, sharding = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1), None
    ranks = 1 if dist_process_group is None else dist_process_group.size()
    if ranks > 1:
        if _sums_gradients(hidden.grad_fn):
            hidden = _SumOfRanks.apply(hidden, ranks)
        rows = len(weight)  # Megatron pads the vocabulary to equal shards
        sharding = Sharding(dist_process_group, vocab=ranks * rows, vocab_begin=dist_process_group.rank() * rows, tokens=False)
    if not torch.is_autocast_enabled(hidden.device.type):
        weight = weight.to(hidden.dtype)
    linear_cross_entropy.calls += 1
    log_probs, entropy, _ = linear_logprobs(
        hidden, weight, labels, ignore_index=_NONE, temperature=temperature, memory_budget=_budget, sharding=sharding
    )
    return log_probs, entropy


linear_cross_entropy.calls = 0
linear_cross_entropy.replaced = None


def _sums_gradients(node: Any) -> bool:
    """Returns whether a graph node, below views, is Megatron's gather whose backward is a reduce-scatter."""
    while node is not None and type(node).__name__ in ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"):
        node = node.next_functions[0][0]
    return bool(getattr(node, "tensor_parallel_output_grad", False))


def _kernel() -> Any:
    """Returns verl's function, or None for a version without it.

    Raises NotImplementedError for one with other arguments.
    """
    try:
        module = importlib.import_module(_KERNEL_MODULE)
    except ModuleNotFoundError:
        return None
    found = vars(module)[_KERNEL]
    parameters = tuple(inspect.signature(module.LinearCrossEntropy.forward).parameters)[1:]
    if found is not linear_cross_entropy and parameters != _KERNEL_PARAMETERS:
        raise NotImplementedError(f"verl: expected {_KERNEL_MODULE} of verl 0.9, with arguments {list(parameters)}")
    return found


def patch(memory_budget: int | str | None = None) -> type[FusedLinearForPPO]:
    """Makes the library compute the fused kernels of this process's verl. Returns the replacement of
    FusedLinearForPPO. Its ``calls``, and those of ``linear_cross_entropy``, count their calls. ``unpatch()`` undoes it.

    memory_budget: of a call, as in ``linear_logprobs``.

    Raises ImportError without verl, and NotImplementedError for a version that calls its fused kernels differently.
    """
    global _budget
    c.parse_bytes(memory_budget)
    module, kernel = importlib.import_module(_MODULE), _kernel()
    found = getattr(module, _NAME, None)
    if found is not FusedLinearForPPO:
        parameters = () if found is None else tuple(inspect.signature(found.forward).parameters)[1:]
        if parameters != _PARAMETERS:
            what = f"with arguments {list(parameters)}" if parameters else "which is not there"
            raise NotImplementedError(f"verl: expected {_MODULE}.{_NAME} of verl 0.9, {what}")
        FusedLinearForPPO.replaced = found
        setattr(module, _NAME, FusedLinearForPPO)
    if kernel not in (None, linear_cross_entropy):
        linear_cross_entropy.replaced = kernel
        replace_everywhere(_KERNEL, kernel, linear_cross_entropy)
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
    if linear_cross_entropy.replaced is not None:
        replace_everywhere(_KERNEL, linear_cross_entropy, linear_cross_entropy.replaced)
