"""Runner of small training cases in ranks that are forked from one process.

Importing torch and megatron.core takes longer than the training. So a worker program imports
them once and forks the ranks, and cases of one world size share their ranks. Importing this module
imports neither.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from flagscale.free_port import free_port

Record = tuple[str, dict[str, Any]]


def import_training() -> None:
    """Import what training on a CPU uses, before ranks are forked.

    The device is chosen first, as in a training program: without a device that compiles,
    megatron.core is imported without torch's compiler.
    """
    from flagscale.train.device import choose_device

    choose_device("cpu", 0)
    import flagscale.train.setup
    import flagscale.train.train_gpt  # noqa: F401


def run_forked_ranks(
    world_size: int, rank_function: Callable[[], Iterable[Record]], *, reporting_rank: int = 0
) -> dict[str, Any]:
    """Fork ``world_size`` ranks, each with the environment that torchrun would set.

    ``rank_function`` is the function of a rank; it yields (case, results). Returns the results of
    the rank ``reporting_rank`` by case. A rank that raises prints its traceback while the others
    continue.
    """
    port = free_port()
    read_end, write_end = os.pipe()
    children = []
    # A garbage collection would write to all imported objects and copy every page of them.
    gc.collect()
    gc.freeze()
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            os.close(read_end)
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(world_size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
            _run_child(rank_function, write_end if rank == reporting_rank else None)
        children.append(child)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        output = pipe.read()
    for child in children:
        os.waitpid(child, 0)
    return dict(json.loads(line) for line in output.splitlines())


def reset_megatron_state() -> None:
    """Reset the state that megatron.core keeps per process: process groups, losses of routers.

    megatron.core only drops its references to groups, and hundreds of them make each operation
    slower.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    get_moe_layer_wise_logging_tracker().clear()
    parallel_state.destroy_model_parallel()
    if os.environ["FLAGSCALE_DEVICE"] != "cpu":
        import torch

        # A process compiles a function for a limited number of configurations.
        torch._dynamo.reset()
        return  # NCCL may wait for the group's other ranks
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _run_child(rank_function: Callable[[], Iterable[Record]], write_end: int | None) -> NoReturn:
    exit_code = 0
    try:
        for record in rank_function():
            if write_end is not None:
                os.write(write_end, json.dumps(record).encode() + b"\n")
    except Exception:  # noqa: BLE001 - a forked child must not return into its parent's code
        traceback.print_exc()
        exit_code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
