"""The communication backend a YAML names, looked at before anything starts."""

from __future__ import annotations

from dataclasses import replace

from flagscale.comm import registry
from flagscale.config.checks import Arguments
from flagscale.config.schema import Experiment
from flagscale.errors import ConfigError, Problem


def backend_problems(experiment: Experiment) -> list[Problem]:
    """What is wrong with the name. Whether a host can use the backend is for that host to say."""
    if experiment.task.foreign:
        return []
    args = Arguments.of(experiment)
    try:
        registry.backend(args["distributed_backend"])
    except ConfigError as error:
        message = error.message.removeprefix("distributed_backend: ")
        return [args.problem("distributed_backend", message)]
    try:
        registry.options_of(args["distributed_backend"], args["comm"] or ())
    except ConfigError as error:
        found = [replace(problem, key="") for problem in error.problems]
        names = [problem.key for problem in error.problems]
        return [
            args.problem("comm", f"{name}: {problem}")
            for name, problem in zip(names, found, strict=True)
        ]
    return []
