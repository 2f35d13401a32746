"""Writes into parts of a tensor, as losses mask logits: autochunk gives PyTorch's results and gradients."""

import warnings

import numpy
import pytest
import torch
import torch.nn.functional as F
from losses_battery.step import outputs_and_gradients

from logitless.torch import autochunk

INF = float("inf")
ROWS, WIDTH, VOCAB = 24, 8, 96


def entry(z):
    z[:, 3] = -INF
    return z.logsumexp(-1).mean()


def padded_vocabulary(z):
    z[..., 90:] = -1e4
    return F.cross_entropy(z, torch.arange(ROWS) % 90)


def of_a_list(z):
    z[:, [1, 5]] = -INF
    return z.logsumexp(-1).mean()


def rows_of_indices_within_a_slice(z):
    z[4:, torch.tensor([1, 5, 9])] = 2.0
    return z.square().mean()


def by_a_mask(z):
    z[z < -1] = -INF
    return z.logsumexp(-1).mean()


def row_from_another(z):
    z[5] = z[6] * 2
    return z.square().mean()


def shifted(z):
    z[1:, 0] = z[:-1, 1]
    return z.square().mean()


def added_to(z):
    z[:, :48] += 1.0
    z[::2] *= 2.0
    return z.square().mean()


def through_a_view(z):
    z[:, :48].mul_(2.0)
    part = z.view(4, 6, VOCAB)
    part[:, -1] = 0
    return z.square().mean() + part[0].sum()


def through_a_transpose(z):
    columns = z.t()
    columns[3] = 0.0
    return z.square().mean() + columns[2:4].sum()


def diagonals(z):
    z.diagonal().fill_(-5.0)
    s = z @ z.T / VOCAB
    s.fill_diagonal_(-1e9)
    return s.logsumexp(1).mean()


def diagonals_of_parts(z):
    label = -torch.ones(ROWS, VOCAB)
    label[4:20].diagonal().fill_(1.0)
    label[:, 30:40].diagonal()[1:5] *= 3.0
    z = z * label
    z[4:20, 3:19].fill_diagonal_(7.0)
    batch = z.reshape(4, 6, VOCAB) * 1
    batch[1:3, :, 10:].diagonal(0, 1, 2)[:, 1:4] -= 2
    return batch.square().mean() + z.logsumexp(1).sum()


def assembled(z):
    made = torch.empty_like(z)
    made[:12] = z[:12]
    made[12:] = z[12:].relu()
    steps = z.new_zeros(ROWS)
    steps[::2] = z[::2].logsumexp(-1)
    return made.square().mean() + steps.sum()


def mask_of_columns(z):
    mask = torch.zeros(ROWS, VOCAB, dtype=torch.bool)
    mask[:, ::3] = True
    return z.masked_fill(mask, -INF).logsumexp(-1).mean()


def of_a_batch(h, w):
    z = F.linear(h.view(4, 6, WIDTH), w)  # a view of a matrix
    z[..., 90:] = -INF
    z[:, 0] -= 1.0
    return z[:, 1:].logsumexp(-1).mean() + z[:, 0, :5].sum()


def by_sequences(z):
    z[(3, 5),] = 0.0
    z[range(7, 9)] = 1.0
    z[numpy.array([10, 12]), 1:4] = 2.0
    z[numpy.int64(2)] *= 0.5
    z[-1] = z[-2]
    return z.square().mean()


def nothing(z):
    z[:, VOCAB:] = -INF
    z[:0] += 1.0
    z[:, :0].mul_(0.5)
    return z.logsumexp(-1).mean()


def into_padding(z):
    made = torch.zeros(ROWS, VOCAB)
    made[:, 3:] = z[:, 3:]
    made[:, 0] += 1
    return (made * z).sum()


LOGITS = [
    by_sequences,
    nothing,
    into_padding,
    entry,
    padded_vocabulary,
    of_a_list,
    rows_of_indices_within_a_slice,
    by_a_mask,
    row_from_another,
    shifted,
    added_to,
    through_a_view,
    through_a_transpose,
    diagonals,
    diagonals_of_parts,
    assembled,
    mask_of_columns,
]


@pytest.mark.parametrize("executor", ["native", "python"])
@pytest.mark.parametrize("loss", [*LOGITS, of_a_batch], ids=lambda f: f.__name__)
def test_writes_into_parts(loss, executor):
    def function(h, w):
        return loss(h, w) if loss is of_a_batch else loss(F.linear(h, w))

    torch.manual_seed(0)
    args = (torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(VOCAB, WIDTH, requires_grad=True))
    (wanted,), gradients = outputs_and_gradients(function, args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (made,), found = outputs_and_gradients(autochunk(function, executor=executor, memory_budget="4KiB"), args)
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)
    for a, b in zip(found, gradients):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# The number fuses with what reads the logits: no copy of them is made.
def test_a_masked_vocabulary_is_computed_in_chunks():
    def function(h, w, y):
        z = F.linear(h, w)
        z[:, 1000:] = -INF
        return F.cross_entropy(z, y)

    args = torch.randn(256, 16, requires_grad=True), torch.randn(1024, 16, requires_grad=True), torch.arange(256)
    chunked = autochunk(function, memory_budget="256KiB")
    outputs_and_gradients(chunked, args)
    assert "NOT met" not in chunked.explain()
