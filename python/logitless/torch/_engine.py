"""Calls of the C ABI on torch tensors. State that is constant between calls of one shape is built once."""

from __future__ import annotations

import ctypes
import threading
from ctypes import byref, c_void_p
import torch

from .. import _library as c
from .._library import lib
from .._options import HeadOptions, LossOptions, struct_of
from . import _memory, _ranks

DTYPES = {
    torch.float32: c.F32,
    torch.bfloat16: c.BF16,
    torch.float16: c.F16,
    torch.int32: c.I32,
    torch.int64: c.I64,
}

_MOST_HINTED = 1 << 60
_SAVED_BYTES = 1 << 20  # workspaces up to this size are reused; calls of one stream and thread do not overlap
_MOST_CALLS = 256  # calls of different shapes and options cached per thread


def _address(name: str, t: torch.Tensor) -> int:
    """Returns the address of a tensor's first element. A meta tensor gets a dummy address, which is never read."""
    return 64 if t.is_meta else _memory.address(name, t)


def tensor_struct(name: str, t: torch.Tensor) -> c.Tensor:
    """Returns a tensor as the C ABI's struct; ``name`` is its name in errors."""
    s = c.Tensor()
    s.name = "target" if name == "targets" else name
    s.data = _address(s.name, t)
    s.dtype = DTYPES[t.dtype]
    s.rank = t.dim()
    s.shape[: t.dim()] = t.shape
    s.strides[: t.dim()] = t.stride()
    return s


class Call:
    """A C call with its plan. A run only sets new pointers."""

    def __init__(self, device: torch.device, options, structs, request_bytes, plan_function, run_function, extra):
        self.context = _context(device)
        self.structs = structs
        self.options = options
        self.run_function = run_function
        self.extra = extra
        self.plan = c_void_p()

        def plan(budget):
            request = c.new(c.PlanRequest)
            request.memory_budget = budget
            pointers = [byref(s) for s, _ in structs]
            return plan_function(self.context.handle, byref(options), *pointers, byref(request), byref(self.plan))

        if request_bytes >= 0:
            status = plan(request_bytes)
        else:  # a hint is doubled until a plan fits
            status, budget = 1, -request_bytes
            while status == 1 and budget <= _MOST_HINTED:
                status = plan(budget)
                budget *= 2
        c.check(status)
        self.number, self.group = 0, None  # of a plan that the ranks made together
        self.kept: torch.Tensor | None = None
        self.workspace_bytes = lib.logitless_plan_workspace_bytes(self.plan)
        self.arguments = (
            self.context.handle,
            self.plan,
            byref(options),
            *[byref(s) for s, _ in structs],
        )
        # Fields in the order of run()'s tensors.
        self.fields = [field for _, fields in structs for field in fields]

    def __del__(self, destroy=lib.logitless_plan_destroy):  # this module is empty at interpreter exit
        if getattr(self, "plan", None):
            destroy(self.plan)

    def _workspace(self, device) -> torch.Tensor:
        try:
            return torch.empty(self.workspace_bytes, dtype=torch.uint8, device=device)
        except RuntimeError:  # out of memory
            if self.group is not None:  # the other ranks wait in the call, which propagates this failure
                self.run_function(*self.arguments, 256, 0, *self.extra)
            raise

    def run(self, tensors, device, workspace: torch.Tensor | None = None):
        """Runs the call in the given workspace of workspace_bytes, or in one that it allocates."""
        for field, tensor in zip(self.fields, tensors, strict=True):
            field.data = _address(field.name, tensor)
        workspace = self.kept if workspace is None else workspace
        if workspace is None:
            workspace = self._workspace(device)
            if self.workspace_bytes <= _SAVED_BYTES:
                self.kept = workspace
        status = self.run_function(*self.arguments, workspace.data_ptr(), self.workspace_bytes, *self.extra)
        if status:
            c.check(status)


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


_calls = threading.local()


def _call(kind, options, vocab_shard, tensors: dict[str, torch.Tensor | None], device, build) -> tuple[Call, list]:
    present = [t for t in tensors.values() if t is not None]
    key = (
        kind,
        options,
        vocab_shard,
        device.type,
        place(device),
        *[None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in tensors.values()],
    )
    if vocab_shard.group:
        return _planned_together(_ranks.group_of(vocab_shard.group), _calls.__dict__, key, build), present
    return remembered(key, build), present


def remembered(key, build):
    """Returns the result of ``build`` for a key, from this thread's cache if present."""
    cache = _calls.__dict__
    found = cache.get(key)
    if found is None:
        if len(cache) >= _MOST_CALLS:
            cache.clear()
        found = cache[key] = build()
    return found


def _planned_together(group: _ranks.Group, cache, key, build) -> Call:
    """Returns the call of a key, whose plan all ranks made at the same point. If one rank's shape changed, all ranks
    plan again."""
    found = cache.get(key)
    known = found is not None and found.group is group
    if not group.ready(found.number if known else 0):
        for old in [k for k, call in cache.items() if getattr(call, "group", None) is not None and call.group.ended]:
            del cache[old]
        if len(cache) >= _MOST_CALLS:
            cache.clear()
        found = build()
        group.plans += 1
        found.number, found.group = group.plans, group
        cache[key] = found
    return found


def fill(struct_type, tensors):
    """Returns a struct of tensor pointers, and its tensor structs in order."""
    struct, fields = c.new(struct_type), []
    for name, tensor in tensors.items():
        if tensor is not None:
            fields.append(tensor_struct(name, tensor))
            setattr(struct, name, ctypes.pointer(fields[-1]))
    return struct, fields


def _run(kind, options, vocab_shard, groups, device, plan_function, run_function, extra=()):
    """Plans and runs a call. groups: (struct type, {field: tensor}) in the order of the C call's arguments, inputs
    first."""
    tensors = {f"{i}.{name}": t for i, (_, group) in enumerate(groups) for name, t in group.items()}

    def build():
        for _, group in groups:
            for name, t in group.items():
                if t is not None:
                    _memory.check("target" if name == "targets" else name, t, device)
        structs = [fill(struct_type, group) for struct_type, group in groups]
        if vocab_shard.group:
            structs[0][0].sharding = ctypes.pointer(_ranks.struct_of(vocab_shard, device))
        budget = options.memory_budget
        if vocab_shard.group:  # a hint depends on this rank's tokens, and all ranks must double it equally often
            budget = max(budget, 0)
        return Call(device, struct_of(options), structs, budget, plan_function, run_function, extra)

    def run():
        call, present = _call(kind, options, vocab_shard, tensors, device, build)
        call.run(present, device)

    if vocab_shard.group:
        group = _ranks.group_of(vocab_shard.group)
        group.calls += 1
        _ranks.together(group, lambda: on_device(device, run))
    else:
        on_device(device, run)


def prepare_cross_entropy(options: LossOptions, inputs: dict, outputs: dict) -> Call:
    """Returns the planned call. Its run() takes the tensors that are not None, in this order."""
    structs = [fill(c.CrossEntropyInputs, inputs), fill(c.CrossEntropyOutputs, outputs)]
    return Call(
        inputs["hidden"].device,
        struct_of(options),
        structs,
        options.memory_budget,
        lib.logitless_plan_cross_entropy,
        lib.logitless_cross_entropy,
        (None,),
    )


def cross_entropy(options: LossOptions, inputs: dict, outputs: dict, vocab_shard: _ranks.VocabShard = _ranks.ALL) -> None:
    """Calls logitless_cross_entropy, which writes ``outputs``: tensors by the C struct's names; None marks a missing
    one."""
    groups = [(c.CrossEntropyInputs, inputs), (c.CrossEntropyOutputs, outputs)]
    _run(
        "loss",
        options,
        vocab_shard,
        groups,
        inputs["hidden"].device,
        lib.logitless_plan_cross_entropy,
        lib.logitless_cross_entropy,
        (None,),
    )


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
    made = remembered(key, lambda: on_device(device, lambda: _Scale(_context(device))))
    on_device(device, made.run, present, factor)


def head_forward(options: HeadOptions, inputs: dict, outputs: dict, vocab_shard: _ranks.VocabShard = _ranks.ALL) -> None:
    groups = [(c.HeadInputs, inputs), (c.HeadOutputs, outputs)]
    _run(
        "head",
        options,
        vocab_shard,
        groups,
        inputs["hidden"].device,
        lib.logitless_plan_head_forward,
        lib.logitless_head_forward,
    )


def head_backward(
    options: HeadOptions, inputs: dict, cotangents: dict, gradients: dict, vocab_shard: _ranks.VocabShard = _ranks.ALL
) -> None:
    groups = [(c.HeadInputs, inputs), (c.HeadCotangents, cotangents), (c.HeadGradients, gradients)]
    _run(
        "head_backward",
        options,
        vocab_shard,
        groups,
        inputs["hidden"].device,
        lib.logitless_plan_head_backward,
        lib.logitless_head_backward,
    )
