"""docs/use/recipes/verl.md: the function behind verl's fused kernels, and its own forward around it."""

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


def test_forward_of_a_model(functional):
    """verl's own forward for text models, installed by its monkey patch."""
    dense = pytest.importorskip("verl.models.transformers.dense_common", exc_type=ImportError)
    ids = torch.randint(3, VOCAB, (2, 12))

    def step(model):
        model.forward = types.MethodType(dense.forward_with_torch_backend, model)
        found = model(input_ids=ids, return_dict=True, temperature=0.9)
        (found.log_probs.sum() - found.entropy.sum()).backward()
        return found, [p.grad for p in model.parameters()]

    own, expected = step(tiny_llama())
    before = recipe.patch().calls
    ours, gradients = step(tiny_llama())
    assert recipe.FusedLinearForPPO.calls == before + 1
    assert torch.allclose(ours.log_probs, own.log_probs, atol=1e-5) and torch.allclose(ours.entropy, own.entropy, atol=1e-5)
    for got, want in zip(gradients, expected):
        assert (got - want).norm() <= 2e-5 * want.norm()
