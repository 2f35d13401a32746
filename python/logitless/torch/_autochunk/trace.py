"""A function of tensors, and its gradients, as FX graphs of core ATen operations. Nothing runs: tensors are fake."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.utils._pytree as pytree
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from logitless._autochunk.options import Unsupported
from logitless.torch._autochunk.attention import OneAttention

aten = torch.ops.aten

TENSOR = object()

# Core ATen has these decomposed, tensor programs have them whole; and the other way round.
_KEPT = (aten.logsumexp.default, aten.embedding_dense_backward.default, aten.roll.default)
_ALSO = (aten.elu, aten.leaky_relu, aten.leaky_relu_backward, aten.elu_backward, aten.hardtanh_backward, aten.addcmul)


@dataclass
class Traced:
    """What a function computes of its tensors, for one set of shapes, dtypes and devices."""

    names: list[str]  # of the inputs, then of the captured tensors
    captured: list[torch.Tensor]  # tensors that the function made, or closes over
    forward: torch.fx.GraphModule  # inputs -> tensor outputs
    joint: torch.fx.GraphModule | None  # inputs, then tangents -> outputs, then gradients that are not None
    needs_grad: list[bool]  # of each input
    has_grad: list[bool]  # of each input: whether joint returns its gradient
    differentiable: list[bool]  # of each tensor output
    outputs: list[torch.Tensor]  # fake
    spec: pytree.TreeSpec  # of the outputs
    constants: list  # outputs that are no tensors; TENSOR where one stands


@functools.cache
def _decompositions() -> dict:
    table = dict(core_aten_decompositions().items())
    for op in _KEPT:
        table.pop(op, None)
    return {**table, **get_decompositions(_ALSO)}


def _fx(function: Callable, inputs: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    try:
        # Other attention than one operation: PyTorch's kernels have no decomposition.
        with sdpa_kernel(SDPBackend.MATH), OneAttention():
            return make_fx(function, decomposition_table=_decompositions())(*inputs)
    except (DynamicOutputShapeException, DataDependentOutputException, UnsupportedOperatorException) as error:
        op = getattr(error, "func", None) or (error.args[0] if error.args else "an operation")
        raise Unsupported(
            f"autochunk: {op} needs the values of a tensor (a shape or a branch depends on them); only shapes are "
            "known when a function is traced"
        ) from error


def _captured(graph: torch.fx.GraphModule, known: dict[int, int], names: list[str], tensors: list) -> None:
    """Makes inputs of the tensors a graph holds: known maps the id of each to its place."""
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    anchor = placeholders[-1]
    made = {}
    for node in list(graph.graph.nodes):
        if node.op != "get_attr":
            continue
        tensor = getattr(graph, node.target)
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, FakeTensor):
            raise Unsupported(f"autochunk: the constant {node.target} of the function is no tensor with values")
        if tensor.requires_grad and torch.is_grad_enabled():
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


def trace(
    function: Callable, inputs: Sequence[torch.Tensor], names: Sequence[str], needs_grad: Sequence[bool]
) -> Traced:
    """Traces ``function(*inputs)``, and its gradients by the inputs that need one, for a tangent of each output."""
    fake = [t for t in inputs if isinstance(t, FakeTensor)]
    mode = fake[0].fake_mode if fake else FakeTensorMode(allow_non_fake_inputs=True)
    found = {}

    def call(tensors):
        # Inputs appear once with and once without a history, as autograd gives them to a Function.
        leaves = [t.detach().requires_grad_() if need else t for t, need in zip(tensors, needs_grad)]
        with torch.enable_grad():
            flat, spec = pytree.tree_flatten(function(*leaves))
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
        gradients = torch.autograd.grad(sources, wanted, tensors[len(inputs) :], allow_unused=True)
        found["gradients"] = [g is not None for g in gradients]
        return [o.detach() for o in outputs] + [g for g in gradients if g is not None]

    with mode:
        fake = [t.detach() if isinstance(t, FakeTensor) else mode.from_tensor(t.detach()) for t in inputs]
        forward_graph = _fx(forward, fake)
        if not found["outputs"]:
            raise ValueError("autochunk: the function returns no tensor")
        joint_graph = None
        has_grad = [False] * len(inputs)
        if any(found["differentiable"]):
            tangents = [torch.empty_like(o) for o, yes in zip(found["outputs"], found["differentiable"]) if yes]
            outputs = list(found["outputs"])
            joint_graph = _fx(joint, [*fake, *tangents])
            found["outputs"] = outputs
            made = iter(found["gradients"])
            has_grad = [need and next(made) for need in needs_grad]
    known, captured, all_names = {}, [], list(names)
    for graph in (forward_graph, joint_graph):
        if graph is not None:
            _captured(graph, known, all_names, captured)
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
