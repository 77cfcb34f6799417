"""The families of models that ``family`` can name, installed ones included.

The properties of a family that matter before training starts are here and need no torch; how it is
built and trained is its :class:`~flagscale.train.models.base.ModelSpec`, the same object. A package
adds one by an entry point, whose name is the family's::

    [project.entry-points."flagscale.models"]
    mine = "my_package.model:Mine"
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.values import format_value
from flagscale.errors import ConfigError
from flagscale.registry import Registry

# By name alone: nothing of what they are is imported here.
MODEL_FAMILIES = Registry(
    "flagscale.models",
    "family of models",
    {
        "gpt": "flagscale.train.models.gpt:Gpt",
        "bert": "flagscale.train.models.bert:Bert",
    },
)
FAMILY_LAYOUTS: Mapping[str, str] = {
    "tensor_model_parallel_size": "its weights are not split over ranks",
    "pipeline_model_parallel_size": "it has no stages",
    "context_parallel_size": "its sequences are not split over ranks",
    "expert_model_parallel_size": "it has no experts",
    "enable_hetero": "it is not shared out over unlike devices",
    "recompute_granularity": "nothing in it is recomputed",
}
"""What a family has to be made for, with why one that is not refuses it."""


@dataclass(frozen=True)
class Transformer:
    """Properties that determine arithmetic and memory of a homogeneous transformer stack with
    embedding and output layer, in addition to the arguments.

    ``causal``: a token attends to those before it alone. ``head_layers``: linear layers of hidden x
    hidden with a bias and a norm between the last layer and the vocabulary. ``output_bias``: each
    token of the vocabulary has a bias. ``masks``: one of the tokens stands for others; a tokenizer
    that has none gets one more.
    """

    causal: bool = True
    head_layers: int = 0
    output_bias: bool = False
    masks: bool = False


class ModelFamily:
    """Properties of a family that the launcher uses. Importing one must not import torch."""

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

    def broken(self, values: Values) -> Iterable[Violation]:
        """Yield the violations specific to this family: the argument to change, and the reason.

        Args:
            values: arguments by name, aliases folded, defaults filled in.
        """
        del values
        return ()


@cache
def get_model_family(name: str) -> ModelFamily:
    """The family of that name.

    Raises:
        ConfigError: there is none, or a package's does not load; the message says which.
    """
    family: ModelFamily = MODEL_FAMILIES.create(name, ModelFamily)
    return family


def check_family(values: Values) -> Iterator[Violation]:
    """Check that the family exists, and its own requirements."""
    try:
        family = get_model_family(values["family"])
    except ConfigError as error:
        yield "family", error.message
        return
    for name, reason in FAMILY_LAYOUTS.items():
        if name not in family.layouts and _is_enabled(values[name]):
            yield (
                name,
                f"{format_value(values[name])} with family {family.name}: {reason}; leave it out",
            )
    yield from family.broken(values)


def _is_enabled(value: object) -> bool:
    """Return whether a size splits anything, or a switch is on."""
    return value > 1 if isinstance(value, int) and not isinstance(value, bool) else bool(value)


@cache
def families_by_argument() -> Mapping[str, tuple[str, ...]]:
    """Arguments that only some of this project's families have an effect of, with these."""
    names = {name: get_model_family(name).arguments for name in MODEL_FAMILIES.builtin}
    every = dict.fromkeys(argument for own in names.values() for argument in own)
    return {
        argument: tuple(name for name, own in names.items() if argument in own)
        for argument in every
    }


def arguments_of_family(name: str) -> tuple[str, ...]:
    """The arguments that this family alone has an effect of; none where there is no such family."""
    try:
        return get_model_family(name).arguments
    except ConfigError:
        return ()
