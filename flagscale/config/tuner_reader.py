"""Reading ``experiment.auto_tuner``. Problems are collected by the ``SectionReader``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flagscale.config.arguments.layout_choices import CHOSEN_ARGUMENTS, DERIVED_KEYS
from flagscale.config.arguments.spec.argument import Argument
from flagscale.config.arguments.spec.registry import arguments
from flagscale.config.arguments.spec.values import convert, did_you_mean, format_value
from flagscale.config.reader import SectionReader
from flagscale.config.tuner_schema import TUNER_SECTIONS, Tuner

_PREFIX = "experiment.auto_tuner."
_SPACE = f"{_PREFIX}space."
_AUTO = "auto"
_MESH_KEYS = ("hetero_process_meshes", "hetero_pipeline_layer_split")
SPACE_KEYS = (*CHOSEN_ARGUMENTS, *DERIVED_KEYS)
"""Keys of ``experiment.auto_tuner.space``."""


def read_tuner(reader: SectionReader, data: Mapping[Any, Any]) -> Tuner:
    """Read the section ``auto_tuner`` of ``experiment``."""
    section = reader.read_section(data, "auto_tuner", "experiment.")
    names = (*TUNER_SECTIONS, "space")
    settings = {key: value for key, value in section.items() if key not in names}
    fields = reader.read_fields(Tuner, settings, _PREFIX, subsections=names)
    for name, kind in TUNER_SECTIONS.items():
        inner = reader.read_section(section, name, _PREFIX)
        fields[name] = kind(**reader.read_fields(kind, inner, f"{_PREFIX}{name}."))
    for name in fields.get("keep", ()):
        if name not in CHOSEN_ARGUMENTS:
            reader.add_problem(
                f"{_PREFIX}keep",
                f"{format_value(name)} is not varied{did_you_mean(name, CHOSEN_ARGUMENTS)}",
            )
    utilization = fields["memory_model"].gpu_utilization
    if utilization and (len(utilization) != 2 or utilization[0] > utilization[1]):
        reader.add_problem(
            f"{_PREFIX}memory_model.gpu_utilization",
            f"expected two fractions, the smaller one first, found {format_value([*utilization])}",
        )
        fields["memory_model"] = replace(fields["memory_model"], gpu_utilization=())
    return Tuner(
        **fields, space=_read_space(reader, reader.read_section(section, "space", _PREFIX))
    )


def _read_space(reader: SectionReader, data: Mapping[Any, Any]) -> dict[str, tuple[Any, ...]]:
    space: dict[str, tuple[Any, ...]] = {}
    for name, value in data.items():
        key = f"{_SPACE}{name}"
        if name in _MESH_KEYS and value not in (None, _AUTO):
            reader.add_problem(
                key,
                "meshes are not searched with other layouts; hetero_process_meshes: auto chooses "
                "their sizes and layers when training starts",
            )
        elif name in _MESH_KEYS:
            continue
        elif name not in SPACE_KEYS:
            reader.add_unknown_key(key, name, SPACE_KEYS, value)
        elif value not in (None, _AUTO, [_AUTO]) and (
            values := _read_values(reader, key, str(name), value)
        ):
            space[str(name)] = values
    return space


def _read_values(reader: SectionReader, key: str, name: str, value: Any) -> tuple[Any, ...] | None:
    """Return the values of an argument, or None for a wrong one, which is reported."""
    kind: Any = "bool" if name == "use_recompute" else "int"
    argument = arguments().get(name) or Argument(name=name, kind=kind, doc="", minimum=1)
    items = value if isinstance(value, list) else [value]
    try:
        return tuple(
            None if item in (None, "None", "null") else convert(argument, item) for item in items
        )
    except ValueError as error:
        reader.add_problem(key, f"{error}, in a list, or auto")
        return None
