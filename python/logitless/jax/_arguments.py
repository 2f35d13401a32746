"""Converts arguments to the library's form. Error messages name the argument, the expected value and the given one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._library import PRECISIONS
from .._options import DEFAULT, LossWeights, plain_number, weight_shapes, weights_of

FLOATS = ("float32", "bfloat16", "float16")


class Arguments(NamedTuple):
    """The arguments of ``linear_cross_entropy`` by name, as they were given."""

    hidden: Any
    weight: Any
    targets: Any
    bias: Any = None
    reduction: Any = DEFAULT.reduction
    ignore_index: Any = DEFAULT.ignore_index
    weights: LossWeights = LossWeights()
    softcap: Any = None
    logit_scale: Any = DEFAULT.logit_scale
    temperature: Any = None
    normalizer: Any = None
    accuracy: Any = False
    return_lse: Any = False
    return_argmax: Any = False
    return_target_logits: Any = False
    precision: Any = None
    memory_budget: Any = None
    expected_ignored: Any = 0.0
    sharding: Any = None
    terms: Mapping[str, Any] = {}


def named(given: Mapping[str, Any]) -> Arguments:
    """Returns the arguments among the local variables of a function, taken before it has others."""
    known = {name: given[name] for name in Arguments._fields if name in given}
    return Arguments(**known, weights=weights_of(given))


def array(name: str, value: ArrayLike) -> jax.Array:
    """Returns an array-like value as a JAX array. Raises TypeError for anything else. Raises NotImplementedError for an
    array whose type is explicitly sharded: a custom call would gather it, and its gradient would have another type."""
    found = anywhere(name, value)
    if spec := explicit_spec(found):
        raise NotImplementedError(
            f"{name}: is sharded over explicit axes, {spec}, which this call does not take; replicate it by "
            "jax.sharding.reshard, or, where tokens alone are sharded, call this inside jax.shard_map"
        )
    return found


def explicit_spec(array: Any) -> tuple:
    """Returns the PartitionSpec of an array whose type is explicitly sharded; an empty one for others."""
    spec = getattr(getattr(jax.typeof(array), "sharding", None), "spec", ())
    unsharded = None, jax.sharding.PartitionSpec.UNCONSTRAINED
    return spec if any(axis not in unsharded for axis in spec) else ()


def anywhere(name: str, value: ArrayLike) -> jax.Array:
    """Returns an array-like value as a JAX array, whatever its sharding."""
    if isinstance(value, (list, tuple)):  # JAX's own functions reject them; asarray accepts some
        raise TypeError(f"{name}: expected an array, got {type(value).__name__}")
    try:
        return jnp.asarray(value)
    except TypeError as error:
        raise TypeError(f"{name}: expected an array, got {type(value).__name__}") from error


def floats(name: str, value: ArrayLike, wide: bool = False) -> jax.Array:
    """Returns an array of floats; those of float64 only if ``wide``."""
    return checked_floats(name, array(name, value), wide)


def checked_floats(name: str, found: jax.Array, wide: bool = False) -> jax.Array:
    if found.dtype.name not in FLOATS and not (wide and found.dtype.name == "float64"):
        raise TypeError(f"{name}: expected float32, bfloat16 or float16, got {found.dtype.name}")
    return found


def shaped(name: str, value: ArrayLike | None, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array | None:
    """Returns an array of the shape as float32 or float64; None stays None."""
    if value is None:
        return None
    found = floats(name, value, dtype == jnp.float64)
    if found.shape != shape:
        raise ValueError(f"{name}: expected {list(shape)}, got {list(found.shape)}")
    return found.astype(dtype)


def loss_weights(
    weights: LossWeights, vocab: int, lead: tuple[int, ...], per_token: tuple[int, ...], dtype: Any = jnp.float32
) -> LossWeights:
    """Returns checked weights of the loss as float32 or float64."""
    wanted = zip(weights._fields, weights, weight_shapes(vocab, lead, per_token))
    return LossWeights(*(shaped(*of_weight, dtype) for of_weight in wanted))


def indices(name: str, value: ArrayLike) -> jax.Array:
    """Returns a checked array of int32 or int64."""
    return checked_indices(name, array(name, value))


def checked_indices(name: str, found: jax.Array) -> jax.Array:
    kind = found.dtype.name
    if kind not in ("int32", "int64"):
        raise TypeError(f"{name}: expected int32 or int64, got {kind}")
    return found


def number(name: str, value: Any) -> float:
    value = plain_number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a Python number, which is part of the compiled program, got {value!r}")
    return float(value)


def integer(name: str, value: Any) -> int:
    value = plain_number(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected a Python int, which is part of the compiled program, got {value!r}")
    return value


def with_ignored(a: Arguments) -> Arguments:
    """Returns the arguments with a checked ignore_index, which None is -100 of. One that int32 targets cannot have becomes
    the least int32, which is no token id."""
    value = DEFAULT.ignore_index if a.ignore_index is None else integer("ignore_index", a.ignore_index)
    least = -(1 << 31)
    fits = least <= value < -least or (a.targets is not None and anywhere("targets", a.targets).dtype == jnp.int64)
    return a._replace(ignore_index=value if fits else least)


def softcap(value: Any) -> float:
    """Returns the library's softcap, in which 0 means none."""
    if value is None:
        return 0.0
    found = number("softcap", value)
    if not (found > 0.0 and math.isfinite(found)):
        raise ValueError(f"softcap: expected a number above 0, or None, got {found}")
    return found


DEFAULT_PRECISION = "default"  # of options: TF32 on a GPU that has it, as of JAX's own products

# Settings of jax_default_matmul_precision with which XLA multiplies float32 matrices in TF32.
_TF32_SETTINGS = (None, "default", "fastest", "bfloat16", "high", "bfloat16_3x", "tensorfloat32")


def precision(value: Any, dtype: Any) -> str:
    """Returns a checked precision of products. None is that of JAX at the call."""
    if value is None:
        setting = jax.config.jax_default_matmul_precision
        if str(setting) == "BF16_BF16_F32_X3" and dtype == jnp.float32 and jax.default_backend() == "gpu":
            return "bf16x3"
        tf32 = setting in _TF32_SETTINGS or str(setting).startswith("TF32")
        return DEFAULT_PRECISION if tf32 and dtype == jnp.float32 else "ieee"
    if not isinstance(value, str) or value not in PRECISIONS:
        raise ValueError(f"precision: expected {', '.join(map(repr, PRECISIONS))} or None, got {value!r}")
    return value


def head(
    hidden: ArrayLike, weight: ArrayLike, bias: ArrayLike | None, wide: bool = False, blocks: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns hidden [..., D] and weight [V, D] of one dtype, float64 only if ``wide``, and bias [V] as sum_dtype. A
    16-bit hidden state beside a float32 weight is cast, which is exact. blocks: the call takes a 16-bit weight beside
    float32 hidden states as it is; otherwise that is refused, as it would be a copy of it."""
    x, w = floats("hidden", hidden, wide), floats("weight", weight, wide)
    if x.ndim < 1:
        raise ValueError("hidden: expected [..., D], got a scalar")
    if x.shape[-1] == 0:
        raise ValueError(f"hidden: expected [..., D] with at least one column, got {list(x.shape)}")
    if w.ndim != 2 or w.shape[1] != x.shape[-1]:
        raise ValueError(f"weight: expected [V, {x.shape[-1]}] for hidden {list(x.shape)}, got {list(w.shape)}")
    half = jnp.bfloat16, jnp.float16
    if w.dtype == jnp.float32 and x.dtype in half:
        x = x.astype(jnp.float32)
    blocks = blocks and x.dtype == jnp.float32
    if w.dtype != x.dtype and not (blocks and w.dtype in half):
        other = "16 bits beside float32" if blocks else "float32 beside 16 bits"
        raise TypeError(f"weight: expected {x.dtype.name}, the dtype of hidden, or {other}, got {w.dtype.name}; cast one")
    return x, w, shaped("bias", bias, (w.shape[0],), sum_dtype(x.dtype))


def sum_dtype(dtype: Any) -> jnp.dtype:
    """Returns the dtype of logits, sums and losses for hidden states of a dtype."""
    return jnp.dtype("float64" if jnp.dtype(dtype) == jnp.float64 else "float32")


def targets(value: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    found = indices("targets", value)
    if found.shape != shape:
        raise ValueError(f"targets: expected {list(shape)}, got {list(found.shape)}")
    return found
