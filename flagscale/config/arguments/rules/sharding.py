"""Rules of sharding over data-parallel ranks (``data_parallel_sharding_strategy``). No torch.

Every strategy shards what the one before it shards: ``optim`` the optimizer state, ``optim_grads``
gradients too, ``optim_grads_params`` weights too. They are stages 1 to 3 of ZeRO. With hybrid
sharding (``num_distributed_optimizer_instances``) groups of the ranks share them, and each has a
replica.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from flagscale.config.arguments.rules.optimizer import CUDA_GRAPH, captures_steps
from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.system_arguments import (
    INSTANCES,
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
    """Check that steps in which ranks exchange shards are not captured, and that state is sharded
    if groups of ranks have replicas of it.
    """
    if values[INSTANCES] > 1 and not values["use_distributed_optimizer"]:
        yield (
            INSTANCES,
            f"{values[INSTANCES]} has no effect, because no state is sharded; set {SHARDING}: "
            "optim, optim_grads or optim_grads_params, or leave it out",
        )
    if shards_gradients(values) and captures_steps(values):
        yield (
            SHARDING,
            f"{values[SHARDING]} is not supported with {CUDA_GRAPH}: local: ranks cannot "
            "communicate within a captured step; optim shards the optimizer state alone",
        )


def check_instances(values: Values, world_size: int) -> Iterator[Violation]:
    """Check that groups of ranks that share state (instances) have the same number of ranks.

    Experts have data-parallel ranks of their own.
    """
    instances = values[INSTANCES]
    tp, pp = values["tensor_model_parallel_size"], values["pipeline_model_parallel_size"]
    cp, ep = values["context_parallel_size"], values["expert_model_parallel_size"]
    ranks = world_size // (tp * pp)
    if ranks % instances:
        sizes = f"data-parallel size {ranks // cp}" + (f" x context {cp} = {ranks}" * (cp > 1))
        yield INSTANCES, f"{instances} does not divide {sizes}; {_list_divisors(ranks)}"
        return
    expert_tp = values["expert_tensor_parallel_size"] or tp
    expert_ranks = world_size // (expert_tp * pp * ep)
    if values["num_moe_experts"] and expert_ranks % instances:
        yield (
            INSTANCES,
            f"{instances} does not divide the {expert_ranks} data-parallel ranks of experts "
            f"(expert-parallel size {ep} x expert tensor-parallel size {expert_tp}); "
            f"{_list_divisors(math.gcd(ranks, expert_ranks))}",
        )


def _list_divisors(number: int) -> str:
    *divisors, last = [str(size) for size in range(1, number + 1) if number % size == 0]
    return f"use {', '.join(divisors)} or {last}" if divisors else f"use {last}"
