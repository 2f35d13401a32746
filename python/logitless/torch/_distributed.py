"""DTensor in, local tensors out; and which words of the vocabulary they are."""

from __future__ import annotations

import sys
from typing import Any, Optional

import torch
from torch import Tensor, nn

from . import _func
from ._ranks import ALL, Words, words_of


def _is_dtensor(t) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # nobody has a DTensor who has not imported it
    return module is not None and isinstance(t, module.DTensor)


class _Share(torch.autograd.Function):
    """The tensor itself; of its gradient one part in ``ranks``."""

    @staticmethod
    def forward(ctx, tensor, ranks):
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / ctx.ranks, None


class _Local(torch.autograd.Function):
    """What this rank has of a DTensor. Its gradient is a DTensor with the strides of the whole, which ``to_local`` computes
    from this rank's part: where columns are uneven they are others then, and PyTorch gathers to copy into the right ones."""

    @staticmethod
    def forward(ctx, t, placements):
        ctx.of = t.device_mesh, placements, t.shape, t.stride()
        local = t.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx, gradient):
        from torch.distributed.tensor import DTensor

        mesh, placements, shape, stride = ctx.of
        return DTensor.from_local(gradient, mesh, placements, run_check=False, shape=shape, stride=stride), None


def whole(t):
    """A DTensor gathered, on all ranks of its mesh; others as they are. Without a gradient."""
    return t.full_tensor() if _is_dtensor(t) else t


def mean_gradient(gradient: Tensor, like):
    """What each rank's loss gives of a weight or bias, as the gradient of ``like``: of a DTensor the mean over the ranks
    of its mesh, placed as it is."""
    if not _is_dtensor(like):
        return gradient
    from torch.distributed.tensor import DTensor, Partial

    mesh = like.device_mesh
    parts = DTensor.from_local(gradient / mesh.size(), mesh, [Partial()] * mesh.ndim, run_check=False)
    return parts.redistribute(mesh, like.placements)


def replicated(name: str, t):
    """A DTensor that is the same everywhere as a local tensor; others as they are."""
    if not _is_dtensor(t):
        return t
    from torch.distributed.tensor import Replicate

    if any(not isinstance(p, Replicate) for p in t.placements):
        raise NotImplementedError(f"{name}: expected a DTensor placed Replicate, got {t.placements}")
    return t.to_local()


def local(hidden, weight, target, bias) -> tuple[Tensor, Tensor, Optional[Tensor], Optional[Tensor]]:
    """Weights (and a bias) that are sharded are gathered, their gradients scattered back; hidden and target that are
    the same everywhere are taken as they are. Other placements are refused by name.

    A weight's gradient is the mean over the ranks of its mesh of what each rank's loss gives, as FSDP has it: where a
    plain hidden holds other tokens on each rank that is data parallelism; where it is the same on all of them (tensor
    parallelism) the mean is what each of them has."""
    if not any(_is_dtensor(t) for t in (hidden, weight, target, bias)):
        return hidden, weight, target, bias
    from torch.distributed.tensor import Partial, Replicate

    if _is_dtensor(hidden) and _is_dtensor(weight):
        _covered(hidden, weight)

    def gathered(t):
        if not _is_dtensor(t):
            return t
        mesh = t.device_mesh
        same = _is_dtensor(hidden)
        whole = t.redistribute(placements=[Replicate()] * mesh.ndim).to_local(
            grad_placements=[Replicate() if same else Partial()] * mesh.ndim
        )
        return whole if same or not whole.requires_grad else _Share.apply(whole, mesh.size())

    return replicated("hidden", hidden), gathered(weight), replicated("target", target), gathered(bias)


def place(a: dict[str, Any]) -> tuple[Words, bool]:
    """Makes hidden, weight, target and bias of bound arguments local tensors. Returns which words those of weight are,
    and whether a loss is of each rank's own tokens although ranks work together (data parallelism, as FSDP has it:
    weights get the mean of the ranks' gradients).

    A DTensor weight whose words are sharded over one dimension of its mesh stays where it is, on the CPU and, in
    bfloat16, on Hopper GPUs, and so does one whose columns are, where tokens are each rank's own; any other is gathered
    (``local``)."""
    hidden, weight, bias = a["hidden"], a["weight"], a["bias"]
    if a.get("sharding") is not None:
        return _given(a), False
    dim = _sharded_dim(weight)
    found = None if dim is None else _sharded_over(weight, dim, hidden, bias)
    columns = dim is not None and weight.placements[dim].dim == 1
    if found is None or (columns and found == (None, False)):  # columns move to tokens that are a rank's own
        a["gathered"] = True
        names = ("hidden", "weight", "target", "bias")
        a.update(zip(names, local(*(a[n] for n in names))))
        return ALL, False
    tokens, own = found
    a["weight"] = _part(weight, weight, dim, own)
    if bias is not None:
        a["bias"] = _part(bias, weight, dim, own, whole=columns)
    if _is_dtensor(hidden):
        if tokens is not None and a["target"] is not None:
            a["target"] = _own_tokens("target", a["target"], hidden)
        a["hidden"] = hidden.to_local()
    a["target"] = a["target"] if tokens is not None else replicated("target", a["target"])
    if tokens is not None and tokens == hidden.dim() - 2 and tokens > 0 and a.get("shift"):
        raise NotImplementedError("shift: does not go with tokens that are sharded along the sequence; shift the targets yourself")
    mesh = weight.device_mesh
    vocab, ranks, rank = weight.shape[0], mesh.size(dim), mesh.get_local_rank(dim)
    if columns:
        return Words(mesh.get_group(dim).group_name, vocab, 0, True, columns=a["weight"].shape[1]), own
    first = min(rank * -(-vocab // ranks), vocab)
    return Words(mesh.get_group(dim).group_name, vocab, first, own or tokens is not None), own


def _given(a: dict[str, Any]) -> Words:
    """Of plain tensors with the argument ``sharding``."""
    for name in ("hidden", "weight", "target", "bias"):
        if _is_dtensor(a[name]):
            raise ValueError(f"sharding: goes with plain tensors, {name} is a DTensor, whose placements say the same")
    weight = a["weight"]
    if weight.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"sharding: words on several ranks are served on the CPU and on Hopper GPUs, weight is on {weight.device}"
        )
    if weight.dtype == torch.float64:
        raise NotImplementedError("sharding: expected float32, bfloat16 or float16, got torch.float64")
    if weight.dim() != 2:
        raise NotImplementedError(f"sharding: expected a weight [rows, D], got {list(weight.shape)}")
    if _func.active():
        raise NotImplementedError("sharding: does not go with transforms of torch.func")
    words = words_of(a["sharding"], *weight.shape)
    if words.tokens and a.get("shift"):
        raise NotImplementedError("shift: does not go with sharded tokens; shift the targets yourself")
    return words


def group_of(a: dict[str, Any]) -> str:
    """The name of the process group that bound arguments say, without a check of anything; "" for none."""
    if a.get("sharding") is not None:
        name = getattr(getattr(a["sharding"], "group", None), "group_name", "")
        return name if isinstance(name, str) else ""
    dim = _sharded_dim(a["weight"])
    return "" if dim is None else a["weight"].device_mesh.get_group(dim).group_name


def _sharded_dim(weight) -> Optional[int]:
    """The dimension of its mesh that the words, or the columns, of a DTensor weight are sharded over where ranks can work
    on it together: the weight alone decides, so that all ranks do the same. Otherwise None."""
    if not _is_dtensor(weight):
        return None
    from torch.distributed.tensor import Replicate, Shard

    mesh = weight.device_mesh
    words = [i for i, p in enumerate(weight.placements) if type(p) is Shard and p.dim in (0, 1)]
    rest = [p for i, p in enumerate(weight.placements) if i not in words]
    if len(words) != 1 or any(not isinstance(p, Replicate) for p in rest) or mesh.size(words[0]) == 1:
        return None
    if weight.dim() != 2 or weight.dtype == torch.float64 or _func.active():
        return None
    return words[0] if mesh.device_type == "cpu" or _on_hopper(weight) else None


@torch.compiler.assume_constant_result
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def _on_hopper(weight) -> bool:
    """Whether a GPU's kernel takes such words over ranks."""
    if weight.device.type != "cuda" or _capability(weight.device.index) != (9, 0):
        return False
    computes = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weight.dtype
    return computes == torch.bfloat16 and weight.shape[1] % 8 == 0


def _ranks_over(t, dim: int) -> tuple[int, ...]:
    """The ranks of a dimension of a DTensor's mesh."""
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(t.device_mesh.get_group(dim)))


def _covered(hidden, weight) -> None:
    """That hidden says where it stands along every dimension of weight's mesh: its gradient depends on that."""
    known = {_ranks_over(hidden, i) for i in range(hidden.device_mesh.ndim)}
    for i in range(weight.device_mesh.ndim):
        if weight.device_mesh.size(i) > 1 and _ranks_over(weight, i) not in known:
            raise NotImplementedError(
                f"hidden: expected a DTensor on the mesh of weight, {weight.device_mesh}, got one on {hidden.device_mesh}"
            )


def _sharded_over(weight, dim: int, hidden, bias) -> Optional[tuple[Optional[int], bool]]:
    """(the dimension of hidden that tokens are sharded over, or None; whether each rank's tokens are a batch of its
    own), or None where the weight has to be gathered."""
    from torch.distributed.tensor import Replicate, Shard

    if not _is_dtensor(hidden):
        # What a plain bias has to get is the gradient of this rank's loss alone.
        alone = bias is not None and not _is_dtensor(bias) and bias.requires_grad
        return None if alone else (None, True)
    _covered(hidden, weight)
    tokens = None
    for i, p in enumerate(hidden.placements):
        if type(p) is Shard and p.dim < hidden.dim() - 1 and _ranks_over(hidden, i) == _ranks_over(weight, dim):
            tokens = p.dim
        elif not isinstance(p, Replicate):
            return None
    return tokens, False


def _part(t, weight, dim: int, own: bool, whole: bool = False):
    """What this rank has of a weight or bias: its words, its columns or, of a bias beside columns, the whole, of which each
    rank has the whole gradient too. The gradient goes where that of ``t`` is."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = weight.device_mesh
    everywhere = [Replicate()] * mesh.ndim
    if not _is_dtensor(t):
        t = DTensor.from_local(t, mesh, everywhere, run_check=False)
    placements = everywhere if whole else weight.placements
    gradients = [p if i == dim else Partial() if own else Replicate() for i, p in enumerate(placements)]
    placed = t.redistribute(mesh, placements)
    uneven = placements[dim] == Shard(1) and t.shape[1] % mesh.size(dim) != 0
    part = _Local.apply(placed, gradients) if uneven else placed.to_local(grad_placements=gradients)
    return part if not own or not part.requires_grad else _Share.apply(part, mesh.size())


def _own_tokens(name: str, t, hidden):
    """What is of hidden's tokens here."""
    if not _is_dtensor(t):
        return t
    from torch.distributed.tensor import Replicate

    if tuple(t.placements) != tuple(hidden.placements) and any(not isinstance(p, Replicate) for p in t.placements):
        raise NotImplementedError(
            f"{name}: expected a DTensor placed Replicate or {tuple(hidden.placements)} as hidden is, got {t.placements}"
        )
    return t.redistribute(hidden.device_mesh, hidden.placements).to_local()


def sharded_head(head: nn.Module, mesh) -> set[nn.Parameter]:
    """Spreads the words of a head over the ranks of a mesh: its ``weight`` [V, D] and ``bias`` [V] become DTensors
    sharded over dimension 0, and ``linear_cross_entropy`` of them gathers neither them nor their gradients. Returns the
    parameters, for the ``ignored_params`` of ``fully_shard``, which would gather them:

        fully_shard(model, mesh=mesh, ignored_params=sharded_head(model.head, mesh))

    Args:
        head: a module with a parameter ``weight`` and maybe ``bias``, best a ``LinearCrossEntropy``; an ``nn.Linear`` can
            no longer be called on plain tensors, but for the head of a ``lazy_head``. Every rank has the same values; each keeps its own rows. A weight that
            another module shares (tied embeddings) is no longer shared. ``MixedPrecisionPolicy`` does not cast what
            it ignores: use autocast, or hidden states of the weight's dtype; a ``lazy_head`` casts for itself.
        mesh: the whole ``DeviceMesh`` that ``fully_shard`` gets: of one dimension, or of two, replicas and shards (HSDP),
            whose gradients are then averaged over the replicas as well.

    Raises TypeError, ValueError: naming the argument.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    weight = getattr(head, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2:
        raise TypeError(f"head: expected a module with a parameter weight [V, D], got {type(head).__name__}")
    if getattr(mesh, "ndim", None) not in (1, 2):
        raise ValueError(f"mesh: expected a DeviceMesh of one dimension or two, as fully_shard takes it, got {mesh!r}")
    if "weight" not in head._parameters:
        raise TypeError(f"head: expected a module with a parameter weight of its own, got {type(head).__name__}; give the layer that it wraps")
    placements = (Replicate(), Shard(0))[-mesh.ndim :]
    made = set()
    for name, parameter in list(head.named_parameters(recurse=False)):
        if name not in ("weight", "bias"):
            raise ValueError(f"head: expected the parameters weight and bias alone, got {name}")
        if not _is_dtensor(parameter):
            spread = distribute_tensor(parameter.detach(), mesh, placements)
            parameter = nn.Parameter(spread, requires_grad=parameter.requires_grad)
            head.register_parameter(name, parameter)
        elif tuple(parameter.placements) != placements or parameter.device_mesh != mesh:
            raise ValueError(f"head: {name} is a DTensor placed {parameter.placements} on {parameter.device_mesh} already")
        made.add(parameter)
    return made
