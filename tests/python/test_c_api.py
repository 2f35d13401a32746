"""The C ABI as Python declares it, against the library itself, and the formula that both have."""

import ctypes
import itertools

import numpy as np
import pytest
from logitless import _library as c
from logitless._options import LOSS_TERMS, LossOptions
from logitless._token_loss import Smoothing, formula, of_library

SIZED = {name: struct for name, struct in c.STRUCTS.items() if hasattr(struct, "struct_size")}


@pytest.mark.parametrize("name", SIZED)
def test_structs_begin_as_the_library_makes_them(name):
    struct, made = SIZED[name], SIZED[name]()
    getattr(c.lib, f"{name}_init")(ctypes.byref(made), ctypes.sizeof(struct))
    assert bytes(c.new(struct)) == bytes(made)


def test_terms_of_the_loss_are_options_of_it():
    assert set(LOSS_TERMS) == {name for name, _ in c.LossTerms._fields_} - {"struct_size"}
    assert set(LOSS_TERMS) <= {name for name, _ in c.CrossEntropyOptions._fields_} & set(LossOptions._fields)
    for name, term in LOSS_TERMS.items():
        assert getattr(LossOptions(), name) == term.default and term.least <= term.default <= term.most


def test_ranges_are_the_librarys():
    one, two = np.ones(1), np.ones((1, 1))
    rest = Smoothing(3, 3.0, one)
    for name, (_, least, most, _) in LOSS_TERMS.items():
        for bound, beyond in ((least, least - 0.5), (most, most + 0.5)):
            if not np.isfinite(bound):
                continue
            of_library(LossOptions(**{name: bound}), one, two, rest=rest)
            with pytest.raises(ValueError, match=f"{name}: expected a number .*, got {beyond:g}"):
                of_library(LossOptions(**{name: beyond}), one, two, rest=rest)


def random_tokens(count=4000, seed=11):
    rng = np.random.default_rng(seed)
    lse = rng.normal(3.0, 4.0, count)
    target = lse - rng.exponential(3.0, count)
    class_weight = rng.uniform(0.0, 2.0, count)
    class_weight[:7], target[:3] = 0.0, -np.inf
    return lse, target, class_weight, Smoothing(257, 301.5, rng.normal(200.0, 300.0, count))


VALUES = {"label_smoothing": (0.0, 0.15, 1.0), "z_loss": (0.0, 1e-2)}


def test_every_term_has_values():
    assert set(VALUES) == set(LOSS_TERMS)


@pytest.mark.parametrize("values", list(itertools.product(*VALUES.values())), ids=str)
def test_the_formula_is_the_librarys(values):
    options = LossOptions(**dict(zip(VALUES, values)))
    lse, target, class_weight, rest = random_tokens()
    rest = rest if options.label_smoothing else None
    with np.errstate(invalid="ignore"):
        mine = formula(np, options, lse, lse - target, class_weight, rest)
    made = of_library(options, lse, target[:, None], class_weight[:, None], rest=rest)
    # ulps of the greatest term, because terms may cancel
    size = np.abs(class_weight * np.where(class_weight == 0.0, 0.0, lse - target)) + options.z_loss * lse * lse
    if rest is not None:
        size += (np.abs(rest.class_total * lse) + np.abs(rest.logit_sum)) / rest.vocab
    assert np.all(np.abs(mine - made.loss) <= 4 * np.finfo(float).eps * size)
    assert np.isfinite(made.loss).all()


def test_the_formula_without_class_weights():
    lse, target, _, _ = random_tokens()
    lse, target = lse[3:], target[3:]
    for options in (LossOptions(), LossOptions(z_loss=0.1)):
        made = of_library(options, lse, target[:, None])
        np.testing.assert_allclose(formula(np, options, lse, lse - target), made.loss, rtol=1e-15)


def test_arrays_of_the_library_may_be_strided():
    lse, target, class_weight, _ = random_tokens(20)
    plain = of_library(LossOptions(z_loss=0.5), lse, target[:, None], class_weight[:, None])
    for wide in (np.repeat(lse, 3)[::3], lse[::-1].copy()[::-1]):
        made = of_library(LossOptions(z_loss=0.5), wide, target[:, None], class_weight[:, None])
        assert not wide.flags.c_contiguous and np.array_equal(made.loss, plain.loss)
