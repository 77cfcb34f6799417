"""Making the adapted tree: fetch, verify, rewrite, patch, check, and put it in place at once.

The tree is built beside its place and renamed into it, so that at every moment there is either
the old tree or the new one. A tree that holds an edit nobody has collected is never replaced
without ``force``, and then it is kept as a backup.
"""

from __future__ import annotations

import ast
import errno
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from filelock import FileLock, Timeout

from flagscale.errors import BackendSourceError
from flagscale.patching import adapt, native
from flagscale.patching.archive import pack
from flagscale.patching.manifest import Edits, Manifest, digest, read_manifest, scan
from flagscale.patching.sources import Choice, Source, choose_source
from flagscale.patching.spec import BackendSpec, Layout, cache_directory, load_spec

#: How long to wait for another unpatch or patch of the same tree, in seconds.
LOCK_TIMEOUT = 120.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """What an unpatch did: the tree's record, whether it is new, edits found, a backup made."""

    manifest: Manifest
    made: bool
    edits: Edits
    backup: Path | None = None


def unpatch(layout: Layout, choice: Choice, *, force: bool = False, say: Say = print) -> Outcome:
    """Bring ``layout.tree`` to what the backend's definition and ``choice`` describe.

    Does nothing when it is there already. A ``choice`` that says nothing means the source the
    tree in place was made from, else the definition's default. ``say`` gets a line a step.

    Raises:
        BackendSourceError: the source cannot be had or verified, a codemod or patch fails, the
            tree holds local edits (unless ``force``), or the disk is full. The tree in place
            is unchanged then.
    """
    spec = load_spec(layout)
    with locked(layout):
        recover(layout)
        current = _current(layout, force=force)
        if current and choice == Choice():
            choice = Choice.from_record(current.choice)
        source = choose_source(spec, layout, choice)
        wanted = fingerprint(layout, source.identity)
        edits = current.edits(layout.tree) if current else Edits()
        if current and current.fingerprint == wanted and not (force and edits):
            return Outcome(_with_native(layout, spec, current), False, edits)
        if current and edits and not force:
            raise _would_lose(layout, edits)
        replaced = layout.tree.exists() and (current is None or bool(edits))
        with _building(layout) as building:
            job = _Job(layout, spec, choice, source, wanted, say)
            manifest = _build(job, building)
            backup = _put_in_place(layout, building, keep=replaced)
        return Outcome(manifest, True, edits, backup)


@contextmanager
def locked(layout: Layout) -> Iterator[None]:
    """Hold the tree's lock, so that two commands never work on it at once."""
    with disk_errors(layout):
        layout.tree.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(layout.beside("lock"), timeout=LOCK_TIMEOUT)
        try:
            lock.acquire()
        except Timeout as error:
            raise BackendSourceError(
                f"another command has held {layout.beside('lock')} for {LOCK_TIMEOUT:.0f} s",
                hint="wait for the other patch or unpatch to end",
            ) from error
        try:
            yield
        finally:
            lock.release()


@contextmanager
def disk_errors(layout: Layout) -> Iterator[None]:
    """Turn what the file system says into one message."""
    try:
        yield
    except OSError as error:
        where = error.filename or layout.tree.parent
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "no space left on the disk" if full else (error.strerror or str(error))
        raise BackendSourceError(
            f"{where}: {what}; {layout.tree} is unchanged",
            hint="about 30 MB are needed beside the tree" if full else None,
        ) from error


def fingerprint(layout: Layout, source_identity: str) -> str:
    """Digest of everything a tree is made from: source, definition, codemods, interpreter."""
    parts: dict[str, object] = {"source": source_identity, "python": sys.implementation.cache_tag}
    parts["native"] = native.suffix()
    parts["definition"] = {
        path: found
        for path, found in scan(layout.definition).items()
        if path.startswith(("files/", "patches/")) or path == "codemods.yaml"
    }
    parts["codemods"] = scan(Path(__file__).parent / "codemods")
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _current(layout: Layout, *, force: bool) -> Manifest | None:
    """The record of the tree in place; ``None`` when there is no tree, or none of ours."""
    try:
        manifest = read_manifest(layout.manifest)
    except BackendSourceError:
        if not force:
            raise
        return None
    if manifest is None and layout.tree.exists() and not force:
        raise BackendSourceError(
            f"{layout.tree} exists, but not by this tool: it may hold work of yours",
            hint="move it aside, adapt it with --path, or use --force, which keeps a backup",
        )
    return manifest


def _would_lose(layout: Layout, edits: Edits) -> BackendSourceError:
    listed = "\n".join(f"  {line}" for line in edits.lines()[:20])
    more = len(edits.lines()) - 20
    return BackendSourceError(
        f"{layout.tree} must be made anew, and local edits in it would be lost:\n{listed}"
        + (f"\n  … and {more} more" if more > 0 else ""),
        hint=f"collect them with tools/patch/patch.py --backend {layout.backend}, "
        f"or use --force, which keeps a backup",
    )


def _with_native(layout: Layout, spec: BackendSpec, manifest: Manifest) -> Manifest:
    """Try again to provide the compiled module when it is missing."""
    if spec.native_module is None or manifest.generated:
        return manifest
    provided = native.provide(spec, layout.tree, manifest.version)
    if provided is None or provided.path is None:
        return manifest
    updated = replace_native(manifest, provided)
    updated.write(layout.manifest)
    return updated


def replace_native(manifest: Manifest, provided: native.Native) -> Manifest:
    """The record with what is now known of the compiled module."""
    fields = {**vars(manifest), "native": provided.how}
    fields["generated"] = (provided.path,) if provided.path else ()
    fields["warnings"] = () if provided.path else (provided.how,)
    return Manifest(**fields)


@contextmanager
def _building(layout: Layout) -> Iterator[Path]:
    """A directory to build in, beside the tree; gone afterwards unless it was renamed."""
    building = layout.beside("building")
    with disk_errors(layout):
        shutil.rmtree(building, ignore_errors=True)
        try:
            yield building
        finally:
            shutil.rmtree(building, ignore_errors=True)


@dataclass(frozen=True)
class _Job:
    """One build: what to make, of what, for whom."""

    layout: Layout
    spec: BackendSpec
    choice: Choice
    source: Source
    fingerprint: str
    say: Say


def _build(job: _Job, tree: Path) -> Manifest:
    layout, spec = job.layout, job.spec
    job.say(f"fetching {job.source.description}")
    job.source.fetch(cache_directory(), tree)
    version = read_version(spec, tree)
    job.say("writing our own files and running the codemods")
    own = adapt.write_own_files(layout.files, tree) if layout.files.is_dir() else []
    changes = adapt.run_codemods(spec, tree)
    base = scan(tree)
    pack(tree, base, tree / layout.base.relative_to(layout.tree))
    patches = adapt.apply_patches(layout.patches, tree) if layout.patches.is_dir() else {}
    after = scan(tree)
    patched = {path for path in after if after[path] != base.get(path)}
    job.say("compiling")
    adapt.check_python(tree, sorted({*own, *changes, *patched}))
    provided = native.provide(spec, tree, version)
    adapt.write_bytecode(tree, layout.tree, (spec.version_file.partition("/")[0],))
    manifest = Manifest(
        backend=layout.backend,
        version=version,
        source=job.source.description,
        identity=job.source.identity,
        choice=job.choice.recorded(),
        fingerprint=job.fingerprint,
        made_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        codemods=adapt.totals(changes),
        rewritten_files=len(changes),
        patches=patches,
        files=after,
    )
    manifest = replace_native(manifest, provided) if provided else manifest
    manifest.write(tree / layout.manifest.relative_to(layout.tree))
    return manifest


def read_version(spec: BackendSpec, tree: Path) -> str:
    """The version a tree says it is: ``__version__``, or MAJOR, MINOR, PATCH and PRE_RELEASE.

    Raises:
        BackendSourceError: the tree is not this backend's, or says nothing.
    """
    path = tree / spec.version_file
    if not path.is_file():
        has = ", ".join(sorted(p.name for p in tree.iterdir())[:8]) if tree.is_dir() else "nothing"
        raise BackendSourceError(
            f"the source is not {spec.name}: it has no {spec.version_file} (it has {has})"
        )
    constants: dict[str, str] = {}
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    constants[target.id] = str(node.value.value)
    if "__version__" in constants:
        return constants["__version__"]
    if all(name in constants for name in ("MAJOR", "MINOR", "PATCH")):
        numbers = ".".join(constants[name] for name in ("MAJOR", "MINOR", "PATCH"))
        return numbers + constants.get("PRE_RELEASE", "")
    raise BackendSourceError(
        f"{spec.version_file} says neither __version__ nor MAJOR, MINOR, PATCH"
    )


def _put_in_place(layout: Layout, building: Path, *, keep: bool) -> Path | None:
    """Rename the new tree into its place; returns where the old one was kept, if it was."""
    backup = _free_backup(layout) if keep else None
    retired = backup or layout.beside("old")
    if layout.tree.exists():
        if backup is None:
            shutil.rmtree(retired, ignore_errors=True)
        layout.tree.rename(retired)
    try:
        building.rename(layout.tree)
    except OSError:
        if retired.exists():
            retired.rename(layout.tree)
        raise
    if backup is None:
        shutil.rmtree(retired, ignore_errors=True)
    return backup


def _free_backup(layout: Layout) -> Path:
    number = 1
    while (path := layout.tree.with_name(f"{layout.tree.name}.backup-{number}")).exists():
        number += 1
    return path


def recover(layout: Layout) -> None:
    """Put the old tree back when a command was killed between its two renames."""
    old = layout.beside("old")
    if old.exists() and not layout.tree.exists():
        old.rename(layout.tree)


def patch_digests(layout: Layout) -> dict[str, str]:
    """Digest of every patch that the definition holds now."""
    if not layout.patches.is_dir():
        return {}
    return {name: digest(layout.patches / name) for name in adapt.patch_files(layout.patches)}
