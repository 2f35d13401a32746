"""multi_token_loss against the sum of its heads' cross entropies of full logits in float64."""

import numpy as np
import pytest
from loss_frameworks import BIAS, D, T, V, RNG, WEIGHT, error, normal

B, M = 2, 3
STATES, WEIGHTS, BIASES = normal(M, B, T, D, seed=81), normal(M, V, D, seed=82), normal(M, V, seed=83, scale=0.3)
IDS = RNG(84).integers(0, V, (B, T)).astype(np.int32)
IDS[0, :2] = IDS[1, 4] = -100
SEGMENTS = np.array([[0, 0, 0, 1, 1, 1], [0, 0, 2, 2, 2, 3]], np.int32)
SHARES = (1.0, 0.5, 0.25)


def ahead(ids, shift, segments=None):
    found = np.full_like(ids, -100)
    for t in range(T - shift):
        same = np.ones(B, bool) if segments is None else segments[:, t] == segments[:, t + shift]
        found[:, t] = np.where(same, ids[:, t + shift], -100)
    return found


def formula(f, hidden, weight, bias, shifts=(1, 2, 3), segments=None, shares=(1.0,) * M, reduction="mean", divisor=None,
            label_smoothing=0.0, z_loss=0.0, **head):
    total, losses = 0.0, []
    for m, shift in enumerate(shifts):
        ids = ahead(IDS, shift, segments)
        x = hidden[m] if hidden.ndim == 4 else hidden
        w, b = (weight[m], bias[m]) if weight.ndim == 3 else (weight, bias)
        z = f.paper.logits(x, w, b, **head)
        log_p, rows = f.paper.log_p(z), f.array(ids >= 0)
        nll = -f.paper.of_targets(log_p, f.array(ids))
        lse = f.xp.log(f.xp.exp(z).sum(-1))
        each = (1 - label_smoothing) * nll - label_smoothing * log_p.mean(-1) + z_loss * lse**2
        count = divisor or (max((ids >= 0).sum(), 1) if reduction == "mean" else 1)
        total = total + shares[m] * f.xp.where(rows, each, 0.0).sum() / count
        losses.append(f.xp.where(rows, nll, 0.0).sum() / count)
    return total, f.xp.stack(losses)


CASES = {
    "states": (STATES, WEIGHT, BIAS, {}, {}),
    "states_of_labels": (
        STATES, WEIGHT, BIAS, dict(shifts=(0, 1, 2), head_weights=SHARES, segment_ids=SEGMENTS, label_smoothing=0.1, z_loss=1e-3),
        dict(shifts=(0, 1, 2), shares=SHARES, segments=SEGMENTS, label_smoothing=0.1, z_loss=1e-3)),
    "weights": (STATES[0], WEIGHTS, BIASES, dict(head_weights=SHARES, softcap=4.0, temperature=1.3),
                dict(shares=SHARES, softcap=4.0, temperature=1.3)),
    "both": (STATES, WEIGHTS, BIASES, dict(reduction="sum", shifts=(1, 3, 9)), dict(reduction="sum", shifts=(1, 3, 9))),
    "neither": (STATES[0], WEIGHT, BIAS, dict(shifts=(1, 2, 3), head_weights=SHARES, normalizer=20.0),
                dict(shares=SHARES, divisor=20.0)),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(f, case):
    *arrays, options, exact_options = CASES[case]
    given = {n: f.array(v) if isinstance(v, np.ndarray) else v for n, v in options.items()}

    def call(*a):
        return f.losses.multi_token_loss(*a[:2], f.array(IDS), a[2], accuracy=True, **given)

    value, gradients = f.gradients(call, *arrays)
    exact, exact_gradients = f.exact_gradients(lambda *a: formula(f, *a, **exact_options), *arrays)
    assert error(f.numpy(value), exact) < f.exact
    for one, other in zip(gradients, exact_gradients):
        assert error(f.numpy(one), other) < f.exact_gradient
    found = call(*map(f.array, arrays))
    assert error(f.numpy(found.head_losses), f.numpy(formula(f, *map(f.double, arrays), **exact_options)[1])) < 1e-5
    for m, shift in enumerate(exact_options.get("shifts", (1, 2, 3))):
        ids = ahead(IDS, shift, exact_options.get("segments"))
        x, w, b = (a[m] if a.ndim == n else a for a, n in zip(arrays, (4, 3, 2)))
        right = ((x @ w.T + b).argmax(-1) == ids) & (ids >= 0)
        assert abs(f.numpy(found.accuracies)[m] - right.sum() / max((ids >= 0).sum(), 1)) < 1e-6


def test_sequences_are_the_same(f):
    ids, one, many = f.array(IDS), f.array(STATES), [f.array(s) for s in STATES]
    found = [f.numpy(f.losses.multi_token_loss(x, w, ids).loss) for x in (one, many)
             for w in (f.array(WEIGHTS), [f.array(w) for w in WEIGHTS])]
    assert len(set(map(float, found))) == 1
    shared = [f.numpy(f.losses.multi_token_loss(x, f.array(WEIGHT), ids).loss) for x in (one, many)]
    assert shared[0] == shared[1]


def test_a_head_that_predicts_nothing_and_values_at_ends(f):
    """NaN at positions that no head counts does not spread."""
    states = STATES.copy()
    states[0, :, -1] = states[1, :, -2:] = states[2, :, -3:] = np.nan
    value, gradients = f.gradients(
        lambda x, w: f.losses.multi_token_loss(x, w, f.array(IDS), shifts=(1, 2, T)), states, WEIGHT)
    assert np.isfinite(f.numpy(value)) and all(np.isfinite(f.numpy(g)).all() for g in gradients)
    found = f.losses.multi_token_loss(*map(f.array, (STATES, WEIGHT, IDS)), shifts=(1, 2, T))
    assert f.numpy(found.head_losses)[2] == 0 and found.accuracies is None


@pytest.mark.parametrize("message, change", {
    "shifts: expected a number for each head beside one hidden and one weight, got None": dict(hidden=STATES[0]),
    "shifts: expected a sequence of whole numbers or None, got 2": dict(shifts=2),
    "shifts: expected a whole number from 0, got -1": dict(shifts=(-1, 1, 2)),
    "hidden: expected 2 heads, as many as shifts, got 3": dict(shifts=(1, 2)),
    "weight: expected 3 heads, as many as shifts, got 2": dict(weight=WEIGHTS[:2]),
    "hidden: expected 3 dimensions, or 4 with one for the heads, got [6, 5]": dict(hidden=STATES[0, 0]),
    "hidden: expected [2, 6, D] of each head": dict(hidden=STATES[:, 1:]),
    "bias: expected one for each weight": dict(weight=WEIGHTS, bias=BIAS),
    "head_weights: expected a sequence of 3 numbers, got (1, 2)": dict(head_weights=(1, 2)),
    "head_weights: expected a number from 0, got -1": dict(head_weights=(1, 2, -1)),
    "segment_ids: expected [2, 6], got [1, 6]": dict(segment_ids=SEGMENTS[:1]),
    "reduction: expected one of 'mean', 'sum', got 'none'": dict(reduction="none"),
    "normalizer: expected None with reduction 'sum'": dict(reduction="sum", normalizer=2.0),
    "z_loss: expected 0 with one hidden and one weight": dict(hidden=STATES[0], shifts=(1, 2), z_loss=1e-4),
    "z_loss: expected a number from 0, got -1": dict(z_loss=-1),
    "accuracy: expected True or False": dict(accuracy=1),
}.items())
def test_bad_arguments_are_named(f, message, change):
    given = {"hidden": STATES, "weight": WEIGHT, f.target: IDS, **change}
    given = {name: f.array(value) if isinstance(value, np.ndarray) else value for name, value in given.items()}
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as raised:
        f.losses.multi_token_loss(**given)
    assert message in str(raised.value)
