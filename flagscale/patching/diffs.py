"""Parser of unified diffs, which explains why a patch does not apply.

git reports only a line number. To fix a patch, a user needs the file, the hunk, the expected line
and the line that is there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_HUNK_HEADER = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass
class Hunk:
    """Hunk of a diff: its first line in the old file (from 1), and its lines before and after the
    change.
    """

    header: str
    start: int
    old_lines: list[str] = field(default_factory=list)
    new_lines: list[str] = field(default_factory=list)


@dataclass
class FileDiff:
    """Changes to one file; ``old_path`` is None for a new file, ``new_path`` for a deleted one."""

    old_path: str | None
    new_path: str | None
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
        elif files and (match := _HUNK_HEADER.match(lines[i])):
            hunk = Hunk(lines[i], int(match[1]))
            i = _read_hunk(lines, i + 1, hunk, int(match[2] or 1), int(match[4] or 1))
            files[-1].hunks.append(hunk)
        else:
            i += 1
    return files


def _read_hunk(lines: Sequence[str], i: int, hunk: Hunk, old_count: int, new_count: int) -> int:
    """Read a hunk's lines from ``lines[i]`` on; return the index of the line after the hunk.
    ``old_count`` and ``new_count`` are the numbers of lines that its header states.
    """
    while i < len(lines) and (len(hunk.old_lines) < old_count or len(hunk.new_lines) < new_count):
        mark, content = lines[i][:1], lines[i][1:]
        if mark in (" ", "", "-"):
            hunk.old_lines.append(content)
        if mark in (" ", "", "+"):
            hunk.new_lines.append(content)
        i += 1
    return i


def _parse_file_name(line: str) -> str | None:
    name = line[4:].split("\t", maxsplit=1)[0]
    if name.startswith('"') and name.endswith('"'):
        name = name[1:-1].encode().decode("unicode_escape").encode("latin-1").decode("utf-8")
    return None if name == "/dev/null" else name.partition("/")[2] or name


def explain_failure(patch: str, tree: Path) -> list[str]:
    """Return the reasons why ``patch`` does not apply to ``tree``, one per hunk that does not
    match.
    """
    reasons: list[str] = []
    for file in parse_diff(patch):
        if file.old_path is None:
            if file.new_path is not None and (tree / file.new_path).exists():
                reasons.append(f"{file.new_path}: the patch creates it, but it is already there")
            continue
        path = tree / file.old_path
        if not path.is_file():
            reasons.append(f"{file.old_path}: the patch changes it, but there is no such file")
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        for number, hunk in enumerate(file.hunks, 1):
            if reason := _explain_hunk(hunk, lines):
                hunk_name = f"hunk {number} of {len(file.hunks)} ({hunk.header})"
                reasons.append(f"{file.old_path}: {hunk_name} does not fit:\n{reason}")
    return reasons


def _explain_hunk(hunk: Hunk, lines: Sequence[str]) -> str | None:
    size = len(hunk.old_lines)
    if any(
        list(lines[position : position + size]) == hunk.old_lines
        for position in range(len(lines) - size + 1)
    ):
        return None
    at = _find_nearest(hunk, lines)
    for offset, expected in enumerate(hunk.old_lines):
        line = at + offset
        actual = lines[line] if line < len(lines) else None
        if actual != expected:
            found_text = repr(actual) if actual is not None else "the end of the file"
            already_note = (
                "\n    (the file already has the hunk's result)"
                if _is_already_applied(hunk, lines)
                else ""
            )
            comparison = f"expected {expected!r}\n    found    {found_text}"
            return f"    line {line + 1}: {comparison}{already_note}"
    return None


def _find_nearest(hunk: Hunk, lines: Sequence[str]) -> int:
    """Return the position where most of the hunk's old lines match; of equal ones, the nearest to
    the position that the header states.
    """
    stated_position = max(hunk.start - 1, 0)

    def score(position: int) -> tuple[int, int]:
        equal_lines = sum(
            a == b
            for a, b in zip(
                hunk.old_lines, lines[position : position + len(hunk.old_lines)], strict=False
            )
        )
        return equal_lines, -abs(position - stated_position)

    return max(range(max(len(lines), 1)), key=score)


def _is_already_applied(hunk: Hunk, lines: Sequence[str]) -> bool:
    size = len(hunk.new_lines)
    return any(
        list(lines[position : position + size]) == hunk.new_lines
        for position in range(len(lines) - size + 1)
    )
