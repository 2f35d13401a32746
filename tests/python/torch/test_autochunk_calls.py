"""First calls of autochunked functions inside PyTorch's checkpoints, torch.func, modes and other chunked functions;
calls without rows; release of plans; lines that messages name."""

import copy
import functools
import gc
import math
import os
import pickle
import signal
import threading
import time
import weakref

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import logitless._autochunk.function as plans
from logitless.torch import Unsupported, autochunk
from logitless.torch._autochunk.modules import Shim, state_of

DEVICE = torch.get_default_device().type  # conftest.py
ROWS, DIM, VOCAB = 12, 4, 60
EXECUTORS = ["python", "native"]


def z_loss(hidden, weight, target):
    logits = hidden @ weight.T
    return F.cross_entropy(logits, target) + 1e-3 * logits.logsumexp(-1).square().mean()


def per_token(hidden, weight, target):
    return F.cross_entropy(hidden @ weight.T, target, reduction="none")


FUNCTIONS = [z_loss, per_token]  # the first has its gradients in the forward, the second in the backward
both = pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
executors = pytest.mark.parametrize("executor", EXECUTORS)


def random(*shape, seed=0):
    generator = torch.Generator("cpu").manual_seed(sum(shape) + seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu").to(DEVICE)


def arguments(rows=ROWS):
    return random(rows, DIM), random(VOCAB, DIM), torch.arange(rows, device=DEVICE) * 7 % VOCAB


def cold(fn, executor):
    return autochunk(fn, chunks=3, executor=executor)


def backward(fn, args):
    """Returns outputs, and gradients of hidden and weight by Tensor.backward."""
    hidden, weight, target = args
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    made = fn(*leaves, target)
    (made * torch.arange(1, made.numel() + 1, device=DEVICE).reshape(made.shape)).sum().backward()
    return made.detach(), *(leaf.grad for leaf in leaves)


def check_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-11, atol=1e-13, equal_nan=True)


@executors
@both
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(fn, executor, reentrant):
    args = arguments()
    chunked = cold(fn, executor)

    def part(f):
        return lambda hidden, weight, target: checkpoint(
            lambda h: f(torch.tanh(h * 2), weight.sin(), target) * 3, hidden, use_reentrant=reentrant
        )

    hidden, weight, target = args
    expected = backward(lambda h, w, t: fn(torch.tanh(h * 2), w.sin(), t) * 3, args)
    check_same(backward(part(chunked), args), expected)
    check_same(backward(part(chunked), args), expected)  # with a warm cache


@executors
@both
def test_transforms_of_torch_func(fn, executor):
    hidden, weight, target = arguments(6)
    batch = random(2, 6, DIM, seed=1)

    def total(f):
        return lambda *args: (f(*args) ** 2).sum()

    grad, vmap = torch.func.grad, torch.func.vmap
    transformed = {
        "grad": lambda f: grad(total(f), (0, 1))(hidden, weight, target),
        "vmap": lambda f: (vmap(f, (0, None, None), out_dims=-1)(batch, weight, target),),
        "vmap of grad": lambda f: vmap(grad(total(f), (0, 1)), (0, None, None))(batch, weight, target),
        "grad of vmap": lambda f: grad(lambda w: (vmap(f, (0, None, None))(batch, w, target) ** 2).sum())(weight)[None],
        "jacrev": lambda f: (torch.func.jacrev(f)(hidden, weight, target),),
    }
    for how in transformed.values():
        check_same(how(cold(fn, executor)), how(fn))
    mapped = lambda f: backward(lambda b, w, t: vmap(f, (0, None, None))(b, w, t), (batch, weight, target))
    check_same(mapped(cold(fn, executor)), mapped(fn))


@executors
def test_transforms_within_the_function(executor):
    """Gradients of examples, a smoothness penalty and a gradient's norm."""

    def fn(hidden, weight, target):
        example = lambda h, t: F.cross_entropy((h @ weight.T)[None], t[None])
        slopes = torch.func.vmap(torch.func.grad(example))(hidden, target)
        made, slope = torch.func.jvp(lambda h: (h @ weight.T).log_softmax(-1), (hidden,), (torch.ones_like(hidden),))
        return slopes.square().sum(-1) + (made.exp() * slope.square()).sum(-1)

    check_same(backward(cold(fn, executor), arguments()), backward(fn, arguments()))

    def jacobians(hidden, weight, target):
        """The squared derivatives of each token's probabilities, whose bases are diagonals of examples."""
        softmax = lambda h: (h @ weight.T).softmax(-1)
        slopes = torch.func.vmap(torch.func.jacrev(softmax))(hidden)
        curved = torch.func.vmap(torch.func.jacrev(torch.func.jacrev(lambda h: softmax(h)[0])))(hidden)
        return slopes.square().sum((1, 2)) + curved.sum((1, 2))

    check_same(backward(cold(jacobians, executor), arguments()), backward(jacobians, arguments()))


@executors
@both
def test_what_transforms_have_no_rule_for(fn, executor):
    hidden, weight, target = arguments(6)
    chunked = cold(fn, executor)
    with pytest.raises(NotImplementedError, match="no rule for forward-mode derivatives .torch.func.jvp"):
        torch.func.jvp(lambda h: chunked(h, weight, target), (hidden,), (hidden,))
    with torch.autograd.forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="no rule for forward-mode derivatives"):
            chunked(hidden, weight, target)
    once = torch.func.grad(lambda h: chunked(h, weight, target).sum())
    with pytest.raises(NotImplementedError, match="second derivatives have no form in a chunked function"):
        torch.func.grad(lambda h: once(h).sum())(hidden)
    with pytest.raises(ValueError, match=r"closes over a tensor \[60, 4\] that a transform of torch.func"):
        torch.func.grad(lambda w: cold(lambda h: fn(h, w, target), executor)(hidden).sum())(weight)
    with pytest.raises(ValueError, match=r"closes over a tensor \[2, 6, 4\] that a transform of torch.func"):
        torch.func.vmap(lambda h: cold(lambda w: fn(h, w, target), executor)(weight))(random(2, 6, DIM))
    leaf = hidden.clone().requires_grad_()
    made = chunked(leaf, weight, target)
    several = torch.stack([torch.ones_like(made), made.detach()])
    with pytest.raises(NotImplementedError, match="batches of upstream gradients .*is_grads_batched"):
        torch.autograd.grad(made, leaf, several, is_grads_batched=True, retain_graph=True)
    one_by_one = torch.stack([torch.autograd.grad(fn(leaf, weight, target), leaf, upstream)[0] for upstream in several])
    of_all = torch.func.vmap(lambda upstream: torch.autograd.grad(made, leaf, upstream, retain_graph=True)[0])(several)
    torch.testing.assert_close(of_all, one_by_one)
    curved = lambda h: torch.func.vmap(torch.func.hessian(lambda x: (x @ weight.T).logsumexp(-1)))(h).sum((1, 2))
    with pytest.raises(Unsupported, match=r"vmap of a Hessian by forward mode has no form here; expected jacrev"):
        cold(curved, executor)(hidden)


@executors
def test_tensors_that_outlive_a_transform(executor):
    weight, leaked = random(VOCAB, DIM).requires_grad_(), []
    torch.func.grad(lambda h: leaked.append(h) or h.sum())(random(ROWS, DIM))
    chunked = cold(lambda h, w: (h @ w.T).logsumexp(-1).sum(), executor)
    expected = chunked(random(ROWS, DIM), weight)
    assert torch.equal(chunked(leaked[0], weight), expected)
    with torch.no_grad():
        assert torch.equal(chunked(leaked[0], weight), expected)


@executors
def test_none_among_tensors(executor):
    """Calls that differ in which argument is None have plans of their own."""

    def scaled(hidden, factor, twice=None):
        return (hidden * factor).sum() if twice is None else (2 * hidden * twice).sum()

    chunked, (hidden, factor) = cold(scaled, executor), (random(3, 4), random(3, 4, seed=1))
    for args, kwargs in (((hidden, factor, None), {}), ((hidden, None, factor), {}), ((hidden, None), dict(twice=factor))):
        torch.testing.assert_close(chunked(*args, **kwargs), scaled(*args, **kwargs))


def test_the_state_of_modules():
    """It is what PyTorch finds: shared modules and tensors once, under their first name, and nothing that is None."""
    shared, tied = torch.nn.BatchNorm1d(VOCAB, affine=False), torch.nn.Module()
    tied.norm, tied.head = torch.nn.LayerNorm(DIM), torch.nn.Linear(DIM, VOCAB)
    tied.again, tied.gone, tied.twice = tied.norm, None, torch.nn.Linear(DIM, VOCAB, bias=False)
    tied.twice.weight = tied.head.weight
    tied.register_buffer("absent", None)
    tied.register_module("missing", None)
    modules = {"first": tied, "second": torch.nn.Sequential(shared, shared).eval(), "third": tied.norm}
    shim = Shim(lambda: None, modules)
    state, (_, *called) = state_of(modules)
    expected = {**dict(shim.named_parameters()), **dict(shim.named_buffers())}
    assert list(state) == list(expected) and all(state[name] is expected[name] for name in expected)
    assert [training for training, *_ in called] == [m.training for m in shim.modules()][1:]


class Doubled(torch.nn.Module):
    """Doubles in training."""

    def forward(self, x):
        return 2 * x if self.training else x


@executors
def test_what_changes_in_a_module(executor):
    layer = torch.nn.Sequential(torch.nn.Linear(DIM, VOCAB), Doubled()).to(DEVICE)

    def loss(hidden):
        return layer(hidden).logsumexp(-1).sum()

    def replace(module):
        module[0].weight = torch.nn.Parameter(2 * module[0].weight.detach())

    hidden, chunked = random(ROWS, DIM).float().requires_grad_(), cold(loss, executor)
    changes = [
        lambda m: None,
        replace,
        lambda m: m.eval(),
        lambda m: m[0].weight.requires_grad_(False),
        lambda m: m.append(torch.nn.GELU()),
        lambda m: m[0].register_forward_hook(lambda _, inputs, output: 3 * output),
        lambda m: m[0]._forward_hooks.clear(),
        lambda m: m[0].register_full_backward_hook(lambda _, d_inputs, d_outputs: tuple(2 * d for d in d_inputs)),
        lambda m: setattr(m[2], "forward", torch.tanh),
    ]
    for change in changes:
        change(layer)
        wanted = [hidden, *(p for p in layer.parameters() if p.requires_grad)]
        for m, e in zip(*((t, *torch.autograd.grad(t, wanted)) for t in (chunked(hidden), loss(hidden))), strict=True):
            torch.testing.assert_close(m, e)


@executors
def test_modes(executor):
    hidden, weight, target = arguments()
    weight.requires_grad_()
    expected = z_loss(hidden, weight, target).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            made = cold(z_loss, executor)(hidden * 1, weight, target)
        assert not made.requires_grad
        torch.testing.assert_close(made, expected)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        cold(z_loss, executor)(hidden, weight, target).backward()
    wanted = weight.grad.clone()
    with torch.autograd.set_detect_anomaly(True):
        cold(z_loss, executor)(hidden, weight, target).backward()
        assert torch.is_anomaly_enabled()
    torch.testing.assert_close(weight.grad, 2 * wanted)


def test_first_calls_on_several_threads():
    """torch.fx, which traces, is not made for it."""
    chunked, made = cold(z_loss, "auto"), {}

    def call(rows):
        made[rows] = backward(chunked, arguments(rows))

    threads = [threading.Thread(target=call, args=(ROWS + k % 3,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rows in range(ROWS, ROWS + 3):
        check_same(made[rows], backward(z_loss, arguments(rows)))


@pytest.mark.skipif(DEVICE != "cpu", reason="a forked process cannot use a GPU")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_forked_in_another_threads_trace_names_it():
    tracing, forked = threading.Event(), threading.Event()

    def waits(hidden, weight, target):
        tracing.set()
        forked.wait(30)
        return z_loss(hidden, weight, target)

    thread = threading.Thread(target=lambda: cold(waits, "auto")(*arguments()))
    thread.start()
    assert tracing.wait(30)
    child = os.fork()
    if child == 0:
        try:
            cold(z_loss, "auto")(*arguments())
        except RuntimeError as error:
            os._exit(7 if "forked while another thread traced" in str(error) else 1)
        os._exit(0)
    forked.set()
    thread.join()
    end = time.monotonic() + 30
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended[0] == child, "it hangs"
    assert os.waitstatus_to_exitcode(ended[1]) == 7


class Scored(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.head, self.scale = torch.nn.Linear(DIM, VOCAB, dtype=torch.float64), scale

    def plain(self, hidden, target):
        return F.cross_entropy(self.scale * self.head(hidden), target)

    loss = autochunk(plain, chunks=3)
    unbound = autochunk(functools.partial(z_loss), chunks=3)

    @classmethod
    @autochunk(chunks=3)
    def of_class(cls, hidden, weight, target):
        return z_loss(hidden, weight, target)


class Twice(Scored):
    @autochunk(chunks=3)
    def loss(self, hidden, target):
        return 2 * super().loss(hidden, target)


def test_decorated_methods():
    hidden, weight, target = arguments()

    def check(module, factor=1.0):
        made, expected = module.loss(hidden, target), factor * module.plain(hidden, target)
        check_same(*((t, *torch.autograd.grad(t, list(module.parameters()))) for t in (made, expected)))

    first, second = Scored(1.0).to(DEVICE), Scored(2.0).to(DEVICE)
    check(first)
    check(second)
    check(Twice(3.0).to(DEVICE), 2.0)
    assert first.loss is first.loss and first.loss is not second.loss and "in 3 chunks" in first.loss.explain()
    for copied in (copy.deepcopy(first), pickle.loads(pickle.dumps(first)), copy.copy(first)):
        copied.scale = 4.0
        check(copied)
    check(first)
    for chunked in (first.unbound, Scored.of_class):
        torch.testing.assert_close(chunked(hidden, weight, target), z_loss(hidden, weight, target))
    gone = weakref.ref(second)
    del second
    gc.collect()
    assert gone() is None

    class Slotted:
        __slots__ = ()
        loss = Scored.loss

    with pytest.raises(TypeError, match="a method of Slotted, which has no __dict__"):
        Slotted().loss(hidden, target)


def test_constants_and_settings_that_compare_alike():
    chunked = cold(lambda x, zero: torch.ones(3, device=DEVICE).sum() * (x.double() * math.copysign(1.0, zero)).sum(), "auto")
    x = random(ROWS, DIM).float()
    assert chunked(x, 0.0) == -chunked(x, -0.0)
    ones = cold(lambda x: x + torch.ones(DIM, device=DEVICE), "auto")
    before = torch.get_default_dtype()
    assert ones(x).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert ones(x).dtype is torch.float64
    finally:
        torch.set_default_dtype(before)


class Output:
    def __init__(self, loss):
        self.loss = loss


def test_outputs_and_inputs_that_are_refused():
    hidden, weight, target = arguments()
    for wrapped, kind in ((Output, "Output"), (lambda t: {t}, "set"), (lambda t: (x for x in [t]), "generator")):
        with pytest.raises(Unsupported, match=f"returns a {kind}, whose contents are no outputs"):
            autochunk(lambda *args: (z_loss(*args), wrapped(args[0].sum())))(hidden, weight, target)
        with pytest.warns(UserWarning, match="runs unchunked"):
            autochunk(lambda *args: (z_loss(*args), wrapped(args[0].sum())), unsupported="run")(hidden, weight, target)
    assert autochunk(lambda *args: (z_loss(*args), Output(3)))(hidden, weight, target)[1].loss == 3
    with pytest.raises(Unsupported, match=r"test_autochunk_calls\.py:\d+: .*Tensor.numpy\(\) needs the values"):
        autochunk(lambda x: x.sum() * float(x.detach().numpy().max()))(hidden)
    with pytest.raises(Unsupported, match="a sparse_coo tensor among the arguments"):
        autochunk(lambda x: (x @ hidden).sum())(torch.eye(ROWS, dtype=torch.float64, device=DEVICE).to_sparse())


@executors
def test_inside_of_another(executor):
    inner = cold(z_loss, executor)
    outer = cold(lambda h, w, t: inner(h * 2, w, t) * 3, executor)
    check_same(backward(outer, arguments()), backward(lambda h, w, t: z_loss(h * 2, w, t) * 3, arguments()))
    assert inner.last is None


@executors
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_rows(executor, reduction):
    def fn(hidden, weight, target):
        logits = hidden @ weight.T
        return F.cross_entropy(logits, target, reduction=reduction) + 1e-3 * logits.logsumexp(-1).mean()

    hidden, weight, target = arguments()
    check_same(backward(cold(fn, executor), (hidden[:0], weight, target[:0])), backward(fn, (hidden[:0], weight, target[:0])))


@executors
@both
def test_plans_let_go_before_their_backward(fn, executor, monkeypatch):
    monkeypatch.setattr(plans, "_KEPT", 2)
    chunked = cold(fn, executor)
    waiting = []
    for rows in (3, 4, 5, 6):
        args = arguments(rows)
        leaf = args[0].requires_grad_()
        waiting.append((leaf, chunked(leaf, *args[1:]).sum()))
        assert len(chunked._made) <= 2
    for rows, (leaf, loss) in zip((3, 4, 5, 6), waiting):
        loss.backward()
        again = arguments(rows)
        expected = torch.autograd.grad(fn(again[0].requires_grad_(), *again[1:]).sum(), again[0])[0]
        torch.testing.assert_close(leaf.grad, expected)
    # Two plans are cached; the least recently used one goes.
    first, last = chunked._made._made
    chunked(arguments(5)[0].requires_grad_(), *arguments(5)[1:])
    assert list(chunked._made._made) == [last, first]


def test_the_line_of_what_is_refused():
    def drawn(hidden):
        doubled = hidden * 2
        return torch.poisson(doubled).sum()

    def item(hidden):
        return hidden * hidden.sum().item()

    def of_a_module(hidden):
        layer = torch.nn.Softmax(-1)
        return layer(torch.poisson(hidden))

    hidden = random(4, 6)
    name = r"autochunk: test_autochunk_calls\.py:\d+: "
    for fn, line in (
        (drawn, r"return torch\.poisson\(doubled\)\.sum\(\): aten\.poisson\.default: its random numbers have no form"),
        (item, r"return hidden \* hidden\.sum\(\)\.item\(\): aten\._local_scalar_dense\.default needs the values"),
        (of_a_module, r"return layer\(torch\.poisson\(hidden\)\): aten\.poisson\.default: its random numbers"),
    ):
        with pytest.raises(Unsupported, match=name + line):
            autochunk(fn)(hidden)


@executors
def test_the_lines_of_what_is_chunked_and_what_is_not(executor):
    if executor == "native" and DEVICE != "cpu":
        pytest.skip("a plan of a CPU")
    def loss(hidden, weight):
        logits = (hidden @ weight.T).float()
        turned = logits.reshape(-1)[7:-5]
        return turned.exp().sum() + logits.logsumexp(-1).sum()

    args = random(65536, DIM).requires_grad_(), random(2, DIM).requires_grad_()  # only rows are worth cutting
    text = autochunk(loss, memory_budget=2048, executor=executor).explain(*args)
    first = loss.__code__.co_firstlineno
    logits = f"test_autochunk_calls.py:{first + 1}: logits = (hidden @ weight.T).float(): "
    turned = f"test_autochunk_calls.py:{first + 2}: turned = logits.reshape(-1)[7:-5]: "
    assert f"\n  {logits}cast %_to_copy_1 f64[65536, 2]: along dimension 0" in text
    # The line of a gradient is that of its value.
    assert f"\n    boundary: {turned}slice_1 (slice) f32[131060] cannot run on a cut" in text
    assert f"\n    boundary: {turned}slice_scatter (pad) f32[131072] cannot be cut along dimension" in text
    assert f"\n  not chunked: {turned}pad %slice_scatter f32[131072]: it cannot be cut" in text


def test_the_line_of_a_head():
    if DEVICE != "cpu":
        pytest.skip("a plan of a CPU")
    def loss(hidden, weight):
        return F.cross_entropy(hidden @ weight.T, torch.arange(256, device=hidden.device))

    hidden, weight = random(256, 32).float().requires_grad_(), random(4000, 32).float().requires_grad_()
    text = autochunk(loss, executor="native").explain(hidden, weight)
    assert "\n  test_autochunk_calls.py:" in text and "@ weight.T, torch.arange(256, device=hidden.device)): mm.head: on" in text
