"""How a rank ends when something goes wrong: one event a rank, one message a job."""

from __future__ import annotations

import sys
import traceback
from datetime import timedelta

from flagscale.errors import FlagscaleError
from flagscale.status import StatusWriter
from flagscale.train.distributed import Rank

_ASK_SECONDS = 5


def report(error: BaseException, rank: Rank, status: StatusWriter) -> int:
    """Write the ``failed`` event, tell the user, and return the exit code.

    A failure often reaches every rank, and ranks that lose a partner fail in turn; only the first
    of them speaks at length. A user's mistake is one message, anything else a traceback.
    """
    trace = "".join(traceback.format_exception(error))
    status.write(
        "failed",
        kind=type(error).__name__,
        message=str(error),
        traceback=trace,
        explained=isinstance(error, FlagscaleError),
    )
    if not _is_first(rank):
        summary = str(error).partition("\n")[0]
        if not isinstance(error, FlagscaleError):
            print(f"rank {rank.rank}: {type(error).__name__}: {summary}", file=sys.stderr)
    elif isinstance(error, FlagscaleError):
        print(f"error: {error}", file=sys.stderr)
    else:
        print(f"rank {rank.rank} failed:\n{trace}", file=sys.stderr)
    sys.stderr.flush()
    return error.exit_code if isinstance(error, FlagscaleError) else 1


def _is_first(rank: Rank) -> bool:
    """Whether no other rank has failed yet.

    Before the process group exists, every rank of a host fails for the same reason, and its first
    one speaks.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return rank.local_rank == 0
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(timedelta(seconds=_ASK_SECONDS))
        return bool(store.add("flagscale/failures", 1) == 1)
    except (RuntimeError, ValueError):
        # The store went down with the rank that kept it, which has spoken.
        return False
