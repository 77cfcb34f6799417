"""The family of models, looked at on the host that is to train it: where a package brings it, the
host's own Python says whether it has that package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flagscale.config.arguments.families import FAMILIES
from flagscale.config.checks import Arguments
from flagscale.config.schema import Experiment
from flagscale.launch.preflight.checks import Check

CHECK = "family"
MODULE = "flagscale.train.models.check"


def words(experiment: Experiment) -> list[str] | None:
    """What is asked of :data:`MODULE`; None where the family is this project's own, or the training
    program somebody else's."""
    name = str(Arguments.of(experiment)["family"])
    return None if experiment.task.external or name in FAMILIES.own else [name]


def judge(experiment: Experiment, answer: Mapping[str, Any] | None) -> Check:
    """The check that a host's ``answer`` comes to; None where it was not asked."""
    args = Arguments.of(experiment)
    told = answer or {"problem": "its Python was not asked"}
    if problem := told.get("problem"):
        hint = str(told.get("hint") or "install the package that brings it there")
        return Check(CHECK, False, str(args.problem("family", problem)), hint)
    return Check(CHECK, True, f"{args['family']}: {told['family']}")
