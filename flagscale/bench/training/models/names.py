"""The models that can be trained, by name and size. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flagscale.bench.command_line import did_you_mean
from flagscale.errors import ConfigError

Size = Literal["tiny", "base", "large"]
SIZES: tuple[Size, ...] = ("tiny", "base", "large")
TINY_POSITIONS = 128


@dataclass(frozen=True)
class Family:
    """A family of models: what it learns, and what each size of it is called in papers."""

    task: str
    tiny: str
    base: str
    large: str
    positions: int = 512
    """Tokens of the longest sequence; of ``tiny`` :data:`TINY_POSITIONS`. 0: it takes images."""

    def title(self, size: Size) -> str:
        """What tables call a size."""
        found: str = getattr(self, size)
        return found


FAMILIES = {
    "vgg19": Family("class of an image", "VGG-19/8", "VGG-19", "VGG-19 of 224 x 224", 0),
    "bert": Family("span of a text", "BERT-tiny", "BERT-base", "BERT-large"),
    "bart": Family("class of a text", "BART-tiny", "BART-base", "BART-large", 1024),
    "roberta": Family("span of a text", "RoBERTa-tiny", "RoBERTa-base", "RoBERTa-large"),
    "gpt2": Family("next token", "GPT-2-tiny", "GPT-2", "GPT-2-large", 1024),
    "llama": Family("next token", "Llama-tiny", "Llama-base", "Llama-3.2-1B", 131072),
}

# Spellings of the field.
_ALIASES = {
    "vgg": "vgg19", "vgg-19": "vgg19", "gpt-2": "gpt2", "llama-3.2": "llama", "llama3.2": "llama",
}  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """A model to train: a family in a size."""

    family: str
    size: Size

    @property
    def name(self) -> str:
        """As it is typed: ``gpt2:large``."""
        return f"{self.family}:{self.size}"

    @property
    def title(self) -> str:
        """As tables call it: ``GPT-2-large``."""
        return FAMILIES[self.family].title(self.size)

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sequence it takes; None where it takes images."""
        positions = FAMILIES[self.family].positions
        return (TINY_POSITIONS if self.size == "tiny" else positions) if positions else None


def parse(word: str, size: Size) -> tuple[Choice, ...]:
    """The models that ``gpt2``, ``gpt2:large``, ``gpt2-large`` or ``all`` stands for, in ``size``
    where the word names none.

    Raises:
        ConfigError: no family or size is called so; the nearest is named.
    """
    family, colon, own = word.strip().lower().partition(":")
    if not colon:
        for known in SIZES:
            if family.endswith(f"-{known}"):
                family, own = family.removesuffix(f"-{known}"), known
    chosen = next((known for known in SIZES if known == own), size)
    if own and own not in SIZES:
        near = did_you_mean(own, SIZES)
        raise ConfigError(f"--models {word}: {own!r} is no size{near}; expected {', '.join(SIZES)}")
    family = _ALIASES.get(family, family)
    if family == "all":
        return tuple(Choice(name, chosen) for name in FAMILIES)
    if family not in FAMILIES:
        near = did_you_mean(family, FAMILIES)
        raise ConfigError(
            f"--models {word}: {family!r} is no model{near}; expected {', '.join(FAMILIES)} or all"
        )
    return (Choice(family, chosen),)
