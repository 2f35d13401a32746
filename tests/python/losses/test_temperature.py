"""A temperature for each token of linear_logprobs and linear_cross_entropy, against full logits in float64."""

import importlib

import numpy as np
import pytest
from loss_frameworks import B, BIAS, HIDDEN, RNG, T, TARGETS, V, VALID, WEIGHT, error, normal

N = 2 * B
TEMPERATURE = np.exp(normal(N, T, seed=91, scale=0.4))
TOKEN, CLASS = np.abs(normal(N, T, seed=92)), np.abs(normal(V, seed=93))
SHARES, WEIGHTS = normal(N, T, 4, seed=94), np.abs(normal(N, T, 2, seed=95))
PAIRS = np.stack([TARGETS, np.where(VALID, RNG(96).integers(0, V, (N, T)), -100)], -1).astype(np.int32)
CAPPED = dict(softcap=4.0, logit_scale=0.7)


def head(f):
    return importlib.import_module(f.losses.__name__.rpartition(".")[0])


def parts(f, hidden, weight, bias, temperature, **options):
    """Returns log p [N, T, V], entropy and lse of the tempered logits."""
    z = f.paper.logits(hidden, weight, bias, **options) / temperature[..., None]
    return f.paper.log_p(z), f.paper.entropy(z), f.xp.log(f.xp.exp(z).sum(-1))


def check(f, call, formula, arrays):
    value, gradients = f.gradients(call, *arrays)
    exact, exact_gradients = f.exact_gradients(formula, *arrays)
    assert error(f.numpy(value), exact) < f.exact
    for one, other in zip(gradients, exact_gradients):
        assert np.linalg.norm(other) > 0 and error(f.numpy(one), other) < f.exact_gradient


@pytest.mark.parametrize("biased, options", [(False, {}), (True, {}), (False, CAPPED)], ids=["hidden", "bias", "softcap"])
def test_log_probabilities(f, biased, options):
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


LOSSES = [dict(), dict(reduction="sum", class_weight=CLASS, z_loss=1e-2), dict(token_weight=TOKEN, normalizer=7.0),
          dict(reduction="none", token_weight=TOKEN), dict(target_weight=WEIGHTS, token_weight=TOKEN)]


@pytest.mark.parametrize("options", LOSSES, ids=lambda o: "_".join(o) or "mean")
@pytest.mark.parametrize("biased", [False, True], ids=["hidden", "bias"])
def test_losses(f, options, biased):
    arrays = (HIDDEN, WEIGHT, TEMPERATURE) + (BIAS,) * biased
    none, ids = options.get("reduction") == "none", PAIRS if "target_weight" in options else TARGETS
    token, of_class = f.array(options.get("token_weight", np.ones((N, T)))), options.get("class_weight", np.ones(V))
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


def test_other_results(f):
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
        each = head(f).linear_logprobs(x, w, ids, b, temperature=f.array(np.full((N, T), 1.3, np.float32)), **options)
        for a, c in zip(one, each):
            assert error(f.numpy(a), f.numpy(c)) < 1e-6
        losses = [f.numpy(head(f).linear_cross_entropy(x, w, ids, b, temperature=t, **options))
                  for t in (1.3, f.array(np.full((N, T), 1.3, np.float32)))]
        assert error(*losses) < 1e-6


@pytest.mark.parametrize("budget", [None, "900KiB", "150KiB"])
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
def test_bad_arguments_are_named(f, message, change):
    given = {"hidden": HIDDEN, "weight": WEIGHT, f.target: TARGETS, "temperature": TEMPERATURE, **change}
    given = {name: f.array(value) if isinstance(value, np.ndarray) else value for name, value in given.items()}
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as raised:
        head(f).linear_cross_entropy(**given)
    assert message in str(raised.value).replace(" or []", " or []")
