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


def run_dtypes() -> Dtypes:
    """What each becomes where a compiled program runs: without x64 the only 64-bit values are those that the compiler
    made, of sums and of indices, which have 32 bits then."""
    if jax.config.jax_enable_x64:
        return DTYPES
    return DTYPES._replace(f64=DTYPES.f32, i64=DTYPES.i32)
