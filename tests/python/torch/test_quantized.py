"""Frozen quantised heads: against the dequantised weight in float64, without it and the logits in memory."""

import copy

import oracle
import pytest
import torch
from logitless.torch import (
    FarFieldHead, LazyLogits, QuantizedWeight, _portable, _portable_head, _portable_products, lazy_head, linear_cross_entropy,
    linear_logprobs, unpatch,
)
from logitless.torch._peak import peak_of
from logitless.torch.ranks import Sharding
from test_lazy import batch, model_of

pytestmark = pytest.mark.skipif(oracle.DEVICE != "cpu", reason="the packages quantise in their own ways on a GPU")
BUDGETS = (None, 160_000)  # logits stored, and recomputed


def _rows_of(vocab, dim):
    return torch.randn(vocab, dim, generator=oracle.generator(2)) * dim**-0.5


def int8(groups):
    def make(vocab, dim):
        w = _rows_of(vocab, dim).view(vocab, groups, -1)
        scale = w.abs().amax(-1) / 127
        return QuantizedWeight((w / scale[..., None]).round().to(torch.int8).view(vocab, dim), scale[:, 0] if groups == 1 else scale)

    return make


def fp8(vocab, dim):
    w = _rows_of(vocab, dim)
    return QuantizedWeight((w * 100).to(torch.float8_e4m3fn), torch.tensor(0.01))


def mxfp8(vocab, dim):
    w = _rows_of(vocab, dim).view(vocab, -1, 32)
    scale = torch.exp2((w.abs().amax(-1) / 448).log2().ceil())
    data = (w / scale[..., None]).to(torch.float8_e4m3fn).view(vocab, dim)
    return QuantizedWeight(data, scale.to(torch.float8_e8m0fnu))


def torchao(name):
    def make(vocab, dim):
        quantization = pytest.importorskip("torchao.quantization")
        layer = torch.nn.Linear(dim, vocab, bias=False)
        layer.weight.data = _rows_of(vocab, dim)
        quantization.quantize_(layer, getattr(quantization, name)())
        return layer.weight

    return make


def nf4(nested):
    def make(vocab, dim):
        nn = pytest.importorskip("bitsandbytes").nn
        return nn.Params4bit(_rows_of(vocab, dim), quant_type="nf4", compress_statistics=nested, requires_grad=False).to("cpu")

    return make


def bnb_int8(vocab, dim):
    nn = pytest.importorskip("bitsandbytes").nn
    return nn.Int8Params(_rows_of(vocab, dim).half(), requires_grad=False, has_fp16_weights=False).to("cpu")


def dequantized(weight):
    """Returns the weight by its package's own function."""
    if hasattr(weight, "quant_state"):
        state = copy.copy(weight.quant_state)  # 0.50 is wrong on a CPU for rows of a matrix that are not whole blocks
        shape, state.shape = state.shape, torch.Size((state.shape.numel(),))
        return pytest.importorskip("bitsandbytes").functional.dequantize_4bit(weight.data, state).float().view(shape)
    if hasattr(weight, "SCB"):
        return weight.data.float() * (weight.SCB / 127)[:, None]
    return weight.dequantize(torch.float32) if isinstance(weight, QuantizedWeight) else weight.dequantize().float()


SOURCES = {
    "int8 rows": int8(1), "int8 groups": int8(4), "fp8": fp8, "mxfp8": mxfp8, "torchao int8": torchao("Int8WeightOnlyConfig"),
    "torchao fp8": torchao("Float8WeightOnlyConfig"), "nf4": nf4(False), "nf4 nested": nf4(True), "bitsandbytes int8": bnb_int8,
}


@pytest.fixture
def wide_products(monkeypatch):
    """Emulates a device that multiplies 16-bit matrices with results in fp32."""
    monkeypatch.setenv("LOGITLESS_BACKEND", "portable")
    monkeypatch.setattr(_portable_head, "has_wide_products", lambda device, dtype: True)
    for module in (_portable_head, _portable_products):
        monkeypatch.setattr(module, "wide_product", lambda a, b: (a.double() @ b.double()).float())


def operands(dtype, dim, vocab):
    g = oracle.generator(3)
    hidden = torch.randn(70, dim, generator=g).to(dtype).requires_grad_()
    bias = torch.randn(vocab, generator=g).to(dtype).requires_grad_()
    target = torch.randint(vocab, (70,), generator=g)
    target[::5] = -100
    return hidden, target, bias


def check(weight, dtype, budgets=BUDGETS, dim=96, vocab=500):
    """Compares losses and log-probabilities, with the gradients of hidden and bias."""
    hidden, target, bias = operands(dtype, dim, vocab)
    w = dequantized(weight).to(dtype).double()
    x, b = oracle.leaves(hidden, bias)
    options = dict(label_smoothing=0.1, softcap=6.0)
    for budget in budgets:
        for reduction in ("mean", "none"):
            found = linear_cross_entropy(hidden, weight, target, bias, reduction=reduction, memory_budget=budget, **options)
            wanted = oracle.loss(x, w, target, b, reduction=reduction, **options)
            assert (found - wanted).abs().max() < 2e-5
            ours = torch.autograd.grad(found.sum(), (hidden, bias))
            for a, e in zip(ours, torch.autograd.grad(wanted.sum(), (x, b))):
                assert oracle.error(a, e) <= oracle.GRADIENT[dtype]
        found = linear_logprobs(hidden, weight, target, bias, memory_budget=budget)
        wanted = oracle.logprobs(x, w, target, b)
        for one, exact in zip(found, wanted):
            assert (one - exact).abs().max() < 2e-5
        ours = torch.autograd.grad(found[0].sum() + found[2].sum(), (hidden, bias))
        for a, e in zip(ours, torch.autograd.grad(wanted[0].sum() + wanted[2].sum(), (x, b))):
            assert oracle.error(a, e) <= oracle.GRADIENT[dtype]


@pytest.mark.parametrize("name", SOURCES)
def test_against_the_dequantised_weight(name):
    weight = SOURCES[name](500, 96)
    check(weight, torch.float32, BUDGETS[:1])
    check(weight, torch.bfloat16, BUDGETS[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["int8 groups", "fp8"])
def test_blocks_of_the_weight_by_default(monkeypatch, name, dtype):
    monkeypatch.setenv("LOGITLESS_BACKEND", "portable")
    check(SOURCES[name](500, 96), dtype, BUDGETS[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_library_takes_a_copy_that_fits(monkeypatch, dtype):
    """The bits are those of the dequantised weight; below the copy's bytes, and its plan's, there are blocks."""
    weight, (hidden, target, _) = mxfp8(3000, 64), operands(dtype, 64, 3000)
    plain, blocks = weight.dequantize(dtype), []
    portable = _portable.run
    monkeypatch.setattr(_portable, "run", lambda *a, **more: (blocks.append(a[0]), portable(*a, **more)))
    for budget in (None, plain.nbytes + (1 << 20)):
        for call in (linear_cross_entropy, linear_logprobs):
            found, wanted = (call(hidden, w, target, memory_budget=budget) for w in (weight, plain))
            found, wanted = ((t,) if isinstance(t, torch.Tensor) else t for t in (found, wanted))
            if call is linear_cross_entropy:
                found, wanted = (t + torch.autograd.grad(t[0], hidden) for t in (found, wanted))
            else:
                found, wanted = (t + torch.autograd.grad(t[0].sum() + t[2].sum(), hidden) for t in (found, wanted))
            assert not blocks
            if budget is None:  # with one, the plans differ
                assert all(torch.equal(a, b) for a, b in zip(found, wanted))
    for budget in (plain.nbytes, plain.nbytes + 100):
        found = linear_cross_entropy(hidden, weight, target, memory_budget=budget)
        assert blocks.pop() == "cross_entropy" and not blocks
        assert (found - linear_cross_entropy(hidden, plain, target)).abs() < 2e-5
    with pytest.raises(ValueError, match="target.*3000.*is outside"):
        linear_cross_entropy(hidden, weight, target.clone().fill_(3000))
    assert not blocks


def test_data_of_any_stride():
    given = mxfp8(300, 64), int8(1)(300, 64)
    data = torch.randint(-127, 128, (64, 300), dtype=torch.int8, generator=oracle.generator(1)).t()
    apart = QuantizedWeight(data, torch.full((300,), 0.01))
    assert torch.equal(apart.dequantize(torch.float32), data.float() * torch.tensor(0.01))
    for weight in (apart, *given):
        check(weight, torch.float32, BUDGETS[:1], dim=64, vocab=300)


def test_products_with_results_in_fp32(wide_products):
    check(int8(4)(500, 96), torch.bfloat16)


def test_a_temperature_for_each_token_and_selected_ids():
    weight, (hidden, target, bias) = int8(1)(500, 96), operands(torch.float32, 96, 500)
    plain, t, ids = weight.dequantize(torch.float32), torch.rand(70) + 0.5, torch.arange(4)
    for ours, theirs in zip(*(
        (linear_cross_entropy(hidden, w, target, bias, temperature=t), *linear_logprobs(hidden, w, target, bias, selected_ids=ids))
        for w in (weight, plain)
    )):
        assert (ours - theirs).abs().max() < 2e-5


def test_blocks_of_4_bits_that_cross_rows():
    check(nf4(True)(500, 40), torch.float32, dim=40)


def test_neither_the_dequantised_weight_nor_the_logits_exist():
    vocab, dim, tokens = 14_000, 384, 512
    data = torch.randint(-127, 128, (vocab, dim), dtype=torch.int8, generator=oracle.generator(1))
    weight = QuantizedWeight(data, torch.full((vocab,), 1e-3))
    hidden = torch.randn(tokens, dim, generator=oracle.generator(2)).requires_grad_()
    target = torch.randint(vocab, (tokens,), generator=oracle.generator(3))
    for budget in (None, "8MiB"):
        peak, _ = peak_of(lambda: linear_cross_entropy(hidden, weight, target, memory_budget=budget).backward(), device="cpu")
        assert peak < (18 << 20 if budget is None else 9 << 20) < min(vocab * dim, tokens * vocab) * 4


# --- lazy_head.


def _bits(dim, vocab):
    bnb = pytest.importorskip("bitsandbytes")
    return bnb.nn.Linear4bit(dim, vocab, bias=False, quant_type="nf4", compute_dtype=torch.float32)


def _torchao(dim, vocab):
    quantization = pytest.importorskip("torchao.quantization")
    layer = torch.nn.Linear(dim, vocab, bias=False)
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    return layer


def _bnb_int8(dim, vocab):
    bnb = pytest.importorskip("bitsandbytes")
    return bnb.nn.Linear8bitLt(dim, vocab, bias=False, has_fp16_weights=False)


def _ours(dim, vocab):
    layer = torch.nn.Linear(dim, vocab, bias=False)
    layer.weight = torch.nn.Parameter(int8(1)(vocab, dim), requires_grad=False)
    return layer


@pytest.mark.parametrize("make", [_ours, _torchao, _bits, _bnb_int8])
def test_a_quantised_head_is_lazy(make):
    pytest.importorskip("transformers")
    model = model_of("llama")
    model.lm_head = layer = make(64, 5000).to("cpu")
    layer.weight.requires_grad_(False)
    plain = type(layer)
    reference = dequantized(layer.weight)
    lazy_head(model)
    out = model(**batch())
    assert isinstance(out.logits, LazyLogits) and out.logits._storage.real is None
    out.loss.backward()
    ours = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert len(ours) > 10 and "lm_head.weight" not in ours
    logits = out.logits.detach().clone() + 0
    unpatch(model)
    assert type(model.lm_head) is plain
    model.zero_grad()
    model.lm_head = torch.nn.Linear(64, 5000, bias=False)
    model.lm_head.weight = torch.nn.Parameter(reference, requires_grad=False)
    exact = model(**batch())
    exact.loss.backward()
    assert abs(out.loss - exact.loss) < 2e-5 and (logits - exact.logits).abs().max() < 1e-4
    for name, p in model.named_parameters():
        if p.grad is not None:
            assert oracle.error(ours[name], p.grad.double()) < 1e-4, name


# --- Refusals.


def test_errors_name_what_does_not_go_with_it():
    weight, (hidden, target, _) = int8(1)(500, 96), operands(torch.float32, 96, 500)
    with pytest.raises(NotImplementedError, match="weight: a quantised head is frozen"):
        linear_cross_entropy(hidden, int8(1)(500, 96).requires_grad_(), target)
    with pytest.raises(ValueError, match="scale: expected a tensor without requires_grad"):
        QuantizedWeight(torch.zeros(500, 96, dtype=torch.int8), torch.ones(500, requires_grad=True))
    with pytest.raises(NotImplementedError, match="weight: a quantised head is whole on each rank"):
        linear_logprobs(hidden, weight, target, sharding=Sharding(None))
    with pytest.raises(NotImplementedError, match="weight: a quantised head is for eager calls"):
        torch.func.grad(lambda x: linear_cross_entropy(x, weight, target))(hidden.detach())
    with pytest.raises(NotImplementedError, match="weight: a quantised head has no far field"):
        FarFieldHead(1e-3)(hidden, weight, target)
    with pytest.raises(NotImplementedError, match="far_field: a quantised head has none"):
        lazy_head(_ours(96, 500), far_field=1e-3)
    with pytest.raises(ValueError, match=r"weight: expected \[V, 96\], got \[500, 64\]"):
        linear_cross_entropy(hidden, int8(1)(500, 64), target)


@pytest.mark.parametrize("data, scale, error", [
    (torch.zeros(4, 8), torch.ones(4), r"data: expected int8, float8_e4m3fn or float8_e5m2, got torch.float32"),
    (torch.zeros(4, dtype=torch.int8), torch.ones(4), r"data: expected \[V, D\], got \[4\]"),
    (torch.zeros(4, 8, dtype=torch.int8), torch.ones(4, 3), r"scale: expected \[\], \[4\] or \[4, G\], G a divisor of 8, got \[4, 3\]"),
    (torch.zeros(4, 8, dtype=torch.int8), torch.ones(4, dtype=torch.int32), "scale: expected floats or float8_e8m0fnu, got torch.int32"),
])
def test_a_description_that_fits_nothing(data, scale, error):
    with pytest.raises((TypeError, ValueError), match=error):
        QuantizedWeight(data, scale)
