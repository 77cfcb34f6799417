"""Rules of sharding over data-parallel ranks (``data_parallel_sharding_strategy``). No torch.

Every strategy shards what the one before it shards: ``optim`` the optimizer state, ``optim_grads``
gradients too, ``optim_grads_params`` weights too. They are stages 1 to 3 of ZeRO.
"""

from __future__ import annotations

from collections.abc import Iterator

from flagscale.config.arguments.rules.optimizer import CUDA_GRAPH, captures_steps
from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.system_arguments import (
    OPTIM_GRADS,
    OPTIM_GRADS_PARAMS,
    SHARDING,
)


def shards_gradients(values: Values) -> bool:
    """Return whether each data-parallel rank keeps a shard of the gradients only."""
    return values["data_parallel_sharding_strategy"] in (OPTIM_GRADS, OPTIM_GRADS_PARAMS)


def shards_weights(values: Values) -> bool:
    """Return whether each data-parallel rank keeps a shard of the weights only."""
    return bool(values["data_parallel_sharding_strategy"] == OPTIM_GRADS_PARAMS)


def check_sharding(values: Values) -> Iterator[Violation]:
    """Check that steps in which ranks exchange shards are not captured."""
    if shards_gradients(values) and captures_steps(values):
        yield (
            SHARDING,
            f"{values[SHARDING]} is not supported with {CUDA_GRAPH}: local: ranks cannot "
            "communicate within a captured step; optim shards the optimizer state alone",
        )
