"""Sources of a backend's tree: package registry, git, a path, or an installed distribution.

Each source has an :attr:`Source.identity` before anything is fetched, so that a tree that is up to
date needs no fetch.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from base64 import urlsafe_b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flagscale.errors import BackendSourceError
from flagscale.patching.archive import copy_tree, unpack
from flagscale.patching.git import archive_commit, fetch_commit, has_whole_commit
from flagscale.patching.manifest import scan_tree
from flagscale.patching.pypi import download_sdist
from flagscale.patching.spec import BackendLayout, BackendSpec

SOURCE_KINDS = ("registry", "git", "path", "installed")


@dataclass(frozen=True)
class SourceOptions:
    """Source options of the command; ``None`` selects the definition's pin."""

    kind: str | None = None
    path: Path | None = None
    url: str | None = None
    commit: str | None = None

    def to_record(self) -> dict[str, str]:
        """Return the options that were set, with an absolute path, for the record."""
        options = {"kind": self.kind, "url": self.url, "commit": self.commit}
        if self.path is not None:
            options["path"] = str(self.path.expanduser().resolve())
        return {name: value for name, value in options.items() if value is not None}

    @classmethod
    def from_record(cls, record: Mapping[str, str]) -> SourceOptions:
        """Restore the options from :meth:`to_record`'s result."""
        path = Path(record["path"]) if "path" in record else None
        return cls(record.get("kind"), path, record.get("url"), record.get("commit"))


class Source(ABC):
    """Source of a backend's tree."""

    identity: str
    """Identity of the exact content, known without fetching it."""
    description: str
    """Description for messages."""

    @abstractmethod
    def fetch(self, cache: Path, destination: Path) -> None:
        """Write the verified tree into ``destination``, which does not exist yet.

        Raises:
            BackendSourceError: it cannot be reached, differs from the pinned source, or is unsafe.
        """


class RegistrySource(Source):
    """Source archive from pip's package registry, pinned by its sha256."""

    def __init__(self, package: str, version: str, sha256: str) -> None:
        self._package, self._version, self._sha256 = package, version, sha256
        self.identity = f"sdist:{sha256}"
        self.description = f"{package} {version} from the package registry, sha256 {sha256[:12]}…"

    def fetch(self, cache: Path, destination: Path) -> None:
        archive = cache / f"{self._package}-{self._version}-{self._sha256[:16]}.tar.gz"
        if not (archive.is_file() and _sha256(archive) == self._sha256):
            download_sdist(self._package, self._version, self._sha256, archive)
        unpack(archive, destination)


class GitSource(Source):
    """Commit of a git repository."""

    def __init__(self, url: str, commit: str) -> None:
        if not re.fullmatch(r"[0-9a-f]{40}", commit):
            raise BackendSourceError(
                f"--commit {commit!r} is not a full commit id (40 hexadecimal digits)",
                hint="a branch or a tag can move; `git rev-parse <name>` prints its commit",
            )
        self._url, self._commit = url, commit
        self.identity = f"git:{commit}"
        self.description = f"{url} at commit {commit[:12]}"

    def fetch(self, cache: Path, destination: Path) -> None:
        # The id of a commit is a digest of its whole content, which git checks in a repository.
        repository = cache / f"git-{self._commit}.git"
        if not has_whole_commit(repository, self._commit):
            fetch_commit(self._url, self._commit, repository)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".archive-") as scratch:
            archive = Path(scratch) / f"{self._commit}.tar"
            archive_commit(repository, self._commit, archive)
            unpack(archive, destination)


class PathSource(Source):
    """Directory or tar archive on this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path.expanduser().resolve()
        if self._path.is_dir():
            content = "\0".join(
                f"{digest} {name}" for name, digest in scan_tree(self._path).items()
            )
            self.identity = f"tree:{hashlib.sha256(os.fsencode(content)).hexdigest()}"
        elif self._path.is_file():
            self.identity = f"archive:{_sha256(self._path)}"
        else:
            raise BackendSourceError(
                f"--path {path}: no such file or directory",
                hint="expected a checkout of the backend, or a .tar(.gz) of one",
            )
        self.description = str(self._path)

    def fetch(self, cache: Path, destination: Path) -> None:
        if self._path.is_dir():
            copy_tree(self._path, destination)
        else:
            unpack(self._path, destination)


class InstalledSource(Source):
    """Python files of an installed distribution, verified against its RECORD."""

    def __init__(self, package: str, version: str) -> None:
        self._distribution = find_distribution(package, version)
        record = self._distribution.read_text("RECORD") or ""
        self.identity = f"installed:{hashlib.sha256(record.encode()).hexdigest()}"
        self.description = f"the installed {package} {version}"

    def fetch(self, cache: Path, destination: Path) -> None:
        for entry in self._distribution.files or ():
            if entry.parts[0] in ("..", "/") or entry.suffix in (".pyc", ".so"):
                continue
            if entry.parts[0].endswith(".dist-info") or entry.hash is None:
                continue
            original = Path(str(entry.locate()))
            expected = urlsafe_b64decode(entry.hash.value + "==").hex()
            if entry.hash.mode != "sha256" or _sha256(original) != expected:
                raise BackendSourceError(
                    f"{original}: differs from what its package installed",
                    hint="reinstall the package, or use --source registry",
                )
            target = destination / entry
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(original, target)


def find_distribution(package: str, version: str) -> importlib.metadata.Distribution:
    """Return the installed distribution of exactly this version, with a list of its files.

    Raises:
        BackendSourceError: there is none; names the installed version.
    """
    versions = []
    for distribution in importlib.metadata.distributions(name=package):
        if distribution.version == version and distribution.read_text("RECORD"):
            return distribution
        versions.append(distribution.version)
    found_text = f"found {', '.join(sorted(set(versions)))}" if versions else "it is not installed"
    raise BackendSourceError(
        f"{package} {version} is not installed here: {found_text}",
        hint=f"pip install --no-deps {package}=={version}, or use --source registry",
    )


def choose_source(spec: BackendSpec, layout: BackendLayout, options: SourceOptions) -> Source:
    """Return the source that ``options`` select, with the definition's pins as defaults.

    Raises:
        BackendSourceError: unknown kind, or an option that does not belong to the kind.
    """
    kind = options.kind or _implied_kind(options) or spec.default_source
    pins = spec.sources.get(kind, {})
    if kind == "path":
        if options.path is None:
            raise BackendSourceError("--source path needs --path DIRECTORY_OR_ARCHIVE")
        return PathSource(options.path)
    required_pins = {"registry": ("package", "sha256"), "installed": ("package",), "git": ()}
    if kind not in required_pins:
        raise BackendSourceError(f"unknown source {kind!r}; known: {', '.join(SOURCE_KINDS)}")
    missing = [key for key in required_pins[kind] if key not in pins]
    if missing:
        raise BackendSourceError(
            f"{layout.definition / 'backend.yaml'}: sources.{kind} lacks {', '.join(missing)}"
        )
    if kind == "registry":
        return RegistrySource(pins["package"], spec.version, pins["sha256"])
    if kind == "installed":
        return InstalledSource(pins["package"], spec.version)
    url, commit = options.url or pins.get("url"), options.commit or pins.get("commit")
    if not url or not commit:
        raise BackendSourceError("--source git needs --url and --commit")
    return GitSource(url, commit)


def _implied_kind(options: SourceOptions) -> str | None:
    if options.path is not None:
        return "path"
    return "git" if options.url or options.commit else None


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
