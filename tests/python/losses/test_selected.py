"""linear_logprobs of selected ids beside the target, in both frameworks, against full logits in float64."""

import importlib

import numpy as np
import pytest
from loss_frameworks import B, BIAS, HIDDEN, RNG, T, TARGETS, V, VALID, WEIGHT, error, normal

K = 4
OF_ALL = np.array([3, 0, 3, V - 1], np.int32)  # one of them twice
OF_EACH = RNG(61).integers(0, V, (2 * B, T, K)).astype(np.int32)
OF_EACH[0, 0, 1] = OF_EACH[1, 2, :] = -100
SHARES = normal(2 * B, T, K, seed=62)
HEAD = dict(softcap=4.0, logit_scale=0.7)


def head(f):
    return importlib.import_module(f.losses.__name__.rpartition(".")[0])


def results(f, ids, target, **options):
    """Returns two functions of the head: a sum of all results by shares, and the results; ours and those of logits."""
    shares, given = f.array(SHARES), {f.target: f.array(TARGETS)} if target else {}

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
@pytest.mark.parametrize("ids, options", [(OF_ALL, {}), (OF_EACH, HEAD)], ids=["of_all", "of_each"])
def test_values_and_gradients(f, ids, options, target):
    loss, exact_loss, call, formula = results(f, ids, target, **options)
    value, gradients = f.gradients(loss, HIDDEN, WEIGHT, BIAS)
    exact, exact_gradients = f.exact_gradients(exact_loss, HIDDEN, WEIGHT, BIAS)
    assert error(f.numpy(value), exact) < f.exact
    for one, other in zip(gradients, exact_gradients):
        assert error(f.numpy(one), other) < f.exact_gradient
    part = slice(0 if target else 1, None)
    f.close(call(*map(f.array, (HIDDEN, WEIGHT, BIAS)))[part], lambda *given: formula(*given)[part])


@pytest.mark.parametrize("message, change", {
    "selected_ids: expected [K] or [6, 6, 'K'], got [6, 4]": dict(selected_ids=OF_EACH[0]),
    "selected_ids: expected [K] or [6, 6, 'K'], got [0]": dict(selected_ids=OF_ALL[:0]),
    "selected_ids: expected int32 or int64": dict(selected_ids=OF_ALL.astype(np.float32)),
    "{target}: expected [6, 6] or [6, 6, 'K'], got [6]": dict(target=TARGETS[0], selected_ids=OF_ALL),
    "{target}: expected": dict(),
}.items())
def test_bad_arguments_are_named(f, message, change):
    given = {f.target if name == "target" else name: f.array(value) for name, value in change.items()}
    with pytest.raises((TypeError, ValueError)) as raised:
        head(f).linear_logprobs(f.array(HIDDEN), f.array(WEIGHT), **given)
    assert message.format(target=f.target) in str(raised.value)


def test_an_id_outside_the_vocabulary_is_named():
    torch = pytest.importorskip("torch")
    from logitless.torch import linear_logprobs

    with pytest.raises(ValueError, match=f"selected_ids: expected token ids below {V} or ignore_index -100, got {V}"):
        linear_logprobs(*map(torch.from_numpy, (HIDDEN, WEIGHT, TARGETS)), selected_ids=torch.tensor([1, V], device="cpu"))
