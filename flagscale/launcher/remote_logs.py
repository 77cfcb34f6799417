"""Lines of a run whose hosts filter their output themselves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from flagscale.launcher.layout import OLD_OUTPUT_FILE, OUTPUT_TIMES_FILE
from flagscale.launcher.log_query import FOLLOWED_LINES, LogQuery
from flagscale.launcher.logs import note_missing_times
from flagscale.launcher.runners.base import OutputFilter
from flagscale.launcher.runners.programs.filter_output import FilterRequest
from flagscale.launcher.state import RunState

_FOLLOW_SECONDS = 1.0


def read_filtered_lines(
    runner: OutputFilter, state: RunState, query: LogQuery, *, follow: bool
) -> Iterator[str]:
    """Yield the lines of a query, host by host; with ``follow``, until the run ends."""
    count = query.count
    if follow and count is None and query.since is None:
        count = FOLLOWED_LINES
    requests = {
        index: _first_request(state, index, query, count, final=not follow) for index in query.hosts
    }
    yield from _read_available(runner, state, requests)
    finished = not follow
    while not finished:
        finished = runner.ended(state)
        if not finished:
            time.sleep(_FOLLOW_SECONDS)
        for index, request in requests.items():
            requests[index] = replace(request, final=finished)
        yield from _read_available(runner, state, requests)


def _first_request(
    state: RunState, index: int, query: LogQuery, count: int | None, *, final: bool
) -> FilterRequest:
    host = state.hosts[index]
    return FilterRequest(
        path=str(host.output),
        set_aside=str(host.run_dir / OLD_OUTPUT_FILE),
        index=str(host.run_dir / OUTPUT_TIMES_FILE),
        host=host.name,
        rank=query.rank,
        pattern=query.pattern,
        level=query.level,
        since=query.since,
        count=count,
        final=final,
    )


def _read_available(
    runner: OutputFilter, state: RunState, requests: dict[int, FilterRequest]
) -> Iterator[str]:
    """Yield all lines that are there, and update the requests such that they continue behind them.

    The request of a host that does not answer stays as it is.
    """
    pending = dict(requests)
    while pending:
        replies = runner.filter_output(state, pending)
        for index in sorted(replies):
            reply = replies[index]
            if not reply.has_times:
                note_missing_times(state.hosts[index].name)
            yield from reply.lines
            requests[index] = replace(
                requests[index], offset=reply.offset, messages=reply.messages, count=None
            )
        pending = {index: requests[index] for index in replies if replies[index].has_more}
