"""The ready-made losses of preferences and policies against their papers, in float64, values and gradients."""

import pytest
import torch
from losses_battery.step import peak_of
from oracle import DEVICE, error, generator
from paper_losses import Papers

from logitless.torch import losses

B, T, D, V = 3, 6, 5, 23  # pairs or sequences, tokens, dimensions, vocabulary
PAPER = Papers(torch)
EXACT = 1e-12
HEADS = [
    {},
    dict(softcap=4.0, logit_scale=0.7, temperature=1.3),
]


def normal(*shape, seed=0, scale=1.0, grad=False, dtype=torch.float64):
    made = torch.randn(*shape, generator=generator(seed), dtype=torch.float64) * scale
    return made.to(dtype).requires_grad_(grad)


class Problem:
    """A policy, a reference, and targets whose prompts and padding do not count."""

    def __init__(self, sequences=2 * B, dtype=torch.float64, head=None):
        self.head = head or {}
        self.hidden = normal(sequences, T, D, seed=1, grad=True, dtype=dtype)
        self.weight = normal(V, D, seed=2, grad=True, dtype=dtype)
        self.bias = normal(V, seed=3, scale=0.3, grad=True, dtype=dtype)
        self.ref_hidden = normal(sequences, T, D + 2, seed=4, dtype=dtype)
        self.ref_weight = normal(V, D + 2, seed=5, scale=0.7, dtype=dtype)
        self.advantages = normal(sequences, seed=11)
        self.targets = torch.randint(0, V, (sequences, T), generator=generator(6))
        for i in range(sequences):
            self.targets[i, : i % 3] = -100
            self.targets[i, T - i % 2 :] = -100

    @property
    def arguments(self):
        return self.hidden, self.weight, self.targets

    @property
    def wanted(self):
        return self.hidden, self.weight, self.bias

    @property
    def reference(self):
        return dict(ref_hidden=self.ref_hidden, ref_weight=self.ref_weight)

    def z(self):
        return PAPER.logits(self.hidden, self.weight, self.bias, **self.head)

    def logps(self):
        return PAPER.of_targets(PAPER.log_p(self.z()), self.targets)

    def ref_logps(self):
        return PAPER.of_targets(PAPER.log_p(PAPER.logits(self.ref_hidden, self.ref_weight, **self.head)), self.targets)

    def pairs(self, average=False):
        """Returns log pi of chosen and rejected sequences, the same of the reference, and the NLL of the chosen
        tokens."""
        found, reference = (PAPER.sequence(x, self.targets, average) for x in (self.logps(), self.ref_logps()))
        count = (self.targets[:B] >= 0).sum()
        return *found.split(B), *reference.split(B), -self.logps()[:B].sum() / count


def check(found, expected, problem, tolerance=EXACT):
    """Compares the loss, and its gradients by hidden, weight and bias."""
    assert error(found, expected) < tolerance
    for one, other in zip(*(torch.autograd.grad(x, problem.wanted, retain_graph=True) for x in (found, expected))):
        assert error(one, other) < 10 * tolerance


@pytest.mark.parametrize("head", HEADS, ids=["plain", "capped"])
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize(
    "kind", ["sigmoid", "robust", "hinge", "ipo", "exo_pair", "nca_pair", "sppo_hard", "apo_zero", "apo_down"]
)
def test_dpo(kind, average, head):
    p = Problem(head=head)
    e = 0.1 if kind in ("sigmoid", "robust", "exo_pair") else 0.0
    found = losses.dpo_loss(
        *p.arguments, p.bias, **p.reference, beta=0.3, loss_type=kind, label_smoothing=e, average_log_prob=average,
        **head,
    )
    c, r, c_ref, r_ref, nll = p.pairs(average)
    check(found.loss, PAPER.dpo(kind, c - c_ref, r - r_ref, 0.3, e), p)
    assert error(found.chosen_logps, c) < EXACT and error(found.rejected_logps, r) < EXACT
    assert error(found.chosen_rewards, 0.3 * (c - c_ref)) < EXACT
    assert error(found.rejected_rewards, 0.3 * (r - r_ref)) < EXACT
    assert error(found.nll_loss, nll) < EXACT
    assert error(found.margins, found.chosen_rewards - found.rejected_rewards) == 0
    assert found.accuracies.tolist() == [float(m > 0) for m in found.margins]
    assert not any(part.requires_grad for part in found[1:])


def test_references_of_dpo():
    """References are given, computed from another head or the policy's own, or absent; exo_pair has its default
    smoothing."""
    p = Problem()
    c, r, c_ref, r_ref, _ = p.pairs()
    given = losses.dpo_loss(*p.arguments, p.bias, ref_chosen_logps=c_ref, ref_rejected_logps=r_ref)
    computed = losses.dpo_loss(*p.arguments, p.bias, **p.reference)
    check(given.loss, PAPER.dpo("sigmoid", c - c_ref, r - r_ref, 0.1), p)
    assert error(given.loss, computed.loss) < EXACT
    check(
        losses.dpo_loss(*p.arguments, p.bias, reference_free=True, loss_type="exo_pair").loss,
        PAPER.dpo("exo_pair", c, r, 0.1, 1e-3), p,
    )
    own = normal(2 * B, T, D, seed=9)
    z = PAPER.logits(own, p.weight.detach(), p.bias.detach())
    of = PAPER.sequence(PAPER.of_targets(PAPER.log_p(z), p.targets), p.targets)
    found = losses.dpo_loss(*p.arguments, p.bias, ref_hidden=own)
    check(found.loss, PAPER.dpo("sigmoid", c - of[:B], r - of[B:], 0.1), p)


@pytest.mark.parametrize("average", [False, True])
def test_ipo(average):
    p = Problem()
    c, r, c_ref, r_ref, _ = p.pairs(average)
    options = {} if average else dict(average_log_prob=False)
    found = losses.ipo_loss(*p.arguments, p.bias, **p.reference, beta=0.2, **options)
    check(found.loss, PAPER.dpo("ipo", c - c_ref, r - r_ref, 0.2), p)


@pytest.mark.parametrize("alpha, e", [(0.0, 0.0), (0.5, 0.1)])
def test_simpo(alpha, e):
    p = Problem()
    c, r, _, _, nll = p.pairs(average=True)
    found = losses.simpo_loss(*p.arguments, p.bias, beta=2.0, gamma=0.8, alpha=alpha, label_smoothing=e)
    check(found.loss, PAPER.simpo(c, r, 2.0, 0.8, e) + alpha * nll, p)
    assert error(found.chosen_rewards, 2.0 * c) < EXACT


@pytest.mark.parametrize("kind, e, alpha, average", [
    ("sigmoid", 0.0, 1.0, False), ("sigmoid", 0.2, 0.3, True), ("hinge", 0.0, 1.0, False), ("ipo", 0.0, 0.0, True),
])
def test_cpo(kind, e, alpha, average):
    p = Problem()
    c, r, _, _, nll = p.pairs(average)
    found = losses.cpo_loss(
        *p.arguments, p.bias, loss_type=kind, label_smoothing=e, alpha=alpha, average_log_prob=average
    )
    check(found.loss, PAPER.dpo(kind, c, r, 0.1, e) + alpha * nll, p)


def test_orpo():
    p = Problem()
    c, r, _, _, nll = p.pairs(average=True)
    check(losses.orpo_loss(*p.arguments, p.bias, beta=0.4).loss, PAPER.orpo(c, r, nll, 0.4), p)


def test_kinds_of_dpo_that_look_at_the_batch():
    p = Problem()
    c, r, c_ref, r_ref, _ = p.pairs()
    r_w, r_l = c - c_ref, r - r_ref
    call = lambda kind, **o: losses.dpo_loss(  # noqa: E731
        *p.arguments, p.bias, **p.reference, beta=0.3, loss_type=kind, **o).loss
    mean = 0.3 * torch.cat([r_w, r_l]).mean().detach()
    check(call("bco_pair"), PAPER.bco(r_w, r_l, 0.3, mean), p)
    for delta in (0.7, torch.tensor([0.7], dtype=torch.float64)):
        check(call("bco_pair", bco_delta=delta), PAPER.bco(r_w, r_l, 0.3, 0.7), p)
    if DEVICE == "cpu":  # other devices have other random numbers
        assert not torch.equal((c - r).sort().values, c - r) and not torch.equal(r_w.sort().values, r_w)
    for e in (0.0, 0.1):
        check(call("aot", label_smoothing=e), PAPER.aot(c - r, c_ref - r_ref, 0.3, e), p)
        for name in ("aot_pair", "aot_unpaired"):
            check(call(name, label_smoothing=e), PAPER.aot(r_w, r_l, 0.3, e), p)
    check(call("discopop"), PAPER.discopop(r_w, r_l, 0.3, 0.05), p)
    check(call("discopop", discopop_tau=0.4), PAPER.discopop(r_w, r_l, 0.3, 0.4), p)
    p = Problem(dtype=torch.float32)
    far = losses.dpo_loss(*p.arguments, loss_type="discopop", ref_chosen_logps=torch.full((B,), 3000.0),
                          ref_rejected_logps=torch.zeros(B)).loss  # exp(-x) is infinite, g 0
    assert 250 < far < 350 and torch.autograd.grad(far, p.weight)[0].isfinite().all()


@pytest.mark.parametrize("half", [False, True], ids=["of all", "of the chosen"])
@pytest.mark.parametrize("shift", [False, True])
def test_the_nll_of_other_targets(shift, half):
    """The NLL may be over other tokens: those of prompts too, as in TRL's ORPO, or of the chosen sequences alone."""
    p = Problem()
    c, r, _, _, plain = p.pairs(average=True)
    others = torch.randint(0, V, (2 * B, T), generator=generator(12))
    others[1, 2:] = -100
    first = others[:B] >= 0
    nll = -PAPER.of_targets(PAPER.log_p(p.z()[:B]), others[:B]).sum() / first.sum()
    assert abs(nll - plain) > 1e-3
    targets, given = p.targets, (others[:B] if half else others).int()
    if shift:  # targets of a position are those of the position before
        targets, given = (torch.cat([torch.full_like(a[:, :1], 7), a], 1) for a in (targets, given))
        hidden = torch.cat([p.hidden, p.hidden.detach()[:, :1]], 1)
    else:
        hidden = p.hidden
    options = dict(nll_target=given, shift=shift)
    found = losses.orpo_loss(hidden, p.weight, targets, p.bias, beta=0.4, **options)
    check(found.loss, PAPER.orpo(c, r, nll, 0.4), p)
    assert error(found.nll_loss, nll) < EXACT and error(found.chosen_logps, c) < EXACT
    c, r, *_ = p.pairs()
    found = losses.cpo_loss(hidden, p.weight, targets, p.bias, alpha=0.6, **options)
    check(found.loss, PAPER.dpo("sigmoid", c, r, 0.1) + 0.6 * nll, p)


def test_orpo_of_a_sequence_without_a_target():
    """A pair with an empty sequence has no odds: it counts in the mean, and adds no gradient."""
    for empty in (1, B + 1):
        p = Problem()
        p.targets[empty] = -100
        c, r, _, _, nll = p.pairs(average=True)
        others = [0, 2]
        expected = nll + (PAPER.orpo(c[others], r[others], nll, 0.4) - nll) * 2 / 3
        check(losses.orpo_loss(*p.arguments, p.bias, beta=0.4).loss, expected, p)


def test_orpo_of_certain_targets_is_finite():
    hidden = torch.zeros(2, 1, 1, dtype=torch.float32) + torch.tensor([100.0, 1.0])[:, None, None]
    hidden.requires_grad_()
    loss = losses.orpo_loss(hidden, torch.tensor([[1.0], [-1.0]]), torch.tensor([[0], [0]])).loss
    loss.backward()
    assert loss.isfinite() and hidden.grad.isfinite().all()


def test_shift():
    """Labels have the positions of hidden, as in Hugging Face."""
    p = Problem()
    labels = p.targets
    p.targets = torch.cat([labels[:, 1:], torch.full((2 * B, 1), -100)], 1)
    c, r, c_ref, r_ref, _ = p.pairs()
    found = losses.dpo_loss(p.hidden, p.weight, labels, p.bias, **p.reference, shift=True)
    check(found.loss, PAPER.dpo("sigmoid", c - c_ref, r - r_ref, 0.1), p)


@pytest.mark.parametrize("kind", ["kto", "apo_zero_unpaired"])
def test_kto(kind):
    p = Problem(sequences=5)
    good = torch.tensor([True, False, True, True, False])
    ratio = PAPER.sequence(p.logps() - p.ref_logps(), p.targets)
    other = Problem(sequences=5)
    other.targets = other.targets.flip(0)
    kl = losses.kto_kl(*other.arguments, p.bias, **p.reference)
    expected = PAPER.sequence(other.logps() - other.ref_logps(), other.targets).mean().clamp(min=0)
    assert error(kl, expected) < EXACT and not kl.requires_grad
    divergence = 0.7 if kind == "kto" else 0.0
    options = dict(kl=torch.tensor([divergence], dtype=torch.float64)) if kind == "kto" else {}
    found = losses.kto_loss(
        *p.arguments, good, p.bias, **p.reference, **options, beta=0.3, desirable_weight=1.5, undesirable_weight=0.5,
        loss_type=kind,
    )
    check(found.loss, PAPER.kto(ratio, good, divergence, 0.3, 1.5, 0.5), p)
    assert error(found.rewards, 0.3 * ratio) < EXACT
    again = losses.kto_loss(*p.arguments, good, p.bias, ref_logps=PAPER.sequence(p.ref_logps(), p.targets), kl=0.7)
    assert error(again.loss, PAPER.kto(ratio, good, 0.7, 0.1)) < EXACT


# --- Policies.


def policy(problem):
    """Advantages, and the old policy's log-probabilities, with nonsense where there is no token."""
    old = problem.logps().detach() + normal(len(problem.targets), T, seed=12, scale=0.4)
    return problem.advantages, torch.where(problem.targets >= 0, old, torch.nan)


def of_tokens(p, advantages, old, low, high, beta=0.0, estimator="k3", entropy=0.0, delta=None):
    logps = p.logps()
    each = PAPER.surrogate(torch.exp(logps - old), advantages, low, high, delta)
    each = each - entropy * PAPER.entropy(p.z())
    return each + beta * PAPER.k(estimator, logps, p.ref_logps()) if beta else each


AGGREGATES = {
    "grpo_loss": (0.2, 0.2, lambda each, p: PAPER.mean_of_sequences(each, p.targets)),
    "dr_grpo_loss": (0.2, 0.2, lambda each, p: PAPER.sum_of_tokens(each, p.targets) / (len(p.targets) * T)),
    "dapo_loss": (0.2, 0.28, lambda each, p: PAPER.sum_of_tokens(each, p.targets) / (p.targets >= 0).sum()),
    "ppo_loss": (0.2, 0.2, lambda each, p: PAPER.sum_of_tokens(each, p.targets) / (p.targets >= 0).sum()),
}
OPTIONS = [
    {}, dict(beta=0.04), dict(entropy_coef=0.02), dict(beta=0.3, kl_estimator="k1", entropy_coef=0.01),
    dict(beta=0.3, kl_estimator="k2", delta=1.4),
]


@pytest.mark.parametrize("head", HEADS, ids=["plain", "capped"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", AGGREGATES)
def test_policies_of_tokens(name, options, head):
    p = Problem(head=head)
    low, high, aggregate = AGGREGATES[name]
    advantages, old = policy(p)
    reference = p.reference if "beta" in options else {}
    found = getattr(losses, name)(
        *p.arguments, advantages, p.bias, old_per_token_logps=old, **reference, **options, **head
    )
    renamed = {"kl_estimator": "estimator", "entropy_coef": "entropy"}
    options = {renamed.get(k, k): v for k, v in options.items()}
    check(found.loss, aggregate(of_tokens(p, advantages[:, None], old, low, high, **options), p), p)
    valid = p.targets >= 0
    assert error(found.logps, torch.where(valid, p.logps(), 0.0)) < EXACT
    assert error(found.entropy, torch.where(valid, PAPER.entropy(p.z()), 0.0)) < EXACT
    ratio = torch.exp(p.logps() - old)[valid]
    signs = advantages[:, None].expand(-1, T)[valid]
    assert error(found.clip_ratio_low, ((ratio < 1 - low) & (signs < 0)).double().mean()) < 1e-6
    assert error(found.clip_ratio_high, ((ratio > 1 + high) & (signs > 0)).double().mean()) < 1e-6
    assert found.clip_ratio_low > 0 and found.clip_ratio_high > 0  # the problem clips on both sides
    kl = PAPER.k(options.get("estimator", "k3"), p.logps(), p.ref_logps())[valid].mean() if "beta" in options else 0.0
    assert error(found.kl, torch.as_tensor(kl)) < EXACT
    assert not any(part.requires_grad for part in found[1:])


@pytest.mark.parametrize("token_level", [False, True])
def test_gspo(token_level):
    p = Problem()
    advantages, old = policy(p)
    logps, low, high = p.logps(), 0.02, 0.03
    ratio = PAPER.sequence_ratio(logps, old, p.targets)[:, None]
    if token_level:
        advantages = normal(2 * B, T, seed=13)
        ratio = ratio.detach() * logps.exp() / logps.exp().detach()
    shaped = advantages if token_level else advantages[:, None]
    each = PAPER.surrogate(ratio, shaped, low, high).expand(-1, T) + 0.1 * PAPER.k("k3", logps, p.ref_logps())
    found = losses.gspo_loss(
        *p.arguments, advantages, p.bias, old_per_token_logps=old, epsilon_low=low, epsilon_high=high, beta=0.1,
        token_level=token_level, ref_per_token_logps=p.ref_logps(),
    )
    check(found.loss, PAPER.mean_of_sequences(each, p.targets), p)


def test_masks_and_normalizers():
    p = Problem()
    advantages, old = policy(p)
    mask = p.targets >= 0
    everywhere = torch.where(mask, p.targets, 3)
    arguments = p.hidden, p.weight, everywhere, advantages, p.bias
    options = dict(old_per_token_logps=old, mask=mask.int())
    tokens = PAPER.sum_of_tokens(of_tokens(p, advantages[:, None], old, 0.2, 0.2), p.targets)
    check(losses.ppo_loss(*arguments, **options, normalizer=torch.tensor(64.0)).loss, tokens / 64, p)
    check(losses.dr_grpo_loss(*arguments, **options, max_completion_length=50).loss, tokens / (2 * B * 50), p)
    sequences = AGGREGATES["grpo_loss"][2](of_tokens(p, advantages[:, None], old, 0.2, 0.2), p)
    check(losses.grpo_loss(*arguments, **options, normalizer=4).loss, sequences * 2 * B / 4, p)
    on_policy = losses.grpo_loss(*p.arguments, advantages, p.bias)
    ratio = (p.logps() - p.logps().detach()).exp()
    check(on_policy.loss, PAPER.mean_of_sequences(-ratio * advantages[:, None], p.targets), p)
    empty = losses.grpo_loss(p.hidden, p.weight, torch.full_like(p.targets, -100), advantages).loss
    assert empty.item() == 0 and torch.autograd.grad(empty, p.hidden)[0].abs().max() == 0


def test_numbers_that_are_none_or_too_large():
    """Advantages of ignored tokens have no effect, and ratios that overflow give no NaN."""
    p = Problem(dtype=torch.float32)
    advantages = torch.ones(p.targets.shape)
    exact = losses.dapo_loss(*p.arguments, advantages).loss
    advantages[p.targets == -100] = torch.nan
    for loss_of in (losses.grpo_loss, losses.dapo_loss, losses.dr_grpo_loss):
        assert loss_of(*p.arguments, advantages).loss.isfinite()
    assert torch.equal(losses.dapo_loss(*p.arguments, advantages).loss, exact)
    old = torch.full(p.targets.shape, -200.0)
    for loss_of in (losses.grpo_loss, losses.gspo_loss):
        found = loss_of(*p.arguments, torch.ones(len(p.targets)), old_per_token_logps=old, delta=3.0).loss
        assert found.isfinite() and all(g.isfinite().all() for g in torch.autograd.grad(found, (p.hidden, p.weight)))


def test_no_sequences():
    p = Problem(sequences=0)
    labels = torch.ones(0, dtype=torch.bool)
    assert losses.kto_loss(*p.arguments, labels, **p.reference, kl=0.0).loss == 0
    assert losses.kto_kl(*p.arguments, **p.reference) == 0


def test_cpo_averages_with_ipo_alone():
    p = Problem()
    call = lambda **more: losses.cpo_loss(*p.arguments, **more).loss  # noqa: E731
    assert torch.equal(call(loss_type="ipo"), call(loss_type="ipo", average_log_prob=True))
    assert torch.equal(call(), call(average_log_prob=False)) and not torch.equal(call(), call(average_log_prob=True))


def test_group_advantages():
    rewards = torch.tensor([1.0, 2.0, 6.0, 5.0, 5.0, 5.0], dtype=torch.float64)
    apart = torch.tensor([-2.0, -1.0, 3.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    assert error(losses.group_advantages(rewards, 3, scale=False), apart) < EXACT
    assert error(losses.group_advantages(rewards, 3, epsilon=0.0)[:3], apart[:3] / 7**0.5) < EXACT
    assert error(losses.group_advantages(torch.stack([rewards, rewards], 1)[:, 0], 3, scale=False), apart) < EXACT


# --- All losses.

CALLS = {
    "dpo_loss": lambda p, **o: losses.dpo_loss(*p.arguments, p.bias, **p.reference, **o),
    "orpo_loss": lambda p, **o: losses.orpo_loss(*p.arguments, p.bias, **o),
    "grpo_loss": lambda p, **o: losses.grpo_loss(*p.arguments, p.advantages, p.bias, **p.reference, beta=0.1, **o),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_other_dtypes(name, dtype):
    p = Problem(dtype=dtype)
    exact = Problem()
    for one, other in zip((exact.hidden, exact.weight, exact.bias), p.wanted):
        one.data.copy_(other.detach())
    exact.ref_hidden, exact.ref_weight = p.ref_hidden.double(), p.ref_weight.double()
    found, expected = CALLS[name](p).loss, CALLS[name](exact).loss
    assert found.dtype == torch.float32 and error(found, expected) < 1e-5
    tolerance = 1e-4 if dtype == torch.float32 else 8e-3
    for one, other in zip(torch.autograd.grad(found, p.wanted), torch.autograd.grad(expected, exact.wanted)):
        assert one.dtype == dtype and error(one, other) < tolerance


@pytest.mark.parametrize("name", CALLS)
def test_frozen_sides_have_no_gradients(name):
    p = Problem()
    p.weight.requires_grad_(False)
    CALLS[name](p).loss.backward()
    assert p.weight.grad is None and p.hidden.grad is not None


@pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="counts what PyTorch's CPU allocator gives out")
@pytest.mark.parametrize("name", CALLS)
def test_memory_is_far_below_the_logits(name):
    global T, D, V
    small = T, D, V
    try:
        T, D, V = 64, 16, 16384
        p = Problem(dtype=torch.float32)
        gradients = sum(4 * t.numel() for t in p.wanted)
        logits = 4 * 2 * B * T * V
        peak, _ = peak_of(lambda: torch.autograd.grad(CALLS[name](p, memory_budget="1MiB").loss, p.wanted))
    finally:
        T, D, V = small
    assert peak < gradients + (3 << 19) < logits / 8


def test_compiles_in_one_graph():
    p = Problem(dtype=torch.float32)
    whole = torch.compile(lambda: CALLS["grpo_loss"](p).loss, backend="eager", fullgraph=True)()
    assert torch.equal(whole, CALLS["grpo_loss"](p).loss)


# --- Log-probabilities of chosen vocabulary entries.


@pytest.mark.parametrize("shape", [(2 * B, T), (2 * B, T, 3)], ids=["one", "several"])
def test_selective_log_softmax(shape):
    p = Problem(head=HEADS[1])
    index = torch.randint(0, V, shape, generator=generator(8))
    z = PAPER.log_p(p.z())
    expected = z.gather(-1, index if len(shape) == 3 else index[..., None]).reshape(shape)
    found = losses.selective_log_softmax(p.hidden, p.weight, index, p.bias, **HEADS[1])
    assert error(found, expected) < EXACT
    check(found.sum(), expected.sum(), p)


ON_CPU = torch.get_default_device().type == "cpu"


def restored(threads):
    """Sets the number of threads. Returns a function that restores the number before."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    return lambda: torch.set_num_threads(before)


@pytest.mark.skipif(not ON_CPU, reason="batch_invariant is refused on a GPU")
@pytest.mark.parametrize("options", [{}, dict(softcap=9.0, temperature=0.7)], ids=["plain", "capped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_same_bits_whatever_the_batch(dtype, options):
    """A token has the same bits alone, in another batch, at another position, with gradients, budgets and threads."""
    count, dim, vocab = 70, 33, 9001  # 71 tiles of the vocabulary: an odd number, the last one partial
    hidden = normal(count, dim, seed=1)
    hidden[3], hidden[40] = hidden[3] * 1000, 0.0
    hidden, weight = hidden.to(dtype), normal(vocab, dim, seed=2, scale=0.4).to(dtype)
    bias = normal(vocab, seed=3).float()
    index = torch.randint(0, vocab, (count,), generator=generator(4))

    def scored(rows, threads=1, grad=False, targets=None, **more):
        back = restored(threads)
        try:
            taken = hidden[rows].clone().requires_grad_(grad)
            return losses.selective_log_softmax(
                taken, weight, index[rows] if targets is None else targets, bias, batch_invariant=True, **options, **more
            ).detach()
        finally:
            back()

    every = torch.arange(count)
    alone = torch.cat([scored(every[i : i + 1]) for i in range(0, count, 6)])
    together = scored(every, threads=2, grad=True, memory_budget="64MiB")
    assert torch.equal(alone, together[::6])
    for size in (2, 7, 16, 17, 33, 64):
        rows = torch.randperm(count, generator=generator(size))[:size]
        assert torch.equal(scored(rows), together[rows]), size
    targets = index.clone()
    targets[::2] = -100  # tokens that are ignored are not computed
    assert torch.equal(scored(every, targets=targets)[1::2], together[1::2])
    several = torch.stack([index.flip(0), index, index], -1)
    assert torch.equal(scored(every, targets=several)[:, 1], together)


def test_bits_that_are_not_promised_are_refused():
    p = Problem()
    with pytest.raises(NotImplementedError, match="batch_invariant: expected"):
        losses.selective_log_softmax(*p.arguments, batch_invariant=True)  # float64
    with pytest.raises(ValueError, match=r"index: expected \[6, 6\] or"):
        losses.selective_log_softmax(p.hidden, p.weight, p.targets[1:])


BAD = {
    "hidden: expected \\[B, T, D\\]": lambda p: losses.dpo_loss(p.hidden[0], p.weight, p.targets[0], **p.reference),
    "hidden: expected \\[2 B, T, D\\]": lambda p: losses.simpo_loss(p.hidden[:3], p.weight, p.targets[:3]),
    "the chosen .* the rejected ones, got \\[0, 6, 5\\]": lambda p: losses.simpo_loss(p.hidden[:0], p.weight, p.targets[:0]),
    "target: expected \\[6, 6\\]": lambda p: losses.orpo_loss(p.hidden, p.weight, p.targets[:, 1:]),
    "weight: expected \\[V, 5\\]": lambda p: losses.cpo_loss(p.hidden, p.weight[:, 1:], p.targets),
    "beta: expected a number above 0, got 0": lambda p: losses.dpo_loss(*p.arguments, **p.reference, beta=0),
    "bco_delta: expected None with loss_type 'aot', got 0.5": lambda p: losses.dpo_loss(
        *p.arguments, **p.reference, loss_type="aot", bco_delta=0.5),
    "bco_delta: expected a tensor of one number": lambda p: losses.dpo_loss(
        *p.arguments, **p.reference, loss_type="bco_pair", bco_delta=torch.zeros(2)),
    "discopop_tau: expected None with loss_type 'sigmoid', got 0.05": lambda p: losses.dpo_loss(
        *p.arguments, **p.reference, discopop_tau=0.05),
    "discopop_tau: expected a number above 0": lambda p: losses.dpo_loss(
        *p.arguments, **p.reference, loss_type="discopop", discopop_tau=0),
    "nll_target: expected \\[6, 6\\] or \\[3, 6\\]": lambda p: losses.orpo_loss(*p.arguments, nll_target=p.targets[:2]),
    "loss_type: expected one of 'sigmoid'": lambda p: losses.cpo_loss(*p.arguments, loss_type="bco"),
    "label_smoothing: expected a number from 0 below 0.5": lambda p: losses.simpo_loss(
        *p.arguments, label_smoothing=0.5),
    "label_smoothing: expected 0.0 for loss_type 'hinge'": lambda p: losses.dpo_loss(
        *p.arguments, **p.reference, loss_type="hinge", label_smoothing=0.1),
    "temperature: expected a number above 0": lambda p: losses.orpo_loss(*p.arguments, temperature=0.0),
    "ref_chosen_logps: expected it with": lambda p: losses.dpo_loss(*p.arguments),
    "ref_chosen_logps: expected None beside ref_hidden": lambda p: losses.dpo_loss(
        *p.arguments, **p.reference, ref_rejected_logps=torch.zeros(3)),
    "ref_chosen_logps: expected \\[3\\], got \\[6\\]": lambda p: losses.dpo_loss(
        *p.arguments, ref_chosen_logps=torch.zeros(6), ref_rejected_logps=torch.zeros(3)),
    "ref_hidden: expected it beside ref_weight": lambda p: losses.dpo_loss(*p.arguments, ref_weight=p.ref_weight),
    "ref_hidden: expected \\[6, 6, 'D'\\]": lambda p: losses.dpo_loss(*p.arguments, ref_hidden=p.ref_hidden[1:]),
    "ref_weight: expected \\[23, D\\]": lambda p: losses.dpo_loss(
        *p.arguments, ref_hidden=p.ref_hidden, ref_weight=p.ref_weight[1:]),
    "reference_free: expected False": lambda p: losses.dpo_loss(*p.arguments, **p.reference, reference_free=True),
    "kl: expected a number or a tensor": lambda p: losses.kto_loss(
        *p.arguments, torch.ones(6, dtype=torch.bool), **p.reference),
    "preference_labels: expected \\[6\\]": lambda p: losses.kto_loss(
        *p.arguments, torch.ones(5, dtype=torch.bool), **p.reference, kl=0.0),
    "advantages: expected \\[6\\] or \\[6, 6\\]": lambda p: losses.grpo_loss(*p.arguments, torch.zeros(5)),
    "advantages: expected \\[6\\], got \\[6, 6\\]": lambda p: losses.gspo_loss(*p.arguments, torch.zeros(6, 6)),
    "ref_per_token_logps: expected it or ref_hidden beside beta=0.1": lambda p: losses.grpo_loss(
        *p.arguments, torch.zeros(6), beta=0.1),
    "ref_per_token_logps: expected None, and no ref_hidden, beside beta=0": lambda p: losses.grpo_loss(
        *p.arguments, torch.zeros(6), **p.reference),
    "epsilon_low: expected a number from 0 to 1": lambda p: losses.ppo_loss(
        *p.arguments, torch.zeros(6), epsilon_low=2),
    "delta: expected a number above 1.2": lambda p: losses.ppo_loss(*p.arguments, torch.zeros(6), delta=1.1),
    "kl_estimator: expected one of 'k1'": lambda p: losses.ppo_loss(*p.arguments, torch.zeros(6), kl_estimator="k4"),
    "mask: expected \\[6, 6\\]": lambda p: losses.ppo_loss(*p.arguments, torch.zeros(6), mask=torch.ones(6)),
    "normalizer: expected a number above 0": lambda p: losses.ppo_loss(*p.arguments, torch.zeros(6), normalizer=0),
    "max_completion_length: expected a whole number from 1": lambda p: losses.dr_grpo_loss(
        *p.arguments, torch.zeros(6), max_completion_length=0),
    "rewards: expected \\[B\\], B a multiple of 4": lambda p: losses.group_advantages(torch.zeros(6), 4),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    with pytest.raises(ValueError, match=message):
        BAD[message](Problem())


def test_wrong_types_are_named():
    p = Problem()
    for message, call in {
        "hidden: expected a tensor": lambda: losses.dpo_loss(None, p.weight, p.targets, **p.reference),
        "target: expected int32 or int64": lambda: losses.orpo_loss(p.hidden, p.weight, p.targets.double()),
        "shift: expected True or False": lambda: losses.orpo_loss(*p.arguments, shift=2),
        "nll_target: expected int32 or int64": lambda: losses.cpo_loss(*p.arguments, nll_target=p.targets.double()),
        "rewards: expected a floating type, got torch.int64": lambda: losses.group_advantages(torch.arange(4), 2),
        "beta: expected a number from 0": lambda: losses.orpo_loss(*p.arguments, beta="0.1"),
        "preference_labels: expected bool": lambda: losses.kto_loss(*p.arguments, torch.ones(6), **p.reference, kl=0.0),
        r"dpo_loss\(\) got an unexpected keyword argument 'betas'": lambda: losses.dpo_loss(*p.arguments, betas=1),
        r"ipo_loss\(\) got an unexpected keyword argument 'loss_type'": lambda: losses.ipo_loss(
            *p.arguments, loss_type="hinge"),
    }.items():
        with pytest.raises(TypeError, match=message):
            call()
