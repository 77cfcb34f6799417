"""A sweep: overrides of which some have several values, as Hydra writes them with ``-m``.

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

from flagscale.config.actions import Purpose
from flagscale.config.arguments.values import shown
from flagscale.config.compose import config_file
from flagscale.config.load import Loaded, load
from flagscale.config.overrides import parse, takes_text
from flagscale.config.secrets import is_secret
from flagscale.config.sources import OVERRIDE, trace
from flagscale.errors import ConfigError, Problem

EXP_DIR = "experiment.exp_dir"
_ODD = re.compile(r"[^A-Za-z0-9.+=_\-]+")
_MOST_NAME = 100
_MOST_RUNS = 10_000


@dataclass(frozen=True)
class Value:
    """One of the values of an override: the override with it alone, and what people see of it."""

    key: str
    override: str
    text: str


@dataclass(frozen=True)
class Combination:
    """A run of a sweep. ``overrides`` are all of it, in the order in which they were given."""

    values: tuple[Value, ...]
    overrides: tuple[str, ...]
    name: str

    def __str__(self) -> str:
        return " ".join(f"{_leaf(value.key)}={value.text}" for value in self.values)


@dataclass(frozen=True)
class Sweep:
    """``keys``: those that are swept, by their shortest names that tell them apart."""

    keys: tuple[str, ...]
    combinations: tuple[Combination, ...]


def sweep(overrides: Sequence[str]) -> Sweep:
    """Every combination of the values of overrides, the last one's changing fastest.

    Raises :class:`ConfigError` where none has several, for ``action`` that has, for what Hydra can
    only enumerate with a search of its own, and for more runs than anybody means.
    """
    every = [_values(text) for text in overrides]
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
    leaves = Counter(_leaf(values[0].key) for values in swept)
    keys = [values[0].key for values in swept]
    short = {key: _leaf(key) if leaves[_leaf(key)] == 1 else key for key in keys}
    made = [_combination(every, chosen, short) for chosen in itertools.product(*every)]
    names = Counter(one.name for one in made)
    return Sweep(
        tuple(short.values()),
        tuple(
            one if names[one.name] == 1 else Combination(one.values, one.overrides, _marked(one))
            for one in made
        ),
    )


def load_each(directory: Path, name: str, swept: Sweep, purpose: Purpose | None) -> list[Loaded]:
    """The options and the experiment of every combination, each with a directory of its own, as
    :func:`.load.load`. Raises :class:`ConfigError` with the problems of the first that has any."""
    file = config_file(directory, name)
    found = []
    for one in swept.combinations:
        try:
            found.append(load(directory, name, _with_directory(file, one), purpose))
        except ConfigError as error:
            problems = [
                Problem(p.key, f"{p.message} (with {one})", p.where) for p in error.problems
            ]
            raise ConfigError(problems, hint=error.hint) from error
    return found


def _with_directory(file: Path, one: Combination) -> Sequence[str]:
    """The overrides of a run, with its own directory below that which the experiment would have. It
    is known as it is written: what it refers to is filled in once, in the run's own."""
    above = trace(file, one.overrides).texts.get(EXP_DIR)
    if not above or any(value.key == EXP_DIR for value in one.values):
        return one.overrides
    others = [text for text in one.overrides if _key(text) != EXP_DIR]
    return [*others, f"{EXP_DIR}={above.rstrip('/')}/{one.name}"]


def _values(text: str) -> list[Value]:
    """What an override stands for, one by one: itself, if Hydra takes it for no sweep."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import QuotedString
    from hydra.errors import HydraException

    key = _key(text)
    try:
        found = OverridesParser.create().parse_override(text)
        if not found.is_sweep_override() or found.is_delete():
            return [Value(key, text, "")]
        rendered, values = list(found.sweep_string_iterator()), list(found.sweep_iterator())
    except HydraException as error:
        if not re.search(r"=\s*(glob|interval)\(", text):
            # Texts that Hydra cannot read are quoted for it later, as without -m.
            return [Value(key, text, "")]
        message = f"{shown(text)}: list the values, or use range or choice"
        raise ConfigError(Problem(key, message, OVERRIDE)) from error
    if key == "action":
        raise ConfigError(Problem(key, "a sweep does one thing with each of its runs", OVERRIDE))
    plain = [value.text if isinstance(value, QuotedString) else value for value in values]
    texts = [
        value if isinstance(value, str) else r for value, r in zip(plain, rendered, strict=True)
    ]
    if any(is_secret(_leaf(key), seen) for seen in texts):
        message = "looks like a secret, which the names of directories would show"
        raise ConfigError(Problem(key, message, OVERRIDE))
    words = texts if takes_text(key) else rendered
    head = found.get_key_element()
    made = [Value(key, f"{head}={word}", seen) for word, seen in zip(words, texts, strict=True)]
    return list({value.override: value for value in made}.values())


def _key(text: str) -> str:
    found = parse(text)
    return found.key if found is not None else text.partition("=")[0].lstrip("+~")


def _leaf(key: str) -> str:
    return key.rpartition(".")[2]


def _combination(
    every: Sequence[Sequence[Value]], chosen: Sequence[Value], short: dict[str, str]
) -> Combination:
    own = tuple(one for values, one in zip(every, chosen, strict=True) if len(values) > 1)
    name = "_".join(f"{short[value.key]}={value.text}" for value in own)
    made = Combination(own, tuple(value.override for value in chosen), name)
    fits = not _ODD.search(name) and len(name) <= _MOST_NAME
    return made if fits else Combination(own, made.overrides, _marked(made))


def _marked(one: Combination) -> str:
    """A name for values that are none, kept apart from others by a digest of them."""
    digest = hashlib.sha256("\0".join(value.override for value in one.values).encode()).hexdigest()
    return f"{_ODD.sub('_', one.name)[: _MOST_NAME - 9]}-{digest[:8]}"
