"""Definition of one training argument, whichever program defines it.

An argument is named as Megatron-LM names it, in snake case as a YAML writes it; its command-line
flag is the same with dashes. This module imports no torch and nothing of the project.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal

Kind = Literal["int", "float", "str", "bool"]
Section = Literal["system", "model", "data"]


@dataclass(frozen=True)
class Argument:
    """One argument of the training program.

    ``many`` arguments take a list (``--split 90 5 5``). ``default`` is what the program uses when
    the YAML is silent. A boolean with default False is switched on by ``--name`` and one with
    default True is switched off by ``--no-name``. ``origin`` says which class defines it.
    """

    name: str
    kind: Kind
    doc: str
    default: Any = None
    section: Section = "model"
    many: bool = False
    choices: tuple[Any, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    origin: str = "flagscale"

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
    """A dataclass field that is a training argument. Its type is the annotation's:
    ``int``, ``float``, ``str``, ``bool``, a ``| None`` of these, or ``tuple[...]`` of one."""
    metadata: Mapping[str, Any] = {
        "doc": doc,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
    }
    return field(default=default, metadata=metadata)


_KINDS: Mapping[str, Kind] = {"int": "int", "float": "float", "str": "str", "bool": "bool"}


def _kind(annotation: str) -> tuple[Kind, bool]:
    """Kind and ``many`` of an annotation as text: ``int | None``, ``tuple[str, ...] | None``."""
    text = annotation.removesuffix(" | None").strip()
    many = text.startswith("tuple[")
    if many:
        text = text.removeprefix("tuple[").split(",")[0].rstrip("]").strip()
    if text not in _KINDS:
        raise TypeError(f"an argument cannot be of type {annotation!r}")
    return _KINDS[text], many


def declared(group: type, section: Callable[[str], Section] | Section) -> list[Argument]:
    """The arguments that a dataclass of :func:`arg` fields declares, in order."""
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


Values = Mapping[str, Any]
Violation = tuple[str, str]
