"""What a YAML names and a package or a file of the user's brings, looked at on the host that is to
train with it: the host's own Python, in the environment of its ranks, says whether it is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flagscale.config.arguments.external import NAME, is_external
from flagscale.config.arguments.families import FAMILIES
from flagscale.config.checks import Arguments
from flagscale.config.schema import Experiment
from flagscale.hosts.facts import Facts
from flagscale.launcher.planning.model import HostPlan
from flagscale.launcher.preflight.checks import Check


@dataclass(frozen=True)
class Brought:
    """One argument that names such a thing."""

    check: str
    argument: str
    module: str
    """What the host's Python runs, with the name as its word."""
    wanted: Callable[[Any], bool]
    """Whether somebody else brings it."""

    def words(self, experiment: Experiment) -> list[str] | None:
        """What :attr:`module` is asked; None where nothing is to be brought, or the training
        program is somebody else's."""
        args = Arguments.of(experiment)
        wanted = not experiment.task.external and self.wanted(args)
        return [str(args[self.argument])] if wanted else None

    def look(self, experiment: Experiment, _: HostPlan, facts: Facts) -> Check:
        """The check that a host's answer comes to."""
        args = Arguments.of(experiment)
        told = facts.answer(self.check) or {"problem": "its Python was not asked"}
        if problem := told.get("problem"):
            found = str(args.problem(self.argument, problem))
            return Check(self.check, False, found, str(told.get("hint") or ""))
        return Check(self.check, True, f"{args[self.argument]}: {told['found']}")


def _is_anothers(values: Arguments) -> bool:
    return values["family"] not in FAMILIES.own


ALL = (
    Brought("family", "family", "flagscale.train.models.check", _is_anothers),
    Brought("data", NAME, "flagscale.train.data.check", is_external),
)
