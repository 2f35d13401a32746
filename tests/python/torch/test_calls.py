"""The calls that linear_cross_entropy replaces, and its refusals."""

import fractions
import re

import numpy as np
import oracle
import pytest
import torch
import torch.nn.functional as F
from logitless._library import parse_bytes
from logitless._options import HeadOptions
from logitless.torch import FarFieldHead, LinearCrossEntropy, _engine, backend, linear_cross_entropy, linear_logprobs
from logitless.torch._peak import peak_of
from logitless.torch.losses import orpo_loss
from logitless.torch.ranks import VocabShard
from test_loss import problem


def pair(**more):
    hidden, weight, target, bias = problem(1, (24,), 16, 70, torch.float32, bias=True)
    return hidden, weight, target, bias


NOT_PLAIN = [np.float64(3), np.float32(3), np.int64(3), np.array(3), np.array(3.0), fractions.Fraction(3)]


@pytest.mark.parametrize("number", NOT_PLAIN, ids=lambda n: type(n).__name__)
def test_real_numbers_of_other_kinds_are_numbers(number):
    hidden, weight, target, _ = pair()
    wanted = linear_cross_entropy(hidden, weight, target, normalizer=3.0, softcap=3.0, ignore_index=-100)
    for _ in range(2):  # the second call is cached
        found = linear_cross_entropy(hidden, weight, target, normalizer=number, softcap=number, ignore_index=np.int64(-100))
        assert torch.equal(found, wanted)
    for refused in (np.array([3.0]), np.array("3"), np.bool_(True), 3j):
        with pytest.raises(TypeError, match="normalizer: expected a number above 0, got "):
            linear_cross_entropy(hidden, weight, target, normalizer=refused)
    with pytest.raises(ValueError, match="normalizer: expected a number above 0, got -3.0"):
        linear_cross_entropy(hidden, weight, target, normalizer=np.negative(float(number)))
    with pytest.raises(TypeError, match="ignore_index: expected an int, got 3.5"):
        linear_cross_entropy(hidden, weight, target, ignore_index=np.float32(3.5))


needs_torch_call = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this PyTorch has no such call")


@needs_torch_call
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", [{}, dict(label_smoothing=0.1), dict(ignore_index=3), dict(ignore_index=None), dict(weight=1)])
def test_every_argument_of_torch(reduction, bias, options):
    hidden, weight, target, b = pair()
    if options.get("ignore_index", 0) == 3:
        target = target.clamp(min=0)
    options = dict(options, reduction=reduction)
    if bias:
        options["linear_bias"] = b
    if "weight" in options:
        options["weight"] = torch.rand(70) + 0.5
    wanted, found = F.linear_cross_entropy(hidden, weight, target, **options), linear_cross_entropy(hidden, weight, target, **options)
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)
    inputs = [hidden, weight] + ([b] if bias else [])
    g = torch.randn(wanted.shape)
    for a, e in zip(torch.autograd.grad(found, inputs, g), torch.autograd.grad(wanted, inputs, g)):
        assert oracle.error(a, e) <= 1e-5
    # PyTorch's names of the tensors work, too.
    named = linear_cross_entropy(input=hidden, linear_weight=weight, target=target, **options)
    assert torch.equal(named, found)


REFUSED = [
    (dict(reduction="avg"), ValueError, "reduction: expected 'none', 'mean' or 'sum', got 'avg'"),
    (dict(label_smoothing=1.2), ValueError, "label_smoothing: expected a number from 0 to 1, got 1.2"),
    (dict(label_smoothing="x"), TypeError, "label_smoothing: expected a number from 0 to 1, got 'x'"),
    (dict(softcap=-1.0), ValueError, "softcap: expected a number above 0, or None, got -1.0"),
    (dict(logit_scale=0.0), ValueError, "logit_scale: expected a finite number that is not 0"),
    (dict(logit_scale=float("nan")), ValueError, "logit_scale: expected a finite number"),
    (dict(z_loss=-1.0), ValueError, "z_loss: expected a number from 0"),
    (dict(normalizer=0.0), ValueError, "normalizer: expected a number above 0"),
    (dict(normalizer=2.0, reduction="sum"), ValueError, "normalizer: goes with reduction 'mean', got 'sum'"),
    (dict(ignore_index=1.5), TypeError, "ignore_index: expected an int, got 1.5"),
    (dict(memory_budget=0), ValueError, "memory_budget: expected more than 0 bytes, got 0"),
    (dict(memory_budget=1 << 64), ValueError, "memory_budget: expected less than 4611686018427387904 bytes, got 1844674"),
    (dict(memory_budget="12 parsecs"), ValueError, "parsecs"),
    (dict(memory_budget=2.5), TypeError, "memory_budget: expected bytes or text"),
    (dict(expected_ignored=1.5), ValueError, r"expected_ignored: expected a number in \[0, 1\], got 1.5"),
    (dict(expected_ignored=True), TypeError, r"expected_ignored: expected a number in \[0, 1\], got True"),
    (dict(class_weight=torch.ones(3)), ValueError, r"class_weight: expected \[70\], got \[3\]"),
    (dict(token_weight=torch.ones(3)), ValueError, r"token_weight: expected \[24\], got \[3\]"),
    (dict(class_weight=torch.ones(70, requires_grad=True)), NotImplementedError, "class_weight: has no gradient here"),
    (dict(shift=True), ValueError, r"shift: expected hidden \[..., T, D\]"),
    (dict(colour=2.0), TypeError, "unexpected keyword argument 'colour'$"),
    (dict(label_smooth=0.1), TypeError, "unexpected keyword argument 'label_smooth'; did you mean 'label_smoothing'?"),
    (dict(softcap=0), ValueError, "softcap: expected a number above 0, or None, got 0"),
    (dict(memory_budget="0"), ValueError, "memory_budget: expected more than 0 bytes, got '0'"),
    (dict(memory_budget="0.2 B"), ValueError, "memory_budget: expected more than 0 bytes, got '0.2 B'"),
    (dict(memory_budget="12 mibs"), ValueError, "memory_budget: '12 mibs' is not a number of bytes"),
    (dict(target=None), TypeError, "'target' is given twice"),
]


@pytest.mark.parametrize("options, error, text", REFUSED, ids=[next(iter(r[0])) + str(i) for i, r in enumerate(REFUSED)])
def test_refusals_name_the_argument(options, error, text):
    hidden, weight, target, _ = pair()
    with pytest.raises(error, match=text):
        linear_cross_entropy(hidden, weight, target, **options)


def test_expected_ignored_is_a_hint():
    hidden, weight, target, _ = pair()
    for function in (linear_cross_entropy, lambda *tensors, **options: sum(linear_logprobs(*tensors, **options)).sum()):
        found = [torch.autograd.grad(function(hidden, weight, target, **options), (hidden, weight))
                 for options in ({}, dict(expected_ignored=0.75), dict(expected_ignored=np.float32(0.5)))]
        assert all(torch.equal(a, b) for more in found[1:] for a, b in zip(found[0], more))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab_id", [70, -1, 1 << 33])
def test_a_bad_target_is_named_with_its_position(vocab_id, dtype):
    hidden, weight, target, _ = pair()
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    several = torch.stack([target, target], 1)
    target[7] = several[7, 1] = vocab_id
    calls = {
        "7": (linear_cross_entropy, target, {}),
        "07": (lambda *a, **k: linear_cross_entropy(a[0][None], a[1], a[2][None], reduction="none"), target, {}),
        "007": (lambda *a: linear_logprobs(*a)[0], target, {}),
        "7, entry 1": (linear_cross_entropy, several, dict(target_weight=torch.ones(24, 2))),
        "07, entry 1": (lambda *a: linear_logprobs(*a)[0], several, {}),
    }
    for at, (call, targets, more) in calls.items():
        if oracle.DEVICE == "cpu":
            with pytest.raises(ValueError, match=rf"^target: {vocab_id} at position {at.lstrip('0')} is outside \[0, 70\)"):
                call(hidden, weight, targets, **more)
        else:  # nothing waits for the GPU
            assert torch.isnan(call(hidden, weight, targets, **more)).any()


def test_either_name_of_the_targets():
    hidden, weight, target, _ = pair()
    module = LinearCrossEntropy(16, 70)
    for call, given in (
        (linear_cross_entropy, (hidden, weight)), (linear_logprobs, (hidden, weight)), (FarFieldHead(), (hidden, weight)),
        (module, (hidden,)), (orpo_loss, (hidden.reshape(2, 12, -1), weight)),
    ):
        vocab_ids = target.reshape(given[0].shape[:-1])
        found, wanted = call(*given, targets=vocab_ids), call(*given, target=vocab_ids)
        assert torch.equal(torch.cat([t.flatten() for t in found] if isinstance(found, tuple) else [found[None]]),
                           torch.cat([t.flatten() for t in wanted] if isinstance(wanted, tuple) else [wanted[None]]))
        with pytest.raises(TypeError, match="'target' is given twice"):
            call(*given, target=vocab_ids, targets=vocab_ids)


@pytest.mark.parametrize("budget", ["256mib", "256 MIB", "0.25gib", 256 << 20])
def test_units_in_any_case(budget):
    assert parse_bytes(budget) == 256 << 20


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("more", [dict(return_lse=True), dict(return_target_logits=True)])
def test_token_weights_beside_outputs_of_the_head(reduction, more):
    """Here the loss is computed from log-probabilities."""
    hidden, weight, target, bias = pair()
    given = dict(token_weight=torch.linspace(0.5, 2.0, 24), z_loss=1e-2, reduction=reduction)
    found = linear_cross_entropy(hidden, weight, target, bias, **given, **more)[0]
    x, w, b = oracle.leaves(hidden, weight, bias)
    wanted = oracle.loss(x, w, target, b, **{**given, "token_weight": given["token_weight"].double()})
    assert torch.allclose(found.double(), wanted, rtol=1e-5)
    for f, e in zip(torch.autograd.grad(found.sum(), (hidden, weight, bias)), torch.autograd.grad(wanted.sum(), (x, w, b))):
        assert oracle.error(f, e) <= oracle.GRADIENT[torch.float32]


def test_refusals_of_tensors():
    hidden, weight, target, _ = pair()

    def refused(error, text, *args, **kwargs):
        for function in (linear_cross_entropy, linear_logprobs):
            with pytest.raises(error, match=text):
                function(*args, **kwargs)

    refused(ValueError, r"weight: expected \[V, 16\], got \[70, 15\]", hidden, weight[:, :15], target)
    refused(TypeError, "weight: expected torch.float32, the dtype of hidden, .*got torch.float64", hidden, weight.double(), target)
    for half, other in ((torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16), (torch.float64, torch.bfloat16)):
        refused(TypeError, f"weight: expected {half}, the dtype of hidden, .*got {other}", hidden.to(half), weight.to(other), target)
    refused(TypeError, "hidden: expected float32, bfloat16, float16 or float64, got torch.int64", target[:, None], weight, target)
    refused(ValueError, r"target: expected \[24\]", hidden, weight, target[:5])
    refused(TypeError, "target: expected", hidden, weight, target.to(torch.int16))
    refused(ValueError, r"bias: expected \[70\], got \[3\]", hidden, weight, target, torch.ones(3))
    for shape in ((24, 69), (24, 70, 1), (1, 24, 69)):
        with pytest.raises(ValueError, match=r"target: expected class probabilities \[24, 70\], got \[" + ", ".join(map(str, shape))):
            linear_cross_entropy(hidden, weight, torch.rand(shape))
    with pytest.raises(ValueError, match="target: expected 1 or more targets a token, got 0"):
        linear_logprobs(hidden, weight, target[:, None][:, :0])
    with pytest.raises(TypeError, match="missing weight, target"):
        linear_cross_entropy(hidden)
    with pytest.raises(NotImplementedError, match="accuracy: needs one target a token"):
        linear_cross_entropy(hidden, weight, target[:, None], target_weight=torch.ones(24, 1), accuracy=True)
    with pytest.raises(ValueError, match=r"target_weight: goes with target \[24, K\], .*, got target \[24\]"):
        linear_cross_entropy(hidden, weight, target, target_weight=torch.ones(24))
    # The call after a refused one works.
    assert torch.isfinite(linear_cross_entropy(hidden, weight, target))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens, dim, vocab, budget", [(24, 16, 70, None), (400, 64, 3000, "2MiB"), (400, 64, 3000, "640KiB")])
def test_float32_hidden_states_beside_a_16_bit_weight(half, tokens, dim, vocab, budget):
    """Loss and gradient of hidden are exact to fp32. That of weight is rounded to its dtype."""
    if budget is not None and oracle.DEVICE != "cpu":
        budget = "8MiB"  # which cuBLAS and a strip of logits take most of
    hidden, weight, target, bias = problem(1, (tokens,), dim, vocab, torch.float32, bias=True)
    weight = weight.detach().to(half).requires_grad_()
    x, w, b = oracle.leaves(hidden, weight, bias)
    limits = oracle.GRADIENT[torch.float32], oracle.GRADIENT[half], oracle.GRADIENT[torch.float32]

    def check(found, wanted):
        assert torch.allclose(found.double(), wanted, rtol=2e-6, atol=1e-6)
        made = torch.autograd.grad(found.sum(), (hidden, weight, bias))
        assert [g.dtype for g in made] == [torch.float32, half, torch.float32]
        for f, e, limit in zip(made, torch.autograd.grad(wanted.sum(), (x, w, b)), limits):
            assert oracle.error(f, e) <= limit

    for reduction in ("mean", "none"):
        given = dict(reduction=reduction, label_smoothing=0.1)
        check(linear_cross_entropy(hidden, weight, target, bias, memory_budget=budget, **given), oracle.loss(x, w, target, b, **given))
    found, wanted = linear_logprobs(hidden, weight, target, bias, memory_budget=budget), oracle.logprobs(x, w, target, b)
    check(torch.stack(found), torch.stack(wanted))
    compiled = torch.compile(linear_cross_entropy, backend="eager", fullgraph=True)
    check(compiled(hidden, weight, target, bias), oracle.loss(x, w, target, b))


def test_blocks_of_a_16_bit_weight():
    """No fp32 copy of the weight exists, and calls that take one dtype refuse it by name."""
    hidden, weight, target, _ = problem(1, (256,), 256, 20_000, torch.float32)
    weight = weight.detach().bfloat16()
    for budget in (None, "8MiB") if oracle.DEVICE == "cpu" else ():  # PyTorch's allocator has cuBLAS's workspace, too
        peak, _ = peak_of(lambda: linear_cross_entropy(hidden, weight, target, memory_budget=budget).backward(), device="cpu")
        assert peak < (18 << 20 if budget is None else 9 << 20) < weight.numel() * 4
    with pytest.raises(NotImplementedError, match="sharding: expected hidden and weight of one dtype, or a float32 weight"):
        _engine.run(_engine.HEAD, HeadOptions(), VocabShard("group"), dict(hidden=hidden, weight=weight))
    if oracle.DEVICE != "cpu" and backend(hidden).name == "native":  # exponentials are saved beside them, too
        weight.requires_grad_()
        made = [linear_logprobs(hidden, weight, target, keep=keep, memory_budget="64MiB")[0].sum() for keep in (True, False)]
        for kept, plain in zip(*(torch.autograd.grad(total, (hidden, weight)) for total in made)):
            assert kept.dtype == plain.dtype and oracle.error(kept, plain.double()) <= oracle.GRADIENT[kept.dtype]
    if backend(hidden).name == "native":  # others compute the full softmax
        with pytest.raises(TypeError, match="weight: expected torch.float32, .*got torch.bfloat16"):
            FarFieldHead(1e-3)(hidden, weight, target)


def test_a_call_is_remembered_only_for_its_own_kind():
    hidden, weight, target, bias = pair()
    for _ in range(2):
        for args, kwargs in [
            ((hidden, weight, target), {}),
            ((hidden, weight, target, bias), {}),
            ((hidden, weight, target), dict(label_smoothing=0.1)),
            ((hidden.detach(), weight, target), {}),
            ((hidden[::2], weight, target[::2]), {}),
            ((hidden, weight, target.to(torch.int32)), {}),
        ]:
            assert abs(linear_cross_entropy(*args, **kwargs) - oracle.loss(*args[:2], args[2].long(), *args[3:], **kwargs)) < 1e-5


def each(*inputs, **options):
    return linear_cross_entropy(*inputs, reduction="none", **options).sum()


def outputs(*inputs, **options):
    return sum(output.sum() for output in linear_logprobs(*inputs, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [each, outputs, torch.compile(each, backend="eager")])
def test_a_forward_refuses_a_budget_below_its_backward(function, dtype):
    inputs = problem(1, (256,), 64, 5000, dtype, bias=True)
    with pytest.raises(ValueError, match="memory_budget: .* which needs .* bytes") as refused:
        function(*inputs, memory_budget=1)
    least = int(re.findall(r"(\d+) bytes", str(refused.value))[-1])
    with torch.no_grad():
        function(*inputs, memory_budget=least - 1)  # seen before, without a backward
    with pytest.raises(ValueError, match=f"memory_budget: .* which needs .*{least} bytes"):
        function(*inputs, memory_budget=least - 1)
    function(*inputs, memory_budget=least).backward()
    assert all(t.grad.isfinite().all() for t in inputs if t.requires_grad)
