"""Reading ``device_type_specific`` and ``node_specific``: what is different on some hosts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from flagscale.config import schema
from flagscale.config.arguments import paths
from flagscale.config.arguments.backend_options import as_words
from flagscale.config.arguments.flatten import collisions, leaves
from flagscale.config.arguments.parser import canonicalise
from flagscale.config.reader import Reader
from flagscale.config.secrets import is_secret
from flagscale.errors import Problem

_OWN = ("build_dir", "python", "conda", "cmds")

SAME_EVERYWHERE = frozenset(
    {
        *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
        *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
        *("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size"),
        *("global_batch_size", "train_iters", "train_samples", "seed", "distributed_backend"),
        *("use_distributed_optimizer", "sequence_parallel", "num_experts", "save_interval"),
    }
)
"""Arguments on which all ranks of a job have to agree: with two values they would wait for each
other for ever."""


def with_absolute_paths(section: Mapping[Any, Any], external: bool) -> dict[Any, Any]:
    """A section of arguments in which the paths no longer depend on the working directory."""
    made: dict[Any, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping):
            made[key] = with_absolute_paths(value, external)
        elif value is None:
            made[key] = None
        else:
            name = str(key).replace("-", "_")
            made[key] = paths.absolute_value(name, value, external=external)
    return made


def read_specifics(
    reader: Reader, data: Mapping[Any, Any], section: str, *, external: bool
) -> dict[str, schema.Specific]:
    """``device_type_specific`` or ``node_specific``, by type or host."""
    parts = reader.mapping(data, section)
    return {
        str(name): _read(
            reader, reader.mapping(parts, name, f"{section}."), f"{section}.{name}.", external
        )
        for name in parts
    }


def _read(reader: Reader, data: Mapping[Any, Any], prefix: str, external: bool) -> schema.Specific:
    found = reader.fields(schema.Specific, data, prefix, others=True)
    cmds = reader.mapping(data, "cmds", prefix)
    commands = reader.fields(schema.Commands, cmds, f"{prefix}cmds.")
    arguments: dict[Any, Any] = {key: value for key, value in data.items() if key not in _OWN}
    # In sections or not, as a user likes.
    within = {k: as_words(v) for k, v in arguments.items() if _is_section(k, v)}
    arguments = as_words({**arguments, **within})
    return schema.Specific(**found, **commands, arguments=with_absolute_paths(arguments, external))


def _is_section(name: Any, value: Any) -> bool:
    return name in schema.SECTIONS and isinstance(value, Mapping)


def specifics(experiment: schema.Experiment) -> Iterator[tuple[str, schema.Specific]]:
    """Every part that is specific to something, with its dotted key."""
    for section, parts in zip(
        schema.SPECIFIC_SECTIONS, (experiment.by_type, experiment.by_host), strict=True
    ):
        for name, specific in parts.items():
            yield f"{section}.{name}", specific


def specific_problems(experiment: schema.Experiment) -> list[Problem]:
    """What is wrong with the arguments of such parts, one by one. Raises ConfigError for a key
    that can be no argument."""
    problems: list[Problem] = []
    for key, specific in specifics(experiment):
        problems += collisions(specific.arguments, f"{key}.")
        for path, name, value in leaves(specific.arguments, f"{key}."):
            complaint = _complaint(name, value, experiment.task.external)
            if complaint:
                problems.append(Problem(path, complaint))
    return [replace(p, where=experiment.sources.get(p.key)) for p in problems]


def _complaint(name: str, value: Any, external: bool) -> str | None:
    if is_secret(name, value):
        return "looks like a secret, which a script and the process list would show"
    if external:
        return None
    try:
        canonical = canonicalise(name, value)
    except ValueError as error:
        return str(error)
    if canonical is not None and canonical[0] in SAME_EVERYWHERE:
        return "has to be the same on every host of a job: give it in `train`"
    return None
