"""Calls written for the linear_cross_entropy of PyTorch or of cut_cross_entropy, with only the import changed."""

import enum
import inspect
import re
from types import SimpleNamespace

import oracle
import pytest
import torch
import torch.nn.functional as F
from logitless.torch import linear_cross_entropy, linear_logprobs
from logitless.torch import cce
from test_loss import problem

# The defaults of cut_cross_entropy 25.6.4, in its order.
CCE_DEFAULTS = dict(
    bias=None, ignore_index=-100, softcap=None, reduction="mean", shift=0, return_lse=False, filter_eps="auto",
    accum_e_fp32=False, accum_c_fp32=False, filter_e_grad=True, filter_c_grad=True, impl="cce",
    vocab_parallel_options=None,
)


class Impl(enum.IntEnum):  # a copy of its LinearCrossEntropyImpl
    CCE = 1
    TORCH_COMPILE = 2
    CCE_KAHAN_FULL_C = 3
    CCE_EXACT = 5


def of_cce():
    hidden, weight, target, bias = problem(2, (3, 12), 16, 70, torch.float32, bias=True)
    return hidden, weight, target, bias


def test_its_own_defaults_written_out():
    hidden, weight, target, _ = of_cce()
    plain = linear_cross_entropy(hidden, weight, target)
    assert torch.equal(linear_cross_entropy(hidden, weight, target, **CCE_DEFAULTS), plain)
    assert torch.equal(linear_cross_entropy(e=hidden, c=weight, targets=target, **CCE_DEFAULTS), plain)
    # All by position, from none to all of them.
    values = list(CCE_DEFAULTS.values())
    for n in range(len(values) + 1):
        assert torch.equal(linear_cross_entropy(hidden, weight, target, *values[:n]), plain), n


def test_positions_mean_what_they_mean_there():
    hidden, weight, target, bias = of_cce()
    target = torch.where(target < 0, 3, target)
    given = (bias, 3, 5.0, "none", 2, True, 1e-4, True, True, False, True, "cce_kahan_full_c", None)
    loss, lse = linear_cross_entropy(hidden, weight, target, *given)
    wanted, wanted_lse = linear_cross_entropy(
        hidden[:, :-2], weight, target[:, 2:], bias, ignore_index=3, softcap=5.0, reduction="none", return_lse=True
    )
    assert loss.shape == (3, 10) and torch.equal(loss, wanted) and torch.equal(lse, wanted_lse)
    with pytest.raises(TypeError, match="expected at most 16 positional arguments, got 17"):
        linear_cross_entropy(hidden, weight, target, *CCE_DEFAULTS.values(), 1)
    with pytest.raises(TypeError, match="'softcap' is given twice"):
        linear_cross_entropy(hidden, weight, target, bias, -100, 5.0, softcap=5.0)


@pytest.mark.parametrize(
    "name, values",
    [
        ("filter_eps", [None, "auto", 0.0, 1e-5, 1]),
        ("impl", ["cce", "cce_exact", "cce_kahan_full_c", "torch_compile", *Impl]),
        ("accum_e_fp32", [False, True]),
        ("filter_c_grad", [False, True]),
    ],
)
def test_leave_to_approximate_is_met_by_exact_gradients(name, values):
    hidden, weight, target, _ = of_cce()
    x, w = oracle.leaves(hidden, weight)
    wanted = torch.autograd.grad(oracle.loss(x, w, target), (x, w))
    for value in values:
        loss = linear_cross_entropy(hidden, weight, target, **{name: value})
        for a, e in zip(torch.autograd.grad(loss, (hidden, weight)), wanted):
            assert oracle.error(a, e) <= 1e-5


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("filter_eps", "some", "None, 'auto' or a number"),
        ("filter_eps", float("nan"), "None, 'auto' or a number"),
        ("filter_e_grad", "yes", "True or False"),
        ("accum_c_fp32", 2, "True or False"),
        ("impl", "fastest", "one of cce, cce_exact"),
        ("vocab_parallel_options", SimpleNamespace(start=0, stop=3, group=None, reduce_e_grad=False), "reduce_e_grad"),
    ],
)
def test_what_it_asks_that_is_not_done_is_named(name, value, expected):
    hidden, weight, target, _ = of_cce()
    with pytest.raises(NotImplementedError, match=f"{name}=.* is not supported; expected {expected}"):
        linear_cross_entropy(hidden, weight, target, **{name: value})


def test_its_module():
    hidden, weight, target, bias = of_cce()
    assert cce.linear_cross_entropy is linear_cross_entropy
    module = {k: v for k, v in CCE_DEFAULTS.items() if k not in ("bias", "vocab_parallel_options")}
    order = [name for name in module if name != "return_lse"] + ["return_lse"]
    assert list(inspect.signature(cce.LinearCrossEntropy).parameters) == order
    wanted = linear_cross_entropy(hidden, weight, target, bias, softcap=5.0, shift=1)
    assert torch.equal(cce.LinearCrossEntropy(-100, 5.0, shift=1)(hidden, weight, target, bias), wanted)
    plain = linear_cross_entropy(hidden, weight, target)
    assert torch.equal(cce.LinearCrossEntropy(**module)(hidden, weight, target), plain)


@pytest.mark.parametrize("shift, error, text", [
    (12, ValueError, "shift: expected 0 to 11 for 12 tokens, got 12"),
    (-1, ValueError, "shift: expected 0 to 11 for 12 tokens, got -1"),
    (1.5, TypeError, "shift: expected an int, True or False, got 1.5"),
])
def test_a_shift_that_leaves_nothing_is_refused(shift, error, text):
    hidden, weight, target, _ = of_cce()
    with pytest.raises(error, match=text):
        linear_cross_entropy(hidden, weight, target, shift=shift)


# --- PyTorch's own call

needs_torch_call = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this PyTorch has no such call")


@needs_torch_call
@pytest.mark.parametrize("places", [(3,), (1,), (2, 3)])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    "more", [{}, dict(weight=1, label_smoothing=0.1), dict(ignore_index=3), dict(probabilities=1, weight=1)]
)
def test_a_weight_of_more_dimensions(places, reduction, more):
    g = oracle.generator(3)
    hidden = torch.randn(10, 16, generator=g).requires_grad_()
    weight = torch.randn(20, *places, 16, generator=g).requires_grad_()
    bias = torch.randn(20, *places, generator=g).requires_grad_()
    options = dict(more, reduction=reduction)
    if options.pop("probabilities", None):
        target = torch.softmax(torch.randn(10, 20, *places, generator=g), 1)
    else:
        target = torch.randint(0, 20, (10, *places), generator=g)
        target.view(-1)[::4] = options.get("ignore_index", -100)
    if "weight" in options:
        options["weight"] = torch.rand(20, generator=g) + 0.5
    found = linear_cross_entropy(hidden, weight, target, linear_bias=bias, **options)
    exact = oracle.leaves(hidden, weight, bias)
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    soft = target.double() if target.is_floating_point() else target
    wanted = F.linear_cross_entropy(exact[0], exact[1], soft, linear_bias=exact[2], **wide)
    assert found.shape == wanted.shape and torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-6)
    up = torch.randn(found.shape, generator=g)
    ours = torch.autograd.grad(found, (hidden, weight, bias), up)
    for a, e in zip(ours, torch.autograd.grad(wanted, exact, up.double())):
        assert oracle.error(a, e) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_its_gradients_keep_to_the_contract_of_their_dtype(dtype):
    g = oracle.generator(4)
    hidden = torch.randn(40, 16, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(30, 8, 16, generator=g).to(dtype).requires_grad_()
    target = torch.randint(0, 30, (40, 8), generator=g)
    target[::3] = -100
    x, w = oracle.leaves(hidden, weight)
    ours = torch.autograd.grad(linear_cross_entropy(hidden, weight, target), (hidden, weight))
    wanted = F.cross_entropy(torch.einsum("nd,vpd->nvp", x, w), target)
    for a, e in zip(ours, torch.autograd.grad(wanted, (x, w))):
        assert a.dtype == dtype and oracle.error(a, e) <= oracle.GRADIENT[dtype]


def test_its_other_outputs_and_compiled():
    g = oracle.generator(5)
    hidden, weight = torch.randn(10, 16, generator=g), torch.randn(20, 2, 3, 16, generator=g)
    target = torch.randint(0, 20, (10, 2, 3), generator=g)
    z = torch.einsum("nd,vpqd->npqv", hidden, weight)
    loss, lse, argmax, logits = linear_cross_entropy(
        hidden, weight, target, return_lse=True, return_argmax=True, return_target_logits=True
    )
    assert abs(loss - F.cross_entropy(z.reshape(-1, 20), target.reshape(-1))) < 1e-5
    assert torch.allclose(lse, torch.logsumexp(z, -1), rtol=1e-5) and torch.equal(argmax, z.argmax(-1))
    assert torch.allclose(logits, z.gather(-1, target[..., None])[..., 0], rtol=1e-4, atol=1e-5)
    compiled = torch.compile(lambda *a: linear_cross_entropy(*a), fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(hidden, weight, target), loss)
    assert linear_cross_entropy(hidden, weight, torch.full_like(target, -100)) == 0


@pytest.mark.parametrize(
    "change, error, text",
    [
        (dict(hidden=torch.ones(2, 5, 16)), ValueError, "hidden: expected [N, 16] beside weight [20, 3, 16], got [2"),
        (dict(hidden=torch.ones(9, 15)), ValueError, "weight: expected [V, d_1, ..., d_K, 15], no d 0, got [20, 3,"),
        (dict(target=torch.zeros(10, 4).long()), ValueError, "target: expected [10, 3] beside weight [20, 3, 16], got"),
        (dict(target=torch.zeros(10, 3, 20)), ValueError, "target: expected [10, 20, 3] beside weight [20, 3, 16]"),
        (dict(bias=torch.zeros(20)), ValueError, "bias: expected [20, 3], got [20]"),
        (dict(token_weight=torch.ones(10, 3)), NotImplementedError, "token_weight: does not go with a weight of 3 dim"),
        (dict(accuracy=True), NotImplementedError, "accuracy: does not go with a weight of 3 dimensions"),
    ],
)
def test_what_it_refuses_is_named(change, error, text):
    given = dict(hidden=torch.ones(10, 16), weight=torch.ones(20, 3, 16), target=torch.zeros(10, 3, dtype=torch.int64))
    with pytest.raises(error, match=re.escape(text)):
        linear_cross_entropy(**{**given, **change})


@needs_torch_call
@pytest.mark.parametrize("ignore_index", [-100, 3])
@pytest.mark.parametrize("places", [(), (2,)])
def test_ignore_index_does_not_go_with_probabilities(ignore_index, places):
    hidden, weight = torch.randn(10, 16), torch.randn(20, *places, 16)
    target = torch.softmax(torch.randn(10, 20, *places), 1)
    with pytest.raises(RuntimeError, match="ignore_index cannot be specified when target contains probabilities"):
        F.linear_cross_entropy(hidden, weight, target, ignore_index=ignore_index)
    with pytest.raises(ValueError, match=f"ignore_index: expected None beside class probabilities, got {ignore_index}"):
        linear_cross_entropy(hidden, weight, target, ignore_index=ignore_index)
    wanted = F.linear_cross_entropy(hidden, weight, target, ignore_index=None)
    assert abs(linear_cross_entropy(hidden, weight, target, ignore_index=None) - wanted) < 1e-5


@pytest.mark.native
@needs_torch_call
def test_a_chunk_size_is_a_hint(monkeypatch):
    from logitless.torch import _engine

    plans = []
    kept = _engine.Call.__init__

    def noted(self, kind, options, groups, budget, *rest):
        kept(self, kind, options, groups, budget, *rest)
        plans.append((budget, self.workspace_bytes))

    monkeypatch.setattr(_engine.Call, "__init__", noted)
    hidden, weight, target, _ = problem(1, (512,), 32, 20000, torch.float32)
    options = torch.nn.LinearCrossEntropyOptions
    wanted = linear_cross_entropy(hidden, weight, target)

    def workspace(**given):
        found = linear_cross_entropy(hidden, weight, target, **given)
        assert abs(found - wanted) <= 1e-6 * wanted
        return plans[-1]

    hinted, large = workspace(options=options(batch_chunk_size=256))
    assert hinted == -256 * 20000 * 4 and large <= -hinted
    hinted, least = workspace(options=options(batch_chunk_size=1))  # less than any plan takes: no error
    assert hinted == -20000 * 4 and -hinted < least < large
    assert workspace(options=options(chunking_method="aspect_ratio:2"))[0] == -512 * 32 * 4 // 2
    # A budget has priority over a hint, and no chunking is no hint.
    assert workspace(options=options(batch_chunk_size=1), memory_budget="64MiB")[0] == 64 << 20
    made = len(plans)
    workspace(options=options(chunking_method=None))
    assert plans[0][0] == 0 and len(plans) == made  # the plan of the call without options


@needs_torch_call
def test_policies_of_its_sums_are_met():
    hidden, weight, target, _ = problem(1, (24,), 16, 70, torch.bfloat16)
    options = torch.nn.LinearCrossEntropyOptions
    plain = linear_cross_entropy(hidden, weight, target)
    for policy in ("auto", "accurate", "balanced", "compact"):
        for dtype in (None, torch.float32, torch.bfloat16):
            given = options(acc_policy=policy, acc_dtype=dtype, allow_retain_graph=True)
            assert torch.equal(linear_cross_entropy(hidden, weight, target, options=given), plain)
    with pytest.raises(NotImplementedError, match="options.acc_dtype=torch.float64 is not supported; sums are float32"):
        linear_cross_entropy(hidden, weight, target, options=options(acc_dtype=torch.float64))
    with pytest.raises(TypeError, match="options: expected torch.nn.LinearCrossEntropyOptions or None, got dict"):
        linear_cross_entropy(hidden, weight, target, options={})


# --- Arguments that are no tensors

GIVEN = dict(
    hidden=torch.ones(3, 4), weight=torch.ones(5, 4), target=torch.zeros(3, dtype=torch.int64), bias=torch.ones(5),
    class_weight=torch.ones(5), token_weight=torch.ones(3),
)


@pytest.mark.parametrize("name", [*GIVEN, "target_weight"])
def test_a_list_is_named(name):
    kept = {**GIVEN, "target_weight": torch.ones(3, 1)}
    with pytest.raises(TypeError, match=f"^{name}: expected a tensor, got list$"):
        linear_cross_entropy(**{**GIVEN, name: kept[name].tolist()})
    shared = {n: GIVEN[n] for n in ("hidden", "weight", "target", "bias")}
    if name in shared:
        with pytest.raises(TypeError, match=f"^{name}: expected a tensor, got list$"):
            linear_logprobs(**{**shared, name: GIVEN[name].tolist()})
