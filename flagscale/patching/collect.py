"""The reverse of unpatch: turn the edits made in an adapted tree into patches.

Afterwards the patch directory holds exactly one patch for every file that differs from the tree
as the codemods left it, and a fresh unpatch gives the very tree that was collected from.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flagscale.errors import BackendSourceError
from flagscale.patching import adapt, git
from flagscale.patching.archive import unpack
from flagscale.patching.manifest import Manifest, compare, read_manifest, scan
from flagscale.patching.spec import Layout, load_spec
from flagscale.patching.unpatch import fingerprint, locked, patch_digests, recover

_DIFF = b"diff --git "


@dataclass(frozen=True)
class Collected:
    """What a collection did; patches by their name below the patch directory."""

    written: tuple[str, ...]
    removed: tuple[str, ...]
    unchanged: tuple[str, ...]


def collect(layout: Layout, *, message: str | None = None, force: bool = False) -> Collected:
    """Write the tree's edits beyond the codemods into ``layout.patches``.

    ``message`` becomes the header of the patches that are new or changed; an unchanged patch
    keeps every byte.

    Raises:
        BackendSourceError: there is no adapted tree, an edited Python file does not compile, or
            the directory holds patches the tree was not made with (unless ``force``).
    """
    load_spec(layout)
    with locked(layout):
        recover(layout)
        manifest = read_manifest(layout.manifest)
        if manifest is None or not layout.base.is_file():
            raise BackendSourceError(
                f"{layout.tree} is not an adapted tree",
                hint=f"run tools/patch/unpatch.py --backend {layout.backend} first",
            )
        if not force:
            _refuse_foreign(layout, manifest)
        with tempfile.TemporaryDirectory(
            dir=layout.tree.parent, prefix=f".{layout.backend}.collect-"
        ) as scratch:
            patches = _diff_all(layout, manifest, Path(scratch), message)
        current = manifest.fingerprint == fingerprint(layout, manifest.identity)
        collected = _store(layout, patches)
        _record(layout, manifest, current=current)
        return collected


def _refuse_foreign(layout: Layout, manifest: Manifest) -> None:
    changed = compare(dict(manifest.patches), patch_digests(layout))
    if changed:
        listed = "\n".join(f"  {line}" for line in changed.lines())
        raise BackendSourceError(
            f"{layout.patches} is not what the tree was made with:\n{listed}\n"
            f"collecting now would overwrite those changes with what the tree holds",
            hint=f"apply them first (tools/patch/unpatch.py --backend {layout.backend}), "
            f"or use --force to let the tree win",
        )


def _diff_all(
    layout: Layout, manifest: Manifest, scratch: Path, message: str | None
) -> dict[str, bytes]:
    """The whole content of the patch directory, by name."""
    base = scratch / "base"
    unpack(layout.base, base)
    generated = frozenset(manifest.generated)
    before, after = scan(base), scan(layout.tree, without=generated)
    edits = compare(before, after)
    adapt.check_python(layout.tree, [*edits.modified, *edits.added])
    patches = {}
    for number, path in enumerate(edits.paths()):
        work = scratch / str(number)
        work.mkdir()
        old = base / path if path in before else None
        new = layout.tree / path if path in after else None
        name = f"{path}.patch"
        diff = git.diff(old, new, path, work)
        patches[name] = _with_header(layout.patches / name, diff, message)
        shutil.rmtree(work)
    _prove(base, patches, after)
    return patches


def _with_header(existing: Path, diff: bytes, message: str | None) -> bytes:
    """``diff`` below its header: the new message, else the one the patch already has."""
    kept = b""
    if existing.is_file():
        content = existing.read_bytes()
        at = content.find(_DIFF)
        if at >= 0 and content[at:] == diff:
            return content
        kept = content[: max(at, 0)]
    if message is None:
        return kept + diff
    lines = "".join(f"# {line}\n" for line in message.strip().splitlines())
    return lines.encode("utf-8") + b"\n" + diff


def _prove(base: Path, patches: Mapping[str, bytes], wanted: Mapping[str, str]) -> None:
    """Apply the patches to the base and compare: a patch that does not reproduce is not stored."""
    for name in sorted(patches):
        if said := git.apply(patches[name], base):
            raise BackendSourceError(f"the edit of {name[:-6]} cannot be kept as a patch: {said}")
    if wrong := compare(dict(wanted), scan(base)):
        listed = "\n".join(f"  {line}" for line in wrong.lines())
        raise BackendSourceError(f"these edits cannot be kept as patches:\n{listed}")


def _store(layout: Layout, patches: Mapping[str, bytes]) -> Collected:
    directory = layout.patches
    present = adapt.patch_files(directory) if directory.is_dir() else []
    removed = [name for name in present if name not in patches]
    for name in removed:
        (directory / name).unlink()
        _drop_empty(directory, (directory / name).parent)
    written, unchanged = [], []
    for name, content in sorted(patches.items()):
        target = directory / name
        if target.is_file() and target.read_bytes() == content:
            unchanged.append(name)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.tmp")
        temporary.write_bytes(content)
        temporary.replace(target)
        written.append(name)
    return Collected(tuple(written), tuple(removed), tuple(unchanged))


def _drop_empty(top: Path, directory: Path) -> None:
    while directory != top and not any(directory.iterdir()):
        directory.rmdir()
        directory = directory.parent


def _record(layout: Layout, manifest: Manifest, *, current: bool) -> None:
    """Note that the tree is now what its patches describe, so that unpatch has nothing to do.

    A tree that was not ``current`` before, since codemods have changed under it, stays so: the
    next unpatch makes it anew, and loses nothing, for every edit is a patch now.
    """
    made_from = fingerprint(layout, manifest.identity) if current else manifest.fingerprint
    updated = replace(
        manifest,
        patches=patch_digests(layout),
        files=scan(layout.tree, without=frozenset(manifest.generated)),
        fingerprint=made_from,
    )
    updated.write(layout.manifest)
