"""Layers wider than their inputs and outputs."""

import torch
import torch.nn.functional as F

from losses_battery.case import case

UNITS = {"big": "hidden units [N, V]"}


def up_down(m):
    z = m.z
    return m.hidden(), m.normal(z.vocab, z.dim, scale=z.dim**-0.5), m.normal(z.dim, z.vocab, scale=z.vocab**-0.5)


def gated(m):
    z = m.z
    return *up_down(m), m.normal(z.vocab, z.dim, scale=z.dim**-0.5)


@case("layers", lambda m: (*up_down(m), m.normal(m.z.vocab), m.normal(m.z.dim)), **UNITS)
def mlp_gelu(x, up, down, up_bias, down_bias):
    return F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)


@case("layers", up_down, **UNITS)
def mlp_silu(x, up, down):
    return F.linear(F.silu(F.linear(x, up)), down)


@case("layers", up_down, **UNITS)
def mlp_relu_squared(x, up, down):
    return F.linear(F.relu(F.linear(x, up)).square(), down)


@case("layers", gated, **UNITS)
def swiglu(x, up, down, gate):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


@case("layers", lambda m: (m.hidden(), m.normal(2 * m.z.vocab, m.z.dim, scale=m.z.dim**-0.5), up_down(m)[2]),
      big="gate and units [N, 2 V]", numbers=lambda z: 2 * z.rows * z.vocab)
def geglu_packed(x, gate_up, down):
    """Gate and units come from one GEMM, and are split."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.gelu(gate, approximate="tanh") * up, down)


@case("layers", lambda m: (*gated(m), m.normal(m.z.dim)), **UNITS)
def norm_swiglu_residual(x, up, down, gate, gain):
    """A block: RMS norm, gated layer, residual."""
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * gain
    return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)


@case("layers", lambda m: (*up_down(m), m.normal(m.z.vocab), m.normal(m.z.vocab)), **UNITS)
def layer_norm_of_units(x, up, down, gain, bias):
    """A norm between the two matrix products."""
    return F.linear(F.layer_norm(F.gelu(F.linear(x, up)), (up.shape[0],), gain, bias), down)


def experts(m):
    z = m.z
    wide = z.vocab // 4
    return (
        m.hidden(), m.normal(z.dim, 4), m.normal(4, z.dim, wide, scale=z.dim**-0.5),
        m.normal(4, wide, z.dim, scale=wide**-0.5),
    )


@case("layers", experts, big="hidden units of all experts [E, N, F]")
def dense_mixture_of_experts(x, router, up, down):
    """Every expert sees every token; the router's softmax weighs them."""
    shares = F.softmax(x @ router, -1)
    units = F.gelu(torch.einsum("nd,edf->enf", x, up))
    return torch.einsum("enf,efd,ne->nd", units, down, shares)


@case("layers", experts, big="hidden units of all experts [E, N, F]")
def dense_mixture_with_balance(x, router, up, down):
    """The same with batched products, and a loss that balances the load."""
    shares = F.softmax(x @ router, -1)
    units = F.silu(torch.bmm(x.expand(4, -1, -1), up))
    made = (torch.bmm(units, down) * shares.T[:, :, None]).sum(0)
    load = F.one_hot(shares.argmax(-1), 4).float().mean(0)
    return made.square().mean() + 0.01 * 4 * (load * shares.mean(0)).sum()


@case("layers", lambda m: (m.hidden(), m.normal(m.z.vocab, m.z.dim), m.normal(m.z.vocab, m.z.dim)), **UNITS)
def key_value_memory(x, keys, values):
    """A layer that looks up: a softmax over learnt keys."""
    return torch.softmax(x @ keys.T / x.shape[-1] ** 0.5, -1) @ values


@case("layers", lambda m: (m.hidden(), m.normal(m.z.vocab, m.z.dim, scale=m.z.dim**-0.5)), **UNITS)
def sparse_autoencoder(x, encoder):
    """Tied weights, squared error and the L1 norm of the units."""
    units = F.relu(F.linear(x, encoder) - 0.5)
    return F.mse_loss(units @ encoder, x) + 1e-3 * units.abs().sum(-1).mean()
