"""PyTorch under the names that ``logitless._losses`` uses: array operations, checks of tensors, calls of the head."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor, broadcast_to, concatenate, exp, expm1, finfo, float32, float64, full_like, inf, isfinite, isneginf, log, log1p, nan
from torch import is_floating_point as is_floating
from torch import log_softmax, logsumexp, maximum, minimum, sigmoid, stack, take, tanh, where, zeros_like
from torch import clamp as clip
from torch.nn.functional import linear, logsigmoid as log_sigmoid, relu

from .._autochunk.function import warn
from .._losses import invariance, options
from .._losses.contrastive import Spread
from .._losses.head import Tokens
from .._losses.options import Function, Head
from .._losses.sampling import mixed
from . import _memory, _noise, _sampled, _sampled_over_ranks, dtensor, quantized
from ._arguments import named
from ._backend import backend
from ._chunks import Operand
from ._entries import dots as dots, gathered as gathered, gathered as rows, largest as largest, summed as summed
from .call import check_head, compute_dtype, with_fixed_lse
from .groups import group_of, together
from .loss import Asked, linear_cross_entropy, token_log_probs
from .ranks import Sharding, vocab_shard_of

NAMES = options.Framework(
    "torch", "PyTorch", "target", "tensor", "a tensor", "float32, bfloat16, float16, or float64 slowly",
    " (float64 for float64 inputs)",
)
boolean, class_dtype = torch.bool, torch.int64

# --- Operations.


def at_least(x: Tensor, bound: float) -> Tensor:
    return x.clamp(min=bound)


def at_most(x: Tensor, bound: float) -> Tensor:
    return x.clamp(max=bound)


def astype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype)


def as_like(value: float | Tensor, like: Tensor) -> Tensor:
    """Returns a scalar in the dtype and on the device of ``like``."""
    return value.to(like) if isinstance(value, Tensor) else like.new_full((), value)


def arange(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)


def all_true(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.ones(shape, dtype=torch.bool, device=like.device).flatten()


def deviation(x: Tensor) -> Tensor:
    """Returns the standard deviation of each row, of n - 1."""
    return x.std(1)


def halves(x: Tensor) -> tuple[Tensor, ...]:
    return x.split(len(x) // 2)


def sort(x: Tensor) -> Tensor:
    return x.sort().values


def stop_gradient(x: Tensor) -> Tensor:
    return x.detach()


def without_gradients(function: Callable[..., Any], *arrays: Any) -> Any:
    with torch.no_grad():
        return function(*arrays)


def product(hidden: Tensor, weight: Tensor | Operand) -> Tensor:
    """Returns hidden weight^T [N, V] in float32, or float64."""
    if isinstance(weight, Operand):
        return weight.product(hidden)
    z = linear(hidden, weight if weight.dtype == hidden.dtype else weight.to(hidden.dtype))
    return z if z.dtype == torch.float64 else z.float()


def cross_entropy(logits: Tensor, vocab_ids: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits, vocab_ids, reduction="none")


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return x.topk(k, dim=-1)  # type: ignore[return-value]


def columns(x: Tensor) -> Tensor:
    """Returns numbers of tokens [N] as [N, 1], and a scalar unchanged."""
    return x[:, None] if x.ndim else x


def gumbel(key: Tensor, counter: Tensor, vocab: int) -> Tensor:
    return _noise.gumbel(key, counter, vocab)


def gumbel_of_ids(key: Tensor, counter: Tensor, ids: Tensor) -> Tensor:
    """Returns the noise [N, n] of vocabulary ids [n]."""
    return _noise.gumbel_of_ids(key, counter, ids)


def as_bits(x: Tensor) -> Tensor:
    """Returns the bits of float32 as int32."""
    return x.view(torch.int32)


def of_bits(x: Tensor) -> Tensor:
    return x.view(torch.float32)


def mass_below(z: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns a function of int32 [N, n]: the sums of exp(z) of the entries whose |z| has smaller bits. z: [N, V], at most
    0."""
    distances = z.abs().view(torch.int32).sort(-1).values
    sums = torch.nn.functional.pad(distances.view(torch.float32).neg().exp_().cumsum(-1), (1, 0))
    return lambda bits: sums.gather(-1, torch.searchsorted(distances, bits))


def key(seed: Any, like: Tensor, generator: Optional[torch.Generator] = None) -> Tensor:
    """Returns the key of the noise [2] int64, of 32 bits each."""
    return noise_key(drawn_seed(seed, like, generator), like)


def drawn_seed(seed: Any, like: Tensor, generator: Optional[torch.Generator] = None) -> int | Tensor:
    """Returns the seed, or a drawn one: an int, or a key [2] where a graph draws it at each run."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: expected a torch.Generator or None, got {type(generator).__name__}")
    if seed is not None and generator is not None:
        raise ValueError("generator: expected None beside a seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise TypeError(f"seed: expected an int or None, got {seed!r}")
    if seed is None and generator is None and torch.compiler.is_compiling():  # numbers are not known while it traces
        return torch.randint(1 << 32, (2,), device="cpu").to(like.device)
    if seed is not None:
        return seed
    if _is_captured(like):
        if generator is not None and generator.device != like.device:
            raise ValueError(f"generator: expected one of {like.device} in a CUDA graph, got one of {generator.device}")
        return torch.randint(1 << 32, (2,), generator=generator, device=like.device)
    where = "cpu" if generator is None else generator.device
    return int(torch.randint(1 << 62, (), generator=generator, device=where))


def noise_key(seed: int | Tensor, like: Tensor) -> Tensor:
    """Returns the key of a drawn seed [2] int64. In a CUDA graph it is made without a copy from the host."""
    if isinstance(seed, Tensor):
        return seed
    if _is_captured(like):
        return torch.stack([torch.full((), number, dtype=torch.int64, device=like.device) for number in mixed(seed)])
    return torch.tensor(mixed(seed), device=like.device)


def _is_captured(like: Tensor) -> bool:
    return not torch.compiler.is_compiling() and like.is_cuda and torch.cuda.is_current_stream_capturing()


def sampled(hidden: Any, weight: Any, given: Mapping[str, Any], seed: Any, filters: Any, memory_budget: Any) -> Any:
    """Returns tokens and log-probabilities [N] by the library's sampler, or None where programs and the head serve."""
    if not _sampled.serves(hidden, weight, given, memory_budget):
        return None
    if seed is not None and torch.compiler.is_compiling():  # a seed of the trace is a constant
        seed = noise_key(seed, given["hidden"])
    return _sampled.sampled(given, seed, filters, memory_budget)


def best(
    hidden: Any, weight: Any, given: Mapping[str, Any], target: Any, k: int, softcap: float, scale: float, memory_budget: Any
) -> Any:
    """Returns the target's log-probability, the k largest and their ids, or None as ``sampled`` does."""
    if not _sampled.serves(hidden, weight, given, memory_budget):
        return None
    return _sampled.best(given, target, k, softcap, scale, memory_budget)


def tokens_over_ranks(hidden: Any, weight: Any, bias: Any, seed: Any, check: Any, head: Head, sharding: Any) -> Any:
    """Returns token ids [...] of a vocabulary that is sharded over ranks, or None of another."""
    return _sampled_over_ranks.tokens(hidden, weight, bias, seed, check, head, sharding)


def best_over_ranks(hidden: Any, weight: Any, bias: Any, k: Any, check: Any, head: Head, sharding: Any) -> Any:
    """Returns the ids of the best entries [..., k], or None, as ``tokens_over_ranks`` does."""
    return _sampled_over_ranks.best(hidden, weight, bias, k, check, head, sharding)


def argmax(x: Tensor) -> Tensor:
    return x.argmax(-1)


def descending(x: Tensor) -> Tensor:
    """Returns the indices that sort rows, largest first; equal ones stay in order."""
    return x.sort(dim=-1, descending=True, stable=True).indices


def along(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(-1, index)


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def cumsum(x: Tensor) -> Tensor:
    return x.cumsum(-1)


def least(x: Tensor) -> Tensor:
    return x.amin(-1, keepdim=True)


def most(x: Tensor) -> Tensor:
    return x.amax(-1, keepdim=True)


# --- Lists of entries, each of one token.

def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Returns x[index], without a gradient."""
    return x.detach().index_select(0, index)


def as_integers(values: list[int], like: Tensor) -> Tensor:
    return torch.tensor(values, device=like.device)


def after(offsets: Tensor, values: Tensor) -> Tensor:
    """Returns how many offsets are at most each value."""
    return torch.searchsorted(offsets.to(values.dtype), values, right=True)


# --- Checks.

_NUMBERS = ("normalizer", "kl")  # arguments that may be one-element tensors, also on the CPU


def takes(
    defaults: Mapping[str, Any], shared: Callable[..., Any] | None, texts: Mapping[str, str] = {}
) -> Callable[[Function], Function]:
    """``options.takes`` for a function of tensors, which must all be on the device of the first, its hidden states."""

    def decorated(function: Function) -> Function:
        names = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            named = {**dict(zip(names, args)), **given}
            first = named.get(names[0])
            if isinstance(first, Tensor):
                for name, value in named.items():
                    _check_memory(name, value, first.device, names[0])
            return function(*args, **given)

        return options.takes(defaults, shared, NAMES, texts)(call)  # type: ignore[return-value]

    return decorated


def _check_memory(name: str, value: Any, device: torch.device, beside: str) -> None:
    if isinstance(value, Tensor):
        check = _memory.check_number if name in _NUMBERS else _memory.check
        check(name, value, device, beside)
    elif isinstance(value, tuple):
        for part, t in getattr(value, "_asdict", dict)().items():
            _check_memory(f"{name}.{part}", t, device, beside)


def is_number(value: Any) -> bool:
    return not isinstance(value, Tensor)


def array(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    return value


states = array  # the head checks their dtype


def shaped(name: str, value: Any, *shapes: tuple[int, ...]) -> Tensor:
    """Returns a checked tensor of one of the shapes, if there are any."""
    if tuple(array(name, value).shape) not in shapes and shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name}: expected {wanted}, got {list(value.shape)}")
    return value


def fixed(name: str, value: Any, dtype: torch.dtype, *shapes: tuple[int, ...]) -> Tensor:
    """Returns a checked tensor without a gradient."""
    return dtensor.replicated(name, shaped(name, value, *shapes)).detach().to(dtype)


def indices(name: str, value: Any, *shapes: tuple[int, ...]) -> Tensor:
    """Returns checked int32 or int64, of which every rank has all."""
    if shaped(name, value, *shapes).dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, got {value.dtype}")
    return dtensor.replicated(name, value)


def may_read(x: Tensor) -> bool:
    """Returns whether checks read the values of x: those of a GPU would have to be waited for."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()


def refuse_ids(name: str, ids: Tensor, bad: Tensor, vocab: int, ignore_index: Optional[int] = None) -> None:
    """Raises ValueError for a bad token id on the CPU."""
    if may_read(ids) and bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise ValueError(options.bad_id(name, vocab, ignore_index, int(ids[at]), at))


def computation(hidden: Any, weight: Any, bias: Optional[Tensor], head: Head) -> invariance.Computation:
    """Returns how ``log_probs`` of these arguments computes them."""
    from . import tempered  # imported here, since that module imports this one

    a = quantized.taken(named(hidden=array("hidden", hidden), weight=array("weight", weight), target=None, bias=bias, **head._asdict()))
    check_head(a.hidden, a.weight, bias)
    chosen = backend(a.hidden)
    if chosen.name != "native":
        return invariance.Computation(chosen.reason)
    if isinstance(a.weight, quantized.QuantizedWeight):
        return invariance.Computation(invariance.QUANTIZED)
    if head.temperature is not None and tempered.divided_dtype(a) is None:
        return invariance.Computation(invariance.DIVIDED_LOGITS)
    if a.hidden.device.type == "cpu":
        return invariance.Computation()
    dtype = str(compute_dtype(a.hidden, a.weight, blocks=True) or a.hidden.dtype).removeprefix("torch.")
    vocab, dim = a.weight.shape
    sharded = any(p.is_shard() for p in getattr(a.weight, "placements", ()))
    reason = "whose ranks choose their exchange by the number of tokens" if sharded else ""
    return invariance.Computation("", _gpu_kernel(dim, vocab, dtype, a.hidden.device.index), reason)


@torch.compiler.assume_constant_result
def _gpu_kernel(dim: int, vocab: int, dtype: str, index: Optional[int]) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return invariance.gpu_kernel(dim, vocab, dtype, 10 * major + minor)


# --- The head.


def tokens(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor], head: Head, entropy: Optional[bool] = None
) -> Tokens:
    """Computes the head's outputs. entropy: None if it is not wanted, else whether it has a gradient."""
    dtensor.replicated("hidden", hidden)
    recomputes = entropy and head.softcap is not None  # saved exponentials would be of no use
    asked = Asked(entropy=entropy is not None, keep=False if recomputes else None)
    logps, found, _, _ = token_log_probs(hidden, weight, target, bias, asked, **head._asdict())
    return Tokens(logps, found, target != head.ignore_index)


def has_kernels(hidden: Tensor) -> bool:
    """Returns whether the library's kernels compute the head."""
    return backend(hidden).name == "native"


def log_probs(
    hidden: Any, weight: Any, target: Any, bias: Any, head: Head, save: bool = False, sharding: Optional[Sharding] = None
) -> Tensor:
    """save: save exponentials from forward to backward if possible."""
    asked = Asked(entropy=False, keep=None if save else False)
    return token_log_probs(hidden, weight, target, bias, asked, sharding, **head._asdict())[0]


def largest_entries(
    hidden: Tensor, weight: Tensor, bias: Optional[Tensor], head: Head, sharding: Optional[Sharding] = None
) -> Tensor:
    """Returns the token ids [...] of the largest logits, the first of several."""
    target = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    asked = Asked(argmax=True, entropy=False)
    return token_log_probs(hidden, weight, target, bias, asked, sharding, **head._asdict())[3]


def log_probs_and_lse(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor], head: Head
) -> tuple[Tensor, Tensor]:
    found = token_log_probs(hidden, weight, target, bias, Asked(entropy=False), **head._asdict())
    return found[0], found[2]


def spread(sharding: Optional[Sharding], query: Tensor, key: Tensor, negatives: Optional[Tensor]) -> Spread:
    """Returns how the ranks of a group share queries and keys. Collective."""
    if sharding is None:
        placements = getattr(query, "placements", ())
        if any(placement.is_shard() for placement in placements):
            raise NotImplementedError(
                f"query: expected a tensor, got a DTensor placed {tuple(placements)}; give local rows with sharding=Sharding(group, tokens=True)"
            )
        return Spread(None, None, 0, None)
    if isinstance(sharding, Sharding) and (sharding.tokens is not True or sharding.weight != "rows"):
        raise ValueError("sharding: expected tokens=True and weight='rows', since each rank has its own queries and keys")
    own, extra = key.shape[0], 0 if negatives is None else negatives.shape[0]
    if getattr(sharding, "vocab", None) is not None and negatives is not None:
        raise ValueError(f"sharding: expected vocab=None beside negatives, got {sharding.vocab!r}")
    shard = vocab_shard_of(sharding, own, key.shape[1])
    queries = sharding._replace(vocab=shard.vocab, vocab_begin=shard.vocab_begin)
    if negatives is None:
        return Spread(queries, queries, shard.vocab_begin, None)
    group = group_of(shard.group)
    counts = [tuple(pair) for pair in together(group, lambda: group.gather(np.array([own, extra]))).tolist()]
    before = shard.vocab_begin + sum(k for _, k in counts[: group.communicator.rank])
    keys = sharding._replace(vocab=shard.vocab + sum(k for _, k in counts), vocab_begin=before)
    return Spread(keys, queries, shard.vocab_begin, counts)


def joined(rows: list[Tensor], sharding: Optional[Sharding]) -> Tensor:
    """Returns keys and negatives as one vocabulary."""
    return torch.cat(rows)


def placed_like(x: Tensor, like: Tensor) -> Tensor:
    return x


def leaves(inputs: Any) -> list[Tensor]:
    """Returns the tensors in tuples, lists and dictionaries, without scalars."""
    if isinstance(inputs, Tensor):
        return [inputs] if inputs.dim() else []
    parts = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, (tuple, list)) else ()
    return [x for part in parts for x in leaves(part)]


def _map(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Returns tuples, lists and dictionaries of function(the tensors at one place in each); other values unchanged."""
    if isinstance(first, Tensor):
        return function(first, *others)
    if isinstance(first, Mapping):
        return {name: _map(function, value, *(o[name] for o in others)) for name, value in first.items()}
    if isinstance(first, (tuple, list)):
        made = [_map(function, *values) for values in zip(first, *others)]
        return type(first)(*made) if hasattr(first, "_fields") else type(first)(made)
    return first


def in_micro_batches(encode: Callable[..., Any], inputs: Any, count: int, size: int) -> Any:
    from torch.utils.checkpoint import checkpoint

    found = []
    for first in range(0, max(count, 1), size):
        part = _map(lambda x: x[first : first + size] if x.dim() else x, inputs)
        found.append(checkpoint(encode, *part, use_reentrant=False))
    return _map(lambda *parts: torch.cat(parts), *found)


def weighted_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor], head: Head, argmax: bool, **more: Any
) -> tuple[Tensor, Tensor, Optional[Tensor]]:
    """Returns the sum of the tokens' losses; and without gradients the log-sum-exp of each token and, if wanted, its
    largest entry. more: weights and terms of the loss."""
    found = with_fixed_lse(named(
        hidden=hidden, weight=weight, target=target, bias=bias, reduction="sum", return_lse=True, return_argmax=argmax,
        **head._asdict(), **more,
    ))  # fmt: skip
    return found[0], found[1], found[2] if argmax else None


def operand(hidden: Tensor, weight: Tensor) -> Tensor:
    """Returns hidden in the dtype in which a head multiplies it."""
    compute = compute_dtype(hidden, weight)
    return hidden if compute is None else hidden.to(compute)


def _warn_of_gathering(name: str, weight: Tensor) -> None:
    """Warns that a sharded weight is gathered on every rank: a loss has no form for its placements."""
    placements = getattr(weight, "placements", ())
    if torch.compiler.is_compiling() or not any(p.is_shard() for p in placements) or weight.device_mesh.size() == 1:
        return
    full = weight.numel() * weight.element_size() / 2**20
    warn(
        f"{name}: a DTensor sharded as {tuple(placements)} over {weight.device_mesh.size()} ranks is gathered on each of them "
        f"in every call, {full:.0f} MiB"
    )


def local(hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor]) -> tuple[Any, ...]:
    """Returns plain tensors of DTensors; a sharded weight is gathered."""
    _warn_of_gathering("weight", weight)
    return dtensor.local(hidden, weight, target, bias)


def checked_head(
    name: str, hidden: Any, weight: Any, bias: Any, blocks: bool = False, wide: bool = False
) -> dict[str, Tensor]:
    """Returns the checked head of a divergence: [N, D] and [V, D] of one dtype, on one device, and a bias if given.
    name: "" or "teacher_". blocks: a 16-bit weight beside fp32 hidden states stays as it is; else it is refused. wide:
    JAX's alone, as float64 serves in every call of PyTorch."""
    for part, value in (("hidden", hidden), ("weight", weight)):
        array(name + part, value)
    if bias is not None:
        array(name + "bias", bias)
    _warn_of_gathering(name + "weight", weight)
    hidden, weight, _, bias = dtensor.local(hidden, weight, None, bias)
    try:
        check_head(hidden, weight, bias)
        compute = compute_dtype(hidden, weight, blocks)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise type(error)(name + str(error)) from None
    if compute is not None:
        narrow = compute == torch.float32 and hidden.dtype == compute
        hidden, weight = hidden.to(compute), weight if narrow else weight.to(compute)
    found = {name + "hidden": hidden.reshape(-1, hidden.shape[-1]), name + "weight": weight}
    return found if bias is None else {**found, name + "bias": bias}
