"""``FarFieldHead``: cross entropy whose gradients come from a block-sparse softmax, for training runs."""

from __future__ import annotations

import ctypes
import itertools
import threading
import warnings
import weakref
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .. import _far_field
from .. import _library as c
from .._far_field import Report, Statistics
from .._options import WEIGHTS, LossOptions, either_name, struct_of
from . import _engine, autograd, groups, quantized, ranks, run
from ._arguments import DEFAULTS, Arguments, bind
from .call import Call, compute_dtype, check_tensors, checked_call, needs_of, way_of
from .dtensor import Spread, local_arguments, spread_of
from .loss import linear_cross_entropy
from .ranks import ALL, VocabShard
from ._backend import backend, is_native
from .run import EAGER, HIDDEN

# Options of linear_cross_entropy that a far-field step does not support.
_REFUSED = ("accuracy", "return_lse", "return_argmax", "return_target_logits", "memory_budget", "temperature", "expected_ignored")
_in_backward = getattr(torch._C, "_current_graph_task_id", lambda: -1)


_SAMPLED_VOCAB = 1024


def _bits(tensor: Tensor) -> Tensor:
    """Returns the bits of a tensor as integers, of eight bytes each if the last dimension allows."""
    tensor = tensor.detach().contiguous()
    size = tensor.element_size()
    if tensor.dim() and tensor.shape[-1] * size % 8 == 0 and tensor.storage_offset() * size % 8 == 0:
        return tensor.view(torch.int64)
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])


class _Arguments:
    """A fingerprint of a call's arguments, which does not keep hidden states and weights alive. It has exact
    sums of the bits of each hidden state and of sampled rows of the weight, in any order. It copies the vectors.
    Addresses are not compared: recomputed values and regathered weights have new ones."""

    def __init__(self, call: Call, compute, needs: int):
        self.known = (call.options, compute, needs) + tuple(
            None if t is None else (t.shape, t.dtype, t.device) for t in call.tensors()
        )
        hidden, weight, *vectors = call.tensors()
        sampled = weight[:: max(-(-weight.shape[0] // _SAMPLED_VOCAB), 1)]
        self.marks = [_bits(rows).sum(-1, dtype=torch.int64) for rows in (hidden, sampled)]
        self.marks += [_bits(t).clone() for t in vectors if t is not None]

    def __eq__(self, other) -> bool:
        return self.known == other.known and all(torch.equal(a, b) for a, b in zip(self.marks, other.marks))


class _Step:
    """A step that was taken. A recomputation returns its loss; its gradients stay until the backward uses them."""

    def __init__(self, arguments: _Arguments, loss: Tensor, gradients):
        self.arguments, self.loss, self.gradients = arguments, loss, gradients
        self.repeated = False


class _Run:
    """The state of one module: the library's head once a step has run, else the bytes of its state."""

    def __init__(self, options: _far_field.Options, state: bytes = b"", replicas: str = ""):
        self.options = options
        self.replicas = replicas  # the name of a process group, or ""
        self.lock = threading.RLock()
        self.steps: list[weakref.ref[_Step]] = []  # steps whose graphs are alive
        self._head: Optional[_far_field.Head] = None
        self._state, self._place = state, None
        self._device = torch.device("cpu")  # of the current head
        if state and not c.why_missing():
            self.head_of_cpu()  # validates the state

    def state(self) -> bytes:
        with self.lock:
            return self._state if self._head is None else self._head.state()

    def set_state(self, state: bytes) -> None:
        with self.lock:
            _Run(self.options, state)  # raises for an invalid state, before this one changes
            self._head, self._state, self._place, self._device = None, state, None, torch.device("cpu")
            self.steps.clear()

    def head_of_cpu(self) -> _far_field.Head:
        """Returns the current head, or a new one on the CPU that holds the state."""
        head = self._head
        if head is None:
            head = _far_field.Head(self.options, c.Context(threads=1))
            if self._state:
                head.set_state(self._state)
        return head

    def head_at(self, device: torch.device) -> _far_field.Head:
        """Returns the head for a device and its stream or number of threads. A state from elsewhere is moved."""
        place = (device.type, _engine.place(device))
        if self._head is None or self._place != place:
            if device.type == "cpu":
                context = c.Context(threads=torch.get_num_threads())
            else:
                context = c.Context(c.DEVICE_CUDA, device.index, _engine.current_stream(device))
            replicas = groups.group_of(self.replicas).communicator if self.replicas else None
            head = _far_field.Head(self.options, context, replicas)
            state = self.state()
            if state:
                head.set_state(state)
            self._head, self._place, self._state, self._device = head, place, b"", device
        return self._head

    def statistics(self) -> Statistics:
        with self.lock:
            return _engine.on_device(self._device, self.head_of_cpu().statistics)

    def found(self, arguments: _Arguments) -> Optional[_Step]:
        """Returns, in a backward, the step that is being recomputed."""
        with self.lock:
            self.steps = [ref for ref in self.steps if ref() is not None]
            steps = [step for ref in self.steps if (step := ref()) is not None and step.arguments == arguments]
        if not steps:
            return None
        step = next((s for s in reversed(steps) if not s.repeated), steps[-1])
        step.repeated = True
        return step

    def take(self, tensors, options: LossOptions, compute, needs: int, vocab_shard: VocabShard = ALL):
        """Takes a step and returns (loss, d_hidden, d_weight, d_bias). The gradients are for an upstream gradient of 1,
        in the dtypes in which they are saved, and empty if not needed. With a group, the step is collective."""
        hidden, weight, target, bias, *weights = tensors
        like = hidden, weight, bias
        operands = run.operands(hidden, weight, target, bias, compute)
        x, device = operands["hidden"], operands["hidden"].device
        loss = torch.empty((), dtype=torch.float32, device=device)
        # d_hidden is always computed, since audits measure its error.
        gradients = run.gradients(like, operands, needs | HIDDEN, waits=True)
        inputs, _inputs = _engine.fill(
            c.CrossEntropyInputs, {**operands, **{n: run.vector(t, x) for n, t in zip(WEIGHTS, weights)}}
        )
        outputs, _outputs = _engine.fill(c.CrossEntropyOutputs, dict(loss=loss, **gradients))

        def step():
            if vocab_shard.group:
                group.ready(0)  # raises the error of a rank that failed before
                inputs.sharding = ctypes.pointer(ranks.struct_of(vocab_shard, device))
            _engine.on_device(device, lambda: self.head_at(device).step(struct_of(options), inputs, outputs))

        with self.lock:
            if vocab_shard.group:
                group = groups.group_of(vocab_shard.group)
                group.calls += 1
                groups.together(group, step)
            else:
                step()
        if not needs & HIDDEN:
            gradients["d_hidden"] = None
        return loss, *run.finished(gradients, like, waits=True)


_runs: weakref.WeakValueDictionary[int, _Run] = weakref.WeakValueDictionary()  # by the number in graphs
_numbers = itertools.count(1)


class _StepFunction(torch.autograd.Function):
    """A step as an autograd function. Its gradients are not saved tensors, which activation checkpointing would drop.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, rest):
        run_of, call, compute, needs = rest
        ctx.needs, ctx.dtypes = needs, run.dtypes_of(hidden, weight, bias)
        arguments = _Arguments(call, compute, needs)
        ctx.step = run_of.found(arguments) if _in_backward() != -1 else None
        if ctx.step is None:
            loss, *gradients = run_of.take(call.tensors(), call.options, compute, needs, call.shard)
            ctx.step = _Step(arguments, loss, gradients)
            with run_of.lock:
                run_of.steps = [ref for ref in run_of.steps if ref() is not None] + [weakref.ref(ctx.step)]
        return ctx.step.loss.clone()

    @staticmethod
    def backward(ctx, d_loss):
        autograd.check_backward(d_loss)
        step = ctx.step
        if step.gradients is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time; specify retain_graph=True the first time"
            )
        made = step.gradients
        present = [(g, dtype) for g, dtype in zip(made, ctx.dtypes) if g.numel()]
        found = iter(autograd.scaled([g for g, _ in present], d_loss, [dtype for _, dtype in present]))
        if not autograd.keeps_graph():
            step.gradients = None
        of = [next(found) if g.numel() else g for g in made]  # a rank's vocabulary shard may be empty
        return *autograd.needed(of, ctx.needs), None


# --- The operator that torch.compile sees.

_INPUTS = run.INPUTS + len(LossOptions._fields) + 3


@torch.library.custom_op(
    "logitless::far_field_step",
    mutates_args=(),
    schema=autograd.schema(autograd.LOSS_TENSORS, (LossOptions,), "ScalarType? compute, SymInt needs, SymInt run", 4),
)
def far_field_step(*inputs):
    tensors, (*values, compute, needs, number) = inputs[: run.INPUTS], inputs[run.INPUTS :]
    found = _runs.get(number)
    if found is None:
        raise RuntimeError("FarFieldHead: a compiled graph outlived the module that it was made of")
    if _in_backward() != -1:
        raise NotImplementedError(
            "FarFieldHead: torch.utils.checkpoint under torch.compile would take the step twice; call the head outside "
            "of what is checkpointed"
        )
    return found.take(tensors, LossOptions(*values), compute, needs)


@far_field_step.register_fake
def _(hidden, weight, target, bias, *rest):
    *_, needs, _number = rest
    loss = hidden.new_empty((), dtype=torch.float32)
    return loss, *autograd.fake_gradients(hidden, weight, bias, needs, True)


def _setup(ctx, inputs, output):
    hidden, weight, _, bias, *_ = inputs
    ctx.needs, ctx.dtypes = inputs[-2], run.dtypes_of(hidden, weight, bias)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def _backward(ctx, d_loss, *_):
    nothing = (None,) * (_INPUTS - 4)
    if d_loss is None:
        return (None, None, None, None, *nothing)
    gradients = autograd.multiplied(ctx.saved_tensors, d_loss, ctx.dtypes)
    d_hidden, d_weight, d_bias = autograd.needed(gradients, ctx.needs)
    return (d_hidden, d_weight, None, d_bias, *nothing)


far_field_step.register_autograd(_backward, setup_context=_setup)


# --- The module.


class FarFieldHead(nn.Module):
    """``linear_cross_entropy`` for training runs, with gradients from a block-sparse softmax: see docs/use/far_field.md.
    For each block of tokens, the tiles of the vocabulary that matter are computed. A centroid represents each other
    tile. If that would exceed the error, the step is exact.

    Args:
        error: the relative error of the gradient of hidden, in (0, 1), over audited tokens.
        accuracy: "far_backward", whose loss is exact, or "far_both", whose loss has this error too, in nats. If
            far_both exceeds the error, steps are far_backward for a while; ``explain()`` counts them.
        accumulate: calls per optimizer step; the intervals of audits and orders are multiplied by it.
        sample_every: one block of tokens in so many is sampled to correct the gradient of weight, which is then
            unbiased; 0: off.
        audit_rows: tokens of an audit. audit_every: steps between audits.
        refresh_every: initial number of steps between vocabulary orders. refresh_delay: steps from the weights of an
            order, which a separate thread computes, to its adoption. sample_rows: tokens from which an order is
            computed.
        memory_budget: bytes, or text such as "512MiB", that a call may take beyond inputs and gradients; orders are
            extra.
        replicas: a ``torch.distributed.ProcessGroup`` whose ranks each have the full vocabulary and their own tokens,
            as under DistributedDataParallel. All ranks take each step, and decide alike from the errors of all, so that
            none waits for another's dense step. The first rank with tokens computes the order for all, within the step.

    ``forward(hidden, weight, target, bias=None, **options)`` returns the loss of ``linear_cross_entropy``, a mean or a
    sum. It accepts that function's options, except those that return more.

    In training (``module.train()``, gradients enabled and needed) each call is one step: it computes loss and
    gradients, and the backward scales them. A call that ``torch.utils.checkpoint`` recomputes, with bitwise equal
    arguments, takes no second step. It returns the same loss and does not recompute gradients. In evaluation, or
    without gradients, the call is the exact ``linear_cross_entropy`` and not a step. A call that raises is not a step.
    Results equal those of the library's own step, bit for bit.

    The state is the module's extra state, in ``state_dict()`` and pickles; a run that loads it continues with the same
    bits. It includes orders, of 12 bytes per vocabulary entry each; with "far_both" also 4 * dim * (dim + vocab / 128).
    On several ranks, each has the state of its own tokens. With ``replicas`` it is the same on all, and pickles and
    copies keep the group if one of that name exists.

    With ``sharding`` (``logitless.torch.Sharding``, in eager calls), the ranks that share the vocabulary take each step
    together and decide alike. Each saves the state of its shard. A state for another number of ranks causes a new
    order.

    Where the library has no kernels for the hidden state (``logitless.torch.backend``), the module computes the full
    softmax, with a warning that names the reason.

    Raises as ``linear_cross_entropy``. ValueError for an option out of range, and for a state that is damaged or of
    another accuracy or vocabulary. NotImplementedError for float64, reduction "none", class probabilities, torch.func,
    and ``torch.utils.checkpoint`` inside ``torch.compile``.
    """

    def __init__(
        self,
        error: float = 0.01,
        *,
        accuracy: str = "far_backward",
        accumulate: int = 1,
        sample_every: int = 16,
        audit_rows: int = 128,
        audit_every: int = 25,
        refresh_every: int = 100,
        refresh_delay: int = 4,
        sample_rows: int = 1024,
        memory_budget: int | str | None = None,
        replicas: Any = None,
    ):
        super().__init__()
        if isinstance(accumulate, bool) or not isinstance(accumulate, int) or not 1 <= accumulate <= 1 << 20:
            raise ValueError(f"accumulate: expected an int from 1 to {1 << 20}, got {accumulate!r}")
        given = _far_field.options(
            error=error, accuracy=accuracy, sample_every=sample_every, audit_rows=audit_rows, audit_every=audit_every,
            refresh_every=refresh_every, refresh_delay=refresh_delay, sample_rows=sample_rows,
            memory_budget=memory_budget,
        )
        self.accumulate = accumulate
        if replicas is not None and not hasattr(replicas, "group_name"):
            raise TypeError(f"replicas: expected a torch.distributed.ProcessGroup, got {type(replicas).__name__}")
        self._options = given.accumulated(accumulate)
        self._begin(b"", "" if replicas is None else replicas.group_name)

    def _begin(self, state: bytes, replicas: str = "") -> None:
        self._run = _Run(self._options, state, replicas)
        self._number = next(_numbers)
        _runs[self._number] = self._run

    @either_name
    def forward(
        self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor] = None, **options: Any
    ) -> Tensor:
        a = bind((hidden, weight, target, bias), options)
        group = "" if a.sharding is None else spread_of(a).group
        return groups.raise_on_all_ranks(group, lambda: self._forward(a, options))

    def _forward(self, a: Arguments, options: dict[str, Any]) -> Tensor:
        for name in _REFUSED:
            value = getattr(a, name)
            if value is not DEFAULTS[name] and (isinstance(value, Tensor) or value != DEFAULTS[name]):
                where = "give it to FarFieldHead" if name == "memory_budget" else "linear_cross_entropy has it"
                raise NotImplementedError(f"{name}: is no option of FarFieldHead's forward; {where}")
        if a.chunk is not None:
            raise NotImplementedError("options: FarFieldHead's forward has none; give it a memory_budget instead")
        check_tensors(a)
        if a.reduction == "none":
            raise NotImplementedError(
                "reduction: expected 'mean' or 'sum', got 'none', whose gradients wait for the backward"
            )
        if a.target.is_floating_point():
            raise NotImplementedError("target: class probabilities have no far field; give classes and target_weight")
        a, vocab_shard = local_arguments(a, Spread())
        hidden, weight, bias = a.hidden, a.weight, a.bias
        if vocab_shard.columns >= 0:
            raise NotImplementedError("sharding.weight: 'columns' have no far field; expected 'rows'")
        if quantized.of(weight, hidden.dtype) is not None:
            raise NotImplementedError("weight: a quantised head has no far field; expected floats")
        if weight.dim() != 2:
            raise NotImplementedError(f"weight: expected [V, D], got {list(weight.shape)}")
        if hidden.dtype == torch.float64:
            raise NotImplementedError("hidden: float64 has no far field; expected float32, bfloat16 or float16")
        needs = needs_of(hidden, weight, bias)
        dense = not is_native(hidden)
        if dense and self.training and not torch.compiler.is_compiling():
            warnings.warn(f"FarFieldHead: computes the full softmax in PyTorch's own operations: {backend(hidden).reason}")
        no_step = dense or hidden.numel() == 0 and not vocab_shard.tokens and not self._run.replicas
        if not (self.training and needs) or no_step:
            budget = self._options.memory_budget or None
            given = {**options, "memory_budget": budget}
            if vocab_shard.group:
                given.pop("vocab_parallel_options", None)
                given["sharding"] = a.sharding
            return linear_cross_entropy(hidden, weight, a.target, bias, **given)
        return self._step(checked_call(a, vocab_shard), needs)

    def _step(self, call: Call, needs: int) -> Tensor:
        if autograd.transformed():
            raise NotImplementedError("FarFieldHead: a step has a state, and cannot be transformed by torch.func")
        compute, vocab_shard = compute_dtype(call.hidden, call.weight), call.shard
        if vocab_shard.group and self._run.replicas:
            raise ValueError("sharding: expected none for a FarFieldHead with replicas, which have the full vocabulary each")
        if way_of(*call.tensors()) == EAGER:
            loss = _StepFunction.apply(call.hidden, call.weight, call.bias, (self._run, call, compute, needs))
        elif vocab_shard.group:
            raise NotImplementedError("sharding: FarFieldHead takes it in eager calls, not under torch.compile")
        else:
            loss, *_ = torch.ops.logitless.far_field_step(*call.tensors(), *call.options, compute, needs, self._number)
        return loss if call.divisor is None else loss / call.divisor.to(device=loss.device, dtype=loss.dtype)

    @property
    def report(self) -> Report:
        """Counters since the module was created, or since the start of the run whose state it loaded."""
        with self._run.lock:
            return self._run.head_of_cpu().report()

    def statistics(self) -> Statistics:
        """Returns the statistics of the last step. On a GPU it synchronises. Raises ValueError before the first step,
        and after one that raised."""
        return self._run.statistics()

    def explain(self) -> str:
        """Describes the next step with its reason, and the report, in several lines."""
        if c.why_missing():
            return f"dense: the full softmax in PyTorch's own operations: {c.why_missing()}"
        with self._run.lock:
            return self._run.head_of_cpu().explain()

    def get_extra_state(self) -> bytes:
        return self._run.state()

    def set_extra_state(self, state: bytes) -> None:
        if not isinstance(state, bytes):
            raise TypeError(f"state: expected bytes, got {type(state).__name__}")
        self._run.set_state(state)

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name not in ("_run", "_number")}
        return {**kept, "_state": self._run.state(), "_replicas": self._run.replicas}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        bytes_of_run, replicas = state.pop("_state"), state.pop("_replicas", "")
        super().__setstate__(state)
        if replicas and not groups.exists(replicas):
            warnings.warn(f"FarFieldHead: decides alone: there is no process group {replicas!r}, of its replicas, here")
            replicas = ""
        self._begin(bytes_of_run, replicas)

    def extra_repr(self) -> str:
        given = self._options
        of_ranks = f", replicas={self._run.replicas!r}" if self._run.replicas else ""
        return f"error={given.error}, accuracy={given.accuracy!r}, accumulate={self.accumulate}{of_ranks}"
