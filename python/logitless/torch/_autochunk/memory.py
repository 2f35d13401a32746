"""Determines the allocations of a function without computing: it runs on meta tensors, which have no data."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from logitless._autochunk.text import load
from logitless.torch._autochunk.attention import OneAttention
from logitless.torch._autochunk.trace import alone, gradients_of


def _ctc_loss(log_probs, targets, *rest):
    """Returns the loss and alphas, as wide as the targets' shape allows."""
    frames, count, _ = log_probs.shape
    return log_probs.new_empty(count), log_probs.new_empty(count, frames, 2 * targets.shape[-1] + 1)


# Operations without a meta kernel.
_META = {
    torch.ops.aten.mm.dtype: lambda a, b, dtype: a.new_empty(a.shape[0], b.shape[1], dtype=dtype),
    torch.ops.aten.addmm.dtype_out: lambda *args, out, **options: out,
    torch.ops.aten._ctc_loss.Tensor: _ctc_loss,
    torch.ops.aten._ctc_loss_backward.Tensor: lambda d_losses, log_probs, *rest: log_probs.new_empty(log_probs.shape),
}


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _in_order(x: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor) -> int:
    """Returns the bytes of copies that a convolution makes of operands in another memory format: channels last if one
    operand is."""
    order = torch.channels_last if _channels_last(x, weight) else torch.contiguous_format
    return sum(_bytes(t) for t in (x, weight, *others) if not t.is_contiguous(memory_format=order))


def _channels_last(*tensors: torch.Tensor) -> bool:
    """Returns whether a convolution computes in channels last, as it does if an operand has that format."""
    return any(
        t.dim() == 4 and not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last) for t in tensors
    )


def _blocked(dtype: torch.dtype) -> bool:
    """Returns whether the CPU has kernels for a dtype that need a blocked layout."""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_fp16_supported() if dtype == torch.float16 else dtype == torch.float32


def _convolving(cpu: bool, x: torch.Tensor, weight: torch.Tensor, made: torch.Tensor, groups: int) -> int:
    """Returns the bytes of temporaries. made: the result, or its gradient."""
    if not cpu:
        return _in_order(x, weight)
    if _blocked(x.dtype) and x.shape[0] > 1:
        return 0 if _channels_last(x, weight) else _bytes(x) + _bytes(weight) + _bytes(made)
    if x.shape[0] * weight.shape[0] == 0:
        return 0
    patch = groups * weight[0].numel()  # elements of an im2col column, over all channels
    return x.shape[0] * patch * made[0, 0].numel() * x.element_size()


# Temporary bytes of operations, as functions of: whether on a CPU, result, arguments.
_HELD = {
    # the exponentials and the maxima
    torch.ops.aten.logsumexp.default: lambda cpu, made, x, *rest: _bytes(x) + _bytes(made),
    # betas, of the size of alphas
    torch.ops.aten._ctc_loss_backward.Tensor: lambda cpu, made, *args: _bytes(args[6]),
    torch.ops.aten.convolution.default: lambda cpu, made, x, weight, *rest: _convolving(cpu, x, weight, made, rest[-1]),
    torch.ops.aten.convolution_backward.default: (
        lambda cpu, made, grad, x, weight, *rest: _convolving(cpu, x, weight, grad, rest[-2])
    ),
}

# Operations of autograd's own, and those that write their first argument.
_IN_PLACE = {
    torch.ops.aten.add.Tensor: torch.ops.aten.add_.Tensor,
    torch.ops.aten.index_put.default: torch.ops.aten.index_put_.default,
    torch.ops.aten.scatter.src: torch.ops.aten.scatter_.src,
    torch.ops.aten.scatter_add.default: torch.ops.aten.scatter_add_.default,
}

_SOFTMAXES = {f"aten::{name}" for name in ("softmax", "_softmax", "log_softmax", "_log_softmax")}


class Recorder(TorchDispatchMode):
    """Records allocations and frees of tensors by the operations that run inside."""

    def __init__(self, known: Sequence[torch.Tensor] = (), device: str = "cpu"):
        """device: the device type that the recorded code is for."""
        super().__init__()
        self._cpu = device == "cpu"
        self.events: list[tuple[int, int]] = []  # (number of an allocation, bytes; negative for a free)
        self.largest = 0  # bytes of the largest allocation
        self._known = {self._key(t) for t in known}
        self._live: dict[int, list] = {}  # storage -> [number of the allocation, bytes, tensors, backward node]
        self._refs: dict = {}  # by id: weak references compare equal if their referents do
        self._count = 0

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        func = self._in_place(func, args) or func
        meta = _META.get(func) if any(isinstance(x, torch.Tensor) and x.is_meta for x in args) else None
        made = func(*args, **(kwargs or {})) if meta is None else meta(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and not (self._key(tensor) in self._live and any(tensor is a for a in args)):
                self._see(tensor)
        if func._schema.name in _SOFTMAXES and not args[0].is_contiguous():  # they copy strided tensors
            copies = 2 if "out" in (kwargs or {}) else 1
            self._temporary(copies * args[0].numel() * args[0].element_size())
        if func in _HELD:
            self._temporary(_HELD[func](self._cpu, made, *args))
        return made

    def _in_place(self, func, args):
        """Returns the operation that autograd would take here, and that writes its first argument, if it is another.
        Under a dispatch mode, as this one, autograd writes no gradient in place. Elsewhere it does so where nothing else
        refers to the memory: the gradients of a value that has two readers are added in place."""
        node = torch._C._current_autograd_node()
        if node is None or func not in _IN_PLACE or torch.is_grad_enabled():
            return None
        entry, number = self._live.get(self._key(args[0])), node._sequence_nr()
        if entry is None or entry[2] != 1 or entry[1] != _bytes(args[0]):
            return None
        if func is not torch.ops.aten.add.Tensor:
            return _IN_PLACE[func] if entry[3] == number else None
        first, second = args
        like = isinstance(second, torch.Tensor) and first.shape == second.shape and first.dtype == second.dtype
        return _IN_PLACE[func] if like and entry[3] not in (None, number) else None

    def _temporary(self, size: int) -> None:
        self._count += 1
        self.events += [(self._count, size), (self._count, -size)]
        self.largest = max(self.largest, size)

    def _see(self, tensor: torch.Tensor) -> None:
        key = self._key(tensor)
        if key in self._known:
            return
        if key not in self._live:
            size = tensor.untyped_storage().nbytes()
            self._count += 1
            node = torch._C._current_autograd_node()
            self._live[key] = [self._count, size, 0, None if node is None else node._sequence_nr()]
            self.events.append((self._count, size))
            self.largest = max(self.largest, size)
        self._live[key][2] += 1
        ref = weakref.ref(tensor, lambda ref, key=key: self._gone(ref, key))
        self._refs[id(ref)] = ref

    def _gone(self, ref, key: int) -> None:
        del self._refs[id(ref)]
        entry = self._live[key]
        entry[2] -= 1
        if entry[2] == 0:
            self.events.append((entry[0], -entry[1]))
            del self._live[key]

    def peak(self, results: Sequence[torch.Tensor] = ()) -> int:
        """Returns the peak bytes, without those of the results."""
        entries = [self._live.get(self._key(t)) for t in results]
        ignored = {entry[0] for entry in entries if entry is not None}
        now = most = 0
        for number, size in self.events:
            if number not in ignored:
                now += size
                most = max(most, now)
        return most


def _two_rounds(*bounds: int) -> range:
    """Runs two iterations of a loop: all but the last need the same memory."""
    return range(*bounds)[:2]


def peak_bytes(source: str, name: str, inputs: Sequence[torch.Tensor]) -> int:
    """Returns the peak bytes of a generated function beyond its inputs and results."""
    function = load(source, name, {"range": _two_rounds})
    given = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in inputs]
    with torch.no_grad(), OneAttention(), Recorder(given, inputs[0].device.type) as recorder:
        results = function(*given)
    return recorder.peak(results)


def eager_bytes(function: Callable, tensors: Sequence[FakeTensor], needs: Sequence[bool]) -> int | None:
    """Returns the bytes that the eager function and its gradients take beyond inputs and results. Returns None if
    unknown, for example with sizes that depend on values."""
    with alone(), tensors[0].fake_mode, torch.enable_grad():
        leaves = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs)]
        try:
            with Recorder(leaves, leaves[0].device.type) as recorder:
                results = [o for o in pytree.tree_leaves(function(*leaves)) if isinstance(o, torch.Tensor)]
                sources = [o for o in results if o.requires_grad]
                if sources:
                    ones = [torch.ones_like(o) for o in sources]
                    wanted = [t for t in leaves if t.requires_grad]
                    results += [g for g in gradients_of(function, leaves, sources, wanted, ones) if g is not None]
        except Exception:  # an error here drops a line of the report, and keeps nothing
            return None
        return recorder.peak(results)
