"""Trains a model, of any family: the program that torchrun starts on every rank.

    torchrun --nproc_per_node 2 flagscale/train/train_gpt.py --num-layers 4 … --mock-data

``--help`` lists the arguments. A rank's way: parse → device → join the process group → parallel
layout → model, optimizer, schedule → checkpoint → data → loop. What it does on the way is told
through :mod:`flagscale.status`.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import time
import warnings
from collections.abc import Sequence

from flagscale.config.arguments.layout import place_of
from flagscale.config.arguments.parser import parse_arguments
from flagscale.config.arguments.resolve import of_rank, resolve
from flagscale.errors import ConfigError, FlagscaleError, Problem
from flagscale.status import StatusWriter
from flagscale.train import distributed, failures
from flagscale.train.device import choose
from flagscale.train.distributed import Rank
from flagscale.train.report import require_packages
from flagscale.train.restart import be_supervised


def main(argv: Sequence[str] | None = None) -> int:
    """Train as ``argv`` (the process's own without it) says; returns the exit code."""
    be_supervised()
    rank = Rank.from_environment()
    status = StatusWriter.from_environment(rank.rank)
    try:
        reason = train(parse_arguments(argv), rank, status)
    except FlagscaleError as error:
        return failures.report(error, rank, status)
    except Exception as error:  # noqa: BLE001 - the launcher has to learn of any failure
        return failures.report(error, rank, status)
    status.write("finished", step=reason[1], reason=reason[0])
    return 0


def train(args: argparse.Namespace, rank: Rank, status: StatusWriter) -> tuple[str, int]:
    """Train; returns why it ended and after which step."""
    _quieten()
    if args.tensor_model_parallel_size > 1:
        # One hardware queue keeps a collective from being overtaken by the matrix product that
        # was queued after it; CUDA reads this when it starts.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    device = choose(args.device, rank.local_rank)
    status.write(
        "started",
        rank=rank.rank,
        local_rank=rank.local_rank,
        world_size=rank.world_size,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=device.name,
    )
    args = resolve(args, rank.world_size)
    place = place_of(vars(args), range(rank.rank, rank.rank + 1), rank.world_size)
    args = of_rank(args, rank.rank)
    if args.export_huggingface and not args.save:
        message = "needs save: what is exported is the last checkpoint"
        raise ConfigError(Problem("export_huggingface", message))
    require_packages(args)
    group = distributed.join(
        rank,
        device,
        backend=args.distributed_backend,
        timeout_minutes=args.distributed_timeout_minutes,
        options=args.comm or (),
    )
    status.write_progress(0, "starting")
    status.write("joined", backend=group.backend, seconds=round(group.seconds, 3), place=place)
    joined = time.monotonic()
    # megatron.core reads the chosen device when it is imported.
    from flagscale.train.setup import prepare

    trainer, state = prepare(args, rank, device, status, alike=group.alike)
    status.write("ready", seconds=round(time.monotonic() - joined, 3))
    reason = trainer.run()
    status.write_progress(state.progress.iteration, "ending")
    distributed.leave()
    if rank.rank == 0 and reason == "completed" and args.export_huggingface:
        _export(args, state.progress.iteration, status)
    return reason, state.progress.iteration


def _export(args: argparse.Namespace, iteration: int, status: StatusWriter) -> None:
    """Write the model for transformers. The other ranks have ended, and wait for nothing."""
    from flagscale.train.checkpoint.formats.export import export

    status.write_progress(iteration, "saving a checkpoint")
    print(f"exported to {export(args, iteration)}", flush=True)


def _quieten() -> None:
    """Keep remarks of megatron.core, and torch's remarks on its calls, off the user's console:
    they are about packages that are not installed and names that will change."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    logging.getLogger("megatron").setLevel(logging.ERROR)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # After a failure, threads of libraries that wait for lost ranks would keep the process alive.
    if code:
        os._exit(code)
