"""Parsing of ``data_path`` (one dataset, several, or several with weights) and ``split``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flagscale.config.arguments.rules.data import split_shares
from flagscale.config.arguments.spec.paths import pair_weights
from flagscale.errors import DataError
from flagscale.train.data.indexed_dataset import prefix_of


@dataclass(frozen=True)
class Blend:
    """Prefixes of datasets, and their weights if they have any."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    def as_config(self) -> tuple[list[str], list[float] | None]:
        """Return prefixes and weights as megatron.core's dataset configuration takes them."""
        return list(self.prefixes), None if self.weights is None else list(self.weights)


def parse_blend(values: Sequence[str] | str, key: str = "data_path") -> Blend:
    """Parse prefixes, or pairs of weight and prefix.

    A value may hold several words (``"0.3 a 0.7 b"``), unless a dataset has exactly that name. A
    suffix ``.bin`` or ``.idx`` of a prefix is removed.

    Args:
        values: the value of the argument.
        key: name of the argument, for error messages.

    Raises:
        DataError: the value is empty, a weight is not a positive number or has no prefix, or only
            some prefixes have a weight.
    """
    words = [values] if isinstance(values, str) else [str(value) for value in values]
    # A value is one prefix if a data set has exactly that name, even one with spaces.
    words = [
        part
        for word in words
        for part in ([word] if _is_data_set(prefix_of(word)) else word.split())
    ]
    try:
        pairs = pair_weights((word, _parse_weight(word)) for word in words)
    except ValueError as error:
        raise DataError(f"{key}: {error}") from error
    prefixes = [prefix_of(word) for word, _ in pairs]
    weights = [weight for _, weight in pairs if weight is not None]
    # A single data set needs no weight, and without weights it is not capped at one epoch.
    return Blend(tuple(prefixes), tuple(weights) if weights and len(prefixes) > 1 else None)


def _is_data_set(prefix: str) -> bool:
    try:
        return Path(prefix + ".idx").exists()
    except (OSError, ValueError):  # too long for a file name, or not a valid one
        return False


def _parse_weight(word: str) -> float | None:
    """Parse a weight; None for a number that is the name of a data set."""
    try:
        number = float(word)
    except ValueError:
        return None
    return None if _is_data_set(word) else number


def make_unique(names: Sequence[str]) -> list[str]:
    """Make names unique: append its index to each name that occurs more than once."""
    return [
        name if names.count(name) == 1 else f"{name}_{index}" for index, name in enumerate(names)
    ]


def parse_split(text: str) -> tuple[float, float, float]:
    """Parse ``split``, such as ``969,30,1``, into shares of training, validation and test.

    Returns:
        Three shares that sum to 1.

    Raises:
        DataError: the text is not one to three numbers of at least 0 with a positive sum.
    """
    shares = split_shares(text)
    if shares is None:
        raise DataError(
            f"split {text!r}: expected up to three numbers for training, validation and test, "
            "such as 969,30,1"
        )
    return shares
