"""Error handling across ranks: a failure on one rank is raised on all ranks at the same point.

Without this, the remaining ranks would wait in their next collective until it times out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from flagscale.accelerators.device import current_device
from flagscale.errors import CheckpointError

T = TypeVar("T")
_POLL_SECONDS = 0.5


def raise_on_all_ranks(error: str | None) -> None:
    """Raise on all ranks if any rank has an error. Collective: all ranks call it.

    Args:
        error: this rank's error, or None.

    Raises:
        CheckpointError: on all ranks, with the first error and the number of further ones.
    """
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text]
    if failures:
        further_ranks = f" (and {len(failures) - 1} more ranks)" if len(failures) > 1 else ""
        raise CheckpointError(f"{failures[0]}{further_ranks}")


def run_on_rank_0(function: Callable[[], T]) -> T:
    """Run a function on rank 0 and return its result on all ranks. Collective.

    Args:
        function: called without arguments; its result must be picklable.

    Raises:
        CheckpointError: on all ranks, if ``function`` raised it or an OSError.
    """
    result_and_error: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            result_and_error[0] = function()
        except CheckpointError as error:
            result_and_error[1] = (error.message, error.hint)
        except OSError as error:
            result_and_error[1] = (describe_error(error), None)
    dist.broadcast_object_list(result_and_error, src=0)
    if result_and_error[1] is not None:
        message, hint = result_and_error[1]
        raise CheckpointError(message, hint=hint)
    return result_and_error[0]  # type: ignore[no-any-return]


def true_on_all_ranks(value: bool) -> bool:
    """Return whether ``value`` is true on all ranks. Collective: one all_reduce of an int32."""
    flag = torch.tensor([int(value)], dtype=torch.int32, device=current_device().torch_device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def run_while_polling(function: Callable[[], T]) -> T:
    """Run a function in a thread while all ranks poll for its end in short collectives.

    A single collective would time out if the function takes long on one rank. Collective, if
    torch.distributed is initialized.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="polled") as pool:
        future = pool.submit(function)
        while dist.is_initialized() and not true_on_all_ranks(future.done()):
            wait([future], timeout=_POLL_SECONDS)
        return future.result()


def describe_error(error: BaseException) -> str:
    """Format an error in one line: the operating system's message and file name if there is one.

    torch's archive writer replaces a failed write by an error of its own. The OSError is then found
    among the causes and contexts of that error.
    """
    for failure, _ in getattr(error, "failures", {}).values():  # of torch.distributed.checkpoint
        return describe_error(failure)
    if isinstance(error, CheckpointError):
        return error.message
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            file_name = f": {cause.filename}" if cause.filename else ""
            return f"{cause.strerror}{file_name}"
        cause = cause.__cause__ or cause.__context__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextmanager
def collect_errors(errors: list[str]) -> Iterator[None]:
    """Append this rank's error to ``errors`` instead of raising it.

    The caller passes it to :func:`raise_on_all_ranks` later.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        errors.append(describe_error(error))
