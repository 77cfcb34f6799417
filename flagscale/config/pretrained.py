"""The model that an experiment starts from: what its config.json fills in, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from flagscale.config.arguments.huggingface.models import (
    config_in,
    disagreements,
    is_model,
    missing,
)
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
    if experiment.task.external:
        return experiment, []
    if not isinstance(path, str):
        return experiment, list(_as_load(args))
    try:
        config = config_in(Path(path))
        if config is None:
            return experiment, list(_no_model(args, Path(path)))
        added = missing(args.values(), args.given, config)
        train = replace(experiment.train, model={**experiment.train.model, **_section(added)})
        made = replace(experiment, train=train, filled=tuple(added))
        wrong = _disagreements(Arguments.of(made), config)
    except CheckpointError as error:
        return experiment, [args.problem(PRETRAINED, f"{path}: {error.message}")]
    return made, wrong


def _as_load(args: Arguments) -> Iterator[Problem]:
    """``load`` takes checkpoints, from which training goes on."""
    load = args["load"]
    if isinstance(load, str) and is_model(Path(load)):
        message = f"{load} is a model of Hugging Face; {PRETRAINED} starts from one"
        yield args.problem("load", message)


def _no_model(args: Arguments, path: Path) -> Iterator[Problem]:
    if path.is_dir() and not any((*path.glob("iter_*"), *path.glob("**/mp_rank_*"))):
        message = f"{path} holds neither config.json, as a model of Hugging Face does, nor iter_…"
        yield args.problem(PRETRAINED, f"{message} directories, as one of checkpoints does")


def _section(added: dict[str, Any]) -> dict[str, Any]:
    """What is added, in a section of its own: no key of the user's has its name."""
    return {PRETRAINED: added} if added else {}


def _disagreements(args: Arguments, config: dict[str, Any]) -> list[Problem]:
    values = args.values()
    if any(values[name] is None for name in ("num_layers", "hidden_size", "seq_length")):
        return []  # told elsewhere
    return [args.problem(name, message) for name, message in disagreements(config, values)]
