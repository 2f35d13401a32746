"""Margins, regressions and statistics of big outputs."""

import math

import torch
import torch.nn.functional as F

from losses_battery.case import all_pairs, case


def head(m):
    return m.hidden(), m.head(), m.whole(m.z.vocab, m.z.rows)


@case("margins", head)
def multi_margin_of_torch(hidden, weight, target):
    return F.multi_margin_loss(F.linear(hidden, weight), target)


@case("margins", head)
def multi_margin(hidden, weight, target):
    scores = F.linear(hidden, weight)
    right = scores.gather(1, target[:, None])
    margins = F.relu(1.0 + scores - right)
    return (margins.sum(1) - 1.0).mean() / scores.shape[1]


@case("margins", head)
def hinge_to_hardest(hidden, weight, target):
    """The best of the wrong classes against the right one."""
    scores = F.linear(hidden, weight)
    right = scores.gather(1, target[:, None]).squeeze(1)
    wrong = scores.scatter(1, target[:, None], float("-inf"))
    return F.relu(1.0 + wrong.max(dim=1).values - right).mean()


@case("margins", head)
def squared_hinge_one_against_all(hidden, weight, target):
    scores = F.linear(hidden, weight)
    signs = -torch.ones_like(scores)
    signs[torch.arange(scores.shape[0]), target] = 1.0
    return F.relu(1 - signs * scores).square().mean()


@case("margins", lambda m: (m.hidden(), m.head(), m.normal(m.z.rows, m.z.vocab // 8, grad=False)),
      big="quantiles [N, V / 8, 8]")
def quantiles(hidden, weight, wanted):
    """Eight quantiles of each of many outputs: the pinball loss."""
    made = F.linear(hidden, weight).view(hidden.shape[0], -1, 8)
    levels = torch.linspace(0.05, 0.95, 8, device=made.device)
    error = wanted[..., None] - made
    return torch.maximum(levels * error, (levels - 1) * error).sum(-1).mean()


@case("margins", lambda m: (m.hidden(), m.head(), m.normal(m.z.rows, m.z.dim, grad=False), m.head(grad=False)))
def huber_of_products(hidden, weight, other, other_weight):
    return F.smooth_l1_loss(F.linear(hidden, weight), F.linear(other, other_weight), beta=0.5)


@case("margins", lambda m: (m.normal(m.z.rows, 8), m.normal(m.z.vocab, 8), m.normal(m.z.rows, grad=False),
                            m.normal(m.z.vocab, grad=False)), big="predictions [N, V]")
def matrix_factorization(users, items, user_bias, item_bias):
    """Ratings of all pairs from factors, weighted by a confidence computed from the ratings."""
    predicted = users @ items.T
    observed = (user_bias[:, None] + item_bias[None, :] > 1.0).float()
    return ((1.0 + 9.0 * observed) * (observed - predicted).square()).mean() + 1e-3 * users.square().sum()


@case("margins", lambda m: (m.normal(m.z.pairs, m.z.dim), m.normal(m.z.pairs, m.z.dim, grad=False)),
      big="kernels [P, P]", numbers=all_pairs)
def maximum_mean_discrepancy(made, real):
    """Gaussian kernels of all pairs within and between two samples."""

    def kernel(a, b):
        distances = a.square().sum(1)[:, None] + b.square().sum(1)[None] - 2 * a @ b.T
        return torch.exp(-distances / (2 * a.shape[1])).mean()

    return kernel(made, made) - 2 * kernel(made, real) + kernel(real, real)


@case("margins", lambda m: (m.normal(m.z.pairs), m.uniform(m.z.pairs), m.mask(m.z.pairs, share=0.7)),
      big="risk sets [P, P]", numbers=all_pairs)
def cox_partial_likelihood(risk, time, event):
    """Each event against all that are still at risk."""
    at_risk = time[None, :] >= time[:, None]
    scores = risk[None, :].expand_as(at_risk).masked_fill(~at_risk, float("-inf"))
    return -((risk - scores.logsumexp(1)) * event).sum() / event.sum()


@case("margins", lambda m: (m.hidden(), m.head(), m.whole(m.z.vocab, m.z.rows), m.mask(m.z.rows, share=0.7)))
def discrete_survival(hidden, weight, time, event):
    """DeepHit: the mass at the event, or from the last sight on; and the risks of all at the times of 64."""
    mass = F.softmax(F.linear(hidden, weight).float(), 1)
    alive = mass.flip(1).cumsum(1).flip(1)
    seen, unseen = (x.gather(1, time[:, None])[:, 0].clamp(min=1e-8).log() for x in (mass, alive))
    likelihood = torch.where(event > 0, seen, unseen)
    at_times = alive[:, time[:64]]
    earlier = (time[:, None] < time[None, :64]) * event[:, None]
    ranks = (torch.exp((at_times - at_times.diagonal()[None]) / 0.1) * earlier).mean()
    return -likelihood.mean() + 0.2 * ranks


@case("margins", lambda m: (m.normal(m.z.pairs, m.z.dim), m.normal(m.z.dim, 1, scale=m.z.dim**-0.5),
                            m.uniform(m.z.pairs)),
      big="pairs [P, P]", numbers=all_pairs)
def pairwise_ranking(features, score, relevance):
    """Logistic loss of all pairs whose relevance differs."""
    scores = (features @ score).squeeze(-1)
    differences = scores[:, None] - scores[None, :]
    higher = (relevance[:, None] > relevance[None, :]).float()
    return (F.softplus(-differences) * higher).sum() / higher.sum()


@case("margins", lambda m: (m.hidden(), m.normal(3 * (m.z.vocab // 4), m.z.dim, scale=m.z.dim**-0.5),
                            m.normal(m.z.rows, grad=False)),
      big="parameters of the mixture [N, 3 K]", numbers=lambda z: 3 * (z.vocab // 4) * z.rows)
def mixture_density(hidden, weight, wanted):
    """A mixture of Gaussians whose weights, means and widths come from a layer."""
    mixing, mean, log_width = F.linear(hidden, weight).chunk(3, -1)
    width = log_width.clamp(-5, 5).exp()
    density = -0.5 * ((wanted[:, None] - mean) / width).square() - log_width - 0.5 * math.log(2 * math.pi)
    return -torch.logsumexp(F.log_softmax(mixing, -1) + density, -1).mean()


@case("margins", lambda m: (m.normal(m.z.pairs, m.z.dim), m.normal(m.z.pairs, m.z.dim, grad=False)),
      big="costs [P, P]", numbers=all_pairs)
def chamfer(made, real):
    """The squared distance of each point to the nearest of the other set, for two sets."""
    costs = made.square().sum(1)[:, None] + real.square().sum(1)[None] - 2 * made @ real.T
    return costs.amin(1).mean() + costs.amin(0).mean()
