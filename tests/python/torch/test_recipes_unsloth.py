"""docs/use/recipes/unsloth.md: the fused loss of unsloth_zoo beside the library's, as unsloth's models call it."""

import os

import pytest
import torch
from expecting import expected_shares
from logitless.torch import _engine
from logitless.torch.integrations import unsloth as recipe
from recipes.models import snippet

VOCAB = 50
CASES = {
    "mean": {}, "items": dict(n_items=torch.tensor(9)), "number": dict(n_items=7), "shifted": dict(shift_labels=False),
    "gemma": dict(logit_softcapping=2.0, logit_scale_multiply=0.5), "granite": dict(logit_scale_divide=4.0, label_smoothing=0.1),
    "bias": dict(with_bias=True), "masked": dict(with_mask=True), "compiled": dict(logit_scale_multiply=0, logit_softcapping=0, target_gb=None),
}


def step(loss, with_bias=False, with_mask=False, **more):
    """Returns a loss and its gradients."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 9, 16, requires_grad=True), torch.randn(VOCAB, 16, requires_grad=True)
    bias = torch.randn(VOCAB, requires_grad=True) if with_bias else None
    labels = torch.randint(0, VOCAB, (2, 9))
    labels[0, :4] = -100
    mask = (torch.arange(9) < 7).expand(2, 9).long() if with_mask else None
    found = loss(None, hidden, weight, bias, labels, mask=mask, **more)
    found.backward()
    return [found.detach(), hidden.grad, weight.grad, *([bias.grad] if with_bias else [])]


def agree(found, expected):
    for got, want in zip(found, expected, strict=True):
        assert (got - want).norm() <= 2e-5 * want.norm()


def test_formula(monkeypatch):
    def formula(trainer, hidden, weight, bias, labels, mask):
        return torch.nn.functional.cross_entropy((hidden @ weight.T)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    agree(step(recipe.unsloth_fused_ce_loss), step(formula))
    seen = expected_shares(monkeypatch, _engine)
    monkeypatch.setattr(recipe, "_options", dict(expected_ignored=0.3125))  # of patch
    agree(step(recipe.unsloth_fused_ce_loss), step(formula))
    assert seen == [0.3125]
    labels = torch.full((1, 4), -100)
    assert recipe.unsloth_fused_ce_loss(None, torch.randn(1, 4, 16), torch.randn(VOCAB, 16), None, labels) == 0


@pytest.fixture
def zoo(monkeypatch):
    for name in ("UNSLOTH_ALLOW_CPU", "UNSLOTH_IS_PRESENT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("UNSLOTH_COMPILE_DISABLE", os.environ.get("UNSLOTH_COMPILE_DISABLE", "1"))
    yield pytest.importorskip("unsloth_zoo.loss_utils", exc_type=(ImportError, NotImplementedError))
    recipe.unpatch()


@pytest.mark.parametrize("name", CASES)
def test_as_unsloth(zoo, name):
    agree(step(recipe.unsloth_fused_ce_loss, **CASES[name]), step(zoo.unsloth_fused_ce_loss, torch_compile=False, **CASES[name]))


def test_patch(zoo, monkeypatch):
    import unsloth_zoo.fused_losses.forward_adapter as adapter

    own = zoo.unsloth_fused_ce_loss
    with pytest.raises(ValueError, match="memory_budget"):
        recipe.patch(memory_budget=0)
    with pytest.raises(ValueError, match="expected_ignored"):
        recipe.patch(expected_ignored=2)
    snippet("unsloth.md")
    assert recipe.patched() and zoo.unsloth_fused_ce_loss is adapter.unsloth_fused_ce_loss is recipe.unsloth_fused_ce_loss
    head, hidden, labels = torch.nn.Linear(16, VOCAB), torch.randn(1, 9, 16), torch.randint(0, VOCAB, (1, 9))
    found = adapter.unsloth_fused_lm_head_loss(hidden, head, labels, num_items_in_batch=8)
    assert torch.allclose(found, torch.nn.functional.cross_entropy(head(hidden)[0, :-1], labels[0, 1:]), rtol=1e-5)
    extra = dict(logits_bias=torch.randn(VOCAB))
    agree(step(zoo.unsloth_fused_ce_loss, **extra), step(own, **extra))
    recipe.unpatch()
    assert zoo.unsloth_fused_ce_loss is adapter.unsloth_fused_ce_loss is own
    monkeypatch.setattr(zoo, "unsloth_fused_ce_loss", torch.nn.Linear)
    with pytest.raises(NotImplementedError, match="of 2026.10, with arguments"):
        recipe.patch()
