"""The calls of ``_ffi`` in JAX's own operations, for devices without a kernel of the library.

Tokens are processed in chunks, and the vocabulary in blocks if the logits of a chunk exceed the budget. Shapes are
static and loops are scans. With one block a call takes three GEMMs, and sums d_weight over the chunks in float32. With
several blocks it takes four: the second loop recomputes the logits, and finishes d_weight block by block.

Exponentials are relative to the largest logit of a token, whose own exponential, 1, is left out of the sum ``rest``. The
log-sum-exp less that logit is log1p(rest), so that a confident token keeps the digits of its loss and gradient.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._options import LossOptions, check_terms, weights_of
from .._token_loss import entry_weights, lse_square, target_shares, token_shares
from ._arguments import DEFAULT_PRECISION, sum_dtype
from ._axes import axes_of, varying
from ._portable_plan import GRADIENTS, HOST_BLOCK, Outputs, Plan, on_host, plan

Arrays = Mapping[str, jax.Array]

_FAR = -1e30  # a finite number below any difference of logits


def call(
    function: str, options: Any, inputs: Mapping[str, jax.Array | None], outputs: Outputs
) -> dict[str, jax.Array]:
    """Runs a function of the C ABI, as ``_ffi.call`` does. A token with a target outside [0, V) has outputs of NaN, as a
    mean or sum with it, and the gradients of an ignored one.

    Extra memory: ``plan``, within options.memory_budget, but for copies that a backend makes of operands of products.
    vmap runs one example after another.
    """
    arrays = {name: array for name, array in inputs.items() if array is not None}
    arrays = varying(arrays, axes_of(*arrays.values()))
    names = tuple(arrays)
    _check(options, arrays)

    def run(*values: jax.Array) -> tuple[jax.Array, ...]:
        found = _run(function, options, dict(zip(names, values)), outputs)
        return tuple(found[name].astype(dtype).reshape(shape) for name, (shape, dtype) in outputs.items())

    def refuse(*_: Any) -> Any:
        raise ValueError(f"logitless_{function}: the call in JAX's operations cannot be differentiated once more")

    once = jax.custom_vjp(jax.custom_batching.sequential_vmap(run))
    once.defvjp(refuse, refuse)
    return dict(zip(outputs, once(*arrays.values())))


def _check(options: Any, arrays: Arrays) -> None:
    check_terms(options)
    if arrays["weight"].shape[0] == 0:
        raise ValueError(f"weight: {list(arrays['weight'].shape)} has no rows")
    if not 0.0 < abs(options.logit_scale) < float("inf"):
        raise ValueError(f"logit_scale: expected a finite number other than 0, got {options.logit_scale:g}")
    if options.precision in ("tf32", "bf16x3"):
        if jax.default_backend() != "gpu":
            raise ValueError(f"precision: {options.precision} is for a GPU, the device is a {jax.default_backend().upper()}")
        if arrays["hidden"].dtype != jnp.float32:
            raise ValueError(f"precision: {options.precision} is for float32, got {arrays['hidden'].dtype.name}")


def _precision(name: str, dtype: Any) -> Any:
    """Returns the precision of products for dot_general."""
    if dtype == jnp.bfloat16:
        return lax.Precision.DEFAULT
    if name == "tf32":
        return lax.DotAlgorithmPreset.TF32_TF32_F32
    if name == "bf16x3":
        return lax.DotAlgorithmPreset.BF16_BF16_F32_X3
    return None if name == DEFAULT_PRECISION else lax.Precision.HIGHEST


def _product(precision: Any, one: jax.Array, other: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """Returns the matrix product over a dimension of each, in the dtype of sums."""
    dimensions = (((contracted[0],), (contracted[1],)), ((), ()))
    return lax.dot_general(one, other, dimensions, precision, preferred_element_type=sum_dtype(one.dtype))


# --- Windows of arrays.


def _cut(array: jax.Array, start: Any, size: int) -> jax.Array:
    return array if array.shape[0] == size else lax.dynamic_slice_in_dim(array, start, size)


def _put(array: jax.Array, start: Any, rows: jax.Array) -> jax.Array:
    return rows if array.shape == rows.shape else lax.dynamic_update_slice_in_dim(array, rows, start, 0)


def _add(array: jax.Array, start: Any, rows: jax.Array) -> jax.Array:
    return _put(array, start, (_cut(array, start, rows.shape[0]) + rows).astype(array.dtype))


def _windows(total: int, size: int, body: Callable[..., Any], carry: Any) -> Any:
    """Runs ``carry = body(start, fresh, carry)`` for windows of ``size`` that cover ``total`` elements. The last one may
    overlap the one before it; fresh [size] marks elements that no window had before, and None stands for all of them.
    """
    count = -(-total // size)
    if count <= 1:
        return body(0, None, carry) if total else carry

    def step(carry: Any, index: jax.Array) -> tuple[Any, None]:
        start = jnp.minimum(index * size, total - size)
        fresh = None if total % size == 0 else start + jnp.arange(size, dtype=jnp.int32) >= index * size
        return body(start, fresh, carry), None

    return lax.scan(step, carry, jnp.arange(count, dtype=jnp.int32))[0]


# --- Tokens.


class _State(NamedTuple):
    """Sums over the vocabulary entries that a token has seen [C]; the initial state has seen none."""

    top: jax.Array  # the largest logit
    rest: jax.Array  # sum of exp(z - top), less 1
    target: jax.Array  # [C, K]: logits of the targets
    slope: jax.Array | None  # sum of exp(z - top) (z - top), which the entropy needs
    square: jax.Array | None  # sum of exp(z - top) (z - top)^2, which the variance of the logits needs
    spread: jax.Array | None  # sum of w (z - top) with the logit weights w
    mass: jax.Array | None  # sum of w
    argmax: jax.Array | None


class _Coefficients(NamedTuple):
    """Gradient coefficients of tokens [N], or [N, K] of targets; None is 0.

    dz_j = p_j (alpha + beta log p_j) + gamma w_j + sum_k delta_k [j = id_k], alpha = constant + by_lse lse + beta H
    """

    constant: jax.Array
    by_lse: jax.Array | None
    beta: jax.Array | None
    gamma: jax.Array | None
    delta: jax.Array
    target_gamma: jax.Array | None  # [N, K]: gamma w at the targets


class _Call(NamedTuple):
    """Arrays and options of a call, in the form of the loops."""

    options: Any
    hidden: jax.Array  # [N, D]
    weight: jax.Array  # [V, D]
    bias: jax.Array | None
    logit_weights: jax.Array | None  # [V]; None: 1
    inverse: jax.Array | None  # [N]: 1 / temperature of each token
    ids: jax.Array  # [N, K] int32; -1 if ignored
    active: jax.Array  # [N]: some target is not ignored
    dtype: Any  # of logits and sums
    precision: Any
    needs: frozenset[str]  # "entropy", "variance", "weighted", "argmax"


def _weights(c: _Call, start: Any, block: int) -> jax.Array:
    return jnp.ones(block, c.dtype) if c.logit_weights is None else _cut(c.logit_weights, start, block)


def _tokens(c: _Call, start: Any, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns hidden [C, D], zeros for ignored tokens, and target ids [C, K]."""
    x = _cut(c.hidden, start, count)
    return jnp.where(_cut(c.active, start, count)[:, None], x, jnp.zeros((), x.dtype)), _cut(c.ids, start, count)


def _inverse(c: _Call, token: Any, count: int) -> jax.Array | float:
    """Returns 1 / temperature of tokens, [C, 1]."""
    return 1.0 if c.inverse is None else _cut(c.inverse, token, count)[:, None]


def _rows(c: _Call, start: Any, block: int) -> jax.Array:
    """Returns rows of weight as an operand of products."""
    if c.weight.dtype == c.hidden.dtype:
        return _cut(c.weight, start, block)
    # XLA's CPU compiler casts all of what a 16-bit slice is of, but not integers.
    w = _cut(lax.bitcast_convert_type(c.weight, jnp.uint16), start, block)
    return lax.bitcast_convert_type(w, c.weight.dtype).astype(c.hidden.dtype)


def _logits(c: _Call, x: jax.Array, token: Any, start: Any, block: int) -> jax.Array:
    """Returns the logits [C, block] of tokens x [C, D], the first of which is ``token``, from vocabulary entry ``start``
    on."""
    u = _product(c.precision, x, _rows(c, start, block), (1, 1))
    if c.bias is not None:
        u = u + _cut(c.bias, start, block)
    if c.options.logit_scale != 1.0:
        u = u * c.options.logit_scale
    u = c.options.softcap * jnp.tanh(u / c.options.softcap) if c.options.softcap else u
    return u if c.inverse is None else u * _inverse(c, token, x.shape[0])


def _hits(ids: jax.Array, start: Any, block: int) -> jax.Array:
    """Returns [C, block]: whether an entry is the one target of a token."""
    return ids - start == lax.broadcasted_iota(jnp.int32, (ids.shape[0], block), 1)


def _empty(c: _Call, count: int) -> _State:
    """Returns the initial states of ``count`` tokens."""
    full = lambda value, *shape: jnp.full((count, *shape), value, c.dtype)  # noqa: E731
    weighted = [full(0.0) if "weighted" in c.needs else None] * 2
    slope, square = (full(0.0) if name in c.needs else None for name in ("entropy", "variance"))
    argmax = jnp.zeros(count, jnp.int32) if "argmax" in c.needs else None
    state = _State(full(-jnp.inf), full(-1.0), full(0.0, c.ids.shape[1]), slope, square, *weighted, argmax)
    return _State(**varying(state._asdict(), axes_of(c.hidden)))


def _shift(top: jax.Array) -> jax.Array:
    """Returns the reference of exponentials; 0 where all entries are masked."""
    return jnp.where(top == -jnp.inf, 0.0, top)[:, None]


def _merged(c: _Call, state: _State, ids: jax.Array, z: jax.Array, start: Any, fresh: jax.Array | None) -> _State:
    """Returns the states with the logits z [C, block] of further vocabulary entries; fresh [block] marks those to add."""
    block = z.shape[1]
    if fresh is not None:
        z = jnp.where(fresh, z, -jnp.inf)
    top = z.max(1)
    shift = _shift(top)
    e = jnp.where(z < shift, jnp.exp(z - shift), 0.0)
    rest = e.sum(1) + (jnp.sum(z == shift, 1, dtype=c.dtype) - 1.0)
    if ids.shape[1] == 1:
        hit = _hits(ids, start, block)
        seen, target = hit.any(1, keepdims=True), jnp.where(hit, z, 0.0).sum(1, keepdims=True)
    else:
        local = ids - start
        seen = (local >= 0) & (local < block)
        target = jnp.take_along_axis(z, jnp.clip(local, 0, block - 1), 1)
    if fresh is not None:  # the block before has seen it
        seen = seen & jnp.where(seen, jnp.take(fresh, jnp.clip(ids - start, 0, block - 1)), False)
    largest = jnp.maximum(state.top, top)
    d_old, d_new = (jnp.maximum(jnp.where(t == largest, 0.0, t - largest), _FAR) for t in (state.top, top))
    old, new = (1.0 + state.rest) * jnp.exp(d_old), (1.0 + rest) * jnp.exp(d_new)
    slope, square, spread, mass, argmax = state.slope, state.square, state.spread, state.mass, state.argmax
    if slope is not None:
        each = jnp.where(e == 0.0, 0.0, e * (z - shift))
        here = each.sum(1)
    if square is not None:
        squares = jnp.where(e == 0.0, 0.0, each * (z - shift)).sum(1)
        near, far = (jnp.maximum(d, -1e15) for d in (d_new, d_old))  # their squares are finite
        square = jnp.exp(far) * (square + 2.0 * far * slope) + far * far * old
        square = square + jnp.exp(near) * (squares + 2.0 * near * here) + near * near * new
    if slope is not None:
        slope = slope * jnp.exp(d_old) + d_old * old + here * jnp.exp(d_new) + d_new * new
    if spread is not None:
        w = _weights(c, start, block)
        w = w if fresh is None else jnp.where(fresh, w, 0.0)
        here = jnp.where(w == 0.0, 0.0, w * (z - shift)).sum(1)
        spread, mass = spread + mass * d_old + here + w.sum() * d_new, mass + w.sum()
    if argmax is not None:
        argmax = jnp.where(top > state.top, start + jnp.argmax(z, 1).astype(jnp.int32), argmax)
    both = jnp.where(state.top >= top, state.rest + new, rest + old)
    return _State(largest, both, jnp.where(seen, target, state.target), slope, square, spread, mass, argmax)


class _Softmax(NamedTuple):
    """Numbers of a token's softmax [C] from its state."""

    log_sum: jax.Array  # lse - top; NaN where a logit is +inf
    lse: jax.Array
    log_prob: jax.Array  # [C, K]
    entropy: jax.Array | None
    variance: jax.Array | None  # of the logits


def _softmax(state: _State) -> _Softmax:
    infinite = state.top == jnp.inf
    log_sum = jnp.where(infinite, jnp.nan, jnp.log1p(state.rest))
    lse = jnp.where(infinite, jnp.inf, state.top + log_sum)
    entropy = None if state.slope is None else log_sum - state.slope / (1.0 + state.rest)
    variance = None
    if state.square is not None:
        variance = state.square / (1.0 + state.rest) - (state.slope / (1.0 + state.rest)) ** 2
    return _Softmax(log_sum, lse, (state.target - state.top[:, None]) - log_sum[:, None], entropy, variance)


def _logit_gradients(
    c: _Call, g: _Coefficients, state: _State, ids: jax.Array, z: jax.Array, token: Any, start: Any,
    fresh: jax.Array | None,
) -> jax.Array:
    """Returns the gradients [C, block] of the products hidden weight^T, the first of which is of ``token``."""
    softmax = _softmax(state)
    alpha = g.constant
    if g.by_lse is not None:
        alpha = alpha + jnp.where(g.by_lse == 0.0, 0.0, g.by_lse * softmax.lse)
    if g.beta is not None:
        alpha = alpha + g.beta * softmax.entropy
    log_p = (z - _shift(state.top)) - softmax.log_sum[:, None]
    p = jnp.exp(log_p)
    dz = p * alpha[:, None]
    # The target's own coefficient, without the cancellation of its p against 1.
    same = jnp.where(ids[:, :, None] == ids[:, None, :], g.delta[:, None, :], 0.0).sum(2)
    at_target = alpha[:, None] * jnp.expm1(softmax.log_prob) + (alpha[:, None] + same)
    if g.beta is not None:
        dz = dz + jnp.where(p == 0.0, 0.0, p * (g.beta[:, None] * log_p))
        target_p = jnp.exp(softmax.log_prob)
        at_target = at_target + jnp.where(target_p == 0.0, 0.0, target_p * (g.beta[:, None] * softmax.log_prob))
    if g.gamma is not None:
        dz = dz + g.gamma[:, None] * _weights(c, start, z.shape[1])
        at_target = at_target + g.target_gamma
    if ids.shape[1] == 1:
        dz = jnp.where(_hits(ids, start, z.shape[1]), at_target, dz)
    else:
        local = jnp.where(ids >= start, ids - start, z.shape[1])  # those of other blocks are dropped
        dz = dz.at[jnp.arange(z.shape[0], dtype=jnp.int32)[:, None], local].set(at_target, mode="drop")
    cap, scale, inverse = c.options.softcap, c.options.logit_scale, _inverse(c, token, z.shape[0])
    if cap:
        u = z / (cap * inverse)
        dz = dz * ((1.0 - u) * (1.0 + u))
    dz = dz if scale == 1.0 else dz * scale
    dz = dz if c.inverse is None else dz * inverse
    return dz if fresh is None else jnp.where(fresh, dz, 0.0)


def _unit(c: _Call, g: _Coefficients) -> jax.Array | None:
    """Returns the unit of float16 gradients of logits, with which the largest ones are about 2^9; None: 1."""
    if c.hidden.dtype != jnp.float16:
        return None
    sizes = [jnp.abs(part).max() for part in (g.constant, g.by_lse, g.beta, g.gamma, g.delta) if part is not None]
    size = sum(sizes) * abs(c.options.logit_scale) * (1.0 if c.inverse is None else c.inverse.max())
    return jnp.where((size > 0.0) & (size < jnp.inf), size, 1.0) * 2.0**-9


def _add_products(c: _Call, total: jax.Array, da: jax.Array, x: jax.Array, unit: jax.Array | None) -> jax.Array:
    """Returns total [block, D] + da^T x; on the CPU, which stores products before it adds them, in parts."""
    block = total.shape[0]
    size = min(block, HOST_BLOCK) if on_host() else block

    def part(start, fresh, total):
        columns = da if size == block else lax.dynamic_slice_in_dim(da, start, size, 1)
        columns = columns if fresh is None else jnp.where(fresh, columns, jnp.zeros((), columns.dtype))
        products = _product(c.precision, columns, x, (0, 0))
        return _add(total, start, products if unit is None else products * unit)

    return _windows(block, size, part, total)


def _with_gradients(
    c: _Call, sums: dict[str, jax.Array], g: _Coefficients, state: _State, start: Any, vocab_start: Any, block: int,
    fresh: jax.Array | None, vocab_fresh: jax.Array | None, z: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Returns the gradients with those that a chunk of tokens and a block of the vocabulary have by each other. sums:
    d_hidden [N, D], d_weight [block, D], d_bias [block], or some of them."""
    count = state.top.shape[0]
    x, ids = _tokens(c, start, count)
    g = _Coefficients(*(None if part is None else _cut(part, start, count) for part in g))
    if fresh is not None:
        rows = lambda part: jnp.where(fresh if part.ndim == 1 else fresh[:, None], part, 0.0)  # noqa: E731
        g = _Coefficients(*(None if part is None else rows(part) for part in g))
    z = _logits(c, x, start, vocab_start, block) if z is None else z
    da = _logit_gradients(c, g, state, ids, z, start, vocab_start, vocab_fresh)
    unit = _unit(c, g)
    rounded = (da if unit is None else da / unit).astype(c.hidden.dtype)
    found = dict(sums)
    if "d_hidden" in sums:
        products = _product(c.precision, rounded, _rows(c, vocab_start, block), (1, 0))
        found["d_hidden"] = _add(sums["d_hidden"], start, products if unit is None else products * unit)
    if "d_weight" in sums:
        found["d_weight"] = _add_products(c, sums["d_weight"], rounded, x, unit)
    if "d_bias" in sums:
        found["d_bias"] = sums["d_bias"] + da.sum(0)
    return found


def _forward(c: _Call, sizes: Plan) -> _State:
    """Returns the states of all tokens."""
    tokens, vocab = c.hidden.shape[0], c.weight.shape[0]

    def chunk(start, _, states):
        x, ids = _tokens(c, start, sizes.chunk)

        def merge(vocab_start, fresh, state):
            z = _logits(c, x, start, vocab_start, sizes.block)
            return _merged(c, state, ids, z, vocab_start, fresh)

        state = _windows(vocab, sizes.block, merge, _empty(c, sizes.chunk))
        return jax.tree.map(lambda all_, some: _put(all_, start, some), states, state)

    return _windows(tokens, sizes.chunk, chunk, _empty(c, tokens))


def _dense(c: _Call, g: _Coefficients, sizes: Plan, outputs: Outputs) -> tuple[_State, dict[str, jax.Array]]:
    """Returns the states and the gradients, each logit computed once."""
    tokens, vocab = c.hidden.shape[0], c.weight.shape[0]
    names = tuple(name for name in GRADIENTS if name in outputs)
    dtypes = {name: c.dtype if name != "d_hidden" else outputs[name][1] for name in names}
    sums = {name: jnp.zeros(outputs[name][0], dtypes[name]) for name in names}

    def chunk(start, fresh, carry):
        states, sums = carry
        x, ids = _tokens(c, start, sizes.chunk)
        z = _logits(c, x, start, 0, vocab)
        state = _merged(c, _empty(c, sizes.chunk), ids, z, 0, None)
        sums = _with_gradients(c, sums, g, state, start, 0, vocab, fresh, None, z)
        return jax.tree.map(lambda all_, some: _put(all_, start, some), states, state), sums

    return _windows(tokens, sizes.chunk, chunk, (_empty(c, tokens), varying(sums, axes_of(c.hidden))))


def _recomputed(c: _Call, g: _Coefficients, states: _State, sizes: Plan, outputs: Outputs) -> dict[str, jax.Array]:
    """Returns the gradients, block by block of the vocabulary; d_weight is rounded with its block."""
    names = tuple(name for name in GRADIENTS if name in outputs)
    tokens, (vocab, dim) = c.hidden.shape[0], c.weight.shape
    axes = axes_of(c.hidden)
    of_block = {"d_weight": (sizes.block, dim), "d_bias": (sizes.block,)}

    def block(vocab_start, vocab_fresh, total):
        def chunk(start, fresh, sums):
            state = jax.tree.map(lambda part: _cut(part, start, sizes.chunk), states)
            return _with_gradients(c, sums, g, state, start, vocab_start, sizes.block, fresh, vocab_fresh)

        sums = {name: jnp.zeros(of_block[name], c.dtype) for name in names if name in of_block}
        sums = varying(sums, axes) | ({"d_hidden": total["d_hidden"]} if "d_hidden" in names else {})
        sums = _windows(tokens, sizes.chunk, chunk, sums)
        return {
            name: sums[name] if name == "d_hidden" else _add(total[name], vocab_start, sums[name]) for name in names
        }

    total = {name: jnp.zeros(outputs[name][0], c.dtype if name == "d_hidden" else outputs[name][1]) for name in names}
    return _windows(vocab, sizes.block, block, varying(total, axes))


# --- Calls.


class _Targets(NamedTuple):
    ids: jax.Array  # [N, K] int32; -1 if ignored or out of range
    valid: jax.Array  # [N, K]
    active: jax.Array  # [N]: some target is valid, and none is bad
    bad: jax.Array  # [N]


def _targets(targets: jax.Array, ignore_index: int, vocab: int) -> _Targets:
    y = targets if targets.ndim == 2 else targets[:, None]
    given = y != ignore_index
    bad = (given & ((y < 0) | (y >= vocab))).any(1)
    valid = given & ~bad[:, None]
    return _Targets(jnp.where(valid, y, -1).astype(jnp.int32), valid, valid.any(1), bad)


class _Loss(NamedTuple):
    """Terms of the cross entropy of tokens [N]."""

    share: jax.Array  # [N, K]: weights of the targets' negative log-probabilities
    token_weight: jax.Array  # 0 for ignored tokens
    divisor: jax.Array  # of a mean
    smoothing: float  # weight of each class's share
    class_total: jax.Array | float


def _loss(options: LossOptions, a: Arrays, y: _Targets, dtype: Any) -> _Loss:
    weights, vocab, ids, one = weights_of(a), a["weight"].shape[0], jnp.maximum(y.ids, 0), jnp.ones((), dtype)
    classes = entry_weights(weights)
    share = target_shares(jnp, weights, y.valid.astype(dtype), ids)
    token_weight = jnp.where(y.active, one if weights.token_weight is None else weights.token_weight, 0.0).astype(dtype)
    divisor = token_shares(jnp, weights, y.active, ids[:, 0], one).sum()
    if options.normalizer:
        divisor = jnp.full_like(divisor, options.normalizer)
    return _Loss(
        (1.0 - options.label_smoothing) * share, token_weight, divisor, options.label_smoothing / vocab,
        float(vocab) if classes is None else classes.sum(),
    )


def _loss_coefficients(c: _Call, options: LossOptions, a: Arrays, loss: _Loss) -> _Coefficients:
    if options.reduction == "none":
        upstream = a.get("grad_losses", jnp.ones((), c.dtype))
    else:
        upstream = 1.0 / jnp.where(loss.divisor == 0.0, 1.0, loss.divisor) if options.reduction == "mean" else 1.0
    g = jnp.where(loss.token_weight == 0.0, 0.0, loss.token_weight * upstream).astype(c.dtype)
    gamma = -g * loss.smoothing if loss.smoothing else None
    return _Coefficients(
        g * (loss.share.sum(1) + loss.smoothing * loss.class_total),
        2.0 * lse_square(options) * g if lse_square(options) else None, None, gamma, -g[:, None] * loss.share,
        _at_targets(c, gamma),
    )


def _at_targets(c: _Call, gamma: jax.Array | None) -> jax.Array | None:
    if gamma is None or c.logit_weights is None:
        return None if gamma is None else jnp.broadcast_to(gamma[:, None], c.ids.shape)
    return gamma[:, None] * jnp.take(c.logit_weights, jnp.maximum(c.ids, 0))


def _head_coefficients(c: _Call, a: Arrays, y: _Targets) -> _Coefficients:
    def of(name: str) -> jax.Array | None:
        value = a.get(f"cotangent_{name}")
        return None if value is None else jnp.where(y.active, value, 0.0).astype(c.dtype)

    def of_targets(name: str) -> jax.Array:
        value = a.get(f"cotangent_{name}")
        return jnp.zeros((), c.dtype) if value is None else jnp.where(y.valid, value.reshape(y.valid.shape), 0.0)

    lse, entropy, gamma = of("lse"), of("entropy"), of("weighted_logit_sum")
    by_log_prob = of_targets("log_prob")
    delta = jnp.broadcast_to(by_log_prob + of_targets("target_logit"), y.valid.shape).astype(c.dtype)
    constant = jnp.broadcast_to(by_log_prob, y.valid.shape).sum(1)
    constant = -constant if lse is None else lse - constant
    return _Coefficients(constant, None, None if entropy is None else -entropy, gamma, delta, _at_targets(c, gamma))


def _losses(options: LossOptions, state: _State, softmax: _Softmax, loss: _Loss) -> jax.Array:
    """Returns the weighted loss of each token [N]."""
    each = jnp.where(loss.share == 0.0, 0.0, -loss.share * softmax.log_prob).sum(1)
    if loss.smoothing:
        each = each + loss.smoothing * (loss.class_total * softmax.log_sum - state.spread)
    if lse_square(options):
        each = each + lse_square(options) * softmax.lse * softmax.lse
    return jnp.where(loss.token_weight == 0.0, 0.0, loss.token_weight * each)


def _run(function: str, options: Any, a: Arrays, outputs: Outputs) -> dict[str, jax.Array]:
    hidden, weight = a["hidden"], a["weight"]
    dtype = sum_dtype(hidden.dtype)
    y = _targets(a["targets"], options.ignore_index, weight.shape[0])
    smooth = function == "cross_entropy" and options.label_smoothing > 0.0
    needs = {
        "entropy": "entropy" in outputs or "cotangent_entropy" in a or "variance" in outputs,
        "variance": "variance" in outputs,
        "weighted": "weighted_logit_sum" in outputs or smooth and "loss" in outputs,
        "argmax": "argmax" in outputs,
    }
    inverse = 1.0 / a["temperature"].astype(dtype) if "temperature" in a else None
    c = _Call(
        options, hidden, weight, a.get("bias"), entry_weights(weights_of(a)) if smooth else a.get("vocab_weight"), inverse, y.ids,
        y.active, dtype, _precision(options.precision, hidden.dtype), frozenset(name for name, need in needs.items() if need),
    )
    casts = weight.dtype != hidden.dtype
    sizes = plan(*hidden.shape, weight.shape[0], hidden.dtype, outputs, options.memory_budget, on_host(), casts)
    loss = _loss(options, a, y, dtype) if function == "cross_entropy" else None
    found: dict[str, jax.Array] = {}
    if any(name in outputs for name in GRADIENTS):
        g = _head_coefficients(c, a, y) if loss is None else _loss_coefficients(c, options, a, loss)
        if sizes.block == weight.shape[0]:
            state, found = _dense(c, g, sizes, outputs)
        else:
            state = _forward(c, sizes)
            found = _recomputed(c, g, state, sizes, outputs)
    else:
        state = _forward(c, sizes)
    softmax = _softmax(state)
    if "loss" in outputs:
        losses = _losses(options, state, softmax, loss)
        if options.reduction == "none":
            found["loss"] = jnp.where(y.bad, jnp.nan, losses)
        else:
            total = jnp.where(y.bad.any(), jnp.nan, losses.sum())
            if options.reduction == "mean":
                total = total / jnp.where(loss.divisor == 0.0, 1.0, loss.divisor)
            found["loss"] = total

    def of_tokens(value: jax.Array, counted: jax.Array) -> jax.Array:
        bad = y.bad if value.ndim == 1 else y.bad[:, None]
        return jnp.where(bad, jnp.nan, jnp.where(counted, value, 0.0))

    results = {
        "lse": lambda: of_tokens(softmax.lse, y.active),
        "entropy": lambda: of_tokens(softmax.entropy, y.active),
        "variance": lambda: of_tokens(softmax.variance, y.active),
        "weighted_logit_sum": lambda: of_tokens(state.spread + state.mass * state.top, y.active),
        "target_logit": lambda: of_tokens(state.target, y.valid),
        "log_prob": lambda: of_tokens(softmax.log_prob, y.valid),
        "argmax": lambda: jnp.where(y.active, state.argmax, -1),
    }
    return found | {name: value() for name, value in results.items() if name in outputs}
