"""The communication backend a YAML names, looked at before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from flagscale.comm import registry
from flagscale.config.arguments.flatten import leaves
from flagscale.config.arguments.maps import NAME as OPTIONS
from flagscale.config.arguments.registry import arguments
from flagscale.config.arguments.values import convert
from flagscale.config.checks import Arguments
from flagscale.config.host_overrides import specifics
from flagscale.config.per_host_allowlist import COMM_OPTIONS
from flagscale.config.schema import PROJECT, Experiment
from flagscale.errors import ConfigError, Problem

_OWN_EXAMPLES = PROJECT / "examples"


def chooses_here(experiment: Experiment) -> bool:
    """Whether the program takes its backend from :mod:`flagscale.comm.registry`: this project's
    own and its examples do, another's has a parser and a choice of its own."""
    task = experiment.task
    return not task.external or task.entrypoint.is_relative_to(_OWN_EXAMPLES)


def backend_problems(experiment: Experiment) -> list[Problem]:
    """What is wrong with the name and the options, those of single hosts too. Whether a host can
    use the backend is for that host to say (:mod:`flagscale.launcher.preflight.backend`)."""
    if not chooses_here(experiment):
        return []
    args = Arguments.of(experiment)
    name = args["distributed_backend"]
    try:
        registry.backend(name)
    except ConfigError as error:
        message = error.message.removeprefix("distributed_backend: ")
        return [args.problem("distributed_backend", message)]
    problems = [args.problem(OPTIONS, text) for text in _complaints(name, args[OPTIONS] or ())]
    return [*problems, *_specific_problems(experiment, name)]


def _complaints(name: str, options: Sequence[str]) -> list[str]:
    try:
        registry.options_of(name, options)
    except ConfigError as error:
        return [f"{found.key}: {replace(found, key='')}" for found in error.problems]
    return []


def _specific_problems(experiment: Experiment, name: str) -> Iterator[Problem]:
    """The options that a host or a type of device has of its own, in the place of all of
    ``train``."""
    options = Arguments.of(experiment)[OPTIONS] or ()
    common = {option for option in options if not _complaints(name, [option])}
    for key, specific in specifics(experiment):
        for path, leaf, value in leaves(specific.arguments, f"{key}.", nulls=True):
            if leaf != OPTIONS:
                continue
            options = convert(arguments()[OPTIONS], value or ())
            unlike = {option.partition("=")[0] for option in common ^ set(options)}
            texts = _complaints(name, options) or [
                f"{option}: has to be the same on every host of a job: give it in `train`, and "
                "here too"
                for option in sorted(unlike - COMM_OPTIONS)
            ]
            for text in texts:
                yield Problem(path, text, experiment.sources.get(path))
