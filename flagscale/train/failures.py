"""Failure handling of a rank: one ``failed`` status event per rank, one full message per job."""

from __future__ import annotations

import sys
import traceback
from datetime import timedelta

from flagscale import flight_reporter
from flagscale.errors import FlagscaleError
from flagscale.status import StatusWriter
from flagscale.train.distributed import RankIdentity

_STORE_TIMEOUT_SECONDS = 5


def report_failure(error: BaseException, rank: RankIdentity, status: StatusWriter) -> int:
    """Write the ``failed`` event, print the error, and return the exit code.

    A failure often reaches every rank, and ranks that lose a peer fail in turn. Only the first
    failed rank prints the full message: without a traceback for a configuration error
    (FlagscaleError), with a traceback for any other exception.
    """
    trace = "".join(traceback.format_exception(error))
    status.write(
        "failed",
        kind=type(error).__name__,
        message=str(error),
        traceback=trace,
        explained=isinstance(error, FlagscaleError),
    )
    flight_reporter.record_failure()
    if not _is_first_failure(rank):
        summary = str(error).partition("\n")[0]
        if not isinstance(error, FlagscaleError):
            print(f"rank {rank.rank}: {type(error).__name__}: {summary}", file=sys.stderr)
    elif isinstance(error, FlagscaleError):
        print(f"error: {error}", file=sys.stderr)
    else:
        print(f"rank {rank.rank} failed:\n{trace}", file=sys.stderr)
    sys.stderr.flush()
    return error.exit_code if isinstance(error, FlagscaleError) else 1


def _is_first_failure(rank: RankIdentity) -> bool:
    """Return whether no other rank has reported a failure yet.

    Before the process group exists, all ranks of a host fail for the same reason. In that case
    local rank 0 counts as the first.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return rank.local_rank == 0
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_SECONDS))
        return bool(store.add("flagscale/failures", 1) == 1)
    except (RuntimeError, ValueError):
        # The store has terminated with its rank, which has reported its own failure.
        return False
