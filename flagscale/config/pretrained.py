"""The model that an experiment starts from: what its config.json fills in, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from flagscale.config.arguments.huggingface.models import config_in, disagreements, missing
from flagscale.config.arguments.paths import PRETRAINED
from flagscale.config.checks import Arguments
from flagscale.config.schema import Experiment
from flagscale.errors import CheckpointError, Problem


def filled(experiment: Experiment) -> tuple[Experiment, list[Problem]]:
    """The experiment with the arguments of the model that its YAML leaves out, and what is wrong
    with the model or disagrees with it.

    Nothing is done where the directory is not on this machine, or is none of Hugging Face; the
    ranks compare in any case.
    """
    args = Arguments.of(experiment)
    path = args[PRETRAINED]
    if experiment.task.external or not isinstance(path, str):
        return experiment, []
    try:
        config = config_in(Path(path))
        if config is None:
            return experiment, []
        added = missing(args.values(), args.given, config)
        train = replace(experiment.train, model={**experiment.train.model, **_section(added)})
        made = replace(experiment, train=train, filled=tuple(added))
        wrong = _disagreements(Arguments.of(made), config)
    except CheckpointError as error:
        return experiment, [args.problem(PRETRAINED, f"{path}: {error.message}")]
    return made, wrong


def _section(added: dict[str, Any]) -> dict[str, Any]:
    """What is added, in a section of its own: no key of the user's has its name."""
    return {PRETRAINED: added} if added else {}


def _disagreements(args: Arguments, config: dict[str, Any]) -> list[Problem]:
    values = args.values()
    if any(values[name] is None for name in ("num_layers", "hidden_size", "seq_length")):
        return []  # told elsewhere
    return [args.problem(name, message) for name, message in disagreements(config, values)]
