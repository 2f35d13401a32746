"""Reference cross entropy and its gradients, in double precision over flat lists."""

import math
from dataclasses import dataclass, field


@dataclass
class Head:
    tokens: int
    dim: int
    vocab: int
    hidden: list
    weight: list
    targets: list  # one for each token, or a list of K of them
    bias: list = None
    class_weight: list = None
    token_weight: list = None
    target_weight: list = None  # [tokens][K]


@dataclass
class Result:
    loss: float = 0.0
    losses: list = field(default_factory=list)
    lse: list = field(default_factory=list)
    entropy: list = field(default_factory=list)
    argmax: list = field(default_factory=list)
    log_prob: list = field(default_factory=list)
    normalizer: float = 0.0
    valid: int = 0
    d_hidden: list = field(default_factory=list)
    d_weight: list = field(default_factory=list)
    d_bias: list = field(default_factory=list)


def cross_entropy(head, *, reduction="mean", label_smoothing=0.0, z_loss=0.0, softcap=0.0, logit_scale=1.0,
                  normalizer=None, ignore_index=-100, grad_loss=1.0):
    n, d, v = head.tokens, head.dim, head.vocab
    class_weight = head.class_weight or [1.0] * v
    token_weight = head.token_weight or [1.0] * n
    result = Result(d_hidden=[0.0] * (n * d), d_weight=[0.0] * (v * d), d_bias=[0.0] * v)
    sparse = head.target_weight is not None

    def entries(i):
        """Returns the pairs (token id, weight of its -log p) of one token; none if it is ignored."""
        if sparse:
            return [(t, w) for t, w in zip(head.targets[i], head.target_weight[i]) if t != ignore_index]
        return [(head.targets[i], 1.0)] if head.targets[i] != ignore_index else []

    shares = [(token_weight[i] * (1.0 if sparse else class_weight[entries(i)[0][0]])) if entries(i) else 0.0
              for i in range(n)]
    result.normalizer = sum(shares) if normalizer is None else normalizer
    factor = 1.0 / result.normalizer if reduction == "mean" else 1.0
    for i in range(n):
        if not entries(i):
            for outputs, nothing in ((result.losses, 0.0), (result.lse, 0.0), (result.entropy, 0.0), (result.argmax, -1)):
                outputs.append(nothing)
            continue
        result.valid += 1
        row = head.hidden[i * d:(i + 1) * d]
        z = [sum(a * b for a, b in zip(row, head.weight[j * d:(j + 1) * d])) for j in range(v)]
        if head.bias:
            z = [a + b for a, b in zip(z, head.bias)]
        z = [logit_scale * a for a in z]
        slope = [logit_scale] * v
        if softcap:
            z = [softcap * math.tanh(a / softcap) for a in z]
            slope = [logit_scale * (1.0 - (a / softcap) ** 2) for a in z]
        top = max(z)
        lse = top + math.log(sum(math.exp(a - top) for a in z))
        p = [math.exp(a - lse) for a in z]
        hard = [0.0] * v
        for word, weight in entries(i):
            hard[word] += (1.0 - label_smoothing) * class_weight[word] * weight
        soft = [label_smoothing / v * c for c in class_weight]
        loss = sum((h + s) * (lse - a) for h, s, a in zip(hard, soft, z)) + z_loss * lse * lse
        mass = sum(hard) + sum(soft) + 2.0 * z_loss * lse
        upstream = grad_loss * factor * token_weight[i]
        for j in range(v):
            da = upstream * (p[j] * mass - hard[j] - soft[j]) * slope[j]
            result.d_bias[j] += da
            for k in range(d):
                result.d_hidden[i * d + k] += da * head.weight[j * d + k]
                result.d_weight[j * d + k] += da * row[k]
        result.losses.append(token_weight[i] * loss)
        result.lse.append(lse)
        result.entropy.append(lse - sum(a * b for a, b in zip(p, z)))
        result.argmax.append(z.index(top))
        if not sparse:
            result.log_prob.append(z[head.targets[i]] - lse)
    result.loss = sum(result.losses) * factor
    return result
