"""Output of a run, with ``host:rank`` in front of every line.

Used by ``action=logs`` and by foreground runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence

from flagscale.hosts.processes import POLL_SECONDS
from flagscale.launcher.layout import OUTPUT_TIMES_FILE
from flagscale.launcher.liveness.diagnosis import rank_logs
from flagscale.launcher.log_lines import Output, create_filter, host_label_function, offset_since
from flagscale.launcher.log_query import LogQuery, select_hosts
from flagscale.launcher.state import HostState, RunState


def host_outputs(state: RunState, query: LogQuery | None = None) -> list[Output]:
    """Return the outputs of the hosts' scripts, which include their ranks', with the lines of a
    query.
    """
    query = query or LogQuery(select_hosts(state))
    outputs = []
    for index in query.hosts:
        host = state.hosts[index]
        line_filter = create_filter(host.name, query.pattern, query.level)
        output = Output(host.output, host_label_function(host.name, query.rank), line_filter)
        if query.since is not None:
            output.offset = _find_offset(host, query.since)
        outputs.append(output)
    return outputs


def _find_offset(host: HostState, since: float) -> int:
    offset = offset_since(host.output, host.run_dir / OUTPUT_TIMES_FILE, since)
    if offset is None:
        note_missing_times(host.name)
    return offset or 0


def note_missing_times(host: str) -> None:
    """Print a note that lines of a host cannot be selected by time."""
    text = f"note: the output of {host} has no record of times; its lines since the start follow"
    print(text, file=sys.stderr)


def _rank_outputs(state: RunState, query: LogQuery) -> Iterator[Output]:
    """Yield the files that torchrun writes for each rank."""
    for host in (state.hosts[index] for index in query.hosts):
        for number in host.ranks if query.rank is None else {query.rank}:
            label = f"{host.name}:{number}: {{}}".format
            for name in ("stdout.log", "stderr.log"):
                line_filter = create_filter(host.name, query.pattern, query.level)
                yield from (
                    Output(path, label, line_filter)
                    for path in rank_logs(host, number, name)
                    if query.since is None or path.stat().st_mtime >= query.since
                )


def read_lines(state: RunState, query: LogQuery | None = None) -> Iterator[str]:
    """Yield the lines of a query so far, host by host.

    A run without an output file, whose script was started by hand in a terminal, has torchrun's
    files of each rank.
    """
    query = query or LogQuery(select_hosts(state))
    outputs = host_outputs(state, query)
    if not any(output.path.exists() and output.path.stat().st_size for output in outputs):
        outputs = list(_rank_outputs(state, query))
    for output in outputs:
        yield from (
            output.read(final=True)
            if query.count is None
            else output.last_lines(query.count, final=True)
        )


def follow_lines(outputs: Sequence[Output], ended: Callable[[], bool]) -> Iterator[str]:
    """Yield lines as they come until ``ended`` returns true, then the remaining ones.

    It polls, because a shared file system may not notify of changes.
    """
    finished = False
    while not finished:
        finished = ended()
        for output in outputs:
            yield from output.read(final=finished)
        if not finished:
            time.sleep(POLL_SECONDS)
