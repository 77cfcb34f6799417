"""Training program, started by torchrun on every rank.

It trains every model family (:mod:`flagscale.train.models`); ``--family`` selects one.

    torchrun --nproc_per_node 2 flagscale/train/train_gpt.py --num-layers 4 … --mock-data

``--help`` lists the arguments. The phases of a rank: parse arguments, select the device, join the
process group, create the parallel layout, build model, optimizer and scheduler, load the
checkpoint, open the data, run the training loop. Progress is reported through
:mod:`flagscale.status`.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from flagscale.config.arguments.derive import derive_arguments, rank_arguments
from flagscale.config.arguments.layout import describe_ranks
from flagscale.config.arguments.spec.command_line import parse_arguments
from flagscale.errors import ConfigError, FlagscaleError, Problem
from flagscale.sinks.delivery import close_running_deliveries
from flagscale.sinks.registry import create_sinks
from flagscale.status import STARTING, StatusWriter
from flagscale.train import distributed, failures
from flagscale.train.device import Device, choose_device
from flagscale.train.distributed import RankIdentity
from flagscale.train.memory_history import MemoryHistory
from flagscale.train.out_of_memory import explain_out_of_memory
from flagscale.train.restart import enable_supervision

if TYPE_CHECKING:
    from flagscale.train.state import TrainState

_NEEDS_SAVE: Mapping[str, str] = {
    "export_huggingface": "because the last checkpoint is exported",
    "export_peft": "because the last checkpoint is exported",
    "save_best": "the directory in which the best checkpoint is saved",
}
"""Arguments that need ``save``, with the reason."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train according to ``argv`` (default: the process's arguments) and return the exit code."""
    enable_supervision()
    rank = RankIdentity.from_environment()
    status = StatusWriter.from_environment(rank.rank)
    try:
        end = train(parse_arguments(argv), rank, status)
    except FlagscaleError as error:
        return failures.report_failure(error, rank, status)
    except Exception as error:  # noqa: BLE001 - every failure is reported to the launcher
        return failures.report_failure(error, rank, status)
    status.write("finished", step=end.step, reason=end.reason, detail=end.detail or None)
    return 0


class TrainingEnd(NamedTuple):
    """End of training: its reason, an explanation that may be empty, and the last step."""

    reason: str
    detail: str
    step: int


def train(args: argparse.Namespace, rank: RankIdentity, status: StatusWriter) -> TrainingEnd:
    """Train and return the end of training."""
    _suppress_library_warnings()
    if args.tensor_model_parallel_size > 1:
        # With one hardware queue, a collective is not overtaken by the GEMM queued after it. CUDA
        # reads this variable at startup.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    device = choose_device(args.device, rank.local_rank)
    status.write(
        "started",
        rank=rank.rank,
        local_rank=rank.local_rank,
        world_size=rank.world_size,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=device.name,
    )
    args = derive_arguments(args, rank.world_size)
    layout_position = describe_ranks(vars(args), range(rank.rank, rank.rank + 1), rank.world_size)
    args = rank_arguments(args, rank.rank)
    for name, reason in _NEEDS_SAVE.items():
        if getattr(args, name) and not args.save:
            raise ConfigError(Problem(name, f"needs save, {reason}"))
    if rank.rank == 0:
        create_sinks(vars(args), os.environ)  # before the ranks wait for each other
    default_group = distributed.init_default_group(
        rank,
        device,
        backend=args.distributed_backend,
        timeout_minutes=args.distributed_timeout_minutes,
        options=args.comm or (),
    )
    status.write_progress(0, STARTING)
    status.write(
        "joined",
        backend=default_group.backend,
        seconds=round(default_group.init_seconds, 3),
        place=layout_position,
        libraries=device.accelerator.library_versions() if rank.local_rank == 0 else None,
    )
    # megatron.core reads the selected device at import time.
    from flagscale.train.trial_series import TrialSeries, require_same_groups

    series = TrialSeries.from_environment(rank, device)
    train_model = partial(
        _train_model,
        rank=rank,
        device=device,
        status=status,
        same_device_kind=default_group.same_device_kind,
        in_series=series is not None,
    )
    end = train_model(args)
    while series is not None and end.reason != "signal":
        if (words := series.prepare_next_trial(status)) is None:
            break
        previous = args
        args = rank_arguments(derive_arguments(parse_arguments(words), rank.world_size), rank.rank)
        require_same_groups(args, previous)
        end = train_model(args)
    status.write_progress(end.step, "ending")
    distributed.destroy_groups()
    if (
        rank.rank == 0
        and end.reason == "completed"
        and (args.export_huggingface or args.export_peft)
    ):
        _export(args, end.step, status)
    return end


def _train_model(
    args: argparse.Namespace,
    *,
    rank: RankIdentity,
    device: Device,
    status: StatusWriter,
    same_device_kind: bool,
    in_series: bool,
) -> TrainingEnd:
    """Build the model and train it. With ``in_series``, nothing refers to it after the return."""
    import torch

    from flagscale.train.setup import prepare_training

    start_time = time.monotonic()
    state: TrainState | None = None
    memory_history = MemoryHistory(args, rank.rank, device)
    try:
        trainer, state = prepare_training(
            args,
            rank,
            device,
            status,
            same_device_kind=same_device_kind,
            memory_history=memory_history,
        )
        status.write("ready", seconds=round(time.monotonic() - start_time, 3))
        reason = trainer.run()
    except torch.OutOfMemoryError as error:
        memory_history.dump("out_of_memory")
        text = explain_out_of_memory(
            str(error),
            args,
            device=device.accelerator.display_name,
            rank=rank.rank,
            step=None if state is None else state.progress.iteration + 1,
            stage_index=distributed.find_pipeline_stage(),
        )
        raise torch.OutOfMemoryError(text) from error
    if in_series:
        state.release()
    return TrainingEnd(reason, trainer.end_detail, state.progress.iteration)


def _export(args: argparse.Namespace, iteration: int, status: StatusWriter) -> None:
    """Export model and adapters to other formats on rank 0. The other ranks have ended."""
    from flagscale.train.checkpoint.formats.export import export

    status.write_progress(iteration, "saving a checkpoint")
    for path in export(args, iteration):
        print(f"exported to {path}", flush=True)


def _suppress_library_warnings() -> None:
    """Suppress warnings of megatron.core and torch.distributed that users cannot act on.

    They are about optional packages that are not installed and about API deprecations.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    logging.getLogger("megatron").setLevel(logging.ERROR)


if __name__ == "__main__":
    code = main()
    is_hanging = close_running_deliveries()
    sys.stdout.flush()
    sys.stderr.flush()
    # After a failure, library threads that wait for lost ranks would keep the process alive, and so
    # would the client of a metrics sink that does not answer.
    if code or is_hanging:
        os._exit(code)
