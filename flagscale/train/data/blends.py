"""Parsing of ``data_path`` (one dataset, several, or several with weights) and ``split``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flagscale.config.arguments.rules.data import split_shares
from flagscale.config.arguments.spec.paths import pair_weights
from flagscale.errors import DataError
from flagscale.train.data.indexed_dataset import strip_dataset_suffix


@dataclass(frozen=True)
class Blend:
    """Prefixes of indexed datasets (path without ``.bin`` or ``.idx``), and their weights.

    Several datasets without weights are read once each; a single one is repeated as needed.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    def as_config(self) -> tuple[list[str], list[float] | None]:
        """Return prefixes and weights in the form of megatron.core's ``GPTDatasetConfig.blend``."""
        return list(self.prefixes), None if self.weights is None else list(self.weights)


def parse_blend(values: Sequence[str] | str, argument: str = "data_path") -> Blend:
    """Parse prefixes, or pairs of weight and prefix.

    A value may hold several items (``"0.3 a 0.7 b"``), unless a dataset has exactly that name. A
    suffix ``.bin`` or ``.idx`` of a prefix is removed.

    Args:
        values: the value of the argument.
        argument: name of the argument, for error messages.

    Raises:
        DataError: the value is empty, a weight is not a positive number or has no prefix, or only
            some prefixes have a weight.
    """
    items = [values] if isinstance(values, str) else [str(value) for value in values]
    # A value is one prefix if a dataset has exactly that name, even one with spaces.
    items = [
        part
        for item in items
        for part in ([item] if _dataset_exists(strip_dataset_suffix(item)) else item.split())
    ]
    try:
        pairs = pair_weights((word, _parse_weight(word)) for word in items)
    except ValueError as error:
        raise DataError(f"{argument}: {error}") from error
    prefixes = [strip_dataset_suffix(item) for item, _ in pairs]
    weights = [weight for _, weight in pairs if weight is not None]
    # A single dataset needs no weight, and without weights it is not limited to one epoch.
    return Blend(tuple(prefixes), tuple(weights) if weights and len(prefixes) > 1 else None)


def _dataset_exists(prefix: str) -> bool:
    """Return whether a dataset with this prefix exists."""
    try:
        return Path(prefix + ".idx").exists()
    except (OSError, ValueError):  # too long for a file name, or not a valid one
        return False


def _parse_weight(text: str) -> float | None:
    """Parse a weight; return None for other text, or for a number that is a dataset's prefix."""
    try:
        number = float(text)
    except ValueError:
        return None
    return None if _dataset_exists(text) else number


def make_unique(names: Sequence[str]) -> list[str]:
    """Make names unique: append the index in the list to each name that occurs more than once."""
    return [
        name if names.count(name) == 1 else f"{name}_{index}" for index, name in enumerate(names)
    ]


def parse_split(text: str) -> tuple[float, float, float]:
    """Parse ``split``, such as ``969,30,1``, into fractions for training, validation and test.

    Returns:
        Three fractions that sum to 1.

    Raises:
        DataError: the text is not one to three numbers of at least 0 with a positive sum.
    """
    fractions = split_shares(text)
    if fractions is None:
        raise DataError(
            f"split {text!r}: expected up to three numbers for training, validation and test, "
            "such as 969,30,1"
        )
    return fractions
