"""``LazyLogits``: a tensor whose values are computed when something reads them.

To autograd it is an ordinary tensor, with its own graph, versions and views. Below autograd, where kernels run, a view
of it is another LazyLogits on the same storage. Operations in ``_copies.py`` give new lazy values. Other readers get
computed values. Writes, and operations that could write, compute the real tensor, which all views share from then on.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any, Callable, Optional

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from . import _copies, _views, _warnings
from ._form import Form

class Storage:
    """The storage that lazy logits and their views share: the real logits, once computed."""

    def __init__(self, form: Form, like: Tensor):
        self.form, self.like = form, like
        self.real: Optional[Tensor] = None
        self.part: Callable[[], Optional[LazyLogits]] = lambda: None  # the only view whose values were computed

    def make(self, asked: bool = False) -> Tensor:
        """Returns the logits, in PyTorch's memory layout. asked: requested explicitly, which needs no warning."""
        if self.real is None:
            self.real = laid_out(self.form.value(), self.like)
            if not asked:
                _warnings.warn_made(self.real)
            part = self.part()
            if part is not None:  # a second read must return the same bits as the first
                with torch.no_grad():
                    part._along(self.real).copy_(part._read)
        return self.real


@contextlib.contextmanager
def shadow():
    """A context for meta tensors that stand for logits. It hides them from the caller's modes and hooks of saved
    tensors, which would read their values or count their bytes."""
    hooks: Any = contextlib.nullcontext()
    if torch._C._autograd._saved_tensors_hooks_is_enabled():
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with torch._C.DisableTorchFunction(), no_dispatch(), hooks:
        yield


def laid_out(made: Tensor, like: Tensor) -> Tensor:
    """Returns made with its dimensions in like's memory order."""
    with shadow():
        dense = torch.empty_like(like)
    if all(n == 1 or a == b for n, a, b in zip(made.shape, made.stride(), dense.stride())):
        return made
    return torch.empty_strided(made.shape, dense.stride(), dtype=made.dtype, device=made.device).copy_(made)


def _meta(x: Tensor) -> Tensor:
    """Returns a meta tensor with x's sizes, strides and dtype."""
    extent = x.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride()))
    storage = torch.empty(max(extent, 0), dtype=x.dtype, device="meta")
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())


class Lazy(Tensor):
    """A tensor whose values are computed on demand."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return call(func, args, kwargs or {})

    @_warnings.names_operation
    def __reduce_ex__(self, protocol):
        func = Tensor.__reduce_ex__
        return func(self._ordinary(), protocol)

    def _ordinary(self) -> Tensor:
        """Returns the values in an ordinary tensor, with a gradient to this one."""
        raise NotImplementedError


class LazyLogits(Lazy):
    """Logits [..., V] that are not computed yet, or a value derived from them. See ``lazy_head``."""

    _storage: Storage
    _form: Optional[Form]  # None for a view that does not select rows
    _chain: tuple[Callable[[Tensor], Tensor], ...]  # maps the storage's real tensor to this view
    _of: Optional[LazyLogits]  # for a view that does not select rows: the argument of the chain's last step
    _view: Optional[Tensor]
    _read: Optional[Tensor]

    @staticmethod
    def __new__(cls, storage: Storage, form: Optional[Form], like: Tensor, device, chain=()):
        """Makes lazy logits. ``like``: a meta tensor with their sizes, strides, offset and dtype."""
        self = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), storage_offset=like.storage_offset(), dtype=like.dtype, device=device
        )
        self._storage, self._form, self._chain = storage, form, chain
        self._of = self._view = self._read = None
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if any(not issubclass(t, LazyLogits) and t not in (Tensor, torch.nn.Parameter) for t in types):
            return NotImplemented
        return dispatch(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        if self._storage.real is not None:
            return repr(self.materialize())
        if self.dim() == 0:
            return repr(self.detach().clone())
        return f"LazyLogits({list(self.shape)}, dtype={self.dtype}, device={self.device})"

    @property
    def is_real(self) -> bool:
        """True once the logits of the shared storage have been computed."""
        return self._storage.real is not None

    def materialize(self) -> Tensor:
        """Returns the values as an ordinary tensor that shares this one's memory, with a gradient to it."""
        self._storage.make(asked=True)
        return self._ordinary()

    def _ordinary(self) -> Tensor:
        return _Ordinary.apply(self)

    # Below autograd:

    def _real(self) -> Tensor:
        """Returns this view of the real tensor, which is computed if it does not exist."""
        real = self._storage.make()
        if self._view is None:
            self._view, self._read = self._along(real), None
        return self._view

    def _along(self, real: Tensor) -> Tensor:
        with torch.no_grad():
            view = real.detach()
            for step in self._chain:
                view = step(view)
        return view

    def _numbers(self) -> Tensor:
        """Returns the values for an operation that only reads. If this view selects few rows, only those are computed.
        """
        storage, form = self._storage, self._form
        if self._of is not None and storage.real is None:
            rows = self._of._numbers()
            return self._chain[-1](rows) if storage.real is None else self._real()
        overlaps = any(n > 1 and s == 0 for n, s in zip(self.shape, self.stride()))
        if storage.real is not None or form is None or overlaps or self.numel() > storage.like.numel() // 2:
            return self._real()
        if form.spread:  # ranks gather once, together, for any number of rows
            return self._real()
        if self._read is None:
            if storage.part() is not None:
                return self._real()
            self._read = laid_out(form.value(), _meta(self))
            storage.part = weakref.ref(self)
            _warnings.warn_made(self._read)
        for call in form.calls:
            call.check()
        return self._read


class _Ordinary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x._real().detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def promise(form: Form, like: Tensor, device) -> LazyLogits:
    """Returns lazy logits of this form with their own storage. ``like``: a meta tensor of their shape, strides and
    dtype."""
    return LazyLogits(Storage(form, like), form, like, device)


# --- Operations, below autograd.

_VIEW, _WRITE, _READ = "view", "write", "read"


@functools.cache
def _kind(func) -> str:
    schema = func._schema
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return _WRITE
    aliased = any(r.alias_info is not None for r in schema.returns)
    return _VIEW if aliased or func is torch.ops.aten._unsafe_view.default else _READ


@functools.cache
def _written(func) -> frozenset:
    """Returns the positions and names of the arguments that func writes to."""
    written = [(k, a) for k, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    return frozenset(k for k, _ in written) | frozenset(a.name for _, a in written)


@functools.cache
def _composite(func) -> bool:
    """Returns whether func is composed of other operations. Autograd decomposes it; inference mode does not."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


@_warnings.names_operation
def dispatch(func, args, kwargs):
    if _composite(func):
        return func.decompose(*args, **kwargs)
    kind = _kind(func)
    if kind == _VIEW and isinstance(args[0], LazyLogits):
        return _views_of(func, args[0], args[1:], kwargs)
    if kind == _WRITE:
        return _write(func, args, kwargs)
    kept = _kept(func, args, kwargs) if kind == _READ else None
    if kept is not None:
        return kept
    read = functools.partial(_mapped, of=LazyLogits._numbers)
    return func(*read(args), **read(kwargs))


def _mapped(value, of: Callable, kind: type = LazyLogits):
    """Returns ``value`` with ``of`` applied to each tensor of that kind in it."""
    if isinstance(value, kind):
        return of(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(v, of, kind) for v in value)
    if isinstance(value, dict):
        return {k: _mapped(v, of, kind) for k, v in value.items()}
    return value


_aten = torch.ops.aten
_PARTS = (_aten.select.int, _aten.slice.Tensor, _aten.detach.default, _aten.alias.default)  # for any memory


def _views_of(func, x: LazyLogits, args, kwargs):
    made = func(_meta(x), *args, **kwargs)
    several = isinstance(made, (list, tuple))
    likes = list(made) if several else [made]
    forms = _views.forms(func, x._form, x.shape, args, kwargs, len(likes))
    reals: list[Optional[Tensor]] = [None] * len(likes)
    if x._storage.real is not None:
        real = func(x._real(), *args, **kwargs)
        reals = list(real) if several else [real]
    views = []
    for k, (like, form, real) in enumerate(zip(likes, forms, reals)):

        def step(t, k=k):
            view = func(t, *args, **kwargs)
            return view[k] if several else view

        view = LazyLogits(x._storage, form, like, x.device, (*x._chain, step))
        view._view = real
        if form is None and func in _PARTS:
            view._of = x
        views.append(view)
    return type(made)(views) if several else views[0]


def _kept(func, args, kwargs) -> Optional[LazyLogits]:
    """Returns the lazy result of func, or None if it has none."""
    rule = _copies.RULES.get(func)
    if rule is None:
        return None
    x, *rest = args
    if not isinstance(x, LazyLogits) and func in _copies.COMMUTE and isinstance(rest[0], LazyLogits):
        x, rest = rest[0], [x, *rest[1:]]
    if not isinstance(x, LazyLogits) or x._form is None or x._storage.real is not None:
        return None
    if func is not torch.ops.aten.add.Tensor and any(isinstance(a, LazyLogits) for a in rest):
        return None
    form = rule(x._form, x, func, rest, kwargs)
    return None if form is None else promise(form, _like(func, x, form, rest, kwargs), x.device)


def _like(func, x: LazyLogits, form: Form, rest, kwargs) -> Tensor:
    """Returns the result of func on x as a meta tensor."""
    if func in _copies.PICKS:  # their shapes depend on the indices' values
        rest = _copies.positions(rest)
        return func(_meta(x), *torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to("meta"), rest))
    rest = [_meta(a) if isinstance(a, LazyLogits) else
            a.detach().to("meta") if isinstance(a, Tensor) and (a.dim() or a.device.type != "cpu") else a for a in rest]
    return func(_meta(x), *rest, **{**kwargs, "device": torch.device("meta")} if "device" in kwargs else kwargs)


def _write(func, args, kwargs):
    written = _written(func)
    wrappers: dict[int, LazyLogits] = {}

    def real(x: LazyLogits) -> Tensor:
        found = x._real()
        wrappers[id(found)] = x
        return found

    def one(key, value):
        return _mapped(value, real if key in written else LazyLogits._numbers)

    result = func(*[one(k, a) for k, a in enumerate(args)], **{k: one(k, a) for k, a in kwargs.items()})
    if torch.Tag.inplace_view in func.tags:
        with no_dispatch():
            func(*args, **kwargs)

    if func._schema.name.startswith("aten::_foreach_"):  # autograd does not bump their versions
        torch.autograd.graph.increment_version(list(wrappers.values()))

    def wrapper(value):
        return wrappers.get(id(value), value) if isinstance(value, Tensor) else value

    return type(result)(wrapper(r) for r in result) if isinstance(result, (list, tuple)) else wrapper(result)


# --- Functions, above autograd.

RULES: dict[Any, Callable] = {}  # each takes the function's arguments and may return NotImplemented


@_warnings.names_operation
def call(func, args, kwargs):
    rule = RULES.get(func)
    if rule is not None:
        result = rule(*args, **kwargs)
        if result is not NotImplemented:
            return result
    with torch._C.DisableTorchFunctionSubclass(), _hooks_for_numbers():
        return func(*args, **kwargs)


top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_tracing: None)


def _hooks_for_numbers():
    """Wraps the caller's hooks of saved tensors, so that they see only computed values. Lazy values bypass them."""
    hooks = top_hooks(True)
    if hooks is None:
        return contextlib.nullcontext()

    def pack(t: Tensor):
        if isinstance(t, LazyLogits):
            if not t.is_real:
                return t, False
            t = t._real()
        with torch._C._EnableTorchFunction():
            return hooks[0](t), True

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: hooks[1](kept[0]) if kept[1] else kept[0])


def _ordinarily(func):
    """Returns the rule of a function that needs a pointer to memory."""

    def rule(*args, **kwargs):
        with torch.enable_grad():  # some functions reject a view that requires a gradient in any mode, such as numpy()
            args, kwargs = (_mapped(a, lambda x: x._ordinary(), Lazy) for a in (args, kwargs))
        return func(*args, **kwargs)

    return rule


def _unless_real(answer):
    """Returns the rule of a query about memory, which lazy logits do not have."""
    return lambda x, *args, **kwargs: answer if isinstance(x, LazyLogits) and not x.is_real else NotImplemented


def _deepcopy(x, memo):
    if not isinstance(x, Lazy) or not x.is_leaf:
        return NotImplemented
    if not isinstance(x, LazyLogits):
        return x._ordinary().__deepcopy__(memo)
    return x._real().detach().requires_grad_(x.requires_grad).__deepcopy__(memo)


def _format(x, spec):
    return format(x.item(), spec) if isinstance(x, Lazy) and x.dim() == 0 else NotImplemented


_NEED_MEMORY = (
    "data_ptr const_data_ptr numpy __array__ tolist untyped_storage storage _typed_storage __dlpack__ share_memory_ is_shared "
    "apply_ map_ map2_"
).split()
RULES.update({getattr(Tensor, name): _ordinarily(getattr(Tensor, name)) for name in _NEED_MEMORY if hasattr(Tensor, name)})
RULES[torch.utils.dlpack.to_dlpack] = _ordinarily(torch.utils.dlpack.to_dlpack)
RULES[Tensor.__deepcopy__] = _deepcopy
RULES[Tensor.__format__] = _format
RULES[Tensor.is_pinned] = _unless_real(False)
RULES[Tensor.record_stream] = _unless_real(None)
