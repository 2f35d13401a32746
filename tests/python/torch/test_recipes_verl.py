"""docs/use/recipes/verl.md: the function behind verl's fused kernels, and its own forward around it."""

import sys
import types

import pytest
import torch
from logitless.torch.integrations import verl as recipe
from recipes.models import VOCAB, snippet, tiny_llama


def formula(hidden, weight, vocab_ids, temperature):
    log_p = (hidden @ weight.T / temperature).log_softmax(-1)
    return log_p.gather(-1, vocab_ids[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def problem(dtype=torch.float32):
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 9, 16, dtype=dtype), torch.randn(50, 16, dtype=dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, 50, (2, 9))


def check(fused):
    hidden, weight, vocab_ids = problem()
    gradients = []
    for found in (fused(hidden, weight, vocab_ids, 0.7), formula(hidden.double(), weight.double(), vocab_ids, 0.7)):
        gradients.append(torch.autograd.grad(found[0].sin().sum() + found[1].cos().sum(), (hidden, weight)))
    for got, want in zip(*gradients):
        assert (got - want).norm() < 1e-5 * want.norm()
    for got, want in zip(fused(hidden, weight, vocab_ids, 0.7), formula(hidden.double(), weight.double(), vocab_ids, 0.7)):
        assert got.dtype == torch.float32 and got.shape == (2, 9) and torch.allclose(got.double(), want, atol=2e-5)


def test_fused_linear():
    fused = recipe.FusedLinearForPPO(impl_backend="liger")
    check(fused)
    hidden, weight, vocab_ids = problem()
    assert torch.equal(fused(hidden, weight, vocab_ids, torch.tensor([0.7]))[0], fused(hidden, weight, vocab_ids, 0.7)[0])
    each = torch.rand(2, 9) + 0.5
    found, want = fused(hidden, weight, vocab_ids, each), formula(hidden.double(), weight.double(), vocab_ids, each[..., None])
    assert all(torch.allclose(a.double(), b, atol=2e-5) for a, b in zip(found, want))
    assert torch.equal(fused(hidden, weight, vocab_ids, each[..., None])[0], found[0])
    with pytest.raises(ValueError, match=r"temperature: expected \[2, 9\] or \[\], got \[2\]"):
        fused(hidden, weight, vocab_ids, torch.ones(2))
    with pytest.raises(ValueError, match="impl_backend: expected 'torch' or 'liger', got 'triton'"):
        recipe.FusedLinearForPPO(impl_backend="triton")


@pytest.fixture
def functional():
    found = pytest.importorskip("verl.utils.experimental.torch_functional", exc_type=ImportError)
    yield found
    recipe.unpatch()


def test_patch(functional, monkeypatch):
    own = functional.FusedLinearForPPO
    check(own())
    with pytest.raises(ValueError, match="memory_budget"):
        recipe.patch(memory_budget=0)
    assert recipe.patch(memory_budget="64KiB") is recipe.patch() is functional.FusedLinearForPPO
    recipe.unpatch()
    assert functional.FusedLinearForPPO is own
    snippet("verl.md")
    assert functional.FusedLinearForPPO is recipe.FusedLinearForPPO
    recipe.unpatch()
    monkeypatch.setattr(functional, "FusedLinearForPPO", torch.nn.Linear)
    with pytest.raises(NotImplementedError, match=r"of verl 0.9, with arguments \['input'\]"):
        recipe.patch()


def test_fused_kernel():
    def fused(hidden, weight, vocab_ids, temperature):
        return [x.view(2, 9) for x in recipe.linear_cross_entropy(hidden, weight, vocab_ids, temperature)]

    check(fused)
    hidden, weight, vocab_ids = problem()
    assert all(x.shape == (18,) for x in recipe.linear_cross_entropy(hidden, weight, vocab_ids, 1.0, "none", None))
    with pytest.raises(ValueError, match="reduction: expected 'none', got 'sum'"):
        recipe.linear_cross_entropy(hidden, weight, vocab_ids, 1.0, "sum")


def test_megatron_engine(functional, monkeypatch):
    """The function that verl's Megatron engine calls on hidden states (with tensor parallelism: megatron_worker.py)."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # Megatron asks for it where it is imported
    fused = pytest.importorskip("verl.models.mcore.model_forward_fused", exc_type=ImportError)
    kernel = sys.modules["verl.utils.kernel.linear_cross_entropy"]
    own = kernel.linear_cross_entropy
    recipe.patch()
    assert fused.linear_cross_entropy is kernel.linear_cross_entropy is recipe.linear_cross_entropy
    monkeypatch.setattr(fused.parallel_state, "get_tensor_model_parallel_group", lambda: None)
    hidden, weight, vocab_ids = problem()
    found = fused.fused_output_processor(
        hidden_states=hidden, output_layer=types.SimpleNamespace(weight=weight), output_weight=None, labels=vocab_ids,
        context=fused.FusedOutputProcessorContext(temperature=0.7), config=types.SimpleNamespace(sequence_parallel=False),
    )
    for got, want in zip((found.log_probs, found.entropy), formula(hidden.double(), weight.double(), vocab_ids, 0.7)):
        assert torch.allclose(got.double(), want.flatten(), atol=2e-5)
    recipe.unpatch()
    assert fused.linear_cross_entropy is kernel.linear_cross_entropy is own


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_forward_of_a_model(functional, backend):
    """verl's own forward for text models, installed by its monkey patch."""
    dense = pytest.importorskip("verl.models.transformers.dense_common", exc_type=ImportError)
    ids = torch.randint(3, VOCAB, (2, 12))

    def step(model, backend):
        model.forward = types.MethodType(getattr(dense, f"forward_with_{backend}_backend"), model)
        found = model(input_ids=ids, return_dict=True, temperature=0.9)
        (found.log_probs.sum() - found.entropy.sum()).backward()
        return found, [p.grad for p in model.parameters()]

    own, expected = step(tiny_llama(), "torch")  # Triton's kernels do not run here
    recipe.patch()
    served = recipe.FusedLinearForPPO if backend == "torch" else recipe.linear_cross_entropy
    before = served.calls
    ours, gradients = step(tiny_llama(), backend)
    assert served.calls == before + 1
    for got, want in ((ours.log_probs, own.log_probs), (ours.entropy, own.entropy)):
        assert torch.allclose(got.view(want.shape), want, atol=1e-5)
    for got, want in zip(gradients, expected):
        assert (got - want).norm() <= 2e-5 * want.norm()
