"""Heads beyond one target at one temperature, in both frameworks, against full logits in float64: selected ids, the sets of
ids that a sampler kept, a temperature for each token."""

import importlib
import inspect
import re

import numpy as np
import pytest
from expecting import expected_shares
from loss_frameworks import (
    ADVANTAGES, B, BIAS, HIDDEN, REF_HIDDEN, REF_WEIGHT, RNG, T, TARGETS, V, VALID, WEIGHT, error, normal,
)

TOKENS = 2 * B * T
CAPPED = dict(softcap=4.0, logit_scale=0.7)
TEMPERATURE = np.exp(normal(2 * B, T, seed=91, scale=0.4))


def head(f):
    return importlib.import_module(f.losses.__name__.rpartition(".")[0])


# --- Selected ids.

K = 4
OF_ALL = np.array([3, 0, 3, V - 1], np.int32)  # one of them twice
OF_EACH = RNG(61).integers(0, V, (2 * B, T, K)).astype(np.int32)
OF_EACH[0, 0, 1] = OF_EACH[1, 2, :] = -100
OF_IDS = normal(2 * B, T, K, seed=62)


def selected(f, ids, target, **options):
    """Returns two functions of the head: a sum of all results by shares, and the results; ours and those of logits."""
    shares, given = f.array(OF_IDS), {f.target: f.array(TARGETS)} if target else {}

    def call(hidden, weight, bias):
        found = head(f).linear_logprobs(hidden, weight, bias=bias, selected_ids=f.array(ids), **given, **options)
        assert (found[0] is None) == (not target) and found[3].shape == (2 * B, T, K)
        return found

    def formula(hidden, weight, bias):
        z = f.paper.logits(hidden, weight, bias, **options)
        log_p = f.paper.log_p(z)
        wanted = np.broadcast_to(ids, (2 * B, T, K))
        counts = VALID if target else (wanted >= 0).any(-1)
        wanted = np.where(counts[..., None], wanted, -100)
        each = [f.paper.of_targets(log_p, f.array(wanted[..., k])) for k in range(K)]
        lse = f.xp.log(f.xp.exp(z).sum(-1))
        rows = f.array(counts)
        found = [f.xp.where(rows, part, 0.0) for part in (f.paper.entropy(z), lse)]
        return (f.paper.of_targets(log_p, f.array(TARGETS)) if target else None, *found, f.xp.stack(each, -1))

    def total(of):
        def loss(*arrays):
            log_prob, entropy, lse, selected = of(*arrays)
            value = (selected * shares).sum() + 0.3 * entropy.sum() + 0.1 * lse.sum()
            return value if log_prob is None else value + 0.7 * log_prob.sum()

        return loss

    return total(call), total(formula), call, formula


@pytest.mark.parametrize("target", [True, False], ids=["target", "no_target"])
@pytest.mark.parametrize("ids, options", [(OF_ALL, {}), (OF_EACH, CAPPED)], ids=["of_all", "of_each"])
def test_selected_ids(f, ids, options, target):
    loss, exact_loss, call, formula = selected(f, ids, target, **options)
    value, gradients = f.gradients(loss, HIDDEN, WEIGHT, BIAS)
    exact, exact_gradients = f.exact_gradients(exact_loss, HIDDEN, WEIGHT, BIAS)
    assert error(f.numpy(value), exact) < f.exact
    for one, other in zip(gradients, exact_gradients):
        assert error(f.numpy(one), other) < f.exact_gradient
    part = slice(0 if target else 1, None)
    f.close(call(*map(f.array, (HIDDEN, WEIGHT, BIAS)))[part], lambda *given: formula(*given)[part])


@pytest.mark.parametrize("message, change", {
    "selected_ids: expected [K] or [6, 6, K], got [6, 4]": dict(selected_ids=OF_EACH[0]),
    "selected_ids: expected [K] or [6, 6, K], got [0]": dict(selected_ids=OF_ALL[:0]),
    "selected_ids: expected int32 or int64": dict(selected_ids=OF_ALL.astype(np.float32)),
    "{target}: expected [6, 6] or [6, 6, K], got [6]": dict(target=TARGETS[0], selected_ids=OF_ALL),
    "{target}: expected": dict(),
}.items())
def test_bad_selected_ids_are_named(f, message, change):
    given = {f.target if name == "target" else name: f.array(value) for name, value in change.items()}
    with pytest.raises((TypeError, ValueError)) as raised:
        head(f).linear_logprobs(f.array(HIDDEN), f.array(WEIGHT), **given)
    assert message.format(target=f.target) in str(raised.value)


def test_an_id_outside_the_vocabulary_is_named():
    torch = pytest.importorskip("torch")
    from logitless.torch import linear_logprobs

    with pytest.raises(ValueError, match=rf"selected_ids: expected token ids in \[0, {V}\), or ignore_index -100, got {V}"):
        linear_logprobs(*map(torch.from_numpy, (HIDDEN, WEIGHT, TARGETS)), selected_ids=torch.tensor([1, V], device="cpu"))


# --- Kept sets.

KEPT = RNG(71).random((2 * B, T, V)) < 0.3
KEPT[..., 2] = True
np.put_along_axis(KEPT, np.maximum(TARGETS, 0)[..., None], True, -1)
KEPT[2, 3] = np.arange(V) == TARGETS[2, 3]  # the target alone
KEPT[4, 2] = True  # the whole vocabulary
OF_SETS = normal(2 * B, T, 3, seed=73)


def padded(kept):
    """Returns kept_ids [..., K] of sets [..., V], in an order of their own."""
    order = RNG(74).permuted(np.broadcast_to(np.arange(V), kept.shape), axis=-1)
    ids = np.where(np.take_along_axis(kept, order, -1), order, -1)
    return dict(kept_ids=ids.astype(np.int32))


def listed(kept):
    counts = kept.reshape(TOKENS, V).sum(-1)
    ids = np.concatenate([np.nonzero(kept)[-1], [5, -1]])  # padding after the last set
    return dict(kept_ids=ids.astype(np.int32), kept_offsets=np.concatenate([[0], counts.cumsum()]).astype(np.int32))


def kept_call(f, hidden, weight, bias, temperature, kept, targets=TARGETS, **options):
    given = {name: f.array(value) for name, value in kept.items()}
    found = head(f).linear_kept_logprobs(
        hidden, weight, f.array(targets), bias, temperature=temperature, **given, **options)
    return f.xp.stack(found, -1)


def kept_formula(f, hidden, weight, bias, temperature, sets=KEPT, **options):
    z = f.paper.logits(hidden, weight, bias, **options) / temperature[..., None]
    rows = f.array(VALID)[..., None]
    kept = f.array(np.where(VALID[..., None], sets, True))
    e = f.xp.where(kept, f.xp.exp(z), 0.0)
    lse = f.xp.log(e.sum(-1))
    log_p = z - lse[..., None]
    entropy = -f.xp.where(kept, f.xp.exp(log_p) * log_p, 0.0).sum(-1)
    return f.xp.where(rows, f.xp.stack([f.paper.of_targets(log_p, f.targets), entropy, lse], -1), 0.0)


@pytest.mark.parametrize("form, options", [
    (padded, {}), (listed, dict(softcap=4.0, logit_scale=0.7)),
], ids=["padded", "listed"])
def test_kept_sets(f, form, options):
    shares, arrays = f.array(OF_SETS), (HIDDEN, WEIGHT, BIAS, TEMPERATURE)
    value, gradients = f.gradients(lambda *a: (kept_call(f, *a, form(KEPT), **options) * shares).sum(), *arrays)
    exact, exact_gradients = f.exact_gradients(lambda *a: (kept_formula(f, *a, **options) * shares).sum(), *arrays)
    assert error(f.numpy(value), exact) < f.exact
    for one, other in zip(gradients, exact_gradients):
        assert error(f.numpy(one), other) < f.exact_gradient
    t = f.array(TEMPERATURE)
    found = kept_call(f, *map(f.array, (HIDDEN, WEIGHT, BIAS)), t, form(KEPT), **options)
    f.close([found], lambda *given: [kept_formula(f, *given, f.double(TEMPERATURE), **options)])


def test_a_set_without_its_target(f):
    """The log-probability is -inf, without a gradient; entropy and lse are those of the set."""
    sets = KEPT.copy()
    sets[1, 3], sets[3, 2] = False, np.arange(V) == (TARGETS[3, 2] + 1) % V  # no entry; another one
    at = dict(temperature=1.0, kept=listed(sets))

    def total(*arrays):
        found = kept_call(f, *arrays, **at)
        return (f.xp.where(f.xp.isfinite(found), found, 0.0) * f.array(OF_SETS)).sum()

    found = f.numpy(kept_call(f, *map(f.array, (HIDDEN, WEIGHT, BIAS)), **at))
    assert found[1, 3].tolist() == [-np.inf, 0, -np.inf] and found[3, 2, 0] == -np.inf and abs(found[3, 2, 1]) < 1e-6
    z = f.numpy(f.paper.logits(*map(f.double, (HIDDEN, WEIGHT, BIAS))))
    assert abs(found[3, 2, 2] - z[3, 2, (TARGETS[3, 2] + 1) % V]) < 1e-5
    _, (d_hidden, *_) = f.gradients(total, HIDDEN, WEIGHT, BIAS)
    other = (TARGETS[3, 2] + 1) % V
    assert not f.numpy(d_hidden)[1, 3].any()
    assert error(f.numpy(d_hidden)[3, 2], OF_SETS[3, 2, 2] * WEIGHT[other]) < 1e-5


def test_a_confident_token_has_all_digits(f):
    """1 - p is 1e-9 of its gradient: differences to 1 would be 0 in float32."""
    hidden, weight = np.array([[20.0, 0.0]], np.float32), np.array([[1.0, 0.1], [-0.03, 0.2], [9, 9]], np.float32)
    ids = f.array(np.array([[0, 1]], np.int32))

    def loss(x):
        return head(f).linear_kept_logprobs(x, f.array(weight), f.array(np.zeros(1, np.int32)), kept_ids=ids)[0].sum()

    value, (gradient,) = f.gradients(loss, hidden)
    rest = np.exp(-20.6)
    assert abs(f.numpy(value) / -rest - 1) < 1e-5
    assert error(f.numpy(gradient)[0], rest * (weight[0] - weight[1])) < 1e-5


@pytest.mark.parametrize("message, change", {
    "kept_ids: expected [6, 6, K] without kept_offsets, got [36]": dict(kept_ids=np.zeros(TOKENS, np.int32)),
    "kept_ids: expected [M] beside kept_offsets, got [6, 6, 23]": dict(kept_offsets=np.zeros(TOKENS + 1, np.int32)),
    "kept_offsets: expected [37], got [36]": dict(kept_offsets=np.zeros(TOKENS, np.int32)),
    "kept_ids: expected int32 or int64": dict(kept_ids=np.zeros((2 * B, T, 2), np.float32)),
    "temperature: expected [6, 6] or [], got [6]": dict(temperature=TEMPERATURE[0]),
    "temperature: expected a number above 0, got 0": dict(temperature=0),
    "softcap: expected a number above 0": dict(softcap=-1.0),
    "{target}: expected [6, 6], got [6]": dict(target=TARGETS[0]),
    "weight: expected [V, 5]": dict(weight=WEIGHT[:, 1:]),
}.items())
def test_bad_sets_are_named(f, message, change):
    given = {"hidden": HIDDEN, "weight": WEIGHT, "target": TARGETS, **padded(KEPT), **change}
    given = {name: f.array(value) if isinstance(value, np.ndarray) else value for name, value in given.items()}
    given[f.target] = given.pop("target")
    with pytest.raises((TypeError, ValueError)) as raised:
        head(f).linear_kept_logprobs(**given)
    assert message.format(target=f.target) in str(raised.value)


@pytest.mark.parametrize("message, change", {
    f"kept_ids: expected token ids in [0, {V}), got {V} at position 7": lambda ids: np.where(np.arange(ids.size).reshape(ids.shape) == 7, V, ids),  # noqa: E501
    "kept_offsets: expected numbers that rise from 0 to at most 3, the length of kept_ids, got 0 to 36": lambda ids: ids[0, 0, :3],
}.items())
def test_bad_entries_are_named_on_a_cpu(f, message, change):
    """Elsewhere their results are NaN, as where JAX traces them."""
    if f.target == "target" and f.device != "cpu":
        pytest.skip("values of a GPU are not read")
    kept = dict(kept_ids=change(padded(KEPT)["kept_ids"]))
    if kept["kept_ids"].ndim == 1:
        kept["kept_offsets"] = np.arange(TOKENS + 1, dtype=np.int32)
    call = lambda: kept_call(f, *map(f.array, (HIDDEN, WEIGHT, BIAS)), 1.0, kept)  # noqa: E731
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
    with pytest.raises(ValueError, match=re.escape(f"{f.target}: expected token ids in [0, {V}), or ignore_index -100, got -1 at")):
        kept_call(f, *map(f.array, (HIDDEN, WEIGHT, BIAS)), 1.0, padded(KEPT), targets=np.where(VALID, -1, TARGETS))
    if f.target == "targets":
        import jax

        traced = jax.jit(lambda **kept: head(f).linear_kept_logprobs(HIDDEN, WEIGHT, TARGETS, **kept)[0])(**kept)
        wrong = np.isnan(f.numpy(traced))
        assert (wrong == VALID).all() if "kept_offsets" in kept else wrong.any() and not wrong[1:].any()


def test_a_temperature_without_dimensions(f):
    arrays, sets = [*map(f.array, (HIDDEN, WEIGHT, BIAS))], padded(KEPT)
    one, other = (kept_call(f, *arrays, t, sets) for t in (0.7, f.array(np.array(0.7, np.float32))))
    assert error(f.numpy(one), f.numpy(other)) < 1e-6


def test_torch_kept_sets_in_16_bits():
    torch = pytest.importorskip("torch")
    from logitless.torch import linear_kept_logprobs

    x, w, y, ids = map(torch.from_numpy, (HIDDEN, WEIGHT, TARGETS, padded(KEPT)["kept_ids"]))
    half = [t.bfloat16().requires_grad_() for t in (x, w)]
    exact = [t.detach().double().requires_grad_() for t in half]
    for given in (half, exact):
        linear_kept_logprobs(*given, y, kept_ids=ids)[0].sum().backward()
    for one, other in zip(half, exact):
        assert one.grad.dtype is torch.bfloat16 and error(one.grad.float().numpy(), other.grad.numpy()) < 4e-3
    found = [linear_kept_logprobs(*given, y, kept_ids=ids)[2].detach().numpy() for given in (half, exact)]
    assert error(found[0], found[1]) < 1e-6


# --- Temperatures.

TOKEN, CLASS = np.abs(normal(2 * B, T, seed=92)), np.abs(normal(V, seed=93))
SHARES, WEIGHTS = normal(2 * B, T, 4, seed=94), np.abs(normal(2 * B, T, 2, seed=95))
PAIRS = np.stack([TARGETS, np.where(VALID, RNG(96).integers(0, V, (2 * B, T)), -100)], -1).astype(np.int32)


def parts(f, hidden, weight, bias, temperature, **options):
    """Returns log p [(2 * B), T, V], entropy and lse of the tempered logits."""
    z = f.paper.logits(hidden, weight, bias, **options) / temperature[..., None]
    return f.paper.log_p(z), f.paper.entropy(z), f.xp.log(f.xp.exp(z).sum(-1))


def check(f, call, formula, arrays):
    value, gradients = f.gradients(call, *arrays)
    exact, exact_gradients = f.exact_gradients(formula, *arrays)
    assert error(f.numpy(value), exact) < f.exact
    for one, other in zip(gradients, exact_gradients):
        assert np.linalg.norm(other) > 0 and error(f.numpy(one), other) < f.exact_gradient


@pytest.mark.parametrize("biased, options", [(False, {}), (True, {}), (False, CAPPED)], ids=["hidden", "bias", "softcap"])
def test_log_probabilities_at_temperatures(f, biased, options):
    arrays = (HIDDEN, WEIGHT, TEMPERATURE) + (BIAS,) * biased
    shares, rows = f.array(SHARES), f.array(VALID)

    def call(x, w, t, b=None):
        logps, entropy, lse = head(f).linear_logprobs(x, w, f.array(PAIRS), b, temperature=t, **options)
        return (f.xp.concatenate([logps, f.xp.stack([entropy, lse], -1)], -1) * shares).sum()

    def formula(x, w, t, b=None):
        log_p, *more = parts(f, x, w, b, t, **options)
        logps = [f.paper.of_targets(log_p, f.array(PAIRS[..., k])) for k in range(2)]
        return (f.xp.where(rows[..., None], f.xp.stack([*logps, *more], -1), 0.0) * shares).sum()

    check(f, call, formula, arrays)


def test_temperatures_of_ignored_tokens_do_not_count(f):
    """Those of padding may be 0 or NaN."""
    odd = np.where(VALID, TEMPERATURE, np.where(np.arange(T) % 2, 0.0, np.nan)).astype(TEMPERATURE.dtype)

    def call(x, w, temperature):
        return head(f).linear_cross_entropy(x, w, f.array(TARGETS), temperature=f.array(temperature))

    found, wanted = (f.gradients(lambda x, w: call(x, w, t), HIDDEN, WEIGHT)[1] for t in (odd, np.where(VALID, odd, 1)))
    for one, other in zip(found, wanted):
        assert (f.numpy(one) == f.numpy(other)).all()


LOSSES = [dict(), dict(reduction="sum", class_weight=CLASS, z_loss=1e-2), dict(token_weight=TOKEN, normalizer=7.0),
          dict(reduction="none", token_weight=TOKEN), dict(target_weight=WEIGHTS, token_weight=TOKEN)]


@pytest.mark.parametrize("biased, options", [*((True, o) for o in LOSSES), (False, LOSSES[1])],
                         ids=lambda o: ("bias" if o else "hidden") if isinstance(o, bool) else "_".join(o) or "mean")
def test_losses_at_temperatures(f, options, biased):
    arrays = (HIDDEN, WEIGHT, TEMPERATURE) + (BIAS,) * biased
    none, ids = options.get("reduction") == "none", PAIRS if "target_weight" in options else TARGETS
    token, of_class = f.array(options.get("token_weight", np.ones((2 * B, T)))), options.get("class_weight", np.ones(V))
    shares = f.array(SHARES[..., 0])

    def call(x, w, t, b=None):
        given = {n: f.array(v) if isinstance(v, np.ndarray) else v for n, v in options.items()}
        found = head(f).linear_cross_entropy(x, w, f.array(ids), b, temperature=t, **given)
        return (found * shares).sum() if none else found

    def formula(x, w, t, b=None):
        log_p, _, lse = parts(f, x, w, b, t)
        share = f.array(np.where(VALID, of_class[np.maximum(TARGETS, 0)], 0.0))
        each, count = -share * f.paper.of_targets(log_p, f.array(TARGETS)), share
        if "target_weight" in options:
            each = -sum(f.array(WEIGHTS[..., k]) * f.paper.of_targets(log_p, f.array(PAIRS[..., k])) for k in range(2))
        each = f.xp.where(f.array(VALID), (each + options.get("z_loss", 0.0) * lse**2) * token, 0.0)
        if none:
            return (each * shares).sum()
        return each.sum() / (options.get("normalizer") or (count * token).sum()) if "reduction" not in options else each.sum()

    check(f, call, formula, arrays)


def test_other_results_at_temperatures(f):
    x, w, b, t, ids = map(f.array, (HIDDEN, WEIGHT, BIAS, TEMPERATURE, TARGETS))
    loss, lse, accuracy, argmax, logits = head(f).linear_cross_entropy(
        x, w, ids, b, temperature=t, return_lse=True, accuracy=True, return_argmax=True, return_target_logits=True)
    log_p, _, exact = (f.numpy(a) for a in parts(f, *map(f.double, (HIDDEN, WEIGHT, BIAS, TEMPERATURE))))
    best = np.where(VALID, log_p.argmax(-1), -1)
    assert (f.numpy(argmax) == best).all() and abs(f.numpy(accuracy) - (best == TARGETS)[VALID].mean()) < 1e-6
    assert error(f.numpy(lse), np.where(VALID, exact, 0)) < f.exact
    of_target = np.where(VALID, np.take_along_axis(log_p, np.maximum(TARGETS, 0)[..., None], -1)[..., 0], 0)
    assert error(f.numpy(logits), of_target + np.where(VALID, exact, 0)) < f.exact
    assert error(f.numpy(loss), -of_target.sum() / VALID.sum()) < f.exact
    selected = head(f).linear_logprobs(x, w, ids, b, temperature=t, selected_ids=f.array(np.array([3, 5], np.int32)))[3]
    assert error(f.numpy(selected), np.where(VALID[..., None], log_p[..., [3, 5]], 0)) < f.exact


def test_one_number_is_a_temperature_for_all(f):
    x, w, b, ids = map(f.array, (HIDDEN, WEIGHT, BIAS, TARGETS))
    for options in ({}, CAPPED):
        one = head(f).linear_logprobs(x, w, ids, b, temperature=1.3, **options)
        each = head(f).linear_logprobs(x, w, ids, b, temperature=f.array(np.full((2 * B, T), 1.3, np.float32)), **options)
        for a, c in zip(one, each):
            assert error(f.numpy(a), f.numpy(c)) < 1e-6
        losses = [f.numpy(head(f).linear_cross_entropy(x, w, ids, b, temperature=t, **options))
                  for t in (1.3, f.array(np.full((2 * B, T), 1.3, np.float32)))]
        assert error(*losses) < 1e-6


@pytest.mark.parametrize("budget", [None, "360KiB"])
def test_16_bits_in_chunks(f, budget):
    """The same within any budget: lse to 1e-6, gradients to 4e-3."""
    x, w = normal(300, 16, seed=97), normal(1000, 16, seed=98, scale=0.5)
    ids, t = RNG(99).integers(0, 1000, 300).astype(np.int32), np.exp(normal(300, seed=100, scale=0.3))
    if f.target == "target":
        half = [f.array(a).bfloat16() for a in (x, w)]
    else:
        half = [f.xp.asarray(a, f.xp.bfloat16) for a in (x, w)]
    rounded = [f.numpy(a) for a in half]

    def call(x, w):
        logps, entropy, lse = head(f).linear_logprobs(x, w, f.array(ids), temperature=f.single(t), memory_budget=budget)
        return (logps + 0.1 * entropy + 0.2 * lse).sum(), lse

    def formula(x, w):
        log_p, entropy, lse = parts(f, x, w, None, f.double(t))
        return (f.paper.of_targets(log_p, f.array(ids)) + 0.1 * entropy + 0.2 * lse).sum()

    assert error(f.numpy(call(*half)[1]), f.numpy(parts(f, *map(f.double, rounded), None, f.double(t))[2])) < 1e-6
    _, exact = f.exact_gradients(formula, *rounded)
    if f.target == "target":
        given = [a.requires_grad_() for a in half]
        gradients = f.xp.autograd.grad(call(*given)[0], given)
        assert all(g.dtype is f.xp.bfloat16 for g in gradients)
    else:
        gradients = f.jax.grad(lambda *a: call(*a)[0], (0, 1))(*half)
    for one, other in zip(gradients, exact):
        assert error(f.numpy(one), other) < 4e-3


@pytest.mark.parametrize("message, change", {
    "temperature: expected [6, 6] or [], got [6]": dict(temperature=TEMPERATURE[0]),
    "temperature: expected floats, got": dict(temperature=TARGETS),
    "temperature: expected a number above 0, got 0": dict(temperature=0),
    "label_smoothing: expected 0 beside a temperature for each token": dict(label_smoothing=0.1, bias=BIAS),
    "weight: expected [V, 5]": dict(weight=WEIGHT[:, 1:]),
}.items())
def test_bad_temperatures_are_named(f, message, change):
    given = {"hidden": HIDDEN, "weight": WEIGHT, f.target: TARGETS, "temperature": TEMPERATURE, **change}
    given = {name: f.array(value) if isinstance(value, np.ndarray) else value for name, value in given.items()}
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as raised:
        head(f).linear_cross_entropy(**given)
    assert message in str(raised.value).replace(" or []", " or []")


# --- Heavy masks.

AT = np.arange(2 * B * T).reshape(2 * B, T)
HEAVY = {
    "one token": AT == 15, "one sequence": AT // T == 1, "all but one sequence": AT // T != 4, "a quarter": AT % 4 == 1,
    "a tenth": AT % 10 == 3, "no token": AT < 0,
}


@pytest.mark.parametrize("counts", HEAVY.values(), ids=HEAVY.keys())
def test_losses_of_few_tokens(f, counts):
    """A loss of tokens and one of sequences, of which some have no token. Hidden states of the others are NaN."""
    ids = RNG(103).integers(0, V, (2 * B, T))
    target = f.array(np.where(counts, ids, -100).astype(np.int32))
    odd = np.where(counts[..., None], HIDDEN, np.nan).astype(np.float32)
    advantages = ADVANTAGES[:, None]

    def call(x, w, b):
        mean = head(f).linear_cross_entropy(x, w, target, b)
        return mean + 0.7 * f.losses.grpo_loss(x, w, target, f.array(ADVANTAGES), b)[0]

    def formula(x, w, b):
        log_p = f.paper.log_p(f.paper.logits(x, w, b))
        logps = f.xp.where(f.array(counts), f.paper.of_targets(log_p, f.array(ids)), 0.0)
        each = f.array(advantages) * f.xp.exp(logps - f.stopped(logps)) * f.array(counts)
        return -logps.sum() / max(counts.sum(), 1) - 0.7 * (each.sum(-1) / f.array(counts.sum(-1).clip(1))).mean()

    value, gradients = f.gradients(call, odd, WEIGHT, BIAS)
    exact, exact_gradients = f.exact_gradients(formula, HIDDEN, WEIGHT, BIAS)
    assert error(f.numpy(value), exact) < f.exact
    for one, other in zip(gradients, exact_gradients):
        assert error(f.numpy(one), other) < f.exact_gradient
    assert not f.numpy(gradients[0])[~counts].any()


# --- The share of ignored tokens, a hint.

TOP = RNG(101).integers(0, V, (2 * B, T, 3)).astype(np.int32)
SCORES = -np.abs(normal(2 * B, T, 3, seed=102)) - 2.0


def _policies(*names):
    return {f"{name}_loss": lambda f, x, w, name=name, **o: getattr(f.losses, f"{name}_loss")(
        x, w, f.targets, f.single(ADVANTAGES), **o)[0] for name in names}


def _pairs(*names, **given):
    return {f"{name}_loss": lambda f, x, w, name=name, **o: getattr(f.losses, f"{name}_loss")(x, w, f.targets, **given, **o)[0]
            for name in names}


def _top_k(f, x, w, **options):
    return f.losses.top_k_loss(x, w, f.losses.TopK(f.array(TOP), f.single(SCORES)), **{f.target: f.targets}, **options)


def _of_teacher(f, x, w, **options):
    teacher = f.single(REF_HIDDEN), f.single(REF_WEIGHT)
    return f.losses.student_top_k_loss(x, w, *teacher, k=3, **{f.target: f.targets}, **options)


# Every function with the argument, by its name: its sum for float32 hidden and weight.
EXPECTING = {
    "linear_cross_entropy": lambda f, x, w, **o: head(f).linear_cross_entropy(x, w, f.targets, **o),
    "linear_logprobs": lambda f, x, w, **o: sum(a.sum() for a in head(f).linear_logprobs(x, w, f.targets, **o)),
    "selective_log_softmax": lambda f, x, w, **o: f.losses.selective_log_softmax(x, w, f.targets, **o).sum(),
    **_policies("grpo", "dr_grpo", "dapo", "gspo", "bnpo", "luspo", "gmpo", "cispo", "sapo", "vespo", "ppo"),
    **_pairs("orpo", "cpo", "simpo"),
    "dpo_loss": lambda f, x, w, **o: f.losses.dpo_loss(
        x, w, f.targets, ref_hidden=f.single(REF_HIDDEN), ref_weight=f.single(REF_WEIGHT), **o)[0],
    "ipo_loss": lambda f, x, w, **o: f.losses.ipo_loss(
        x, w, f.targets, ref_hidden=f.single(REF_HIDDEN), ref_weight=f.single(REF_WEIGHT), **o)[0],
    "kto_kl": lambda f, x, w, **o: f.losses.kto_kl(x, w, f.targets, ref_logps=f.single(np.zeros(2 * B)), **o),
    "kto_loss": lambda f, x, w, **o: f.losses.kto_loss(
        x, w, f.targets, f.array(np.arange(2 * B) % 2 == 0), ref_logps=f.single(np.zeros(2 * B)), kl=0.1, **o)[0],
    "multi_token_loss": lambda f, x, w, **o: f.losses.multi_token_loss(x, w, f.targets, shifts=(1, 2), **o)[0],
    "sampled_softmax_loss": lambda f, x, w, **o: f.losses.sampled_softmax_loss(
        x, w, f.targets, sampled_ids=f.array(np.arange(7, dtype=np.int32)), **o),
    "top_k_loss": _top_k,
    "student_top_k_loss": _of_teacher,
}
ELSEWHERE = {"lazy_head"}  # tested in its tests


def _with_argument(f):
    modules = head(f), f.losses
    functions = {name: getattr(module, name) for module in modules for name in module.__all__}
    return {name for name, function in functions.items() if inspect.isfunction(function) and
            "expected_ignored" in inspect.signature(function).parameters}


@pytest.mark.parametrize("name", EXPECTING)
def test_the_share_of_ignored_tokens_arrives(f, name, monkeypatch):
    """Every plan of the call has it, and on a CPU no bit depends on it."""
    assert (_with_argument(f) | {"linear_cross_entropy"}) - ELSEWHERE == set(EXPECTING)
    engine = "._ffi" if hasattr(f, "jax") else "._engine"
    seen = expected_shares(monkeypatch, importlib.import_module(head(f).__name__ + engine))
    share = (1 + list(EXPECTING).index(name)) / 64  # a value that no other call has planned with

    given = [f.single(a) for a in (HIDDEN, WEIGHT)]

    def step(**options):
        def call(x, w):
            return EXPECTING[name](f, x, w, **options)

        if hasattr(f, "jax"):
            value, gradients = f.jax.value_and_grad(call, (0, 1))(*given)
        else:
            leaves = [a.clone().requires_grad_() for a in given]
            value = call(*leaves)
            gradients = f.xp.autograd.grad(value, leaves) if value.requires_grad else ()
        return [f.numpy(a) for a in (value, *gradients)]

    plain = step()
    seen.clear()
    hinted = step(expected_ignored=share)
    assert seen and set(seen) == {share}
    assert all((one == other).all() for one, other in zip(plain, hinted, strict=True))
    with pytest.raises(ValueError, match=r"expected_ignored: expected a number in \[0, 1\], got 1.5"):
        EXPECTING[name](f, *given, expected_ignored=1.5)
