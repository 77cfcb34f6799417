"""Selection of runs in a list: by state, name, host and time."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from datetime import time as clock_time
from fnmatch import fnmatchcase

from flagscale.config.arguments.spec.values import did_you_mean
from flagscale.errors import ConfigError
from flagscale.launcher.snapshot import Phase
from flagscale.launcher.state import RunState

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}
_AGE = re.compile(r"(\d{1,9}(?:\.\d+)?)\s*([smhdw])[a-z]*")
_CLOCK_TIME = re.compile(r"\d\d:\d\d(?::\d\d)?")
_STATE_GROUPS = {
    "live": tuple(phase.value for phase in Phase if not phase.ended),
    "ended": tuple(phase.value for phase in Phase if phase.ended),
}


@dataclass(frozen=True)
class RunFilter:
    """Filter of runs. Empty parts select everything.

    ``name`` and ``host`` are patterns of the shell. ``since`` is in Unix seconds: a run that ended
    before is left out. ``limit`` is the maximum number of runs.
    """

    states: tuple[str, ...] = ()
    name: str = ""
    host: str = ""
    since: float | None = None
    limit: int | None = None

    def accepts_run(self, state: RunState) -> bool:
        """Return whether name and hosts of a run are selected.

        A name without wildcards may be a part of the run's name.
        """
        name = self.name if re.search(r"[*?\[]", self.name) else f"*{self.name}*"
        if not fnmatchcase(state.name.lower(), name.lower()):
            return False
        return not self.host or any(fnmatchcase(host.name, self.host) for host in state.hosts)

    def accepts_phase(self, phase: str, since: float) -> bool:
        """Return whether a run is selected that is in a phase since a time."""
        if self.states and phase not in self.states:
            return False
        return self.since is None or not Phase(phase).ended or since >= self.since


EVERY_RUN = RunFilter()


def parse_states(text: str) -> tuple[str, ...]:
    """Parse a list of states, such as ``failed,lost``; ``live`` and ``ended`` are several.

    Raises:
        ConfigError: one is not a state.
    """
    phases = [phase.value for phase in Phase]
    states: list[str] = []
    for word in filter(None, re.split(r"[,\s]+", text.lower())):
        if word not in phases and word not in _STATE_GROUPS:
            choices = [*phases, *_STATE_GROUPS]
            raise ConfigError(
                f"--state {word}: expected {', '.join(choices)}{did_you_mean(word, choices)}"
            )
        states += _STATE_GROUPS.get(word, (word,))
    return tuple(dict.fromkeys(states))


def parse_moment(text: str, now: float | None = None) -> float:
    """Parse the value of ``--since`` and return Unix seconds.

    It is an age (``30m``, ``2d``), a clock time of the last 24 hours, or a date and time, which is
    a local one unless it has a time zone.

    Raises:
        ConfigError: it is none of these, or in the future.
    """
    present = datetime.fromtimestamp(time.time() if now is None else now)
    word = text.strip()
    try:
        if match := _AGE.fullmatch(word):
            moment = present - timedelta(seconds=float(match[1]) * _UNIT_SECONDS[match[2]])
        elif _CLOCK_TIME.fullmatch(word):
            moment = datetime.combine(present.date(), clock_time.fromisoformat(word))
            moment -= timedelta(days=1) if moment > present else timedelta()
        else:
            # Python 3.10 does not accept the Z of UTC.
            moment = datetime.fromisoformat(word.replace("Z", "+00:00"))
        seconds = moment.timestamp()
    except (ValueError, OverflowError, OSError):
        raise ConfigError(
            f"--since {text}: expected an age such as 30m, 12h or 2d, or a time such as "
            "2026-11-20, '2026-11-20 08:30' or 08:30"
        ) from None
    if seconds > present.timestamp():
        raise ConfigError(f"--since {text}: is in the future")
    return seconds
