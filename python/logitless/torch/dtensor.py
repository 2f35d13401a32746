"""Converts DTensors to local tensors, and determines each rank's vocabulary shard."""

from __future__ import annotations

import sys
from typing import NamedTuple, Optional

import torch
from torch import Tensor, nn

from .. import _library as c
from ._arguments import Arguments
from ._backend import is_native
from ._engine import DTYPES
from .autograd import transformed
from .ranks import ALL, VocabShard, vocab_shard_of


def _is_dtensor(t) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # a DTensor exists only if this module has been imported
    return module is not None and isinstance(t, module.DTensor)


class _Share(torch.autograd.Function):
    """Returns the tensor. Its gradient is divided by ``ranks``."""

    @staticmethod
    def forward(ctx, tensor, ranks):
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / ctx.ranks, None


class _Local(torch.autograd.Function):
    """Returns the local shard of a DTensor. Its gradient is a DTensor with the strides of the full tensor. ``to_local``
    would derive other strides from the local shard if columns are uneven, and PyTorch would gather to correct them."""

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
    """Gathers a DTensor on all ranks of its mesh; other tensors are returned unchanged. Without a gradient."""
    return t.full_tensor() if _is_dtensor(t) else t


def mean_gradient(gradient: Tensor, like):
    """Converts each rank's gradient of a weight or bias to the gradient of ``like``. For a DTensor this is the mean
    over the ranks of its mesh, with its placements."""
    if not _is_dtensor(like):
        return gradient
    from torch.distributed.tensor import DTensor, Partial

    mesh = like.device_mesh
    parts = DTensor.from_local(gradient / mesh.size(), mesh, [Partial()] * mesh.ndim, run_check=False)
    return parts.redistribute(mesh, like.placements)


def replicated(name: str, t):
    """Returns a replicated DTensor as a local tensor; other tensors are returned unchanged."""
    if not _is_dtensor(t):
        return t
    from torch.distributed.tensor import Replicate

    if any(not isinstance(p, Replicate) for p in t.placements):
        raise NotImplementedError(f"{name}: expected a DTensor placed Replicate, got {t.placements}")
    return t.to_local()


def local(hidden, weight, target, bias) -> tuple[Tensor, Tensor, Optional[Tensor], Optional[Tensor]]:
    """Gathers sharded weights (and a bias), whose gradients are reduce-scattered, and returns replicated hidden and
    target as local tensors. Other placements raise NotImplementedError.

    A weight's gradient is the mean over its mesh of each rank's gradient, as in FSDP. If a plain hidden holds different
    tokens on each rank, this is data parallelism. If it is the same on all ranks (tensor parallelism), the mean equals
    each rank's gradient.
    """
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


class Spread(NamedTuple):
    """How ranks share a call; without a group, each computes alone."""

    group: str = ""  # the name of a process group whose ranks compute together
    dim: int = -1  # the mesh dimension that shards a DTensor weight; -1: plain tensors with the argument ``sharding``
    tokens: Optional[int] = None  # the dimension of a DTensor hidden that shards the tokens
    own: bool = False  # each rank has a loss of its own tokens, as in FSDP: weights get the mean of the ranks' gradients


def spread_of(a: Arguments) -> Spread:
    """Returns how ranks share a call, from its arguments before their checks.

    A DTensor weight whose vocabulary is sharded over one mesh dimension is not gathered on the CPU. Nor is it in 16
    bits on GPUs of compute capability 8.0 or more. The same holds for one with sharded columns if each rank has its own tokens. Any other is gathered.
    """
    if a.sharding is not None:
        name = getattr(getattr(a.sharding, "group", None), "group_name", "")
        return Spread(name if isinstance(name, str) else "")
    dim = _sharded_dim(a.weight)
    found = None if dim is None else _sharded_over(a.weight, dim, a.hidden, a.bias)
    if found is None or (a.weight.placements[dim].dim == 1 and found == (None, False)):
        return Spread()
    return Spread(a.weight.device_mesh.get_group(dim).group_name, dim, *found)


def local_arguments(a: Arguments, spread: Spread) -> tuple[Arguments, VocabShard]:
    """Returns the checked arguments with local hidden, weight, target and bias, and the weight's vocabulary shard."""
    if a.sharding is not None:
        return a, _given(a)
    hidden, weight, target, bias, dim = a.hidden, a.weight, a.target, a.bias, spread.dim
    if dim < 0:
        if any(_is_dtensor(t) for t in (hidden, weight, target, bias)):
            hidden, weight, target, bias = local(hidden, weight, target, bias)
            a = a._replace(hidden=hidden, weight=weight, target=target, bias=bias)
        return a, ALL
    columns = weight.placements[dim].dim == 1
    rows = _part(weight, weight, dim, spread.own)
    if bias is not None:
        bias = _part(bias, weight, dim, spread.own, whole=columns)
    if spread.tokens is None:
        target = replicated("target", target)
    else:
        target = _local_tokens("target", target, hidden)
        if spread.tokens == hidden.dim() - 2 and spread.tokens > 0 and a.shift:
            raise NotImplementedError(
                "shift: does not go with tokens that are sharded along the sequence; shift the targets yourself"
            )
    a = a._replace(hidden=hidden.to_local() if _is_dtensor(hidden) else hidden, weight=rows, target=target, bias=bias)
    mesh = weight.device_mesh
    vocab, ranks, rank = weight.shape[0], mesh.size(dim), mesh.get_local_rank(dim)
    if columns:
        return a, VocabShard(spread.group, vocab, 0, True, columns=rows.shape[1])
    first = min(rank * -(-vocab // ranks), vocab)
    return a, VocabShard(spread.group, vocab, first, spread.own or spread.tokens is not None)


def _given(a: Arguments) -> VocabShard:
    """Returns the vocabulary shard of plain tensors with the argument ``sharding``."""
    for name in ("hidden", "weight", "target", "bias"):
        if _is_dtensor(getattr(a, name)):
            raise ValueError(f"sharding: goes with plain tensors, {name} is a DTensor, whose placements say the same")
    weight = a.weight
    if weight.dtype == torch.float64:
        raise NotImplementedError("sharding: expected float32, bfloat16 or float16, got torch.float64")
    if weight.dim() != 2:
        raise NotImplementedError(f"sharding: expected a weight [rows, D], got {list(weight.shape)}")
    if transformed():
        raise NotImplementedError("sharding: does not go with transforms of torch.func")
    vocab_shard = vocab_shard_of(a.sharding, *weight.shape)
    if vocab_shard.tokens and a.shift:
        raise NotImplementedError("shift: does not go with sharded tokens; shift the targets yourself")
    return vocab_shard


def _sharded_dim(weight) -> Optional[int]:
    """Returns the mesh dimension over which a DTensor weight's vocabulary or columns are sharded, or None if ranks
    cannot compute on it together. It depends on the weight alone, so that all ranks decide alike."""
    if not _is_dtensor(weight):
        return None
    from torch.distributed.tensor import Replicate, Shard

    mesh = weight.device_mesh
    sharded = [i for i, p in enumerate(weight.placements) if type(p) is Shard and p.dim in (0, 1)]
    rest = [p for i, p in enumerate(weight.placements) if i not in sharded]
    if len(sharded) != 1 or any(not isinstance(p, Replicate) for p in rest) or mesh.size(sharded[0]) == 1:
        return None
    if weight.dim() != 2 or not is_native(weight) or transformed():
        return None
    return sharded[0] if mesh.device_type == "cpu" or _on_gpu(weight) else None


@torch.compiler.assume_constant_result
def _has_kernel(index: int, dtype: torch.dtype, dim: int) -> bool:
    major, minor = torch.cuda.get_device_capability(index)
    return bool(c.lib.logitless_supports_vocab_parallel(c.DEVICE_CUDA, 10 * major + minor, DTYPES[dtype], dim))


def _on_gpu(weight) -> bool:
    """Returns whether a GPU kernel supports this vocabulary-parallel weight."""
    if weight.device.type != "cuda":
        return False
    computes = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weight.dtype
    return _has_kernel(weight.device.index, computes, weight.shape[1])


def _ranks_over(t, dim: int) -> tuple[int, ...]:
    """Returns the ranks along a dimension of a DTensor's mesh."""
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(t.device_mesh.get_group(dim)))


def _covered(hidden, weight) -> None:
    """Checks that hidden has a placement for every dimension of weight's mesh, since its gradient depends on them."""
    known = {_ranks_over(hidden, i) for i in range(hidden.device_mesh.ndim)}
    for i in range(weight.device_mesh.ndim):
        if weight.device_mesh.size(i) > 1 and _ranks_over(weight, i) not in known:
            raise NotImplementedError(
                f"hidden: expected a DTensor on the mesh of weight, {weight.device_mesh}, got one on {hidden.device_mesh}"
            )


def _sharded_over(weight, dim: int, hidden, bias) -> Optional[tuple[Optional[int], bool]]:
    """Returns (the dimension of hidden that shards the tokens, or None; whether each rank has its own batch of tokens).
    Returns None if the weight must be gathered."""
    from torch.distributed.tensor import Replicate, Shard

    if not _is_dtensor(hidden):
        # A plain bias needs the gradient of this rank's loss alone.
        alone = not _is_dtensor(bias) and getattr(bias, "requires_grad", False)
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
    """Returns this rank's shard of a weight or bias: rows or columns. A bias beside sharded columns is replicated, and
    every rank has its full gradient. The gradient is placed like that of ``t``."""
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


def _local_tokens(name: str, t, hidden):
    """Returns the part of t that belongs to this rank's tokens of hidden."""
    if not _is_dtensor(t):
        return t
    from torch.distributed.tensor import Replicate

    if tuple(t.placements) != tuple(hidden.placements) and any(not isinstance(p, Replicate) for p in t.placements):
        raise NotImplementedError(
            f"{name}: expected a DTensor placed Replicate or {tuple(hidden.placements)} as hidden is, got {t.placements}"
        )
    return t.redistribute(hidden.device_mesh, hidden.placements).to_local()


def sharded_head(head: nn.Module, mesh) -> set[nn.Parameter]:
    """Shards the vocabulary of a head over the ranks of a mesh. Its ``weight`` [V, D] and ``bias`` [V] become DTensors
    sharded over dimension 0, and ``linear_cross_entropy`` gathers neither them nor their gradients. Returns these
    parameters for the ``ignored_params`` of ``fully_shard``, which would gather them:

        fully_shard(model, mesh=mesh, ignored_params=sharded_head(model.head, mesh))

    Args:
        head: a module with a parameter ``weight`` and optionally ``bias``, preferably a ``LinearCrossEntropy``. An
            ``nn.Linear`` can no longer be called on plain tensors, except as the head of a ``lazy_head``. Every rank
            must have the same values and keeps its own rows. A weight shared with another module (tied embeddings) is
            no longer shared. ``MixedPrecisionPolicy`` does not cast ignored parameters: use autocast, or hidden states
            of the weight's dtype. A ``lazy_head`` casts them itself.
        mesh: the ``DeviceMesh`` that ``fully_shard`` gets, of one dimension, or of two: replicas and shards (HSDP).
            Gradients are then averaged over the replicas as well.

    Raises TypeError or ValueError that names the argument.
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
