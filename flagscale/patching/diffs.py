"""Reading unified diffs, to say in plain words why one does not apply.

git says "patch does not apply" and a line number. Whoever has to mend the patch wants the file,
the hunk, the line it expected and the line that is there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass
class Hunk:
    """One hunk: where it starts in the old file, and the old lines it expects there."""

    header: str
    start: int
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)


@dataclass
class FileDiff:
    """What a diff does to one file; ``old`` or ``new`` is ``None`` for a new or deleted one."""

    old: str | None
    new: str | None
    hunks: list[Hunk] = field(default_factory=list)


def parse(text: str) -> list[FileDiff]:
    """The textual changes of a unified diff; binary changes and bare mode changes are skipped."""
    files: list[FileDiff] = []
    lines = text.split("\n")
    i = 0
    while i < len(lines):
        if lines[i].startswith("--- ") and i + 1 < len(lines) and lines[i + 1].startswith("+++ "):
            files.append(FileDiff(_name(lines[i]), _name(lines[i + 1])))
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


def _name(line: str) -> str | None:
    name = line[4:].split("\t", maxsplit=1)[0]
    if name.startswith('"') and name.endswith('"'):
        name = name[1:-1].encode().decode("unicode_escape").encode("latin-1").decode("utf-8")
    return None if name == "/dev/null" else name.partition("/")[2] or name


def explain(patch: str, tree: Path) -> list[str]:
    """Why ``patch`` does not apply to ``tree``: a line or more for every hunk that does not fit."""
    reasons: list[str] = []
    for file in parse(patch):
        if file.old is None:
            if file.new is not None and (tree / file.new).exists():
                reasons.append(f"{file.new}: the patch creates it, but it is already there")
            continue
        path = tree / file.old
        if not path.is_file():
            reasons.append(f"{file.old}: the patch changes it, but there is no such file")
            continue
        found = path.read_text(encoding="utf-8", errors="replace").split("\n")
        for number, hunk in enumerate(file.hunks, 1):
            if reason := _misfit(hunk, found):
                of = f"hunk {number} of {len(file.hunks)} ({hunk.header})"
                reasons.append(f"{file.old}: {of} does not fit:\n{reason}")
    return reasons


def _misfit(hunk: Hunk, found: Sequence[str]) -> str | None:
    size = len(hunk.old)
    if any(list(found[at : at + size]) == hunk.old for at in range(len(found) - size + 1)):
        return None
    at = _nearest(hunk, found)
    for offset, expected in enumerate(hunk.old):
        line = at + offset
        actual = found[line] if line < len(found) else None
        if actual != expected:
            has = repr(actual) if actual is not None else "the end of the file"
            already = "\n    (the file already has the hunk's result)" if _done(hunk, found) else ""
            return f"    line {line + 1}: expected {expected!r}\n    found    {has}{already}"
    return None


def _nearest(hunk: Hunk, found: Sequence[str]) -> int:
    """The place where most of the hunk's old lines match; the stated one when none does."""
    stated = max(hunk.start - 1, 0)

    def fit(at: int) -> tuple[int, int]:
        same = sum(a == b for a, b in zip(hunk.old, found[at : at + len(hunk.old)], strict=False))
        return same, -abs(at - stated)

    return max(range(max(len(found), 1)), key=fit)


def _done(hunk: Hunk, found: Sequence[str]) -> bool:
    size = len(hunk.new)
    return any(list(found[at : at + size]) == hunk.new for at in range(len(found) - size + 1))
