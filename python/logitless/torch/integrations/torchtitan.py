"""torchtitan's chunked loss with a lazy head, for a job's configuration:

    loss=LazyLoss.Config()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from torch import nn

from torchtitan.components.loss import ChunkedLossWrapper

from .._lazy import lazy_head


class LazyLoss(ChunkedLossWrapper):
    """A ``ChunkedLossWrapper`` whose chunks have no logits, so that one chunk suffices. The trainer passes it the
    model's ``lm_head``, which becomes lazy; under FSDP2 this is the sharded module.

    Raises ValueError if the loss is to be compiled, since a compiled function would receive the logits. Raises
    NotImplementedError for an ``lm_head`` under tensor parallelism.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        num_chunks: int = 1
        expected_ignored: Optional[float] = None  # as in lazy_head

    def __init__(self, config: Config, *, compile_config: Any = None):
        if compile_config is not None and compile_config.enable and "loss" in compile_config.components:
            raise ValueError(
                f"compile.components: expected no 'loss' beside LazyLoss, got {list(compile_config.components)}"
            )
        super().__init__(config, compile_config=compile_config)
        self._expected_ignored = config.expected_ignored

    def set_lm_head(self, lm_head: nn.Module) -> None:
        mesh = getattr(lm_head.weight, "device_mesh", None)
        if mesh is not None and "tp" in (mesh.mesh_dim_names or ()):
            raise NotImplementedError(
                f"lm_head: expected a weight that FSDP shards or none, got one of tensor parallelism, mesh {mesh.mesh_dim_names}"
            )
        super().set_lm_head(lazy_head(lm_head, expected_ignored=self._expected_ignored))
