"""The files that a command line names, when the ranks run where this machine's disk may not be.

What the ranks read travels to every host; what they write travels back. On the hosts the files lie
in a directory of the run, each in a numbered one of its own, so that equal names do not meet. The
lines of a batch are command lines too: their files travel, and the hosts get the batch anew.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

BATCH = "--batch"
_READ = (
    "--alltoallv-metadata",
    "--custom-replica-group",
    "--custom-src-target-pairs",
    "--baseline",
    "--import",
    "--import-results",
)
_WRITTEN = ("-J", "--report-to-json-file", "--json", "--plot", "--report")
_DUMPS = "--dump-dir"
_DEFAULT_DUMPS = "bench-failures"
DUMPS_SHOWN = "--dump-shown"
"""What messages call the directory of dumps, which is another one on the host."""

Word = str | Path
"""Of a command line; a path is one in the host's directory."""


@dataclass
class Carried:
    """A command line whose files lie in a directory that :meth:`words` is told."""

    read: list[tuple[Path, str]] = field(default_factory=list)
    """Each file here and its name there."""
    written: list[tuple[Path, str]] = field(default_factory=list)
    directories: list[tuple[Path, str]] = field(default_factory=list)
    """Each directory of dumps here and its name there."""
    _line: tuple[Word, ...] = ()
    _batches: list[tuple[str, list[tuple[Word, ...]]]] = field(default_factory=list)
    _number: int = 0

    @classmethod
    def of(cls, words: Sequence[str], *, dumps: bool = False) -> Carried:
        """Find the files of a command line that has been checked, and of its batch's lines.
        ``dumps``: the command writes such a directory even where the line names none.

        Raises:
            OSError: the batch cannot be read any more.
        """
        made = cls()
        line = made._scan(words)
        if dumps and DUMPS_SHOWN not in line:
            line += made._dumps(_DEFAULT_DUMPS)
        made._line = line
        return made

    def words(self, directory: str) -> tuple[str, ...]:
        """The command line for a host whose directory this is."""
        return _placed(self._line, directory)

    def texts(self, directory: str) -> list[tuple[str, str]]:
        """Files that are made for a host whose directory this is: name and content."""
        return [
            (name, "".join(f"{shlex.join(_placed(line, directory))}\n" for line in lines))
            for name, lines in self._batches
        ]

    def _scan(self, words: Sequence[str]) -> tuple[Word, ...]:
        result: list[Word] = []
        rest = list(words)
        while rest:
            word = rest.pop(0)
            flag, equals, value = word.partition("=")
            if flag not in (*_READ, *_WRITTEN, _DUMPS, BATCH) or not (equals or rest):
                result.append(word)
                continue
            result += self._file(flag, value if equals else rest.pop(0))
        return tuple(result)

    def _file(self, flag: str, value: str) -> tuple[Word, ...]:
        if flag == _DUMPS:
            return self._dumps(value)
        local = Path(value)
        name = self._name(local)
        if flag == BATCH:
            lines = [shlex.split(x, comments=True) for x in local.read_text("utf-8").splitlines()]
            # Empty lines stay: messages count them.
            self._batches.append((name, [self._scan(line) for line in lines]))
        else:
            (self.read if flag in _READ else self.written).append((local.absolute(), name))
        return (flag, Path(name))

    def _dumps(self, value: str) -> tuple[Word, ...]:
        local = Path(value)
        name = self._name(local)
        self.directories.append((local.absolute(), name))
        return (_DUMPS, Path(name), DUMPS_SHOWN, str(local.absolute()))

    def _name(self, local: Path) -> str:
        # The stem is part of what is shown: it names an imported curve.
        self._number += 1
        return f"{self._number}/{local.name}"


def _placed(line: Sequence[Word], directory: str) -> tuple[str, ...]:
    return tuple(w if isinstance(w, str) else f"{directory}/{w.as_posix()}" for w in line)
