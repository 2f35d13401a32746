"""Four CPU devices for the tests of meshes, before JAX is imported. JAX_PLATFORMS=cuda,cpu runs the others on a GPU."""

import importlib.metadata
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # programs here take longer to compile than to run
if os.environ["JAX_PLATFORMS"] != "cpu":  # a GPU multiplies float32 as TF32 otherwise
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
# One LLVM module for each program of a few small operations, and emitters that halve the time of compilation.
_FLAGS = {
    "--xla_force_host_platform_device_count": "4",
    "--xla_cpu_parallel_codegen_split_count": "1",
}
if importlib.metadata.version("jaxlib") < "0.11":  # later ones do not know the flag, and end the process
    _FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
_GIVEN = os.environ.get("XLA_FLAGS", "")
_OURS = (f"{name}={value}" for name, value in _FLAGS.items() if name not in _GIVEN)
os.environ["XLA_FLAGS"] = " ".join((_GIVEN, *_OURS)).strip()
