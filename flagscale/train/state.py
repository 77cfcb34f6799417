"""Training state: exactly the contents of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from flagscale.config.arguments.hetero.microbatch_split import MeasuredSplit
from flagscale.train.best_evaluation import EvaluationHistory

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from torch import nn


@dataclass
class Progress:
    """Training progress. Samples are sequences, counted over all data-parallel ranks."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        for progress_field in fields(self):
            setattr(self, progress_field.name, int(state[progress_field.name]))


@dataclass
class TrainState:
    """Model, optimizer, scheduler and progress of a run.

    Attributes:
        chunks: this rank's model chunks, wrapped in DDP: one, or several with the interleaved
            pipeline schedule.
        optimizer: megatron.core's optimizer.
        scheduler: schedule of learning rate and weight decay.
        progress: steps taken and samples consumed.
        measured_shares: micro-batch counts of heterogeneous replicas, if they were measured.
        validation: evaluations so far, for early stopping and the best checkpoint.
    """

    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    progress: Progress
    measured_shares: MeasuredSplit | None = None
    validation: EvaluationHistory = field(default_factory=EvaluationHistory)

    def release(self) -> None:
        """Remove the hooks of autograd that refer to the chunks: cycles that Python's garbage
        collection does not see. No step can follow.
        """
        for chunk in self.chunks:
            # Chunks with sharded gradients have hooks of parameters instead of nodes.
            nodes = getattr(chunk, "grad_accs", [])
            for node in nodes:
                node.register_hook(lambda *_: None).hooks_dict_ref().clear()
            nodes.clear()
            for parameter in chunk.parameters():
                if hooks := parameter._post_accumulate_grad_hooks:
                    hooks.clear()

    def modules(self) -> list[nn.Module]:
        """Return the models of :attr:`chunks` without DDP and precision wrappers."""
        return [unwrap_model(chunk) for chunk in self.chunks]


def unwrap_model(module: Any) -> nn.Module:
    """Return the innermost ``module`` of wrappers such as DDP and Float16Module."""
    while hasattr(module, "module"):
        module = module.module
    inner: nn.Module = module
    return inner
