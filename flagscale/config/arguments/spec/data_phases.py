"""``data_phases``: mixtures of training data that follow one another at given samples.

A YAML writes a list of maps, ``{samples: 100000, data_path: [0.2, web, 0.8, code]}``. The training
program takes one text for each: ``samples=100000 0.2 web 0.8 code``, quoted as a shell quotes
words.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flagscale.config.arguments.spec.values import format_value, to_word

DATA_PHASES = "data_phases"
PHASE_UNITS = ("samples", "tokens")
_DATA_PATH = "data_path"
_EXAMPLE = "expected {samples: 100000, data_path: [0.2, web, 0.8, code]}"


@dataclass(frozen=True)
class DataPhase:
    """A mixture, and where it begins: a count of ``unit`` of training data."""

    count: int
    unit: str
    words: tuple[str, ...]

    def begin(self, seq_length: int) -> int:
        """The first sample of the phase. A sample of which tokens belong to both is the earlier
        phase's."""
        return -(-self.count // seq_length) if self.unit == "tokens" else self.count


def phase_words(items: Sequence[Any]) -> list[Any]:
    """A YAML's maps as texts; what is none stays, to be judged where it is read."""
    return [_phase_word(item) if isinstance(item, Mapping) else item for item in items]


def _phase_word(item: Mapping[Any, Any]) -> str:
    blend = item.get(_DATA_PATH)
    words = blend if isinstance(blend, (list, tuple)) else str(blend or "").split()
    heads = [f"{key}={to_word(value)}" for key, value in item.items() if key != _DATA_PATH]
    return shlex.join([*heads, *map(to_word, words)])


def parse_phase(text: str) -> DataPhase:
    """The phase that a text says.

    Raises ValueError: it says none.
    """
    try:
        head, *words = shlex.split(text)
    except ValueError:
        raise ValueError(f"{_EXAMPLE}, found {format_value(text)}") from None
    unit, equals, number = head.partition("=")
    if (
        unit not in PHASE_UNITS
        or not equals
        or any("=" in word and _is_phase_head(word) for word in words)
    ):
        raise ValueError(f"{_EXAMPLE}, with samples or tokens, found {format_value(text)}")
    try:
        count = float(number)
    except ValueError:
        count = 0.0
    if not 0 < count < 2**62 or not count.is_integer():
        raise ValueError(f"{unit}: expected a whole number from 1, found {format_value(number)}")
    if not words:
        raise ValueError(f"{_DATA_PATH} is missing; {_EXAMPLE}")
    return DataPhase(int(count), unit, tuple(words))


def _is_phase_head(text: str) -> bool:
    return text.partition("=")[0].isidentifier() and "/" not in text


def map_phase_paths(text: str, change: Callable[[str], str]) -> str:
    """A phase's text with each word of its mixture changed; of one that says none, itself."""
    try:
        phase = parse_phase(text)
    except ValueError:
        return text
    return shlex.join([f"{phase.unit}={phase.count}", *map(change, phase.words)])
