"""Reading ``data_path``: one data set, several, or several with weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flagscale.config.arguments.blends import paired
from flagscale.config.arguments.rules import split_shares
from flagscale.errors import DataError
from flagscale.train.data.indexed import prefix_of


@dataclass(frozen=True)
class Blend:
    """Data set prefixes and, where any has one, the weight of each."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    def as_config(self) -> tuple[list[str], list[float] | None]:
        """The pair that megatron.core's data set configuration takes."""
        return list(self.prefixes), None if self.weights is None else list(self.weights)


def parse_blend(values: Sequence[str] | str, key: str = "data_path") -> Blend:
    """The blend that ``values`` say: prefixes, or weights each before its prefix.

    A value may hold several words (``"0.3 a 0.7 b"``) unless a data set has it as its very name.
    ``.bin`` or ``.idx`` at a prefix's end is taken off.

    Raises:
        DataError: nothing is given, a weight is no positive number, stands before no prefix, or
            only some prefixes have one.
    """
    words = [values] if isinstance(values, str) else [str(value) for value in values]
    words = [part for word in words for part in _parts(word)]
    try:
        found = paired((word, _weight(word)) for word in words)
    except ValueError as error:
        raise DataError(f"{key}: {error}") from error
    prefixes = [prefix_of(word) for word, _ in found]
    given = [weight for _, weight in found if weight is not None]
    # A lone data set's weight says nothing, and without it it is not capped at one epoch.
    return Blend(tuple(prefixes), tuple(given) if given and len(prefixes) > 1 else None)


def _parts(word: str) -> list[str]:
    return [word] if _is_data_set(prefix_of(word)) else word.split()


def _is_data_set(prefix: str) -> bool:
    try:
        return Path(prefix + ".idx").exists()
    except (OSError, ValueError):  # longer than any name, or no name at all
        return False


def _weight(word: str) -> float | None:
    try:
        number = float(word)
    except ValueError:
        return None
    # A data set's name may be a number.
    return None if _is_data_set(word) else number


def told_apart(names: Sequence[str]) -> list[str]:
    """The names, each with its number behind it where it is not the only one of its kind."""
    return [
        name if names.count(name) == 1 else f"{name}_{index}" for index, name in enumerate(names)
    ]


def parse_split(text: str) -> tuple[float, float, float]:
    """Shares of training, validation and test of ``split`` such as ``969,30,1``; they sum to 1.

    Raises:
        DataError: not one to three numbers of at least 0 with a positive sum.
    """
    shares = split_shares(text)
    if shares is None:
        raise DataError(
            f"split {text!r}: expected up to three numbers for training, validation and test, "
            "such as 969,30,1"
        )
    return shares
