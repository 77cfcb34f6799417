"""Reading typed sections of a composed YAML. Problems are collected; none is raised."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field
from pathlib import Path
from typing import Any

from flagscale.config.arguments.compat.names import UNUSED_EXPERIMENT_KEYS
from flagscale.config.arguments.spec.argument import Argument
from flagscale.config.arguments.spec.paths import why_too_long
from flagscale.config.arguments.spec.values import (
    convert,
    did_you_mean,
    format_value,
    to_word,
    why_unfit,
)
from flagscale.config.documented import KeyType, documented_fields, key_types
from flagscale.config.overrides import replacement_of_key, usual_key
from flagscale.config.sources import OVERRIDE, Sources
from flagscale.errors import Problem


def absolute_path(path: str) -> Path:
    """Return a path of a YAML as an absolute one: ``~`` is expanded, and a relative path is
    relative to the working directory.
    """
    return Path(os.path.abspath(os.path.expanduser(path)))  # noqa: PTH100, PTH111 - folds ".."


@dataclass
class SectionReader:
    """Reads sections of a composed YAML, as plain data, and collects their problems."""

    sources: Sources
    problems: list[Problem] = field(default_factory=list)
    referenced: frozenset[str] = frozenset()
    """Dotted keys that interpolations refer to, and the sections that contain them."""
    unreferenced: list[str] = field(default_factory=list)
    """Additional keys of the user that no interpolation refers to."""
    unreadable: list[str] = field(default_factory=list)
    """Keys that should be sections and hold something else. Problems below them only follow from
    that.
    """

    def add_problem(self, key: str, message: str) -> None:
        """Record a problem with the source location of its key."""
        self.problems.append(Problem(key, message, self.sources.location(key)))

    def read_section(self, data: Mapping[Any, Any], key: str, prefix: str = "") -> dict[Any, Any]:
        """Return the section ``key`` of ``data``; empty if it is missing, null or, which is
        reported, no section.
        """
        value = data.get(key)
        if value is None or isinstance(value, Mapping):
            return dict(value or {})
        self.add_problem(
            f"{prefix}{key}", f"expected a section with keys, found {format_value(value)}"
        )
        self.unreadable.append(f"{prefix}{key}")
        return {}

    def root_problems(self) -> list[Problem]:
        """Return the problems without those that only follow from an unreadable section."""
        unreadable_prefixes = tuple(f"{key}." for key in self.unreadable)
        return [
            problem for problem in self.problems if not problem.key.startswith(unreadable_prefixes)
        ]

    def scalar_text(self, key: str, value: Any) -> str:
        """Return a scalar as its YAML writes it (``010``, ``1.50``, ``yes``), before parsing."""
        if isinstance(value, str):
            return value
        written_text = self.sources.texts.get(key)
        return to_word(value) if written_text is None or "${" in written_text else written_text

    def item_texts(self, key: str, values: Sequence[Any]) -> list[Any]:
        """Return the items of a list of texts, each as its YAML writes it. Null and items that are
        not scalars are returned unchanged.
        """
        written_texts = self.sources.items.get(key, ())
        if len(written_texts) != len(values):
            written_texts = tuple(map(to_word, values))
        pairs = zip(values, written_texts, strict=True)
        return [
            (to_word(value) if "${" in text else text)
            if isinstance(value, (bool, int, float))
            else value
            for value, text in pairs
        ]

    def add_unknown_key(
        self, path: str, name: Any, names: Iterable[str], value: Any = None
    ) -> None:
        """Record the problem of a key that is none of ``names``.

        The key of an argument or of another trainer in a wrong section is answered by the key to
        write, with its value.
        """
        is_override = self.sources.locations.get(path) == OVERRIDE
        if answer := replacement_of_key(path, value, is_override=is_override):
            self.add_problem(path, answer)
        elif argument_key := usual_key(str(name)):
            self.add_problem(path, f"unknown key; did you mean {argument_key!r}?")
        else:
            suggestion = did_you_mean(str(name), names)
            if not suggestion and "." not in path and not is_override:
                suggestion = f"; a key of your own needs one that refers to it, as ${{{path}}}"
            self.add_problem(path, f"unknown key{suggestion}")

    def holds_anchor(self, path: str, name: Any, names: Iterable[str]) -> bool:
        """Return whether a key is the user's own block of anchors (``base: &base {…}``), and not a
        misspelling of one of ``names``.
        """
        return path in self.sources.anchored and not did_you_mean(str(name), names)

    def read_custom_key(
        self,
        path: str,
        name: Any,
        value: Any,
        names: Iterable[str],
        keys_of_other_sections: Mapping[str, str],
    ) -> None:
        """Read a key that is none of ``names``, and may be a user's own key for interpolations.

        A key that an interpolation or an alias refers to is accepted. A key of another section or
        of another trainer, a near miss of ``names``, a section, a list or a key that an override
        sets is a problem. Any other key is recorded as unreferenced.

        Args:
            path: Dotted key.
            name: Its last part.
            value: Value of the key.
            names: Names that the section has.
            keys_of_other_sections: Dotted keys of other sections, by name.
        """
        if path in self.referenced or self.holds_anchor(path, name, names):
            return
        if name in UNUSED_EXPERIMENT_KEYS:
            self.unreferenced.append(path)
            return
        is_override = self.sources.locations.get(path) == OVERRIDE
        if name in keys_of_other_sections:
            self.add_problem(path, f"unknown key; did you mean {keys_of_other_sections[name]!r}?")
        elif (
            is_override
            or isinstance(value, (Mapping, list))
            or did_you_mean(str(name), names)
            or replacement_of_key(path, value, is_override=is_override)
        ):
            self.add_unknown_key(path, name, names, value)
        else:
            self.unreferenced.append(path)

    def read_fields(
        self,
        schema_class: type,
        data: Mapping[Any, Any],
        prefix: str,
        *,
        ignore_unknown: bool = False,
        subsections: Iterable[str] = (),
        keys_of_other_sections: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return constructor arguments of a schema class, read from a section.

        A field with a wrong value is reported and left out.

        Args:
            schema_class: Schema class of the section.
            data: The section.
            prefix: Dotted key of the section, with a dot at the end; empty for the top level.
            ignore_unknown: Whether to ignore keys that the schema does not have, instead of
                reporting them.
            subsections: Names of subsections, which are suggested for unknown keys as well.
            keys_of_other_sections: Dotted keys of other sections, by name. If given, unknown keys
                may be the user's own (see :meth:`read_custom_key`).
        """
        documentation = documented_fields(schema_class)
        values: dict[str, Any] = {}
        for key, item in documentation.items():
            value = data.get(key)
            if value is not None:
                self._read_field(
                    f"{prefix}{key}", item, key_types(schema_class)[key], value, values
                )
            elif item.default is MISSING:
                self.add_problem(f"{prefix}{key}", "is required")
        for name in data:
            if name not in documentation and not ignore_unknown:
                key, names = f"{prefix}{name}", [*documentation, *subsections]
                if keys_of_other_sections is None:
                    self.add_unknown_key(key, name, names)
                else:
                    self.read_custom_key(key, name, data[name], names, keys_of_other_sections)
        return values

    def _read_field(
        self, key: str, item: Field[Any], key_type: KeyType, value: Any, values: dict[str, Any]
    ) -> None:
        if value in key_type.literals:
            values[item.name] = value
            return
        is_text = key_type.base in (str, Path)
        if is_text and not isinstance(value, (Mapping, list)):
            value = self.scalar_text(key, value)
        elif is_text and isinstance(value, list):
            value = self.item_texts(key, value)
        argument = Argument(
            name=item.name,
            kind="str" if is_text else key_type.base.__name__,  # type: ignore[arg-type]
            doc="",
            many=key_type.is_list,
            choices=item.metadata["choices"],
            minimum=item.metadata["minimum"],
            maximum=item.metadata["maximum"],
        )
        try:
            converted = convert(argument, value)
        except ValueError as error:
            self.add_problem(key, str(error))
            return
        if isinstance(converted, str) and (reason := _explain_unfit_text(converted, key_type.base)):
            self.add_problem(key, reason)
            return
        if key_type.is_list:
            converted = tuple(converted)
        values[item.name] = absolute_path(converted) if key_type.base is Path else converted


def _explain_unfit_text(text: str, base: type) -> str | None:
    """Return the problem of a text, or of the path that it stands for; None if there is none."""
    if base is Path and not text:
        return "expected a path, found an empty text"
    return why_unfit(text) or (why_too_long(str(absolute_path(text))) if base is Path else None)
