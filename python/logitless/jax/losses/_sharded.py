"""Divergences of a vocabulary that is sharded over a mesh: each device computes over its own vocabulary entries, and the
devices exchange log-sum-exps and sums of each token, and the gradient of hidden states. The teacher's shards of another
vocabulary go round the devices, which take the rows of their entries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ..._losses import distillation as shared
from ..._losses.head import divisor_of
from ..._losses.options import Head, choice, number
from .. import _arguments, _xp as xp, sharding as meshes
from .._axes import axes_of, varying
from ..head import GRADIENTS, all_gradients, type_of, wanted_gradients
from ..loss import linear_cross_entropy
from ._formulas import chunked

_STUDENT, _TEACHER = (tuple(of + part for part in ("hidden", "weight", "bias")) for of in ("", "teacher_"))
_UNCOUNTED = 1e4  # a normaliser of ignored tokens, whose probabilities are then 0


class _Call(NamedTuple):
    axes: tuple[str, ...]  # of the vocabulary
    form: shared.Form
    memory_budget: Any
    executor: str

    def run(self, what: str, given: dict[str, jax.Array], form: shared.Form):
        return chunked(what, self.memory_budget, self.executor)(given, tuple(form))

    def whole(self, local: jax.Array, counts: jax.Array) -> jax.Array:
        """Returns the log-sum-exps of the full vocabulary, from those of this shard."""
        top = jax.lax.pmax(local, self.axes)
        return jnp.where(counts, top + jnp.log(jax.lax.psum(jnp.exp(local - top), self.axes)), _UNCOUNTED)


def _given(inputs: dict, fixed: dict) -> dict[str, jax.Array]:
    return {name: a for name, a in {**inputs, **fixed}.items() if a is not None}


def _forward(call: _Call, inputs: dict, fixed: dict) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns the divergences [N], and STATISTICS."""
    f, given = call.form, _given(inputs, fixed)
    counts = given["rows"] != 0
    targets = jnp.where(counts, 0, -100)
    normalisers = []
    for name, cap, scale in (("", f.softcap, f.scale), ("teacher_", f.teacher_softcap, f.teacher_scale)):
        if name and "teacher_mask" in given:
            of_teacher = {part: a for part, a in given.items() if part.startswith(name)}
            normalisers.append(call.whole(call.run("normaliser", varying(of_teacher, axes_of(*of_teacher.values())), f), counts))
            continue
        head = Head(-100, cap / f.temperature if cap else None, scale / f.temperature, call.memory_budget)
        operands = given[name + "hidden"], given[name + "weight"], targets, given.get(name + "bias")
        normalisers.append(call.whole(xp.log_probs_and_lse(*operands, head)[1], counts))
    of = varying({**given, **dict(zip(shared.STATISTICS, normalisers))}, axes_of(*given.values()))
    loss, own, mass = jax.lax.psum(call.run("divergence_sums", of, f), call.axes)
    return loss, (*normalisers, jnp.where(counts, own / jnp.where(counts, mass, 1.0), 0.0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _each(call: _Call, inputs: dict, fixed: dict) -> jax.Array:
    """inputs: hidden, weight and bias of this shard. fixed: the teacher's, and rows [N], 0 for ignored tokens."""
    return _forward(call, inputs, fixed)[0]


def _each_forward(call: _Call, inputs, fixed):
    values = {name: None if p is None else p.value for name, p in inputs.items()}
    others = {name: None if p is None else p.value for name, p in fixed.items()}
    loss, statistics = _forward(call, values, others)
    return loss, (wanted_gradients(inputs), values, others, statistics)


def _each_backward(call: _Call, saved, cotangent):
    wanted, inputs, fixed, statistics = saved
    types, axes = {name: type_of(value) for name, value in inputs.items()}, axes_of(inputs["hidden"])
    leaves = {of: inputs[of] for name, of in GRADIENTS.items() if wanted[name].size > 0}
    found = {}
    if leaves and not isinstance(cotangent, SymbolicZero):
        more = {**dict(zip(shared.STATISTICS, statistics)), "rows": cotangent}
        others = {**_given(inputs, fixed), **varying(more, axes)}
        total = lambda by: call.run("divergence", {**others, **by}, call.form._replace(summed=True))  # noqa: E731
        made = jax.grad(total)(leaves)
        found = {name: made[of] for name, of in GRADIENTS.items() if of in made}
    return all_gradients(found, types, axes), None


_each.defvjp(_each_forward, _each_backward, symbolic_zeros=True)
# A shard_map that runs eagerly does not accept a custom_vjp itself.
_jitted = jax.jit(_each, static_argnums=0)


def _rows_of_ids(sharding: meshes.Sharding, a: dict[str, jax.Array | None]) -> dict[str, jax.Array]:
    """Returns the teacher's rows of this shard's entries, and the mask of entries that it has not. teacher_ids: of this
    shard's entries. Each shard of the teacher is on one device at a time."""
    axes, size = sharding._vocab, sharding._size(sharding._vocab)
    ids = _arguments.indices("teacher_ids", a["teacher_ids"])
    shards = {name: jax.lax.stop_gradient(a[name]) for name in _TEACHER[1:] if a[name] is not None}
    rows = shards["teacher_weight"].shape[0]
    varies = axes_of(ids, *shards.values())
    shards = varying(shards, varies)
    found = {name: jnp.zeros((ids.shape[0], *x.shape[1:]), x.dtype) for name, x in shards.items()}

    def taken(shards, first, found):
        index = ids - first
        here, index = (index >= 0) & (index < rows), jnp.clip(index, 0, rows - 1)
        return {
            name: jnp.where(here.reshape(-1, *(1,) * (x.ndim - 1)), jnp.take(x, index, axis=0), found[name])
            for name, x in shards.items()
        }

    def step(_, carry):
        shards, first, found = carry
        # The first row goes along, since ppermute counts devices in the order of the mesh's axes.
        moved = jax.lax.ppermute((shards, first), axes, [(r, (r - 1) % size) for r in range(size)])
        return *moved, taken(shards, first, found)

    first = varying({"": jax.lax.axis_index(axes) * rows}, varies)[""]
    found = taken(*jax.lax.fori_loop(0, size - 1, step, (shards, first, varying(found, varies))))
    mask = jnp.where(ids < 0, shared.NONE, jnp.where(ids >= size * rows, jnp.nan, 0.0)).astype(jnp.float32)
    return {**found, "teacher_mask": mask}


def divergence(loss: Callable[..., shared.Call], arrays: tuple[Any, ...], options: dict[str, Any]) -> jax.Array | None:
    """Returns the loss on a mesh, or None without one. loss: a function of ``_losses/distillation.py``."""
    hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias = arrays
    sharding = options["sharding"]
    sharding = meshes.of_types(hidden, weight) if sharding is None else sharding
    if sharding is None:
        return None
    hard, soft = (number(name, options[name], 0.0) for name in ("weight_hard_loss", "weight_soft_loss"))
    choice("reduction", options["reduction"], ("none", "mean", "sum"))
    plain = {**options, "reduction": "none", "normalizer": None, "weight_hard_loss": 0.0, "weight_soft_loss": 1.0}
    if hard and options["targets"] is None:
        raise ValueError(f"targets: expected them with weight_hard_loss={hard}, got None")
    given = dict(
        hidden=hidden, weight=weight, bias=bias, teacher_hidden=teacher_hidden, teacher_weight=teacher_weight,
        teacher_bias=teacher_bias, targets=options["targets"], teacher_ids=options["teacher_ids"],
    )
    checked = meshes._checked(sharding, given)

    def function(a):
        of = {**plain, "targets": a["targets"], "all_vocab": checked["weight"].shape[0], "teacher_ids": a["teacher_ids"]}
        if sharding._vocab and a["teacher_ids"] is not None:
            a, of = {**a, **_rows_of_ids(sharding, a)}, {**of, "teacher_ids": None}
            of["teacher_mask"] = a["teacher_mask"]
        call = loss(xp, *(a[name] for name in (*_STUDENT[:2], *_TEACHER[:2], _STUDENT[2], _TEACHER[2])), **of)
        rows = call.given["rows"]
        local = {**call.given, "rows": jnp.where(rows != 0, 1.0, 0.0)}
        of_shard = _Call(sharding._vocab, call.form, call.memory_budget, call.executor)
        if sharding._vocab:
            local = varying(local, axes_of(*local.values()))
            inputs = {name: local.pop(name, None) for name in _STUDENT}
            each = _jitted(of_shard, inputs, local)
        else:
            each = of_shard.run("divergence", local, call.form)
        each = jnp.where(rows != 0, each * rows, 0.0)
        return (), (each.reshape(call.lead), jnp.where(rows != 0, 1.0, 0.0).reshape(call.lead))

    each, valid = sharding._map(function, checked)[1]
    each = soft * each
    if hard:
        each = each + hard * linear_cross_entropy(
            hidden, weight, options["targets"], bias, reduction="none", ignore_index=options["ignore_index"],
            softcap=options["softcap"], logit_scale=options["logit_scale"], memory_budget=options["memory_budget"],
            sharding=sharding,
        )
    if options["reduction"] == "none":
        return each
    divisor = divisor_of(xp, options["reduction"], options["normalizer"], valid)
    return each.sum() if divisor is None else each.sum() / divisor
