"""The files that a command line names, when the ranks run where this machine's disk may not be.

What the ranks read travels to every host, what rank 0 writes travels back. On the hosts the files
lie in a directory of the run, under names made of a number and the original suffix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_READ = (
    "--batch",
    "--alltoallv-metadata",
    "--custom-replica-group",
    "--custom-src-target-pairs",
    "--baseline",
    "--import",
    "--import-results",
)
_WRITTEN = ("-J", "--report-to-json-file", "--json", "--plot", "--report")


@dataclass(frozen=True)
class Carried:
    """A command line whose files lie in a directory that :meth:`words` is told."""

    _words: tuple[str | Path, ...]
    """Paths stand for files in the host's directory."""
    read: tuple[tuple[Path, str], ...]
    """Each file here and its name there."""
    written: tuple[tuple[Path, str], ...]

    @classmethod
    def of(cls, words: Sequence[str]) -> Carried:
        """Find the files of a command line that has been checked."""
        result: list[str | Path] = []
        read: list[tuple[Path, str]] = []
        written: list[tuple[Path, str]] = []
        rest = list(words)
        while rest:
            word = rest.pop(0)
            flag, equals, value = word.partition("=")
            files = read if flag in _READ else written if flag in _WRITTEN else None
            if files is None or not (equals or rest):
                result.append(word)
                continue
            local = Path(value if equals else rest.pop(0))
            # The stem is part of what is shown: it names an imported curve.
            name = f"{len(read) + len(written)}/{local.name}"
            files.append((local.absolute(), name))
            result += [flag, Path(name)]
        return cls(tuple(result), tuple(read), tuple(written))

    def words(self, directory: str) -> tuple[str, ...]:
        """The command line for a host whose directory this is."""
        return tuple(
            w if isinstance(w, str) else f"{directory}/{w.as_posix()}" for w in self._words
        )
