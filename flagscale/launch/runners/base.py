"""What every way of starting a plan's hosts can do.

``dryrun`` needs none of this: the plan that it prints is the one ``submit`` takes. ``query`` and
``logs`` work on the run's state alone.
"""

from __future__ import annotations

from typing import Protocol

from flagscale.launch.plan import LaunchPlan
from flagscale.launch.processes import Swept
from flagscale.launch.snapshot import Snapshot
from flagscale.launch.state import RunState


class Runner(Protocol):
    """The verbs of a runner."""

    def submit(self, plan: LaunchPlan, *, foreground: bool) -> RunState:
        """Write the scripts, start one on every host, and return the state that was saved."""

    def query(self, state: RunState) -> Snapshot:
        """What the run is doing now."""

    def logs(self, state: RunState, rank: int | None = None) -> list[str]:
        """Every line so far, merged or of one rank."""

    def wait(self, state: RunState) -> int:
        """Wait for the run's scripts and return the job's exit code."""

    def stop(self, state: RunState) -> Swept:
        """End every process of the run and nothing else. Idempotent."""
