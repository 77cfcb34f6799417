"""Selection of runs in a list: by state, name, host and time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from flagscale.config.arguments.spec.values import did_you_mean
from flagscale.errors import ConfigError
from flagscale.launcher.snapshot import Phase
from flagscale.launcher.state import RunState

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
