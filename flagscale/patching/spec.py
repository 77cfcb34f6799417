"""Definition of a backend (``backends/<name>/{backend,codemods}.yaml``) and its directories."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from flagscale import files
from flagscale.errors import BackendSourceError, ConfigError
from flagscale.patching.codemods.names import CODEMOD_NAMES

DEFAULT_BACKEND = "Megatron-LM"
STATE_DIRECTORY = ".flagscale"
"""Directory inside an adapted tree with this package's records."""


def project_root() -> Path:
    """Return the checkout of this package, which contains ``backends/``."""
    return Path(__file__).resolve().parents[2]


def cache_directory() -> Path:
    """Return the cache of fetched sources: ``$FLAGSCALE_CACHE``, otherwise the user's cache
    directory.
    """
    if configured_directory := os.environ.get("FLAGSCALE_CACHE"):
        return Path(configured_directory).expanduser() / "sources"
    return files.cache_directory() / "sources"


@dataclass(frozen=True)
class BackendLayout:
    """Paths of a backend's definition and of its adapted tree."""

    root: Path
    backend: str

    @property
    def definition(self) -> Path:
        return self.root / "backends" / self.backend

    @property
    def patches(self) -> Path:
        return self.definition / "patches"

    @property
    def files(self) -> Path:
        """Additional files that are copied into the tree unchanged."""
        return self.definition / "files"

    @property
    def tree(self) -> Path:
        return self.root / "third_party" / self.backend

    @property
    def manifest(self) -> Path:
        return self.tree / STATE_DIRECTORY / "manifest.json"

    @property
    def base(self) -> Path:
        """Archive of the tree after its codemods and before any patch."""
        return self.tree / STATE_DIRECTORY / "base.tar.gz"

    def sibling(self, purpose: str) -> Path:
        """Return a hidden sibling of the tree, on its file system, so that renames are atomic."""
        return self.tree.parent / f".{self.backend}.{purpose}"


@dataclass(frozen=True)
class CodemodRule:
    """Codemods and the files that they apply to."""

    codemods: tuple[str, ...]
    include: tuple[str, ...]
    exclude: tuple[str, ...]

    def applies_to(self, path: str) -> bool:
        """Return whether the rule applies to ``path``, relative to the tree and with slashes."""
        return any(fnmatchcase(path, p) for p in self.include) and not any(
            fnmatchcase(path, p) for p in self.exclude
        )


@dataclass(frozen=True)
class BackendSpec:
    """Validated contents of ``backend.yaml`` and ``codemods.yaml``."""

    name: str
    version: str
    version_file: str
    default_source: str
    sources: Mapping[str, Mapping[str, str]]
    rules: tuple[CodemodRule, ...]
    native_module: str | None = None
    native_source: str | None = None

    def codemods_for(self, path: str) -> tuple[str, ...]:
        """Return the names of the codemods for ``path``, in a fixed order."""
        return tuple(
            sorted({c for rule in self.rules if rule.applies_to(path) for c in rule.codemods})
        )


def known_backends(root: Path) -> list[str]:
    """Return the names of the backends that have a definition."""
    return sorted(p.parent.name for p in (root / "backends").glob("*/backend.yaml"))


def load_spec(layout: BackendLayout) -> BackendSpec:
    """Read and validate a backend's definition.

    Raises:
        ConfigError: unknown backend; suggests the nearest name.
        BackendSourceError: the definition is invalid.
    """
    backends = known_backends(layout.root)
    if layout.backend not in backends:
        suggestions = difflib.get_close_matches(layout.backend, backends, n=1, cutoff=0.4)
        listed_backends = ", ".join(backends) or f"none in {layout.root / 'backends'}"
        raise ConfigError(
            f"unknown backend {layout.backend!r}; known: {listed_backends}",
            hint=f"did you mean --backend {suggestions[0]}?" if suggestions else None,
        )
    path = layout.definition / "backend.yaml"
    data = _require_mapping(path, _read_yaml(path))
    required_keys = ("name", "version", "version_file", "default_source", "sources")
    missing = [key for key in required_keys if key not in data]
    if missing:
        raise BackendSourceError(f"{path}: missing {', '.join(missing)}")
    sources = {
        str(kind): {str(k): str(v) for k, v in _require_mapping(path, values).items()}
        for kind, values in _require_mapping(path, data["sources"]).items()
    }
    return BackendSpec(
        name=str(data["name"]),
        version=str(data["version"]),
        version_file=str(data["version_file"]),
        default_source=str(data["default_source"]),
        sources=sources,
        rules=_load_rules(layout.definition / "codemods.yaml"),
        native_module=data.get("native_module"),
        native_source=data.get("native_source"),
    )


def _load_rules(path: Path) -> tuple[CodemodRule, ...]:
    if not path.exists():
        return ()
    rules = _require_mapping(path, _read_yaml(path)).get("rules") or []
    codemod_rules = []
    for rule in _require_list(path, rules):
        data = _require_mapping(path, rule)
        codemods = _require_strings(path, data.get("codemods"))
        for name in codemods:
            if name not in CODEMOD_NAMES:
                suggestions = difflib.get_close_matches(name, CODEMOD_NAMES, n=1)
                raise BackendSourceError(
                    f"{path}: unknown codemod {name!r}; known: {', '.join(CODEMOD_NAMES)}",
                    hint=f"did you mean {suggestions[0]!r}?" if suggestions else None,
                )
        include, exclude = (
            _require_strings(path, data.get("include")),
            _require_strings(path, data.get("exclude")),
        )
        codemod_rules.append(CodemodRule(codemods, include, exclude))
    return tuple(codemod_rules)


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BackendSourceError(f"{path}: cannot be read: {error}") from error


def _require_mapping(path: Path, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BackendSourceError(f"{path}: expected a mapping, found {value!r}")
    return value


def _require_list(path: Path, value: Any) -> Sequence[Any]:
    if not isinstance(value, list):
        raise BackendSourceError(f"{path}: expected a list, found {value!r}")
    return value


def _require_strings(path: Path, value: Any) -> tuple[str, ...]:
    return tuple(str(item) for item in _require_list(path, value or []))
