"""InfoNCE and the margin losses against their definitions in float64."""

import numpy as np
import pytest
from loss_frameworks import RNG, error, normal

N, K, D = 7, 5, 6
QUERY, KEY, NEGATIVES = (normal(rows, D, seed=seed) for rows, seed in ((N, 51), (N, 52), (K, 53)))
HALF = np.float32(0.5)
POSITIONS = np.array([3, 0, -100, 6, 6, 1, 2], np.int32)


def expected(f, query, key, negatives, temperature, targets, *, normalize=True, symmetric=False, **options):
    unit = f.paper.unit if normalize else lambda x: x
    query, key, negatives = map(unit, (query, key, negatives))
    keys = f.xp.concatenate([key, negatives])
    each = f.paper.info_nce(query, keys, f.array(targets), temperature)
    if symmetric:
        each = (each + f.paper.info_nce(key, query, f.array(targets), temperature)) / 2
    return {"none": lambda: (each * f.array(QUERY[:, 0])).sum(), "sum": each.sum,
            "mean": lambda: each.sum() / (targets >= 0).sum()}[options.get("reduction", "mean")]()


CASES = [dict(), dict(symmetric=True), dict(normalize=False, reduction="sum", targets=POSITIONS),
         dict(symmetric=True, normalize=False, reduction="none"), dict(targets=POSITIONS, memory_budget="1MiB")]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
def test_info_nce(f, case, learned):
    options = {name: value for name, value in case.items() if name != "targets"}
    given = {"targets": f.array(case["targets"])} if "targets" in case else {}

    def call(query, key, negatives, temperature):
        found = f.losses.info_nce_loss(
            query, key, negatives=negatives, temperature=temperature if learned else 0.5, **options, **given)
        return (found * f.array(QUERY[:, 0])).sum() if options.get("reduction") == "none" else found

    def formula(query, key, negatives, temperature):
        targets = case.get("targets", np.arange(N, dtype=np.int32))
        return expected(f, query, key, negatives, temperature if learned else 0.5, targets, **options)

    arrays = QUERY, KEY, NEGATIVES, HALF
    (value, gradients), (exact, exact_gradients) = f.gradients(call, *arrays), f.exact_gradients(formula, *arrays)
    assert error(f.numpy(value), exact) < f.exact
    for one, other in zip(gradients, exact_gradients):
        assert error(f.numpy(one), other) < f.exact_gradient
    assert learned == bool(f.numpy(gradients[3]))


def test_rows_without_a_direction_and_one_pair(f):
    """A zero row has no norm: its logits are 0. One pair alone has a loss of 0."""
    zero = np.where(np.arange(N)[:, None] == 2, 0, QUERY)
    for symmetric in (False, True):
        value, gradients = f.gradients(lambda q, k: f.losses.info_nce_loss(q, k, symmetric=symmetric), zero, KEY)
        assert all(np.isfinite(f.numpy(a)).all() for a in (value, *gradients))
        value, gradients = f.gradients(
            lambda q, k: f.losses.info_nce_loss(q, k, symmetric=symmetric), QUERY[:1], KEY[:1])
        assert abs(f.numpy(value)) < 1e-6 and all(np.abs(f.numpy(a)).max() < 1e-5 for a in gradients)


@pytest.mark.parametrize("message, change", {
    "query: expected [N, D], got [7]": dict(query=QUERY[:, 0]),
    "key: expected [M, 6], got [7, 5]": dict(key=KEY[:, 1:]),
    "key: expected [7, 6] without {target}, one for each query, got [6, 6]": dict(key=KEY[1:]),
    "negatives: expected [K, 6], got [5]": dict(negatives=NEGATIVES[:, 0]),
    "{target}: expected [7], got [6]": dict(targets=POSITIONS[1:]),
    "{target}: expected None with symmetric=True": dict(targets=POSITIONS, symmetric=True),
    "temperature: expected a number above 0, got 0": dict(temperature=0),
    "temperature: expected {an_array} of one number, got [2]": dict(temperature=QUERY[0, :2]),
    "reduction: expected one of 'none', 'mean', 'sum', got 'all'": dict(reduction="all"),
}.items())
def test_bad_arguments_are_named(f, message, change):
    given = {"query": QUERY, "key": KEY, **change}
    given = {name: f.array(value) if isinstance(value, np.ndarray) else value for name, value in given.items()}
    with pytest.raises(ValueError) as raised:
        f.losses.info_nce_loss(**given)
    names = dict(target=f.target, an_array="a tensor" if f.target == "target" else "an array")
    assert message.format(**names) in str(raised.value)


ROWS, CLASSES = 9, 11
FEATURES, DIRECTIONS = normal(ROWS, D, seed=54), normal(CLASSES, D, seed=55)
LABELS = np.array([0, 3, -100, 10, 10, 1, 2, -100, 7], np.int32)
MARGINS = [
    ("arcface_loss", dict(scale=8.0, margin=0.3, memory_budget="1MiB"), (8.0, 0.3, 0.0)),
    ("arcface_loss", dict(scale=4.0, reduction="none", executor="python"), (4.0, 0.5, 0.0)),
    ("cosface_loss", dict(scale=8.0, normalizer=5), (8.0, 0.0, 0.35)),
    ("cosface_loss", dict(scale=30.0, margin=0.1, reduction="sum"), (30.0, 0.0, 0.1)),
]


@pytest.mark.parametrize("name, options, terms", MARGINS, ids=str)
def test_margins(f, name, options, terms):
    labels = f.array(LABELS)
    weights = f.array(FEATURES[:, 0])

    def call(hidden, weight):
        found = getattr(f.losses, name)(hidden, weight, labels, **options)
        return (found * weights).sum() if options.get("reduction") == "none" else found

    def formula(hidden, weight):
        each = f.paper.margins(hidden, weight, labels, *terms)
        if options.get("reduction") == "none":
            return (each * weights).sum()
        return each.sum() / {"sum": 1}.get(options.get("reduction"), options.get("normalizer", (LABELS >= 0).sum()))

    spoiled = np.where(LABELS[:, None] < 0, np.nan, FEATURES).astype(np.float32)
    (value, gradients), (exact, exact_gradients) = (
        f.gradients(call, spoiled, DIRECTIONS), f.exact_gradients(formula, FEATURES, DIRECTIONS))
    assert error(f.numpy(value), exact) < f.exact
    for one, other in zip(gradients, exact_gradients):
        assert error(f.numpy(one), other) < f.exact_gradient


@pytest.mark.parametrize("name", ["arcface_loss", "cosface_loss"])
def test_16_bit_gradients_are_rounded_after_their_part_along_a_row_is_gone(f, name):
    """Most of a product is along the row in few dimensions."""
    labels = f.array(RNG(56).integers(0, 1000, 300).astype(np.int32))
    x, w = (normal(rows, 4, seed=seed) for rows, seed in ((300, 57), (1000, 58)))
    if f.target == "target":
        to_half, half = (lambda a: a.bfloat16()), lambda a: f.numpy(f.array(a).bfloat16())
    else:
        to_half, half = (lambda a: a.astype(f.xp.bfloat16)), lambda a: np.asarray(f.xp.asarray(a, "bfloat16"), np.float32)
    x, w = half(x), half(w)

    def call(convert):
        return f.gradients(lambda *given: getattr(f.losses, name)(*map(convert, given), labels), x, w)[1]

    for one, other in zip(call(to_half), call(lambda a: a)):
        assert error(f.numpy(one), f.numpy(other)) < 4e-3


def test_margins_in_the_frameworks_own_operations(f, portable):
    for case in MARGINS[::3]:
        test_margins(f, *case)
    test_16_bit_gradients_are_rounded_after_their_part_along_a_row_is_gone(f, "arcface_loss")


def test_a_confident_row_and_rows_that_point_away(f):
    """A margin of 1 makes the own class no likelier than one 1 radian away, whose probability is 1e-13 without it. The
    loss rises with the angle, also where the angle and the margin exceed pi."""
    directions = np.eye(3, D)
    directions[1] = np.cos(1.0) * directions[0] + np.sin(1.0) * directions[1]
    losses = []
    for angle in (0.0, 0.1, 2.0, 2.1, 2.2, 3.0, np.pi):
        row = np.cos(angle) * np.eye(1, D, 0) + np.sin(angle) * np.eye(1, D, 5)
        value, gradients = f.gradients(
            lambda h, w: f.losses.arcface_loss(h, w, f.array(np.int32([0])), margin=1.0),
            row.astype(np.float32), directions.astype(np.float32))
        assert all(np.isfinite(f.numpy(a)).all() for a in (value, *gradients))
        losses.append(float(f.numpy(value)))
    assert abs(losses[0] - np.log(2)) < 1e-5 and losses == sorted(losses)


@pytest.mark.parametrize("message, call", {
    "scale: expected a number above 0, got 0": lambda f, *a: f.losses.arcface_loss(*a, scale=0),
    "margin: expected a number from 0 to 3.14159, got 4": lambda f, *a: f.losses.arcface_loss(*a, margin=4),
    "margin: expected a number from 0, got -1": lambda f, *a: f.losses.cosface_loss(*a, margin=-1),
    "{target}: expected [9], got [8]": lambda f, h, w, ids: f.losses.cosface_loss(h, w, ids[1:]),
    "weight: expected [V, 6]": lambda f, h, w, ids: f.losses.cosface_loss(h, w[:, 1:], ids),
    "executor: expected one of 'native', 'python', got 'cuda'": lambda f, *a: f.losses.cosface_loss(*a, executor="cuda"),
}.items())
def test_bad_margins_are_named(f, message, call):
    with pytest.raises(ValueError) as raised:
        call(f, f.array(FEATURES), f.array(DIRECTIONS), f.array(LABELS))
    assert message.format(target=f.target) in str(raised.value)


# --- GradCache.


def test_grad_cache_has_the_gradients_of_the_whole_batch(f):
    """The last micro batch is smaller; inputs are in a dictionary and a tuple; there are two results."""

    def encode(given, rows):
        x = f.xp.tanh(given["x"] @ f.array(NEGATIVES).T)
        return x, (rows[0][:, None] * x).sum(-1)

    def call(query, key, shares, micro_batch=None):
        def encoded(x):
            given = {"x": x}, (shares,)
            return f.losses.grad_cache(encode, *given, micro_batch=micro_batch) if micro_batch else encode(*given)

        (one, weights), (other, _) = encoded(query), encoded(key)
        return (f.losses.info_nce_loss(one, other, temperature=0.5, reduction="none") * weights).sum()

    arrays = QUERY, KEY, KEY[:, 0]
    value, gradients = f.gradients(call, *arrays)
    for size in (1, 3, 7, 10):
        found, others = f.gradients(lambda *given: call(*given, micro_batch=size), *arrays)
        assert error(f.numpy(found), f.numpy(value)) < f.exact
        for one, other in zip(others, gradients):
            assert error(f.numpy(one), f.numpy(other)) < f.exact_gradient


@pytest.mark.parametrize("message, arguments", {
    "micro_batch: expected a whole number from 1, got 0": (abs, [QUERY], 0),
    "encode: expected a function, got float": (1.0, [QUERY], 2),
    "inputs: expected {array}s of one number of rows, got [[5], [7]]": (abs, [QUERY, [NEGATIVES]], 2),
}.items())
def test_bad_micro_batches_are_named(f, message, arguments):
    encode, inputs, size = arguments
    inputs = [[f.array(x[0])] if isinstance(x, list) else f.array(x) for x in inputs]
    with pytest.raises((TypeError, ValueError)) as raised:
        f.losses.grad_cache(encode, *inputs, micro_batch=size)
    assert message.format(array="tensor" if f.target == "target" else "array") in str(raised.value)
