"""Large-vocabulary losses for JAX without the logits.

::

    from logitless.jax import linear_cross_entropy
    loss, gradients = jax.value_and_grad(linear_cross_entropy, (0, 1))(hidden, weight, targets)

Losses are custom calls in the compiled program on CPUs and NVIDIA GPUs, and JAX's own operations on other devices and
without the library; ``backend()`` says which. They work under jit, grad, scan, checkpoint, vmap and shard_map. Second
derivatives and forward mode raise JAX's own errors. ``autochunk`` chunks any other function of arrays.
``linear_sample`` samples tokens, and ``linear_top_logprobs`` returns the best entries.
``linear_kept_logprobs`` replays the sets of token ids that a sampler kept. ``losses`` has ready-made losses
for preferences, policies, distillation and contrastive learning.
"""

from . import losses
from ._autochunk import AutoChunked, Unsupported, autochunk
from ._backend import Backend, backend
from .far_field import FarFieldState, far_field_cross_entropy, far_field_report, far_field_state
from .head import linear_logprobs
from .kept import linear_kept_logprobs
from .loss import linear_cross_entropy
from .sampling import linear_sample, linear_top_logprobs, vocab_parallel_sample, vocab_parallel_top_logprobs
from .sharding import Sharding
from .vocab_parallel import vocab_parallel_linear_cross_entropy, vocab_parallel_logprobs

__all__ = [
    "AutoChunked",
    "Backend",
    "FarFieldState",
    "Sharding",
    "Unsupported",
    "autochunk",
    "backend",
    "far_field_cross_entropy",
    "far_field_report",
    "far_field_state",
    "linear_cross_entropy",
    "linear_kept_logprobs",
    "linear_logprobs",
    "linear_sample",
    "linear_top_logprobs",
    "losses",
    "vocab_parallel_linear_cross_entropy",
    "vocab_parallel_logprobs",
    "vocab_parallel_sample",
    "vocab_parallel_top_logprobs",
]


def __dir__() -> list[str]:
    return __all__
