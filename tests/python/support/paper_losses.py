"""Losses as their papers write them, on full logits, for either framework: ``xp`` is torch or jax.numpy. They are plain
and slow, and use nothing of the library. Logits are small enough for exp."""

from __future__ import annotations


class Papers:
    def __init__(self, xp):
        self.xp = xp

    # --- The head.

    def logits(self, hidden, weight, bias=None, softcap=None, logit_scale=1.0, temperature=1.0):
        z = hidden @ weight.T
        if bias is not None:
            z = z + bias
        z = z * logit_scale
        if softcap is not None:
            z = softcap * self.xp.tanh(z / softcap)
        return z / temperature

    def log_p(self, z):
        return z - self.xp.log(self.xp.exp(z).sum(-1))[..., None]

    def of_targets(self, values, targets):
        """Returns values[..., targets]; ids below 0 give 0."""
        chosen = targets[..., None] == self.xp.arange(values.shape[-1])
        return self.xp.where(chosen, values, 0.0).sum(-1)

    def entropy(self, z):
        log_p = self.log_p(z)
        return -(self.xp.exp(log_p) * log_p).sum(-1)

    def sigmoid(self, x):
        return 1 / (1 + self.xp.exp(-x))

    def log_sigmoid(self, x):
        return self.xp.log(self.sigmoid(x))

    def sequence(self, logps, targets, average=False):
        """Returns [B] from [B, T]: log pi(y), or its mean over the tokens of y."""
        valid = targets >= 0
        total = self.xp.where(valid, logps, 0.0).sum(-1)
        return total / valid.sum(-1) if average else total

    # --- Preferences: r_w and r_l [B] are log pi(y) - log pi_ref(y), or the reward in its place.

    def dpo(self, kind, r_w, r_l, beta, e=0.0):
        s, log_s = self.sigmoid, self.log_sigmoid
        d = r_w - r_l
        return {
            "sigmoid": lambda: -(1 - e) * log_s(beta * d) - e * log_s(-beta * d),
            "robust": lambda: ((1 - e) * -log_s(beta * d) - e * -log_s(-beta * d)) / (1 - 2 * e),
            "hinge": lambda: self.xp.maximum(1 - beta * d, 0 * d),
            "ipo": lambda: (d - 1 / (2 * beta)) ** 2,
            "exo_pair": lambda: s(beta * d) * self.xp.log(s(beta * d) / (1 - e))
            + s(-beta * d) * self.xp.log(s(-beta * d) / e),
            "nca_pair": lambda: -log_s(beta * r_w) - log_s(-beta * r_w) / 2 - log_s(-beta * r_l) / 2,
            "sppo_hard": lambda: (r_w - 1 / (2 * beta)) ** 2 + (r_l + 1 / (2 * beta)) ** 2,
            "apo_zero": lambda: (1 - s(beta * r_w)) + s(beta * r_l),
            "apo_down": lambda: s(beta * r_w) + (1 - s(beta * r_w - beta * r_l)),
        }[kind]().mean()

    def sorted(self, x):
        found = self.xp.sort(x)
        return getattr(found, "values", found)

    def bco(self, r_w, r_l, beta, delta):
        return (-self.log_sigmoid(beta * r_w - delta) - self.log_sigmoid(-(beta * r_l - delta))).mean()

    def aot(self, better, worse, beta, e=0.0):
        return self.dpo("sigmoid", self.sorted(better), self.sorted(worse), beta, e)

    def discopop(self, r_w, r_l, beta, tau):
        x = beta * (r_w - r_l)
        g = self.sigmoid(x / tau)
        return (-self.log_sigmoid(x) * (1 - g) + self.xp.exp(-x) * g).mean()

    def simpo(self, m_w, m_l, beta, gamma, e=0.0):
        x = beta * m_w - beta * m_l - gamma
        return (-(1 - e) * self.log_sigmoid(x) - e * self.log_sigmoid(-x)).mean()

    def orpo(self, m_w, m_l, nll, beta):
        def odds(m):
            return self.xp.exp(m) / (1 - self.xp.exp(m))

        return nll - beta * self.log_sigmoid(self.xp.log(odds(m_w) / odds(m_l))).mean()

    def kto(self, r, good, kl, beta, desirable=1.0, undesirable=1.0):
        wanted = desirable * (1 - self.sigmoid(beta * (r - kl)))
        unwanted = undesirable * (1 - self.sigmoid(beta * (kl - r)))
        return self.xp.where(good, wanted, unwanted).mean()

    # --- Policies: log-probabilities [B, T], advantages [B, T]; ids below 0 are no tokens.

    def surrogate(self, ratio, advantages, low, high, delta=None):
        clipped = self.xp.clip(ratio, 1 - low, 1 + high)
        bounded = ratio if delta is None else self.xp.clip(ratio, 0.0, delta)
        return -self.xp.minimum(bounded * advantages, clipped * advantages)

    def k(self, estimator, logps, reference):
        u = self.xp.exp(reference - logps)
        return {"k1": -self.xp.log(u), "k2": self.xp.log(u) ** 2 / 2, "k3": u - self.xp.log(u) - 1}[estimator]

    def sequence_ratio(self, logps, old, targets):
        """[B]"""
        valid = targets >= 0
        return self.xp.exp(self.xp.where(valid, logps - old, 0.0).sum(-1) / valid.sum(-1))

    def mean_of_sequences(self, each, targets):
        valid = targets >= 0
        return (self.xp.where(valid, each, 0.0).sum(-1) / valid.sum(-1)).mean()

    def sum_of_tokens(self, each, targets):
        return self.xp.where(targets >= 0, each, 0.0).sum()

    def cispo(self, ratio, logps, advantages, cap):
        """ratio: without a gradient."""
        return -self.xp.clip(ratio, 0.0, cap) * advantages * logps

    def sapo(self, ratio, advantages, positive, negative):
        tau = self.xp.where(advantages > 0, 0 * advantages + positive, 0 * advantages + negative)
        return -self.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages

    def vespo(self, w, logps, advantages, positive, negative):
        """w [B, 1]: the sequences' ratios, without a gradient. positive, negative: k and lambda by sign."""
        of_sign = [w**k * self.xp.exp(decay * (1 - w)) for k, decay in (positive, negative)]
        return -self.xp.where(advantages >= 0, *of_sign) * advantages * logps

    def gmpo(self, ratio, advantages, low, high, counted):
        """Returns [B, 1]. counted: the tokens of the geometric mean."""
        sign = self.xp.sign(advantages)
        bound = self.xp.exp(self.xp.where(advantages > 0, 0 * advantages + high, 0 * advantages + low))
        each = self.xp.minimum(ratio**sign, bound) ** sign
        product = self.xp.where(counted, each, 1.0).prod(-1)
        return -self.xp.exp(self.xp.log(product) / counted.sum(-1))[:, None] * advantages

    def sampler_weight(self, apart, targets, mode, low, high):
        """apart: log pi_old - log pi_sampling."""
        apart = self.xp.where(targets >= 0, apart, 0.0)
        ratio = self.xp.exp(apart.sum(-1)[:, None] if mode.startswith("sequence") else apart)
        if mode.endswith("truncate"):
            return self.xp.clip(ratio, low, high)
        return self.xp.where((ratio >= low) & (ratio <= high), ratio, 0.0)

    # --- Contrastive losses.

    def unit(self, x):
        return x / self.xp.sqrt((x**2).sum(-1))[:, None]

    def info_nce(self, query, keys, targets, temperature):
        """Returns [N]; ids below 0 give 0."""
        return -self.of_targets(self.log_p(query @ keys.T / temperature), targets)

    def margins(self, hidden, weight, targets, scale, angle, drop):
        """Returns [N]: the cross entropy of cosines, with margins of the target's angle and cosine; ids below 0 give 0."""
        cosines = self.unit(hidden) @ self.unit(weight).T
        own = targets[:, None] == self.xp.arange(cosines.shape[1])
        turned = self.xp.cos(self.xp.arccos(cosines) + angle) if angle else cosines
        return -self.of_targets(self.log_p(scale * self.xp.where(own, turned - drop, cosines)), targets)

    # --- Distillation: logits [N, V] of the student and the teacher, [N].

    def kl(self, z_q, z_p):
        log_q, log_p = self.log_p(z_q), self.log_p(z_p)
        return (self.xp.exp(log_q) * (log_q - log_p)).sum(-1)

    def jsd(self, z_p, z_q, beta):
        p, q = self.xp.exp(self.log_p(z_p)), self.xp.exp(self.log_p(z_q))
        m = beta * q + (1 - beta) * p
        return (beta * q * self.xp.log(q / m) + (1 - beta) * p * self.xp.log(p / m)).sum(-1)

    def top_k(self, z_p, z_q, vocab_ids, tail):
        """The divergence over K stored entries, `words` [N, K], and the tail."""
        p, q = self.xp.exp(self.log_p(z_p)), self.xp.exp(self.log_p(z_q))
        p_k, q_k = (self.of_targets(a[..., None, :], vocab_ids) for a in (p, q))
        if not tail:
            q_k = q_k / q_k.sum(-1)[..., None]
            return (q_k * self.xp.log(q_k / p_k)).sum(-1)
        rest_p, rest_q = 1 - p_k.sum(-1), 1 - q_k.sum(-1)
        return (q_k * self.xp.log(q_k / p_k)).sum(-1) + rest_q * self.xp.log(rest_q / rest_p)
