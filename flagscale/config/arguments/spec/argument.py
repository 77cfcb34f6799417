"""Definition of a training argument: :class:`Argument`, declared by dataclass fields (:func:`arg`).

Arguments have the names of Megatron-LM, in snake case as in a YAML; command-line flags have dashes
instead. This module imports neither torch nor other modules of the project.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal, NamedTuple

Kind = Literal["int", "float", "str", "bool"]
Section = Literal["system", "model", "data"]


@dataclass(frozen=True)
class Argument:
    """One argument of the training program.

    On the command line, a boolean with default False is switched on by ``--name``, and one with
    default True is switched off by ``--no-name``.
    """

    name: str
    kind: Kind
    """Type of the value, or of each item of a list."""
    doc: str
    default: Any = None
    """Value if the argument is not given."""
    section: Section = "model"
    """Section of a train YAML to which the argument belongs."""
    many: bool = False
    """True if the value is a list (``--split 90 5 5``)."""
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None
    """Smallest valid value, inclusive."""
    maximum: float | None = None
    """Largest valid value, inclusive."""
    origin: str = "flagscale"
    """Program and class that define the argument."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def arg(
    default: Any,
    doc: str,
    *,
    choices: tuple[Any, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """Return a dataclass field that declares a training argument.

    The annotation of the field is the type of the argument: ``int``, ``float``, ``str``, ``bool``,
    or a ``tuple[...]`` of one of them, each optionally with ``| None``.
    """
    metadata: Mapping[str, Any] = {
        "doc": doc,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
    }
    return field(default=default, metadata=metadata)


_KINDS: Mapping[str, Kind] = {"int": "int", "float": "float", "str": "str", "bool": "bool"}


def _kind(annotation: str) -> tuple[Kind, bool]:
    """Return ``kind`` and ``many`` of an annotation such as ``int | None`` or ``tuple[str, ...] |
    None``."""
    text = annotation.removesuffix(" | None").strip()
    many = text.startswith("tuple[")
    if many:
        text = text.removeprefix("tuple[").split(",")[0].rstrip("]").strip()
    if text not in _KINDS:
        raise TypeError(f"an argument cannot be of type {annotation!r}")
    return _KINDS[text], many


def declared(group: type, section: Callable[[str], Section] | Section) -> list[Argument]:
    """Return the arguments that a dataclass with fields of :func:`arg` declares, in order."""
    return [_argument(group, f, section) for f in fields(group)]


def _argument(
    group: type, item: Field[Any], section: Callable[[str], Section] | Section
) -> Argument:
    kind, many = _kind(str(item.type))
    return Argument(
        name=item.name,
        kind=kind,
        doc=item.metadata["doc"],
        default=None if item.default is MISSING else item.default,
        section=section if isinstance(section, str) else section(item.name),
        many=many,
        choices=item.metadata["choices"],
        minimum=item.metadata["minimum"],
        maximum=item.metadata["maximum"],
        origin=f"flagscale {group.__name__}",
    )


class SettingContext(NamedTuple):
    """Place of a setting, and other settings; a message about the setting depends on them."""

    values: Mapping[str, Any] = {}
    """Values of the configuration by the names that it uses."""
    ranks: int | None = None
    """Number of ranks, if the configuration states it."""
    is_override: bool = False
    """True if the setting is an override of the command line."""


Values = Mapping[str, Any]
"""Values of arguments by name."""
Violation = tuple[str, str]
"""Name of an argument to change, and a description of the problem."""
