"""One call of the head: the tensors that determine its logits, and checks that they are unchanged."""

from __future__ import annotations

import weakref
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._precision import autocast_dtype
from ..dtensor import _is_dtensor, whole
from ..quantized import QuantizedWeight
from ._flat import FlatShards, lasting
from ._parallel import split_logits


_PLAIN = (Tensor, nn.Parameter)
_TRACERS = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("PROXY", "FAKE", "FUNCTIONAL"))


def _version(t: Optional[Tensor]) -> int:
    """Returns a tensor's version, 0 for inference tensors, which have none."""
    return 0 if t is None or t.is_inference() else t._version


class HeadCall:
    """``linear(hidden, weight, bias)`` [..., V], not computed.

    It holds detached aliases and their versions. If FSDP reshards the weight after the call, it also holds the shards
    that the weight was gathered from.

    Args:
        hidden: [..., D]. weight: [V, D]. bias: [V] or None. Weight and bias may be DTensors.
        compute: the dtype that autocast asked for at the call, or None.
        module: the head, which provides its weight after its storage is freed; or None.
        shards: the module's weight before it was gathered for the call, if it is a DTensor.
        far: a FarFieldHead of which a loss is one step, or None.
        expected_ignored: of a loss with token ids.
        same: hidden is replicated over the ranks of a DTensor weight (tensor parallelism), rather than different on
            each.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Optional[Tensor], compute=None, module=None, shards=None,
                 far=None, same=False, expected_ignored: float = 0.0):
        self.tracks = tuple(
            torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)
        )
        # Inference tensors have no versions, so that an edit would go unnoticed: the rows are copied.
        self.hidden = hidden.clone() if hidden.is_inference() else hidden.detach()
        self._flat = FlatShards.of(weight)
        self.weight, self.bias = lasting(weight), lasting(bias)
        self.dtype = compute or logits_dtype(hidden, weight)
        self.shape = (*hidden.shape[:-1], weight.shape[0])
        self._compute, self.far, self.same, self.expected_ignored = compute, far, same, expected_ignored
        self._versions = {name: _version(t) for name, t in self._tensors().items()}
        self._module = None if module is None else weakref.ref(module)
        self._shards = None if shards is None else (weakref.ref(shards), shards._version)
        flat = [] if self._flat is None else self._flat.parameters()
        parameters = [("weight", weight), ("bias", bias), ("weight", shards), *(("weight", p) for p in flat)]
        self._parameters = [(name, weakref.ref(t)) for name, t in parameters if t is not None]
        self._stepped: Optional[str] = None  # a parameter that an optimizer stepped, even if its version did not change
        _live.add(self)

    def _tensors(self) -> dict[str, Optional[Tensor]]:
        return dict(hidden=self.hidden, weight=self.weight, bias=self.bias)

    def arguments(self) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        """Returns (hidden, weight, bias) as they were at the call. Raises RuntimeError if one of them has changed."""
        self.check()
        found = []
        for name, t in self._tensors().items():
            if type(t) in _PLAIN and t.numel() > 0 and t.untyped_storage().nbytes() == 0:
                t = self._gathered(name, t)
            found.append(t)
        return tuple(found)

    def gathered(self) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        """Returns the arguments with DTensors gathered, if ``linear`` needs that. Collective over the ranks of their
        mesh."""
        hidden, weight, bias = self.arguments()
        return (hidden, weight, bias) if self.same else (hidden, whole(weight), whole(bias))

    @property
    def spread(self) -> bool:
        """True if ranks compute a loss together."""
        return _is_dtensor(self.weight)

    def check(self) -> None:
        for name, t in self._tensors().items():
            if t is not None and (_version(t) != self._versions[name] or self._stepped == name):
                raise RuntimeError(
                    f"LazyLogits: {name} was modified in place since the head was called, so that its logits can no longer "
                    "be computed; read them before (out.logits.float() before optimizer.step(), say), or call "
                    "logitless.torch.unpatch(model) for real logits"
                )

    def _gathered(self, name: str, t: Tensor) -> Tensor:
        """Gathers a parameter that FSDP has resharded. Collective."""
        made = None if self._flat is None else self._flat.gathered(t)
        if made is not None:
            return made
        module = self._module() if self._module is not None else None
        shards = None if module is None else getattr(module, name, None)
        recorded, version = self._shards or (lambda: None, 0)
        if name == "weight" and shards is not None and shards is recorded() and shards._version == version:
            return shards.detach().full_tensor().to(t.dtype)
        raise RuntimeError(
            f"LazyLogits: the memory of {name} was freed or its shards were modified since the head was called, so that its "
            "logits can no longer be computed; read them before (inside the forward, or before optimizer.step()), or call "
            "logitless.torch.unpatch(model) for real logits"
        )

    def linear(self, hidden: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        """Computes the logits as PyTorch does at the call: under autocast in its dtype."""
        with torch.autocast(hidden.device.type, enabled=False):
            if isinstance(weight, QuantizedWeight):
                hidden, bias = (None if t is None else t.to(self.dtype) for t in (hidden, bias))
                return weight.linear(hidden, bias)
            if self._compute is not None:
                hidden, weight = hidden.to(self._compute), weight.to(self._compute)
                bias = None if bias is None else bias.to(self._compute)
            return split_logits(hidden, weight, bias) if self.same else linear(hidden, weight, bias)

    def autocast(self):
        """Returns the autocast context of the call, for a loss that must cast alike."""
        kind = self.hidden.device.type
        return torch.autocast(kind, dtype=self._compute, enabled=self._compute is not None, cache_enabled=False)


_live: weakref.WeakSet[HeadCall] = weakref.WeakSet()


def _after_step(optimizer, args, kwargs) -> None:
    """Marks parameters after an optimizer step. Some optimizers write through ``.data`` or own kernels, which change no
    version."""
    if not _live:
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for call in list(_live):
        for name, parameter in call._parameters:
            if id(parameter()) in stepped:
                call._stepped = name


register_optimizer_step_post_hook(_after_step)


def refusal(hidden, weight, bias) -> Optional[str]:
    """Returns None if logits of these tensors can be lazy. That needs a device and dtype of the losses, and plain
    tensors or DTensor weights beside plain hidden states. Otherwise it returns the reason, empty if real logits are
    expected anyway."""
    spread = _is_dtensor(weight)
    # Under a transform of torch.func or a tracer, results have another class.
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "under a transform of torch.func"
    if torch._C._get_tracing_state() is not None or any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS):
        return ""
    if not isinstance(hidden, Tensor):  # a symbol of torch.fx
        return ""
    if forward_ad._current_level >= 0 and any(
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in (hidden, weight, bias)
    ):
        return "under forward-mode differentiation"
    if type(hidden) not in _PLAIN or not all(
        t is None or type(t) in (*_PLAIN, QuantizedWeight) or (spread and _is_dtensor(t)) for t in (weight, bias)
    ):
        return f"of hidden states {type(hidden).__name__} and a weight {type(weight).__name__}"
    kind = hidden.device.type
    if kind == "meta" or any(t is not None and t.device != hidden.device for t in (weight, bias)):
        return ""
    if hidden.numel() == 0 and not spread:
        return ""
    if hidden.dim() < 1 or hidden.shape[-1] != weight.shape[-1] or weight.numel() == 0:
        return ""
    autocast = autocast_dtype(kind) is not None
    if hidden.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        return f"of hidden states {hidden.dtype}"
    if hidden.dtype == torch.float64 and autocast:
        return "of hidden states float64 under autocast"
    if autocast:
        return None
    of_bias = hidden.dtype if bias is None else bias.dtype
    if weight.dtype != hidden.dtype:
        return None if are_mixed(hidden, weight) and of_bias in (torch.float32, weight.dtype) else ""
    return None if of_bias == hidden.dtype else ""


def are_mixed(hidden: Tensor, weight) -> bool:
    """Returns whether one of both is fp32 beside 16 bits, which the losses multiply as they are. PyTorch refuses it."""
    pair = {hidden.dtype, weight.dtype}
    return type(weight) in _PLAIN and torch.float32 in pair and bool(pair & {torch.bfloat16, torch.float16})


def logits_dtype(hidden: Tensor, weight) -> torch.dtype:
    return torch.float32 if are_mixed(hidden, weight) else hidden.dtype


def linear(hidden: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    """Computes ``F.linear``; in fp32 for two dtypes, outside of autocast."""
    if are_mixed(hidden, weight) and compute_dtype(hidden) is None:
        hidden, weight, bias = hidden.float(), weight.float(), None if bias is None else bias.float()
    return F.linear(hidden, weight, bias)


def compute_dtype(hidden: Tensor) -> Optional[torch.dtype]:
    return autocast_dtype(hidden.device.type)
