"""The cache of calls with their plans: each call has the results that it has alone, and the cache is bounded."""

import contextlib
import itertools

import pytest
import torch
import torch.utils.checkpoint
from logitless._cache import ThreadCache
from logitless.torch import _engine, call, linear_cross_entropy, linear_logprobs
from oracle import DEVICE
from test_loss import problem

pytestmark = pytest.mark.native
HIDDEN, WEIGHT, TARGET, BIAS = problem(1, (12,), 16, 70, torch.float32, bias=True)


def forget():
    _engine.calls.forget(*_engine.calls.entries())


def autocast(dtype):
    return lambda: torch.autocast(DEVICE, dtype)


def leaf(t):
    return t.detach().clone().requires_grad_()


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def another():
    """Returns another context of calls: one more thread, or another stream of the GPU."""
    return threads(torch.get_num_threads() + 1) if DEVICE == "cpu" else torch.cuda.stream(torch.cuda.Stream())


# Arguments to replace or add, and a context, by name.
KINDS = {
    "plain": ({}, contextlib.nullcontext),
    "autocast": ({}, autocast(torch.bfloat16)),
    "autocast_half": ({}, autocast(torch.float16)),
    "no_grad": ({}, torch.no_grad),
    "inference": ({}, torch.inference_mode),
    "threads": ({}, lambda: threads(1)),
    "frozen_weight": (dict(weight=WEIGHT.detach()), contextlib.nullcontext),
    "frozen_hidden": (dict(hidden=HIDDEN.detach()), contextlib.nullcontext),
    "no_bias": (dict(bias=None), contextlib.nullcontext),
    "strides": (dict(weight=leaf(WEIGHT).detach().t().contiguous().t().requires_grad_()), contextlib.nullcontext),
    "words": (dict(target=TARGET.int()), contextlib.nullcontext),
    "bfloat16": (dict(hidden=leaf(HIDDEN.bfloat16()), weight=leaf(WEIGHT.bfloat16())), contextlib.nullcontext),
    "fewer": (dict(hidden=leaf(HIDDEN[:5]), target=TARGET[:5]), contextlib.nullcontext),
    "sum": (dict(reduction="sum"), contextlib.nullcontext),
    "smooth": (dict(label_smoothing=0.1), contextlib.nullcontext),
    "ignored": (dict(ignore_index=3, target=TARGET.masked_fill(TARGET == -100, 3)), contextlib.nullcontext),
    "softcap": (dict(softcap=2.0), contextlib.nullcontext),
    "scale": (dict(logit_scale=0.5), contextlib.nullcontext),
    "normalizer": (dict(normalizer=3.0), contextlib.nullcontext),
    "token_weight": (dict(token_weight=torch.linspace(0, 1, 12)), contextlib.nullcontext),
    "none": (dict(reduction="none"), contextlib.nullcontext),
}


HEADS = ["plain", "scale", "softcap", "fewer", "bfloat16", "strides", "threads", "autocast", "autocast_half", "no_grad"]


def made(name, function=linear_cross_entropy, **more):
    """Returns the results of a kind, and its gradients."""
    changes, context = KINDS[name]
    given = {**dict(hidden=HIDDEN, weight=WEIGHT, target=TARGET, bias=BIAS), **changes, **more}
    arguments = [given.pop(n) for n in ("hidden", "weight", "target", "bias")]
    with context():
        found = function(*arguments, **given)
    results = found if isinstance(found, tuple) else (found,)
    leaves = [t for t in arguments if t is not None and t.requires_grad]
    upstream = sum((2.0 * r.float()).sum() for r in results)
    return [*results, *(torch.autograd.grad(upstream, leaves) if upstream.requires_grad else ())]


@pytest.mark.parametrize("name", KINDS)
def test_a_call_gives_what_it_gives_alone(name):
    forget()
    wanted = made(name)
    forget()
    for other in KINDS:  # each other kind runs first, and is cached
        made(other)
        found = made(name)
        assert len(found) == len(wanted), other
        assert all(f.dtype == w.dtype and f.requires_grad == w.requires_grad and torch.equal(f, w) for f, w in zip(found, wanted)), other


@pytest.mark.parametrize("first, then", list(itertools.permutations(HEADS, 2)))
def test_a_head_gives_what_it_gives_alone(first, then):
    forget()
    wanted = made(then, linear_logprobs)
    forget()
    made(first, linear_logprobs)
    assert all(torch.equal(f, w) for f, w in zip(made(then, linear_logprobs), wanted))


def test_calls_remembered_are_bounded(monkeypatch):
    """The cache keeps the last calls: a loop over few shapes finds all of its own."""
    monkeypatch.setattr(_engine, "calls", ThreadCache(12))
    for count in range(1, 12):
        hidden, target = HIDDEN[:count], TARGET[:count].clamp(min=0)
        for _ in range(2):
            linear_cross_entropy(hidden, WEIGHT, target, BIAS)
            linear_cross_entropy(hidden, WEIGHT, target, BIAS, reduction="none")
            linear_logprobs(hidden, WEIGHT, target)
            assert len(_engine.calls) <= 12
        assert _engine.calls.find(call.key_of((hidden, WEIGHT, target, BIAS), {})) is not None
    forget()


@pytest.mark.parametrize("options", [
    {}, dict(reduction="sum"), dict(label_smoothing=0.1), dict(softcap=None), dict(softcap=3.0), dict(memory_budget="64MiB"),
])
def test_what_is_remembered(options):
    """Calls with numbers, strings and None are cached; those with further tensors, or under a transform, are not."""
    forget()
    linear_cross_entropy(HIDDEN, WEIGHT, TARGET, BIAS, **options)
    assert _engine.calls.find(call.key_of((HIDDEN, WEIGHT, TARGET, BIAS), options)) is not None
    assert call.key_of((HIDDEN, WEIGHT, TARGET, BIAS), dict(options, class_weight=torch.ones(70))) is None
    assert call.key_of((HIDDEN, WEIGHT), options) is None
    found = []
    torch.func.grad(lambda h: (found.append(call.key_of((h, WEIGHT, TARGET, BIAS), options)), h.sum())[1])(HIDDEN.detach())
    assert found == [None]


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("function", [linear_cross_entropy, linear_logprobs])
def test_missing_tensors_are_named(function, place):
    given = [HIDDEN, WEIGHT, TARGET]
    given[place] = None
    with torch.no_grad(), pytest.raises(TypeError, match=f"{('hidden', 'weight', 'target')[place]}: expected a tensor"):
        function(*given)


@pytest.mark.parametrize("shape", [(12,), (3, 4)])
def test_losses_of_tokens_without_gradients_are_remembered(shape):
    forget()
    hidden, target, options = HIDDEN.detach().view(*shape, 16), TARGET.view(shape), dict(reduction="none", softcap=3.0)
    weight, bias = WEIGHT.detach(), BIAS.detach()
    first = linear_cross_entropy(hidden, weight, target, bias, **options)
    assert _engine.calls.find(call.key_of((hidden, weight, target, bias), options)) is not None
    assert first.shape == shape and torch.equal(linear_cross_entropy(hidden, weight, target, bias, **options), first)
    other = hidden.flip(0).contiguous()
    seen = linear_cross_entropy(other, weight, target, bias, **options)
    forget()
    assert torch.equal(linear_cross_entropy(other, weight, target, bias, **options), seen)
    leaf = hidden.clone().requires_grad_()
    linear_cross_entropy(leaf, weight, target, bias, **options).sum().backward()
    assert leaf.grad.isfinite().all()
    forget()


@pytest.mark.parametrize("options", [
    {}, dict(return_argmax=True), dict(softcap=3.0, keep=False), dict(temperature=0.5), dict(memory_budget="64MiB"),
])
@pytest.mark.parametrize("targets", [torch.int64, torch.int32], ids=str)
def test_log_probabilities_without_gradients_are_remembered(options, targets):
    forget()
    target, others = TARGET.to(targets), HIDDEN.detach().flip(0).contiguous()
    with torch.no_grad():
        for hidden in (HIDDEN, others):
            linear_logprobs(hidden, WEIGHT, target, BIAS, **options)
        assert [key[0] for key in _engine.calls.entries()].count("logprobs") == 1 + HIDDEN.requires_grad
        seen = linear_logprobs(others, WEIGHT, target, BIAS, **options)
        again = linear_logprobs(HIDDEN, WEIGHT, target, BIAS, **options)
        forget()
        for found, hidden in ((seen, others), (again, HIDDEN)):
            wanted = linear_logprobs(hidden, WEIGHT, target, BIAS, **options)
            assert len(found) == len(wanted) == 3 + ("return_argmax" in options)
            assert all(torch.equal(f, w) and f.dtype == w.dtype for f, w in zip(found, wanted))
        if DEVICE == "cpu":
            with pytest.raises(ValueError, match="70 at position 0 is outside"):
                linear_logprobs(HIDDEN, WEIGHT, torch.full_like(target, 70), BIAS, **options)
        for wrong in (dict(keep=1), dict(softcap=-1.0)):
            for _ in range(2):
                with pytest.raises((TypeError, ValueError), match=f"{next(iter(wrong))}: expected"):
                    linear_logprobs(HIDDEN, WEIGHT, target, BIAS, **{**options, **wrong})
    assert linear_logprobs(HIDDEN, WEIGHT, target, BIAS, **options)[0].requires_grad
    forget()


@pytest.mark.parametrize("options", [{}, dict(return_argmax=True), dict(temperature=0.5)])
def test_log_probabilities_with_gradients_are_remembered(options, monkeypatch):
    forget()

    def results(hidden):
        found = linear_logprobs(hidden, WEIGHT, TARGET, BIAS, **options)
        return [*found, *torch.autograd.grad(sum(t.sum() for t in found[:3]), (hidden, WEIGHT, BIAS))]

    wanted = results(HIDDEN)
    with monkeypatch.context() as patched:
        patched.setattr(call, "log_probs", None)  # the checks
        assert all(torch.equal(f, w) for f, w in zip(results(leaf(HIDDEN)), wanted, strict=True))
        if DEVICE == "cpu":
            with pytest.raises(ValueError, match="70 at position 0 is outside"):
                linear_logprobs(HIDDEN, WEIGHT, torch.full_like(TARGET, 70), BIAS, **options)
    forget()


@pytest.mark.parametrize("name", ["none", "autocast"])
def test_losses_without_a_plan_are_remembered(name, monkeypatch):
    forget()
    wanted = made(name)
    with monkeypatch.context() as patched:
        patched.setattr(call, "cross_entropy", None)  # the checks
        assert all(torch.equal(f, w) for f, w in zip(made(name, hidden=leaf(HIDDEN)), wanted, strict=True))
        if DEVICE == "cpu":
            with pytest.raises(ValueError, match="70 at position 0 is outside"):
                made(name, target=torch.full_like(TARGET, 70))
    forget()


@pytest.mark.skipif(DEVICE != "cuda", reason="products of other devices have one precision")
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)], ids=str)
def test_the_precision_of_torch_tells_calls_apart(dtypes, monkeypatch):
    hidden, weight = HIDDEN.detach().to(dtypes[0]), WEIGHT.detach().to(dtypes[1])
    keys = []
    for allowed in (False, True):
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", allowed)
        keys.append(call.key_of((hidden, weight, TARGET), {}))
    assert None not in keys and keys[0] != keys[1]


@pytest.mark.parametrize("name, number, other", [("label_smoothing", 1, True), ("ignore_index", 1, 1.0)])
def test_equal_values_of_other_types_are_still_refused(name, number, other):
    target = TARGET.masked_fill(TARGET == -100, 1)
    linear_cross_entropy(HIDDEN, WEIGHT, target, BIAS, **{name: number})
    with pytest.raises(TypeError, match=f"{name}: expected"):
        linear_cross_entropy(HIDDEN, WEIGHT, target, BIAS, **{name: other})


def test_a_call_is_planned_once(monkeypatch):
    plans = []
    kept = _engine.Call.__init__
    monkeypatch.setattr(_engine.Call, "__init__", lambda self, *a: (plans.append(1), kept(self, *a))[1])
    forget()
    for compute in (
        lambda: linear_cross_entropy(HIDDEN, WEIGHT, TARGET, BIAS).backward(),
        lambda: linear_cross_entropy(HIDDEN, WEIGHT, TARGET, BIAS, reduction="none").sum().backward(),
        lambda: linear_logprobs(HIDDEN, WEIGHT, TARGET)[0].sum().backward(),
    ):
        compute()
        before = len(plans)
        compute()
        assert before > 0 and len(plans) == before
        with another():
            compute()
        assert len(plans) > before
    HIDDEN.grad = WEIGHT.grad = BIAS.grad = None


@pytest.mark.parametrize("bias", [None, BIAS])
def test_a_checkpoint_recomputes_a_first_call(bias):
    """The recomputation is a call seen before. It saves the same tensors, as PyTorch checks."""
    given = WEIGHT, TARGET, bias
    wanted = torch.autograd.grad(linear_cross_entropy(HIDDEN.tanh(), *given), (HIDDEN, WEIGHT))
    forget()
    loss = torch.utils.checkpoint.checkpoint(lambda h: linear_cross_entropy(h.tanh(), *given), HIDDEN, use_reentrant=False)
    assert all(torch.equal(f, w) for f, w in zip(torch.autograd.grad(loss, (HIDDEN, WEIGHT)), wanted))


def test_a_call_in_use_stays(monkeypatch):
    """More new calls than the cache holds do not evict one that is made between them."""
    monkeypatch.setattr(_engine, "calls", ThreadCache(12))
    plans = []
    kept = _engine.Call.__init__
    monkeypatch.setattr(_engine.Call, "__init__", lambda self, *a: (plans.append(1), kept(self, *a))[1])
    hidden, weight = HIDDEN.detach(), WEIGHT.detach()
    linear_cross_entropy(hidden, weight, TARGET)
    for count in range(1, 12):
        linear_cross_entropy(hidden[:count], weight, TARGET[:count].clamp(min=0))
        linear_cross_entropy(hidden, weight, TARGET)
    assert len(plans) == 12
