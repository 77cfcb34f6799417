"""Checks that a user's packages and files named in the YAML exist on each host.

The host's own Python looks for them, in the environment of its ranks. :mod:`.host_probe` sends
the queries, :mod:`.hosts` evaluates the replies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flagscale.config.arguments.rules.data import uses_external_data
from flagscale.config.arguments.rules.model_family import MODEL_FAMILIES
from flagscale.config.arguments.spec.paths import EVAL_TASKS, EXTERNAL_DATA
from flagscale.config.arguments.spec.train_arguments import TrainArguments
from flagscale.config.schema import Experiment
from flagscale.config.secrets import is_secret
from flagscale.hosts.facts import HostFacts
from flagscale.launcher.planning.model import HostPlan
from flagscale.launcher.preflight.checks import Check
from flagscale.object_storage import is_address
from flagscale.sinks.registry import ENABLING_KEYS, SINKS_KEY, list_enabled_sinks


@dataclass(frozen=True)
class UserCode:
    """An argument that names code of the user's. ``check`` is the name of the check."""

    check: str
    argument: str
    module: str
    """Module that the host's Python runs, with the argument's value as its argument."""
    is_user_code: Callable[[Any], bool]
    """Predicate on the arguments: True if the named code comes from the user."""

    def query_arguments(self, experiment: Experiment) -> list[str] | None:
        """Return the arguments of :attr:`module`, or None if the code is built in or the training
        program belongs to another project.
        """
        args = experiment.train
        is_needed = not experiment.task.external and self.is_user_code(args)
        return [str(args[self.argument])] if is_needed else None

    def check_host(self, experiment: Experiment, _: HostPlan, facts: HostFacts) -> Check:
        """Return the check of one host, from its reply."""
        args = experiment.train
        reply = facts.module_reply(self.check) or {"problem": "its Python was not queried"}
        if problem := reply.get("problem"):
            problem_text = str(args.problem(self.argument, problem))
            return Check(self.check, False, problem_text, str(reply.get("hint") or ""))
        return Check(self.check, True, f"{args[self.argument]}: {reply['found']}")


def _is_external_family(values: TrainArguments) -> bool:
    return values["family"] not in MODEL_FAMILIES.builtin


class FirstHostCode:
    """Packages that only rank 0 uses, which runs on the first host."""

    check: str
    """Name of the check."""
    module: str
    """Module that the host's Python runs."""
    reason: str
    """Reason why other hosts need no package."""

    def query_arguments(self, experiment: Experiment) -> list[str] | None:
        """Return the arguments of :attr:`module`, or None if no package is needed."""
        raise NotImplementedError

    def check_host(self, experiment: Experiment, plan: HostPlan, facts: HostFacts) -> Check:
        """Return the check of one host, from its reply."""
        if plan.node_rank:
            return Check(self.check, True, self.reason)
        reply = facts.module_reply(self.check) or {"problem": "its Python was not queried"}
        if problem := reply.get("problem"):
            return Check(self.check, False, str(problem), str(reply.get("hint") or ""))
        return Check(self.check, True, str(reply["found"]))


class MetricsSinks(FirstHostCode):
    """The metrics sinks that the arguments enable."""

    check = "metrics"
    module = "flagscale.sinks.check"
    reason = "logged by the first host"

    def query_arguments(self, experiment: Experiment) -> list[str] | None:
        """Return the names of the sinks, or None if only TensorBoard is used, which training needs
        anyway, or if the training program belongs to another project.
        """
        args = experiment.train
        values = {key: args[key] for key in (*ENABLING_KEYS.values(), SINKS_KEY)}
        names = [] if experiment.task.external else list_enabled_sinks(values)
        return [name for name in names if name != "tensorboard"] or None


class EvaluationTasks(FirstHostCode):
    """The package that evaluates ``eval_tasks``."""

    check = "tasks"
    module = "flagscale.train.evaluation.check"
    reason = "evaluated by the first host"

    def query_arguments(self, experiment: Experiment) -> list[str] | None:
        """Return the tasks, or None if there are none or another program trains."""
        tasks = None if experiment.task.external else experiment.train[EVAL_TASKS]
        return list(tasks) if tasks else None


@dataclass(frozen=True)
class CheckpointStorage:
    """Object storage to which every host uploads its part of the checkpoints."""

    check: str = "save"
    module: str = "flagscale.object_storage"

    def query_arguments(self, experiment: Experiment) -> list[str] | None:
        """Return the address, or None if checkpoints are saved on a disk or nowhere."""
        save = experiment.train["save"]
        is_stored = isinstance(save, str) and is_address(save) and not experiment.task.external
        return [save] if is_stored else None

    def check_host(self, experiment: Experiment, plan: HostPlan, facts: HostFacts) -> Check:
        """Return the check of one host, from its reply."""
        reply = facts.module_reply(self.check) or {"problem": "its Python was not queried"}
        if not (problem := reply.get("problem")):
            return Check(self.check, True, str(reply["found"]))
        # Queries do not get secrets of the YAML, which the ranks get in their environment.
        if reply.get("lacks_credentials") and any(
            is_secret(variable.name, variable.value) for variable in plan.environment
        ):
            finding = f"{problem}, apart from secrets of experiment.envs, which only ranks get"
            return Check(self.check, True, finding, warning=True)
        return Check(self.check, False, str(problem), str(reply.get("hint") or ""))


USER_CODE = (
    UserCode("family", "family", "flagscale.train.models.check", _is_external_family),
    UserCode("data", EXTERNAL_DATA, "flagscale.train.data.check", uses_external_data),
)
HOST_QUERIES: tuple[UserCode | FirstHostCode | CheckpointStorage, ...] = (
    MetricsSinks(),
    EvaluationTasks(),
    CheckpointStorage(),
    *USER_CODE,
)
"""Code that the Python of each host looks for."""
