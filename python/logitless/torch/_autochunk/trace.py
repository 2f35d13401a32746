"""Traces a function of tensors, and its gradients, to FX graphs of core ATen operations. Tensors are fake, and nothing
runs."""

from __future__ import annotations

import contextlib
import functools
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.utils._pytree as pytree
from torch._C._functorch import peek_interpreter_stack, pop_dynamic_layer_stack, push_dynamic_layer_stack
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

from logitless._autochunk.function import check_constants, tracing
from logitless._autochunk.options import Unsupported
from logitless.torch._autochunk.attention import OneAttention
from logitless.torch._autochunk.ctc import OneCtc
from logitless.torch._autochunk.masked import MaskedRows, MaskRefused, check_outputs
from logitless.torch._autochunk.one_hot import OneHot
from logitless.torch._autochunk.running import OwnRunning
from logitless.torch._autochunk.locations import Locations, location_of
from logitless.torch._autochunk.writes import Writes

aten = torch.ops.aten

TENSOR = object()
_OWN_GENERATOR = (
    "autochunk: random numbers by a generator of its own have no form in a tensor program; expected the default one, "
    "which torch.manual_seed sets"
)

# Operations that core ATen decomposes and tensor programs do not; and the reverse.
_KEPT = (aten.logsumexp.default, aten.embedding_dense_backward.default, aten.roll.default, aten.eye.default, aten.eye.m)
_KEPT += (aten.im2col.default, aten.col2im.default)
_ALSO = (aten.elu, aten.leaky_relu, aten.leaky_relu_backward, aten.elu_backward, aten.hardtanh_backward, aten.addcmul)
_ALSO += (aten.native_group_norm, aten.native_batch_norm)


# Alternatives to operations whose result shapes depend on values.
_INSTEAD = {
    "nonzero": "expected a mask over all rows in the place of x[mask]: torch.where(mask, loss, 0).sum() / mask.sum()",
    "masked_select": "expected torch.where(mask, x, 0)",
    "_unique2": "expected a sort",
    "bincount": "expected torch.zeros(n).index_add_(0, x, weights), of n counts whatever x holds",
    "_local_scalar_dense": "expected torch.where in the place of a branch or of item()",
}


_OUTPUTS = "tensors in tuples, lists and dicts, or a class that torch.utils._pytree knows (register_dataclass)"

# Errors of PyTorch that a trace causes, by a part of their text.
_ADVICE = {
    ".numpy() is not supported": "Tensor.numpy() needs the values of a tensor; only shapes are known when a function is traced",
    # PyTorch's forward mode makes values of examples on the device meta.
    "devices, meta and": "torch.func.vmap of a Hessian by forward mode has no form here; expected jacrev(jacrev(...))",
    "When use_reentrant=True": "a checkpoint with use_reentrant=True has no form here; expected use_reentrant=False",
    # Within gradients PyTorch runs without the modes that keep attention whole.
    "torch.utils.checkpoint: ": "a checkpoint whose operations are others when it is run again for the gradients, such as "
    "around scaled_dot_product_attention, has no form here; leave it out: what is cheap is computed again without it",
}


@dataclass
class Traced:
    """A traced function, for one set of shapes, dtypes and devices."""

    names: list[str]  # names of the inputs, then of the captured tensors
    captured: list[torch.Tensor]  # tensors that the function makes or closes over
    forward: torch.fx.GraphModule  # inputs -> tensor outputs
    joint: torch.fx.GraphModule | None  # inputs, upstream gradients -> outputs, gradients that are not None
    needs_grad: list[bool]  # for each input
    has_grad: list[bool]  # for each input: whether joint returns its gradient
    differentiable: list[bool]  # for each tensor output
    outputs: list[torch.Tensor]  # fake
    spec: pytree.TreeSpec  # the tree of the outputs
    constants: list  # outputs that are not tensors; TENSOR in place of one that is


def _checks_arguments(error: BaseException) -> bool:
    """Returns whether an error was raised where torch.distributions checks arguments."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__") == "torch.distributions.distribution" for frame in frames)


@functools.cache
def _decompositions() -> dict:
    table = dict(core_aten_decompositions().items())
    for op in _KEPT:
        table.pop(op, None)
    return {**table, **get_decompositions(_ALSO), aten.native_dropout.default: _dropout}


def _dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Decomposes the dropout of a GPU, and its mask, into the operations of a CPU's dropout: the numbers are the same."""
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    noise = aten.bernoulli.p(x, 1 - p)
    return x * (noise / (1 - p) if p < 1 else noise), noise.bool()


@contextlib.contextmanager
def _no_transforms():
    """Leaves all transforms of torch.func for the duration."""
    stack = []
    try:
        while peek_interpreter_stack() is not None:
            stack.append(pop_dynamic_layer_stack())
        yield
    finally:
        while stack:
            push_dynamic_layer_stack(stack.pop())


# Returns the caller's hooks of saved tensors; older versions of PyTorch do not tell.
_hooks_of_saved_tensors = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignore_tracing: ())


def _same(x):
    return x


class Around(NamedTuple):
    """The caller's context that a trace depends on."""

    grad: bool  # gradients are enabled
    transformed: bool  # a transform of torch.func is active


@functools.cache
def _lock_of_traces() -> tuple[contextlib.AbstractContextManager, list[str]]:
    """Returns the lock of torch.compile, and why this process can never take it: nothing, or one reason."""
    from torch._dynamo.convert_frame import compile_lock  # slow to import

    never = []

    def look() -> None:
        if compile_lock.acquire(blocking=False):
            compile_lock.release()
        else:  # by a thread that the fork left behind, which had replaced functions of PyTorch
            never.append("autochunk: this process was forked while another thread traced a function; expected one that "
                         "was started by the method spawn or forkserver, or forked before or after the trace")

    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=look)
    return compile_lock, never


def one_at_a_time() -> contextlib.AbstractContextManager:
    """Returns the lock of torch.compile, which this thread may hold already. ``torch.fx`` replaces global functions while
    it traces, so two threads must not trace at once."""
    lock, never = _lock_of_traces()
    if never:
        raise RuntimeError(never[0])
    return lock


@contextlib.contextmanager
def alone() -> Iterator[Around]:
    """Isolates a trace from the caller's context: transforms, modes, a tracer's state, and hooks of saved tensors
    (checkpoints count them)."""
    around = Around(torch.is_grad_enabled(), peek_interpreter_stack() is not None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_at_a_time())
        stack.enter_context(torch._dynamo.config.patch(error_on_nested_fx_trace=False))  # it is traced as it was written
        stack.enter_context(tracing())
        stack.enter_context(_no_transforms())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._guards.tracing(None))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if torch.is_anomaly_enabled():  # it reads the gradients' values
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None
        if not disabled and _hooks_of_saved_tensors(True) is not None:  # under hooks torch.func is refused
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))
        yield around


def _fx(function: Callable, inputs: Sequence[torch.Tensor], around: Around) -> torch.fx.GraphModule:
    locations = Locations(around.transformed)
    try:
        # Attention outside of OneAttention uses the math backend, since PyTorch's fused kernels have no decomposition.
        modes = OneAttention(), OneCtc(), OneHot(), OwnRunning(), Writes(), MaskedRows()
        with locations, sdpa_kernel(SDPBackend.MATH), _within(modes):
            return make_fx(function, decomposition_table=_decompositions())(*inputs)
    except (DynamicOutputShapeException, DataDependentOutputException, UnsupportedOperatorException) as error:
        op = getattr(error, "func", None) or (error.args[0] if error.args else "an operation")
        at = _at(locations)
        if isinstance(error, UnsupportedOperatorException):
            raise Unsupported(
                f"autochunk: {at}{op} has no fake kernel, which tells the shapes of its results; expected one "
                "(torch.library.register_fake)"
            ) from error
        instead = next((f"; {text}" for name, text in _INSTEAD.items() if str(op).startswith(f"aten.{name}")), "")
        if _checks_arguments(error):
            instead = "; expected validate_args=False, since torch.distributions checks values of its arguments"
        raise Unsupported(
            f"autochunk: {at}{op} needs the values of a tensor (a shape or a branch depends on them); only shapes are "
            f"known when a function is traced{instead}"
        ) from error
    except NotImplementedError as error:  # a RuntimeError, too. PyTorch before 2.13 has no generator in a graph
        if "Generator" not in str(error):
            raise
        raise Unsupported(_OWN_GENERATOR) from error
    except RuntimeError as error:
        instead = next((text for name, text in _ADVICE.items() if name in str(error)), None)
        if instead is None:
            raise
        raise Unsupported(f"autochunk: {_at(locations)}{instead}") from error
    except MaskRefused as error:
        raise Unsupported(f"autochunk: {_at(locations)}{error}") from error


@contextlib.contextmanager
def _within(modes: Sequence[contextlib.AbstractContextManager]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


def _at(locations: Locations) -> str:
    location = location_of(locations.last)
    return f"{location}: " if location else ""


def _captured(
    graph: torch.fx.GraphModule, known: dict[int, int], names: list[str], tensors: list, around: Around
) -> None:
    """Makes inputs of the tensors that a graph holds. known: maps the id of each to its index."""
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    anchor = placeholders[-1]
    made = {}
    for node in list(graph.graph.nodes):
        if node.op != "get_attr":
            continue
        tensor = getattr(graph, node.target)
        if isinstance(tensor, torch.Generator):
            raise Unsupported(_OWN_GENERATOR)
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor):
            raise Unsupported(
                f"autochunk: the constant {node.target} of the function is no tensor with values. Where a cache holds it "
                "(functools.lru_cache) that an earlier trace filled, empty it, and call the function itself once before"
            )
        if tensor.requires_grad and around.grad:
            raise ValueError(
                f"autochunk: the function closes over a tensor {list(tensor.shape)} that requires a gradient, which "
                "would be lost; pass it as an argument, or give the nn.Module itself"
            )
        if id(tensor) not in known:
            known[id(tensor)] = len(tensors)
            tensors.append(tensor)
            names.append(f"constant{len(tensors) - 1}")
        place = known[id(tensor)]
        if place not in made:
            with graph.graph.inserting_after(anchor):
                made[place] = graph.graph.placeholder(f"captured_{place}")
            made[place].meta["val"] = tensor
            made[place].meta["captured"] = place
        node.replace_all_uses_with(made[place])
        graph.graph.erase_node(node)
    graph.recompile()


def gradients_of(function: Callable, given: Sequence, sources: Sequence, wanted: Sequence, cotangents: Sequence) -> tuple:
    """Returns the gradients of a function's outputs. given: its tensors. The function may have a context of its own for
    them: ``around_gradients(run, given)``."""
    around = getattr(function, "around_gradients", lambda run, given: run())
    return around(lambda: torch.autograd.grad(sources, wanted, cotangents, allow_unused=True), given)


def has_half(graph: torch.fx.GraphModule) -> bool:
    values = (n.meta.get("val") for n in graph.graph.nodes)
    return any(isinstance(v, torch.Tensor) and v.dtype == torch.float16 for v in values)


def trace(
    function: Callable, inputs: Sequence[FakeTensor], names: Sequence[str], needs_grad: Sequence[bool], around: Around
) -> Traced:
    """Traces ``function(*inputs)`` and its gradients by the inputs that need one, with an upstream gradient for each
    output. It must be called within ``alone``. around: the result of ``alone``."""
    found = {}

    def call(tensors):
        # Inputs appear once with and once without a history, as autograd passes them to a Function.
        leaves = [t.detach().requires_grad_() if need else t for t, need in zip(tensors, needs_grad)]
        with torch.enable_grad():
            flat, spec = pytree.tree_flatten(function(*leaves))
        check_outputs(flat)
        constants = [o for o in flat if not isinstance(o, (torch.Tensor, torch.nn.Module))]
        check_constants(constants, pytree.tree_leaves, lambda leaf: isinstance(leaf, FakeTensor), _OUTPUTS)
        found["spec"] = spec
        found["constants"] = [TENSOR if isinstance(o, torch.Tensor) else o for o in flat]
        return leaves, [o for o in flat if isinstance(o, torch.Tensor)]

    def forward(*tensors):
        _, outputs = call(tensors)
        found["differentiable"] = [o.requires_grad for o in outputs]
        found["outputs"] = [o.detach() for o in outputs]
        return found["outputs"]

    def joint(*tensors):
        leaves, outputs = call(tensors[: len(inputs)])
        wanted = [leaf for leaf, need in zip(leaves, needs_grad) if need]
        sources = [o for o, yes in zip(outputs, found["differentiable"]) if yes]
        gradients = gradients_of(function, leaves, sources, wanted, tensors[len(inputs) :])
        found["gradients"] = [g is not None for g in gradients]
        return [o.detach() for o in outputs] + [g for g in gradients if g is not None]

    with inputs[0].fake_mode:
        forward_graph = _fx(forward, inputs, around)
        if not found["outputs"]:
            raise ValueError("autochunk: the function returns no tensor")
        for made in found["outputs"]:
            if made.device != inputs[0].device:
                raise Unsupported(
                    f"autochunk: the function returns a tensor on {made.device}; expected it on {inputs[0].device}, where "
                    "its arguments are"
                )
        joint_graph = None
        has_grad = [False] * len(inputs)
        if any(found["differentiable"]):
            cotangents = [torch.empty_like(o) for o, yes in zip(found["outputs"], found["differentiable"]) if yes]
            outputs = list(found["outputs"])
            joint_graph = _fx(joint, [*inputs, *cotangents], around)
            found["outputs"] = outputs
            made = iter(found["gradients"])
            has_grad = [need and next(made) for need in needs_grad]
    known, captured, all_names = {}, [], list(names)
    for graph in (forward_graph, joint_graph):
        if graph is not None:
            _captured(graph, known, all_names, captured, around)
    return Traced(
        all_names,
        captured,
        forward_graph,
        joint_graph,
        list(needs_grad),
        has_grad,
        found["differentiable"],
        found["outputs"],
        found["spec"],
        found["constants"],
    )
