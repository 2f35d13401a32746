"""Cross entropy whose gradients come from a block-sparse softmax, with the training run's state as a pytree."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from .. import _far_field
from .. import _library as c
from .._far_field import Report
from .._options import DEFAULT, LossOptions, either_name, takes_terms
from . import _arguments, _backend, _ffi
from .head import GRADIENTS, all_gradients, gradient_dtype, refuse_gradients, type_of, wanted_gradients
from .loss import prepare

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._c_api import LossTermArguments

_LENGTH = 8  # bytes of the length before the state
_HEADER = 16384  # bytes for names, counts and the reason of the last decision
_TILE = 128
_MAX_VOCAB = (1 << 31) - 1 - _TILE  # the largest vocabulary of an order


def _state_bytes(options: _far_field.Options, vocab: int, dim: int) -> int:
    """Returns the bytes that hold any state: the current vocabulary order, and one in progress."""
    order = 12 * vocab
    if options.accuracy == "far_both":
        order += 4 * dim * dim + 4 * -(-vocab // _TILE) * (dim + 1)
    return _LENGTH + _HEADER + 2 * order


@jax.tree_util.register_pytree_node_class
class FarFieldState:
    """The state of a far-field head between steps: a pytree of one int8 array, ``data``; options and sizes are static.
    Save and load ``data`` like any array."""

    def __init__(self, data: Any, options: _far_field.Options, vocab: int, dim: int):
        self.data, self.options, self.vocab, self.dim = data, options, vocab, dim

    def tree_flatten(self):
        return (self.data,), (self.options, self.vocab, self.dim)

    @classmethod
    def tree_unflatten(cls, static, children):
        return cls(*children, *static)

    def __repr__(self) -> str:
        return f"FarFieldState(error={self.options.error}, vocab={self.vocab}, dim={self.dim})"


def far_field_state(
    vocab: int,
    dim: int,
    error: float = 0.01,
    *,
    accuracy: str = "far_backward",
    sample_every: int = 16,
    audit_rows: int = 128,
    audit_every: int = 25,
    refresh_every: int = 100,
    refresh_delay: int = 4,
    sample_rows: int = 1024,
    memory_budget: int | str | None = None,
) -> FarFieldState:
    """Returns the state before the first step, for a weight [vocab, dim].

    error: the relative error of the gradient of hidden, in (0, 1).
    accuracy: "far_backward", whose loss is exact, or "far_both", whose loss has this error too.
    Other options are those of ``logitless.torch.FarFieldHead``.
    Memory: 24 bytes per vocabulary entry.

    Raises ValueError and TypeError that name the argument.
    """
    for name, value in (("vocab", vocab), ("dim", dim)):
        if not 1 <= _arguments.integer(name, value) <= _MAX_VOCAB:
            raise ValueError(f"{name}: expected 1 to {_MAX_VOCAB}, got {value}")
    options = _far_field.options(
        error=error, accuracy=accuracy, sample_every=sample_every, audit_rows=audit_rows, audit_every=audit_every,
        refresh_every=refresh_every, refresh_delay=refresh_delay, sample_rows=sample_rows, memory_budget=memory_budget,
    )
    return FarFieldState(jnp.zeros((_state_bytes(options, vocab, dim),), jnp.int8), options, vocab, dim)


def far_field_report(state: FarFieldState) -> Report:
    """Returns the counters since the first step. It runs on the host, outside of jit. Raises ValueError for a damaged
    state."""
    data = np.asarray(state.data).tobytes()
    head = _far_field.Head(state.options, c.Context(threads=1))
    size = int.from_bytes(data[:_LENGTH], "little")
    if size:
        head.set_state(data[_LENGTH : _LENGTH + size])
    return head.report()


@functools.cache
def _missing_on_gpu(accuracy: str, dtype: str, dim: int) -> str:
    """Returns the reason why the GPU has no kernels of the far field for these arrays, "" if it has."""
    inputs = (
        _ffi.Spec("hidden", dtype, (_TILE, dim)), _ffi.Spec("weight", dtype, (_TILE, dim)),
        _ffi.Spec("targets", "int32", (_TILE,)),
    )
    outputs = (_ffi.Spec("d_hidden", dtype, (_TILE, dim)),)
    kind = c.PLAN_KINDS[accuracy]
    try:
        _ffi._workspace_bytes(c.DEVICE_CUDA, 0, "cross_entropy", LossOptions(), inputs, outputs, kind)
    except NotImplementedError as error:
        return str(error)
    return ""


def _attributes(options: _far_field.Options) -> dict[str, np.generic]:
    kinds = {"error": np.float64}
    values = {**options._asdict(), "accuracy": _far_field.ACCURACIES[options.accuracy]}
    return {name: kinds.get(name, np.int64)(value) for name, value in values.items()}


def _step(options: LossOptions, far: _far_field.Options, inputs: dict, outputs: dict, data: jax.Array) -> dict:
    """Runs a step of the library's head. Returns the outputs by name, and the next state as "state"."""
    arrays = {name: a for name, a in {**inputs, "state": data}.items() if a is not None}
    outputs = {**outputs, "state": (data.shape, "int8")}

    def run(device: int, *operands):
        target = jax.ffi.ffi_call(
            "logitless_far_field_step",
            [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in outputs.values()],
            vmap_method="sequential",
        )
        return tuple(
            target(
                *operands,
                inputs=",".join(arrays),
                outputs=",".join(outputs),
                threads=np.int64(_ffi.threads_of(device)),
                **{**_ffi._attributes(options), **_attributes(far)},
            )
        )

    def elsewhere(*_):
        raise NotImplementedError(
            "far_field_cross_entropy: runs on cpu and cuda; this program is lowered for another platform"
        )

    return dict(zip(outputs, _ffi.on_platform(run, elsewhere, frozenset(), *arrays.values())))


def _forward(options: LossOptions, far: _far_field.Options, inputs: dict, fixed: dict, data: jax.Array):
    """Computes the exact loss without a step, for calls that are not differentiated."""
    found = _ffi.call("cross_entropy", options, {**inputs, **fixed}, {"loss": ((), "float32")})
    return found["loss"], data


_differentiable = jax.custom_vjp(_forward, nondiff_argnums=(0, 1))


def _fwd(options, far, inputs, fixed, data):
    refuse_gradients(fixed)
    values = {name: None if p is None else p.value for name, p in inputs.items()}
    fixed_values = {name: None if p is None else p.value for name, p in fixed.items()}
    wanted = wanted_gradients(inputs)
    types = {name: type_of(value) for name, value in values.items()}
    outputs = {"loss": ((), "float32")}
    for name, of in GRADIENTS.items():
        if wanted[name].size or name == "d_hidden":  # audits measure the error of d_hidden
            outputs[name] = (values[of].shape, gradient_dtype(values[of].dtype.name))
    found = _step(options, far, {**values, **fixed_values}, outputs, data.value)
    kept = {
        name: found[name] if wanted[name].size else jnp.empty((0,), jnp.float32) for name in GRADIENTS
    }
    return (found["loss"], found["state"]), (wanted, kept, types)


def _bwd(options, far, kept, cotangents):
    wanted, gradients, types = kept
    cotangent = cotangents[0]
    found = {}
    if not isinstance(cotangent, SymbolicZero):
        for name, of in GRADIENTS.items():
            if wanted[name].size > 0:
                found[name] = (gradients[name].astype(jnp.float32) * cotangent).astype(types[of].dtype)
    return all_gradients(found, types, frozenset()), None, None


_differentiable.defvjp(_fwd, _bwd, symbolic_zeros=True)
_compiled = functools.partial(jax.jit, static_argnums=(0, 1))(_differentiable)


@either_name
@takes_terms
def far_field_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    state: FarFieldState,
    bias: ArrayLike | None = None,
    *,
    reduction: str = DEFAULT.reduction,
    ignore_index: int = DEFAULT.ignore_index,
    class_weight: ArrayLike | None = None,
    softcap: float | None = None,
    logit_scale: float = DEFAULT.logit_scale,
    normalizer: float | ArrayLike | None = None,
    token_weight: ArrayLike | None = None,
    target_weight: ArrayLike | None = None,
    **terms: Unpack[LossTermArguments],
) -> tuple[jax.Array, FarFieldState]:
    """Returns (the loss of ``linear_cross_entropy``, the next step's state). See docs/use/far_field.md.

    A differentiated call is one step, and computes loss and gradients in the forward. It uses the selected tiles of the
    vocabulary if that keeps the error of the state, and is exact otherwise. A call that is not differentiated returns
    the exact loss and the unchanged state. The call is a pure function: recomputing it (jax.checkpoint) from the same
    state gives the same bits. So does a run resumed from a saved state.

    Args:
        hidden: [..., D], float32, bfloat16 or float16. weight: [V, D]. targets: [...], or [..., K] with target_weight.
        state: of ``far_field_state(V, D)``, or returned by the previous step.
        bias: [V], float.
        reduction: "mean" or "sum".
        {terms}
        Others: as in ``linear_cross_entropy``.

    Extra memory: the workspace of the plan, within the state's memory_budget. On a CPU it is allocated by the process.
    On a GPU it is XLA's scratch memory during the call; the process has 12 bytes per vocabulary entry for each order
    beside it, and more while an order is computed.
    A step that computes a vocabulary order finishes it before it returns. On a GPU each step waits for the stream, and
    is not recorded in XLA's command buffers.
    Raises, while the program is traced: ValueError and TypeError that name the argument; NotImplementedError for
    reduction "none", inside a shard_map, and where the library has no kernels of the far field: on a GPU before
    compute capability 8.0, in float32 there, or another platform. An invalid target or a damaged state makes the program fail.
    """
    a = _arguments.named(locals())
    if not isinstance(state, FarFieldState):
        raise TypeError(f"state: expected a FarFieldState, got {type(state).__name__}")
    if reduction == "none":
        raise NotImplementedError(
            "reduction: expected 'mean' or 'sum', got 'none', whose gradients wait for the backward"
        )
    platform, far = _backend.platform_of_jax(), state.options
    if refusal := _backend.refusal_of(platform):
        raise NotImplementedError(f"far_field_cross_entropy: needs the library: {refusal}")
    call = prepare("far_field_cross_entropy", a._replace(precision="ieee", memory_budget=far.memory_budget or None))
    data = _arguments.array("state", state.data)
    found = list(call.inputs["weight"].shape)
    if found != [state.vocab, state.dim]:
        raise ValueError(f"weight: expected [{state.vocab}, {state.dim}], which the state is for, got {found}")
    size = _state_bytes(far, state.vocab, state.dim)
    if data.dtype != jnp.int8 or data.shape != (size,):
        raise ValueError(f"state: expected int8[{size}], got {data.dtype.name}{list(data.shape)}")
    if _ffi.axes_of(*[t for t in (*call.inputs.values(), *call.fixed.values(), data) if t is not None]):
        raise NotImplementedError(
            "far_field_cross_entropy: inside a shard_map each device would have a state of its own"
        )
    dtype = call.inputs["weight"].dtype.name
    if platform == "cuda" and (missing := _missing_on_gpu(far.accuracy, dtype, state.dim)):
        raise NotImplementedError(
            f"far_field_cross_entropy: no kernels for {dtype} of dim {state.dim} on this GPU: {missing}. "
            "linear_cross_entropy computes the exact loss there"
        )
    loss, data = _compiled(call.options, far, call.inputs, call.fixed, data)
    if call.normalizer is not None:
        loss = loss / call.normalizer
    return loss, FarFieldState(data, far, state.vocab, state.dim)
