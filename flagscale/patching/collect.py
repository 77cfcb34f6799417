"""Collect the edits made in an adapted tree into patches.

Afterwards the patch directory has exactly one patch per file that differs from the tree after the
codemods, and a fresh unpatch reproduces the tree.
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
from flagscale.patching.manifest import Manifest, compare_scans, read_manifest, scan_tree
from flagscale.patching.spec import BackendLayout, load_spec
from flagscale.patching.unpatch import compute_fingerprint, lock_tree, patch_digests, recover_tree

_DIFF_START = b"diff --git "


@dataclass(frozen=True)
class CollectResult:
    """Result of a collection, with names of patches below the patch directory."""

    written: tuple[str, ...]
    removed: tuple[str, ...]
    unchanged: tuple[str, ...]


def collect(
    layout: BackendLayout, *, message: str | None = None, force: bool = False
) -> CollectResult:
    """Write the tree's edits beyond the codemods into ``layout.patches``.

    ``message`` becomes the header of new and changed patches; unchanged patches keep every byte.

    Raises:
        BackendSourceError: there is no adapted tree, an edited Python file does not compile, or the
            directory has patches that the tree was not made with (unless ``force``).
    """
    load_spec(layout)
    with lock_tree(layout):
        recover_tree(layout)
        manifest = read_manifest(layout.manifest)
        if manifest is None or not layout.base.is_file():
            raise BackendSourceError(
                f"{layout.tree} is not an adapted tree",
                hint=f"run tools/patch/unpatch.py --backend {layout.backend} first",
            )
        if not force:
            _check_patches_applied(layout, manifest)
        with tempfile.TemporaryDirectory(
            dir=layout.tree.parent, prefix=f".{layout.backend}.collect-"
        ) as scratch:
            patches = _diff_tree(layout, manifest, Path(scratch), message)
        is_current = manifest.fingerprint == compute_fingerprint(layout, manifest.identity)
        collected = _store_patches(layout, patches)
        _update_manifest(layout, manifest, is_current=is_current)
        return collected


def _check_patches_applied(layout: BackendLayout, manifest: Manifest) -> None:
    """Raise an error if the patch directory has patches that the tree was not made with."""
    differences = compare_scans(dict(manifest.patches), patch_digests(layout))
    if differences:
        listed = "\n".join(f"  {line}" for line in differences.format_lines())
        raise BackendSourceError(
            f"{layout.patches} is not what the tree was made with:\n{listed}\n"
            f"collecting now would overwrite those changes with what the tree holds",
            hint=f"apply them first (tools/patch/unpatch.py --backend {layout.backend}), "
            f"or use --force to let the tree win",
        )


def _diff_tree(
    layout: BackendLayout, manifest: Manifest, scratch: Path, message: str | None
) -> dict[str, bytes]:
    """Return the complete content of the patch directory, by name."""
    base = scratch / "base"
    unpack(layout.base, base)
    generated = frozenset(manifest.generated)
    base_scan, tree_scan = scan_tree(base), scan_tree(layout.tree, exclude=generated)
    edits = compare_scans(base_scan, tree_scan)
    adapt.check_python(layout.tree, [*edits.modified, *edits.added])
    patches = {}
    for number, path in enumerate(edits.paths()):
        work_directory = scratch / str(number)
        work_directory.mkdir()
        old_file = base / path if path in base_scan else None
        new_file = layout.tree / path if path in tree_scan else None
        name = f"{path}.patch"
        diff = git.make_diff(old_file, new_file, path, work_directory)
        patches[name] = _with_header(layout.patches / name, diff, message)
        shutil.rmtree(work_directory)
    _verify_patches(base, patches, tree_scan)
    return patches


def _with_header(existing: Path, diff: bytes, message: str | None) -> bytes:
    """Return ``diff`` below its header: the new message, otherwise the existing one."""
    header = b""
    if existing.is_file():
        content = existing.read_bytes()
        diff_start = content.find(_DIFF_START)
        if diff_start >= 0 and content[diff_start:] == diff:
            return content
        header = content[: max(diff_start, 0)]
    if message is None:
        return header + diff
    lines = "".join(f"# {line}\n" for line in message.strip().splitlines())
    return lines.encode("utf-8") + b"\n" + diff


def _verify_patches(base: Path, patches: Mapping[str, bytes], expected: Mapping[str, str]) -> None:
    """Apply the patches to the base and compare, so that only reproducible patches are stored."""
    for name in sorted(patches):
        if message := git.apply_patch(patches[name], base):
            raise BackendSourceError(
                f"the edit of {name[:-6]} cannot be kept as a patch: {message}"
            )
    if differences := compare_scans(dict(expected), scan_tree(base)):
        listed = "\n".join(f"  {line}" for line in differences.format_lines())
        raise BackendSourceError(f"these edits cannot be kept as patches:\n{listed}")


def _store_patches(layout: BackendLayout, patches: Mapping[str, bytes]) -> CollectResult:
    directory = layout.patches
    existing_names = adapt.list_patches(directory) if directory.is_dir() else []
    removed = [name for name in existing_names if name not in patches]
    for name in removed:
        (directory / name).unlink()
        _remove_empty_directories(directory, (directory / name).parent)
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
    return CollectResult(tuple(written), tuple(removed), tuple(unchanged))


def _remove_empty_directories(top: Path, directory: Path) -> None:
    while directory != top and not any(directory.iterdir()):
        directory.rmdir()
        directory = directory.parent


def _update_manifest(layout: BackendLayout, manifest: Manifest, *, is_current: bool) -> None:
    """Record that the tree equals its patches, so that unpatch has nothing to do.

    If the tree was not current (``is_current`` False), because codemods have changed since, its
    fingerprint stays: the next unpatch rebuilds it and loses nothing, because every edit is now a
    patch.
    """
    new_fingerprint = (
        compute_fingerprint(layout, manifest.identity) if is_current else manifest.fingerprint
    )
    updated = replace(
        manifest,
        patches=patch_digests(layout),
        files=scan_tree(layout.tree, exclude=frozenset(manifest.generated)),
        fingerprint=new_fingerprint,
    )
    updated.write(layout.manifest)
