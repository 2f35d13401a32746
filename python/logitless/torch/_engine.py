"""The C calls on torch tensors, and each thread's cache of planned calls."""

from __future__ import annotations

import ctypes
import re
from ctypes import byref, c_void_p
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import Tensor

from .. import _library as c
from .._cache import ThreadCache
from .._library import lib
from .._options import HeadOptions, LossOptions, request_of, struct_of
from . import _memory, _portable, ranks
from ._backend import is_native
from ._portable_plan import limit_of
from .quantized import QuantizedWeight

DTYPES = {
    torch.float32: c.F32,
    torch.bfloat16: c.BF16,
    torch.float16: c.F16,
    torch.int32: c.I32,
    torch.int64: c.I64,
}

_SAVED_BYTES = 1 << 20  # workspaces up to this size are reused; calls of one stream and thread do not overlap

_TARGETS = re.compile(r"^(rank \d+: )?targets:")

Tensors = dict[str, Optional[Tensor]]  # by the fields of a C struct; None marks a missing one


def _check(status: int) -> None:
    """Raises the exception for a status of a run. The library's name of the token ids becomes that of PyTorch's calls."""
    try:
        c.check(status)
    except ValueError as error:
        raise ValueError(_TARGETS.sub(r"\1target:", str(error))) from None


class Kind(NamedTuple):
    """A C call: its structs in the order of its arguments, inputs first, and the names of its functions."""

    name: str
    structs: tuple[type[ctypes.Structure], ...]
    plan: str
    run: str
    extra: tuple = ()  # its last arguments


CROSS_ENTROPY = Kind(
    "cross_entropy", (c.CrossEntropyInputs, c.CrossEntropyOutputs), "logitless_plan_cross_entropy",
    "logitless_cross_entropy", (None,),
)
HEAD = Kind("head", (c.HeadInputs, c.HeadOutputs), "logitless_plan_head_forward", "logitless_head_forward")
HEAD_BACKWARD = Kind(
    "head_backward", (c.HeadInputs, c.HeadCotangents, c.HeadGradients), "logitless_plan_head_backward",
    "logitless_head_backward",
)
SAVED_HEAD = Kind(
    "saved_head", (c.HeadInputs, c.HeadOutputs, c.HeadGradients), "logitless_plan_head_saved",
    "logitless_head_forward_saved",
)


def tensor_struct(name: str, t: Tensor) -> c.Tensor:
    """Returns a tensor as the C ABI's struct; ``name`` is its name in errors."""
    s = c.Tensor()
    s.name = "target" if name == "targets" else name
    s.data = _memory.address(s.name, t)
    s.dtype = DTYPES[t.dtype]
    s.rank = t.dim()
    s.shape[: t.dim()] = t.shape
    s.strides[: t.dim()] = t.stride()
    return s


def fill(struct_type: type[ctypes.Structure], tensors: Tensors):
    """Returns a struct of tensor pointers, and its tensor structs in order."""
    struct, fields = c.new(struct_type), []
    for name, tensor in tensors.items():
        if tensor is not None:
            fields.append(tensor_struct(name, tensor))
            setattr(struct, name, ctypes.pointer(fields[-1]))
    return struct, fields


class Call:
    """A C call with its plan. A run only sets new pointers."""

    def __init__(
        self, kind: Kind, options: LossOptions | HeadOptions, groups, budget: int, shard=ranks.ALL, accumulate=False
    ):
        """groups: the tensors of each struct, all on hidden's device. budget: bytes, negative for a hint. accumulate:
        gradients are added to what their tensors hold."""
        self.device = groups[0]["hidden"].device
        self.context = _context(self.device)
        self.structs = [fill(struct, tensors) for struct, tensors in zip(kind.structs, groups)]
        if shard.group:
            self.structs[0][0].sharding = ctypes.pointer(ranks.struct_of(shard, self.device))
        self.options = struct_of(options)
        self.options.accumulate = int(accumulate)
        self.run_function, self.extra = getattr(lib, kind.run), kind.extra
        self.plan, request = c_void_p(), request_of(options._replace(memory_budget=abs(budget)))
        request.budget_is_hint = int(budget < 0)
        self.arguments = (self.context.handle, self.plan, byref(self.options), *[byref(s) for s, _ in self.structs])
        c.check(getattr(lib, kind.plan)(self.context.handle, *self.arguments[2:], byref(request), byref(self.plan)))
        self.workspace_bytes = lib.logitless_plan_workspace_bytes(self.plan)
        self.number, self.group = 0, None  # of a plan that the ranks made together
        self.kept: Tensor | None = None
        # Fields in the order of run()'s tensors.
        self.fields = [field for _, fields in self.structs for field in fields]
        self.outputs = [(t.shape, t.dtype) for t in groups[1].values() if t is not None]
        self.like: list[Tensor] = []  # one element each, expanded to the outputs' shapes

    def __del__(self, lib=lib):  # this module is empty at interpreter exit
        if getattr(self, "plan", None):
            lib.logitless_plan_destroy(self.plan)

    def _workspace(self) -> Tensor:
        try:
            workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self.device)
        except RuntimeError:  # out of memory
            if self.group is not None:  # the other ranks wait in the call, which propagates this failure
                self.run_function(*self.arguments, 256, 0, *self.extra)
            raise
        if self.workspace_bytes <= _SAVED_BYTES:
            self.kept = workspace
        return workspace

    def run(self, tensors, workspace: Tensor | None = None) -> None:
        """Runs the call on tensors of the layouts that it was planned for: those that are not None, in the order of the
        structs. workspace: workspace_bytes of memory, or None to allocate it."""
        for field, t in zip(self.fields, tensors, strict=True):
            address = t.data_ptr()
            field.data = address if address and not t.storage_offset() else _memory.address(field.name, t)
        if workspace is None:
            workspace = self.kept
            if workspace is None:
                workspace = self._workspace()
        status = self.run_function(*self.arguments, workspace.data_ptr(), self.workspace_bytes, *self.extra)
        if status:
            _check(status)

    def replay(self, inputs) -> list[Tensor]:
        """Runs the call on these inputs, or None, on their GPU. Returns new outputs."""
        if not self.like:
            self.like = [torch.empty((), dtype=d, device=self.device).expand(shape) for shape, d in self.outputs]
        made = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in self.like]  # faster than empty
        on_device(self.device, self.run, [*[t for t in inputs if t is not None], *made])
        return made


# The raw pointer; a Stream object takes twenty times as long.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def current_stream(device: torch.device) -> int:
    """Returns the cudaStream_t of the current stream on a GPU."""
    if _raw_stream is None:
        return torch.cuda.current_stream(device).cuda_stream
    return _raw_stream(device.index)


# It skips the check that CUDA is initialised, which existing CUDA tensors imply.
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def on_device(device: torch.device, function, *args):
    """Calls ``function(*args)`` with the tensor's GPU as the current device, as CUDA requires."""
    if device.type != "cuda" or device.index == _current_device():
        return function(*args)
    with torch.cuda.device(device):
        return function(*args)


def _context(device: torch.device) -> c.Context:
    if device.type == "cpu":
        return c.context(threads=torch.get_num_threads())
    return c.context(c.DEVICE_CUDA, device.index, current_stream(device))


def place(device: torch.device):
    """Returns the state of a device on which a call depends: threads, or GPU index and stream."""
    if device.type == "cpu":
        return torch.get_num_threads()
    return device.index, current_stream(device)


calls = ThreadCache(256)  # planned calls


def _planned_together(group: ranks.Group, key: Any, build: Callable[[], Call]) -> Call:
    """Returns the call of a key, whose plan all ranks made at the same point. If one rank's shape changed, all ranks
    plan again."""
    found = calls.find(key)
    known = found is not None and found.group is group
    if not group.ready(found.number if known else 0):
        calls.forget(*[k for k, v in calls.entries().items() if getattr(v, "group", None) is not None and v.group.ended])
        found = build()
        group.plans += 1
        found.number, found.group = group.plans, group
        calls.remember(key, found)
    return found


def run(
    kind: Kind, options: LossOptions | HeadOptions, shard: ranks.VocabShard, *groups: Tensors,
    later: tuple[bool, ...] = (), backward: Callable[[], tuple[Kind, tuple[Tensors, ...]]] | None = None,
    accumulate: bool = False,
) -> Optional[Call]:
    """Plans and runs a C call on the tensors of its structs, inputs first. Returns the planned call, or None if it ran
    without one. later: as in ``_portable.run``. backward: returns the call that those gradients will need, whose tensors
    may be on the meta device. It raises here if its plan exceeds the budget. accumulate: gradients are added to what
    their tensors hold; for hidden states that the library serves."""
    hidden, device, weight = groups[0]["hidden"], groups[0]["hidden"].device, groups[0]["weight"]
    quantized = isinstance(weight, QuantizedWeight)
    if shard.group and not quantized and weight.dtype != hidden.dtype:
        raise NotImplementedError(
            f"sharding: expected hidden and weight of one dtype, or a float32 weight, got {hidden.dtype} and {weight.dtype}"
        )
    if not is_native(hidden) or (quantized and not _run_copied(kind, options, groups, later, backward)):
        return _portable.run(kind.name, options, shard, *groups, later=later)
    if quantized:
        return None
    checked = any(later) and backward is not None and options.memory_budget > 0
    tensors = [t for group in groups for t in group.values()]
    present = [t for t in tensors if t is not None]

    def build() -> Call:
        for group in groups:
            for name, t in group.items():
                if t is not None:
                    _memory.check("target" if name == "targets" else name, t, device)
        budget = options.memory_budget
        if shard.group:  # a hint depends on this rank's tokens, and all ranks must double it equally often
            budget = max(budget, 0)
        if checked and backward is not None:
            what, tensors_of = backward()
            Call(what, options, tensors_of, budget, shard, accumulate)
        return Call(kind, options, groups, budget, shard, accumulate)

    def planned_run() -> Call:
        layouts = [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors]
        key = (kind.name, options, accumulate, shard, place(device), later if checked else (), *layouts)
        call = _planned_together(group, key, build) if shard.group else calls.remembered(key, build)
        call.run(present)
        return call

    if not shard.group:
        return on_device(device, planned_run)
    group = ranks.group_of(shard.group)
    group.calls += 1
    return ranks.together(group, lambda: on_device(device, planned_run))


def _run_copied(kind: Kind, options: LossOptions | HeadOptions, groups, later, backward) -> bool:
    """Runs a call of a quantised weight on a whole copy in the dtype of hidden. The budget must have space for both.
    Without a budget the copy may take what the portable implementation would. Returns whether it ran."""
    hidden, weight, budget = groups[0]["hidden"], groups[0]["weight"], options.memory_budget
    copies, tokens = weight.numel() * hidden.element_size(), hidden.shape[:-1].numel()
    only = options.precision == "bf16x3"  # which has no portable implementation
    if not only and copies + (budget > 0) > limit_of(tokens, weight.shape[0], 4, budget):
        return False
    if budget > 0:
        options = options._replace(memory_budget=max(1, budget - copies))
    made = weight.dequantize(hidden.dtype)

    def plain(inputs: Tensors, *more: Tensors) -> tuple[Tensors, ...]:
        return {**inputs, "weight": made}, *more

    def of_backward():
        what, tensors = backward()
        return what, plain(*tensors)

    try:
        run(kind, options, ranks.ALL, *plain(*groups), later=later, backward=None if backward is None else of_backward)
    except ValueError as error:
        if only or "memory_budget" not in str(error):
            raise
        return False
    return True


class _Scale:
    """The C call of ``scale`` and its structs, for one context: up to three contiguous tensors, each as one row."""

    def __init__(self, context: c.Context):
        self.context = context
        self.factor = c.Tensor()
        self.factor.dtype = c.F32
        self.tensors = [c.Tensor(), c.Tensor(), c.Tensor()]
        for t, rank in zip(self.tensors, (2, 2, 1)):
            t.rank = rank
            t.shape[0] = t.strides[rank - 1] = 1
        self.pointers = [ctypes.pointer(t) for t in self.tensors]
        self.gradients = c.new(c.HeadGradients)
        self.arguments = (context.handle, byref(self.factor), byref(self.gradients))

    def run(self, tensors, factor: torch.Tensor):
        self.factor.data = factor.data_ptr()
        gradients = self.gradients
        gradients.d_hidden = gradients.d_weight = gradients.d_bias = None
        for name, struct, pointer, tensor in zip(("d_hidden", "d_weight", "d_bias"), self.tensors, self.pointers, tensors):
            struct.data, struct.dtype = _memory.address("gradient", tensor), DTYPES[tensor.dtype]
            struct.shape[struct.rank - 1] = struct.strides[0] = tensor.numel()
            struct.strides[struct.rank - 1] = 1
            setattr(gradients, name, pointer)
        status = lib.logitless_scale_gradients(*self.arguments)
        if status:
            c.check(status)


def scale(tensors, factor: torch.Tensor) -> None:
    """Computes ``t *= factor`` for up to three contiguous floating tensors; factor is a scalar tensor on their device.
    """
    factor = factor.float().resolve_neg()
    device = factor.device
    present = [t for t in tensors if t.numel()]
    if not present:
        return
    key = ("scale", device.type, place(device))
    made = calls.remembered(key, lambda: on_device(device, lambda: _Scale(_context(device))))
    on_device(device, made.run, present, factor)
