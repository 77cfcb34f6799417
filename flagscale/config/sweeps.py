"""Sweeps: overrides with several values, as Hydra writes them with ``-m``.

Every combination is a run with a directory of its own below the experiment's, named by the values
that it alone has: ``<exp_dir>/lr=0.0003_seed=1``. So the same sweep, given again, finds its runs.
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
from flagscale.config.load import Loaded, load
from flagscale.config.overrides import parse_override, takes_text
from flagscale.config.secrets import is_secret
from flagscale.config.sources import OVERRIDE, trace_sources
from flagscale.errors import ConfigError, Problem

EXP_DIR = "experiment.exp_dir"
_ODD = re.compile(r"[^A-Za-z0-9.+=_\-]+")
_MOST_NAME = 100
_MOST_RUNS = 10_000


@dataclass(frozen=True)
class SweepValue:
    """One of the values of an override: the override with it alone, and what people see of it."""

    key: str
    override: str
    text: str


@dataclass(frozen=True)
class Combination:
    """A run of a sweep. ``overrides`` are all of it, in the order in which they were given."""

    values: tuple[SweepValue, ...]
    overrides: tuple[str, ...]
    name: str

    def __str__(self) -> str:
        return " ".join(f"{_leaf_of(value.key)}={value.text}" for value in self.values)


@dataclass(frozen=True)
class Sweep:
    """``keys``: those that are swept, by their shortest names that tell them apart."""

    keys: tuple[str, ...]
    combinations: tuple[Combination, ...]


def expand_sweep(overrides: Sequence[str]) -> Sweep:
    """Every combination of the values of overrides, the last one's changing fastest.

    Raises :class:`ConfigError` where none has several, for ``action`` that has, for what Hydra can
    only enumerate with a search of its own, and for more runs than anybody means.
    """
    every = [_values_of_override(text) for text in overrides]
    swept = [values for values in every if len(values) > 1]
    if not swept:
        raise ConfigError(
            "-m: no override has several values",
            hint="such as train.model.seed=1,2 or train.model.seed=range(1,4)",
        )
    count = 1
    for values in swept:
        count *= len(values)
    if count > _MOST_RUNS:
        raise ConfigError(f"-m: {count:,} runs; at most {_MOST_RUNS:,} are taken for meant")
    leaves = Counter(_leaf_of(values[0].key) for values in swept)
    keys = [values[0].key for values in swept]
    short = {key: _leaf_of(key) if leaves[_leaf_of(key)] == 1 else key for key in keys}
    combinations = [_combine(every, chosen, short) for chosen in itertools.product(*every)]
    names = Counter(combination.name for combination in combinations)
    return Sweep(
        tuple(short.values()),
        tuple(
            combination
            if names[combination.name] == 1
            else Combination(combination.values, combination.overrides, _hashed_name(combination))
            for combination in combinations
        ),
    )


def load_combinations(
    directory: Path, name: str, swept: Sweep, purpose: Purpose | None
) -> list[Loaded]:
    """The options and the experiment of every combination, each with a directory of its own, as
    :func:`.load.load`. Raises :class:`ConfigError` with the problems of the first that has any."""
    file = config_file(directory, name)
    loaded = []
    for combination in swept.combinations:
        try:
            loaded.append(load(directory, name, _overrides_of_run(file, combination), purpose))
        except ConfigError as error:
            problems = [
                Problem(p.key, f"{p.message} (with {combination})", p.where) for p in error.problems
            ]
            raise ConfigError(problems, hint=error.hint) from error
    return loaded


def _overrides_of_run(file: Path, combination: Combination) -> Sequence[str]:
    """The overrides of a run, with its own directory below that which the experiment would have. It
    is known as it is written: what it refers to is filled in once, in the run's own."""
    above = trace_sources(file, combination.overrides).texts.get(EXP_DIR)
    if not above or any(value.key == EXP_DIR for value in combination.values):
        return combination.overrides
    overrides = [text for text in combination.overrides if _key_of(text) != EXP_DIR]
    return [*overrides, f"{EXP_DIR}={above.rstrip('/')}/{combination.name}"]


def _values_of_override(text: str) -> list[SweepValue]:
    """Return the values of an override one by one; an override that is no sweep has itself."""

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
        raise ConfigError(Problem(key, "a sweep does one thing with each of its runs", OVERRIDE))
    plain = [value.text if isinstance(value, QuotedString) else value for value in values]
    texts = [
        value if isinstance(value, str) else r for value, r in zip(plain, rendered, strict=True)
    ]
    if any(is_secret(_leaf_of(key), shown) for shown in texts):
        message = "looks like a secret, which the names of directories would show"
        raise ConfigError(Problem(key, message, OVERRIDE))
    words = texts if takes_text(key) else rendered
    head = override.get_key_element()
    sweep_values = [
        SweepValue(key, f"{head}={word}", shown) for word, shown in zip(words, texts, strict=True)
    ]
    return list({value.override: value for value in sweep_values}.values())


def _key_of(text: str) -> str:
    override = parse_override(text)
    return override.key if override is not None else text.partition("=")[0].lstrip("+~")


def _leaf_of(key: str) -> str:
    return key.rpartition(".")[2]


def _combine(
    every: Sequence[Sequence[SweepValue]], chosen: Sequence[SweepValue], short: dict[str, str]
) -> Combination:
    varied = tuple(
        sweep_value for values, sweep_value in zip(every, chosen, strict=True) if len(values) > 1
    )
    name = "_".join(f"{short[value.key]}={value.text}" for value in varied)
    combination = Combination(varied, tuple(value.override for value in chosen), name)
    fits = not _ODD.search(name) and len(name) <= _MOST_NAME
    return (
        combination
        if fits
        else Combination(varied, combination.overrides, _hashed_name(combination))
    )


def _hashed_name(combination: Combination) -> str:
    """A name for values that are none, kept apart from others by a digest of them."""
    digest = hashlib.sha256(
        "\0".join(value.override for value in combination.values).encode()
    ).hexdigest()
    return f"{_ODD.sub('_', combination.name)[: _MOST_NAME - 9]}-{digest[:8]}"
