"""Calls the library through custom calls of an XLA program: registration, planning and the call.

A program is planned when it is traced. The plan checks shapes, dtypes and options. Its workspace is one more result of
the custom call, so XLA allocates it with its temporaries.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Callable, Mapping, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
from jax.api_util import shaped_abstractify
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from .. import _library as c
from .._library import lib
from .._options import ENUMS, HeadOptions, LossOptions, request_of, struct_of
from . import _portable
from ._arguments import DEFAULT_PRECISION
from ._axes import axes_of, varying
from ._backend import backend, gpu_capability

DTYPES = {"float32": c.F32, "bfloat16": c.BF16, "float16": c.F16, "int32": c.I32, "int64": c.I64}

ALIGNMENT = 256  # of a workspace; the handlers align the buffer's address up
_SOMEWHERE = 64  # planning needs a non-null pointer, and does not read from it


class Spec(NamedTuple):
    """Name, dtype and shape of a buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]


# Structs of a call's inputs and results, and the prefix of their buffers' names.
_STRUCTS = {
    "cross_entropy": ((c.CrossEntropyInputs, ""), (c.CrossEntropyOutputs, "")),
    "head_forward": ((c.HeadInputs, ""), (c.HeadOutputs, "")),
    "head_backward": ((c.HeadInputs, ""), (c.HeadCotangents, "cotangent_"), (c.HeadGradients, "")),
}


def handlers() -> dict[tuple[str, str], dict[str, object]]:
    """Returns the library's handlers, {stage: function}, by (custom call, platform). Raises ImportError if it was built
    without them."""
    try:
        found = {
            (f"logitless_{name}", platform): {"execute": getattr(lib, f"logitless_xla_{name}_{platform.lower()}")}
            for name in (*_STRUCTS, "far_field_step", "program", "sample", "top_logprobs")
            for platform in ("cpu", "CUDA")
        }
        found["logitless_program", "CUDA"]["initialize"] = lib.logitless_xla_program_initialize_cuda
        return found
    except AttributeError:
        raise ImportError(
            f"logitless.jax: {c.library_path()} was built without XLA's headers; build it where jaxlib is installed, "
            "or with -DLOGITLESS_XLA=ON -DLOGITLESS_XLA_INCLUDE_DIR=<jax.ffi.include_dir()>"
        ) from None


@functools.cache
def _register() -> None:
    """Registers the custom calls with XLA, which checks versions. It runs at the first call, so that importing this
    module does not initialise JAX's backends."""
    for (name, platform), stages in handlers().items():
        try:
            capsules = {stage: jax.ffi.pycapsule(handler) for stage, handler in stages.items()}
            jax.ffi.register_ffi_target(name, capsules, platform=platform)
        except Exception as error:
            raise NotImplementedError(
                f"logitless.jax: jaxlib {jaxlib.version.__version__} does not take the handlers of {c.library_path()}; "
                f"build it with the headers of this jaxlib or an older one: {error}"
            ) from error


def _tensor(spec: Spec) -> c.Tensor:
    tensor = c.Tensor()
    tensor.data, tensor.dtype, tensor.rank = _SOMEWHERE, DTYPES[spec.dtype], len(spec.shape)
    step = 1
    for d in reversed(range(len(spec.shape))):
        tensor.shape[d], tensor.strides[d] = spec.shape[d], step
        step *= spec.shape[d]
    return tensor


def _struct(kind, prefix: str, specs: Sequence[Spec]):
    """Returns a struct of tensors; specs that are not its fields are ignored."""
    struct = c.new(kind)
    fields = {prefix + field: field for field, _ in kind._fields_}
    for spec in specs:
        if spec.name in fields:
            setattr(struct, fields[spec.name], ctypes.pointer(_tensor(spec)))
    return struct


@functools.lru_cache(maxsize=4096)
def _workspace_bytes(
    device: int, threads: int, function: str, options, inputs: tuple[Spec, ...], outputs, kind: int = c.PLAN_ANY
) -> int:
    """Returns the bytes of the plan's workspace. Raises the planner's errors."""
    structs = [_struct(kind, prefix, (*inputs, *outputs)) for kind, prefix in _STRUCTS[function]]
    request = request_of(options)
    request.kind = kind
    plan = ctypes.c_void_p()
    plan_function = getattr(lib, f"logitless_plan_{function}")
    c.check(
        plan_function(
            c.context(device, threads=threads).handle,
            ctypes.byref(struct_of(options)),
            *[ctypes.byref(struct) for struct in structs],
            ctypes.byref(request),
            ctypes.byref(plan),
        )
    )
    try:
        return lib.logitless_plan_workspace_bytes(plan)
    finally:
        lib.logitless_plan_destroy(plan)


def _attributes(options: LossOptions | HeadOptions) -> dict[str, np.generic | str]:
    kinds = {"ignore_index": np.int64, "memory_budget": np.int64, "normalizer": np.float64}
    found: dict[str, np.generic | str] = {}
    for name, value in options._asdict().items():
        if name in ENUMS:
            found[name] = np.int64(ENUMS[name][value])
        else:
            found[name] = kinds.get(name, np.float32)(value)
    return found


def result_type(shape: tuple[int, ...], dtype: str, axes: frozenset[str]) -> jax.ShapeDtypeStruct:
    """Returns the type of a result; in a shard_map it names the axes over which it varies."""
    if not axes:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    kind = getattr(jax.sharding, "ManualAxisType", None)
    vary = {"vma": axes} if kind is None else {"manual_axis_type": kind(varying=axes)}
    sharding = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), jax.sharding.PartitionSpec())
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding, **vary)


def call(
    function: str,
    options: LossOptions | HeadOptions,
    inputs: Mapping[str, jax.Array | None],
    outputs: Mapping[str, tuple[tuple[int, ...], str]],
) -> dict[str, jax.Array]:
    """Runs a function of the C ABI on contiguous arrays.

    inputs: by the library's names; None marks a missing input. outputs: shape and dtype of each result that is wanted.
    Extra memory: the workspace of the plan, within options.memory_budget. Where the library cannot serve, JAX's own
    operations do, also on other platforms that the program is lowered for. There the budget is a hint.
    """
    portable = inputs["hidden"].dtype == jnp.float64 or inputs.get("temperature") is not None
    if portable or backend(inputs["hidden"].dtype).name == "portable":
        return _portable.call(function, options, inputs, outputs)
    arrays = varying({name: array for name, array in inputs.items() if array is not None}, axes_of(*_present(inputs)))
    axes = axes_of(*arrays.values())
    in_specs = tuple(Spec(name, array.dtype.name, array.shape) for name, array in arrays.items())
    out_specs = tuple(Spec(name, dtype, shape) for name, (shape, dtype) in outputs.items())

    def run(device: int, *operands):
        threads = threads_of(device)
        of_device = options._replace(precision=_precision_on(device, options.precision))
        size = _workspace_bytes(device, threads, function, of_device, in_specs, out_specs) + ALIGNMENT
        results = [result_type(spec.shape, spec.dtype, axes) for spec in out_specs]
        target = jax.ffi.ffi_call(
            f"logitless_{function}", [*results, result_type((size,), "int8", axes)], vmap_method="sequential"
        )
        *found, _ = target(
            *operands,
            inputs=",".join(arrays),
            outputs=",".join([*outputs, "workspace"]),
            threads=np.int64(threads),
            **_attributes(of_device),
        )
        return tuple(found)

    def elsewhere(*operands):
        hinted = options._replace(memory_budget=-options.memory_budget)
        return tuple(_portable.call(function, hinted, dict(zip(arrays, operands)), outputs).values())

    return dict(zip(outputs, on_platform(run, elsewhere, axes, *arrays.values())))


Types = Mapping[str, tuple[tuple[int, ...], str]]


def check_budget(function: str, options, inputs: Mapping[str, jax.Array | None], cotangents: Types, outputs: Types) -> None:
    """Raises the error of the ``call`` that a backward will make, if its least plan exceeds the budget."""
    if options.memory_budget > 0 and outputs:
        given = lambda: {name: jnp.zeros(*kind) for name, kind in cotangents.items()}  # noqa: E731
        jax.eval_shape(lambda: call(function, options, {**inputs, **given()}, outputs))


def _precision_on(device: int, precision: str) -> str:
    """Returns the precision of products on a device, by the library's names."""
    if precision != DEFAULT_PRECISION:
        return precision
    return "tf32" if device == c.DEVICE_CUDA and gpu_capability() >= 8.0 else "ieee"


def threads_of(device: int) -> int:
    """Returns the number of threads that run a call; 0 for a GPU."""
    return lib.logitless_context_threads(c.context().handle) if device == c.DEVICE_CPU else 0


def on_platform(
    run: Callable[..., tuple[jax.Array, ...]], elsewhere: Callable[..., tuple[jax.Array, ...]], axes: frozenset[str],
    *arrays: jax.Array,
) -> tuple[jax.Array, ...]:
    """Runs ``run(device, *arrays)``, with its custom calls, for the platform that the program is compiled for, and
    ``elsewhere(*arrays)`` on platforms without them. axes: those of a shard_map, over which results vary."""
    platform = jax.default_backend()
    _register()
    if platform not in ("cpu", "gpu"):
        raise NotImplementedError(f"logitless.jax: the library runs on cpu and cuda; JAX's backend is {platform}")
    native = {"cpu": functools.partial(run, c.DEVICE_CPU)}
    if platform == "gpu":
        native["cuda"] = functools.partial(run, c.DEVICE_CUDA)
    types = tuple(Spec("", r.dtype.name, r.shape) for r in jax.eval_shape(next(reversed(native.values())), *arrays))

    def other(*operands):
        return tuple(_elsewhere.bind(*operands, function=elsewhere, types=types, axes=axes))

    return jax.lax.platform_dependent(*arrays, **native, default=other)


# A function that is traced when a program is lowered for a platform without custom calls.
_elsewhere = Primitive("logitless_elsewhere")
_elsewhere.multiple_results = True


@_elsewhere.def_abstract_eval
def _types(*_, function, types, axes):
    return [shaped_abstractify(result_type(spec.shape, spec.dtype, axes)) for spec in types]


def _lowered(ctx, *operands, function, types, axes):
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


def _batched(arrays, dims, *, function, types, axes):
    size = next(a.shape[d] for a, d in zip(arrays, dims) if d is not None)
    made = tuple(spec._replace(shape=(size, *spec.shape)) for spec in types)
    found = _elsewhere.bind(*arrays, function=jax.vmap(function, dims), types=made, axes=axes)
    return found, [0] * len(found)


mlir.register_lowering(_elsewhere, _lowered)
batching.primitive_batchers[_elsewhere] = _batched


def _present(arrays: Mapping[str, jax.Array | None]) -> list[jax.Array]:
    return [array for array in arrays.values() if array is not None]
