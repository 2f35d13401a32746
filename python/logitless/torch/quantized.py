"""Frozen heads whose weight is quantised: a block of the vocabulary at a time becomes an operand of the products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from ._arguments import Arguments

_aten = torch.ops.aten
_PLAIN = (Tensor, nn.Parameter)
_BLOCK = 16 << 20  # elements that are dequantised at a time, where a whole weight or whole logits are wanted
_DATA = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SCALES = (*_FLOATS, getattr(torch, "float8_e8m0fnu", torch.float32))

Rows = Callable[..., Tensor]  # (first, last, dtype, memory=None), see QuantizedWeight.rows


class QuantizedWeight(Tensor):
    """A frozen weight [V, D] in 8 bits with scales: ``data * scale``, rounded to the dtype of the hidden states.

    Args:
        data: [V, D], int8, float8_e4m3fn or float8_e5m2.
        scale: floats, or float8_e8m0fnu: [] for all, [V] or [V, 1] for each row, or [V, G] for groups of D / G columns,
            as in MXFP8, whose groups have 32.
        dtype: of the tensor where other operations read it, which dequantise all of it.

    ``linear_cross_entropy`` and ``linear_logprobs`` dequantise a block of rows at a time. They take the weights of
    torchao (``Int8Tensor``, ``Float8Tensor``, ``AffineQuantizedTensor``) and bitsandbytes (``Params4bit``,
    ``Int8Params``) as they are.

    Raises ValueError or TypeError for other shapes and dtypes, and for tensors that require a gradient.
    """

    _rows: Rows

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16):
        if data.dtype not in _DATA:
            raise TypeError(f"data: expected int8, float8_e4m3fn or float8_e5m2, got {data.dtype}")
        if data.dim() != 2:
            raise ValueError(f"data: expected [V, D], got {list(data.shape)}")
        if scale.dtype not in _SCALES:
            raise TypeError(f"scale: expected floats or float8_e8m0fnu, got {scale.dtype}")
        vocab, dim = data.shape
        given = scale.expand(vocab)[:, None] if not scale.dim() else scale[:, None] if scale.dim() == 1 else scale
        if given.dim() != 2 or given.shape[0] != vocab or not given.shape[1] or dim % given.shape[1]:
            raise ValueError(f"scale: expected [], [{vocab}] or [{vocab}, G], G a divisor of {dim}, got {list(scale.shape)}")
        if scale.device != data.device:
            raise ValueError(f"scale: expected it on {data.device}, where data is, got {scale.device}")
        if torch.is_grad_enabled() and (data.requires_grad or scale.requires_grad):
            name = "data" if data.requires_grad else "scale"
            raise ValueError(f"{name}: expected a tensor without requires_grad, since a quantised head is frozen; detach it")
        data, given = data.detach(), given.detach()

        def rows(first: int, last: int, wanted: torch.dtype, memory: Optional[Tensor] = None) -> Tensor:
            part, number = data[first:last], torch.float64 if wanted == torch.float64 else torch.float32
            if part.dtype != torch.int8:  # 8-bit floats have no products; those of 16 bits hold all of them
                part = part.to(wanted)
            made = torch.empty(part.shape, dtype=wanted, device=part.device) if memory is None else memory[: last - first]
            groups = last - first, given.shape[1], -1
            torch.mul(part.reshape(groups), given[first:last].to(number)[:, :, None], out=made.view(groups))
            return made

        return _made(rows, data.shape, dtype, data.device)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (_aten.detach.default, _aten.alias.default):
            return args[0]._part(0, args[0].shape[0])
        if func is _aten.slice.Tensor and len(args) > 3 and args[1] == 0 and not kwargs:
            first, last, _ = slice(*args[2:4]).indices(args[0].shape[0])
            return args[0]._part(first, max(first, last))
        plain = tree_map_only(cls, lambda t: t.dequantize(), (args, kwargs or {}))
        return func(*plain[0], **plain[1])

    def __repr__(self, **_) -> str:
        return f"QuantizedWeight({list(self.shape)}, dtype={self.dtype}, device={self.device})"

    def _part(self, first: int, last: int, dtype: Optional[torch.dtype] = None) -> QuantizedWeight:
        """Returns the weight of some rows, for hidden states of a dtype."""
        rows = self._rows
        part = rows if not first else lambda begin, end, *more: rows(first + begin, first + end, *more)
        return _made(part, (last - first, self.shape[1]), dtype or self.dtype, self.device)

    def rows(self, first: int, last: int, dtype: torch.dtype, memory: Optional[Tensor] = None) -> Tensor:
        """Returns rows first to last as a plain tensor. memory: of as many rows or more, in this dtype, which may be
        written, and returned."""
        return self._rows(first, last, dtype, memory)

    def dequantize(self, dtype: Optional[torch.dtype] = None) -> Tensor:
        """Returns the whole weight as a plain tensor. Other memory: that of a block."""
        dtype, vocab, step = dtype or self.dtype, self.shape[0], max(1, _BLOCK // max(self.shape[1], 1))
        made = torch.empty((vocab, self.shape[1]), dtype=dtype, device=self.device)
        for first in range(0, vocab, step):
            last = min(first + step, vocab)
            block = self._rows(first, last, dtype, made[first:last])
            if block.data_ptr() != made[first:last].data_ptr():
                made[first:last].copy_(block)
        return made

    def linear(self, hidden: Tensor, bias: Optional[Tensor]) -> Tensor:
        """Computes whole logits, a block of the vocabulary at a time."""
        vocab, step = self.shape[0], max(1, _BLOCK // max(self.shape[1], 1))
        made = hidden.new_empty((*hidden.shape[:-1], vocab))
        for first in range(0, vocab, step):
            part = slice(first, min(first + step, vocab))
            block = self._rows(part.start, part.stop, hidden.dtype)
            made[..., part] = F.linear(hidden, block, None if bias is None else bias[part])
        return made


def _made(rows: Rows, shape, dtype: torch.dtype, device) -> QuantizedWeight:
    self = Tensor._make_wrapper_subclass(QuantizedWeight, tuple(shape), dtype=dtype, device=device)
    self._rows = rows
    return self


def _of_bits(weight: Tensor) -> Optional[tuple[Rows, tuple]]:
    """Returns the rows of bitsandbytes' 4 bits, whose blocks of elements have scales, and their shape."""
    from bitsandbytes import functional

    state = weight.quant_state
    if len(state.shape) != 2 or getattr(state, "packing_format_for_cpu", False):
        return None
    (vocab, dim), size, scale = state.shape, state.blocksize, state.absmax
    if state.nested:
        scale = functional.dequantize_blockwise(scale, state.state2) + state.offset
    packed = weight.detach().as_subclass(Tensor).reshape(-1).view(torch.uint8)

    def rows(first: int, last: int, wanted: torch.dtype, _memory: Optional[Tensor] = None) -> Tensor:
        begin, end = first * dim // size, -(-last * dim // size)  # whole blocks
        least, most = begin * size, min(end * size, vocab * dim)
        part = type(state)(
            absmax=scale[begin:end].float(), shape=torch.Size((most - least,)), code=state.code, blocksize=size,
            quant_type=state.quant_type, dtype=state.dtype,
        )
        made = functional.dequantize_4bit(packed[least // 2 : (most + 1) // 2, None], part).view(-1)
        return made[first * dim - least : last * dim - least].view(last - first, dim).to(wanted)

    return rows, (vocab, dim)


def _found(weight: Tensor, module: Optional[nn.Module]) -> Optional[tuple[Rows, tuple]]:
    if getattr(weight, "quant_state", None) is not None:
        return _of_bits(weight)
    if weight.dtype == torch.int8 and hasattr(weight, "SCB"):
        scale = weight.SCB
        if scale is None:  # a forward of the layer moves it to the layer's state
            scale = getattr(getattr(module, "state", None), "SCB", None)
        if scale is None:
            return None
        data = weight.detach().as_subclass(Tensor)
        return QuantizedWeight(data, scale.to(data.device, torch.float32).view(-1) / 127)._rows, data.shape
    own = getattr(type(weight), "dequantize", Tensor.dequantize) is not Tensor.dequantize
    if not own or weight.dim() != 2 or getattr(weight, "act_pre_scale", None) is not None:
        return None
    if module is not None and getattr(weight, "act_quant_kwargs", None) is not None:
        return None  # a layer that quantises hidden states too
    return lambda first, last, wanted, _memory=None: weight[first:last].dequantize().to(wanted), weight.shape


def of(weight: Any, dtype: torch.dtype, module: Optional[nn.Module] = None) -> Optional[QuantizedWeight]:
    """Returns a quantised weight of ours, torchao's or bitsandbytes' in our form, for hidden states of a dtype; None for
    another. module: the layer that holds it."""
    if type(weight) in _PLAIN or not isinstance(weight, Tensor):
        return None
    if isinstance(weight, QuantizedWeight):
        return weight._part(0, weight.shape[0], dtype)
    with torch.no_grad():
        found = _found(weight, module)
    return None if found is None else _made(*found, dtype, weight.device)


def has_own_layer(kind: type) -> bool:
    """Returns whether a class is a layer of bitsandbytes, whose forward computes with a quantised weight."""
    return any(
        c.__module__.startswith("bitsandbytes.") and c.__name__ in ("Linear4bit", "Linear8bitLt") for c in kind.__mro__
    )


def taken(a: Arguments) -> Arguments:
    """Returns the arguments with a quantised weight in our form. Raises NotImplementedError for a call that it does not
    go with."""
    if type(a.weight) in _PLAIN or not isinstance(a.hidden, Tensor):
        return a
    weight = of(a.weight, a.hidden.dtype)
    if weight is None:
        return a
    if a.weight.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("weight: a quantised head is frozen and has no gradient; call requires_grad_(False)")
    if a.sharding is not None or any(hasattr(t, "full_tensor") for t in (a.hidden, a.bias)):
        raise NotImplementedError("weight: a quantised head is whole on each rank; neither sharding nor DTensors go with it")
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        raise NotImplementedError("weight: a quantised head is for eager calls, neither traced nor under torch.func")
    return a._replace(weight=weight)
