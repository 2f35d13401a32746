"""The ready-made losses against their papers in float64, values and gradients, under jit."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_oracle import ON_CPU, enable_x64, relative_error
from paper_losses import Papers

from logitless import _library as library
from logitless._autochunk.native import Machine
from logitless.jax import losses
from logitless.jax._autochunk import native
from logitless.jax.losses import distillation

B, T, D, V = 3, 6, 5, 23
PAPER = Papers(jnp)
HEAD = dict(softcap=4.0, logit_scale=0.7, temperature=1.3)
RNG = np.random.default_rng


def normal(*shape, seed, scale=1.0):
    return RNG(seed).normal(size=shape).astype(np.float32) * np.float32(scale)


HIDDEN, WEIGHT, BIAS = normal(2 * B, T, D, seed=1), normal(V, D, seed=2), normal(V, seed=3, scale=0.3)
REF_HIDDEN, REF_WEIGHT = normal(2 * B, T, D + 2, seed=4), normal(V, D + 2, seed=5, scale=0.7)
TARGETS = RNG(6).integers(0, V, (2 * B, T)).astype(np.int32)
TARGETS[:, :1], TARGETS[1::2, -1:] = -100, -100
VALID = TARGETS >= 0
ADVANTAGES = normal(2 * B, seed=7)
OLD = np.where(VALID, -3.0 - np.abs(normal(2 * B, T, seed=8)), np.nan).astype(np.float32)
REFERENCE = dict(ref_hidden=REF_HIDDEN, ref_weight=REF_WEIGHT)


def check(cases, tolerance=1e-5):
    """Checks cases: pairs of call(hidden, weight, bias) and the paper's formula of the same in float64. A call returns
    the loss or a tuple that begins with it. All are compiled as one program, and the gradients are those of a sum in
    which each has its own weight. Returns the results of the calls."""
    calls, papers = zip(*cases)
    shares = [1.0 + 0.37 * i for i in range(len(cases))]

    def total(functions, given):
        found = [f(*given) for f in functions]
        values = [f[0] if isinstance(f, tuple) else f for f in found]
        return sum(share * value for share, value in zip(shares, values)), (values, found)

    def run(functions, arrays):
        step = jax.value_and_grad(lambda *given: total(functions, given), (0, 1, 2), has_aux=True)
        return jax.jit(step)(*arrays)

    with enable_x64(True):
        (_, (wanted, _)), exact = run(papers, [jnp.asarray(a, jnp.float64) for a in (HIDDEN, WEIGHT, BIAS)])
        wanted, exact = [float(w) for w in wanted], [np.asarray(g) for g in exact]
    (_, (values, found)), gradients = run(calls, (HIDDEN, WEIGHT, BIAS))
    for value, want in zip(values, wanted):
        assert abs(float(value) - want) <= tolerance * abs(want)
    for one, other in zip(gradients, exact):
        assert relative_error(one, other) <= 5 * tolerance
    return found


def logps(hidden, weight, bias, head=None):
    return PAPER.of_targets(PAPER.log_p(PAPER.logits(hidden, weight, bias, **(head or {}))), TARGETS)


def ref_logps(head=None):
    return logps(jnp.asarray(REF_HIDDEN, float), jnp.asarray(REF_WEIGHT, float), None, head)


def pairs(given, average=False, head=None, reference=True):
    """Returns r_w, r_l (or log pi of the two, without a reference) and the NLL of the chosen tokens."""
    own = logps(*given, head)
    apart = PAPER.sequence(own - ref_logps(head) if reference else own, TARGETS, average)
    return apart[:B], apart[B:], -own[:B].sum() / VALID[:B].sum()


KINDS = dict.fromkeys(("sigmoid", "robust", "exo_pair"), 0.1) | dict.fromkeys(
    ("hinge", "ipo", "nca_pair", "sppo_hard", "apo_zero", "apo_down"), 0.0
)


def test_dpo():
    def case(kind, e):
        return (
            lambda x, w, b: losses.dpo_loss(
                x, w, TARGETS, b, **REFERENCE, beta=0.3, loss_type=kind, label_smoothing=e, **HEAD),
            lambda *given: PAPER.dpo(kind, *pairs(given, head=HEAD)[:2], 0.3, e),
        )

    for found in check([case(*kind) for kind in KINDS.items()]):
        assert np.allclose(found.margins, found.chosen_rewards - found.rejected_rewards, rtol=1e-6)
        assert np.array_equal(found.accuracies, found.margins > 0)


def test_other_preferences():
    good = np.arange(2 * B) % 3 > 0
    given = np.full(2 * B, -3.0, np.float32)

    def simpo(*arrays):
        c, r, nll = pairs(arrays, average=True, reference=False)
        return PAPER.simpo(c, r, 2.0, 0.8, 0.1) + 0.5 * nll

    def cpo(*arrays):
        c, r, nll = pairs(arrays, reference=False)
        return PAPER.dpo("sigmoid", c, r, 0.1) + nll

    check([
        (
            lambda x, w, b: losses.ipo_loss(x, w, TARGETS, b, **REFERENCE, beta=0.2),
            lambda *arrays: PAPER.dpo("ipo", *pairs(arrays, average=True)[:2], 0.2),
        ),
        (
            lambda x, w, b: losses.dpo_loss(
                x, w, TARGETS, b, ref_chosen_logps=given[:B], ref_rejected_logps=given[B:] - 1, loss_type="sppo_hard"),
            lambda *arrays: PAPER.dpo(
                "sppo_hard", *(x + o for x, o in zip(pairs(arrays, reference=False)[:2], (3.0, 4.0))), 0.1),
        ),
        (
            lambda x, w, b: losses.simpo_loss(x, w, TARGETS, b, beta=2.0, gamma=0.8, label_smoothing=0.1, alpha=0.5),
            simpo,
        ),
        (lambda x, w, b: losses.cpo_loss(x, w, TARGETS, b), cpo),
        (
            lambda x, w, b: losses.orpo_loss(x, w, TARGETS, b, beta=0.4),
            lambda *arrays: PAPER.orpo(*pairs(arrays, average=True, reference=False), 0.4),
        ),
        (
            lambda x, w, b: losses.kto_loss(
                x, w, TARGETS, good, b, **REFERENCE, kl=jnp.float32(0.75), beta=0.3, desirable_weight=1.5),
            lambda *arrays: PAPER.kto(PAPER.sequence(logps(*arrays) - ref_logps(), TARGETS), good, 0.75, 0.3, 1.5),
        ),
    ])


def test_kinds_of_dpo_that_look_at_the_batch():
    def case(kind, paper, **options):
        return (
            lambda x, w, b: losses.dpo_loss(x, w, TARGETS, b, **REFERENCE, beta=0.3, loss_type=kind, **options),
            lambda *given: paper(*pairs(given)[:2], given),
        )

    def aot(r_w, r_l, given):
        c, r, _ = pairs(given, reference=False)
        return PAPER.aot(c - r, (c - r_w) - (r - r_l), 0.3, 0.1)

    def of_mean(r_w, r_l, _):
        return PAPER.bco(r_w, r_l, 0.3, 0.3 * jax.lax.stop_gradient(jnp.concatenate([r_w, r_l]).mean()))

    check([
        case("bco_pair", of_mean),
        case("bco_pair", lambda r_w, r_l, _: PAPER.bco(r_w, r_l, 0.3, 0.75), bco_delta=jnp.float32(0.75)),
        case("aot", aot, label_smoothing=0.1),
        case("aot_pair", lambda r_w, r_l, _: PAPER.aot(r_w, r_l, 0.3)),
        case("aot_unpaired", lambda r_w, r_l, _: PAPER.aot(r_w, r_l, 0.3, 0.2), label_smoothing=0.2),
        case("discopop", lambda r_w, r_l, _: PAPER.discopop(r_w, r_l, 0.3, 0.05)),
        case("discopop", lambda r_w, r_l, _: PAPER.discopop(r_w, r_l, 0.3, 0.4), discopop_tau=0.4),
    ])
    far = jax.value_and_grad(lambda w: losses.dpo_loss(  # exp(-x) is infinite, g 0
        HIDDEN, w, TARGETS, loss_type="discopop", ref_chosen_logps=np.full(B, 3000.0, np.float32),
        ref_rejected_logps=np.zeros(B, np.float32)).loss)(WEIGHT)
    assert 250 < far[0] < 350 and np.isfinite(far[1]).all()


def test_the_nll_of_other_targets_and_sequences_without_one():
    others = np.random.default_rng(12).integers(0, V, (2 * B, T)).astype(np.int32)
    others[1, 2:] = -100
    empty = TARGETS.copy()
    empty[B + 1] = -100

    def nll(given):
        log_p = PAPER.log_p(PAPER.logits(*given))
        return -PAPER.of_targets(log_p[:B], others[:B]).sum() / (others[:B] >= 0).sum()

    def orpo(*given):
        c, r, _ = pairs(given, average=True, reference=False)
        return PAPER.orpo(c, r, nll(given), 0.4)

    def cpo(*given):
        c, r, _ = pairs(given, reference=False)
        return PAPER.dpo("sigmoid", c, r, 0.1) + 0.6 * nll(given)

    def of_others(*given):
        c, r, plain = pairs(given, average=True, reference=False)
        left = np.arange(B) != 1
        return plain + (PAPER.orpo(c[left], r[left], plain, 0.4) - plain) * (B - 1) / B

    moved = np.concatenate([np.full((2 * B, 1), 7), others], 1), np.concatenate([np.full((2 * B, 1), 7), TARGETS], 1)
    found = check([
        (lambda x, w, b: losses.orpo_loss(x, w, TARGETS, b, beta=0.4, nll_target=others), orpo),
        (lambda x, w, b: losses.orpo_loss(
            jnp.concatenate([x, HIDDEN[:, :1]], 1), w, moved[1], b, beta=0.4, nll_target=moved[0][:B], shift=True), orpo),
        (lambda x, w, b: losses.cpo_loss(x, w, TARGETS, b, alpha=0.6, nll_target=others[:B].astype("int16")), cpo),
        (lambda x, w, b: losses.orpo_loss(x, w, empty, b, beta=0.4), of_others),
    ])
    assert np.allclose(found[0].nll_loss, found[2].nll_loss) and abs(found[0].nll_loss - found[3].nll_loss) > 1e-3


def test_shift_and_a_shared_head():
    moved = np.concatenate([TARGETS[:, 1:], np.full((2 * B, 1), -100)], 1)
    own = normal(2 * B, T, D, seed=9)
    options = dict(ref_hidden=own, loss_type="sppo_hard")
    shifted = losses.dpo_loss(HIDDEN, WEIGHT, TARGETS, BIAS, shift=True, **options).loss
    same = losses.dpo_loss(HIDDEN, WEIGHT, moved, BIAS, ref_weight=WEIGHT, ref_bias=BIAS, **options).loss
    assert shifted == same


def test_divergence_of_kto():
    reference = np.full(2 * B, -30.0)
    kl, gradient = jax.value_and_grad(lambda w: losses.kto_kl(HIDDEN, w, TARGETS, BIAS, ref_logps=reference))(WEIGHT)
    alone = losses.selective_log_softmax(HIDDEN, WEIGHT, TARGETS, BIAS).sum(-1).mean() + 30.0
    assert kl > 0 and abs(float(kl - alone)) <= 1e-5 * float(alone) and not gradient.any()


def of_tokens(given, low, high, beta=0.0, estimator="k3", entropy=0.0, delta=None, head=None):
    own = logps(*given, head)
    each = PAPER.surrogate(jnp.exp(own - OLD), ADVANTAGES[:, None], low, high, delta)
    each = each - entropy * PAPER.entropy(PAPER.logits(*given, **(head or {})))
    return each + beta * PAPER.k(estimator, own, ref_logps(head)) if beta else each


POLICIES = {
    "grpo_loss": (0.2, 0.2, {}, lambda each: PAPER.mean_of_sequences(each, TARGETS)),
    "dr_grpo_loss": (0.2, 0.2, dict(beta=0.04), lambda each: PAPER.sum_of_tokens(each, TARGETS) / (2 * B * T)),
    "dapo_loss": (0.2, 0.28, dict(delta=1.5), lambda each: PAPER.sum_of_tokens(each, TARGETS) / VALID.sum()),
    "ppo_loss": (0.2, 0.2, dict(beta=0.3, kl_estimator="k2", entropy_coef=0.02, head=HEAD),
                 lambda each: PAPER.sum_of_tokens(each, TARGETS) / VALID.sum()),
}


def policy_case(name):
    low, high, options, aggregate = POLICIES[name]
    renamed = {dict(kl_estimator="estimator", entropy_coef="entropy").get(k, k): v for k, v in options.items()}
    given = {k: v for k, v in options.items() if k != "head"} | options.get("head", {})
    reference = REFERENCE if "beta" in options else {}
    return (
        lambda x, w, b: getattr(losses, name)(
            x, w, TARGETS, ADVANTAGES, b, old_per_token_logps=OLD, **reference, **given),
        lambda *arrays: aggregate(of_tokens(arrays, low, high, **renamed)),
    )


def gspo_case(token_level):
    advantages = normal(2 * B, T, seed=13) if token_level else ADVANTAGES
    old = np.where(VALID, OLD, 0.0)

    def expected(*given):
        own = logps(*given)
        ratio = PAPER.sequence_ratio(own, old, TARGETS)[:, None]
        if token_level:
            ratio = jax.lax.stop_gradient(ratio) * jnp.exp(own - jax.lax.stop_gradient(own))
        each = PAPER.surrogate(ratio, advantages if token_level else advantages[:, None], 0.2, 0.3)
        return PAPER.mean_of_sequences(jnp.broadcast_to(each, own.shape), TARGETS)

    return (
        lambda x, w, b: losses.gspo_loss(
            x, w, TARGETS, advantages, b, old_per_token_logps=OLD, epsilon_low=0.2, epsilon_high=0.3,
            token_level=token_level),
        expected,
    )


def test_policies():
    everywhere = np.where(VALID, TARGETS, 3)
    masked = lambda x, w, b: losses.grpo_loss(
        x, w, everywhere, ADVANTAGES, b, old_per_token_logps=OLD, mask=VALID, normalizer=jnp.float32(4 * B))
    cases = [policy_case(name) for name in POLICIES] + [gspo_case(False), gspo_case(True)]
    found = check([*cases, (masked, lambda *given: cases[0][1](*given) / 2)])
    for f in found[:4]:
        assert 0 < f.clip_ratio_low < 1 and 0 < f.clip_ratio_high < 1
        assert not np.asarray(f.logps)[~VALID].any() and not np.asarray(f.entropy)[~VALID].any()


def test_group_advantages():
    rewards = jnp.asarray([1.0, 2.0, 6.0, 5.0, 5.0, 5.0])
    apart = np.array([-2.0, -1.0, 3.0, 0.0, 0.0, 0.0])
    assert np.array_equal(losses.group_advantages(rewards, 3, scale=False), apart)
    assert np.allclose(losses.group_advantages(rewards, 3, epsilon=0.0)[:3], apart[:3] / 7**0.5, rtol=1e-6)
    with pytest.raises(TypeError, match="rewards: expected float32, bfloat16 or float16, got int32"):
        losses.group_advantages(jnp.arange(4), 2)


# --- Distillation.


def flat(given):
    hidden, weight, bias = given
    student = lambda t=1.0, **head: PAPER.logits(hidden, weight, bias, temperature=t, **head)
    teacher = lambda t=1.0: PAPER.logits(jnp.asarray(REF_HIDDEN, float), jnp.asarray(REF_WEIGHT, float), temperature=t)
    return student, teacher


def test_distillation():
    def forward(*given):
        student, teacher = flat(given)
        soft = PAPER.kl(teacher(2.0), student(2.0, softcap=4.0))
        each = 3.0 * soft - 0.5 * PAPER.of_targets(PAPER.log_p(student(softcap=4.0)), TARGETS)
        return jnp.where(VALID, each, 0.0).sum() / VALID.sum()

    def jsd(*given):
        student, teacher = flat(given)
        return PAPER.jsd(student(), teacher(), 0.3).sum() / 7

    def reverse(*given):
        student, teacher = flat(given)
        return (jnp.where(VALID, PAPER.kl(student(), teacher()), 0.0) * ADVANTAGES[:, None]).sum()

    best = losses.teacher_top_k(REF_HIDDEN, REF_WEIGHT, k=6, temperature=1.3)
    vocab_ids = np.argsort(-(REF_HIDDEN @ REF_WEIGHT.T), -1, kind="stable")[..., :6]
    assert np.array_equal(best.vocab_ids, vocab_ids)

    def top_k(tail, factor):
        def expected(*given):
            student, teacher = flat(given)
            each = PAPER.top_k(student(1.3), teacher(1.3), vocab_ids, tail)
            return (jnp.where(VALID, each, 0.0) * factor).sum()

        return expected

    check([
        (
            lambda x, w, b: losses.forward_kl_loss(
                x, w, REF_HIDDEN, REF_WEIGHT, b, targets=TARGETS, temperature=2.0, softcap=4.0, weight_hard_loss=0.5,
                weight_soft_loss=3.0),
            forward,
        ),
        (lambda x, w, b: losses.jsd_loss(x, w, REF_HIDDEN, REF_WEIGHT, b, beta=0.3, normalizer=7), jsd),
        (
            lambda x, w, b: (losses.reverse_kl_loss(
                x, w, REF_HIDDEN, REF_WEIGHT, b, targets=TARGETS, reduction="none") * ADVANTAGES[:, None]).sum(),
            reverse,
        ),
        (
            lambda x, w, b: losses.top_k_loss(x, w, best, b, targets=TARGETS, temperature=1.3),
            top_k(False, 1 / VALID.sum()),
        ),
        (
            lambda x, w, b: losses.top_k_loss(x, w, best, b, tail=True, targets=TARGETS, temperature=1.3),
            top_k(True, 1 / VALID.sum()),
        ),
        (
            lambda x, w, b: (losses.top_k_loss(
                x, w, best, b, targets=TARGETS, temperature=1.3, reduction="none") * ADVANTAGES[:, None]).sum(),
            top_k(False, ADVANTAGES[:, None]),
        ),
    ])


# --- All losses.


def test_memory_is_within_the_budget():
    """Measures XLA's temporaries of bf16 losses and gradients by hidden and weight; logits would be 4 MiB."""
    rows, dim, vocab = 256, 16, 4096
    shapes = ((4, rows // 4, dim), (vocab, dim))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes] * 2
    vocab_ids = np.zeros((4, rows // 4), np.int32)
    gradients = 2 * (rows + vocab) * dim

    def temporaries(loss):
        step = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arrays).compile()
        return step.memory_analysis().temp_size_in_bytes

    budget = 3 << 19
    text = losses.explain_divergence(*arrays, memory_budget=budget)
    assert "1.5 MiB, met)" in text and "forward_and_gradients" in text
    for loss in (
        lambda x, w, *teacher: losses.jsd_loss(x, w, *teacher, memory_budget=budget),
        lambda x, w, t, _: losses.dpo_loss(x, w, vocab_ids, ref_hidden=t, memory_budget=budget).loss,
    ):
        assert temporaries(loss) < budget + 2 * gradients + (1 << 17) < 4 * rows * vocab


@pytest.mark.parametrize("dim", [2048, 4096])
def test_half_of_ligers_memory_takes_six_products(monkeypatch, dim):
    """Plans 8192 tokens and 128256 vocabulary entries for a GPU, without one; no gradient has a copy in float32."""
    machine = Machine(library.DEVICE_CUDA, 90, threads=0, head_engine=True)
    monkeypatch.setattr(native, "default_machine", lambda: machine)
    monkeypatch.setattr(distillation, "_chunked", functools.lru_cache(distillation._chunked.__wrapped__))
    arrays = [jax.ShapeDtypeStruct((rows, dim), jnp.bfloat16) for rows in (8192, 128256)] * 2
    text = losses.explain_divergence(*arrays, memory_budget="465MiB")
    assert "(budget 465.0 MiB, met)" in text and text.count("1 phase, 50.0 % more multiply-adds") == 2, text
    taken = re.search(r"without loops, ([0-9.]+) GiB with", losses.explain_divergence(*arrays))
    assert float(taken[1]) < 1.3 + 4 * 128256 * dim / 2**30


@pytest.mark.skipif(not ON_CPU, reason="batch_invariant is refused on a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_whatever_the_batch(dtype):
    hidden = np.asarray(jnp.asarray(normal(40, 33, seed=1), dtype))
    weight = np.asarray(jnp.asarray(normal(9001, 33, seed=2, scale=0.4), dtype))
    index = RNG(3).integers(0, 9001, 40).astype(np.int32)

    def scored(rows):
        return np.asarray(losses.selective_log_softmax(hidden[rows], weight, index[rows], batch_invariant=True))

    together = scored(np.arange(40))
    for rows in ([7], RNG(4).permutation(40)[:17]):
        assert np.array_equal(scored(np.asarray(rows)), together[np.asarray(rows)])


def dpo(**options):
    return losses.dpo_loss(HIDDEN, WEIGHT, TARGETS, **options)


def grpo(**options):
    return losses.grpo_loss(HIDDEN, WEIGHT, TARGETS, np.zeros(6, np.float32), **options)


def jsd(**options):
    return losses.jsd_loss(HIDDEN, WEIGHT, REF_HIDDEN, REF_WEIGHT, **options)


BAD = {
    "hidden: expected \\[B, T, D\\]": lambda: losses.orpo_loss(HIDDEN[0], WEIGHT, TARGETS[0]),
    "hidden: expected \\[2 B, T, D\\]": lambda: losses.orpo_loss(HIDDEN[:3], WEIGHT, TARGETS[:3]),
    "the chosen .* the rejected ones, got \\[0, 6, 5\\]": lambda: losses.orpo_loss(HIDDEN[:0], WEIGHT, TARGETS[:0]),
    "targets: expected \\[6, 6\\]": lambda: losses.orpo_loss(HIDDEN, WEIGHT, TARGETS[:, 1:]),
    "beta: expected a number above 0": lambda: dpo(**REFERENCE, beta=0.0),
    "loss_type: expected one of": lambda: dpo(**REFERENCE, loss_type="bco"),
    "bco_delta: expected None with loss_type 'aot', got 0.5": lambda: dpo(**REFERENCE, loss_type="aot", bco_delta=0.5),
    "discopop_tau: expected a number above 0": lambda: dpo(**REFERENCE, loss_type="discopop", discopop_tau=0),
    "nll_target: expected \\[6, 6\\] or \\[3, 6\\]": lambda: losses.orpo_loss(HIDDEN, WEIGHT, TARGETS, nll_target=TARGETS[:2]),
    "ref_chosen_logps: expected it with": lambda: dpo(),
    "ref_chosen_logps: expected \\[3\\]": lambda: dpo(ref_chosen_logps=np.zeros(2), ref_rejected_logps=np.zeros(3)),
    "ref_hidden: expected \\[6, 6, 'D'\\]": lambda: dpo(ref_hidden=REF_HIDDEN[1:]),
    "ref_weight: expected \\[23, D\\]": lambda: dpo(ref_hidden=REF_HIDDEN, ref_weight=REF_WEIGHT[1:]),
    "kl: expected a number": lambda: losses.kto_loss(HIDDEN, WEIGHT, TARGETS, np.ones(6, bool), **REFERENCE),
    "advantages: expected \\[6\\] or \\[6, 6\\]": lambda: losses.ppo_loss(HIDDEN, WEIGHT, TARGETS, np.zeros(5)),
    "advantages: expected \\[6\\], got \\[6, 6\\]": lambda: losses.gspo_loss(HIDDEN, WEIGHT, TARGETS, np.zeros((6, 6), np.float32)),
    "ref_per_token_logps: expected it or": lambda: grpo(beta=0.1),
    "normalizer: expected a number above 0": lambda: grpo(normalizer=0),
    "temperature: expected a number above 0": lambda: grpo(temperature=0.0),
    "teacher_weight: expected \\[23, D\\]": lambda: losses.jsd_loss(HIDDEN, WEIGHT, REF_HIDDEN, REF_WEIGHT[1:]),
    "teacher_hidden: expected \\[6, 6, 'D'\\]": lambda: losses.jsd_loss(HIDDEN, WEIGHT, REF_HIDDEN[1:], REF_WEIGHT),
    "targets: expected it with weight_hard_loss": lambda: jsd(weight_hard_loss=1.0),
    "reduction: expected one of": lambda: jsd(reduction="batchmean"),
    "k: expected at most 23": lambda: losses.teacher_top_k(REF_HIDDEN, REF_WEIGHT, k=24),
    "top_k.vocab_ids: expected": lambda: losses.top_k_loss(HIDDEN, WEIGHT, losses.TopK(TARGETS, TARGETS)),
    "index: expected \\[6, 6\\]": lambda: losses.selective_log_softmax(HIDDEN, WEIGHT, TARGETS[1:]),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()


def test_what_is_no_number_at_ignored_tokens_counts_for_nothing():
    hidden, teacher = HIDDEN.copy(), REF_HIDDEN.copy()
    hidden[~VALID], teacher[~VALID] = np.nan, np.inf
    call = lambda h, t: losses.jsd_loss(h, WEIGHT, t, REF_WEIGHT, targets=TARGETS)  # noqa: E731
    found = jax.value_and_grad(call)(hidden, teacher)
    for f, e in zip(found, jax.value_and_grad(call)(HIDDEN, REF_HIDDEN)):
        assert np.array_equal(f, e)
    advantages = np.where(VALID, 1.0, np.nan).astype(np.float32)
    assert np.isfinite(losses.grpo_loss(HIDDEN, WEIGHT, TARGETS, advantages).loss)
    old = np.full(TARGETS.shape, -200.0, np.float32)
    far = lambda h: losses.grpo_loss(  # noqa: E731
        h, WEIGHT, TARGETS, np.ones(2 * B, np.float32), old_per_token_logps=old, delta=3.0).loss
    assert all(np.isfinite(f).all() for f in jax.value_and_grad(far)(HIDDEN))


def test_a_bad_target_gives_nan():
    vocab_ids = np.where(VALID, TARGETS, V)
    assert np.isnan(jsd(targets=vocab_ids)) and not np.isnan(jsd(targets=TARGETS))


def test_the_example_of_the_document_runs():
    page = Path(__file__).parents[3] / "docs/ready_losses.md"
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) if "logitless.jax" in c]
    space = dict(hidden=HIDDEN, weight=WEIGHT, targets=TARGETS, ref_hidden=REF_HIDDEN, ref_weight=REF_WEIGHT)
    exec(code, space)
    assert space["value"] > 0 and space["gradients"][1].shape == WEIGHT.shape
