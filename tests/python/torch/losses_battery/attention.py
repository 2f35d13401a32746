"""Attention written out: scores [B, H, T, T] of B = 2 sequences and H = 2 heads."""

import math

import torch
import torch.nn.functional as F

from losses_battery.case import case


def _length(z):
    return z.pairs // 2


def heads(m, key_heads=2):
    length, dim = _length(m.z), max(m.z.dim // 4, 4)
    return tuple(m.normal(2, h, length, dim) for h in (2, key_heads, key_heads))


SCORES = {"big": "scores [B, H, T, T]", "numbers": lambda z: 4 * _length(z) ** 2}


def causal(length, device):
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


@case("attention", heads, **SCORES)
def causal_attention(q, k, v):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    scores = scores.masked_fill(~causal(q.size(-2), q.device), float("-inf"))
    return F.softmax(scores, dim=-1) @ v


@case("attention", lambda m: (*heads(m), m.normal(_length(m.z), grad=False)), **SCORES)
def padded_attention(q, k, v, padding):
    """Bidirectional, with a mask of padding added to the scores."""
    scores = torch.matmul(q, k.transpose(-1, -2)) * q.size(-1) ** -0.5
    scores = scores + torch.where(padding > 1.0, torch.finfo(scores.dtype).min, 0.0)[None, None, None, :]
    return torch.matmul(scores.softmax(-1), v)


@case("attention", heads, **SCORES)
def alibi_attention(q, k, v):
    """A penalty that grows with the distance, with another slope for each head."""
    length = q.size(-2)
    place = torch.arange(length, device=q.device)
    distance = (place[None, :] - place[:, None]).to(q.dtype)
    slopes = 2.0 ** -torch.arange(1, q.size(1) + 1, device=q.device, dtype=q.dtype)
    scores = q @ k.mT / math.sqrt(q.size(-1)) + slopes[:, None, None] * distance
    scores = scores.masked_fill(distance > 0, -1e9)
    return scores.softmax(-1) @ v


@case("attention", heads, **SCORES)
def window_attention(q, k, v):
    """Each position attends to the 64 before it."""
    place = torch.arange(q.size(-2), device=q.device)
    back = place[:, None] - place[None, :]
    seen = (back >= 0) & (back < 64)
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) * q.size(-1) ** -0.5
    shares = torch.softmax(torch.where(seen, scores, torch.finfo(scores.dtype).min), -1)
    return torch.einsum("bhts,bhsd->bhtd", shares, v)


@case("attention", lambda m: heads(m, key_heads=1), **SCORES)
def grouped_softcapped_attention(q, k, v):
    """Two query heads share one of keys; scores are capped."""
    k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * q.size(-1) ** -0.5
    scores = torch.tanh(scores / 50.0) * 50.0
    mask = torch.triu(torch.full(scores.shape[-2:], float("-inf"), device=q.device), diagonal=1)
    return F.softmax(scores + mask, dim=-1, dtype=torch.float32).to(q.dtype) @ v


@case("attention", heads, **SCORES)
def attention_of_torch(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
