"""Large-vocabulary losses for JAX without the logits.

::

    from logitless.jax import linear_cross_entropy
    loss, gradients = jax.value_and_grad(linear_cross_entropy, (0, 1))(hidden, weight, targets)

Losses are custom calls of the compiled program: they work under jit, grad, scan, checkpoint, vmap and shard_map, on
the CPU and on NVIDIA GPUs. Second derivatives and forward mode raise JAX's own errors. ``autochunk`` makes plain JAX of
any other function of arrays; ``losses`` has those of preferences, policies and distillation ready.
"""

from . import losses
from ._autochunk import AutoChunked, Unsupported, autochunk
from .far_field import FarFieldState, far_field_cross_entropy, far_field_report, far_field_state
from .head import linear_logprobs
from .loss import linear_cross_entropy
from .sharding import Sharding
from .vocab_parallel import vocab_parallel_linear_cross_entropy, vocab_parallel_logprobs

__all__ = [
    "AutoChunked",
    "FarFieldState",
    "Sharding",
    "Unsupported",
    "autochunk",
    "far_field_cross_entropy",
    "far_field_report",
    "far_field_state",
    "linear_cross_entropy",
    "linear_logprobs",
    "losses",
    "vocab_parallel_linear_cross_entropy",
    "vocab_parallel_logprobs",
]
