"""Reading typed sections of a composed YAML. Every problem is noted, none is raised."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field
from pathlib import Path
from typing import Any

from flagscale.config.arguments.compat.unsupported import UNUSED_EXPERIMENT_KEYS
from flagscale.config.arguments.spec.argument import Argument
from flagscale.config.arguments.spec.paths import why_too_long
from flagscale.config.arguments.spec.values import (
    convert,
    did_you_mean,
    format_value,
    to_word,
    why_unfit,
)
from flagscale.config.documented import Kind, documented, kinds
from flagscale.config.sources import OVERRIDE, Sources
from flagscale.errors import Problem


def absolute_path(path: str) -> Path:
    """A path of a YAML: ``~`` is the home, anything relative lies in the working directory."""
    return Path(os.path.abspath(os.path.expanduser(path)))  # noqa: PTH100, PTH111 - folds ".."


@dataclass
class SectionReader:
    """Reads plain data of a composed YAML and collects what is wrong with it."""

    sources: Sources
    problems: list[Problem] = field(default_factory=list)
    referred: frozenset[str] = frozenset()
    """Keys, and sections of keys, that interpolations refer to."""
    idle: list[str] = field(default_factory=list)
    """Keys of the user's own that none refers to."""
    unreadable: list[str] = field(default_factory=list)
    """Keys of what should be sections and is something else: nothing that follows from it is a
    problem of its own."""

    def problem(self, key: str, message: str) -> None:
        """Notes a problem with the place of its key."""
        self.problems.append(Problem(key, message, self.sources.place(key)))

    def mapping(self, data: Mapping[Any, Any], key: str, prefix: str = "") -> dict[Any, Any]:
        """The section ``key`` of ``data``; null and missing ones are empty."""
        value = data.get(key)
        if value is None or isinstance(value, Mapping):
            return dict(value or {})
        self.problem(f"{prefix}{key}", f"expected a section with keys, found {format_value(value)}")
        self.unreadable.append(f"{prefix}{key}")
        return {}

    def causes(self) -> list[Problem]:
        """The problems, but for those of keys in what is no section."""
        within = tuple(f"{key}." for key in self.unreadable)
        return [problem for problem in self.problems if not problem.key.startswith(within)]

    def text(self, key: str, value: Any) -> str:
        """A scalar as its YAML writes it (``010``, ``1.50``, ``yes``), not as it was read."""
        if isinstance(value, str):
            return value
        written = self.sources.texts.get(key)
        return to_word(value) if written is None or "${" in written else written

    def texts(self, key: str, values: Sequence[Any]) -> list[Any]:
        """The items of a list of texts, each as its YAML writes it; null and what is no scalar stay
        what they are."""
        written = self.sources.items.get(key, ())
        if len(written) != len(values) or any("${" in text for text in written):
            written = tuple(map(to_word, values))
        pairs = zip(values, written, strict=True)
        return [text if isinstance(v, (bool, int, float)) else v for v, text in pairs]

    def unknown(self, path: str, name: Any, names: Iterable[str]) -> None:
        """Notes a key that is none of ``known``."""
        self.problem(path, f"unknown key{did_you_mean(str(name), names)}")

    def own(
        self, path: str, name: Any, value: Any, names: Iterable[str], elsewhere: Mapping[str, str]
    ) -> None:
        """Takes a key that is none of ``known`` for one of the user's own, from which others take
        their values. One from which none does is idle, or a problem where another was meant, by
        its place or by its name. ``elsewhere`` has the places of keys of other sections."""
        if path in self.referred:
            return
        if name in UNUSED_EXPERIMENT_KEYS:
            self.idle.append(path)
            return
        is_typed = self.sources.places.get(path) == OVERRIDE
        if name in elsewhere:
            self.problem(path, f"unknown key; did you mean {elsewhere[name]!r}?")
        elif is_typed or isinstance(value, (Mapping, list)) or did_you_mean(str(name), names):
            self.unknown(path, name, names)
        else:
            self.idle.append(path)

    def fields(
        self,
        kind: type,
        data: Mapping[Any, Any],
        prefix: str,
        *,
        others: bool = False,
        beside: Iterable[str] = (),
        elsewhere: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Constructor arguments of the schema class ``kind`` from ``data``.

        A field whose value is wrong is noted and left out. Unless ``others`` is set, keys that
        the schema does not have are noted too; ``beside`` are sections that may be meant by them.
        With ``elsewhere`` they may be the user's own (:meth:`own`).
        """
        documentation = documented(kind)
        values: dict[str, Any] = {}
        for key, item in documentation.items():
            value = data.get(key)
            if value is not None:
                self._read(f"{prefix}{key}", item, kinds(kind)[key], value, values)
            elif item.default is MISSING:
                self.problem(f"{prefix}{key}", "is required")
        for name in data:
            if name not in documentation and not others:
                key, names = f"{prefix}{name}", [*documentation, *beside]
                if elsewhere is None:
                    self.unknown(key, name, names)
                else:
                    self.own(key, name, data[name], names, elsewhere)
        return values

    def _read(
        self, key: str, item: Field[Any], kind: Kind, value: Any, values: dict[str, Any]
    ) -> None:
        if value in kind.literals:
            values[item.name] = value
            return
        is_text = kind.base in (str, Path)
        if is_text and not isinstance(value, (Mapping, list)):
            value = self.text(key, value)
        elif is_text and isinstance(value, list):
            value = self.texts(key, value)
        argument = Argument(
            name=item.name,
            kind="str" if is_text else kind.base.__name__,  # type: ignore[arg-type]
            doc="",
            many=kind.many,
            choices=item.metadata["choices"],
            minimum=item.metadata["minimum"],
            maximum=item.metadata["maximum"],
        )
        try:
            converted = convert(argument, value)
        except ValueError as error:
            self.problem(key, str(error))
            return
        if isinstance(converted, str) and (complaint := _why_unfit_text(converted, kind.base)):
            self.problem(key, complaint)
            return
        if kind.many:
            converted = tuple(converted)
        values[item.name] = absolute_path(converted) if kind.base is Path else converted


def _why_unfit_text(text: str, base: type) -> str | None:
    """Return the problem of a text or of the path that it stands for."""
    if base is Path and not text:
        return "expected a path, found an empty text"
    return why_unfit(text) or (why_too_long(str(absolute_path(text))) if base is Path else None)
