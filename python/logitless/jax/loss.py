"""Cross entropy of a vocabulary head, without the logits."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from .._library import REDUCTIONS, parse_bytes
from . import _arguments, _ffi
from ._arguments import Arguments
from .._options import (
    DEFAULT, LossOptions, all_terms, either_name, head_options, plain_number, share, takes_terms, weight_shapes
)
from .head import (
    GRADIENTS, all_gradients, gradient_dtype, gradient_results, head, nan_at_bad_targets, refuse_gradients, type_of,
    wanted_gradients,
)


if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._c_api import LossTermArguments
    from .sharding import Sharding


def _loss_outputs(options: LossOptions, inputs: dict, more: tuple[str, ...]) -> dict:
    lead, number = inputs["hidden"].shape[:-1], _arguments.sum_dtype(inputs["hidden"].dtype).name
    known = {"argmax": (lead, "int32"), "lse": (lead, number)}
    return {"loss": (lead if options.reduction == "none" else (), number), **{name: known[name] for name in more}}


def _forward(options: LossOptions, more: tuple[str, ...], inputs: dict, fixed: dict) -> dict:
    return _ffi.call("cross_entropy", options, {**inputs, **fixed}, _loss_outputs(options, inputs, more))


_differentiable = jax.custom_vjp(_forward, nondiff_argnums=(0, 1))


def _cross_entropy_fwd(options, more, inputs, fixed):
    refuse_gradients(fixed)
    values = {name: None if p is None else p.value for name, p in inputs.items()}
    fixed_values = {name: None if p is None else p.value for name, p in fixed.items()}
    wanted = wanted_gradients(inputs)
    outputs = _loss_outputs(options, values, more)
    if options.reduction == "none":  # the upstream gradient of each token is known in the backward
        later, cotangent = gradient_results(wanted, values), {"grad_losses": outputs["loss"]}
        _ffi.check_budget("cross_entropy", options, {**values, **fixed_values}, cotangent, later)
        found = _ffi.call("cross_entropy", options, {**values, **fixed_values}, outputs)
        return found, (wanted, values, fixed_values)
    gradients = {
        name: (shape, gradient_dtype(dtype)) for name, (shape, dtype) in gradient_results(wanted, values).items()
    }
    found = _ffi.call("cross_entropy", options, {**values, **fixed_values}, {**outputs, **gradients})
    types = {name: type_of(value) for name, value in values.items()}
    kept = {name: found.get(name, jnp.empty((0,), jnp.float32)) for name in GRADIENTS}
    return {name: found[name] for name in outputs}, (wanted, kept, types)


def _cross_entropy_bwd(options, more, kept, cotangents):
    cotangent = cotangents["loss"]
    none = isinstance(cotangent, SymbolicZero)
    found = {}
    if options.reduction == "none":
        wanted, inputs, fixed = kept
        types = {name: type_of(value) for name, value in inputs.items()}
        results = gradient_results(wanted, inputs)
        axes = _ffi.axes_of(inputs["hidden"])
        if results and not none:
            found = _ffi.call("cross_entropy", options, {**inputs, **fixed, "grad_losses": cotangent}, results)
    else:
        wanted, gradients, types = kept
        axes = _ffi.axes_of(*gradients.values())
        if not none:
            for name, of in GRADIENTS.items():
                if wanted[name].size > 0:
                    found[name] = (gradients[name].astype(cotangent.dtype) * cotangent).astype(types[of].dtype)
    return all_gradients(found, types, axes), None


_differentiable.defvjp(_cross_entropy_fwd, _cross_entropy_bwd, symbolic_zeros=True)


# It is jitted since a shard_map that runs eagerly does not accept a custom_vjp itself.
@functools.partial(jax.jit, static_argnums=(0, 1))
def token_losses(options: LossOptions, more: tuple[str, ...], inputs: dict, fixed: dict) -> dict:
    """Returns {"loss": float32}, and the outputs of ``more`` without gradients: "lse" [N], "argmax"
    int32 [N]. inputs: hidden [N, D], weight, bias: differentiable."""
    found = _differentiable(options, more, inputs, fixed)
    if options.reduction == "none":
        vocab = inputs["weight"].shape[0]
        found["loss"] = nan_at_bad_targets(found["loss"], fixed["targets"], options.ignore_index, vocab)
    return found


def divisor(normalizer: float | ArrayLike | None, reduction: str) -> tuple[float, jax.Array | None]:
    """Returns normalizer as a constant of the program (0: none), or as an array that divides the sum."""
    if normalizer is None:
        return 0.0, None
    if reduction != "mean":
        raise ValueError(f"normalizer: goes with reduction 'mean', got {reduction!r}")
    normalizer = plain_number(normalizer)
    if isinstance(normalizer, (int, float)) and not isinstance(normalizer, bool):
        if not normalizer > 0.0:
            raise ValueError(f"normalizer: expected a number above 0, got {normalizer}")
        return float(normalizer), None
    found = _arguments.array("normalizer", normalizer)
    if found.shape != () or found.dtype == jnp.bool_:
        raise ValueError(f"normalizer: expected a number or a scalar array, got {found.dtype.name}{list(found.shape)}")
    return 0.0, found.astype(jnp.float32)


def accuracy_of(argmax: jax.Array, targets: jax.Array, ignore_index: int) -> jax.Array:
    """Returns the fraction of tokens whose largest logit is their target."""
    if targets.ndim > argmax.ndim:
        raise NotImplementedError("accuracy: needs one target a token, got target_weight")
    valid = targets != ignore_index
    correct = (argmax == targets) & valid
    return correct.sum(dtype=jnp.float32) / jnp.maximum(valid.sum(dtype=jnp.float32), 1.0)


def check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: expected 'none', 'mean' or 'sum', got {reduction!r}")


class Prepared(NamedTuple):
    """Checked arguments of a loss, in the library's form."""

    options: LossOptions
    inputs: dict[str, jax.Array | None]  # hidden [N, D], weight, bias
    fixed: dict[str, jax.Array | None]
    normalizer: jax.Array | None  # the divisor of the sum, if it is an array
    lead: tuple[int, ...]  # the leading sizes of hidden
    targets: jax.Array  # of the leading sizes


def prepare(function: str, a: Arguments, wide: bool = False, blocks: bool = False) -> Prepared:
    """Checks and converts the arguments. Raises the tracing errors of ``linear_cross_entropy``."""
    budget = parse_bytes(a.memory_budget)
    given = all_terms(function, a.terms)
    check_reduction(a.reduction)
    x, w, b = _arguments.head(a.hidden, a.weight, a.bias, wide, blocks)
    sums = _arguments.sum_dtype(x.dtype)
    lead, (vocab, dim) = x.shape[:-1], w.shape
    per_token: tuple[int, ...] = ()
    if a.weights.target_weight is not None:
        target_weight = _arguments.floats("target_weight", a.weights.target_weight, sums == jnp.float64)
        if target_weight.ndim != x.ndim or target_weight.shape[:-1] != lead or target_weight.shape[-1] == 0:
            raise ValueError(
                f"target_weight: expected {list(lead)} with K weights each, got {list(target_weight.shape)}"
            )
        per_token = target_weight.shape[-1:]
    y = _arguments.targets(a.targets, lead + per_token)
    ignored = _arguments.integer("ignore_index", a.ignore_index)
    static_normalizer, normalizer_array = divisor(a.normalizer, a.reduction)
    options = LossOptions(
        reduction="sum" if normalizer_array is not None else a.reduction,
        precision=_arguments.precision(a.precision, x.dtype),
        ignore_index=ignored,
        softcap=_arguments.softcap(a.softcap),
        logit_scale=_arguments.number("logit_scale", a.logit_scale),
        normalizer=static_normalizer,
        memory_budget=budget,
        expected_ignored=share("expected_ignored", a.expected_ignored),
        **{name: _arguments.number(name, value) for name, value in given.items()},
    )

    weights = _arguments.loss_weights(a.weights, vocab, lead, per_token, sums)
    flat = weight_shapes(vocab, (-1,), per_token)
    inputs = {"hidden": x.reshape(-1, dim), "weight": w, "bias": b}
    fixed = {"targets": y.reshape(-1, *per_token)}
    fixed |= {n: None if w is None else w.reshape(s) for n, w, s in zip(flat._fields, weights, flat)}
    return Prepared(options, inputs, fixed, normalizer_array, lead, y)


def _is_zero(x: jax.Array) -> jax.Array:
    """Returns where x is 0, by its bits: XLA compares denormal numbers as 0."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint64 if x.dtype == jnp.float64 else jnp.uint32)
    return (bits << 1) == 0


@either_name
@takes_terms
def linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    reduction: str = DEFAULT.reduction,
    ignore_index: int = DEFAULT.ignore_index,
    class_weight: ArrayLike | None = None,
    softcap: float | None = None,
    logit_scale: float = DEFAULT.logit_scale,
    temperature: ArrayLike | None = None,
    normalizer: float | ArrayLike | None = None,
    token_weight: ArrayLike | None = None,
    target_weight: ArrayLike | None = None,
    accuracy: bool = False,
    return_lse: bool = False,
    return_argmax: bool = False,
    return_target_logits: bool = False,
    precision: str | None = None,
    memory_budget: int | str | None = None,
    expected_ignored: float = 0.0,
    sharding: Sharding | None = None,
    **terms: Unpack[LossTermArguments],
) -> jax.Array | tuple[jax.Array, ...]:
    """Cross entropy of ``softmax(softcap(logit_scale * (hidden @ weight.T + bias)))``, without storing the logits.

    Args:
        hidden: [..., D], float32, bfloat16 or float16; or float64, in JAX's own operations, whose results are float64.
        weight: [V, D], the dtype of hidden, or one of both float32 beside 16 bits: both are multiplied as float32. That
            copies 16-bit hidden states (4 N D bytes). A 16-bit weight is not copied: kernels read it as it is, on a GPU
            with a strip of it in float32 (32 MiB), JAX's operations with a block of it. It does not go with a sharded
            vocabulary.
        targets: [...], int32 or int64; with ``target_weight`` [..., K]: K weighted token ids per token.
        bias: [V], float.
        reduction: "none" (loss [...]), "mean", "sum".
        ignore_index: tokens with this target have loss 0 and no gradient. They cost nothing, except where all tokens are
            multiplied: on a GPU by the kernel ``cublas`` (float32, two dtypes, compute capability 7.5) and in cuBLAS's
            gradients without expected_ignored (docs/use/gpu.md); and by JAX's own operations. None is -100.
        {terms}
        class_weight: [V], float; ``mean`` divides by the weights of the targets.
        softcap: ``c * tanh(logits / c)``.
        logit_scale: factor of the products.
        temperature: a number above 0, or an array [...] of floats above 0, with a gradient: divides the logits, after the
            softcap. Without bias and softcap, an array divides hidden states of float32, and on a CPU those of 16 bits (in
            float32, 4 N D bytes). Otherwise JAX's operations compute the logits in float32, a chunk at a time: four GEMMs,
            without label_smoothing and sharding.
        normalizer: ``mean`` divides by this positive number or scalar array instead, such as the token count of all
            devices. The value of an array is not checked, since it may be traced.
        token_weight: [...], float: factors of the tokens' losses. A token of weight 0 is left out, whatever its hidden
            state holds, unless argmax, accuracy or a temperature is asked for.
        target_weight: [..., K], float; with it ``mean`` divides by the token weights.
        accuracy: also returns the fraction of tokens whose largest logit is their target.
        return_lse: also returns the log-sum-exp [...], with a gradient; 0 for ignored tokens.
        return_argmax: also returns the token id of the largest logit [...], int32; -1 for ignored tokens.
        return_target_logits: also returns the logits of the targets, shaped as targets, with a gradient; 0 for ignored
            ones. They and the log-sum-exp cost one more GEMM, and three in a backward that reaches them.
        precision: of the products of float32 arrays on a GPU, summed in float32. "ieee": float32. "tf32": operands are
            rounded to TF32. "bf16x3": three products of bf16, some 1e-6 of each off. Both from compute capability 8.0
            on. None: as JAX multiplies when the call is traced, by
            ``jax.default_matmul_precision``. Other arrays take "ieee" alone.
        memory_budget: bytes, or text such as "512MiB", that a call may take beyond inputs and outputs, on each device.
            It is a ceiling: a call takes no more than its speed is worth, and less than the fp32 logits if a plan does.
        expected_ignored: the share of the tokens that is expected to be ignored, in [0, 1]: a hint for GPUs whose
            gradients are cuBLAS's, which else takes all tokens. It then multiplies as many as are expected to count, and
            a slower kernel the others that do. Results differ by the order of sums alone. 0 with a sharded vocabulary.
        sharding: how vocabulary and tokens are sharded over a mesh. None: taken from the types of hidden and weight, if
            explicit. A sharded vocabulary costs four GEMMs.

    Returns:
        The loss, float32, or a tuple (loss, lse, accuracy, argmax, target logits) of those asked for. Accuracy and
        argmax have no gradient. A mean over no token is 0.

    Gradients by hidden, weight and bias are summed in float32 and have the inputs' dtypes. Those that are not asked for
    are not computed. "mean" and "sum" compute them in the forward, three GEMMs of N * V * D multiply-adds in all. They
    are saved until the backward, which scales them. "none" computes them in the backward. Other arrays have no
    gradient, and asking for one is an error (use jax.lax.stop_gradient). Results are deterministic, bit for bit.

    Batch invariance: with reduction "none" the loss and lse of a token have the same bits whatever the other tokens of
    the call: their number, order, values and mask. Nor do gradients, memory_budget and threads matter. The library's
    kernels keep this on a CPU, and on a GPU from compute capability 8.0 on for 16-bit hidden and weight. JAX's own
    operations do not, among them those for a temperature array. Nor do a sharded vocabulary, and float32 on a GPU.

    Extra memory: the plan's workspace, within ``memory_budget``.

    Raises, while the program is traced: ValueError and TypeError that name the argument; NotImplementedError if no
    kernel supports the call. A target outside [0, V) that is not ignore_index makes the program fail on the CPU. This
    is a ValueError that names its position, or a RuntimeError in some versions of JAX. On other devices, and in JAX's
    own operations, the loss is NaN, and the gradients are those of an ignored token.
    """
    return cross_entropy(_arguments.named(locals()))


def cross_entropy(a: Arguments) -> jax.Array | tuple[jax.Array, ...]:
    """Computes ``linear_cross_entropy``."""
    from . import sharding as meshes  # imported here, since that module imports this one

    a = _arguments.with_ignored(a)
    if a.sharding is None:
        a = a._replace(sharding=meshes.of_types(a.hidden, a.weight))
    if a.temperature is not None:
        from . import tempered

        a = tempered.folded(a)
    if a.sharding is not None:
        return meshes.sharded_cross_entropy(a)
    call = prepare("linear_cross_entropy", a, wide=True, blocks=True)
    options, inputs, fixed, normalizer_array = call.options, call.inputs, call.fixed, call.normalizer
    lead, ignored, y = call.lead, options.ignore_index, call.targets
    wants_argmax = bool(a.accuracy or a.return_argmax)
    axes = _ffi.axes_of(*[t for t in (*inputs.values(), *fixed.values()) if t is not None])
    varying, fixed = _ffi.varying(inputs, axes), _ffi.varying(fixed, axes)
    if a.temperature is None:
        counted = fixed
        if fixed["token_weight"] is not None and fixed["target_weight"] is None and not wants_argmax:
            # A weight of 0 leaves the token out of the loss: it costs nothing.
            targets = jnp.where(_is_zero(fixed["token_weight"]), ignored, fixed["targets"])
            counted = {**fixed, "targets": targets.astype(fixed["targets"].dtype)}
        found = token_losses(options, ("argmax",) * wants_argmax, varying, counted)
    else:
        found = logits = tempered.losses(call, a.temperature, wants_argmax)
    loss = found["loss"].reshape(lead) if a.reduction == "none" else found["loss"]
    if normalizer_array is not None:
        loss = loss / normalizer_array
    results = [loss]
    valid = y != ignored
    names = ("lse",) * bool(a.return_lse) + ("target_logit",) * bool(a.return_target_logits)
    if names and a.temperature is None:
        logits = dict(zip(names, head(head_options(options), names, varying, {"targets": fixed["targets"]})))
    if a.return_lse:
        results.append(logits["lse"].reshape(lead))
    if a.accuracy:
        results.append(accuracy_of(found["argmax"].reshape(lead), y, ignored))
    if a.return_argmax:
        results.append(found["argmax"].reshape(lead))
    if a.return_target_logits:
        results.append(jnp.where(valid, logits["target_logit"].reshape(y.shape), 0.0))
    return results[0] if len(results) == 1 else tuple(results)
