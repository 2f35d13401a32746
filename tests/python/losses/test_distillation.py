"""Distillation from a teacher's head against the papers, in float64."""

import re
from pathlib import Path

import numpy as np
import pytest
from loss_frameworks import (
    ADVANTAGES, B, BIAS, GIVEN, HIDDEN, REF_HIDDEN, REF_WEIGHT, T, V, VALID, WEIGHT, normal,
)

TEACHER_BIAS = normal(V, seed=16, scale=0.3)


def teacher(f):
    return f.array(REF_HIDDEN), f.array(REF_WEIGHT)


def logits(f, given, temperature=1.0, head=None, teacher_head=None):
    """Returns the logits of the student and the teacher."""
    z = f.paper.logits(*given, temperature=temperature, **(head or {}))
    heads = map(f.double, (REF_HIDDEN, REF_WEIGHT, TEACHER_BIAS))
    return z, f.paper.logits(*heads, temperature=temperature, **(teacher_head or {}))


def reduced(f, each, reduction, counts=None):
    """Returns the losses of tokens as a number; those of "none" with a weight for each sequence."""
    each = each if counts is None else f.xp.where(counts, each, 0.0)
    if reduction == "none":
        return (each * f.array(ADVANTAGES)[:, None]).sum()
    return each.sum() / (1 if reduction == "sum" else B * 2 * T if counts is None else counts.sum())


def test_divergences(f):
    def case(beta, reduction, hard, head):
        others = dict(teacher_softcap=5.0, teacher_logit_scale=1.2) if "logit_scale" in head else {}
        own = {name: head[name] for name in head if name != "temperature"}
        of_teacher = {name.removeprefix("teacher_"): value for name, value in others.items()}

        def call(x, w, b):
            found = f.losses.jsd_loss(
                x, w, *teacher(f), b, f.array(TEACHER_BIAS), beta=beta, targets=f.targets, reduction=reduction,
                weight_hard_loss=hard, weight_soft_loss=1.0 - hard, **head, **others)
            return reduced(f, found, reduction) if reduction == "none" else found

        def expected(*given):
            z_p, z_q = logits(f, given, head.get("temperature", 1.0), own, of_teacher)
            formulas = {0.0: lambda: f.paper.kl(z_q, z_p), 1.0: lambda: f.paper.kl(z_p, z_q)}
            each = (1.0 - hard) * formulas.get(beta, lambda: f.paper.jsd(z_p, z_q, beta))()
            plain = f.paper.log_p(logits(f, given, 1.0, own)[0])
            return reduced(f, each - hard * f.paper.of_targets(plain, f.targets), reduction, f.valid)

        return call, expected

    def normalized(name, normalizer, formula):
        return (
            lambda x, w, b: getattr(f.losses, name)(x, w, *teacher(f), b, f.array(TEACHER_BIAS), normalizer=normalizer),
            lambda *given: formula(*logits(f, given)).sum() / 7,
        )

    f.check([
        case(0.0, "mean", 0.5, {}), case(0.0, "mean", 0.25, dict(temperature=2.0, softcap=4.0)),
        case(1.0, "sum", 0.0, dict(temperature=2.0)), case(1.0, "none", 0.0, {}), case(0.3, "none", 0.0, {}),
        case(0.5, "mean", 0.25, dict(temperature=1.5, softcap=3.0, logit_scale=0.8)),
        normalized("forward_kl_loss", f.array(np.float32(7.0)), lambda p, q: f.paper.kl(q, p)),
        normalized("reverse_kl_loss", 7, lambda p, q: f.paper.kl(p, q)),
    ])


IDS = np.array([(5 * j) % V if j % 4 else -1 for j in range(V)], np.int32)  # the teacher has no entry for some
WIDE, WIDE_BIAS = normal(V + 4, REF_WEIGHT.shape[1], seed=17), normal(V + 4, seed=18, scale=0.3)


def test_total_variation_and_vocabularies(f):
    """Divergences with a teacher of another vocabulary, and the total variation."""
    def total_variation(z_p, z_q):
        p, q = (f.xp.exp(f.paper.log_p(z)) for z in (z_p, z_q))
        return abs(p - q).sum(-1) / 2

    def of_ids(name, formula, ids, options, temperature=1.0):
        def call(x, w, b):
            return getattr(f.losses, name)(
                x, w, f.array(REF_HIDDEN), f.array(WIDE), b, f.array(WIDE_BIAS), teacher_ids=f.array(ids),
                targets=f.targets, temperature=temperature, **options)

        def expected(*given):
            z_p = logits(f, given, temperature)[0]
            z_q = f.paper.logits(*map(f.double, (REF_HIDDEN, WIDE[ids], WIDE_BIAS[ids])), temperature=temperature)
            z_q = f.xp.where(f.array(ids >= 0), z_q, -600.0)  # no exponential of it is a number
            return reduced(f, formula(z_p, z_q), "mean", f.valid)

        return call, expected

    def kl(z_p, z_q):
        log_p, log_q = f.paper.log_p(z_p), f.paper.log_p(z_q)
        return (f.xp.exp(log_q) * (log_q - log_p)).sum(-1)

    def plain(reduction):
        def call(x, w, b):
            found = f.losses.total_variation_loss(
                x, w, *teacher(f), b, f.array(TEACHER_BIAS), reduction=reduction, temperature=1.3)
            return reduced(f, found, reduction) if reduction == "none" else found

        return call, lambda *given: reduced(f, total_variation(*logits(f, given, 1.3)), reduction)

    draft = np.where(IDS < 0, 2, IDS)
    f.check([
        plain("mean"), plain("none"), of_ids("total_variation_loss", total_variation, IDS, {}),
        of_ids("forward_kl_loss", kl, IDS, {}, 1.3), of_ids("jsd_loss", lambda p, q: f.paper.jsd(p, q, 0.5), draft, {}),
        of_ids("reverse_kl_loss", lambda p, q: f.paper.kl(p, q), draft, {}),
    ])
    equal = f.losses.total_variation_loss(*map(f.array, (HIDDEN, WEIGHT, HIDDEN, WEIGHT)))
    assert abs(f.numpy(equal)) < 1e-6


def test_the_students_top_k(f):
    (log_p,) = f.values(lambda *given: [f.paper.log_p(logits(f, given, 1.3)[0])])
    vocab_ids = np.argsort(-log_p, -1, kind="stable")[..., :6]

    def case(tail, reduction):
        def call(x, w, b):
            loss = f.losses.student_top_k_loss(
                x, w, *teacher(f), b, f.array(TEACHER_BIAS), k=6, tail=tail, targets=f.targets, reduction=reduction,
                temperature=1.3)
            return reduced(f, loss, reduction) if reduction == "none" else loss

        # The loss of the other's top K with both models in each other's place.
        return call, lambda *given: reduced(
            f, f.paper.top_k(*logits(f, given, 1.3)[::-1], f.array(vocab_ids), tail), reduction, f.valid)

    f.check([case(tail, reduction) for tail in (False, True) for reduction in ("mean", "none")])
    every = f.losses.student_top_k_loss(*map(f.array, (HIDDEN, WEIGHT, REF_HIDDEN, REF_WEIGHT)), k=V)
    f.close([every], lambda x, w, b: [
        f.paper.kl(f.paper.logits(x, w), f.paper.logits(*map(f.double, (REF_HIDDEN, REF_WEIGHT)))).mean()],
        max(f.exact, 1e-6))


@pytest.mark.parametrize("message, call", {
    "teacher_ids: expected [23], got [22]": lambda f, x, w: f.losses.jsd_loss(x, w, x, w, teacher_ids=f.array(IDS[1:])),
    "teacher_ids: expected int32 or int64": lambda f, x, w: f.losses.jsd_loss(x, w, x, w, teacher_ids=w[:, 0]),
    "teacher_weight: expected [23, D], the vocabulary of weight, got [22, 5]; give teacher_ids":
        lambda f, x, w: f.losses.total_variation_loss(x, w, x, w[1:]),
    "k: expected at most 23": lambda f, x, w: f.losses.student_top_k_loss(x, w, x, w, k=24),
    "beta: expected a number from 0 to 1, got -1": lambda f, x, w: f.losses.jsd_loss(x, w, x, w, beta=-1.0),
}.items())
def test_bad_vocabularies_are_named(f, message, call):
    with pytest.raises((TypeError, ValueError)) as raised:
        call(f, f.array(HIDDEN), f.array(WEIGHT))
    assert message in str(raised.value)


def test_the_frameworks_own_operations(f, portable):
    test_divergences(f)
    if f.target == "target":  # formulas are the same; JAX would compile for ten seconds
        test_total_variation_and_vocabularies(f)
        test_the_students_top_k(f)


def best(f, k, **options):
    return f.losses.teacher_top_k(*teacher(f), f.array(TEACHER_BIAS), k=k, **options)


def test_top_k(f):
    found = best(f, 6, temperature=1.3)
    (log_q,) = f.values(lambda *given: [f.paper.log_p(logits(f, given, 1.3)[1])])
    vocab_ids = np.argsort(-log_q, -1, kind="stable")[..., :6]
    assert np.array_equal(f.numpy(found.vocab_ids), vocab_ids)
    f.check_values([found.log_probs], [f.array(np.take_along_axis(log_q, vocab_ids, -1))])

    def case(tail, reduction):
        def call(x, w, b):
            loss = f.losses.top_k_loss(
                x, w, found, b, tail=tail, targets=f.targets, reduction=reduction, temperature=1.3)
            return reduced(f, loss, reduction) if reduction == "none" else loss

        return call, lambda *given: reduced(
            f, f.paper.top_k(*logits(f, given, 1.3), f.array(vocab_ids), tail), reduction, f.valid)

    f.check([case(tail, reduction) for tail in (False, True) for reduction in ("mean", "none")])


def test_top_k_of_tokens_with_fewer(f):
    """Entries are padded by ignore_index or by -inf; a token without entries has loss 0."""
    found = best(f, 3)
    ids, log_probs = map(f.numpy, found)
    ids = np.concatenate([ids, np.full((2 * B, T, 1), -100), ids[..., :1]], -1).astype(np.int32)
    log_probs = np.concatenate([log_probs, np.zeros((2 * B, T, 1)), np.full((2 * B, T, 1), -np.inf)], -1)
    stored = f.losses.TopK(f.array(ids), f.array(log_probs))
    nothing = f.losses.TopK(f.array(np.full_like(ids, -100)), stored.log_probs)
    for tail in (False, True):
        for reduction in ("mean", "none"):
            call = lambda k: f.gradients(  # noqa: E731
                lambda x, w, b: f.losses.top_k_loss(x, w, k, b, tail=tail, reduction=reduction).sum(), *GIVEN)
            (value, gradients), (expected, exact) = call(stored), call(found)
            f.check_values([value], [expected])
            f.check_values(gradients, exact)
            value, gradients = call(nothing)
            assert value == 0 and not any(f.numpy(g).any() for g in gradients)


def test_all_entries_are_the_divergence(f):
    """K = V leaves nothing for the tail."""
    for tail in (False, True):
        loss = f.losses.top_k_loss(*map(f.array, (HIDDEN, WEIGHT)), best(f, V), f.array(BIAS), tail=tail)
        f.close([loss], lambda *given: [f.paper.kl(*logits(f, given)[::-1]).mean()], max(f.exact, 1e-9))


@pytest.mark.parametrize("executor", ["native", "python"])
def test_what_is_no_number_at_ignored_tokens_counts_for_nothing(f, executor):
    def call(x, t):
        return f.losses.jsd_loss(
            x, f.array(WEIGHT), t, f.array(REF_WEIGHT), targets=f.targets, executor=executor)

    hidden, of_teacher = HIDDEN.copy(), REF_HIDDEN.copy()
    hidden[~VALID], of_teacher[~VALID] = np.nan, np.inf
    exact, found = (
        f.gradients(lambda x, t=t: call(x, f.array(t)), x) for x, t in ((HIDDEN, REF_HIDDEN), (hidden, of_teacher))
    )
    assert f.numpy(exact[0]) == f.numpy(found[0])
    (exact,), (found,) = exact[1], found[1]
    assert np.array_equal(f.numpy(exact), f.numpy(found)) and not f.numpy(found)[~VALID].any()


def test_the_example_of_the_document_runs(f):
    page = Path(__file__).parents[3] / "docs/use/ready_losses.md"
    codes = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    code = "".join(c for c in codes if f.losses.__name__ in c)
    hidden, weight, states = (f.single(a) for a in (HIDDEN, WEIGHT, REF_HIDDEN))
    if f.target == "target":
        hidden.requires_grad_(), weight.requires_grad_()
    space = dict(
        hidden=hidden, weight=weight, ref_hidden=states, ref_weight=f.single(REF_WEIGHT), states=hidden,
        tokens=f.targets, advantages=f.single(ADVANTAGES), ref_states=f.single(HIDDEN + 0.1), teacher_hidden=states,
        teacher_weight=f.single(REF_WEIGHT), encoder=lambda x: x * x, questions=hidden[0], passages=hidden[1],
    )
    space[f.target] = f.targets
    exec(code, space)
    if f.target == "target":
        assert weight.grad.isfinite().all() and space["found"].kl > 0
    else:
        assert space["value"] > 0 and space["gradients"][1].shape == WEIGHT.shape
