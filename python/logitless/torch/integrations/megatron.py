"""Megatron-Core's GPTModel with its output layer and its loss in one call of the library.

``patch(model)`` changes the classes of the model and of its output layer. With labels, the layer hands its hidden states
on instead of logits, and ``compute_language_model_loss`` computes the loss from them. Tensor and sequence parallelism
are the layer's own: no rank has logits, nor a weight beyond its rows. With ``gradient_accumulation_fusion`` the weight's
gradient is added to its ``main_grad``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import _library as c
from ..._options import share
from ..loss import linear_cross_entropy
from ..main_grad import token_losses
from ..ranks import Sharding
from ..run import MainGrad

_IGNORED = -100
_COUNTS = "_compute_mtp_acceptance_counts"  # of versions that log how often multi-token prediction is right


class _Logits:
    """Logits that are not computed: the arguments of an output layer. They can be scaled."""

    def __init__(self, layer: nn.Module, hidden: Tensor, weight: Tensor, scale: float = 1.0):
        self.layer, self.hidden, self.weight, self.scale = layer, hidden, weight, scale
        self.argmax: Optional[Tensor] = None  # [S, B], set with the loss where it is counted

    def __mul__(self, factor: float) -> _Logits:
        return _Logits(self.layer, self.hidden, self.weight, self.scale * factor)

    __rmul__ = __mul__


class Gathered(torch.autograd.Function):
    """Losses [S / G, B] of each rank's tokens -> those of all [S, B]; the gradients, which are equal on all ranks, back."""

    @staticmethod
    def forward(ctx, losses: Tensor, group: Any) -> Tensor:
        ctx.rank, ctx.rows = group.rank(), len(losses)
        return _gathered(losses, group)

    @staticmethod
    def backward(ctx, d_losses: Tensor):
        return d_losses[ctx.rank * ctx.rows :][: ctx.rows], None


def _gathered(own: Tensor, group: Any) -> Tensor:
    every = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(every, own.contiguous(), group=group)
    return torch.cat(every)


class _Output:
    """Is mixed into the class of an output layer."""

    _logitless_waits = False  # whether the model is about to compute a loss

    def forward(self, input_: Tensor, weight: Optional[Tensor] = None, *args: Any, **kwargs: Any):
        # Versions that ask the layer itself for the loss (cross_entropy_fusion_impl="linear") have further arguments.
        if not self._logitless_waits or len(args) > 1 or set(kwargs) - {"runtime_gather_output"}:
            return super().forward(input_, weight, *args, **kwargs)
        return _Logits(self, input_, self.weight if weight is None else weight), None


class _Model:
    """Is mixed into the class of a model."""

    _logitless_options: dict[str, Any] = {}  # of the loss

    def _postprocess(self, *args: Any, **kwargs: Any):
        given = inspect.signature(super()._postprocess).bind(*args, **kwargs).arguments
        if not self.post_process or given.get("labels") is None or given.get("output_processor") is not None:
            return super()._postprocess(*args, **kwargs)
        self.output_layer._logitless_waits = True
        try:
            return super()._postprocess(*args, **kwargs)
        finally:
            del self.output_layer._logitless_waits

    def compute_language_model_loss(self, labels: Tensor, logits: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the losses [B, S], float32; 0 where a label is negative. labels: [B, S]."""
        if not isinstance(logits, _Logits):
            return super().compute_language_model_loss(labels, logits, *args, **kwargs)
        counts = self.training and bool(getattr(self.config, "mtp_num_layers", None)) and hasattr(_mtp(), _COUNTS)
        return _losses(labels, logits, self._logitless_options, counts)


def _main_grad(layer: nn.Module, weight: Tensor) -> Optional[MainGrad]:
    """Returns where the weight's gradient is added; None if it is autograd's."""
    tensor = getattr(weight, "main_grad", None)
    if not layer.gradient_accumulation_fusion or tensor is None or not weight.requires_grad:
        return None
    if hasattr(weight, "__fsdp_param__"):  # Megatron-FSDP overwrites main_grad with each gradient
        return None

    def added() -> Optional[Tensor]:
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        if weight is not layer.weight:  # an embedding's, whose own gradient DDP adds only then; stages with MTP lack it
            weight.zero_out_wgrad = True
        return weight.new_zeros(()).expand(weight.shape)  # DDP's hooks want a gradient

    return MainGrad(tensor, added)


def _losses(labels: Tensor, logits: _Logits, given_options: dict[str, Any], counts: bool) -> Tensor:
    """Returns the losses [B, S]. given_options: of ``patch``. counts: also sets the argmax of the logits."""
    layer, sharding = logits.layer, None
    group = layer.tp_group
    targets = labels.transpose(0, 1)  # [S, B], as hidden is [S, B, D]
    targets = targets.masked_fill(targets < 0, _IGNORED)
    own = layer.sequence_parallel and group.size() > 1
    if group.size() > 1:
        rows = layer.output_size_per_partition
        sharding = Sharding(group, vocab=rows * group.size(), vocab_begin=rows * group.rank(), tokens=own)
    if own:
        targets = targets.chunk(group.size())[group.rank()]
    bias = None if layer.skip_bias_add else layer.bias
    given = logits.hidden, logits.weight, targets.contiguous(), bias
    options = dict(
        ignore_index=_IGNORED, logit_scale=logits.scale, return_argmax=counts, sharding=sharding, **given_options
    )
    main_grad = _main_grad(layer, logits.weight)
    if main_grad is None:
        losses = linear_cross_entropy(*given, reduction="none", **options)
    else:
        losses = token_losses(*given, main_grad=main_grad, **options)
    if counts:
        losses, argmax = losses
        logits.argmax = _gathered(argmax, group) if own else argmax
    if own:
        losses = Gathered.apply(losses, group)
    return losses.transpose(0, 1).contiguous()


def patch(
    model: nn.Module, memory_budget: int | str | None = None, *, expected_ignored: float = 0.0
) -> nn.Module:
    """Makes every GPTModel in a model (wrappers, pipeline stages) compute its loss without logits; returns the model.
    A stage without an output layer stays as it is. ``unpatch(model)`` undoes it.

    memory_budget, expected_ignored: of a call of the head, as in ``linear_cross_entropy``. The second must be 0 with tensor
        parallelism.

    Forwards without labels (inference) return logits as before. Losses of multi-token prediction, and the counts of its
    right tokens, are computed in the same way. With ``gradient_accumulation_fusion`` the gradient of a weight that has
    ``main_grad`` is added to it by ``logitless.torch.main_grad``, whose docstring states the extra memory.

    Raises ImportError without Megatron-Core and TypeError for a model without a GPTModel. Raises NotImplementedError for
    an output layer of another class than ColumnParallelLinear, or one whose weight gradient is deferred.
    """
    c.parse_bytes(memory_budget)
    options = dict(memory_budget=memory_budget, expected_ignored=share("expected_ignored", expected_ignored))
    found = _models(model)
    if not found:
        raise TypeError(f"model: expected one with a megatron.core GPTModel, got {type(model).__name__}")
    column = importlib.import_module("megatron.core.tensor_parallel").ColumnParallelLinear
    heads = [m for m in found if m.post_process]
    for m in heads:
        if not isinstance(m.output_layer, column):
            raise NotImplementedError(f"output_layer: expected a ColumnParallelLinear, got {type(m.output_layer).__name__}")
        if not hasattr(m, "_postprocess") or getattr(m.output_layer, "tp_group", None) is None:
            raise NotImplementedError("megatron.core: expected version 0.13 or later, whose output layers have a tp_group")
        if m.config.defer_embedding_wgrad_compute:
            raise NotImplementedError("defer_embedding_wgrad_compute: expected False, got True")
    if heads:
        _count_without_logits()
    for m in heads:
        m._logitless_options = options
        _mix(m, _Model)
        _mix(m.output_layer, _Output)
    return model


def unpatch(model: nn.Module) -> None:
    """Undoes ``patch``; does nothing without one."""
    for m in _models(model):
        if isinstance(m, _Model):
            del m._logitless_options
            m.__class__ = _without(type(m), _Model)
            m.output_layer.__class__ = _without(type(m.output_layer), _Output)


def _mtp() -> Any:
    return importlib.import_module("megatron.core.transformer.multi_token_prediction")


def _count_without_logits() -> None:
    """Replaces Megatron's count of right tokens, for logits that are not computed. It stays, as other models may need
    it."""
    of_logits = getattr(_mtp(), _COUNTS, None)
    if of_logits is None or hasattr(of_logits, "_logitless_counts"):
        return

    @functools.wraps(of_logits)
    def counts(mtp_logits: Any, mtp_labels: Tensor, loss_mask: Tensor, *args: Any, **kwargs: Any):
        if not isinstance(mtp_logits, _Logits):
            return of_logits(mtp_logits, mtp_labels, loss_mask, *args, **kwargs)
        argmax, masked = mtp_logits.argmax.transpose(0, 1), loss_mask.bool()
        right = (argmax == mtp_labels) & (mtp_labels >= 0) & masked
        return right.sum().float(), masked.sum().float()

    counts._logitless_counts = True  # type: ignore[attr-defined]
    setattr(_mtp(), _COUNTS, counts)


def _models(model: nn.Module) -> list[nn.Module]:
    gpt = importlib.import_module("megatron.core.models.gpt").GPTModel
    return [m for m in model.modules() if isinstance(m, gpt)]


def _mix(module: nn.Module, mixin: type) -> None:
    if not isinstance(module, mixin):
        module.__class__ = _mixed(type(module), mixin)


@functools.cache
def _mixed(of: type, mixin: type) -> type:
    """Returns a subclass that goes by the name of its base: Megatron's converters ask for names."""
    return type(of.__name__, (mixin, of), {"__module__": of.__module__, "__doc__": of.__doc__})


def _without(of: type, mixin: type) -> type:
    """Returns a class without the mixin, also where another one, such as FSDP's, was mixed in after it."""
    if of.__bases__[0] is mixin:
        return of.__bases__[1]
    if not issubclass(of, mixin):
        return of
    own = {name: value for name, value in vars(of).items() if name not in ("__dict__", "__weakref__")}
    return type(of.__name__, tuple(_without(base, mixin) for base in of.__bases__), own)
