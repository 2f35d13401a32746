"""Log-probabilities, entropy and log-sum-exp of each token, differentiable."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from .._library import parse_bytes
from .._losses import selected as shared
from . import _arguments, _ffi
from ._arguments import Arguments
from .._options import DEFAULT, HeadOptions, either_name, share

if TYPE_CHECKING:
    from .sharding import Sharding

GRADIENTS = {"d_hidden": "hidden", "d_weight": "weight", "d_bias": "bias"}


def gradient_dtype(dtype: str) -> str:
    """Returns the dtype of a gradient until it is scaled and rounded: float32 for float16, which would underflow."""
    return "float32" if dtype == "float16" else dtype


def refuse_gradients(inputs: dict) -> None:
    """Raises NotImplementedError for an input that is being differentiated and has no gradient. inputs:
    CustomVJPPrimal."""
    for name, primal in inputs.items():
        if primal is not None and primal.perturbed and jnp.issubdtype(primal.value.dtype, jnp.floating):
            raise NotImplementedError(f"{name}: has no gradient here; wrap it in jax.lax.stop_gradient")


def gradient_results(wanted: dict[str, jax.Array], inputs: dict) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns the shape and dtype of the gradients that are wanted."""
    return {
        name: (inputs[of].shape, inputs[of].dtype.name) for name, of in GRADIENTS.items() if wanted[name].size > 0
    }


# JAX caches the structure of one trace. So the residuals of the forward and the results of the backward have one
# structure, whatever is differentiated. A boolean is an array of one element or none, and a shape and dtype is an array
# of no elements. A gradient that nobody asked for is zeros, which XLA removes.
def flag(yes: bool) -> jax.Array:
    return jnp.zeros((int(yes),), jnp.int8)


def type_of(value: jax.Array | None) -> jax.Array | None:
    return None if value is None else jnp.empty((0, *value.shape), value.dtype)


def zeros_of(kept_type: jax.Array, axes: frozenset[str]) -> jax.Array:
    zeros = jnp.zeros(kept_type.shape[1:], kept_type.dtype)
    return _ffi.varying({"zeros": zeros}, axes)["zeros"]


def wanted_gradients(inputs: dict) -> dict[str, jax.Array]:
    """Returns a flag for each gradient: whether its input is being differentiated. inputs: CustomVJPPrimal."""
    return {name: flag(inputs[of] is not None and inputs[of].perturbed) for name, of in GRADIENTS.items()}


def all_gradients(found: dict[str, jax.Array], types: dict, axes: frozenset[str]) -> dict[str, jax.Array | None]:
    """Returns the gradients by the names of the inputs, with zeros for missing ones."""
    return {
        of: found[name] if name in found else None if types[of] is None else zeros_of(types[of], axes)
        for name, of in GRADIENTS.items()
    }


def nan_at_bad_targets(value: jax.Array, targets: jax.Array, ignore_index: int, vocab: int) -> jax.Array:
    """Returns value [N] or [N, K] with NaN where a target is neither in [0, V) nor ignore_index. On a CPU the handler
    has already failed; on a GPU the host does not wait for an error."""
    if jax.default_backend() == "cpu":
        return value
    bad = (targets != ignore_index) & ((targets < 0) | (targets >= vocab))
    return jnp.where(bad if bad.ndim == value.ndim else bad.any(-1), jnp.nan, value)


def _output_shape(name: str, inputs: dict) -> tuple[int, ...]:
    return inputs["targets"].shape if name in ("log_prob", "target_logit") else inputs["hidden"].shape[:-1]


def _output_dtype(name: str, inputs: dict) -> str:
    return "int32" if name == "argmax" else _arguments.sum_dtype(inputs["hidden"].dtype).name


def _forward(options: HeadOptions, outputs: tuple[str, ...], inputs: dict, fixed: dict) -> tuple[jax.Array, ...]:
    found = _ffi.call(
        "head_forward",
        options,
        {**inputs, **fixed},
        {name: (_output_shape(name, {**inputs, **fixed}), _output_dtype(name, inputs)) for name in outputs},
    )
    return tuple(found.values())


_head = jax.custom_vjp(_forward, nondiff_argnums=(0, 1))


def _head_fwd(options, outputs, inputs, fixed):
    refuse_gradients(fixed)
    values = {name: None if p is None else p.value for name, p in inputs.items()}
    fixed_values = {name: None if p is None else p.value for name, p in fixed.items()}
    wanted = wanted_gradients(inputs)
    given = {**values, **fixed_values}
    cotangents = {
        f"cotangent_{name}": (_output_shape(name, given), _output_dtype(name, given)) for name in outputs if name != "argmax"
    }
    _ffi.check_budget("head_backward", options, given, cotangents, gradient_results(wanted, values))
    return _forward(options, outputs, values, fixed_values), (wanted, values, fixed_values)


def _head_bwd(options, outputs, kept, cotangents):
    wanted, inputs, fixed = kept
    given = {
        f"cotangent_{name}": cotangent
        for name, cotangent in zip(outputs, cotangents)
        if not isinstance(cotangent, SymbolicZero)
    }
    results = gradient_results(wanted, inputs)
    found = {}
    if given and results:
        found = _ffi.call("head_backward", options, {**inputs, **fixed, **given}, results)
    types = {name: type_of(value) for name, value in inputs.items()}
    return all_gradients(found, types, _ffi.axes_of(inputs["hidden"])), None


_head.defvjp(_head_fwd, _head_bwd, symbolic_zeros=True)


# It is jitted since a shard_map that runs eagerly does not accept a custom_vjp itself.
@functools.partial(jax.jit, static_argnums=(0, 1))
def head(options: HeadOptions, outputs: tuple[str, ...], inputs: dict, fixed: dict) -> tuple[jax.Array, ...]:
    """Returns the named outputs of the library's head_forward, in sum_dtype; argmax in int32.

    inputs: hidden [N, D], weight [V, D], bias [V] or None: differentiable. fixed: targets [N] or [N, K], vocab_weight
        [V] or None, and temperature [N], with which JAX's own operations run. The backward recomputes the forward; only the inputs are saved.
    """
    found = _head(options, outputs, inputs, fixed)
    vocab = inputs["weight"].shape[0]
    return tuple(
        value if name == "argmax" else nan_at_bad_targets(value, fixed["targets"], options.ignore_index, vocab)
        for name, value in zip(outputs, found)
    )


@either_name
def linear_logprobs(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    selected_ids: ArrayLike | None = None,
    ignore_index: int = DEFAULT.ignore_index,
    softcap: float | None = None,
    logit_scale: float = DEFAULT.logit_scale,
    temperature: ArrayLike | None = None,
    precision: str | None = None,
    memory_budget: int | str | None = None,
    expected_ignored: float = 0.0,
    sharding: Sharding | None = None,
) -> tuple[Any, ...]:
    """Returns the log-probability of each target, and the entropy and log-sum-exp of each token, without storing the
    logits.

    The logits are ``z = softcap(logit_scale * (hidden @ weight.T + bias))``. Policy and preference losses are functions
    of these three outputs.

    Args:
        hidden: [..., D], float32, bfloat16 or float16; or float64, in JAX's own operations, whose results are float64.
        weight: [V, D], the dtype of hidden, or one of both float32 beside 16 bits, as in ``linear_cross_entropy``.
        targets: [...], int32 or int64; or [..., K]: K token ids per token. None, with selected_ids: no target.
        bias: [V], float.
        selected_ids: [K], the same for each token, or [..., K], int32 or int64: also returns the log-probabilities of
            these token ids [..., K], with gradients, by the same GEMMs. 0 for ``ignore_index``, and where the target is
            ignored.
        ignore_index: outputs of tokens whose targets all have this value are 0, without a gradient; their cost is that in
            ``linear_cross_entropy``. None is -100.
        softcap: ``c * tanh(z / c)``.
        logit_scale: factor of the products.
        temperature: as in ``linear_cross_entropy``: a number, or an array [...] with a gradient.
        precision: of the products, as in ``linear_cross_entropy``.
        memory_budget: bytes, or text such as "512MiB", that a call may take beyond inputs and outputs, on each device.
        expected_ignored: as in ``linear_cross_entropy``.
        sharding: how vocabulary and tokens are sharded over a mesh. None: taken from the types of hidden and weight, if
            explicit.

    Returns:
        (logprob, entropy, lse), and the log-probabilities of selected_ids if given, float32: [...] each, logprob shaped
        as targets, or None without them. Entropy and lse are in nats.

    Batch invariance: as in ``linear_cross_entropy``. logprob has the bits of its loss with reduction "none", negated. On a
    GPU the last bits of a token depend on all its targets and selected_ids.

    Each output has gradients by hidden, weight and bias, in their dtypes, summed in float32 and rounded once. The
    backward recomputes the forward and saves only the inputs. Gradients that are not asked for are not computed.

    Extra memory: the plan's workspace, within ``memory_budget``.

    Raises, while the program is traced: ValueError and TypeError that name the argument; NotImplementedError if no
    kernel supports the call. A target outside [0, V) that is not ignore_index makes the program fail on the CPU. This
    is a ValueError that names its position, or a RuntimeError in some versions of JAX. Its outputs are
    NaN on other devices, and in JAX's own operations.
    """
    a = _arguments.named(locals())
    if selected_ids is not None:
        given = None if targets is None else _arguments.indices("targets", targets)
        selected = _arguments.indices("selected_ids", selected_ids)
        ignored = _arguments.with_ignored(a).ignore_index
        lead = _arguments.anywhere("hidden", hidden).shape[:-1]
        both = shared.with_selected(jnp, "targets", given, selected, lead, ignored)
        logprob, entropy, lse = log_probs(a._replace(targets=both, ignore_index=ignored))
        logprob, of_selected = shared.parts(logprob, given, selected.shape[-1])
        return logprob, entropy, lse, of_selected
    if targets is None:
        raise TypeError("targets: expected an array, got NoneType")
    return log_probs(a)


def log_probs(a: Arguments) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes ``linear_logprobs`` of targets."""
    from . import sharding as meshes  # imported here, since that module imports this one

    a = _arguments.with_ignored(a)
    if a.sharding is None:
        a = a._replace(sharding=meshes.of_types(a.hidden, a.weight))
    if a.temperature is not None:
        from . import tempered

        a = tempered.folded(a)
    if a.sharding is not None:
        return meshes.sharded_logprobs(a)
    x, w, b = _arguments.head(a.hidden, a.weight, a.bias, wide=True, blocks=True)
    y = _arguments.indices("targets", a.targets)
    lead = x.shape[:-1]
    if y.shape != lead and not (y.ndim == x.ndim and y.shape[:-1] == lead and y.shape[-1] > 0):
        raise ValueError(f"targets: expected {list(lead)} or {list(lead)} with K classes each, got {list(y.shape)}")
    options = HeadOptions(
        precision=_arguments.precision(a.precision, x.dtype),
        ignore_index=_arguments.integer("ignore_index", a.ignore_index),
        softcap=_arguments.softcap(a.softcap),
        logit_scale=_arguments.number("logit_scale", a.logit_scale),
        memory_budget=parse_bytes(a.memory_budget),
        expected_ignored=share("expected_ignored", a.expected_ignored),
    )
    rows = {"hidden": x.reshape(-1, x.shape[-1]), "weight": w, "bias": b}
    fixed = {"targets": y.reshape(-1, *y.shape[len(lead) :])}
    names = "log_prob", "entropy", "lse"
    if a.temperature is not None:
        found = tempered.outputs(options, a.temperature, rows, fixed["targets"])
        logprob, entropy, lse = (found[name] for name in names)
    else:
        axes = _ffi.axes_of(*[t for t in (*rows.values(), *fixed.values()) if t is not None])
        logprob, entropy, lse = head(options, names, _ffi.varying(rows, axes), _ffi.varying(fixed, axes))
    return logprob.reshape(y.shape), entropy.reshape(lead), lse.reshape(lead)
