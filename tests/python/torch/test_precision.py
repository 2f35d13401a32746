"""The precision of products of float32 tensors: given, or PyTorch's."""

import os

import pytest
import torch
from logitless.torch import LinearCrossEntropy, _precision, linear_cross_entropy, linear_logprobs
from test_loss import problem
from torch._subclasses import FakeTensorMode

DEVICE = os.environ.get("LOGITLESS_TEST_DEVICE", "cpu")
on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="of a machine without a GPU")


def arrays(dtype=torch.float32):
    hidden, weight, target, _ = problem(1, (24,), 16, 70, dtype, bias=False)
    return hidden, weight, target


@on_cpu
@pytest.mark.parametrize("precision", ["tf32", "bf16x3"])
def test_a_cpu_refuses_tensor_cores(precision):
    hidden, weight, target = arrays()
    for call in (linear_cross_entropy, linear_logprobs):
        with pytest.raises(ValueError, match=f"precision: {precision} is "):
            call(hidden, weight, target, precision=precision)


def test_refusals_name_the_precision():
    hidden, weight, target = arrays()
    for value in ("fp32", "TF32", 1, True):
        with pytest.raises(ValueError, match="precision: expected 'ieee', 'tf32', 'bf16x3' or None, got "):
            linear_cross_entropy(hidden, weight, target, precision=value)
    with pytest.raises(ValueError, match="precision: expected 'ieee', 'tf32', 'bf16x3' or None, got 'fast'"):
        LinearCrossEntropy(8, 9, precision="fast")
    hidden, weight, target = arrays(torch.bfloat16)
    with pytest.raises(ValueError, match="precision: tf32 rounds f32 tensors, hidden and weight are bf16"):
        linear_cross_entropy(hidden, weight, target, precision="tf32")
    with pytest.raises(ValueError, match="precision: 'tf32' rounds float32 tensors, hidden is float64"):
        linear_cross_entropy(hidden.double(), weight.double(), target, precision="tf32")


def test_ieee_is_the_default_of_every_dtype():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        hidden, weight, target = arrays(dtype)
        for _ in range(2):  # the second call is cached
            found = linear_cross_entropy(hidden, weight, target, precision="ieee")
            assert torch.equal(found, linear_cross_entropy(hidden, weight, target))
        compiled = torch.compile(lambda *a: linear_cross_entropy(*a, precision="ieee"), backend="eager", fullgraph=True)
        assert torch.equal(compiled(hidden, weight, target), found)


@pytest.fixture
def settings():
    """Restores PyTorch's setting."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    yield matmul
    if hasattr(matmul, "fp32_precision"):
        torch.backends.fp32_precision = matmul.fp32_precision = "none"
    matmul.allow_tf32 = before


def test_none_is_pytorchs(monkeypatch, settings):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with FakeTensorMode(allow_non_fake_inputs=True):
        hidden = torch.empty(2, 3, device="cuda:0")

    def of(given, hidden, weight=None):
        return _precision.precision_of(given, hidden, weight)

    for allowed in (True, False):
        settings.allow_tf32 = allowed
        assert of(None, hidden) == ("tf32" if allowed else "ieee")
        assert of("ieee", hidden) == "ieee" and of("tf32", hidden) == "tf32"
        assert of(None, torch.empty(2, 3, device="cpu")) == "ieee" and of(None, None) == "ieee"
        with FakeTensorMode():
            narrow = torch.empty(2, 3, device="cuda:0", dtype=torch.bfloat16)
            assert of(None, narrow) == of(None, narrow, narrow) == "ieee"
            assert of(None, narrow, hidden) == ("tf32" if allowed else "ieee")
    settings.allow_tf32 = True
    with monkeypatch.context() as autocast:  # which needs a GPU
        autocast.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
        autocast.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
        assert of(None, hidden) == "ieee"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert of(None, hidden) == "ieee"


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="PyTorch before 2.9")
def test_the_newer_settings_count(monkeypatch, settings):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    settings.fp32_precision = "none"
    torch.backends.fp32_precision = "tf32"
    assert _precision.torch_has_tf32(0)
    torch.backends.fp32_precision = "ieee"
    assert not _precision.torch_has_tf32(0)
    settings.fp32_precision = "tf32"
    assert _precision.torch_has_tf32(0)


# A compiled call takes the setting as a constant, and PyTorch compiles again when it changes.
def test_a_compiled_call_follows_the_setting(monkeypatch, settings):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    compiled = torch.compile(lambda x: x * 2 if _precision.torch_has_tf32(0) else x * 3, backend="eager", fullgraph=True)
    for allowed in (False, True, False):
        settings.allow_tf32 = allowed
        assert compiled(torch.ones(1)).item() == (2 if allowed else 3)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_values_on_a_gpu(settings):
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("a GPU without TF32")
    torch.manual_seed(0)
    hidden = torch.randn(300, 256, requires_grad=True)
    weight = (torch.randn(5001, 256) / 16).requires_grad_()
    target = torch.randint(5001, (300,))
    exact = torch.autograd.grad(
        torch.nn.functional.cross_entropy(hidden.double() @ weight.double().T, target), (hidden, weight)
    )

    def errors(**options):
        found = torch.autograd.grad(linear_cross_entropy(hidden, weight, target, **options), (hidden, weight))
        return [((a - b).norm() / b.norm()).item() for a, b in zip(found, exact)]

    settings.allow_tf32 = True
    for _ in range(2):  # the second call is cached
        assert all(5e-6 < e < 4e-3 for e in errors()) and all(5e-6 < e < 4e-3 for e in errors(precision="tf32"))
        assert all(e < 3e-6 for e in errors(precision="ieee"))
    settings.allow_tf32 = False
    assert all(e < 3e-6 for e in errors()) and all(5e-6 < e < 4e-3 for e in errors(precision="tf32"))
    assert all(e < 1e-5 for e in errors(precision="bf16x3"))
