"""Samples by the library's own kernels on a Hopper GPU: one GEMM for tokens and log-probabilities (``c_sample.h``)."""

from __future__ import annotations

import ast
import functools
from ctypes import byref, c_float, c_void_p
from typing import Any, Mapping, Optional

import torch
from torch import Tensor, nn

from .. import _library as c
from .._library import lib, parse_bytes
from . import _engine, _memory
from ._backend import why_portable
from .autograd import transformed

_PLAIN = (Tensor, nn.Parameter)
_TENSORS = ("hidden", "weight", "bias", "logit_bias", "temperature", "min_p", "counter", "key")
_FLOATS = ("bias", "logit_bias", "temperature", "min_p")


def serves(hidden: Any, weight: Any, given: Mapping[str, Any], filters: Any) -> bool:
    """Returns whether ``sampled`` serves a call. hidden, weight: as the caller gave them. filters: Filters."""
    x, w = given["hidden"], given["weight"]
    if transformed():
        return False
    if filters.top_k or filters.top_p or x.dtype not in (torch.bfloat16, torch.float16) or w.dtype != x.dtype:
        return False
    if x.device.type != "cuda" or x.shape[1] % 8 != 0 or x.shape[0] == 0 or not _is_hopper(x.device.index):
        return False
    if not torch.compiler.is_compiling() and (type(hidden) not in _PLAIN or type(weight) not in _PLAIN):
        return False
    return not why_portable("cuda", x.device.index, x.dtype)


@torch.compiler.assume_constant_result
def _is_hopper(index: Optional[int]) -> bool:
    return torch.version.hip is None and _capability(index) == (9, 0)


@functools.cache
def _capability(index: Optional[int]) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def sampled(
    given: Mapping[str, Any], key: int | Tensor | None, filters: Any, memory_budget: Any
) -> tuple[Tensor, Tensor]:
    """Returns tokens [N] int64 and log-probabilities [N].

    given: hidden [N, D], weight [V, D] and bias of the head; logit_bias; temperature and min_p, numbers or [N]; counter
    [N]. key: a seed, or int64 [2]; None: greedy.
    """
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    numbers = [None if name in tensors else given.get(name, 0.0) for name in ("temperature", "min_p")]
    if isinstance(key, Tensor):
        tensors["key"] = key
    form = (filters.softcap, filters.scale, *numbers)
    if torch.compiler.is_compiling():
        return torch.ops.logitless.sampled(list(tensors.values()), ",".join(tensors), *form, repr(memory_budget))
    return _run(tensors, *form, key if isinstance(key, int) else 0, memory_budget)


def _run(tensors, softcap, scale, temperature, min_p, seed, memory_budget) -> tuple[Tensor, Tensor]:
    made = [_dense(name, tensors.get(name)) for name in _TENSORS]
    hidden = made[0]
    tokens = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    log_prob = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    layouts = [None if t is None else (t.shape, t.dtype) for t in made]
    greedy = temperature is not None and c_float(temperature).value == 0
    # A plan serves all temperatures but 0, and all min_p but 0.
    filtered = c_float(min_p or 0.0).value != 0
    key = "sample", softcap, scale, greedy, filtered, memory_budget, _engine.place(hidden.device), *layouts

    def run() -> None:
        numbers = dict(softcap=softcap, logit_scale=scale, seed=seed % (1 << 64), min_p=min_p or 0.0)
        numbers["temperature"] = 1.0 if temperature is None else temperature
        groups = dict(zip(_TENSORS, made)), dict(tokens=tokens, log_prob=log_prob)
        plan = _engine.calls.remembered(key, lambda: _Plan(numbers, groups, memory_budget))
        plan.run(numbers, [t for t in (*made, tokens, log_prob) if t is not None])

    _engine.on_device(hidden.device, run)
    return tokens, log_prob


def _dense(name: str, t: Optional[Tensor]) -> Optional[Tensor]:
    """Returns a tensor as the library takes it: contiguous, aligned to 16 bytes, weights of entries in float32."""
    if t is None:
        return None
    t = (t.float() if name in _FLOATS else t).contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


class _Plan:
    """A planned call of ``logitless_sample``. A run sets pointers and numbers."""

    def __init__(self, numbers: dict[str, Any], groups, memory_budget: Any):
        self.device = groups[0]["hidden"].device
        self.context = _engine._context(self.device)
        structs = (c.SampleInputs, c.SampleOutputs)
        filled = [_engine.fill(struct, tensors) for struct, tensors in zip(structs, groups)]
        self.fields = [field for _, fields in filled for field in fields]
        self.structs = [struct for struct, _ in filled]
        self.options = c.new(c.SampleOptions)
        self._set(numbers)
        self.plan = c_void_p()
        pointers = byref(self.options), *[byref(s) for s in self.structs]
        c.check(lib.logitless_plan_sample(self.context.handle, *pointers, parse_bytes(memory_budget), byref(self.plan)))
        self.bytes = lib.logitless_sample_plan_workspace_bytes(self.plan)
        self.arguments = self.context.handle, self.plan, *pointers

    def __del__(self, lib=lib):  # this module is empty at interpreter exit
        if getattr(self, "plan", None):
            lib.logitless_sample_plan_destroy(self.plan)

    def _set(self, numbers: dict[str, Any]) -> None:
        for name, value in numbers.items():
            setattr(self.options, name, value)

    def run(self, numbers: dict[str, Any], tensors: list[Tensor]) -> None:
        self._set(numbers)
        for field, t in zip(self.fields, tensors, strict=True):
            field.data = _memory.address(field.name, t)
        workspace = torch.empty(self.bytes, dtype=torch.uint8, device=self.device)
        c.check(lib.logitless_sample(*self.arguments, workspace.data_ptr(), self.bytes))


@torch.library.custom_op(
    "logitless::sampled", mutates_args=(),
    schema="(Tensor[] tensors, str names, float softcap, float scale, float? temperature, float? min_p, str memory_budget) -> (Tensor, Tensor)",
)
def _sampled(tensors, names, softcap, scale, temperature, min_p, memory_budget):
    """``sampled`` as an operator of a graph of torch.compile."""
    given = dict(zip(names.split(","), tensors))
    return _run(given, softcap, scale, temperature, min_p, 0, ast.literal_eval(memory_budget))


@_sampled.register_fake
def _(tensors, names, softcap, scale, temperature, min_p, memory_budget):
    tokens = tensors[0].shape[0]
    return tensors[0].new_empty(tokens, dtype=torch.int64), tensors[0].new_empty(tokens, dtype=torch.float32)
