"""Replaces a function's forward and backward by compiled programs."""

from __future__ import annotations

import functools
import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor

from logitless import _library as c
from logitless._autochunk.attention import LARGEST_FAST_DIM
from logitless._autochunk.checks import Checks, checked
from logitless._autochunk.function import (
    ChunkedFunction,
    P,
    R,
    choose_executor,
    describe,
    in_one_pass,
    is_tracing,
    most_over,
    put,
    total_seconds,
    warn_missed,
)
from logitless._autochunk.methods import binds
from logitless._autochunk.names import leaf_names, numbered, unique
from logitless._autochunk.options import AUTO, EXECUTORS, Limits, Unsupported
from logitless._autochunk.externs import Call
from logitless._autochunk.native import Machine, Request, multiplies_fp32, program
from logitless._autochunk.parse import parse
from logitless._autochunk.plan import Compiled, compile_text
from logitless._autochunk.reads import Read, Reads, number
from logitless._autochunk.text import load
from logitless._compiler import Program
from logitless.torch import autograd
from logitless.torch._autochunk import native, transforms
from logitless.torch._autochunk.arguments import check_tensors, contiguous_strides, fakes_of, layout_of, leaves_of
from logitless.torch._autochunk.attention import slow_on_gpu
from logitless.torch._autochunk.dtypes import DTYPES
from logitless.torch._autochunk.host_time import seconds_of_calls
from logitless.torch._autochunk.memory import eager_bytes, peak_bytes
from logitless.torch._autochunk.methods import bound
from logitless.torch._autochunk.modules import Shim, keep_attributes, modules_of, state_of, with_state
from logitless.torch._autochunk.outside import CALLS
from logitless.torch._autochunk.program import drawing, kept_products, to_text
from logitless.torch._autochunk.source import to_source
from logitless.torch._autochunk.trace import TENSOR, Around, Traced, alone, has_half, one_at_a_time, trace
from logitless.torch._autochunk.watched import Watched, runs


@dataclass
class Plan:
    """The programs for one set of shapes, dtypes, devices and constants."""

    traced: Traced
    limits: Limits
    forward: Compiled  # computes the outputs; if joint, also the gradients for an upstream gradient of 1
    backward: Compiled | None = None  # computes the gradients from inputs, upstream gradients and what is kept
    joint: bool = False
    seed: str = ""  # the parameter with the random seed, the last of the tensors; "" if nothing random is drawn
    not_native: str = ""  # with executor "auto": the reason why the library does not run it
    itself: Callable[[], int | None] = lambda: None  # bytes that the unchunked function takes
    kept: Sequence[torch.Tensor] = ()  # fake: the last results of forward, which backward reads

    def inputs(
        self,
        compiled: Compiled,
        tensors: Sequence[torch.Tensor],
        cotangents: Sequence[torch.Tensor] = (),
        kept: Sequence[torch.Tensor] = (),
    ):
        given = list(tensors)
        named = {self.seed: given.pop()} if self.seed else {}
        captured = [t.to(tensors[0].device) for t in self.traced.captured]  # the function moves them itself
        named.update(zip(self.traced.names, [*given, *captured]))
        named.update({f"cotangent{i}": t for i, t in enumerate(cotangents)})
        named.update(zip(_kept_names(self.kept), kept))
        return [named[p] for p in compiled.parameters]

    def run(self, compiled: Compiled, tensors, cotangents=(), kept=()) -> tuple[torch.Tensor, ...]:
        kind = tensors[0].device.type
        if torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return self.run(compiled, tensors, cotangents, kept)
        with torch.no_grad():
            return compiled.function(*self.inputs(compiled, tensors, cotangents, kept))

    @property
    def programs(self) -> list[Compiled]:
        return [made for made in (self.forward, self.backward) if made is not None]

    @property
    def over(self) -> int:
        """The bytes over the budget."""
        return most_over(self.limits, self.programs)

    @property
    def has_grad(self) -> list[bool]:
        """A flag for each tensor of a call: a gradient by it exists."""
        return [*self.traced.has_grad, *([False] if self.seed else [])]

    def gradients(
        self, saved: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor], owned: bool = False
    ) -> Sequence[torch.Tensor]:
        """Returns the gradients of the inputs that have one.

        saved: the result of `saved`. cotangents: upstream gradients of the
            differentiable outputs. owned: the saved gradients' memory is not shared, and may be overwritten by the
            results.
        """
        if self.joint:
            # A tensor of rank 0 does not promote the dtype of the gradients.
            cotangent = cotangents[0].reshape(())
            if owned and all(type(t) is torch.Tensor for t in saved):  # not a tracer's tensors
                return autograd.scaled(saved, cotangent)
            return [gradient * cotangent for gradient in saved]
        count = len(saved) - len(self.kept)
        return self.run(self.backward, saved[:count], cotangents, saved[count:])

    def saved(self, tensors: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Returns what waits for backward: the gradients for an upstream gradient of 1 if joint, else the inputs and what
        is kept. made: the results of forward after the outputs."""
        return made if self.joint else [*tensors, *made]

    @property
    def seconds(self) -> float:
        """The predicted time of forward and backward."""
        return total_seconds(self.programs)

    @property
    def kept_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.kept)

    def describe(self) -> str:
        alone = "no input needs a gradient"
        return describe(
            self.forward, self.backward, self.joint, alone, self.limits, self.itself(), self.not_native, self.kept_bytes
        )

    def source(self) -> str:
        return "\n\n".join(made.source for made in self.programs)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan: Plan, *tensors):
        made = plan.run(plan.forward, tensors)
        count = len(plan.traced.outputs)
        outputs = made[:count]
        ctx.plan = plan
        ctx.mark_non_differentiable(*(o for o, yes in zip(outputs, plan.traced.differentiable) if not yes))
        end = torch.empty(0, dtype=torch.float32, device="cpu")  # an output, and so a function of all inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*plan.saved(tensors, made[count:]), end)
        return (*outputs, end)

    @staticmethod
    def backward(ctx, *cotangents):
        if torch.is_grad_enabled():  # backward is recorded only under create_graph=True
            return transforms.gradients_once(_Chunked, ctx, cotangents)
        if not transforms.active():
            autograd.check_backward(*cotangents)
        plan, saved = ctx.plan, ctx.saved_tensors[:-1]
        wanted = transforms.upstream(plan, cotangents, saved[0].device)
        if transforms.active():  # vmap runs this backward: one upstream gradient after another
            gradients = iter(transforms.gradients(plan, saved, wanted))
            return (None, *(next(gradients) if has else None for has in plan.has_grad))
        # The library writes each result into its own memory. PyTorch's operations may return their inputs.
        gradients = iter(plan.gradients(saved, wanted, owned=plan.limits.native))
        return (None, *(next(gradients) if has else None for has in plan.has_grad))


_chunked = autograd.eager_apply(_Chunked)


def plan_for(
    function: Callable,
    tensors: Sequence[torch.Tensor],
    names: list[str],
    needs: list[bool],
    limits: Limits,
    gradients: str,
    around: Around,
) -> Plan:
    """Returns a plan as ``make_plan`` does, choosing the executor if the limits leave it open. It is the library, whose
    loops are fused, unless products of fp32 tensors are in TF32 by PyTorch's setting."""

    def plan(native: bool) -> Plan:
        chosen = replace(limits, native=native, auto=False)
        return make_plan(function, tensors, names, needs, chosen, gradients, around)

    if not limits.auto:
        return make_plan(function, tensors, names, needs, limits, gradients, around)
    device = tensors[0].device
    return choose_executor(plan, native.why_not(device), functools.partial(_declined, device))


def _declined(device: torch.device, plan: Plan) -> str:
    """Returns the reason against a plan of the library, or ""."""
    return _rounded(device, plan) or (_wide_attention(plan) if device.type == "cuda" else "")


def _wide_attention(plan: Plan) -> str:
    """Returns the reason against the library where its attention on a GPU has no tensor cores, or ""."""
    if plan.traced is None or not any(slow_on_gpu(graph) for graph in (plan.traced.forward, plan.traced.joint)):
        return ""
    return f"PyTorch's attention of fp32 or of more than {LARGEST_FAST_DIM} dimensions a head is faster on a GPU"


def _rounded(device: torch.device, plan: Plan) -> str:
    """Returns the reason against the library where PyTorch rounds fp32 operands of products, or ""."""
    parts = [made for made in (plan.forward, plan.backward) if made is not None]
    if not native.has_tf32(device) or not any(multiplies_fp32(made.request.text) for made in parts):
        return ""
    return "PyTorch multiplies fp32 tensors in TF32 by its setting, the library in fp32"


def make_plan(
    function: Callable,
    tensors: Sequence[torch.Tensor],
    names: list[str],
    needs: list[bool],
    limits: Limits,
    gradients: str,
    around: Around,
) -> Plan:
    """Makes a plan. tensors: fake. needs: whether each needs a gradient. around: the result of ``alone``, the context
    of this call."""
    # A native program reads contiguous copies, so the trace does not depend on strides.
    samples = fakes_of([(layout_of(t)[0], contiguous_strides(t), t) for t in tensors]) if limits.native else tensors
    traced = trace(function, samples, names, needs, around)
    count = sum(traced.differentiable)
    cotangents = [f"cotangent{i}" for i in range(count)]
    outputs = [f"out{i}" for i in range(len(traced.outputs))]
    differentiable = [o for o, yes in zip(traced.outputs, traced.differentiable) if yes]
    half = traced.joint is not None and has_half(traced.joint)
    joint = in_one_pass(gradients, [o.shape for o in differentiable], half)
    everything = {t: v for t, v in zip(traced.names, [*tensors, *traced.captured])}
    everything.update(zip(cotangents, differentiable))
    seed = _seed_name(traced)
    everything[seed] = torch.empty(2, dtype=torch.int64, device=tensors[0].device)

    @functools.cache
    def itself() -> int:
        return eager_bytes(function, tensors, needs) or 0

    def compiled(graph, parameters, results, name, ones=(), kept=None, before=0):
        kept = kept or {}
        made = to_text(graph, parameters, results, ones, name, limits.native, seed, kept, given=name == "backward")
        inputs = [everything[p] for p in made.parameters]
        checks = None if name == "backward" else made.checks  # the forward has made them
        if limits.native:
            held = sum(n.meta["val"].nbytes for n in kept)

            def spare() -> int:
                """Bytes of a fast plan: what half of the function, or the programs that keep nothing, would take."""
                return max(itself() // 2, before) - held

            return _native(made.text, name, made.parameters, inputs, limits, made.locations, checks, spare)

        looked, check = 0, None
        if checks is not None:
            looked, check = _python_checks(checks, made.calls, limits.budget, inputs)

        def emit(program):
            wide = inputs[0].device.type == "cuda"
            source = to_source(parse(program.text, DTYPES), name, wide, made.calls)
            return source, max(peak_bytes(source, name, inputs), looked)

        machine = native.framework_machine(inputs[0].device) if limits.budget > 0 else Machine()
        calling = seconds_of_calls if inputs[0].device.type == "cpu" else lambda source: 0.0
        ready = compile_text(
            made.text, name, made.parameters, emit, limits, machine, locations=made.locations, calls=made.calls,
            framework="PyTorch", calling=calling,
        )
        if checks is not None:
            ready.function = checked(ready.function, checks, check)
        return ready

    given, captured = traced.names[: len(tensors)], traced.names[len(tensors) :]
    found = [f"d_{n}" for n, has in zip(given, traced.has_grad) if has]
    if count == 0 or not found:
        parameters = _parameters(traced.forward, given, captured)
        return Plan(traced, limits, compiled(traced.forward, parameters, outputs, "forward"), seed=seed)
    parameters = _parameters(traced.joint, [*given, *cotangents], captured)
    if joint:
        forward = compiled(traced.joint, parameters, outputs + found, "forward_and_gradients", [len(given)])
        return Plan(traced, limits, forward, joint=True, seed=seed)
    of_gradients = [None] * len(outputs) + found
    forward = compiled(traced.forward, _parameters(traced.forward, given, captured), outputs, "forward")
    backward = compiled(traced.joint, parameters, of_gradients, "backward")
    plain = Plan(traced, limits, forward, backward, seed=seed)
    if gradients != "auto" or not _may_keep(limits, tensors[0].device):
        return plain
    upstream = [i for i, p in enumerate(parameters) if p in cotangents]
    nodes = kept_products(traced.joint, len(outputs), upstream)
    values = [n.meta["val"] for n in nodes]
    named = dict(zip(nodes, _kept_names(nodes)))
    keeping = Plan(traced, limits, forward, backward, seed=seed, kept=values)
    if not nodes or 2 * keeping.kept_bytes > itself():
        return plain
    everything.update(zip(named.values(), values))
    before = max(forward.after, backward.after)
    keeping.forward = compiled(traced.joint, parameters, outputs + [None] * len(found), "forward", kept=named)
    keeping.backward = compiled(traced.joint, parameters, of_gradients, "backward", kept=named, before=before)
    return keeping if keeping.seconds <= _WORTH * plain.seconds else plain


# The time of programs that keep products, over that of programs that compute them again in backward.
_WORTH = 0.9


def _may_keep(limits: Limits, device: torch.device) -> bool:
    """Returns whether values may live from forward to backward: without a budget, in programs of a GPU, whose time is
    predicted well enough."""
    free = limits.native and limits.keep and limits.budget == 0 and limits.chunks == 0 and limits.slack == 0.0
    return free and native.machine_of(device).device == c.DEVICE_CUDA


def _kept_names(kept: Sequence) -> list[str]:
    return [f"kept_value{i}" for i in range(len(kept))]


def _seed_name(traced: Traced) -> str:
    """Returns the name of the parameter with the random seed, or "" if nothing random is drawn."""
    drawn = drawing(traced.forward)
    if traced.joint is not None and len(drawing(traced.joint)) > len(drawn):
        raise Unsupported(
            "autochunk: random numbers are drawn once more for the gradients, as by torch.utils.checkpoint around a "
            "dropout; leave the checkpoint out: what is cheap is computed again without it"
        )
    name = "random_seed" if drawn else ""
    while name in traced.names:
        name += "_"
    return name


def _python_checks(checks: Checks, calls: Sequence[Call], budget: int, inputs: Sequence) -> tuple[int, Callable]:
    """Returns the generated function of the checks, and its bytes. inputs: those of the checked program."""
    program = Program(checks.text, memory_budget=budget or None, externs=True)
    source = to_source(parse(program.text, DTYPES), "checks", False, calls)
    function = load(source, "checks")

    def run(*given):
        if not native.is_traced(given):
            checks.raise_for([t.item() for t in function(*given)])

    read = [inputs[place] for place in checks.reads]
    return peak_bytes(source, "checks", read) if read else 0, run


def _native(
    text: str,
    name: str,
    read: list[str],
    inputs: Sequence[torch.Tensor],
    limits: Limits,
    locations: dict[str, str],
    checks: Checks | None,
    spare: Callable[[], int],
) -> Compiled:
    device, copies = inputs[0].device, native.input_bytes(inputs)
    machine = native.machine_of(device)
    check = Request(text, machine, limits.budget, checks=checks).of_checks()
    looked = 0 if check is None else program(check).arena_bytes
    made = compile_text(
        text,
        name,
        read,
        lambda program: (program.text, max(program.arena_bytes, looked) + copies),
        limits,
        machine,
        lambda request: functools.partial(native.run, request),
        locations,
        checks=checks,
        spare=spare,
    )
    made.threads = torch.get_num_threads() if device.type == "cpu" else 1
    return made


def _parameters(graph: torch.fx.GraphModule, given: list[str], captured: list[str]) -> list[str]:
    """Returns a name for each placeholder. Captured tensors come last, in the graph's own order."""
    rest = iter(given)
    return [
        captured[n.meta["captured"]] if "captured" in n.meta else next(rest)
        for n in graph.graph.nodes
        if n.op == "placeholder"
    ]


_TORCH = os.path.dirname(torch.__file__) + os.sep
_LAYERS = os.path.join(_TORCH, "nn", "modules") + os.sep


def _skips(file: str) -> bool:
    """Returns whether a file is PyTorch's own code, except layers, whose attributes are options."""
    return file.startswith(_TORCH) and (not file.startswith(_LAYERS) or file.endswith(os.sep + "module.py"))


# Functions by key, to which a trace of torch.compile refers.
_functions: weakref.WeakValueDictionary[str, AutoChunked] = weakref.WeakValueDictionary()
_keys = itertools.count()


def _in_graph(key: str, state: dict[str, torch.Tensor], args, kwargs):
    """Runs a call while torch.compile traces; the operators of its plan become part of the graph."""
    args, kwargs = pytree.tree_map(specialized, (args, kwargs))
    return _functions[key].in_graph(state, args, kwargs)


def specialized(leaf):
    """Specialises a number that torch.compile would treat as symbolic, since plans are for concrete numbers."""
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return kinds[type(leaf)](leaf) if type(leaf) in kinds else leaf


# torch before 2.7 breaks the graph instead.
_in_graph = getattr(torch._dynamo, "nonstrict_trace", torch.compiler.disable)(_in_graph)


class AutoChunked(ChunkedFunction[P, R]):
    """The return type of ``autochunk``: callable like the function, with ``explain`` and ``source``."""

    executors = (AUTO, *EXECUTORS)
    register_dataclass = "torch.utils._pytree.register_dataclass"
    bound_from: AutoChunked | None = None  # for a method of an instance: the decorated function

    def __init__(self, function: Callable[P, R], limits: Limits, gradients: str, unsupported: str):
        super().__init__(function, limits, gradients, unsupported)
        if not isinstance(function, torch.nn.Module):
            functools.update_wrapper(self, function)
        self._used = modules_of(function)
        self._binds = binds(function)
        self._key = str(next(_keys))
        _functions[self._key] = self

    def __get__(self, instance, owner=None):
        return self if instance is None or not self._binds else bound(self, instance)

    def __reduce__(self):
        if self.bound_from is not None:
            return self.bound_from.__get__, (self._function.__self__,)
        return super().__reduce__()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.limits.native and torch.compiler.is_dynamo_compiling():
            state = {}
            for holder, module in self._used.items():
                for name, tensor in module.named_parameters():
                    state[f"{holder}.{name}"] = tensor
                for name, tensor in module.named_buffers():
                    state[f"{holder}.{name}"] = tensor
            return _in_graph(self._key, state, args, kwargs)
        return self._run(args, kwargs)

    # torch.compile does not trace generated functions.
    @torch.compiler.disable
    def _run(self, args, kwargs):
        if is_tracing():
            return self._inside(args, kwargs)
        transforms.refuse_forward_mode()
        plan, tensors = self._plan(args, kwargs)
        self.last = plan
        return self._function(*args, **kwargs) if isinstance(plan, str) else outputs_of(plan, tensors)

    def in_graph(self, state: dict[str, torch.Tensor], args, kwargs):
        """Runs a call on a tracer's tensors. state: parameters and buffers of the modules that the function uses."""
        transforms.refuse_in_graph()
        if modules_of(self._function) != self._used:
            raise RuntimeError(
                "autochunk: torch.compile traces a function whose modules are not those that it had when it was made; "
                "pass their parameters as arguments, or give the nn.Module itself"
            )
        plan, tensors = self._plan(args, kwargs, state)
        self.last = plan
        if isinstance(plan, str):
            return self._function(*args, **kwargs)
        if plan.traced.captured:
            raise Unsupported(
                "autochunk: torch.compile traces a function that holds tensors of its own, "
                f"{', '.join(str(list(t.shape)) for t in plan.traced.captured)}; pass them as arguments"
            )
        if plan.seed:
            raise Unsupported(
                "autochunk: torch.compile traces a function that draws random numbers; leave it outside of what is "
                "compiled, or draw them there and pass them as arguments"
            )
        return outputs_of(plan, tensors)

    def missed(self, plan: Plan) -> None:
        """Warns of a new plan that does not meet the budget."""
        warn_missed(plan.limits, plan.programs)

    def _planned(self, args, kwargs) -> Plan | str:
        return self._plan(args, kwargs)[0]

    def _plan(self, args, kwargs, given_state=None) -> tuple[Plan | str, list[torch.Tensor]]:
        """Returns the plan, or why there is none, and the tensors. given_state: a tracer's tensors in place of
        parameters and buffers."""
        modules = modules_of(self._function)
        state, called = state_of(modules)
        traced = given_state is not None
        if traced:
            state = {name: given_state[name] for name in state}
        leaves, structure = leaves_of(args, kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] + list(state.values())
        if not tensors:
            advice = self._advice(tuple(map(type, leaves)))
            raise ValueError(f"autochunk: expected a tensor among the arguments, got none{advice}")
        check_tensors(tensors, traced)
        device = tensors[0].device
        if self.limits.native:
            native.check_device(device)
        elif device.type == "meta":
            raise Unsupported("autochunk: tensors on meta among the arguments; expected a device with values")
        grad = torch.is_grad_enabled()
        needs = [grad and transforms.requires_grad(t) for t in tensors]
        layouts = [layout_of(t) for t in tensors] if traced else [(t.shape, t.stride()) for t in tensors]
        key = (
            structure,
            grad,
            tuple([(t.dtype, layout, t.device, need) for t, layout, need in zip(tensors, layouts, needs)]),
            tuple([TENSOR if isinstance(leaf, torch.Tensor) else (type(leaf), number(leaf)) for leaf in leaves]),
            called,
            torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
            self.limits.auto and native.has_tf32(device),
            traced,
            torch.get_default_dtype(),
        )
        plan = self._known(key, "tensors")
        if plan is None:
            with one_at_a_time():
                plan = self._known(key, "tensors")  # another thread may have made it meanwhile
                if plan is None:
                    plan, reads = self._made_for(args, kwargs, modules, state, tensors, needs)
                    self._made.keep(key, plan, reads)
        return plan, tensors

    def _made_for(self, args, kwargs, modules, state, tensors, needs) -> tuple[Plan | str, list[Read]]:
        """Makes the plan of a call, or returns why there is none, and the variables that were read."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        # The plan keeps these, so they hold no tensor of this call.
        constants, held = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], list(state)
        target = self._function.forward if isinstance(self._function, torch.nn.Module) else self._function
        shim = Shim(self._function, modules) if modules else None
        reads = Reads(_skips, lambda value: isinstance(value, FakeTensor), runs, CALLS)

        def call(*given):
            inner_args, inner_kwargs = pytree.tree_unflatten(put(constants, places, given), spec)
            replaced = dict(zip(held, given[len(places) :]))
            reads.closure(target)
            keep_attributes(modules, reads)
            with reads, Watched(reads):
                if shim is None:
                    return self._function(*inner_args, **inner_kwargs)
                return torch.func.functional_call(shim, replaced, inner_args, inner_kwargs)

        # A checkpoint runs its function again for the gradients.
        call.around_gradients = lambda run, given: with_state(modules, dict(zip(held, given[len(places) :])), run)

        names = leaf_names(target, args, kwargs, lambda value: numbered(len(pytree.tree_leaves(value))))
        short = [name.removeprefix("module.").replace(".", "_") for name in held]
        named = unique([names[i] for i in places] + short)
        try:
            with alone() as around:
                fakes = fakes_of([(*layout_of(t), t) for t in tensors])
                plan = plan_for(call, fakes, named, needs, self.limits, self.gradients, around)
            reads.kept.check(plan.traced.captured)
            plan.itself = functools.cache(functools.partial(eager_bytes, call, fakes, needs))
            self.missed(plan)
        except Unsupported as error:
            plan = self.refused(error, stacklevel=5)
        return plan, reads.all(not isinstance(plan, str))


def outputs_of(plan: Plan, tensors: Sequence[torch.Tensor]):
    """Runs the plan and returns the function's outputs."""
    if plan.seed:
        # vmap's randomness option applies: a seed per example, one for all, or an error.
        tensors = [*tensors, torch.randint(0, 1 << 32, (2,), dtype=torch.int64, device=tensors[0].device)]
    if transforms.active():
        outputs = transforms.Transformed.apply(plan, *tensors)
    else:
        tensors = transforms.unwrapped(tensors)
        outputs = plan.run(plan.forward, tensors) if plan.backward is None and not plan.joint else _chunked(plan, *tensors)
    made = iter(outputs)
    flat = [next(made) if constant is TENSOR else constant for constant in plan.traced.constants]
    return pytree.tree_unflatten(flat, plan.traced.spec)
