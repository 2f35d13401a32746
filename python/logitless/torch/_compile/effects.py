"""Side effects of operations in a graph that torch.compile has captured."""

from __future__ import annotations

import inspect
import operator

import torch

_IN_PLACE = {
    f for name, f in vars(operator).items() if name.startswith("i") and name[1:] in vars(operator)
}  # such as iadd for add
REGION = "logitless_region"  # the name of functions that replace regions
_STATISTICS = {"batch_norm", "instance_norm"}  # they update running statistics


def name_of(node: torch.fx.Node) -> str:
    """Returns the name of the function or method, without a module."""
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[1]
    return getattr(node.target, "__name__", str(node.target))


def mutates(node: torch.fx.Node) -> bool:
    """Returns whether a node may write into existing memory."""
    if node.op == "call_module":
        return True
    if node.op not in ("call_function", "call_method"):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    name = name_of(node)
    if node.target in _IN_PLACE or node.target is operator.setitem or name in _STATISTICS or name == "__setitem__":
        return True
    if (name.endswith("_") and not name.endswith("__")) or node.kwargs.get("out") is not None:
        return True
    return _asked_to(node)


def _asked_to(node: torch.fx.Node) -> bool:
    """Returns whether an argument named inplace asks for it."""
    if node.kwargs.get("inplace"):
        return True
    try:
        names = list(inspect.signature(node.target).parameters) if callable(node.target) else []
    except (TypeError, ValueError):
        return False
    place = names.index("inplace") if "inplace" in names else len(node.args)
    return place < len(node.args) and bool(node.args[place])


def written(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Returns the nodes that a mutating node may write into."""
    if isinstance(node.target, torch._ops.OpOverload) or node.op == "call_module" or name_of(node) in _STATISTICS:
        return node.all_input_nodes
    given = [*node.args[:1], node.kwargs.get("input"), node.kwargs.get("out")]
    return [n for n in node.all_input_nodes if n in given or isinstance(node.kwargs.get("out"), (tuple, list))]


def opaque(node: torch.fx.Node) -> bool:
    """Returns whether a node's effect is unknown or changes how others compute: switches of gradients or autocast,
    higher-order operators."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    name = name_of(node)
    return name == REGION or name.startswith(("_enter_", "_exit_", "_set_", "set_", "_saved_tensors", "_vmap_", "_grad_", "_jvp_"))
