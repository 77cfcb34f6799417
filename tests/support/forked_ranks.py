"""Runs tiny training cases in ranks that are forked from one process.

Importing torch and megatron.core takes longer than the training. So a worker program imports them
once and forks the ranks; cases of one world size share their ranks. This module imports neither.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

Record = tuple[str, dict[str, Any]]


def run_world(
    world: int, life: Callable[[], Iterable[Record]], *, answering: int = 0
) -> dict[str, Any]:
    """Fork ``world`` ranks, each with the environment torchrun would give it.

    ``life`` is what a rank does: it yields (case, what was found). Returns what the rank
    ``answering`` found, by case. A rank that raises prints its traceback and the others go on.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    receiving, sending = os.pipe()
    children = []
    # Collecting garbage would write to all that was imported, and copy every page of it.
    gc.collect()
    gc.freeze()
    for rank in range(world):
        child = os.fork()
        if child == 0:
            os.close(receiving)
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(world),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
            _live(life, sending if rank == answering else None)
        children.append(child)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        answer = pipe.read()
    for child in children:
        os.waitpid(child, 0)
    return dict(json.loads(line) for line in answer.splitlines())


def forget_layout() -> None:
    """Forget what megatron.core keeps for the process: its process groups, losses of routers.

    It lets go of its groups only, and with hundreds of them each operation is slower.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    get_moe_layer_wise_logging_tracker().clear()
    parallel_state.destroy_model_parallel()
    if os.environ["FLAGSCALE_DEVICE"] != "cpu":
        import torch

        # One process compiles a function for a few configurations only.
        torch._dynamo.reset()
        return  # NCCL may wait for the group's other ranks
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _live(life: Callable[[], Iterable[Record]], sending: int | None) -> NoReturn:
    code = 0
    try:
        for record in life():
            if sending is not None:
                os.write(sending, json.dumps(record).encode() + b"\n")
    except Exception:  # noqa: BLE001 - a forked child must not return into its parent's code
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
