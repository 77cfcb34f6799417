"""A run as its page shows it: everything that is known of it, looked at once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flagscale.errors import FlagscaleError
from flagscale.launcher import runs, snapshot
from flagscale.launcher.snapshot import Phase, Seen, Snapshot
from flagscale.launcher.state import RunState, latest
from flagscale.report import history, setting
from flagscale.report.history import Attempt
from flagscale.report.setting import Setting
from flagscale.report.timeline import Happening, happenings


@dataclass(frozen=True)
class Run:
    """What is known of a run at the moment ``taken``, in Unix seconds. ``config`` is the YAML that
    it was started of, ``trouble`` why its hosts could not be asked, ``told`` what is registered of
    its failures where its own files are gone: each with the number of its attempt."""

    state: RunState
    seen: Snapshot
    attempts: Sequence[Attempt]
    setting: Setting
    happened: Sequence[Happening]
    taken: float
    config: str = ""
    trouble: str = ""
    told: Sequence[tuple[int, str]] = ()

    @property
    def ended(self) -> float | None:
        return self.seen.since if self.seen.phase.ended else None


def look(state: RunState) -> Run:
    """Look at a run. Its hosts are asked unless it is known to have ended."""
    state, taken, trouble = latest(state), time.time(), ""
    entry = runs.registered_as(state.run_id)
    ended = entry.ended if entry is not None else None
    if ended is not None:
        seen = snapshot.take(state, {})
        seen = replace(seen, phase=Phase(ended.phase), since=ended.since)
    else:
        try:
            seen = runs.query(state)
        except FlagscaleError as error:
            trouble = error.message
            silent = {host.node_rank: Seen(trouble=trouble) for host in state.hosts}
            seen = snapshot.take(state, silent)
        # A scheduler's hosts have names once they are given.
        state = latest(state)
    attempts = history.read(state, seen.events)
    return Run(
        state=state,
        seen=replace(seen, events={}),
        attempts=attempts,
        setting=setting.read(state),
        happened=happenings(state, seen, attempts),
        taken=taken,
        config=entry.config if entry is not None else "",
        trouble=trouble,
        told=ended.failures if ended is not None else (),
    )


def labels(found: Sequence[Run]) -> list[str]:
    """A name for each run, unlike the others'."""
    names = Counter(run.state.name for run in found)
    return [
        run.state.name if names[run.state.name] == 1 else f"{run.state.name} {run.state.run_id}"
        for run in found
    ]


def devices(run: Run) -> Mapping[int, str]:
    """What the ranks of each host run on, by node rank, as the last attempt told."""
    of_rank = {
        event.rank: str(event.get("device", ""))
        for attempt in run.attempts[-1:]
        for event in attempt.of("started")
    }
    found = {}
    for host in run.state.hosts:
        kinds = Counter(of_rank[rank].partition(":")[0] for rank in host.ranks if rank in of_rank)
        found[host.node_rank] = ", ".join(
            f"{count} x {kind}" for kind, count in kinds.items() if kind
        )
    return found


def backend(run: Run) -> str:
    """The communication backend that the ranks joined through."""
    told = (e for attempt in run.attempts[-1:] for e in attempt.of("joined"))
    return next((str(event.get("backend", "")) for event in told), "")
