"""Language models in PyTorch with the shapes of `logitless train`'s, for compare/training.py. Each returns the hidden
states before the head and has the head's weight as `head`."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def attend(q, k, v):
    """Returns causal attention, [B, T, H, D] -> [B, T, H D]; fewer heads of k and v are shared."""
    y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True,
                                       enable_gqa=k.shape[2] != q.shape[2])
    return y.transpose(1, 2).flatten(2)


class GptBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention, self.projection = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.attention(self.ln_1(x)).chunk(3, -1))
        x = x + self.projection(attend(q, k, v))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, vocab, length, layers, dim, heads):
        super().__init__()
        self.embedding, self.places = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(GptBlock(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    @property
    def head(self):
        return self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def rotate(x, cosines, sines):
    """Rotates [B, T, H, D] by position; pairs are the two halves, as in Hugging Face."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cosines - b * sines, b * cosines + a * sines), -1)


class LlamaBlock(nn.Module):
    def __init__(self, dim, heads, kv_heads, inner):
        super().__init__()
        width = dim // heads
        self.width = width
        self.norm_1, self.norm_2 = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.q, self.o = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.k, self.v = (nn.Linear(dim, kv_heads * width, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(dim, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, dim, bias=False)

    def forward(self, x, cosines, sines):
        y = self.norm_1(x)
        q, k, v = (part(y).unflatten(-1, (-1, self.width)) for part in (self.q, self.k, self.v))
        x = x + self.o(attend(rotate(q, cosines, sines).to(v.dtype), rotate(k, cosines, sines).to(v.dtype), v))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """The model of Llama 3.2, with a tied head."""

    def __init__(self, vocab, length, layers, dim, heads, kv_heads, inner):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(LlamaBlock(dim, heads, kv_heads, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        width = dim // heads
        rates = torch.exp(-math.log(500000.0) * torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(length), rates)[:, None, :]
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    @property
    def head(self):
        return self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cosines, self.sines)
        return self.norm(x)


# The sizes of `logitless train --model`. PyTorch's embedding of GPT-2 is padded to a multiple of 64 entries, which
# makes its GEMMs faster.
SIZES = {
    "gpt2": dict(layers=12, dim=768, heads=12),
    "gpt2-medium": dict(layers=24, dim=1024, heads=16),
    "gpt2-large": dict(layers=36, dim=1280, heads=20),
    "llama-3.2-1b": dict(layers=16, dim=2048, heads=32, kv_heads=8, inner=8192),
}
VOCABS = {"gpt2": 50257, "gpt2-medium": 50257, "gpt2-large": 50257, "llama-3.2-1b": 128256}


def make(name, length):
    vocab = -(-VOCABS[name] // 64) * 64
    model = (Llama if name.startswith("llama") else Gpt)(vocab, length, **SIZES[name])
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return model
