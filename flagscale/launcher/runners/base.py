"""Interface of runners, and loading of a runner by name.

A runner determines the hosts of an experiment, and starts, watches and ends a run on them.
Third-party runners come from the entry points ``flagscale.runners``; ``experiment.runner.type``
selects one. All methods after ``submit`` work on the run's state alone, from any terminal; the
runner finds its own ``handle`` in the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from flagscale.config.runners import DEFAULT_RUNNER, RUNNERS

# Imports are deferred so that each action loads only the modules it uses.
if TYPE_CHECKING:
    from flagscale.config.schema import Experiment
    from flagscale.launcher.planning.model import LaunchPlan
    from flagscale.launcher.preflight.checks import Check
    from flagscale.launcher.runners.programs.filter_output import FilteredLines, FilterRequest
    from flagscale.launcher.snapshot import Snapshot
    from flagscale.launcher.state import RunState
    from flagscale.launcher.stop_result import StopResult


@dataclass(frozen=True)
class ConfigTexts:
    """Texts of the files that are stored with a run, without secrets.

    These are the resolved configuration, the overrides, the record of the start, the configuration
    with which the run can be started again, and the uncommitted changes of the code.
    """

    config: str = ""
    overrides: str = ""
    launch: str = ""
    composed: str = ""
    changes: str = ""


@dataclass
class PreparedRun:
    """A plan that is ready to start, and the results of its preflight (empty without one)."""

    plan: LaunchPlan
    checks: list[Check] = field(default_factory=list)
    copy_code: Callable[[], object] = lambda: None
    """Copies this machine's code to the hosts, if the runner is configured to do so."""
    check_hardware: Callable[[], list[Check]] = list
    """Measures the hosts' hardware, if the experiment requests it; needs the code there."""


class Runner(Protocol):
    """Interface of a runner."""

    def plan(self, experiment: Experiment) -> LaunchPlan:
        """Return the plan that a run would start, without contacting any host.

        Raises:
            ConfigError: If the configuration cannot work.
        """

    def prepare(
        self, experiment: Experiment, *, checking: bool, fresh: bool = False
    ) -> AbstractContextManager[PreparedRun]:
        """Return a context manager that prepares a run and holds connections open within its
        block.

        Args:
            checking: Run the preflight checks.
            fresh: Ignore results that hosts cached from an earlier preflight.

        Raises:
            ConfigError: As :meth:`plan`.
            UnreachableError: If a host does not answer, unless a check reports it.
        """

    def submit(self, plan: LaunchPlan, texts: ConfigTexts, *, foreground: bool) -> RunState:
        """Write the scripts, start one on every host, and return the saved state.

        Raises:
            RunStateError: If another run is alive in the same directory.
        """

    def await_hosts(self, state: RunState) -> RunState:
        """Wait until the run has its hosts, and return the state with their names.

        A scheduler may take long; the runner prints why it waits.

        Raises:
            JobError: If the hosts will not become available.
        """

    def query(self, state: RunState, *, with_lines: bool = False) -> Snapshot:
        """Return a snapshot of the run; ``with_lines`` adds each host's last line of output."""

    def bring_output(self, state: RunState) -> None:
        """Make the output of the hosts readable on this machine."""

    def ended(self, state: RunState, *, any_host: bool = False) -> bool:
        """Return True if the scripts of all hosts, or with ``any_host`` of at least one, have
        ended.
        """

    def rank_count(self, state: RunState) -> int:
        """Return the number of processes of the run that were started as ranks."""

    def wait(self, state: RunState) -> int:
        """Wait for the run's scripts and return the job's exit code."""

    def stop(self, state: RunState) -> StopResult:
        """End every process of the run and nothing else, regardless of the files on disk;
        idempotent.
        """

    def close(self) -> None:
        """Close connections that the runner holds open; the run continues."""


@runtime_checkable
class OutputFilter(Runner, Protocol):
    """A runner whose hosts filter their output themselves, so that long logs do not travel.

    Without it, ``logs`` filters what :meth:`Runner.bring_output` has made readable.
    """

    def filter_output(
        self, state: RunState, requests: Mapping[int, FilterRequest]
    ) -> dict[int, FilteredLines]:
        """Return the lines of each request, by the index of the host. Hosts that do not answer
        are reported, and left out.
        """


def filtering_runner(runner: Runner) -> OutputFilter | None:
    """Return the runner if its hosts can filter their output."""
    return runner if isinstance(runner, OutputFilter) else None


def runner_for_experiment(experiment: Experiment) -> Runner:
    """Create the runner that an experiment selects."""
    return _create_runner(experiment.runner.type or DEFAULT_RUNNER)


def runner_for_run(state: RunState) -> Runner:
    """Create the runner of a run that was started before."""
    return _create_runner(state.runner.type)


def _create_runner(name: str) -> Runner:
    runner: Runner = RUNNERS.load(name)()
    return runner
