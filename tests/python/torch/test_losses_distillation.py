"""Distillation from a teacher's head against the papers, in float64: values, gradients, and memory."""

import re
from pathlib import Path

import pytest
import torch
from losses_battery.step import peak_of
from oracle import DEVICE, error, generator
from paper_losses import Papers

from logitless.torch import losses

N, D, V = 12, 5, 31
PAPER = Papers(torch)
EXACT = 1e-12


def normal(*shape, seed, scale=1.0, grad=False, dtype=torch.float64):
    made = torch.randn(*shape, generator=generator(seed), dtype=torch.float64) * scale
    return made.to(dtype).requires_grad_(grad)


class Problem:
    """A student and a wider teacher of [3, 4] tokens; some tokens do not count."""

    def __init__(self, rows=(3, 4), dim=D, vocab=V, dtype=torch.float64):
        scale = 1.5 / dim**0.5
        self.hidden = normal(*rows, dim, seed=1, grad=True, dtype=dtype)
        self.weight = normal(vocab, dim, seed=2, scale=scale, grad=True, dtype=dtype)
        self.bias = normal(vocab, seed=3, scale=0.3, grad=True, dtype=dtype)
        self.teacher = (
            normal(*rows, dim + 2, seed=4, dtype=dtype), normal(vocab, dim + 2, seed=5, scale=scale, dtype=dtype)
        )
        self.teacher_bias = normal(vocab, seed=6, scale=0.3, dtype=dtype)
        self.targets = torch.randint(0, vocab, rows, generator=generator(7))
        self.targets.view(-1)[::5] = -100

    @property
    def arguments(self):
        return self.hidden, self.weight, *self.teacher

    @property
    def wanted(self):
        return self.hidden, self.weight, self.bias

    def logits(self, temperature=1.0, head=None, teacher_head=None):
        """Returns the logits of the student and the teacher."""
        z = PAPER.logits(self.hidden, self.weight, self.bias, temperature=temperature, **(head or {}))
        return z, PAPER.logits(*self.teacher, self.teacher_bias, temperature=temperature, **(teacher_head or {}))


def check(found, expected, problem, tolerance=EXACT):
    assert error(found, expected) < tolerance
    upstream = torch.linspace(-1, 2, found.numel(), dtype=torch.float64).reshape(found.shape)
    pairs = (torch.autograd.grad(x, problem.wanted, upstream.to(x.dtype)) for x in (found, expected))
    for one, other in zip(*pairs):
        assert one.dtype == problem.hidden.dtype and error(one, other) < 10 * tolerance


def expected_divergence(z_p, z_q, beta):
    if beta in (0.0, 1.0):
        return PAPER.kl(z_q, z_p) if beta == 0.0 else PAPER.kl(z_p, z_q)
    return PAPER.jsd(z_p, z_q, beta)


@pytest.mark.parametrize("beta, reduction, hard, head", [
    (0.0, "mean", 0.5, {}),
    (1.0, "sum", 0.0, dict(temperature=2.0)),
    (0.3, "none", 0.0, {}),
    (0.5, "mean", 0.25, dict(temperature=1.5, softcap=3.0, logit_scale=0.8)),
])
def test_divergences(beta, reduction, hard, head):
    p = Problem()
    others = dict(teacher_softcap=5.0, teacher_logit_scale=1.2) if "softcap" in head else {}
    found = losses.jsd_loss(
        *p.arguments, p.bias, p.teacher_bias, beta=beta, target=p.targets, reduction=reduction, weight_hard_loss=hard,
        weight_soft_loss=1.0 - hard, **head, **others,
    )
    own = {name: head[name] for name in head if name != "temperature"}
    of_teacher = {name.removeprefix("teacher_"): value for name, value in others.items()}
    z_p, z_q = p.logits(head.get("temperature", 1.0), own, of_teacher)
    each = (1.0 - hard) * expected_divergence(z_p, z_q, beta)
    plain = PAPER.log_p(p.logits(1.0, own, of_teacher)[0])
    each = each - hard * PAPER.of_targets(plain, p.targets)
    valid = p.targets >= 0
    each = torch.where(valid, each, 0.0)
    check(found, {"none": each, "sum": each.sum(), "mean": each.sum() / valid.sum()}[reduction], p)


def test_forward_and_reverse_kl():
    p = Problem()
    z_p, z_q = p.logits()
    forward = losses.forward_kl_loss(*p.arguments, p.bias, p.teacher_bias, normalizer=torch.tensor(7.0))
    check(forward, PAPER.kl(z_q, z_p).sum() / 7, p)
    z_p, z_q = p.logits()
    reverse = losses.reverse_kl_loss(*p.arguments, p.bias, p.teacher_bias, normalizer=5)
    check(reverse, PAPER.kl(z_p, z_q).sum() / 5, p)


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_top_k(reduction, tail):
    p = Problem()
    best = losses.teacher_top_k(*p.teacher, p.teacher_bias, k=6, temperature=1.3)
    z_p, z_q = p.logits(1.3)
    vocab_ids = z_q.topk(6).indices
    assert torch.equal(best.vocab_ids, vocab_ids) and error(best.log_probs, PAPER.log_p(z_q).gather(-1, vocab_ids)) < EXACT
    found = losses.top_k_loss(
        p.hidden, p.weight, best, p.bias, tail=tail, target=p.targets, reduction=reduction, temperature=1.3
    )
    valid = p.targets >= 0
    each = torch.where(valid, PAPER.top_k(z_p, z_q, vocab_ids, tail), 0.0)
    check(found, each if reduction == "none" else each.sum() / valid.sum(), p)


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_top_k_of_tokens_with_fewer(tail, reduction):
    """Entries are padded by ignore_index or by -inf; a token without entries has loss 0."""
    p = Problem()
    best = losses.teacher_top_k(*p.teacher, p.teacher_bias, k=3)
    call = lambda k: losses.top_k_loss(p.hidden, p.weight, k, p.bias, tail=tail, reduction=reduction)  # noqa: E731
    expected = call(best)
    lead = best.vocab_ids.shape[:-1]
    vocab_ids = torch.cat([best.vocab_ids, torch.full((*lead, 1), -100), best.vocab_ids[..., :1]], -1)
    log_probs = torch.cat([best.log_probs, torch.zeros(*lead, 1), torch.full((*lead, 1), -torch.inf)], -1)
    found = call(losses.TopK(vocab_ids, log_probs))
    for f, e in zip(*(torch.autograd.grad(t.sum(), p.wanted) for t in (found, expected))):
        assert error(f, e) < EXACT
    assert error(found, expected) < EXACT
    none = call(losses.TopK(torch.full_like(vocab_ids, -100), log_probs))
    assert not none.detach().any() and all(not g.any() for g in torch.autograd.grad(none.sum(), p.wanted))


def test_top_k_of_all_classes_is_the_divergence():
    """K = V leaves nothing for the tail."""
    p = Problem()
    best = losses.teacher_top_k(*p.teacher, p.teacher_bias, k=V)
    for tail in (False, True):
        found = losses.top_k_loss(p.hidden, p.weight, best, p.bias, tail=tail)
        assert error(found, PAPER.kl(p.logits()[1], p.logits()[0]).mean()) < 1e-9


@pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="counts what PyTorch's CPU allocator gives out")
def test_budgets_are_met():
    """bf16 gradients are right to their rounding, and a budget below the least program is an error."""
    p = Problem((256,), 16, 2048, dtype=torch.bfloat16)
    p.bias.requires_grad_(False)
    wanted = p.hidden, p.weight
    budget, logits = 1 << 19, 4 * 256 * 2048
    losses.jsd_loss(*p.arguments, p.bias, memory_budget=budget).backward()  # planned
    peak, gradients = peak_of(
        lambda: torch.autograd.grad(2.0 * losses.jsd_loss(*p.arguments, p.bias, memory_budget=budget), wanted)
    )
    gradients = [g / 2.0 for g in gradients]  # the backward scaled them in place, in the forward's memory
    assert peak < budget + (1 << 14) < logits / 2
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in (*p.arguments, p.bias)]
    z_p = PAPER.logits(exact[0], exact[1], exact[4])
    reference = torch.autograd.grad(PAPER.jsd(z_p, PAPER.logits(exact[2], exact[3]), 0.5).mean(), exact[:2])
    assert all(error(one, other) < 4e-3 for one, other in zip(gradients, reference))
    text = losses.explain_divergence(*p.arguments, p.bias, memory_budget=budget)
    assert "512.0 KiB, met)" in text and "forward_and_gradients" in text
    with pytest.raises(ValueError, match="budget"):
        losses.jsd_loss(*p.arguments, p.bias, memory_budget=1 << 12)
    peak, _ = peak_of(lambda: losses.teacher_top_k(*p.teacher, k=4, memory_budget=budget), results_count=True)
    assert peak < budget + 256 * 4 * 24


@pytest.mark.parametrize("executor", ["native", "python"])
def test_what_is_no_number_at_ignored_tokens_counts_for_nothing(executor):
    hidden, weight = normal(6, 8, seed=1, dtype=torch.float32, grad=True), normal(50, 8, seed=2, dtype=torch.float32)
    teacher, teacher_weight = normal(6, 8, seed=3, dtype=torch.float32), normal(50, 8, seed=4, dtype=torch.float32)
    target = torch.tensor([1, 2, 3, -100, 5, 6])
    call = lambda h, t: losses.jsd_loss(h, weight, t, teacher_weight, target=target, executor=executor)  # noqa: E731
    expected = torch.autograd.grad(call(hidden, teacher), hidden)[0]
    with torch.no_grad():
        hidden[3], teacher[3] = torch.nan, torch.inf
    found = torch.autograd.grad(call(hidden, teacher), hidden)[0]
    assert torch.equal(found, expected) and not found[3].any()
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(call(hidden, teacher), hidden, create_graph=True)


def test_frozen_sides_have_no_gradients():
    p = Problem()
    p.weight.requires_grad_(False)
    losses.forward_kl_loss(*p.arguments).backward()
    assert p.hidden.grad is not None and p.weight.grad is None
    with torch.no_grad():
        assert not losses.forward_kl_loss(*p.arguments).requires_grad


def test_compiles_in_one_graph():
    p = Problem()
    found = torch.compile(
        lambda *a: 2 * losses.jsd_loss(*a, softcap=5.0, reduction="none"), backend="eager", fullgraph=True
    )(*p.arguments)
    z_p, z_q = PAPER.logits(p.hidden, p.weight, softcap=5.0), PAPER.logits(*p.teacher)
    expected = 2 * PAPER.jsd(z_p, z_q, 0.5)
    assert error(found, expected) < EXACT
    gradients = (torch.autograd.grad(x.sum(), (p.hidden, p.weight)) for x in (found, expected))
    assert all(error(one, other) < 10 * EXACT for one, other in zip(*gradients))


BAD = {
    "teacher_hidden: expected \\[3, 4, 'D'\\]": lambda p: losses.jsd_loss(
        p.hidden, p.weight, p.teacher[0][1:], p.teacher[1]),
    "teacher_weight: expected \\[31, D\\], the vocabulary of weight": lambda p: losses.jsd_loss(
        p.hidden, p.weight, p.teacher[0], p.teacher[1][1:]),
    "teacher_weight: expected \\[V, 7\\]": lambda p: losses.jsd_loss(
        p.hidden, p.weight, p.teacher[0], p.teacher[1][:, 1:]),
    "weight: expected \\[V, 5\\]": lambda p: losses.jsd_loss(p.hidden, p.weight[:, 1:], *p.teacher),
    "beta: expected a number from 0 to 1": lambda p: losses.jsd_loss(*p.arguments, beta=1.5),
    "reduction: expected one of": lambda p: losses.forward_kl_loss(*p.arguments, reduction="batchmean"),
    "normalizer: expected None with reduction 'sum'": lambda p: losses.forward_kl_loss(
        *p.arguments, reduction="sum", normalizer=3),
    "executor: expected one of 'native', 'python'": lambda p: losses.forward_kl_loss(*p.arguments, executor="cuda"),
    "target: expected it with weight_hard_loss": lambda p: losses.forward_kl_loss(*p.arguments, weight_hard_loss=0.5),
    "target: expected \\[3, 4\\]": lambda p: losses.forward_kl_loss(*p.arguments, target=p.targets[1:]),
    "target: expected a class below 31 or ignore_index -100, got 31 at position 1": lambda p: losses.forward_kl_loss(
        *p.arguments, target=torch.where(p.targets < 0, p.targets, 31)),
    "temperature: expected a number above 0": lambda p: losses.reverse_kl_loss(*p.arguments, temperature=-1.0),
    "k: expected at most 31": lambda p: losses.teacher_top_k(*p.teacher, k=32),
    "k: expected a whole number from 1": lambda p: losses.teacher_top_k(*p.teacher, k=0),
    "top_k.vocab_ids: expected \\[3, 4, 'K'\\]": lambda p: losses.top_k_loss(
        p.hidden, p.weight, losses.TopK(p.targets, p.targets)),
    "top_k.log_probs: expected \\[3, 4, 2\\]": lambda p: losses.top_k_loss(
        p.hidden, p.weight, losses.TopK(torch.zeros(3, 4, 2, dtype=torch.int64), torch.zeros(3, 4, 3))),
    "ignore_index: expected a number below 0": lambda p: losses.top_k_loss(
        p.hidden, p.weight, losses.TopK(torch.zeros(3, 4, 2, dtype=torch.int64), torch.zeros(3, 4, 2)), ignore_index=1),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    if DEVICE != "cpu" and message.startswith("target:"):
        pytest.skip("vocabulary entries on a GPU are not read: their loss is NaN")
    with pytest.raises(ValueError, match=message):
        BAD[message](Problem())


def test_wrong_types_are_named():
    p = Problem()
    with pytest.raises(TypeError, match="teacher_weight: expected torch.float64, the dtype of hidden"):
        losses.jsd_loss(p.hidden, p.weight, p.teacher[0], p.teacher[1].float())
    with pytest.raises(TypeError, match="top_k: expected TopK"):
        losses.top_k_loss(p.hidden, p.weight, p.targets)
    with pytest.raises(TypeError, match=r"jsd_loss\(\) got an unexpected keyword argument 'temprature'; did you mean 'temperature'"):
        losses.jsd_loss(*p.arguments, temprature=2.0)
    assert torch.equal(losses.jsd_loss(*p.arguments, targets=p.targets), losses.jsd_loss(*p.arguments, target=p.targets))


def test_the_example_of_the_document_runs():
    page = Path(__file__).parents[3] / "docs/ready_losses.md"
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) if "logitless.torch" in c]
    p = Problem((4, 6), dtype=torch.float32)
    space = dict(
        hidden=p.hidden, weight=p.weight, target=p.targets, ref_hidden=normal(4, 6, 3, seed=8, dtype=torch.float32),
        ref_weight=normal(V, 3, seed=9, dtype=torch.float32), states=p.hidden, tokens=p.targets,
        advantages=torch.linspace(-1, 1, 4), ref_states=p.hidden.detach() + 0.1, teacher_hidden=p.teacher[0],
        teacher_weight=p.teacher[1],
    )
    exec(code, space)
    assert p.weight.grad.isfinite().all() and space["found"].kl > 0
