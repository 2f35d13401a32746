"""Compiled passes of the portable implementation, by Inductor's code for the CPU: against operations one by one, the number
of compilations, and what happens where there is no compiler."""

import os
import shutil
import sysconfig
import threading
import warnings
from pathlib import Path

import oracle
import pytest
import torch
from logitless.torch import _portable_fused, _portable_head, _portable_products, backend, linear_cross_entropy, linear_logprobs
from logitless.torch._peak import peak_of
from test_loss import problem
from test_portable import Peak

pytestmark = [
    pytest.mark.skipif(oracle.DEVICE != "cpu", reason="other tests run on a GPU with LOGITLESS_BACKEND=portable"),
    pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "c++")), reason="Inductor needs a C++ compiler"),
    pytest.mark.skipif(not Path(sysconfig.get_paths()["include"], "Python.h").exists(), reason="and the headers of Python"),
    pytest.mark.filterwarnings("error:logitless"),
]
STORED, RECOMPUTED = None, 150_000  # budgets
_G = oracle.generator(5)
_WEIGHTS = dict(class_weight=torch.rand(500, generator=_G) + 0.5, token_weight=torch.rand(90, generator=_G))
OPTIONS = {
    "plain": {},
    "weights": dict(reduction="none", softcap=3.0, logit_scale=0.5, **_WEIGHTS),
    "smoothing": dict(reduction="sum", label_smoothing=0.1, z_loss=0.01, softcap=3.0, logit_scale=0.5, **_WEIGHTS),
}


@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setenv("LOGITLESS_BACKEND", "portable")
    monkeypatch.setenv("LOGITLESS_FUSED_PASSES", "always")
    monkeypatch.setattr(_portable_fused, "_failures", {})


@pytest.fixture
def wide_products(monkeypatch):
    """Emulates a device that multiplies 16-bit matrices with results in fp32."""
    for module in (_portable_head, _portable_products):
        monkeypatch.setattr(module, "has_wide_products", lambda device, dtype: True)
        monkeypatch.setattr(module, "wide_product", lambda a, b: (a.double() @ b.double()).float())


@pytest.fixture
def passes(monkeypatch):
    """The results of attempts to run compiled passes."""
    found, run = [], _portable_fused.run

    def counted(*arguments):
        done, result = run(*arguments)
        found.append(done)
        return done, result

    monkeypatch.setattr(_portable_fused, "run", counted)
    return found


def in_both_ways(monkeypatch, passes, call, inputs, error):
    """Compares results and gradients of a call with those of operations one by one."""
    found = []
    for way in ("never", "always"):
        monkeypatch.setenv("LOGITLESS_FUSED_PASSES", way)
        passes.clear()
        made = call(*inputs)
        made = made if isinstance(made, tuple) else (made,)
        real = [t for t in made if t.dtype.is_floating_point]
        ups = [torch.rand(t.shape, generator=oracle.generator(i)) for i, t in enumerate(real)]
        found.append([*made, *torch.autograd.grad(real, inputs, ups)])
        assert any(passes) == (way == "always")  # not in blocks of few columns
    for a, b in zip(*found):
        if a.dtype.is_floating_point:
            assert oracle.error(b, a) <= error
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize("name, per_token", [("plain", 0), ("smoothing", 0), ("weights", 3)])  # 15 seconds of compilers each
def test_options(name, per_token, monkeypatch, passes):
    *inputs, bias = problem(3, (90,), 24, 500, torch.float32, per_token, bias=True)
    target = inputs.pop()
    for budget in (STORED, RECOMPUTED):
        options = dict(OPTIONS[name], memory_budget=budget, return_argmax=True)
        if per_token:
            options["target_weight"] = torch.rand(90, per_token, generator=oracle.generator(8))
        call = lambda x, w, b: linear_cross_entropy(x, w, target, b, **options)
        in_both_ways(monkeypatch, passes, call, (*inputs, bias), 2e-6)


def test_facts_of_shapes_reach_the_compiler(monkeypatch, tmp_path):
    """Rows that are a multiple of 16 are known to be, and all to be long, which an online softmax needs."""
    from torch._inductor.graph import GraphLowering

    found, codegen = [], GraphLowering.codegen

    def seen(graph):
        columns = max((t.get_size() for t in graph.graph_inputs.values() if hasattr(t, "get_size")), key=len)[1]
        sizes = graph.sizevars
        if columns == 1:  # the targets of the numbers between the passes
            return codegen(graph)
        found.append((sizes.statically_known_multiple_of(columns, 16), sizes.statically_known_geq(columns, 64)))
        return codegen(graph)

    monkeypatch.setattr(GraphLowering, "codegen", seen)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for vocab in (512, 500):
        _portable_fused._compiled.cache_clear()
        hidden, weight, target, _ = problem(3, (90,), 24, vocab, torch.float32)
        with torch.no_grad():
            linear_cross_entropy(hidden, weight, target)
    assert found == [(True, True), (False, True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_operands_of_wide_products(dtype, monkeypatch, passes, wide_products):
    hidden, weight, target, _ = problem(3, (90,), 24, 512, dtype)
    for budget in (STORED, RECOMPUTED):
        call = lambda x, w: linear_cross_entropy(x, w, target, memory_budget=budget)
        in_both_ways(monkeypatch, passes, call, (hidden, weight), 1e-2)


def test_log_probabilities(monkeypatch, passes):
    for per_token, softcap, budget in ((0, None, RECOMPUTED), (2, 4.0, STORED)):
        hidden, weight, target, bias = problem(4, (3, 30), 24, 500, torch.float32, per_token, bias=True)
        call = lambda x, w, b: linear_logprobs(x, w, target, b, softcap=softcap, memory_budget=budget)
        in_both_ways(monkeypatch, passes, call, (hidden, weight, bias), 1e-5)


def test_infinite_and_nan_logits(monkeypatch, passes):
    """A masked vocabulary, a target without probability, +inf and NaN: the same numbers, or NaN, as one by one."""
    found = []
    for way in ("never", "always"):
        monkeypatch.setenv("LOGITLESS_FUSED_PASSES", way)
        hidden, weight, target, bias = problem(3, (90,), 24, 512, torch.float32, bias=True)
        with torch.no_grad():
            bias[::2] = -torch.inf
            hidden[5], hidden[6, 0] = torch.nan, torch.inf
            target[:90:9] = torch.arange(0, 20, 2)
        loss = linear_cross_entropy(hidden, weight, target, bias, reduction="none")
        found.append([loss, *torch.autograd.grad(loss[7:].sum(), (hidden, bias))])
    assert passes and all(passes)
    for a, b in zip(*found):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_two_compilations_serve_all_shapes(passes):
    """One of vocabularies that are multiples of 16, and one of others; again by blocks after the first."""
    torch._dynamo.utils.counters.clear()
    _portable_fused._compiled.cache_clear()
    hidden, weight, target, bias = problem(3, (300,), 24, 1100, torch.float32, bias=True)
    shapes = (90, 496), (200, 1000), (64, 640), (300, 777), (33, 96), (21, 501), (299, 1088)
    for tokens, vocab in shapes:
        for budget in (None, tokens * vocab + 100_000):
            parts = (t.detach().requires_grad_() for t in (hidden[:tokens], weight[:vocab], bias[:vocab]))
            x, w, b = parts
            linear_cross_entropy(x, w, target[:tokens] % vocab, b, memory_budget=budget).backward()
    assert len(passes) >= 50 and all(passes)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 8, torch._dynamo.utils.counters["stats"]


def test_the_same_bits_again(passes):
    hidden, weight, target, _ = problem(3, (90,), 24, 500, torch.float32)
    call = lambda: torch.autograd.grad(linear_cross_entropy(hidden, weight, target), (hidden, weight))
    first = call()
    assert all(torch.equal(a, b) for a, b in zip(first, call()))
    found = []
    thread = threading.Thread(target=lambda: found.extend(call()))
    thread.start()
    thread.join()
    assert passes and all(passes) and all(torch.equal(a, b) for a, b in zip(first, found))


def test_a_budget_is_a_ceiling(passes):
    hidden, weight, target, _ = problem(11, (256,), 32, 4096, torch.float32)
    for options in ({}, dict(softcap=5.0)):  # Inductor keeps a tanh on the CPU, for which the plan has memory
        def call():
            return torch.autograd.grad(linear_cross_entropy(hidden, weight, target, memory_budget=2 << 20, **options), (hidden, weight))

        call()
        passes.clear()
        assert peak_of(call)[0] <= 2 << 20 and passes and all(passes)


def test_where_nothing_is_compiled(monkeypatch, passes):
    """Modes that see operations, inference, torch.compile around the call, and the switch of torch.compile."""
    hidden, weight, target, _ = problem(3, (90,), 24, 500, torch.float32)
    exact = linear_cross_entropy(hidden, weight, target)
    passes.clear()
    with Peak([]):
        linear_cross_entropy(hidden, weight, target).backward()
    assert not passes
    with torch.inference_mode():
        assert torch.equal(linear_cross_entropy(hidden, weight, target), exact)
    traced = torch.compile(lambda x, w: linear_cross_entropy(x, w, target), backend="aot_eager", fullgraph=True)
    assert torch.equal(traced(hidden, weight), exact)
    assert passes and all(passes)
    passes.clear()
    with torch.compiler.set_stance("force_eager"):
        assert torch.allclose(linear_cross_entropy(hidden, weight, target), exact, rtol=1e-6)
    assert passes and not any(passes)


def test_a_failure_to_compile_is_said_once(monkeypatch, passes):
    def fails(*given, **options):
        def compiled(*tensors):
            raise RuntimeError("no compiler\nis here")
        return compiled

    monkeypatch.setattr(torch, "compile", fails)
    _portable_fused._compiled.cache_clear()
    hidden, weight, target, _ = problem(3, (90,), 24, 500, torch.float32)
    try:
        with pytest.warns(UserWarning, match=r"torch.compile failed \(RuntimeError: no compiler is here\).* LOGITLESS_FUSED_PASSES=never"):
            first = linear_cross_entropy(hidden, weight, target)
    finally:
        _portable_fused._compiled.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(linear_cross_entropy(hidden, weight, target), first)
    assert passes and not any(passes) and "no compiler is here" in _portable_fused.why_not(hidden.device)


def test_the_choice(monkeypatch):
    tensor = torch.zeros(2, 2)
    assert backend(tensor).reason == "LOGITLESS_BACKEND=portable; torch.compile fuses its passes over the logits of large heads"
    monkeypatch.setenv("LOGITLESS_FUSED_PASSES", "sometimes")
    with pytest.raises(ValueError, match="LOGITLESS_FUSED_PASSES: expected never or always, got 'sometimes'"):
        linear_cross_entropy(tensor, tensor, torch.tensor([0, 1]))
    monkeypatch.delenv("LOGITLESS_FUSED_PASSES")
    assert _portable_fused.why_not(tensor.device) == "they are compiled for cuda and xpu, the device is cpu"
    assert backend(tensor).reason == "LOGITLESS_BACKEND=portable"
    monkeypatch.setattr(_portable_fused.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for capability, reason in (((6, 1), "Triton needs compute capability 7.0, the device has 6.1"), ((7, 0), "")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        _portable_fused._why_no_code.cache_clear()
        assert _portable_fused.why_not(torch.device("cuda", 0)) == reason
    assert _portable_fused.why_not(torch.device("cuda", 0), logits=1000) == "there are few logits"
    _portable_fused._why_no_code.cache_clear()
