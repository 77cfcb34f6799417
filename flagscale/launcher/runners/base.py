"""What every way of starting a plan's hosts can do, and how one is found by its name.

A runner is one file: it knows which hosts an experiment runs on, what they are like, and how to
start, watch and end a run there. Others come from the entry points ``flagscale.runners``, and a
YAML names one as ``experiment.runner.type``. Everything after ``submit`` works on the run's state
alone, from any terminal; in it the runner finds its own ``handle`` again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from flagscale.config.runners import DEFAULT, RUNNERS

# Each action loads what it needs: a dry run looks at no process, a look prepares nothing.
if TYPE_CHECKING:
    from flagscale.config.schema import Experiment
    from flagscale.launcher.planning.model import LaunchPlan
    from flagscale.launcher.preflight.checks import Check
    from flagscale.launcher.snapshot import Snapshot
    from flagscale.launcher.state import RunState
    from flagscale.launcher.stop_result import Stopped


@dataclass(frozen=True)
class Texts:
    """What is kept beside a run's scripts; without secrets."""

    config: str = ""
    overrides: str = ""


@dataclass
class Prepared:
    """A plan, and what a preflight found about it (nothing where none was wanted)."""

    plan: LaunchPlan
    checks: list[Check] = field(default_factory=list)
    copy_code: Callable[[], object] = lambda: None
    """Brings the hosts this machine's code, where the runner is to do that."""


class Runner(Protocol):
    """The verbs of a runner."""

    def plan(self, experiment: Experiment) -> LaunchPlan:
        """What a run would start, as far as this machine can tell; nobody else is asked. Raises
        :class:`ConfigError` for what cannot work."""

    def prepare(
        self, experiment: Experiment, *, checking: bool, fresh: bool = False
    ) -> AbstractContextManager[Prepared]:
        """What a run needs, for as long as the block lasts. ``checking``: with a preflight, for
        which nothing that hosts have kept of an earlier one is believed where it is to be
        ``fresh``. Raises as :meth:`plan`, and :class:`UnreachableError` for hosts that don't
        answer, unless a check is to show them."""

    def submit(self, plan: LaunchPlan, texts: Texts, *, foreground: bool) -> RunState:
        """Write the scripts, start one on every host, and return the state that was saved. Raises
        :class:`RunStateError` while another run lives in the same directory."""

    def await_hosts(self, state: RunState) -> RunState:
        """The state once the run's hosts are there, with their names; a scheduler may take its
        time, of which the runner tells. Raises :class:`JobError` where they will not come."""

    def query(self, state: RunState, *, with_lines: bool = False) -> Snapshot:
        """What the run is doing now; ``with_lines``: with each host's last line of output."""

    def bring_output(self, state: RunState) -> None:
        """See to it that what the hosts have printed can be read on this machine."""

    def ended(self, state: RunState, *, any_host: bool = False) -> bool:
        """Whether the scripts of all hosts have ended, or of any."""

    def rank_count(self, state: RunState) -> int:
        """How many processes of the run were started as ranks."""

    def wait(self, state: RunState) -> int:
        """Wait for the run's scripts and return the job's exit code."""

    def stop(self, state: RunState) -> Stopped:
        """End every process of the run and nothing else, whatever the disk says. Idempotent."""

    def close(self) -> None:
        """Give up what the runner holds open; the run goes on."""


def runner_for(experiment: Experiment) -> Runner:
    """The runner that an experiment asks for."""
    return _load(experiment.runner.type or DEFAULT)


def runner_of(state: RunState) -> Runner:
    """The runner that looks after a run that was started before."""
    return _load(state.runner.type)


def _load(name: str) -> Runner:
    made: Runner = RUNNERS.load(name)()
    return made
