"""The policy losses since GSPO, and the corrections of all policy losses, against their definitions in float64."""

import numpy as np
import pytest
from loss_frameworks import ADVANTAGES, B, CAPPED, HIDDEN, T, TARGETS, VALID, WEIGHT, error, normal

ALL = ["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "luspo", "gmpo", "cispo", "sapo", "vespo", "ppo"]
SIGNED = ADVANTAGES[:, None]


class Problem:
    """Log-probabilities of a policy that moved a little since it sampled, and of a sampler with other numbers."""

    def __init__(self, f, head=None):
        self.f, self.head = f, head or {}
        logps = f.values(lambda *given: [f.logps(given, head)])[0]
        self.entropy = f.values(lambda *given: [f.paper.entropy(f.paper.logits(*given, **self.head))])[0]
        self.old = np.where(VALID, logps + normal(2 * B, T, seed=21, scale=0.3), np.nan).astype(np.float32)
        self.sampling = np.where(VALID, self.old + normal(2 * B, T, seed=22, scale=0.4), np.nan).astype(np.float32)
        self.ratio = np.where(VALID, np.exp(logps - self.old), np.nan)

    def call(self, name, **options):
        f = self.f
        return lambda x, w, b: getattr(f.losses, name)(
            x, w, f.targets, f.advantages, b, old_per_token_logps=f.array(self.old), **self.head, **options)

    def of(self, each, reduce):
        """each(logps, ratio, advantages [B, 1]) -> the tokens' losses, under a reduction of the paper."""
        f = self.f

        def formula(*given):
            logps = f.logps(given, self.head)
            losses = each(logps, f.xp.exp(logps - f.array(self.old)), f.advantages[:, None])
            return reduce(f.xp.broadcast_to(losses, logps.shape))

        return formula

    def by_token(self, each):
        return self.f.paper.sum_of_tokens(each, self.f.targets) / self.f.valid.sum()

    def by_sequence(self, each):
        return self.f.paper.mean_of_sequences(each, self.f.targets)

    def clipped(self, logps, ratio, advantages):
        return self.f.paper.surrogate(ratio, advantages, 0.2, 0.2)


@pytest.mark.parametrize("head", [{}, CAPPED], ids=["plain", "capped"])
def test_successors(f, head):
    p = Problem(f, head)
    old, stopped, paper = f.array(p.old), f.stopped, f.paper

    def sequence(low, high):
        def each(logps, ratio, advantages):
            return paper.surrogate(paper.sequence_ratio(logps, old, f.targets)[:, None], advantages, low, high)

        return each

    def vespo(logps, ratio, advantages):
        w = f.xp.exp(paper.sequence(logps - old, f.targets))[:, None]
        return paper.vespo(stopped(w), logps, advantages, (1.5, 2.0), (3.0, 0.5))

    found = f.check([
        (p.call("bnpo_loss"), p.of(p.clipped, p.by_token)),
        (p.call("luspo_loss", epsilon_low=0.1, epsilon_high=0.05),
         p.of(sequence(0.1, 0.05), lambda each: paper.sum_of_tokens(each, f.targets) / (2 * B))),
        (p.call("dapo_loss", importance_sampling_level="sequence"), p.of(sequence(0.2, 0.28), p.by_token)),
        (p.call("gmpo_loss", epsilon_low=0.2, epsilon_high=0.3),
         p.of(lambda logps, ratio, a: paper.gmpo(ratio, a, 0.2, 0.3, f.valid), p.by_sequence)),
        (p.call("cispo_loss", epsilon_high=1.1),
         p.of(lambda logps, ratio, a: paper.cispo(stopped(ratio), logps, a, 1.1), p.by_token)),
        (p.call("sapo_loss", sapo_temperature_neg=2.5),
         p.of(lambda logps, ratio, a: paper.sapo(ratio, a, 1.0, 2.5), p.by_sequence)),
        (p.call("vespo_loss", vespo_k_pos=1.5, vespo_lambda_pos=2.0, vespo_lambda_neg=0.5), p.of(vespo, p.by_token)),
    ])
    stops = {3: (np.exp(-0.2), np.exp(0.3)), 4: (0.0, 1.1), 5: (0.0, np.inf), 6: (0.0, np.inf)}
    for i, (low, high) in stops.items():
        parts = [((p.ratio < low) & (SIGNED < 0))[VALID].mean(), ((p.ratio > high) & (SIGNED > 0))[VALID].mean()]
        assert (parts[1] > 0) == (i < 5)
        assert error([f.numpy(found[i].clip_ratio_low), f.numpy(found[i].clip_ratio_high)], parts) < 1e-6


def test_corrections(f):
    """Weights of the sampler, in all modes; the divergence times the ratio; masks by entropy and by drift."""
    p, paper = Problem(f), f.paper
    between = dict(importance_sampling_clip_min=0.8, importance_sampling_clip_max=1.3)
    to_sampler = f.array(p.old) - f.array(p.sampling)

    def weighted(mode, low=0.8, high=1.3):
        return paper.sampler_weight(to_sampler, f.targets, mode, low, high)

    def vespo(logps, ratio, advantages):
        w = f.xp.exp(paper.sequence(logps - f.array(p.old), f.targets) + paper.sequence(f.xp.log(clipped), f.targets))
        return paper.vespo(f.stopped(w[:, None]), logps, advantages, (2.0, 3.0), (3.0, 2.0))

    threshold = np.quantile(p.entropy[VALID], 0.7)
    highest = f.array(VALID & (p.entropy >= threshold))
    drift = np.where(VALID, np.nan_to_num(p.sampling - p.old + np.log(np.where(VALID, 1 / p.ratio, 1))), 0.0).sum(-1)
    drift = drift / VALID.sum(-1)
    near = f.array((ADVANTAGES >= 0) | (drift <= 0.01))[:, None]
    assert 0 < f.numpy(near).mean() < 1
    clipped = f.xp.where(f.valid, weighted("token_truncate", 0.0, 1.2), 1.0)
    sampled = dict(sampling_per_token_logps=f.array(p.sampling))

    def selected(each, mask):
        return f.xp.where(mask, each, 0.0)

    cases = {mode: (p.call("grpo_loss", importance_sampling_mode=mode, **sampled, **between),
                    p.of(lambda *a, mode=mode: weighted(mode) * p.clipped(*a), p.by_sequence))
             for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")}
    cases["unbounded"] = (
        p.call("dapo_loss", epsilon_high=0.2, **sampled, importance_sampling_mode="token_mask",
               importance_sampling_clip_max=None),
        p.of(lambda *a: f.xp.exp(to_sampler) * p.clipped(*a), p.by_token))
    cases["vespo"] = (
        p.call("vespo_loss", **sampled, importance_sampling_mode="token_truncate", importance_sampling_clip_max=1.2),
        p.of(vespo, p.by_token))
    cases["near"] = (
        p.call("cispo_loss", off_policy_mask_threshold=0.01, **sampled, importance_sampling_clip_max=1e6),
        p.of(lambda logps, ratio, a: selected(
            weighted("sequence_mask", 0.0, 1e6) * paper.cispo(f.stopped(ratio), logps, a, 5.0), near), p.by_token))
    found = dict(zip(cases, f.check(list(cases.values()))))
    for mode in cases:
        if "_" in mode:
            exact = f.xp.broadcast_to(weighted(mode), VALID.shape)[f.valid]
            assert error(f.numpy(found[mode].importance_weight), f.numpy(exact).mean()) < 1e-5
            assert len(np.unique(f.numpy(exact))) > 1  # the bounds are met, and not by all

    ref_logps = f.ref_logps()
    f.check([
        (p.call("dapo_loss", epsilon_high=0.2, beta=0.3, use_bias_correction_kl=True, **f.reference),
         p.of(lambda *a: p.clipped(*a) + 0.3 * a[1] * paper.k("k3", a[0], ref_logps), p.by_token)),
        (p.call("grpo_loss", top_entropy_quantile=0.3, beta=0.3, **f.reference), p.of(
            lambda *a: selected(p.clipped(*a), highest) + 0.3 * paper.k("k3", a[0], ref_logps), p.by_sequence)),
        (p.call("gmpo_loss", top_entropy_quantile=0.9), p.of(lambda logps, ratio, a: paper.gmpo(
            ratio, a, 0.4, 0.4, f.array(VALID & (p.entropy >= np.quantile(p.entropy[VALID], 0.1)))), p.by_sequence)),
    ])


@pytest.mark.parametrize("name", ALL)
def test_extremes(f, name):
    """No batch has a gradient that is not finite. Without old log-probabilities, all have the policy gradient."""
    loss = getattr(f.losses, f"{name}_loss")
    options = dict(top_entropy_quantile=0.4, off_policy_mask_threshold=5.0, importance_sampling_mode="token_truncate")

    def run(targets, advantages, shift, **more):
        rows = len(targets)
        logps = {key: f.single(np.full((rows, T), value)) for key, value in shift.items()}
        return f.gradients(lambda x, w: loss(
            f.rounded(x), f.rounded(w), f.array(targets), f.single(advantages), **logps, **more), HIDDEN[:rows], WEIGHT)

    old, sampling, ref = "old_per_token_logps", "sampling_per_token_logps", "ref_per_token_logps"
    reference = dict(beta=0.1, use_bias_correction_kl=True)
    both = np.where(np.arange(2 * B) % 2, 1.0, -1.0)
    results = [
        run(TARGETS, both, {old: -300.0, sampling: -600.0, ref: 0.0}, **options, **reference),
        run(TARGETS, both, {old: 0.0, sampling: -300.0, ref: -300.0}, **reference, importance_sampling_mode="token_mask"),
        run(TARGETS, both, {old: -300.0, ref: 300.0}, **options, **reference),
        run(TARGETS[:1], both[:1], {old: -2.0, sampling: -3.0}, **options),
    ]
    nothing = run(np.full_like(TARGETS, -100), np.full(2 * B, np.nan), {old: np.nan, sampling: np.nan}, **options)
    for value, gradients in [*results, nothing]:
        assert all(np.isfinite(f.numpy(a)).all() for a in (value, *gradients))
    assert nothing[0] == 0 and not any(f.numpy(a).any() for a in nothing[1])

    # The sum over tokens of -A grad log pi, under each reduction.
    lengths = VALID.sum(-1, keepdims=True)
    share = {"dr_grpo": 1 / (2 * B * T), "luspo": 1 / (2 * B)}.get(
        name, 1 / (2 * B * lengths) if name in ("grpo", "gspo", "gmpo", "sapo") else 1 / VALID.sum())
    coefficients = f.single(np.where(VALID, -SIGNED * share, 0.0))
    _, found = run(TARGETS, ADVANTAGES, {})
    _, expected = f.gradients(lambda x, w: (coefficients * f.losses.selective_log_softmax(
        f.rounded(x), f.rounded(w), f.array(np.where(VALID, TARGETS, 0)))).sum(), HIDDEN, WEIGHT)
    for one, other in zip(found, expected):
        assert error(f.numpy(one), f.numpy(other)) < 1e-5


def test_kl_in_the_reward(f):
    old, ref = (normal(2 * B, T, seed=seed) for seed in (31, 32))
    rewards = f.array(ADVANTAGES)
    spoiled = f.array(np.where(VALID, old, np.nan).astype(np.float32))
    for estimator in ("k1", "k2", "k3"):
        each = f.numpy(f.paper.k(estimator, f.double(old), f.double(ref)))
        found = f.losses.kl_penalized_rewards(
            rewards, spoiled, f.array(ref), beta=0.3, mask=f.array(VALID), kl_estimator=estimator)
        assert error(f.numpy(found), ADVANTAGES - 0.3 * np.where(VALID, each, 0).sum(-1)) < 2e-6
    found = f.losses.kl_penalized_rewards(rewards, f.array(old), f.array(ref), beta=2.0)
    assert error(f.numpy(found), ADVANTAGES - 2 * (old - ref).sum(-1)) < 2e-6
