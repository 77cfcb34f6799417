"""Where the ranks of a stalled job stand, and which of them holds up the others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flagscale.launch.liveness.diagnosis import Failure, Report, Severity

MAX_STACK_CHARACTERS = 4000
# In a stack: this rank is in a collective or at a barrier, so it waits for another one.
_WAITS = re.compile(
    r"torch[/\\]distributed[/\\]|torch[/\\]autograd[/\\]graph\.py"
    r"| in (\w*barrier|all_\w+|reduce\w*|broadcast\w*|gather\w*|scatter\w*|recv\w*)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Place:
    """Where a rank stands. ``answered`` says whether it wrote its stack when asked to."""

    host: str
    rank: int
    step: int | None
    doing: str
    stopped: bool
    answered: bool
    stack: str
    log: str

    @property
    def waits(self) -> bool:
        return bool(_WAITS.search(self.stack))

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, host: str, record: object) -> Place | None:
        """What :meth:`to_record` gave; None for anything else."""
        if not isinstance(record, Mapping):
            return None
        try:
            step = record["step"]
            return cls(
                host=host,
                rank=int(record["rank"]),
                step=None if step is None else int(step),
                doing=str(record["doing"]),
                stopped=bool(record["stopped"]),
                answered=bool(record["answered"]),
                stack=str(record["stack"])[:MAX_STACK_CHARACTERS],
                log=str(record["log"]),
            )
        except (KeyError, TypeError, ValueError):
            return None


def behind(places: Sequence[Place]) -> Place | None:
    """The rank that the others wait for: the lowest step, then a process that is stopped, then
    one that does not answer where others do, then one that waits for nobody."""
    if not places:
        return None
    lowest = min((place.step for place in places if place.step is not None), default=None)
    last = [place for place in places if lowest is None or place.step == lowest]
    return min(last, key=lambda place: (not place.stopped, place.answered, place.waits, place.rank))


def stalled_report(places: Sequence[Place], seconds: float, host: str, output: Path) -> Report:
    """The failure of a job that got no further for ``seconds``. ``host`` and ``output`` stand in
    where no rank could be asked. The report's time is left to the caller."""
    place = behind(places)
    if place is None:
        reason = f"stalled: no rank has got on for {seconds:.0f} s"
        return Report(Failure(host, None, None, reason, "", output), 0.0, Severity.KILLED)
    at = f" {place.doing}" if place.doing else ""
    at += f" at step {place.step}" if place.step is not None else ""
    reason = f"stalled: no rank has got on for {seconds:.0f} s, and this one is behind{at}"
    if place.stopped:
        reason += "; its process is stopped (SIGSTOP)"
    elif not place.answered:
        reason += "; it did not say where it is"
    failure = Failure(place.host, place.rank, None, reason, place.stack, Path(place.log))
    return Report(failure, 0.0, Severity.KILLED)
