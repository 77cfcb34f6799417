"""``data_phases``: mixtures of training data that take each other's place at given samples.

A YAML writes a list of maps, ``{samples: 100000, data_path: [0.2, web, 0.8, code]}``; the training
program takes a text each: ``samples=100000 0.2 web 0.8 code``, quoted as a shell quotes words.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flagscale.config.arguments.precision import Broken, Values
from flagscale.config.arguments.values import shown, word

NAME = "data_phases"
UNITS = ("samples", "tokens")
_DATA = "data_path"
_EXAMPLE = "expected {samples: 100000, data_path: [0.2, web, 0.8, code]}"


@dataclass(frozen=True)
class Phase:
    """A mixture, and where it begins: a count of ``unit`` of training data."""

    count: int
    unit: str
    words: tuple[str, ...]

    def begin(self, seq_length: int) -> int:
        """The first sample of the phase. A sample of which tokens belong to both is the earlier
        phase's."""
        return -(-self.count // seq_length) if self.unit == "tokens" else self.count


def as_words(items: Sequence[Any]) -> list[Any]:
    """A YAML's maps as texts; what is none stays, to be judged where it is read."""
    return [_as_word(item) if isinstance(item, Mapping) else item for item in items]


def _as_word(item: Mapping[Any, Any]) -> str:
    blend = item.get(_DATA)
    words = blend if isinstance(blend, (list, tuple)) else str(blend or "").split()
    heads = [f"{key}={word(value)}" for key, value in item.items() if key != _DATA]
    return shlex.join([*heads, *map(word, words)])


def parse(text: str) -> Phase:
    """The phase that a text says.

    Raises ValueError: it says none.
    """
    try:
        head, *words = shlex.split(text)
    except ValueError:
        raise ValueError(f"{_EXAMPLE}, found {shown(text)}") from None
    unit, equals, number = head.partition("=")
    if unit not in UNITS or not equals or any("=" in one and _is_head(one) for one in words):
        raise ValueError(f"{_EXAMPLE}, with samples or tokens, found {shown(text)}")
    try:
        count = float(number)
    except ValueError:
        count = 0.0
    if not 0 < count < 2**62 or not count.is_integer():
        raise ValueError(f"{unit}: expected a whole number from 1, found {shown(number)}")
    if not words:
        raise ValueError(f"{_DATA} is missing; {_EXAMPLE}")
    return Phase(int(count), unit, tuple(words))


def _is_head(text: str) -> bool:
    return text.partition("=")[0].isidentifier() and "/" not in text


def changed(text: str, change: Callable[[str], str]) -> str:
    """A phase's text with each word of its mixture changed; of one that says none, itself."""
    try:
        phase = parse(text)
    except ValueError:
        return text
    return shlex.join([f"{phase.unit}={phase.count}", *map(change, phase.words)])


def broken(values: Values) -> Iterator[Broken]:
    """What does not fit mixtures that follow each other."""
    given = values[NAME]
    if given is None:
        return
    try:
        begins = [parse(text).begin(values["seq_length"]) for text in given]
    except ValueError as error:
        yield NAME, str(error)
        return
    if any(one >= other for one, other in zip([0, *begins], begins, strict=False)):
        yield NAME, f"expected phases that begin one after the other, found {begins} samples"
    if values["data_path"] is None and values["train_data_path"] is None:
        yield NAME, "needs data_path or train_data_path, the mixture that training begins with"
    if values["dataloader_type"] == "cyclic":
        yield (
            "dataloader_type",
            f"{values['dataloader_type']} shuffles all samples, and so the phases of {NAME}; "
            "leave it out",
        )
    if values["sft"]:
        yield NAME, "is for text: conversations are taken in another order in each pass"
