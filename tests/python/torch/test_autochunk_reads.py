"""Values that a chunked function reads besides its arguments, which may change; copies of it."""

import collections
import copy
import functools
import os
import pickle
import random
import sys
import types
import warnings

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from logitless._autochunk import reads
from logitless._autochunk.calls import NumpyGenerator
from logitless._autochunk.reads import Reads
from logitless.torch import Unsupported, autochunk
from logitless.torch._compile import register

register()

TEMPERATURE = 2.0
CONFIG = {"scale": 1.0, "deep": {"shift": 0.0}}
X = torch.arange(12.0).reshape(3, 4)


class Layer(torch.nn.Module):
    power = 1.0  # an attribute of the class

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 28).reshape(7, 4))
        self.temperature, self.steps = 1.0, [1.0, 2.0]
        self.options = types.SimpleNamespace(margin=0.5)
        self.drop, self.act = torch.nn.Softplus(beta=1.0), torch.nn.ReLU()
        self.shift = torch.zeros(())  # a tensor, but not a buffer
        self.chunked = autochunk(self.loss)

    def loss(self, x):
        z = self.act(self.drop(x @ self.weight.T)) / getattr(self, "temperature") + self.options.margin * self.power
        return (z * sum(self.steps) + self.shift).sum()

    def forward(self, x):
        return self.loss(x)


@autochunk
def of_globals(x):
    return (x * TEMPERATURE * CONFIG["scale"] + CONFIG["deep"]["shift"]).sum()


def agrees(chunked, function, x=X):
    torch.testing.assert_close(chunked(x), function(x))


@pytest.mark.parametrize("executor", ["native", "python"])
@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "temperature", 0.25),
        lambda m: m.steps.append(3.0),
        lambda m: m.steps.__setitem__(0, 5.0),
        lambda m: setattr(m.options, "margin", -1.0),
        lambda m: setattr(m, "power", 3.0),
        lambda m: setattr(m.drop, "beta", 4.0),
        lambda m: setattr(m, "act", torch.nn.Tanh()),
        lambda m: setattr(m, "shift", torch.ones(())),
        lambda m: m.shift.fill_(2.0),
        lambda m: setattr(m, "weight", torch.nn.Parameter(2 * m.weight.detach())),
    ],
)
def test_an_attribute_that_changes(change, executor):
    module = Layer()
    for chunked in (autochunk(module, executor=executor), autochunk(module.loss, executor=executor)):
        agrees(chunked, module)
        change(module)
        agrees(chunked, module)
        got, wanted = (torch.autograd.grad(f(X), module.weight) for f in (chunked, module))
        torch.testing.assert_close(got, wanted)


def test_a_global_that_changes(monkeypatch):
    function = of_globals.__wrapped__
    agrees(of_globals, function)
    monkeypatch.setitem(globals(), "TEMPERATURE", 5.0)
    agrees(of_globals, function)
    monkeypatch.setitem(CONFIG, "scale", 7.0)
    agrees(of_globals, function)
    monkeypatch.setitem(CONFIG["deep"], "shift", 1.0)
    agrees(of_globals, function)


def test_a_closure_that_changes():
    """A variable of the function, a variable of a function that it calls, and that function itself change."""
    factor, held = 1.0, types.SimpleNamespace(factor=1.0)

    def helper(x):
        return x * held.factor * factor

    def function(x):
        return helper(x).sum() * factor

    chunked = autochunk(function)
    agrees(chunked, function)
    factor = 3.0
    agrees(chunked, function)
    held.factor = 0.5
    agrees(chunked, function)
    held = types.SimpleNamespace(factor=9.0)
    agrees(chunked, function)
    before = helper

    def helper(x):
        return before(x) + 1

    agrees(chunked, function)


def compilations(chunked) -> int:
    return sum(len(plans) for plans in chunked._made._made.values())


def test_what_was_compiled_is_found_again():
    """Neither an earlier value nor one that the function does not read causes a compilation."""
    module = Layer()
    chunked = autochunk(module)
    for temperature in (1.0, 2.0, 1.0, 2.0):
        module.temperature = temperature
        agrees(chunked, module)
    assert compilations(chunked) == 2
    module.unread, module.extra_repr = 3.0, lambda: ""
    chunked(X.clone())
    assert compilations(chunked) == 2


def test_what_the_function_changes_itself_is_no_reason_to_compile():
    """A list that it appends to, and a counter of its calls, change only when it is traced."""
    calls, module = [], Layer()

    def function(x):
        calls.append(1)
        module.count = getattr(module, "count", 0) + 1
        return module(x)

    chunked = autochunk(function)
    chunked(X)
    traced = len(calls)
    chunked(X)
    assert len(calls) == traced


def test_a_warning_says_what_changes_all_the_time():
    module = Layer()
    chunked = autochunk(module)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for k in range(12):
            module.temperature = 1.0 + k
            chunked(X)
    [warning] = [w for w in warned if "was compiled" in str(w.message)]
    assert warning.filename == __file__
    assert "self.temperature changes between its calls; pass what changes as a tensor" in str(warning.message)


def test_the_profiler_of_before_is_there_afterwards():
    import sys

    seen = []
    sys.setprofile(lambda *event: seen.append(event[1]))
    try:
        autochunk(lambda x: x.sum())(X)
        assert sys.getprofile() is not None and "call" in seen
    finally:
        sys.setprofile(None)


def test_torch_compile_compiles_again():
    """With the backend, dynamo guards the values that the model reads."""
    module = Layer()
    compiled = torch.compile(module, backend="logitless", options={"min_bytes": 64, "ratio": 1.0, "inner": "eager"})
    agrees(compiled, module)
    module.temperature, module.options.margin = 0.25, 4.0
    agrees(compiled, module)
    torch._dynamo.reset()


@pytest.mark.parametrize("executor", ["auto", "native", "python"])
def test_a_module_that_holds_a_chunked_function_is_copied(executor):
    """Deep copies and pickles have their own parameters, before the first call and after it."""
    module = Layer()
    module.chunked = autochunk(module.loss, executor=executor, memory_budget="1MiB")
    for _ in range(2):
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert other.chunked.limits == module.chunked.limits and other.chunked is not module.chunked
            with torch.no_grad():
                other.weight.mul_(2)
            other.temperature = 0.5
            agrees(other.chunked, other)
            other.chunked(X).backward()
            assert other.weight.grad is not None and module.weight.grad is None
            agrees(module.chunked, module)


def test_a_decorated_function_is_copied_by_its_name():
    assert pickle.loads(pickle.dumps(of_globals)) is of_globals and copy.deepcopy(of_globals) is of_globals
    chunked = autochunk(Layer())
    other = copy.deepcopy(chunked)
    torch.testing.assert_close(other(X), chunked(X))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * CONFIG["scale"]

    @staticmethod
    def backward(ctx, upstream):
        return upstream * CONFIG["deep"]["shift"]


def of_gradient(gradient):
    return gradient * CONFIG["deep"]["shift"]


def hooked(x):
    y = x * 1.0
    y.register_hook(of_gradient)
    return y


@pytest.mark.parametrize("function", [Scaled.apply, hooked], ids=["function", "hook"])
def test_code_that_pytorch_calls_is_watched(function, monkeypatch):
    """PyTorch's operations are not watched, but code that they call is."""
    chunked = autochunk(lambda x: function(x).exp().sum())
    for shift in (2.0, 5.0):
        monkeypatch.setitem(CONFIG["deep"], "shift", shift)
        made = []
        for f in (chunked, lambda x: function(x).exp().sum()):
            x = X.clone().requires_grad_()
            f(x).backward()
            made.append(x.grad)
        torch.testing.assert_close(*made)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="all code is watched from Python 3.12 on")
def test_operations_of_pytorch_are_not_watched(monkeypatch):
    watched, event = [], Reads._event

    def count(self, frame, *rest):
        watched.append(frame.f_code.co_name)
        event(self, frame, *rest)

    monkeypatch.setattr(Reads, "_event", count)
    autochunk(lambda x: torch.nn.functional.cross_entropy(x @ X.T, X[:, 0].long() % 3))(X)
    assert "<lambda>" in watched and "__torch_dispatch__" not in watched


def watched_values():
    """Yields functions of a value that stands in something else, and what changes it."""
    options, items = {"t": 1.0}, [types.SimpleNamespace(t=1.0), {"t": 1.0}]
    queue, optimizer = collections.deque([1.0, 2.0]), torch.optim.SGD([torch.ones(1)], lr=1.0)
    module = types.ModuleType("settings_of_test")
    module.T, module.__file__ = 1.0, __file__
    sys.modules["settings_of_test"] = module

    def default(x, options=options):
        return x * options["t"]

    def imported(x):
        from settings_of_test import T

        return x * T

    part = functools.partial(lambda x, t, o: x * t * o["t"], t=1.0, o=options)
    yield "default", default, lambda: options.update(t=3.0)
    yield "default of what is called", lambda x: default(x), lambda: options.update(t=5.0)
    yield "object in a list", lambda x: x * items[0].t, lambda: setattr(items[0], "t", 3.0)
    yield "dicts in a list", lambda x: x * sum(item["t"] for item in items[1:]), lambda: items[1].update(t=3.0)
    yield "learning rate", lambda x: x * optimizer.param_groups[0]["lr"], lambda: optimizer.param_groups[0].update(lr=3.0)
    yield "keyword of a partial", part, lambda: part.keywords.update(t=3.0)
    yield "dict of a partial", lambda x: part(x), lambda: options.update(t=7.0)
    yield "deque", lambda x: x * queue[0], lambda: queue.appendleft(3.0)
    yield "environment", lambda x: x * float(os.environ.get("SCALE", "1")), lambda: os.environ.update(SCALE="3")
    yield "import", imported, lambda: setattr(module, "T", 3.0)
    inner = sys.modules["settings_of_test.part"] = types.ModuleType("settings_of_test.part")
    inner.T, inner.__file__ = 1.0, __file__
    space = {"__name__": "settings_of_test.user", "__package__": "settings_of_test"}
    exec("def relative(x):\n    from . import part\n    return x * part.T", space)
    yield "relative import", space["relative"], lambda: setattr(inner, "T", 3.0)


@pytest.mark.parametrize("function, change", [pytest.param(f, c, id=name) for name, f, c in watched_values()])
def test_values_within_others(function, change, monkeypatch):
    monkeypatch.delenv("SCALE", raising=False)
    chunked, before = autochunk(function), function(X)
    agrees(chunked, function)
    change()
    agrees(chunked, function)
    agrees(chunked, function)
    assert compilations(chunked) == 2 and not torch.equal(before, function(X))


class Keeps(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.zeros(()))
        self.kept, self.average, self.mask = [], torch.zeros(()), None

    def assigned(self, x):
        self.mean = 0.5 * self.mean + x.mean()
        return (x * self.weight).sum()

    def attribute(self, x):
        self.aux = x.mean()
        return (x * self.weight).sum() + self.aux

    def averaged(self, x):
        self.average = 0.5 * self.average + x.mean()
        return (x * self.weight).sum()

    def lazy(self, x):
        if self.mask is None:
            self.mask = torch.arange(4.0)
        return (x * self.weight * self.mask).sum()

    def moved(self, x):
        self.mean = self.mean.to(x.device)
        return (x * self.weight).sum() + self.mean

    def attends(self, x):
        def attention(x):
            return torch.nn.functional.scaled_dot_product_attention(x, x * self.weight, x)

        return checkpoint(attention, x[None, None], use_reentrant=False).sum()

    def checkpointed(self, x):
        return checkpoint(lambda x: (x * self.weight).exp(), x, use_reentrant=False).sum()

    def appended(self, x):
        self.kept.append(x.mean())
        return (x * self.weight).sum()

    def gradients(self, x):
        loss = (x * self.weight).sum()
        loss.backward()
        return loss.detach()


KEPT = {}


def in_a_global(x):
    KEPT["mean"] = x.mean()
    return x.sum() + KEPT["mean"]


def counted(x):
    KEPT["count"] = KEPT.get("count", 0) + x.mean()
    return x.sum()


def caught(x):
    try:
        torch.manual_seed(7)
    except NotImplementedError:
        pass
    return x.sum()


def forked(x):
    with torch.random.fork_rng():
        return x.sum()


OPTIMIZER = torch.optim.SGD([torch.ones(1)], lr=1.0)
OUTSIDE = [
    (Keeps().assigned, "the function assigns module.mean, which is done once"),
    (Keeps().averaged, "keeps a tensor in module.average, which"),
    (Keeps().lazy, "keeps a tensor in module.mask, which .* if it is a cache, one call of the function itself before"),
    (Keeps().appended, "keeps a tensor in self.kept, which"),
    (Keeps().gradients, r"test_autochunk_reads.py:\d+: loss.backward\(\): Tensor.backward puts gradients"),
    (Keeps().attends, "a checkpoint whose operations are others when it is run again"),
    (counted, "keeps a tensor in KEPT, which"),
    (lambda x: OPTIMIZER.step() or x.sum(), "Optimizer.step changes parameters"),
    (caught, "torch.manual_seed sets the random generator of the caller"),
    (forked, "torch.random.fork_rng sets"),
    (lambda x: x.sum() * random.random(), "random.random is drawn once"),
    (lambda x: x.sum() * random.randint(2, 9), "random.randint is drawn once"),
    (lambda x: random.seed(1) or x.sum(), "random.seed sets the random generator of the caller"),
    (lambda x: x.sum() * float(np.random.rand()), "a number of np.random is drawn once"),
    (lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), "torch.cond has no form .* expected torch.where"),
    (lambda x: (f"{x.mean():.3f}", x.sum())[1], "the text of a number needs the values"),
]


@pytest.mark.parametrize("executor", ["native", "python"])
@pytest.mark.parametrize("function, message", OUTSIDE)
def test_what_a_function_does_outside_of_itself(function, message, executor):
    """It is refused by name, before it is done, and nothing of the trace stays."""
    own = getattr(function, "__self__", types.SimpleNamespace())
    torch.manual_seed(100)
    states = random.getstate(), np.random.get_state()[2], dict(vars(own))
    with pytest.raises(Unsupported, match=message):
        autochunk(function, executor=executor)(X)
    assert torch.initial_seed() == 100 and (random.getstate(), np.random.get_state()[2], dict(vars(own))) == states
    assert KEPT == {} and getattr(own, "kept", []) == []


def test_what_is_refused_runs_as_it_is():
    module = Keeps()
    with pytest.warns(UserWarning, match="runs unchunked"):
        autochunk(module.lazy, unsupported="run")(X)
    torch.testing.assert_close(module.mask, torch.arange(4.0))
    agrees(autochunk(module.lazy), module.lazy)  # now that it is filled


@pytest.mark.parametrize("function, name", [(Keeps().attribute, "module.aux"), (in_a_global, "KEPT")])
def test_what_only_stays_behind(function, name):
    """A tensor that the function sets before it reads it is put back, with a warning, and no plan reads it."""
    own = getattr(function, "__self__", types.SimpleNamespace())
    chunked, before = autochunk(function), (dict(vars(own)), dict(KEPT))
    with pytest.warns(UserWarning, match=f"what the function keeps in {name} is not there after a call"):
        made = chunked(X)
    assert (dict(vars(own)), dict(KEPT)) == before and chunked.explain(X)
    assert (dict(vars(own)), dict(KEPT)) == before
    torch.testing.assert_close(made, function(X))
    own.aux = torch.tensor(100.0)  # as a call of the function itself leaves it
    agrees(chunked, function, 2 * X)
    KEPT.clear()


class Holder:
    def __init__(self, function):
        self.function = function

    def run(self, y):
        self.function(y)


class Lazy(dict):
    """Makes an object of each class that it holds."""

    def __getitem__(self, key):
        return super().__getitem__(key)()

    def items(self):
        raise RuntimeError("lazy")


LAZY = Lazy(exp=lambda: torch.exp, other=dict)
WRAPPER = {}
exec(compile("def checked(x, bits=__import__('random').getrandbits):\n    return bits(8) and x", "<@checker>", "exec"), WRAPPER)


def to_a_local_list(x):
    kept = []
    Holder(lambda y: kept.append(y)).run(x * 2)
    Holder(functools.partial(lambda store, y: store.append(y), kept)).run(x * 3)
    for hook in [lambda y: kept.append(y)]:
        hook(x * 4)
    {"f": lambda y: kept.append(y)}["f"](x * 5)
    return sum(kept).sum()


def by_local_hooks(x):
    grads, y = [], x * 2
    if y.requires_grad:
        y.register_hook(lambda g: grads.append(g))
    return y.sum() + len(grads)


ACCEPTED = [
    to_a_local_list,
    by_local_hooks,
    Keeps().moved,
    Keeps().checkpointed,
    lambda x: (random.getstate(), x.sum())[1],
    lambda x: WRAPPER["checked"](x.sum()) * 0 + x.sum(),
    lambda x: (f"{TENSOR:.2f}", x.sum())[1],
    lambda x: LAZY["exp"](x).sum(),
]
TENSOR = torch.tensor(0.5)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("function", ACCEPTED)
def test_what_is_no_business_of_the_guards(function):
    state = random.getstate()
    agrees(autochunk(function), function, 0.1 * X)
    random.setstate(state)


def test_the_generator_of_another_thread_is_left_alone():
    generator, before = NumpyGenerator(), np.random.get_state()
    np.random.rand()
    assert generator.check({"beta", "normal"}) is None and np.random.get_state()[2] != before[2]
    np.random.set_state(before)


def test_more_items_than_are_looked_at(monkeypatch):
    monkeypatch.setattr(reads, "_ITEMS", 3)
    objects = [types.SimpleNamespace(t=1.0) for _ in range(5)]
    with pytest.warns(UserWarning, match="are looked at in 3 items of containers, and it reads more"):
        autochunk(lambda x: x.sum() * objects[0].t)(X)


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_attributes_that_pytorch_sets_before_each_call():
    """They are put back: the old weight norm and a recurrent layer keep tensors of the trace in them."""
    for layer in (torch.nn.utils.weight_norm(torch.nn.Linear(4, 5)), torch.nn.RNN(4, 4)):
        held = {name: value for name, value in vars(layer).items() if name in ("weight", "_flat_weights")}
        torch.testing.assert_close(autochunk(layer)(X), layer(X))
        autochunk(layer).explain(X)
        kinds = {type(t) for value in vars(layer).values() for t in (value if isinstance(value, list) else [value])}
        assert held and "FakeTensor" not in {kind.__name__ for kind in kinds}


def test_a_function_of_torch_compile_is_traced_as_it_was_written():
    compiled = torch.compile(lambda x: (x * 2).exp().sum(), backend="eager")
    for function in (compiled, lambda x: compiled(x) + 1):
        agrees(autochunk(function), function, 0.1 * X)
