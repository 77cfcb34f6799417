"""Model families, the values of ``family``: their registry, their properties, and their rules.

The properties that the launcher uses before training starts are here and need no torch. The same
object is also a :class:`~flagscale.train.models.base.ModelSpec`, which builds and trains the model.
A package adds a family by an entry point with the name of the family
(docs/guides/add-a-model.md)::

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

# Families are named, not imported: their modules are loaded when a family is used.
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
    "pipeline_model_parallel_size": "it is not split into stages",
    "context_parallel_size": "its sequences are not split over ranks",
    "expert_model_parallel_size": "it has no experts",
    "enable_hetero": "it cannot be split over heterogeneous devices",
    "recompute_granularity": "it does not recompute activations",
}
"""Features that a family supports only if its ``layouts`` list them, with the reason to reject the
argument otherwise."""


@dataclass(frozen=True)
class Transformer:
    """Properties that determine, together with the arguments, FLOPs and memory of a stack of equal
    transformer layers with embedding and output layer."""

    causal: bool = True
    """True if a token attends to preceding tokens only."""
    head_layers: int = 0
    """Number of linear layers (hidden x hidden, with bias and norm) between the last transformer
    layer and the output layer."""
    output_bias: bool = False
    """True if the output layer has a bias of vocabulary size."""
    masks: bool = False
    """True if the model uses a mask token, which is added to a tokenizer that has none."""
    block: str = "decoder"
    """Name of the module with the layers and the last norm."""


class ModelFamily:
    """Properties of a family that the launcher uses. Importing a family must not import torch."""

    name: str = ""
    """Value of ``family`` in a YAML; for the family of a package, the name of its entry point."""
    title: str = ""
    """Name in messages; if empty, ``name``."""
    arguments: tuple[str, ...] = ()
    """Arguments that this family uses and some other families do not."""
    layouts: Collection[str] = ()
    """Supported keys of :data:`FAMILY_LAYOUTS`; the others are rejected."""
    transformer: Transformer | None = None
    """Properties for estimates of time and memory; None if such estimates are not supported."""

    @property
    def display_name(self) -> str:
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
    """Return the family with a name.

    Raises:
        ConfigError: there is no such family, or the package that provides it cannot be loaded.
    """
    family: ModelFamily = MODEL_FAMILIES.create(name, ModelFamily)
    return family


def check_family(values: Values) -> Iterator[Violation]:
    """Check that the family exists and supports the arguments."""
    try:
        family = get_model_family(values["family"])
    except ConfigError as error:
        yield "family", error.message
        return
    for name, reason in FAMILY_LAYOUTS.items():
        if name not in family.layouts and _is_enabled(values[name]):
            yield (
                name,
                f"{format_value(values[name])} is not supported by family: {family.name}: "
                f"{reason}; leave it out",
            )
    yield from family.broken(values)


def _is_enabled(value: object) -> bool:
    """Return whether a parallel size is above 1, or a switch is on."""
    return value > 1 if isinstance(value, int) and not isinstance(value, bool) else bool(value)


@cache
def families_by_argument() -> Mapping[str, tuple[str, ...]]:
    """Map each argument that only some of this project's families use to these families."""
    arguments_by_family = {
        name: get_model_family(name).arguments for name in MODEL_FAMILIES.builtin
    }
    names = dict.fromkeys(name for names in arguments_by_family.values() for name in names)
    return {
        name: tuple(
            family for family, arguments in arguments_by_family.items() if name in arguments
        )
        for name in names
    }


def arguments_of_family(name: str) -> tuple[str, ...]:
    """Return the arguments that a family uses and some other families do not; empty if there is no
    such family."""
    try:
        return get_model_family(name).arguments
    except ConfigError:
        return ()
