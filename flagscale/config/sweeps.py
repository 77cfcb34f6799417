"""Sweeps: overrides with several values, as Hydra takes them with ``-m``.

Every combination of values is a run. Its directory is below the experiment's and is named by its
values, ``<exp_dir>/lr=0.0003_seed=1``, so that the same sweep, started again, finds its runs.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from hydra.errors import HydraException

from flagscale.config.actions import Purpose
from flagscale.config.arguments.spec.values import format_value
from flagscale.config.compose import config_file
from flagscale.config.load import LoadedConfig, load
from flagscale.config.overrides import find_experiment_key, is_text_key, parse_override, usual_key
from flagscale.config.secrets import is_secret
from flagscale.config.sources import OVERRIDE, trace_sources
from flagscale.errors import ConfigError, Problem
from flagscale.object_storage import is_address

EXP_DIR = "experiment.exp_dir"
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9.+=_\-]+")
_MAX_NAME_LENGTH = 100
_MAX_RUNS = 10_000


@dataclass(frozen=True)
class SweepValue:
    """One value of an override: the override with this value alone, and its text for display."""

    key: str
    override: str
    text: str


@dataclass(frozen=True)
class Combination:
    """One run of a sweep: its swept values, and all overrides in the order in which they were
    given.
    """

    values: tuple[SweepValue, ...]
    overrides: tuple[str, ...]
    name: str

    def __str__(self) -> str:
        return " ".join(f"{leaf_of(value.key)}={value.text}" for value in self.values)


@dataclass(frozen=True)
class Sweep:
    """All runs of a sweep. ``keys`` are the swept keys, each by its shortest unambiguous name."""

    keys: tuple[str, ...]
    combinations: tuple[Combination, ...]


def expand_sweep(overrides: Sequence[str]) -> Sweep:
    """Return every combination of the values of overrides; the last override changes fastest.

    Raises:
        ConfigError: if no override has several values, ``action`` has several, values are given as
        a
            continuous range (``interval``) or ``glob``, or there are more than 10,000 runs.
    """
    values_by_override = [_values_of_override(text) for text in overrides]
    sweep_values = [values for values in values_by_override if len(values) > 1]
    if not sweep_values:
        raise ConfigError(
            "-m: no override has several values",
            hint="such as train.model.seed=1,2 or train.model.seed=range(1,4)",
        )
    count = 1
    for values in sweep_values:
        count *= len(values)
    if count > _MAX_RUNS:
        raise ConfigError(f"-m: {count:,} runs; at most {_MAX_RUNS:,} are allowed")
    short_names = short_key_names([values[0].key for values in sweep_values])
    combinations = [
        _combine(values_by_override, selection, short_names)
        for selection in itertools.product(*values_by_override)
    ]
    names = Counter(combination.name for combination in combinations)
    return Sweep(
        tuple(short_names.values()),
        tuple(
            combination
            if names[combination.name] == 1
            else Combination(combination.values, combination.overrides, _hashed_name(combination))
            for combination in combinations
        ),
    )


def load_combinations(
    directory: Path, name: str, sweep: Sweep, purpose: Purpose | None
) -> list[LoadedConfig]:
    """Load the configuration of every combination, each with its own experiment directory.

    Raises:
        ConfigError: with the problems of the first combination that has any.
    """
    file = config_file(directory, name)
    loaded = []
    for combination in sweep.combinations:
        try:
            loaded.append(load(directory, name, _overrides_of_run(file, combination), purpose))
        except ConfigError as error:
            problems = [
                Problem(p.key, f"{p.message} (with {combination})", p.where) for p in error.problems
            ]
            raise ConfigError(problems, hint=error.hint) from error
    _refuse_shared_storage(loaded)
    return loaded


def _refuse_shared_storage(configs: Sequence[LoadedConfig]) -> None:
    """Refuse runs that save to one address, from which each would load what another has saved."""
    addresses = set[str]()
    for config in configs:
        train = config.experiment.train
        save = train["save"]
        if not isinstance(save, str) or not is_address(save):
            continue
        if save in addresses:
            problem = train.problem("save", f"{save} is the address of several runs of the sweep")
            raise ConfigError(
                problem, hint="name a swept key in it: s3://BUCKET/PREFIX/${train.model.KEY}"
            )
        addresses.add(save)


def _overrides_of_run(file: Path, combination: Combination) -> Sequence[str]:
    """Return the overrides of a run, including its directory below the experiment's. The
    experiment's is inserted as written, so that its interpolations are resolved in the run's own
    configuration.
    """
    parent_directory = trace_sources(file, combination.overrides).texts.get(EXP_DIR)
    if not parent_directory or any(value.key == EXP_DIR for value in combination.values):
        return combination.overrides
    overrides = [text for text in combination.overrides if _key_of(text) != EXP_DIR]
    return [*overrides, f"{EXP_DIR}={parent_directory.rstrip('/')}/{combination.name}"]


def _values_of_override(text: str) -> list[SweepValue]:
    """Return the values of an override one by one; an override without a sweep is its only one."""
    key = _key_of(text)
    try:
        override = OverridesParser.create().parse_override(text)
        if not override.is_sweep_override() or override.is_delete():
            return [SweepValue(key, text, "")]
        rendered, values = list(override.sweep_string_iterator()), list(override.sweep_iterator())
    except HydraException as error:
        if not re.search(r"=\s*(glob|interval)\(", text):
            # Texts that Hydra cannot read are quoted for it later, as without -m.
            return [SweepValue(key, text, "")]
        message = f"{format_value(text)}: list the values, or use range or choice"
        raise ConfigError(Problem(key, message, OVERRIDE)) from error
    if key == "action":
        raise ConfigError(Problem(key, "a sweep performs one action for all of its runs", OVERRIDE))
    unquoted = [value.text if isinstance(value, QuotedString) else value for value in values]
    texts = [
        value if isinstance(value, str) else r for value, r in zip(unquoted, rendered, strict=True)
    ]
    if any(is_secret(leaf_of(key), text_value) for text_value in texts):
        message = "looks like a secret, which the names of directories would show"
        raise ConfigError(Problem(key, message, OVERRIDE))
    override_texts = texts if is_text_key(key) or is_text_key(usual_key(key) or "") else rendered
    key_element = override.get_key_element()
    sweep_values = [
        SweepValue(key, f"{key_element}={word}", text_value)
        for word, text_value in zip(override_texts, texts, strict=True)
    ]
    return list({value.override: value for value in sweep_values}.values())


def _key_of(text: str) -> str:
    override = parse_override(text)
    key = override.key if override is not None else text.partition("=")[0].lstrip("+~")
    return find_experiment_key(key) or key


def leaf_of(key: str) -> str:
    """Return the last part of a dotted key."""
    return key.rpartition(".")[2]


def short_key_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the shortest unambiguous name of each key."""
    leaves = Counter(map(leaf_of, keys))
    return {key: leaf_of(key) if leaves[leaf_of(key)] == 1 else key for key in keys}


def _combine(
    values_by_override: Sequence[Sequence[SweepValue]],
    selection: Sequence[SweepValue],
    short_names: dict[str, str],
) -> Combination:
    swept_values = tuple(
        sweep_value
        for values, sweep_value in zip(values_by_override, selection, strict=True)
        if len(values) > 1
    )
    name = "_".join(f"{short_names[value.key]}={value.text}" for value in swept_values)
    combination = Combination(swept_values, tuple(value.override for value in selection), name)
    fits = not _UNSAFE_CHARACTERS.search(name) and len(name) <= _MAX_NAME_LENGTH
    return (
        combination
        if fits
        else Combination(swept_values, combination.overrides, _hashed_name(combination))
    )


def _hashed_name(combination: Combination) -> str:
    """Return a name for values that are too long or not fit for a directory, made unique by a
    digest.
    """
    digest = hashlib.sha256(
        "\0".join(value.override for value in combination.values).encode()
    ).hexdigest()
    return f"{_UNSAFE_CHARACTERS.sub('_', combination.name)[: _MAX_NAME_LENGTH - 9]}-{digest[:8]}"
