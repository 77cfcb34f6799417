"""JSON schemas of an experiment's YAML files, for editors and completion, from the definitions that
``check`` and ``explain`` use.

An editor compares each file alone, before Hydra composes them, so no key is required, any value may
be an interpolation, and a user's own keys are accepted where the launcher accepts them. The files
in ``flagscale/config/schemas`` are written by ``make docs``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flagscale.config import per_host_allowlist, schema
from flagscale.config.arguments.compat.flagscale_runner import UNUSED_RUNNER_KEYS
from flagscale.config.arguments.compat.names import UNSUPPORTED, UNUSED_EXPERIMENT_KEYS
from flagscale.config.arguments.compat.unsupported_families import UNSUPPORTED_FAMILIES
from flagscale.config.arguments.spec.argument import Argument
from flagscale.config.arguments.spec.registry import aliases, canonical_name, registry
from flagscale.config.arguments.spec.system_arguments import COMM, STAGE_RECOMPUTE
from flagscale.config.documented import KeyType, documented_fields, key_types
from flagscale.config.explain import argument_entry, default_text, experiment_entries
from flagscale.config.overrides import SUBSECTIONS, subsections_of
from flagscale.config.schemas import EXPERIMENT_FILE, TRAIN_FILE
from flagscale.config.slurm_schema import SlurmType
from flagscale.config.torchrun import TORCHRUN_OPTIONS
from flagscale.config.tuner_reader import SPACE_KEYS

_DIALECT = "http://json-schema.org/draft-07/schema#"
_INTERPOLATION: dict[str, Any] = {"$ref": "#/definitions/interpolation"}
_SCALAR: dict[str, Any] = {"$ref": "#/definitions/scalar"}
_SECTION = {"$ref": "#/definitions/arguments"}
_COMMON_DEFINITIONS = {
    "interpolation": {
        "description": "A value that is filled in: ${KEY}, ${oc.env:NAME}; ??? if it is missing.",
        "type": "string",
        "pattern": r"\$\{|^\?\?\?$",
    },
    "scalar": {"type": ["string", "number", "boolean", "null"]},
    # Texts of numbers and switches, which the launcher converts.
    "integer_text": {"type": "string", "pattern": r"^[-+]?[0-9][0-9_]*$"},
    "number_text": {
        "type": "string",
        "pattern": r"^[-+]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$",
    },
    "switch_text": {
        "type": "string",
        "pattern": "^([Tt]rue|[Ff]alse|[Yy]es|[Nn]o|[Oo]n|[Oo]ff)$",
    },
}
_JSON_TYPES = {"int": "integer", "float": "number", "bool": "boolean", "str": "string"}
_TEXTS = {"int": "integer_text", "float": "number_text", "bool": "switch_text"}
_OTHER_FORMS: Mapping[str, dict[str, Any]] = {
    "experiment.task.command": {"type": ["string", "number"]},
    "experiment.runner.nnodes": {"type": "string", "pattern": "^[0-9]+:[0-9]+$"},
}
"""Values that keys accept in addition to those of their type."""
_LISTS_OF_SECTIONS = ("hetero_process_meshes",)
"""Arguments whose items may be sections."""
_SPACE_VALUES: dict[str, Any] = {"anyOf": [_SCALAR, {"type": "array", "items": _SCALAR}]}
_FREE_FORM_SECTIONS: dict[str, dict[str, Any]] = {
    "experiment.auto_tuner.space": {
        "type": ["object", "null"],
        "properties": dict.fromkeys(SPACE_KEYS, _SPACE_VALUES),
        "additionalProperties": False,
    },
    "experiment.runner.slurm.extra": {"type": ["object", "null"], "additionalProperties": _SCALAR},
    "experiment.runner.slurm.device_type_specific": {
        "type": ["object", "null"],
        "additionalProperties": {"$ref": "#/definitions/slurm_type"},
    },
}


def render() -> dict[str, str]:
    """Return the text of each committed schema by its file name."""
    train = {"$schema": _DIALECT, "$ref": f"{EXPERIMENT_FILE}#/definitions/train"}
    return {
        EXPERIMENT_FILE: format_schema(experiment_schema()),
        TRAIN_FILE: format_schema(train),
    }


def format_schema(content: Mapping[str, Any]) -> str:
    """Return a schema as JSON."""
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def experiment_schema() -> dict[str, Any]:
    """Return the schema of an experiment's YAML."""
    options = _fields(schema.Options, "")
    docs = {entry.key: entry.doc for entry in experiment_entries()}
    specific = {
        name: _nullable_map({"$ref": "#/definitions/host_override"}, docs[name])
        for name in schema.SPECIFIC_SECTIONS
    }
    return {
        "$schema": _DIALECT,
        "title": "flagscale experiment",
        "type": "object",
        "properties": {
            "defaults": {
                "description": "Hydra's list of files to compose, such as `- train: 8b`.",
                "type": "array",
            },
            "experiment": _experiment(docs),
            "train": {"$ref": "#/definitions/train"},
            **options,
            **specific,
            "hydra": {"description": "Settings of Hydra.", "type": "object"},
        },
        # Own keys that others refer to, and blocks of anchors.
        "additionalProperties": True,
        "definitions": _definitions(),
    }


def train_schema() -> dict[str, Any]:
    """Return the schema of a file of the config group ``train``, which needs no other file."""
    return {
        "$schema": _DIALECT,
        "title": "flagscale train",
        **_train(),
        "definitions": _definitions(),
    }


def _definitions() -> dict[str, Any]:
    return {
        **_COMMON_DEFINITIONS,
        "train": _train(),
        "arguments": _arguments(),
        "host_override": _host_override(),
        "slurm_type": _object(_fields(SlurmType, "")),
    }


def _train() -> dict[str, Any]:
    sections = dict.fromkeys(schema.SECTIONS, _SECTION)
    defaults = {"description": "Hydra's list of files to compose.", "type": "array"}
    return {
        "description": "Arguments of the training program, in sections.",
        "type": ["object", "null"],
        "properties": {"defaults": defaults, **sections},
        # Blocks of anchors.
        "additionalProperties": {"type": "object"},
    }


def _arguments() -> dict[str, Any]:
    """Return the schema of a section of arguments, which may contain further sections of any
    name.
    """
    properties = {name: _argument(argument) for name, argument in registry().items()}
    properties[COMM] = {
        "description": "Options of the communication backend.",
        "type": ["object", "null"],
    }
    # A section of this name is as common as the argument.
    properties["optimizer"]["anyOf"].append(_SECTION)
    for name, reason in UNSUPPORTED.items():
        properties.setdefault(name, _refused(f"Not supported: {reason}."))
    switches = sorted(
        name
        for name, argument in registry().items()
        if argument.kind == "bool" and not argument.many and f"no_{name}" not in registry()
    )
    patterns = {
        f"^no_({'|'.join(switches)})$": _switch("The opposite of the key without `no_`."),
        "-": {"description": "The key with underscores in place of dashes."},
    }
    for family in UNSUPPORTED_FAMILIES:
        excluded = [name for name in properties if re.fullmatch(family.names, name)]
        lookahead = f"(?!({'|'.join(excluded)})$)" if excluded else ""
        patterns[f"^{lookahead}({family.names})$"] = (
            {"description": f"No effect: {family.reason}."}
            if family.unused
            else _refused(f"Not supported: {family.reason}.")
        )
    return {
        "type": ["object", "null"],
        "properties": properties,
        "patternProperties": patterns,
        "additionalProperties": _SECTION,
    }


def _argument(argument: Argument) -> dict[str, Any]:
    entry = argument_entry(argument)
    is_alias = argument.origin.startswith("alias of")
    description = f"{argument.origin[:1].upper()}{argument.origin[1:]}. " if is_alias else ""
    description += entry.doc
    forms = _value_forms(argument)
    if argument.many:
        if argument.name in _LISTS_OF_SECTIONS:
            forms.append({"type": "object"})
        if argument.name in STAGE_RECOMPUTE:
            forms.append({"type": "array", "items": {"type": "integer"}})
        # A single value is a list of one item; numbers may be written in one text.
        forms = [{"type": "array", "items": {"anyOf": forms}}, *forms]
        if argument.kind != "str":
            forms.append({"type": "string", "pattern": r"[0-9]"})
    return _described({"anyOf": [*forms, {"type": "null"}]}, description, argument.default)


def _value_forms(argument: Argument) -> list[dict[str, Any]]:
    """Return the alternative schemas of one value of an argument or field."""
    if argument.choices is not None:
        return [{"enum": list(argument.choices)}, _INTERPOLATION]
    if argument.kind == "str":
        return [{"type": ["string", "number"]}]
    form: dict[str, Any] = {"type": _JSON_TYPES[argument.kind]}
    if argument.minimum is not None:
        form["minimum"] = argument.minimum
    if argument.maximum is not None:
        form["maximum"] = argument.maximum
    return [form, {"$ref": f"#/definitions/{_TEXTS[argument.kind]}"}, _INTERPOLATION]


def _fields(kind: type, prefix: str) -> dict[str, Any]:
    """Return the schemas of the documented fields of a schema class."""
    return {
        key: _described(
            _field(f"{prefix}{key}", item.metadata, key_types(kind)[key]),
            item.metadata["doc"],
            item.default,
        )
        for key, item in documented_fields(kind).items()
    }


def _field(key: str, metadata: Mapping[str, Any], key_type: KeyType) -> dict[str, Any]:
    is_text = key_type.base in (str, Path)
    argument = Argument(
        key,
        kind="str" if is_text else key_type.base.__name__,  # type: ignore[arg-type]
        doc="",
        choices=metadata["choices"],
        minimum=metadata["minimum"],
        maximum=metadata["maximum"],
    )
    # A text is read as the YAML writes it, whatever YAML takes it for.
    forms = [_SCALAR] if is_text and metadata["choices"] is None else _value_forms(argument)
    if key_type.is_list:
        forms = [{"type": "array", "items": {"anyOf": forms}}, _INTERPOLATION]
    if key_type.literals:
        forms.append({"enum": list(key_type.literals)})
    if key in _OTHER_FORMS:
        forms.append(_OTHER_FORMS[key])
    return {"anyOf": [*forms, {"type": "null"}]}


def _experiment(docs: Mapping[str, str]) -> dict[str, Any]:
    properties = {**_fields(schema.Experiment, "experiment."), "envs": _environment(docs)}
    properties |= {name: _section(name, docs) for name in subsections_of("") if name != "envs"}
    unused = {
        name: {"description": f"No effect: {reason}."}
        for name, reason in UNUSED_EXPERIMENT_KEYS.items()
    }
    # Own keys are values that other keys refer to.
    return {
        "description": "Program, hosts and environment.",
        "type": "object",
        "properties": {**properties, **unused},
        "additionalProperties": _SCALAR,
    }


def _section(name: str, docs: Mapping[str, str]) -> dict[str, Any]:
    """Return the schema of a section of ``experiment`` whose keys are listed."""
    prefix = f"experiment.{name}."
    properties = _fields(SUBSECTIONS[name], prefix)
    if name == "runner":
        options = TORCHRUN_OPTIONS.items()
        properties |= {
            key: _described(
                {"anyOf": [*_value_forms(option), _INTERPOLATION, {"type": "null"}]},
                "An option of torchrun, passed to it unchanged.",
                None,
            )
            for key, option in options
        }
        properties |= {
            key: {"description": f"No effect: {reason}."}
            for key, reason in UNUSED_RUNNER_KEYS.items()
        }
    properties |= {
        inner: _section(f"{name}.{inner}", docs)
        for inner in subsections_of(name)
        if f"{name}.{inner}" in SUBSECTIONS
    }
    properties |= {
        key.removeprefix(prefix): {"description": docs[key], **content}
        for key, content in _FREE_FORM_SECTIONS.items()
        if key.rpartition(".")[0] + "." == prefix
    }
    text = " ".join((SUBSECTIONS[name].__doc__ or "").split())
    return {"description": text.replace("``", "`"), **_object(properties)}


def _environment(docs: Mapping[str, str]) -> dict[str, Any]:
    variables = {"type": ["object", "null"], "additionalProperties": _SCALAR}
    return {
        "description": docs["experiment.envs"],
        "type": ["object", "null"],
        "properties": {
            name: _nullable_map(variables, docs[f"experiment.envs.{name}"])
            for name in schema.SPECIFIC_SECTIONS
        },
        "additionalProperties": _SCALAR,
    }


def _host_override() -> dict[str, Any]:
    cmds = _object(_fields(schema.Commands, "experiment.cmds."))
    own = {**_fields(schema.HostOverride, ""), "cmds": cmds}
    arguments = {
        name: {"$ref": f"#/definitions/arguments/properties/{name}"}
        for name in registry()
        if (canonical_name(name) or aliases()[name].target) in per_host_allowlist.ARGUMENTS
    }
    return {
        "type": ["object", "null"],
        "properties": {**arguments, **own},
        "additionalProperties": _SECTION,
    }


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": ["object", "null"],
        "properties": dict(properties),
        "additionalProperties": False,
    }


def _nullable_map(content: Mapping[str, Any], description: str) -> dict[str, Any]:
    return {
        "description": description,
        "type": ["object", "null"],
        "additionalProperties": dict(content),
    }


def _switch(description: str) -> dict[str, Any]:
    argument = Argument("", kind="bool", doc="")
    return {"description": description, "anyOf": [*_value_forms(argument), {"type": "null"}]}


def _refused(description: str) -> dict[str, Any]:
    """Return the schema of a refused name, which is accepted only as a switch that is off."""
    return {"description": description, "enum": [False, None]}


def _described(content: Mapping[str, Any], description: str, default: Any) -> dict[str, Any]:
    """Return a schema with the description and default of its key."""
    described = {"description": description, **content} if description else dict(content)
    if _is_plain(default):
        described["default"] = list(default) if isinstance(default, tuple) else default
    elif isinstance(default, Path):
        described["default"] = default_text(default)
    return described


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return _all_plain(value)
    return isinstance(value, (bool, int, float, str)) and value != ""


def _all_plain(values: Iterable[Any]) -> bool:
    return all(_is_plain(item) for item in values)
