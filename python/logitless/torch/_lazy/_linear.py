"""A linear layer whose outputs are lazy logits. A model's own layer becomes lazy by a change of its class, and back."""

from __future__ import annotations

import threading
import types
from typing import Any

import torch
from torch import Tensor, nn

from .. import quantized
from ..dtensor import _is_dtensor, local
from ..far_field import FarFieldHead
from . import _warnings
from ._call import HeadCall, compute_dtype, linear, logits_dtype, refusal
from ._gradient import Head
from ._parallel import local_states, put_aside, put_back
from ._tensor import shadow
from ._traced import traced_logits


_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # since PyTorch 2.7


class _Thread(threading.local):
    shards = None  # the called head's weight before FSDP2 gathered it


_thread = _Thread()


def lazy_linear(
    hidden: Tensor, weight: Tensor, bias=None, *, module=None, shards=None, far=None, same=False, expected_ignored=0.0
) -> Tensor:
    """``F.linear(hidden, weight, bias)``, as LazyLogits if possible: floating tensors on a CPU or GPU, plain or with
    DTensor weights."""
    if torch.compiler.is_compiling():
        return _linear(hidden, weight, bias)
    why = refusal(hidden, weight, bias)
    if why is not None:
        made = _linear(hidden, weight, bias)
        if why:
            _warnings.warn_made(made, why=why)
        return made
    compute = compute_dtype(hidden)
    like = _like(hidden, weight, bias, compute or logits_dtype(hidden, weight))
    flat = like._base is not None  # two-dimensional, returned as a view
    rows = hidden.reshape(-1, hidden.shape[-1]) if flat else hidden
    head = HeadCall(rows, weight, bias, compute, module, shards, far, same, expected_ignored)
    logits = Head.apply(rows, weight, bias, head)
    return logits.view(like.shape) if flat else logits


def _linear(hidden: Tensor, weight: Tensor, bias) -> Tensor:
    """Computes real logits. DTensor weights beside plain hidden states are gathered, and get the mean of the ranks'
    gradients."""
    if _is_dtensor(weight) and not _is_dtensor(hidden):
        hidden, weight, _, bias = local(hidden, weight, None, bias)
    return linear(hidden, weight, bias)


def _like(hidden: Tensor, weight: Tensor, bias, dtype: torch.dtype) -> Tensor:
    """Returns the result of ``F.linear`` as a meta tensor."""
    with shadow(), torch.inference_mode(False), torch.enable_grad(), torch.autocast(hidden.device.type, enabled=False):
        metas = [
            None if t is None else torch.empty_strided(t.shape, t.stride(), dtype=dtype, device="meta")
            for t in (hidden, weight, bias)
        ]
        return nn.functional.linear(metas[0].requires_grad_(), *metas[1:])


class LazyLinear(nn.Linear):
    """A linear head whose logits are lazy: an ``nn.Linear`` whose class is changed, and can be changed back."""

    _plain = nn.Linear  # the eager class
    _own = False  # whether its forward is its own, for a quantised weight

    def __call__(self, *args, **kwargs):
        # Reading self.weight would recompute a parametrization, and a spectral norm would iterate.
        weight = self._parameters.get("weight")
        if not hasattr(weight, "full_tensor"):
            return super().__call__(*args, **kwargs)
        before, _thread.shards = _thread.shards, weight
        try:
            return super().__call__(*args, **kwargs)
        finally:
            _thread.shards = before

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return nn.functional.linear(input, self.weight, self.bias)
        return self._lazily(input)

    @torch.jit.unused
    def _lazily(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        input, same = local_states(self, weight, input)
        if _is_dtensor(weight) and not torch.is_autocast_enabled(input.device.type):
            # FSDP's MixedPrecisionPolicy casts only the parameters that it gathers.
            weight, bias = weight.to(input.dtype), None if bias is None else bias.to(input.dtype)
        if torch.compiler.is_compiling():
            if self._own:
                return _plain_class(type(self)).forward(self, input)
            if torch.compiler.is_dynamo_compiling() and not _is_exporting() and not _is_dtensor(weight):
                return traced_logits(input, weight, bias, self._far(), self._expected())
            return _linear(input, weight, bias)
        self.__dict__["_lazy_called"] = True
        frozen = isinstance(weight, Tensor) and not weight.requires_grad  # torch.fx passes a proxy
        held = quantized.of(weight, input.dtype, self) if frozen else None
        if held is None and self._own:
            made = _plain_class(type(self)).forward(self, input)
            _warnings.warn_made(made, why="of a weight that cannot be dequantised by blocks")
            return made
        if held is not None and not torch.is_autocast_enabled(input.device.type) and bias is not None:
            bias = bias.to(input.dtype)
        weight = weight if held is None else held
        return lazy_linear(
            input, weight, bias, module=self, shards=_thread.shards, far=self._far(), same=same,
            expected_ignored=self._expected(),
        )

    def _far(self):
        return self.__dict__.get("far_field") if self.training else None

    def _expected(self) -> float:
        return self.__dict__.get("expected_ignored", 0.0)

    def __reduce_ex__(self, protocol):
        """Pickles by the eager class: pickle cannot find the lazy subclass of a subclass by name."""
        made = super().__reduce_ex__(protocol)
        plain = type(self).__dict__.get("_plain", nn.Linear)
        return made if plain is nn.Linear else (_empty, (plain,), *made[2:])


def _empty(plain: type) -> LazyLinear:
    lazy = lazy_class(plain)
    return lazy.__new__(lazy)


def lazy_class(of: type) -> type | None:
    """Returns the lazy class for a head's class, or None for one with its own forward, except those of bitsandbytes."""
    if of is nn.Linear:
        return LazyLinear
    own = issubclass(of, nn.Linear) and of.forward is not nn.Linear.forward
    if not issubclass(of, nn.Linear) or (own and not quantized.has_own_layer(of)):
        return None
    made = next((c for c in of.__subclasses__() if c.__dict__.get("_plain") is of), None)
    return made or type(f"Lazy{of.__name__}", (LazyLinear, of), {"__module__": of.__module__, "_plain": of, "_own": own})


def _plain_class(of: type) -> type:
    """Returns the class without laziness, also for one derived from the lazy class: parametrized, or sharded by FSDP2.
    """
    if "_plain" in of.__dict__:
        return of._plain
    if not issubclass(of, LazyLinear):
        return of
    own = {name: value for name, value in of.__dict__.items() if name not in ("__dict__", "__weakref__")}
    return type(of.__name__.replace("Lazy", "", 1), tuple(_plain_class(base) for base in of.__bases__), own)


def is_lazy(module: nn.Module) -> bool:
    return isinstance(module, LazyLinear)


OPTIONS = "far_field", "expected_ignored"


def options_of(layer: nn.Module) -> dict[str, Any]:
    """Returns the options of a lazy layer that are set."""
    return {name: layer.__dict__[name] for name in OPTIONS if name in layer.__dict__}


def make_lazy(layer: nn.Module, **options: Any) -> None:
    """Makes a layer lazy if its class supports it, and sets options. On a lazy layer it only sets options."""
    layer.__dict__.update(options)  # far_field is not a submodule, so the state dict is unchanged
    if not is_lazy(layer):
        layer.__class__ = lazy_class(type(layer))
        put_aside(layer)
        _bind(layer)


def make_plain(layer: nn.Module) -> None:
    if is_lazy(layer):
        layer.__class__ = _plain_class(type(layer))
        layer.__dict__.pop("_lazy_called", None)
        for name in OPTIONS:
            layer.__dict__.pop(name, None)
        put_back(layer)
        _bind(layer)


def _bind(layer: nn.Module) -> None:
    """Rebinds forwards that Accelerate's hooks have stored to the layer's class."""
    for name in ("forward", "_old_forward"):
        kept = layer.__dict__.get(name)
        if isinstance(kept, types.MethodType) and kept.__func__ in (LazyLinear.forward, _plain_class(type(layer)).forward):
            layer.__dict__[name] = types.MethodType(type(layer).forward, layer)


def head_of(model: nn.Module) -> nn.Module:
    if isinstance(model, nn.Linear):
        return model
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    if head is None:
        head = getattr(model, "lm_head", None)
    if not isinstance(head, nn.Module):
        raise ValueError(
            f"model: expected a language model with get_output_embeddings() or lm_head, or its head, got {type(model).__name__}"
        )
    return head


def linears_of(model: nn.Module) -> list[nn.Module]:
    """Returns the layers whose outputs are logits: the head, or the wrapped layer and the last layer of each adapter.
    If the model's head is an embedding, this is the linear layer that shares its weight, or the only one with its
    shape."""
    head = head_of(model)
    if isinstance(head, nn.Embedding):
        alike = [m for m in model.modules() if isinstance(m, nn.Linear) and m.weight.shape == head.weight.shape]
        return [m for m in alike if m.weight is head.weight] or (alike if len(alike) == 1 else [])
    return linears_in(head)


def linears_in(head: nn.Module) -> list[nn.Module]:
    """Returns the linear layers of a head that output logits."""
    if isinstance(head, nn.Linear):
        return [head]
    linears = [m for m in head.modules() if isinstance(m, nn.Linear)]
    vocab = max((m.out_features for m in linears), default=0)
    return [m for m in linears if m.out_features == vocab]
