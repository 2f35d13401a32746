"""Lazy heads under tensor parallelism, whose hidden states are the same on all ranks that share its words.

What splits a head stands around its forward and gathers what that returns: a forward in the head's place
(transformers' ``tp_plan``), or a hook (PyTorch's ``parallelize_module``). It is put aside while the logits are lazy.
"""

from __future__ import annotations

from torch import Tensor, nn

from .._distributed import _is_dtensor

_ASIDE = "_lazy_aside"


def _is_replica(hidden, weight) -> bool:
    from torch.distributed.tensor import Replicate

    return hidden.device_mesh == weight.device_mesh and all(isinstance(p, Replicate) for p in hidden.placements)


def put_aside(head: nn.Module) -> None:
    """What gathers the logits of a head whose weight is a DTensor; does nothing to others."""
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
    """(plain hidden states, whether they are the same on all ranks of the mesh of the head's weight). A DTensor that is
    placed otherwise stays as it is."""
    if not _is_dtensor(weight):
        return hidden, False
    if _is_dtensor(hidden):
        if not _is_replica(hidden, weight):
            return hidden, False
        put_aside(head)
        return hidden.to_local(), True
    return hidden, head.__dict__.get(_ASIDE, {}).get("forward") is not None


def replicated_on(weight, hidden: Tensor) -> Tensor:
    """Hidden states that are the same on all ranks as a DTensor that says so."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = weight.device_mesh
    return DTensor.from_local(hidden, mesh, [Replicate()] * mesh.ndim, run_check=False)


def split_logits(hidden: Tensor, weight, bias) -> Tensor:
    """``linear`` of each rank's words, then gathered: no rank needs the words of another."""
    if bias is not None and not _is_dtensor(bias):
        bias = replicated_on(weight, bias)
    return nn.functional.linear(replicated_on(weight, hidden), weight, bias).full_tensor()
