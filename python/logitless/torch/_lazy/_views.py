"""Views of lazy logits: the same view of the hidden states, if the vocabulary's dimension is preserved.

Each rule takes the form of the viewed value, its shape and the operation's arguments. It returns the view's form, a
list for several views, or None if the view does not select rows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Callable

import torch

from ._form import Form

aten = torch.ops.aten


def _positive(dim: int, dims: int) -> int:
    return dim + dims if dim < 0 else dim


def _view(form: Form, shape, size):
    size = list(size)
    if -1 in size:
        rest = math.prod(s for s in size if s != -1)
        size[size.index(-1)] = math.prod(shape) // rest if rest else 0
    # The vocabulary's dimension is preserved if the sizes before it and after it have the same products.
    before, after = math.prod(shape[: form.vocab]), math.prod(shape[form.vocab + 1 :])
    entries = shape[form.vocab]
    for k, s in enumerate(size):
        if s == entries and math.prod(size[:k]) == before and math.prod(size[k + 1 :]) == after:
            lead, trail, vocab = size[:k], size[k + 1 :], form.vocab
            return form.with_rows(lambda h: h.reshape(*lead, h.shape[vocab], *trail), k)
    return None


def _slice(form: Form, shape, dim=0, start=None, end=None, step=1):
    dim = _positive(dim, len(shape))
    chosen = slice(start, end, step)
    if dim != form.vocab:
        index = (slice(None),) * dim + (chosen,)
        return form.with_rows(lambda h: h[index], form.vocab)
    first, last, step = chosen.indices(shape[dim])
    if (first, last, step) == (0, shape[dim], 1):
        return form
    if step != 1 or form.log or form.shift is not None or last <= first:
        return None
    origin = form.vocab_range[0] if form.vocab_range is not None else 0
    return replace(form, vocab_range=(origin + first, origin + last))


def _select(form: Form, shape, dim, index):
    dim = _positive(dim, len(shape))
    if dim == form.vocab:
        return None
    return form.with_rows(lambda h: h.select(dim, index), form.vocab - (dim < form.vocab))


def _permute(form: Form, shape, dims):
    dims = [_positive(d, len(shape)) for d in dims]
    return form.with_rows(lambda h: h.permute(dims), dims.index(form.vocab))


def _transpose(form: Form, shape, a, b):
    dims = list(range(len(shape)))
    a, b = _positive(a, len(shape)), _positive(b, len(shape))
    dims[a], dims[b] = dims[b], dims[a]
    return _permute(form, shape, dims)


def _t(form: Form, shape):
    return form if len(shape) < 2 else _transpose(form, shape, 0, 1)


def _unsqueeze(form: Form, shape, dim):
    dim = _positive(dim, len(shape) + 1)
    return form.with_rows(lambda h: h.unsqueeze(dim), form.vocab + (dim <= form.vocab))


def _squeeze(form: Form, shape, dims=None):
    if dims is None:
        dims = range(len(shape))
    dims = [_positive(d, len(shape)) for d in ([dims] if isinstance(dims, int) else dims)]
    gone = [d for d in dims if shape[d] == 1]
    if form.vocab in gone:
        return None
    return form.with_rows(lambda h: h.squeeze(gone) if gone else h, form.vocab - sum(d < form.vocab for d in gone))


def _expand(form: Form, shape, size, implicit=False):
    size, added = list(size), len(size) - len(shape)
    vocab = form.vocab + added
    size[vocab] = -1
    return form.with_rows(lambda h: h.expand(size), vocab)


def _split(form: Form, shape, size, dim=0):
    dim = _positive(dim, len(shape))
    total = shape[dim]
    if isinstance(size, int):
        size = [min(size, total - first) for first in range(0, total, size)] if size else [0]
    firsts = [sum(size[:k]) for k in range(len(size))]
    return [_slice(form, shape, dim, first, first + n) for first, n in zip(firsts, size)]


def _unbind(form: Form, shape, dim=0):
    return [_select(form, shape, dim, k) for k in range(shape[_positive(dim, len(shape))])]


def _detach(form: Form, shape):
    return replace(form, detached=True)


def _same(form: Form, shape):
    return form


RULES: dict[Any, Callable] = {
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.expand.default: _expand,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _unbind,
    aten.detach.default: _detach,
    aten.alias.default: _same,
}


def forms(func, form: Form | None, shape, args, kwargs, count: int) -> list[Form | None]:
    """Returns the forms of the ``count`` views that func makes of a value of this form and shape."""
    rule = RULES.get(func)
    found = None if form is None or rule is None else rule(form, tuple(shape), *args, **kwargs)
    return found if isinstance(found, list) else [found] * count
