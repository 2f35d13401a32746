"""Ready-made losses for preferences, policies, distillation and contrastive learning, computed from hidden states and the
vocabulary matrix without logits. Names and conventions follow TRL and Liger. docs/use/ready_losses.md lists them in tables.

    from logitless.jax.losses import dpo_loss, grpo_loss, jsd_loss

    def loss(hidden, weight):
        found = dpo_loss(hidden, weight, targets, ref_chosen_logps=c, ref_rejected_logps=r, beta=0.1)
        return found.loss, found

    (value, found), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, weight)
"""

from .contrastive import arcface_loss, cosface_loss, grad_cache, info_nce_loss
from .distillation import (
    TopK, explain_divergence, forward_kl_loss, jsd_loss, reverse_kl_loss, student_top_k_loss, teacher_top_k, top_k_loss,
    total_variation_loss,
)
from .multi_token import MultiTokenLoss, multi_token_loss
from .policy import (
    PolicyLoss, bnpo_loss, cispo_loss, dapo_loss, dr_grpo_loss, gmpo_loss, group_advantages, grpo_loss, gspo_loss,
    kl_penalized_rewards, luspo_loss, ppo_loss, sapo_loss, vespo_loss,
)
from .preference import (
    KTOLoss, PreferenceLoss, cpo_loss, dpo_loss, ipo_loss, kto_kl, kto_loss, orpo_loss, simpo_loss,
)
from .sampled import sampled_softmax_loss
from .selective import selective_log_softmax

__all__ = [
    "KTOLoss", "MultiTokenLoss", "PolicyLoss", "PreferenceLoss", "TopK", "arcface_loss", "bnpo_loss", "cispo_loss",
    "cosface_loss", "cpo_loss", "dapo_loss", "dpo_loss", "dr_grpo_loss", "explain_divergence", "forward_kl_loss", "gmpo_loss",
    "grad_cache", "group_advantages", "grpo_loss", "gspo_loss", "info_nce_loss", "ipo_loss", "jsd_loss", "kl_penalized_rewards",
    "kto_kl", "kto_loss", "luspo_loss", "multi_token_loss", "orpo_loss", "ppo_loss", "reverse_kl_loss", "sampled_softmax_loss",
    "sapo_loss", "selective_log_softmax", "simpo_loss", "student_top_k_loss", "teacher_top_k", "top_k_loss", "total_variation_loss",
    "vespo_loss",
]


def __dir__() -> list[str]:
    return __all__
