"""Four CPU devices for the tests of meshes, before JAX is imported. JAX_PLATFORMS=cuda,cpu runs the others on a GPU."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # programs here compile for longer than they run
if os.environ["JAX_PLATFORMS"] != "cpu":  # a GPU multiplies float32 as TF32 otherwise
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
_COUNT = "--xla_force_host_platform_device_count"
if _COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT}=4".strip()
