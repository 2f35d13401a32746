"""Lazy heads under tensor parallelism, with hidden states replicated over the ranks that share the vocabulary.

Code that shards a head wraps its forward and gathers the result: a replaced forward (transformers' ``tp_plan``), or a
hook (PyTorch's ``parallelize_module``). The wrapper is removed while the logits are lazy.
"""

from __future__ import annotations

from torch import Tensor, nn

from ..dtensor import _is_dtensor

_ASIDE = "_lazy_aside"


def _is_replica(hidden, weight) -> bool:
    from torch.distributed.tensor import Replicate

    return hidden.device_mesh == weight.device_mesh and all(isinstance(p, Replicate) for p in hidden.placements)


def put_aside(head: nn.Module) -> None:
    """Removes the wrappers that gather the logits of a head with a DTensor weight; does nothing to other heads."""
    if not _is_dtensor(head._parameters.get("weight")):
        return
    aside = head.__dict__.setdefault(_ASIDE, {"forward": None, "hooks": {}})
    if getattr(head.__dict__.get("forward"), "__module__", "").startswith("transformers."):
        aside["forward"] = head.__dict__.pop("forward")
    for key, hook in list(head._forward_hooks.items()):
        if getattr(hook, "__qualname__", "").startswith("distribute_module."):
            aside["hooks"][key] = head._forward_hooks.pop(key)


def put_back(head: nn.Module) -> None:
    aside = head.__dict__.pop(_ASIDE, {"forward": None, "hooks": {}})
    if aside["forward"] is not None:
        head.__dict__["forward"] = aside["forward"]
    head._forward_hooks.update(aside["hooks"])


def local_states(head: nn.Module, weight, hidden: Tensor) -> tuple[Tensor, bool]:
    """Returns (plain hidden states, whether they are replicated over the mesh of the head's weight). A DTensor with
    other placements is returned unchanged."""
    if not _is_dtensor(weight):
        return hidden, False
    if _is_dtensor(hidden):
        if not _is_replica(hidden, weight):
            return hidden, False
        put_aside(head)
        return hidden.to_local(), True
    return hidden, head.__dict__.get(_ASIDE, {}).get("forward") is not None


def replicated_on(weight, hidden: Tensor) -> Tensor:
    """Returns replicated hidden states as a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = weight.device_mesh
    return DTensor.from_local(hidden, mesh, [Replicate()] * mesh.ndim, run_check=False)


def split_logits(hidden: Tensor, weight, bias) -> Tensor:
    """Computes ``linear`` on each rank's vocabulary shard and gathers the result; weights are not gathered."""
    if bias is not None and not _is_dtensor(bias):
        bias = replicated_on(weight, bias)
    return nn.functional.linear(replicated_on(weight, hidden), weight, bias).full_tensor()
