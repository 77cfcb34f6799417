"""Looking after a run on a host: does anything of it live, and what have its files got to say.

Where files are not shared, the pieces that are new since the last look come along, and
:func:`keep` puts them at the same path on this machine. A piece is always written at its own
offset, so that two commands may look at the same run at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flagscale.errors import FlagscaleError
from flagscale.files import make_private_directory
from flagscale.hosts.executor import Executor
from flagscale.hosts.program import Piece, ask, program
from flagscale.launcher.layout import EXIT_FILE, RANKS_DIRECTORY, STATUS_DIRECTORY
from flagscale.launcher.snapshot import Seen
from flagscale.launcher.state import HostState, RunState
from flagscale.status import RUN_ID_VARIABLE

_SECONDS = 60.0
# Of one file at one look; the rest comes with the next.
_MOST_BYTES = 16 << 20
_TAIL_BYTES = 256 << 10
# Endings of files that are written over, and so always come whole.
_WHOLE = (".json", ".place")

_BODY = Path(__file__).with_name("look.sh")


@dataclass(frozen=True)
class ProbeResult(Seen):
    """What was seen of a run on a host. ``alive`` is ``script``, ``orphans`` (only other
    processes of the run) or empty; ``more``: there is more to fetch; ``error`` says why nothing
    was seen."""

    ranks: int | None = None
    more: bool = False
    error: FlagscaleError | None = None

    @classmethod
    def failed(cls, error: FlagscaleError) -> ProbeResult:
        return cls(trouble=str(getattr(error, "summary", error.message)), error=error)


@dataclass(frozen=True)
class ProbeRequest:
    """What else a look is for. ``fetch``: bring the files of the run here, with ``output`` also
    what the host's script has printed; ``count``: how many ranks there are; ``last_line``: of the
    output."""

    fetch: bool = False
    output: bool = False
    count: bool = False
    last_line: bool = False


def look(
    executor: Executor, state: RunState, host: HostState, request: ProbeRequest
) -> ProbeResult:
    """Look at one host, and keep what it sent."""
    answer = ask(executor, text(state, host, request), _SECONDS)
    keep(answer.pieces, host)
    return ProbeResult(
        alive=answer.get("alive"),
        ranks=answer.number("ranks"),
        more=answer.get("more") == "yes",
        last_line=answer.get("last_line"),
    )


def text(state: RunState, host: HostState, request: ProbeRequest) -> str:
    """The program for one host."""
    have = {str(path): str(size) for path, size in _have(host)} if request.fetch else {}
    return program(
        _BODY,
        {
            "wanted_boot": host.boot_id or "",
            "pid": str(host.pid or 0),
            "start_ticks": str(host.start_ticks or 0),
            "entry": f"{RUN_ID_VARIABLE}={state.run_id}",
            "count_ranks": "yes" if request.count else "",
            "last_of": str(host.output) if request.last_line else "",
            "run_dir": str(host.run_dir),
            "status": STATUS_DIRECTORY,
            "exit_file": EXIT_FILE,
            "ranks_directory": RANKS_DIRECTORY,
            "most": str(_MOST_BYTES),
            "tail_bytes": str(_TAIL_BYTES),
            "fetch": "yes" if request.fetch else "",
            "offsets": have,
            "followed": [str(host.output)] if request.output else [],
        },
    )


def _have(host: HostState) -> Iterable[tuple[Path, int]]:
    """The followed files that are here already, and how far."""
    for path in (host.output, *host.run_dir.glob(f"{STATUS_DIRECTORY}*/rank_*.jsonl")):
        try:
            yield path, path.stat().st_size
        except FileNotFoundError:
            continue


def keep(pieces: Iterable[Piece], host: HostState) -> None:
    """Write fetched pieces where they belong; a path that is not of this run is left alone."""
    for piece in pieces:
        path = Path(piece.path)
        if path != host.output and (not path.is_relative_to(host.run_dir) or ".." in path.parts):
            continue
        make_private_directory(path.parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            os.pwrite(descriptor, piece.data, piece.offset)
            if path.suffix in _WHOLE:
                os.ftruncate(descriptor, len(piece.data))
        finally:
            os.close(descriptor)
