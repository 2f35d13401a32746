"""The losses of policies, and log-probabilities of given entries, against their papers in float64."""

import numpy as np
import pytest
from loss_frameworks import (
    ADVANTAGES, B, BIAS, CAPPED, GIVEN, HIDDEN, OLD, REF_HIDDEN, REF_WEIGHT, RNG, T, TARGETS, V, VALID, WEIGHT, error, normal,
)

AGGREGATES = {
    "grpo_loss": (0.2, 0.2, lambda f, each: f.paper.mean_of_sequences(each, f.targets)),
    "dr_grpo_loss": (0.2, 0.2, lambda f, each: f.paper.sum_of_tokens(each, f.targets) / (2 * B * T)),
    "dapo_loss": (0.2, 0.28, lambda f, each: f.paper.sum_of_tokens(each, f.targets) / f.valid.sum()),
    "ppo_loss": (0.2, 0.2, lambda f, each: f.paper.sum_of_tokens(each, f.targets) / f.valid.sum()),
}
OPTIONS = [
    {}, dict(beta=0.04), dict(entropy_coef=0.02), dict(beta=0.3, kl_estimator="k1", entropy_coef=0.01),
    dict(beta=0.3, kl_estimator="k2", delta=1.4),
]


def of_tokens(f, given, low=0.2, high=0.2, head=None, beta=0.0, kl_estimator="k3", entropy_coef=0.0, delta=None):
    logps = f.logps(given, head)
    each = f.paper.surrogate(f.xp.exp(logps - f.old), f.advantages[:, None], low, high, delta)
    each = each - entropy_coef * f.paper.entropy(f.paper.logits(*given, **(head or {})))
    return each + beta * f.paper.k(kl_estimator, logps, f.ref_logps(head)) if beta else each


@pytest.mark.parametrize("head", [{}, CAPPED], ids=["plain", "capped"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_policies_of_tokens(f, options, head):
    reference = f.reference if "beta" in options else {}

    def case(name, low, high, aggregate):
        return (
            lambda x, w, b: getattr(f.losses, name)(
                x, w, f.targets, f.advantages, b, old_per_token_logps=f.old, **reference, **options, **head),
            lambda *given: aggregate(f, of_tokens(f, given, low, high, head, **options)),
        )

    def outputs(*given):
        logps, ref = f.logps(given, head), f.ref_logps(head)
        entropy = f.paper.entropy(f.paper.logits(*given, **head))
        each = f.paper.k(options.get("kl_estimator", "k3"), logps, ref)[f.valid]
        kl = each.mean() if "beta" in options else 0 * logps[0, 0]
        return f.xp.where(f.valid, logps, 0.0), f.xp.where(f.valid, entropy, 0.0), kl

    ratio = np.exp(f.values(lambda *given: [f.logps(given, head)])[0] - OLD)[VALID]
    signs = np.broadcast_to(ADVANTAGES[:, None], VALID.shape)[VALID]
    found = f.check([case(name, *parts) for name, parts in AGGREGATES.items()])
    for one, (low, high, _) in zip(found, AGGREGATES.values()):
        f.close(one[1:4], outputs)
        assert error(f.numpy(one.clip_ratio_low), ((ratio < 1 - low) & (signs < 0)).mean()) < 1e-6
        assert error(f.numpy(one.clip_ratio_high), ((ratio > 1 + high) & (signs > 0)).mean()) < 1e-6
        assert 0 < one.clip_ratio_low < 1 and 0 < one.clip_ratio_high < 1  # the problem clips on both sides
        assert not f.numpy(one.logps)[~VALID].any() and not f.numpy(one.entropy)[~VALID].any()
    assert not f.has_gradients(lambda *given: case("grpo_loss", *AGGREGATES["grpo_loss"])[0](*given)[1:])


def test_gspo(f):
    old = f.array(np.where(VALID, OLD, 0.0).astype(np.float32))

    def case(token_level):
        advantages = f.array(normal(2 * B, T, seed=13) if token_level else ADVANTAGES)

        def expected(*given):
            logps = f.logps(given)
            ratio = f.paper.sequence_ratio(logps, old, f.targets)[:, None]
            if token_level:
                ratio = f.stopped(ratio) * f.xp.exp(logps - f.stopped(logps))
            each = f.paper.surrogate(ratio, advantages if token_level else advantages[:, None], 0.2, 0.3)
            return f.paper.mean_of_sequences(f.xp.broadcast_to(each, logps.shape) + 0.1 * f.paper.k(
                "k3", logps, f.ref_logps()), f.targets)

        return lambda x, w, b: f.losses.gspo_loss(
            x, w, f.targets, advantages, b, old_per_token_logps=f.old, epsilon_low=0.2, epsilon_high=0.3, beta=0.1,
            importance_sampling_level="sequence_token" if token_level else None, ref_per_token_logps=ref_logps), expected

    ref_logps = f.array(f.values(lambda *_: [f.ref_logps()])[0].astype(np.float64 if f.exact < 1e-9 else np.float32))
    f.check([case(False), case(True)])


def test_a_temperature_of_each_token(f):
    t = np.exp(normal(2 * B, T, seed=14, scale=0.3))

    def call(x, w, b):
        return f.losses.ppo_loss(
            x, w, f.targets, f.advantages, b, old_per_token_logps=f.old, temperature=f.array(t), beta=0.1, **f.reference)

    def expected(*given):
        logps, ref = (
            f.paper.of_targets(f.paper.log_p(f.paper.logits(*head) / f.double(t)[..., None]), f.targets)
            for head in (given, (f.double(REF_HIDDEN), f.double(REF_WEIGHT))))
        old = f.xp.where(f.valid, f.old, 0.0)
        each = f.paper.surrogate(f.xp.exp(logps - old), f.advantages[:, None], 0.2, 0.2)
        return f.paper.sum_of_tokens(each + 0.1 * f.paper.k("k3", logps, ref), f.targets) / VALID.sum()

    (found,) = f.check([(call, expected)])
    scored = f.losses.selective_log_softmax(
        *map(f.array, (HIDDEN, WEIGHT)), f.targets, f.array(BIAS), temperature=f.array(t))
    assert error(f.numpy(scored), f.numpy(found.logps)) < f.exact


def test_masks_and_normalizers(f):
    everywhere = f.array(np.where(VALID, TARGETS, 3))
    tokens = lambda *given: f.paper.sum_of_tokens(of_tokens(f, given), f.targets)  # noqa: E731
    sequences = lambda *given: f.paper.mean_of_sequences(of_tokens(f, given), f.targets)  # noqa: E731

    def call(name, **more):
        return lambda x, w, b: getattr(f.losses, name)(
            x, w, everywhere, f.advantages, b, old_per_token_logps=f.old, mask=f.array(VALID.astype(np.int32)), **more)

    def on_policy(*given):
        logps = f.logps(given)
        ratio = f.xp.exp(logps - f.stopped(logps))
        return f.paper.mean_of_sequences(-ratio * f.advantages[:, None], f.targets)

    f.check([
        (call("ppo_loss", normalizer=f.array(np.float32(64.0))), lambda *given: tokens(*given) / 64),
        (call("dr_grpo_loss", max_completion_length=50), lambda *given: tokens(*given) / (2 * B * 50)),
        (call("grpo_loss", normalizer=4), lambda *given: sequences(*given) * 2 * B / 4),
        (lambda x, w, b: f.losses.grpo_loss(x, w, f.targets, f.advantages, b), on_policy),
    ])
    nothing = f.array(np.full_like(TARGETS, -100))
    empty, gradients = f.gradients(lambda x, w: f.losses.grpo_loss(x, w, nothing, f.advantages), HIDDEN, WEIGHT)
    assert empty == 0 and not any(f.numpy(g).any() for g in gradients)


def test_numbers_that_are_none_or_too_large(f):
    """Advantages of ignored tokens have no effect, and ratios that overflow give no NaN."""
    x, w = f.single(HIDDEN), f.single(WEIGHT)
    ones = np.ones(VALID.shape, np.float32)
    nonsense = np.where(VALID, ones, np.nan).astype(np.float32)
    for loss in (f.losses.grpo_loss, f.losses.dapo_loss, f.losses.dr_grpo_loss):
        exact, found = (f.numpy(loss(x, w, f.targets, f.single(a)).loss) for a in (ones, nonsense))
        assert np.isfinite(found) and found == exact
    old = f.single(np.full(VALID.shape, -200.0))
    for loss in (f.losses.grpo_loss, f.losses.gspo_loss):
        found, gradients = f.gradients(lambda x, w: loss(
            f.rounded(x), f.rounded(w), f.targets, f.single(np.ones(2 * B)), old_per_token_logps=old, delta=3.0),
            HIDDEN, WEIGHT)
        assert all(np.isfinite(f.numpy(a)).all() for a in (found, *gradients))


def test_group_advantages(f):
    rewards = f.array(np.float32([1.0, 2.0, 6.0, 5.0, 5.0, 5.0]))
    apart = np.array([-2.0, -1.0, 3.0, 0.0, 0.0, 0.0])
    exact = min(f.exact, 1e-6)
    assert np.array_equal(f.numpy(f.losses.group_advantages(rewards, 3, scale=False)), apart)
    assert error(f.numpy(f.losses.group_advantages(rewards, 3, epsilon=0.0)[:3]), apart[:3] / 7**0.5) < exact
    spread = np.std([1.0, 2.0, 6.0, 5.0, 5.0, 5.0], ddof=1)
    assert error(f.numpy(f.losses.group_advantages(rewards, 3, scale="batch", epsilon=0.5)), apart / (spread + 0.5)) < exact
    strided = f.xp.stack([rewards, rewards], 1)[:, 0] if f.target == "target" else rewards
    assert np.array_equal(f.numpy(f.losses.group_advantages(strided, 3, scale=False)), apart)


@pytest.mark.parametrize("shape", [(2 * B, T), (2 * B, T, 3)], ids=["one", "several"])
def test_selective_log_softmax(f, shape):
    index = RNG(8).integers(0, V, shape).astype(np.int32)
    each = f.array(index.reshape(2 * B, T, -1))

    def expected(*given):
        log_p = f.log_p(given, CAPPED)
        return f.xp.stack([f.paper.of_targets(log_p, each[..., k]) for k in range(each.shape[-1])], -1).reshape(shape)

    call = lambda x, w, b: f.losses.selective_log_softmax(x, w, f.array(index), b, **CAPPED)  # noqa: E731
    f.check([(lambda *given: call(*given).sum(), lambda *given: expected(*given).sum())])
    f.close([call(*map(f.array, GIVEN))], lambda *given: [expected(*given)])
