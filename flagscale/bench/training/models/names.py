"""Models that ``flagscale bench training`` can train, by name and size. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flagscale.bench.options import suggest_name
from flagscale.errors import ConfigError

Size = Literal["tiny", "base", "large"]
SIZES: tuple[Size, ...] = ("tiny", "base", "large")
TINY_POSITIONS = 128


@dataclass(frozen=True)
class ModelFamily:
    """A family of models: its task, and the usual name of each size."""

    task: str
    tiny: str
    base: str
    large: str
    positions: int = 512
    """Longest sequence in tokens; :data:`TINY_POSITIONS` for ``tiny``; 0 for models of images."""

    def title(self, size: Size) -> str:
        """Return the name of a size in tables."""
        title: str = getattr(self, size)
        return title


FAMILIES = {
    "vgg19": ModelFamily("class of an image", "VGG-19/8", "VGG-19", "VGG-19 of 224 x 224", 0),
    "bert": ModelFamily("span of a text", "BERT-tiny", "BERT-base", "BERT-large"),
    "bart": ModelFamily("class of a text", "BART-tiny", "BART-base", "BART-large", 1024),
    "roberta": ModelFamily("span of a text", "RoBERTa-tiny", "RoBERTa-base", "RoBERTa-large"),
    "gpt2": ModelFamily("next token", "GPT-2-tiny", "GPT-2", "GPT-2-large", 1024),
    "llama": ModelFamily("next token", "Llama-tiny", "Llama-base", "Llama-3.2-1B", 131072),
}

# Other common spellings.
_ALIASES = {
    "vgg": "vgg19", "vgg-19": "vgg19", "gpt-2": "gpt2", "llama-3.2": "llama", "llama3.2": "llama",
}  # fmt: skip


@dataclass(frozen=True)
class ModelChoice:
    """A model to train: a family and a size."""

    family: str
    size: Size

    @property
    def name(self) -> str:
        """Name on the command line: ``gpt2:large``."""
        return f"{self.family}:{self.size}"

    @property
    def title(self) -> str:
        """Name in tables: ``GPT-2-large``."""
        return FAMILIES[self.family].title(self.size)

    @property
    def max_sequence(self) -> int | None:
        """Longest sequence in tokens; None if it takes images."""
        positions = FAMILIES[self.family].positions
        return (TINY_POSITIONS if self.size == "tiny" else positions) if positions else None


def parse_models(word: str, size: Size) -> tuple[ModelChoice, ...]:
    """Return the models that a word such as ``gpt2``, ``gpt2:large``, ``gpt2-large`` or ``all``
    names.

    Args:
        word: one entry of ``--models``.
        size: size of a word that names none.

    Raises:
        ConfigError: no family or size has this name; the message has the nearest.
    """
    family, colon, size_name = word.strip().lower().partition(":")
    if not colon:
        for known_size in SIZES:
            if family.endswith(f"-{known_size}"):
                family, size_name = family.removesuffix(f"-{known_size}"), known_size
    chosen_size = next((known_size for known_size in SIZES if known_size == size_name), size)
    if size_name and size_name not in SIZES:
        suggestion = suggest_name(size_name, SIZES)
        raise ConfigError(
            f"--models {word}: {size_name!r} is not a size{suggestion}; expected {', '.join(SIZES)}"
        )
    family = _ALIASES.get(family, family)
    if family == "all":
        return tuple(ModelChoice(name, chosen_size) for name in FAMILIES)
    if family not in FAMILIES:
        suggestion = suggest_name(family, FAMILIES)
        raise ConfigError(
            f"--models {word}: {family!r} is not a model{suggestion}; expected "
            f"{', '.join(FAMILIES)} or all"
        )
    return (ModelChoice(family, chosen_size),)
