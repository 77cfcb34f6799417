"""How far the ranks of a stalled job are, and which of them holds up the others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flagscale.launch.liveness.diagnosis import Failure, Report, Severity

MAX_STACK_CHARACTERS = 4000
# In a stack: this rank is in a collective or at a barrier, so it waits for another one.
_WAITS = re.compile(
    r"torch[/\\]distributed[/\\]|torch[/\\]autograd[/\\]graph\.py"
    r"| in (\w*barrier|all_\w+|reduce\w*|broadcast\w*|gather\w*|scatter\w*|recv\w*)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class RankProgress:
    """How far a rank is. ``answered`` says whether it wrote its stack when asked to."""

    host: str
    rank: int
    step: int | None
    doing: str
    stopped: bool
    answered: bool
    stack: str
    log: Path

    @property
    def waits(self) -> bool:
        return bool(_WAITS.search(self.stack))


def behind(ranks: Sequence[RankProgress]) -> RankProgress | None:
    """The rank that the others wait for: the lowest step, then a process that is stopped, then
    one that does not answer where others do, then one that waits for nobody."""
    if not ranks:
        return None
    lowest = min((rank.step for rank in ranks if rank.step is not None), default=None)
    last = [rank for rank in ranks if lowest is None or rank.step == lowest]
    return min(last, key=lambda rank: (not rank.stopped, rank.answered, rank.waits, rank.rank))


def stalled_report(
    ranks: Sequence[RankProgress], seconds: float, host: str, output: Path
) -> Report:
    """The failure of a job that got no further for ``seconds``. ``host`` and ``output`` stand in
    where no rank could be asked. The report's time is left to the caller."""
    last = behind(ranks)
    if last is None:
        reason = f"stalled: no rank has got on for {seconds:.0f} s"
        return Report(Failure(host, None, None, reason, "", output), 0.0, Severity.KILLED)
    at = f" {last.doing}" if last.doing else ""
    at += f" at step {last.step}" if last.step is not None else ""
    reason = f"stalled: no rank has got on for {seconds:.0f} s, and this one is behind{at}"
    if last.stopped:
        reason += "; its process is stopped (SIGSTOP)"
    elif not last.answered:
        reason += "; it did not say where it is"
    failure = Failure(last.host, last.rank, None, reason, last.stack, last.log)
    return Report(failure, 0.0, Severity.KILLED)
