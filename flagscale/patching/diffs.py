"""Parser of unified diffs, which explains why a patch does not apply.

git reports only a line number. To fix a patch, a user needs the file, the hunk, the expected line
and the line that is there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass
class Hunk:
    """Hunk of a diff: its start in the old file, and the old lines that it expects."""

    header: str
    start: int
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)


@dataclass
class FileDiff:
    """Changes to one file; ``old`` or ``new`` is None for a new or deleted file."""

    old: str | None
    new: str | None
    hunks: list[Hunk] = field(default_factory=list)


def parse_diff(text: str) -> list[FileDiff]:
    """Parse the textual changes of a unified diff; binary and mode changes are skipped."""
    files: list[FileDiff] = []
    lines = text.split("\n")
    i = 0
    while i < len(lines):
        if lines[i].startswith("--- ") and i + 1 < len(lines) and lines[i + 1].startswith("+++ "):
            files.append(FileDiff(_parse_file_name(lines[i]), _parse_file_name(lines[i + 1])))
            i += 2
        elif files and (match := _HUNK.match(lines[i])):
            hunk = Hunk(lines[i], int(match[1]))
            i = _read_hunk(lines, i + 1, hunk, int(match[2] or 1), int(match[4] or 1))
            files[-1].hunks.append(hunk)
        else:
            i += 1
    return files


def _read_hunk(lines: Sequence[str], i: int, hunk: Hunk, old: int, new: int) -> int:
    while i < len(lines) and (len(hunk.old) < old or len(hunk.new) < new):
        mark, content = lines[i][:1], lines[i][1:]
        if mark in (" ", "", "-"):
            hunk.old.append(content)
        if mark in (" ", "", "+"):
            hunk.new.append(content)
        i += 1
    return i


def _parse_file_name(line: str) -> str | None:
    name = line[4:].split("\t", maxsplit=1)[0]
    if name.startswith('"') and name.endswith('"'):
        name = name[1:-1].encode().decode("unicode_escape").encode("latin-1").decode("utf-8")
    return None if name == "/dev/null" else name.partition("/")[2] or name


def explain_failure(patch: str, tree: Path) -> list[str]:
    """Return the reasons why ``patch`` does not apply to ``tree``, per hunk that does not fit."""
    reasons: list[str] = []
    for file in parse_diff(patch):
        if file.old is None:
            if file.new is not None and (tree / file.new).exists():
                reasons.append(f"{file.new}: the patch creates it, but it is already there")
            continue
        path = tree / file.old
        if not path.is_file():
            reasons.append(f"{file.old}: the patch changes it, but there is no such file")
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        for number, hunk in enumerate(file.hunks, 1):
            if reason := _explain_hunk(hunk, lines):
                of = f"hunk {number} of {len(file.hunks)} ({hunk.header})"
                reasons.append(f"{file.old}: {of} does not fit:\n{reason}")
    return reasons


def _explain_hunk(hunk: Hunk, lines: Sequence[str]) -> str | None:
    size = len(hunk.old)
    if any(list(lines[at : at + size]) == hunk.old for at in range(len(lines) - size + 1)):
        return None
    at = _find_nearest(hunk, lines)
    for offset, expected in enumerate(hunk.old):
        line = at + offset
        actual = lines[line] if line < len(lines) else None
        if actual != expected:
            has = repr(actual) if actual is not None else "the end of the file"
            already = (
                "\n    (the file already has the hunk's result)"
                if _is_already_applied(hunk, lines)
                else ""
            )
            return f"    line {line + 1}: expected {expected!r}\n    found    {has}{already}"
    return None


def _find_nearest(hunk: Hunk, lines: Sequence[str]) -> int:
    """Return the position where most of the hunk's old lines match; by default the stated one."""
    stated = max(hunk.start - 1, 0)

    def fit(at: int) -> tuple[int, int]:
        same = sum(a == b for a, b in zip(hunk.old, lines[at : at + len(hunk.old)], strict=False))
        return same, -abs(at - stated)

    return max(range(max(len(lines), 1)), key=fit)


def _is_already_applied(hunk: Hunk, lines: Sequence[str]) -> bool:
    size = len(hunk.new)
    return any(list(lines[at : at + size]) == hunk.new for at in range(len(lines) - size + 1))
