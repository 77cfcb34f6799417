"""What a training run is at a moment: everything that a checkpoint holds, and nothing more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from flagscale.config.arguments.measured_shares import MeasuredShares

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from torch import nn


@dataclass
class Progress:
    """How far training is. Samples are sequences, counted over all data-parallel ranks."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        for item in fields(self):
            setattr(self, item.name, int(state[item.name]))


@dataclass
class TrainState:
    """The model, its optimizer and schedule, and the progress made.

    ``chunks`` holds this rank's model chunks as DDP wraps them: one, or with the interleaved
    pipeline schedule several. ``measured_shares`` is what unlike replicas take of a step, where
    that was measured.
    """

    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    progress: Progress
    measured_shares: MeasuredShares | None = None

    def modules(self) -> list[nn.Module]:
        """The bare models of :attr:`chunks`, without DDP and precision wrappers."""
        return [unwrap(chunk) for chunk in self.chunks]


def unwrap(module: Any) -> nn.Module:
    """The innermost ``module`` of wrappers such as DDP and Float16Module."""
    while hasattr(module, "module"):
        module = module.module
    inner: nn.Module = module
    return inner
