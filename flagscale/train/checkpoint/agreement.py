"""Deciding together: what fails on one rank fails on all, at the same point of the program.

Otherwise the others would wait in the next collective until it times out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flagscale.accelerators.device import current
from flagscale.errors import CheckpointError

T = TypeVar("T")


def agree(error: str | None) -> None:
    """All ranks call it, each with its own error or None.

    Raises:
        CheckpointError: on all ranks, when any has an error; names the first ones.
    """
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]
    if failed:
        more = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        raise CheckpointError(f"{failed[0]}{more}")


def on_rank_0(work: Callable[[], T]) -> T:
    """The result of ``work``, done on rank 0 alone, on all ranks. It must be picklable.

    Raises:
        CheckpointError: on all ranks, when ``work`` raised it or an OSError.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except CheckpointError as error:
            outcome[1] = (error.message, error.hint)
        except OSError as error:
            outcome[1] = (describe(error), None)
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        message, hint = outcome[1]
        raise CheckpointError(message, hint=hint)
    return outcome[0]  # type: ignore[no-any-return]


def everywhere(value: bool) -> bool:
    """Whether ``value`` is true on all ranks; one small reduction."""
    flag = torch.tensor([int(value)], dtype=torch.int32, device=current().torch_device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def describe(error: BaseException) -> str:
    """An error in one line: what the system says, and of which file.

    torch's archive writer answers a failed write with an error of its own; the system's is then
    what that one was raised in.
    """
    root: BaseException | None = error
    while root is not None:
        if isinstance(root, OSError) and root.strerror:
            of = f": {root.filename}" if root.filename else ""
            return f"{root.strerror}{of}"
        root = root.__cause__ or root.__context__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextmanager
def quiet_failure(errors: list[str]) -> Iterator[None]:
    """Collects what goes wrong on this rank, to be agreed on later, where all ranks meet."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        errors.append(describe(error))
