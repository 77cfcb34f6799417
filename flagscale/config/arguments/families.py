"""The families of models that ``family`` can name, installed ones among them.

What is to be known of a family before training starts is here and needs no torch; how it is built
and trained is its :class:`~flagscale.train.models.base.ModelSpec`, the same object. A package adds
one by an entry point, whose name is the family's::

    [project.entry-points."flagscale.models"]
    mine = "my_package.model:Mine"
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from flagscale.config.arguments.precision import Broken, Values
from flagscale.config.arguments.spec import arg
from flagscale.config.arguments.values import shown
from flagscale.errors import ConfigError
from flagscale.registry import Registry

# By name alone: nothing of what they are is imported here.
FAMILIES = Registry(
    "flagscale.models",
    "family of models",
    {
        "gpt": "flagscale.train.models.gpt:Gpt",
        "bert": "flagscale.train.models.bert:Bert",
    },
)


LAYOUTS: Mapping[str, str] = {
    "tensor_model_parallel_size": "its weights are not split over ranks",
    "pipeline_model_parallel_size": "it has no stages",
    "context_parallel_size": "its sequences are not split over ranks",
    "expert_model_parallel_size": "it has no experts",
    "enable_hetero": "it is not shared out over unlike devices",
    "recompute_granularity": "nothing in it is recomputed",
}
"""What a family has to be made for, with why one that is not refuses it."""


@dataclass(frozen=True)
class Masking:
    """What is asked of a model that tells masked tokens."""

    mask_prob: float = arg(
        0.15,
        "Share of a sequence's tokens that the model is to tell: of ten of them eight are masked, "
        "one is another token and one stays as it is",
        minimum=0.001,
        maximum=0.9,
    )


@dataclass(frozen=True)
class Transformer:
    """What arithmetic and memory of a stack of like transformer layers, with an embedding before
    and a vocabulary behind it, depend on beside the arguments.

    ``causal``: a token attends to those before it alone. ``head_layers``: linear layers of hidden x
    hidden with a bias and a norm between the last layer and the vocabulary. ``output_bias``: each
    token of the vocabulary has a bias. ``masks``: one of the tokens stands for others; a tokenizer
    that has none gets one more.
    """

    causal: bool = True
    head_layers: int = 0
    output_bias: bool = False
    masks: bool = False


class Family:
    """What the launcher asks of a family. Importing it must not import torch."""

    name: str = ""
    """What a YAML says; a package's is called as its entry point is."""
    title: str = ""
    """What sentences call it; the name where it is empty."""
    arguments: tuple[str, ...] = ()
    """Arguments that not every family has an effect of, and this one does."""
    layouts: Collection[str] = ()
    """Of :data:`LAYOUTS` what it is made for; all else is refused."""
    transformer: Transformer | None = None
    """What estimates calculate with; None where they cannot: then none are made."""

    @property
    def shown(self) -> str:
        return self.title or self.name

    def broken(self, values: Values) -> Iterable[Broken]:
        """What this family cannot do beside layouts: the argument to change, and why.

        Args:
            values: arguments by name, aliases folded, defaults filled in.
        """
        del values
        return ()


@cache
def family(name: str) -> Family:
    """The family of that name.

    Raises:
        ConfigError: there is none, or a package's does not load; the message says which.
    """
    made: Family = FAMILIES.made(name, Family)
    return made


def broken(values: Values) -> Iterator[Broken]:
    """That the family is none, or what it cannot do."""
    try:
        own = family(values["family"])
    except ConfigError as error:
        yield "family", error.message
        return
    for name, reason in LAYOUTS.items():
        if name not in own.layouts and _asks(values[name]):
            yield name, f"{shown(values[name])} with family {own.name}: {reason}; leave it out"
    yield from own.broken(values)


def _asks(value: object) -> bool:
    """Whether a size splits anything, or a switch is on."""
    return value > 1 if isinstance(value, int) and not isinstance(value, bool) else bool(value)


@cache
def owners() -> Mapping[str, tuple[str, ...]]:
    """Arguments that only some of this project's families have an effect of, with these."""
    names = {name: family(name).arguments for name in FAMILIES.own}
    every = dict.fromkeys(argument for own in names.values() for argument in own)
    return {
        argument: tuple(name for name, own in names.items() if argument in own)
        for argument in every
    }


def takes(name: str) -> tuple[str, ...]:
    """The arguments that this family alone has an effect of; none where there is no such family."""
    try:
        return family(name).arguments
    except ConfigError:
        return ()
