"""The losses of preferences against their papers in float64, values and gradients."""

import numpy as np
import pytest
from loss_frameworks import B, CAPPED, GIVEN, HIDDEN, REF_HIDDEN, REF_WEIGHT, RNG, T, TARGETS, V, WEIGHT, normal

SMOOTHING = dict.fromkeys(("sigmoid", "robust", "exo_pair"), 0.1) | dict.fromkeys(
    ("hinge", "ipo", "nca_pair", "sppo_hard", "apo_zero", "apo_down"), 0.0
)


def pairs(f, given, average=False, head=None, ids=None):
    """Returns log pi of chosen and rejected sequences, the same of the reference, and the NLL of the chosen tokens."""
    ids = f.targets if ids is None else ids
    own = f.logps(given, head, ids)
    logps, reference = (f.paper.sequence(x, ids, average) for x in (own, f.ref_logps(head)))
    return logps[:B], logps[B:], reference[:B], reference[B:], -own[:B].sum() / (ids[:B] >= 0).sum()


def ratios(f, given, **options):
    """Returns r_w and r_l."""
    c, r, c_ref, r_ref, _ = pairs(f, given, **options)
    return c - c_ref, r - r_ref


@pytest.mark.parametrize("head", [{}, CAPPED], ids=["plain", "capped"])
@pytest.mark.parametrize("average", [False, True])
def test_dpo(f, average, head):
    def case(kind, e):
        return (
            lambda x, w, b: f.losses.dpo_loss(
                x, w, f.targets, b, **f.reference, beta=0.3, loss_type=kind, label_smoothing=e,
                average_log_prob=average, **head),
            lambda *given: f.paper.dpo(kind, *ratios(f, given, average=average, head=head), 0.3, e),
        )

    def parts(*given):
        c, r, c_ref, r_ref, nll = pairs(f, given, average, head)
        return c, r, 0.3 * (c - c_ref), 0.3 * (r - r_ref), nll

    for found in f.check([case(*kind) for kind in SMOOTHING.items()]):
        f.close(found[1:], parts)
        f.check_values([found.margins], [found.chosen_rewards - found.rejected_rewards])
        assert np.array_equal(f.numpy(found.accuracies), f.numpy(found.margins) > 0)
    assert not f.has_gradients(lambda *given: case("sigmoid", 0.0)[0](*given)[1:])


def test_references_of_dpo(f):
    """References are given, computed from another head or the policy's own, or absent; exo_pair has its default
    smoothing."""
    own, other = normal(2 * B, T, 5, seed=9), np.full(2 * B, -3.0, np.float32)

    def call(**options):
        return lambda x, w, b: f.losses.dpo_loss(x, w, f.targets, b, **options)

    def of_own(*given):
        z = f.logps((f.double(own), *map(f.stopped, given[1:])))
        of = f.paper.sequence(z, f.targets)
        c, r, *_ = pairs(f, given)
        return f.paper.dpo("sigmoid", c - of[:B], r - of[B:], 0.1)

    f.check([
        (
            call(ref_chosen_logps=f.array(other[:B]), ref_rejected_logps=f.array(other[B:] - 1), loss_type="sppo_hard"),
            lambda *given: f.paper.dpo("sppo_hard", *(x + o for x, o in zip(pairs(f, given)[:2], (3.0, 4.0))), 0.1),
        ),
        (
            call(reference_free=True, loss_type="exo_pair"),
            lambda *given: f.paper.dpo("exo_pair", *pairs(f, given)[:2], 0.1, 1e-3),
        ),
        (call(ref_hidden=f.array(own)), of_own),
    ])
    c_ref, r_ref = f.values(lambda *given: pairs(f, given)[2:4])
    given = call(ref_chosen_logps=f.array(c_ref), ref_rejected_logps=f.array(r_ref))(*map(f.array, GIVEN)).loss
    computed = call(**f.reference)(*map(f.array, GIVEN)).loss
    f.check_values([given], [computed])


def test_shift(f):
    """Labels have the positions of hidden, as in Hugging Face."""
    moved = f.array(np.concatenate([TARGETS[:, 1:], np.full((2 * B, 1), -100, np.int32)], 1))

    def expected(*given):
        c, r, *_ = pairs(f, given, ids=moved)
        of = f.paper.sequence(f.logps((f.double(REF_HIDDEN), f.double(REF_WEIGHT)), ids=moved), moved)
        return f.paper.dpo("sigmoid", c - of[:B], r - of[B:], 0.1)

    f.check([(lambda x, w, b: f.losses.dpo_loss(x, w, f.targets, b, **f.reference, shift=True), expected)])
    x, w, b = map(f.array, GIVEN)
    options = dict(ref_hidden=f.array(normal(2 * B, T, 5, seed=9)), loss_type="sppo_hard")
    shifted = f.losses.dpo_loss(x, w, f.targets, b, shift=True, **options).loss
    assert shifted == f.losses.dpo_loss(x, w, moved, b, ref_weight=w, ref_bias=b, **options).loss


def test_ipo_simpo_cpo_and_orpo(f):
    def simpo(alpha, e):
        def expected(*given):
            c, r, _, _, nll = pairs(f, given, average=True)
            return f.paper.simpo(c, r, 2.0, 0.8, e) + alpha * nll

        return lambda x, w, b: f.losses.simpo_loss(
            x, w, f.targets, b, beta=2.0, gamma=0.8, alpha=alpha, label_smoothing=e), expected

    def cpo(kind, e, alpha, average):
        def expected(*given):
            c, r, _, _, nll = pairs(f, given, average)
            return f.paper.dpo(kind, c, r, 0.1, e) + alpha * nll

        return lambda x, w, b: f.losses.cpo_loss(
            x, w, f.targets, b, loss_type=kind, label_smoothing=e, alpha=alpha, average_log_prob=average), expected

    def orpo(*given):
        c, r, _, _, nll = pairs(f, given, average=True)
        return f.paper.orpo(c, r, nll, 0.4)

    found = f.check([
        simpo(0.0, 0.0), simpo(0.5, 0.1),
        cpo("sigmoid", 0.0, 1.0, False), cpo("sigmoid", 0.2, 0.3, True), cpo("hinge", 0.0, 1.0, False),
        cpo("ipo", 0.0, 0.0, True),
        (lambda x, w, b: f.losses.cpo_loss(x, w, f.targets, b), cpo("sigmoid", 0.0, 1.0, False)[1]),
        (lambda x, w, b: f.losses.orpo_loss(x, w, f.targets, b, beta=0.4), orpo),
        *(
            (
                lambda x, w, b, o=options: f.losses.ipo_loss(x, w, f.targets, b, **f.reference, beta=0.2, **o),
                lambda *given, a=average: f.paper.dpo("ipo", *ratios(f, given, average=a), 0.2),
            )
            for average, options in ((True, {}), (False, dict(average_log_prob=False)))
        ),
    ])
    f.close([found[0].chosen_rewards], lambda *given: [2.0 * pairs(f, given, average=True)[0]])


def test_cpo_averages_with_ipo_alone(f):
    arguments = [f.array(a) for a in (HIDDEN, WEIGHT, TARGETS)]
    call = lambda **more: float(f.losses.cpo_loss(*arguments, **more).loss)  # noqa: E731
    assert call(loss_type="ipo") == call(loss_type="ipo", average_log_prob=True)
    assert call() == call(average_log_prob=False) != call(average_log_prob=True)


def test_kinds_of_dpo_that_look_at_the_batch(f):
    def case(kind, formula, **options):
        return (
            lambda x, w, b: f.losses.dpo_loss(x, w, f.targets, b, **f.reference, beta=0.3, loss_type=kind, **options),
            lambda *given: formula(*ratios(f, given)) if kind != "aot" else formula(given),
        )

    def aot(e):
        def formula(given):
            c, r, c_ref, r_ref, _ = pairs(f, given)
            return f.paper.aot(c - r, c_ref - r_ref, 0.3, e)

        return case("aot", formula, label_smoothing=e)

    def of_mean(r_w, r_l):
        return f.paper.bco(r_w, r_l, 0.3, 0.3 * f.stopped(f.xp.concatenate([r_w, r_l]).mean()))

    bco = lambda r_w, r_l: f.paper.bco(r_w, r_l, 0.3, 0.75)  # noqa: E731
    paired = lambda e: lambda r_w, r_l: f.paper.aot(r_w, r_l, 0.3, e)  # noqa: E731
    f.check([
        case("bco_pair", of_mean), case("bco_pair", bco, bco_delta=0.75),
        case("bco_pair", bco, bco_delta=f.array(np.float32([0.75]))),
        *(aot(e) for e in (0.0, 0.1)),
        *(case(kind, paired(e), label_smoothing=e) for kind in ("aot_pair", "aot_unpaired") for e in (0.0, 0.1)),
        case("discopop", lambda *r: f.paper.discopop(*r, 0.3, 0.05)),
        case("discopop", lambda *r: f.paper.discopop(*r, 0.3, 0.4), discopop_tau=0.4),
    ])
    (c, r, c_ref, _), = [f.values(lambda *given: pairs(f, given)[:4])]
    assert not np.array_equal(np.sort(c - r), c - r) and not np.array_equal(np.sort(c - c_ref), c - c_ref)
    far, gradient = f.gradients(lambda w: f.losses.dpo_loss(  # exp(-x) is infinite, g 0
        f.array(HIDDEN), w, f.targets, loss_type="discopop", ref_chosen_logps=f.array(np.full(B, 3000.0, np.float32)),
        ref_rejected_logps=f.array(np.zeros(B, np.float32))), WEIGHT)
    assert 250 < far < 350 and np.isfinite(f.numpy(gradient[0])).all()


def test_the_nll_of_other_entries_and_sequences_without_one(f):
    """The NLL may be over other tokens: those of prompts too, as in TRL's ORPO, or of the chosen sequences alone. A
    pair with an empty sequence has no odds: it counts in the mean, and adds no gradient."""
    others = RNG(12).integers(0, V, (2 * B, T)).astype(np.int32)
    others[1, 2:] = -100
    first = f.array(others[:B])

    def nll(given):
        return -f.logps((given[0][:B], *given[1:]), ids=first).sum() / (first >= 0).sum()

    def orpo(*given):
        c, r, *_ = pairs(f, given, average=True)
        return f.paper.orpo(c, r, nll(given), 0.4)

    def cpo(*given):
        return f.paper.dpo("sigmoid", *pairs(f, given)[:2], 0.1) + 0.6 * nll(given)

    def without(empty):
        ids = TARGETS.copy()
        ids[empty] = -100

        def expected(*given):
            left = np.array([0, 2])
            c, r, _, _, plain = pairs(f, given, average=True, ids=f.array(ids))
            return plain + (f.paper.orpo(c[left], r[left], plain, 0.4) - plain) * (B - 1) / B

        return lambda x, w, b: f.losses.orpo_loss(x, w, f.array(ids), b, beta=0.4), expected

    # Targets of a position are those of the position before.
    later = lambda ids: f.array(np.concatenate([np.full((len(ids), 1), 7, np.int32), ids], 1))  # noqa: E731
    cases, small = [], others[:B].astype(np.int32)
    for given in (others, small):
        for shift in (False, True):
            ids, of_nll = (later(TARGETS), later(given)) if shift else (f.targets, f.array(given))
            options = dict(nll_target=of_nll, shift=shift)
            last = f.array(HIDDEN[:, :1])
            longer = lambda x, s=shift: f.xp.concatenate([x, last], 1) if s else x  # noqa: E731
            cases += [
                (lambda x, w, b, i=ids, o=options, h=longer: f.losses.orpo_loss(h(x), w, i, b, beta=0.4, **o), orpo),
                (lambda x, w, b, i=ids, o=options, h=longer: f.losses.cpo_loss(h(x), w, i, b, alpha=0.6, **o), cpo),
            ]
    found = f.check([*cases, without(1), without(B + 1)])
    f.close([found[0].nll_loss, found[0].chosen_logps], lambda *given: (nll(given), pairs(f, given, average=True)[0]))
    f.check_values([one.nll_loss for one in found[: len(cases)]], [found[0].nll_loss] * len(cases))
    assert abs(found[0].nll_loss - found[-1].nll_loss) > 1e-3


def test_orpo_of_certain_entries_is_finite(f):
    hidden = np.zeros((2, 1, 1), np.float32) + np.float32([100.0, 1.0])[:, None, None]
    weight, ids = f.single([[1.0], [-1.0]]), f.array(np.zeros((2, 1), np.int32))
    loss, gradient = f.gradients(lambda x: f.losses.orpo_loss(f.rounded(x), weight, ids), hidden)
    assert np.isfinite(f.numpy(loss)) and np.isfinite(f.numpy(gradient[0])).all()


def test_kto(f):
    good, mismatched = np.arange(2 * B) % 3 > 0, f.array(TARGETS[::-1].copy())
    ratio = lambda given: f.paper.sequence(f.logps(given) - f.ref_logps(), f.targets)  # noqa: E731

    def case(kl, expected, **options):
        return (
            lambda x, w, b: f.losses.kto_loss(
                x, w, f.targets, f.array(good), b, **f.reference, **kl, beta=0.3, desirable_weight=1.5,
                undesirable_weight=0.5, **options),
            lambda *given: f.paper.kto(ratio(given), f.array(good), expected, 0.3, 1.5, 0.5),
        )

    found = f.check([
        case(dict(kl=f.array(np.float32([0.75]))), 0.75), case({}, 0.0, loss_type="apo_zero_unpaired"),
    ])
    for one in found:
        f.close([one.rewards], lambda *given: [0.3 * ratio(given)])
    ref_logps = f.array(f.values(lambda *given: [f.paper.sequence(f.ref_logps(), f.targets)])[0])
    again = f.losses.kto_loss(
        *map(f.array, (HIDDEN, WEIGHT, TARGETS, good)), f.array(GIVEN[2]), ref_logps=ref_logps, kl=0.75)
    f.close([again.loss], lambda *given: [f.paper.kto(ratio(given), f.array(good), 0.75, 0.1)])

    def divergence(*given):
        reference = f.double(REF_HIDDEN), f.double(REF_WEIGHT)
        own, of_reference = (f.logps(head, ids=mismatched) for head in (given, reference))
        return [f.paper.sequence(own - of_reference, mismatched).mean().clip(0)]

    x, w, b = map(f.array, GIVEN)
    f.close([f.losses.kto_kl(x, w, mismatched, b, **f.reference)], divergence)
    assert not f.has_gradients(lambda x, w, b: (f.losses.kto_kl(x, w, mismatched, b, **f.reference),))
    low = f.array(np.full(2 * B, -30.0, np.float32))
    alone = f.losses.selective_log_softmax(x, w, f.targets, b).sum(-1).mean() + 30.0
    f.check_values([f.losses.kto_kl(x, w, f.targets, b, ref_logps=low)], [alone])
    assert alone > 0


def test_no_sequences(f):
    x, w, ids, labels = map(f.array, (HIDDEN[:0], WEIGHT, TARGETS[:0], np.ones(0, bool)))
    reference = dict(ref_hidden=f.array(REF_HIDDEN[:0]), ref_weight=f.reference["ref_weight"])
    assert f.losses.kto_loss(x, w, ids, labels, **reference, kl=0.0).loss == 0
    assert f.losses.kto_kl(x, w, ids, **reference) == 0
