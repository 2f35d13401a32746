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


# The dtype of indices that JAX's own functions compute.
UNSIGNED = np.dtype("uint32")

# Primitives that accept unsigned values as small integers. Arithmetic is excluded, since it wraps modulo 2^32, but sums
# that are known to be less, and comparisons with numbers below 2^31 (program.py): the gradient of x.at[i].set(y) numbers
# its updates so.
_COUNTING = {"iota", "sort", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "slice", "concatenate"}
_COUNTING |= {"transpose", "gather", "scatter", "scatter-add", "scatter_add", "convert_element_type", "copy"}
_COUNTING |= {"random_bits", "shift_right_logical", "or", "bitcast_convert_type", "add", "eq", "ne"}


def counts(primitive: str) -> bool:
    """Returns whether a primitive's unsigned results are small integers."""
    return primitive in _COUNTING


def held(dtype, primitive: str):
    """Returns the dtype of a value in the program of a primitive."""
    return DTYPES.i64 if dtype == UNSIGNED and counts(primitive) else dtype


def run_dtypes() -> Dtypes:
    """Returns the dtypes at run time. Without x64, the compiler's own 64-bit values (sums and indices) have 32 bits."""
    if jax.config.jax_enable_x64:
        return DTYPES
    return DTYPES._replace(f64=DTYPES.f32, i64=DTYPES.i32)
