"""Passes over a tile of logits, as functions that torch.compile turns into one kernel each, on devices that Inductor
generates code for. The numbers of a tile's tokens between two passes are such a function, too.

A pass is compiled once for its options and dtypes, for all shapes. Neither makes a tile of its own: sums read the products,
gradients read them and write the operand of the next products.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import threading
import types
import warnings
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import Tensor

from ._portable_rows import MASKED, Entries, RowForm, Statistics, Sums, Targets, finished, finite, merged

_MOST_TARGETS = 8  # of a token, each of which is compared with each logit
_LEAST_COLUMNS = 64  # of a tile; fewer are not worth a kernel
_LEAST_LOGITS = 1 << 24  # of a call, below which compilation takes longer than it saves
_LEAST_CAPABILITY = (7, 0)  # of Triton

_failures: dict[str, str] = {}  # by device type: why torch.compile does not serve it
_lock = threading.Lock()


class _NotTraced(Exception):
    """torch.compile ran a function as it is, since something switches it off."""


class Form(NamedTuple):
    """Everything in a pass that is not a tensor."""

    scale: float
    softcap: float
    apart: bool  # the exponential of the target is not in the sum
    entropy: bool = False
    variance: bool = False
    argmax: bool = False
    columns: bool = False  # sums over the tokens, for the gradient of bias


def why_not(device: torch.device, logits: int = _LEAST_LOGITS, per_token: int = 1) -> str:
    """Returns the reason why passes of a call run in operations of their own; empty if they are compiled.

    logits: of the call, N V. Raises ValueError for another value of LOGITLESS_FUSED_PASSES.
    """
    wanted = os.environ.get("LOGITLESS_FUSED_PASSES", "")
    if wanted not in ("", "never", "always"):
        raise ValueError(f"LOGITLESS_FUSED_PASSES: expected never or always, got {wanted!r}")
    if wanted == "never":
        return "LOGITLESS_FUSED_PASSES=never"
    if device.type == "meta":
        return "the device is meta"
    if device.type in _failures:
        return _failures[device.type]
    if not wanted and (reason := _why_no_code(device.type, device.index)):
        return reason
    if per_token > _MOST_TARGETS:
        return f"there are more than {_MOST_TARGETS} targets for each token"
    if not wanted and logits < _LEAST_LOGITS:
        return "there are few logits"
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return "a mode or a transform sees the operations"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is captured"
    return ""


@functools.cache
def _why_no_code(kind: str, index: Optional[int]) -> str:
    if kind not in ("cuda", "xpu"):
        return f"they are compiled for cuda and xpu, the device is {kind}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if kind == "cuda" and torch.version.hip is None:
        found = torch.cuda.get_device_capability(torch.device(kind, index))
        if found < _LEAST_CAPABILITY:
            return "Triton needs compute capability {}.{}, the device has {}.{}".format(*_LEAST_CAPABILITY, *found)
    return ""


# --- The passes. z: products of tokens and a block of the vocabulary [n, v], which begins at the entry ``first``.


def _logits(form: Form, z: Tensor, bias: Optional[Tensor], inverse: Optional[Tensor]) -> tuple[Tensor, Optional[Tensor]]:
    """Returns logits, and the tanh of a softcap. bias: [v] or [n, K], as z."""
    if bias is not None:
        z = z + bias
    if form.scale != 1.0:
        z = z * form.scale
    tanh = None
    if form.softcap:
        tanh = torch.tanh(z)
        z = tanh * form.softcap
    if inverse is not None:
        z = z * inverse[:, None]
    return z, tanh


def _columns(z: Tensor, first: Tensor) -> Tensor:
    return (torch.arange(z.shape[1], device=z.device) + first)[None]


def _known(z: Tensor) -> None:
    """Makes facts of the shape known to the compiler, by branches: whether rows of logits are aligned, and that they are
    long enough for an online softmax."""
    if z.shape[1] % 16 == 0:
        pass
    if z.shape[1] >= _LEAST_COLUMNS:
        pass


def _sums(z, first, ids, valid, bias, inverse, weights, old: Optional[Sums], form: Form) -> tuple:
    """Returns the Sums of ``old`` and a tile. ids, valid: [n, K]. bias, weights: [v] or None. inverse: [n] or None."""
    if not torch.compiler.is_compiling():
        raise _NotTraced
    _known(z)
    here = valid & (ids >= first) & (ids < first + z.shape[1])
    relative = torch.where(here, ids - first, 0)
    of_target, _ = _logits(form, z.gather(1, relative), None if bias is None else bias[relative], inverse)
    z, _ = _logits(form, z, bias, inverse)
    others = z
    if form.apart:
        others = torch.where((_columns(z, first) == ids) & valid, -math.inf, z)
    top = others.amax(1, keepdim=True)
    e = (others - top).exp()
    total = e.sum(1, keepdim=True)[:, 0]
    top = top[:, 0]
    total = torch.where(top == -math.inf, 0.0, torch.where(top == math.inf, math.inf, total))
    spread = square = weighted = mass = index = None
    if form.entropy:
        u = others - finite(top)[:, None]
        each = torch.where(e == 0, 0.0, e * u)
        spread = each.sum(1)
        if form.variance:
            square = (each * u.clamp(min=MASKED)).sum(1)
    of_tile = Sums(top, total, torch.where(here, of_target, 0.0), spread, square, None, None, None)
    if form.apart:
        zero = torch.zeros_like(total)
        more = [None if t is None else zero for t in (spread, square)]
        alone = Sums(torch.where(here, of_target, -math.inf)[:, 0], zero, torch.zeros_like(of_tile.target), *more)
        of_tile = merged(of_tile, alone)
    if weights is not None:
        weighted, mass = ((z - finite(of_tile.top)[:, None]) * weights).sum(1), weights.sum()
    if form.argmax:
        index = z.argmax(1) + first
    of_tile = of_tile._replace(weighted=weighted, mass=mass, index=index)
    return tuple(of_tile if old is None else merged(old, of_tile))  # PyTorch 2.11 makes no class of ours


def _value(form: Form, z, first, ids, bias, inverse, weights, entries: Entries) -> Tensor:
    """Returns the gradients of products [n, v]."""
    z, tanh = _logits(form, z, bias, inverse)
    u = z - entries.shift[:, None]
    factor = entries.softmax[:, None]
    if entries.logit is not None:
        factor = factor + u.clamp(min=MASKED) * entries.logit[:, None]
    d = u.exp() * factor
    if entries.uniform is not None:
        d = d + entries.uniform[:, None] * weights
    column = _columns(z, first)
    for k in range(ids.shape[1]):
        of_target = entries.target[:, k : k + 1]
        here = (column == ids[:, k : k + 1]) & entries.valid[:, k : k + 1]
        d = torch.where(here, of_target, d) if form.apart else d + torch.where(here, of_target, 0.0)
    return d if tanh is None else d * (1.0 - tanh * tanh)


def _gradients(z, first, ids, bias, inverse, weights, entries: Entries, out: Optional[Tensor], form: Form) -> tuple:
    """Writes the gradients of products into ``out``, or over the products. Returns their sums over tokens, if wanted, and
    over columns: with these a kernel goes by rows, without a division for each element's row and column."""
    if not torch.compiler.is_compiling():
        raise _NotTraced
    _known(z)
    d = _value(form, z, first, ids, bias, inverse, weights, entries)
    columns = d.sum(0) if form.columns else None
    if out is None:
        z.copy_(d)
    else:
        out.copy_(d)
    return columns, d.sum(1)


# --- The numbers of tokens.


def _numbers(sums: Sums, targets: Targets, weights, inverse, numbers: tuple, form: RowForm) -> tuple:
    """Returns the values of tokens, and their Entries or None. inverse: [n] or None. numbers: as ``form.of`` takes them."""
    if not torch.compiler.is_compiling():
        raise _NotTraced
    statistics = Statistics(Targets(*targets), form.entropy, form.argmax, weights, form.variance)
    statistics.sums = Sums(*sums)
    values, entries = finished(form, statistics, inverse, numbers)
    return values, None if entries is None else tuple(entries)


# --- Compilation.


@functools.cache
def _options() -> dict[str, Any]:
    """Returns settings of Inductor: everything is computed where it is used, in the same order in each run."""
    from torch._inductor import config

    wanted = dict(
        realize_reads_threshold=1 << 20, realize_opcount_threshold=1 << 20, realize_acc_reads_threshold=1 << 20,
        split_reductions=False, deterministic=True,
    )
    return {name: value for name, value in wanted.items() if hasattr(config, name)}


@functools.lru_cache(maxsize=256)
def _compiled(function: Callable[..., Any], form: Form | RowForm, *key: Any) -> Callable[..., Any]:
    """Returns a pass of some options. Each has code of its own, since PyTorch limits how often one code is compiled."""
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__, (form,))
    return torch.compile(own, fullgraph=True, dynamic=True, options=_options())


def _key(*tensors: Any) -> tuple:
    flat: list[Any] = []
    for t in tensors:
        flat += t if isinstance(t, tuple) else [t]
    kinds = tuple(None if t is None else (t.dtype, t.device.index) for t in flat)
    return (*kinds, torch.is_inference_mode_enabled())


def run(function: Callable[..., Any], form: Form | RowForm, device: torch.device, *tensors: Any) -> tuple[bool, Any]:
    """Returns whether a compiled function ran on a device's tensors, and its result. After a failure to compile there is a
    warning, and the device's passes are not compiled again in this process."""
    kind = device.type
    if kind in _failures:
        return False, None
    try:
        return True, _compiled(function, form, *_key(*tensors))(*tensors)
    except _NotTraced:
        return False, None
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        with _lock:
            first = kind not in _failures
            lines = [line.strip() for line in f"{type(error).__name__}: {error}".split("\n") if line.strip()]
            _failures[kind] = f"torch.compile failed ({' '.join(lines[:2])[:300]})"
        if first:
            warnings.warn(
                f"logitless: {_failures[kind]}; passes over logits on {kind} run in PyTorch's operations one by one, which "
                "is slower. LOGITLESS_FUSED_PASSES=never leaves them so without this warning",
                stacklevel=2,
            )
        return False, None


def _is_small(z: Tensor) -> bool:
    return z.shape[0] < 2 or z.shape[1] < _LEAST_COLUMNS


def add(form: Form, z: Tensor, *tensors: Any) -> tuple[bool, Any]:
    done, sums = (False, None) if _is_small(z) else run(_sums, form, z.device, z, *tensors)
    return done, Sums(*sums) if done else None


def gradients(form: Form, z: Tensor, *tensors: Any) -> tuple[bool, Optional[Tensor]]:
    """Returns whether a compiled pass wrote the gradients of products, and their sums over tokens."""
    done, found = (False, None) if _is_small(z) else run(_gradients, form, z.device, z, *tensors)
    return done, found[0] if done else None


def numbers(form: RowForm, sums: Sums, targets: Targets, *tensors: Any) -> tuple[bool, Any]:
    """Returns whether a compiled function computed ``finished``, and its result."""
    top = sums.top
    done, found = (False, None) if top.shape[0] < 2 else run(_numbers, form, top.device, sums, targets, *tensors)
    return done, (found[0], None if found[1] is None else Entries(*found[1])) if done else None
