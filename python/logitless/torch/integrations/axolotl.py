"""A plugin of axolotl, for its configuration:

    plugins:
      - logitless.torch.integrations.axolotl.LogitlessPlugin
"""

from __future__ import annotations

from typing import Any

from torch import nn

from axolotl.integrations.base import BasePlugin

from .._lazy import lazy_head

# Options that compute the loss without calling the head, or that split its logits.
_OTHERS = ("cut_cross_entropy", "liger_fused_linear_cross_entropy", "chunked_cross_entropy")


class LogitlessPlugin(BasePlugin):
    """Trains with a lazy head (supervised, adapters or the full model).

    Raises ValueError together with another loss without logits. Raises NotImplementedError for ``rl``, whose trainers
    read the logits for their metrics.
    """

    def post_model_load(self, cfg: Any, model: nn.Module) -> None:
        """Is called once the model and its adapters are loaded."""
        for name in _OTHERS:
            if cfg.get(name):
                raise ValueError(f"{name}: expected false beside LogitlessPlugin, got {cfg.get(name)!r}")
        if cfg.get("rl"):
            raise NotImplementedError(f"rl: expected none, got {cfg.get('rl')!r}: its trainer reads the logits for its metrics")
        lazy_head(model)
