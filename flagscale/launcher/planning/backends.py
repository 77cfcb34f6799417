"""Checks of the communication backend and its options before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from flagscale.comm import registry
from flagscale.config.arguments.spec.system_arguments import COMM as OPTIONS
from flagscale.config.host_overrides import iter_host_overrides
from flagscale.config.per_host_allowlist import COMM_OPTIONS
from flagscale.config.schema import PROJECT, Experiment
from flagscale.errors import ConfigError, Problem

_EXAMPLES = PROJECT / "examples"


def uses_backend_registry(experiment: Experiment) -> bool:
    """Return True if the program selects its backend through :mod:`flagscale.comm.registry`.

    This project's program and its examples do; an external program has a parser of its own.
    """
    task = experiment.task
    return not task.external or task.entrypoint.is_relative_to(_EXAMPLES)


def check_backend(experiment: Experiment) -> list[Problem]:
    """Return the problems of the backend's name and of its options, including those of single
    hosts.

    Each host checks for itself whether it can use the backend
    (:mod:`flagscale.launcher.preflight.backend`).
    """
    if not uses_backend_registry(experiment):
        return []
    args = experiment.train
    name = args["distributed_backend"]
    try:
        registry.get_backend(name)
    except ConfigError as error:
        message = error.message.removeprefix("distributed_backend: ")
        return [args.problem("distributed_backend", message)]
    problems = [
        args.problem(OPTIONS, text) for text in _find_option_errors(name, args[OPTIONS] or ())
    ]
    return [*problems, *_check_host_options(experiment, name)]


def _find_option_errors(name: str, options: Sequence[str]) -> list[str]:
    try:
        registry.parse_backend_options(name, options)
    except ConfigError as error:
        return [f"{problem.key}: {replace(problem, key='')}" for problem in error.problems]
    return []


def _check_host_options(experiment: Experiment, name: str) -> Iterator[Problem]:
    """Yield the problems of options that a host or a device type sets in place of those of
    ``train``.
    """
    options = experiment.train[OPTIONS] or ()
    common = {option for option in options if not _find_option_errors(name, [option])}
    for _, specific in iter_host_overrides(experiment):
        for given in specific.arguments.entries:
            if given.name != OPTIONS:
                continue
            options = given.canonical or ()
            differing = {option.partition("=")[0] for option in common ^ set(options)}
            texts = _find_option_errors(name, options) or [
                f"{option}: has to be the same on every host of a job: give it in `train`, and "
                "here too"
                for option in sorted(differing - COMM_OPTIONS)
            ]
            for text in texts:
                yield Problem(given.key, text, given.place)
