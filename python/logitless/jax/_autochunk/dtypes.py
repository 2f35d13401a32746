"""JAX's dtypes in tensor programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from logitless._autochunk.dtypes import Dtypes

DTYPES = Dtypes(
    f32=np.dtype("float32"),
    bf16=jnp.dtype("bfloat16"),
    f16=np.dtype("float16"),
    f64=np.dtype("float64"),
    i32=np.dtype("int32"),
    i64=np.dtype("int64"),
    i8=np.dtype("bool"),
)


# Indices that JAX's own functions count with.
UNSIGNED = np.dtype("uint32")

# What takes them as whole numbers that are small enough: no arithmetic, which counts modulo 2^32.
_COUNTING = {"iota", "sort", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "slice", "concatenate"}
_COUNTING |= {"transpose", "gather", "scatter", "scatter-add", "scatter_add", "convert_element_type", "copy"}
_COUNTING |= {"random_bits", "shift_right_logical", "or", "bitcast_convert_type"}


def held(dtype, primitive: str):
    """The dtype of a value in the program of a primitive."""
    return DTYPES.i64 if dtype == UNSIGNED and primitive in _COUNTING else dtype


def run_dtypes() -> Dtypes:
    """What each becomes where a compiled program runs: without x64 the only 64-bit values are those that the compiler
    made, of sums and of indices, which have 32 bits then."""
    if jax.config.jax_enable_x64:
        return DTYPES
    return DTYPES._replace(f64=DTYPES.f32, i64=DTYPES.i32)
