"""Probe of a run on a host: whether the run is alive, and the new contents of its files.

Without a shared file system, the result includes the chunks that were added since the last probe;
:func:`store_chunks` writes them at the same path on this machine. A chunk is always written at its
own offset, so that two commands may probe the same run at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from flagscale.errors import FlagscaleError
from flagscale.files import make_private_directory
from flagscale.hosts.connection import HostConnection
from flagscale.hosts.program import FileChunk, build_program, run_program
from flagscale.launcher.layout import AGENT_FILE, EXIT_FILE, RANKS_DIRECTORY, STATUS_DIRECTORY
from flagscale.launcher.runners.programs.start import start_lock_path
from flagscale.launcher.snapshot import HostObservation
from flagscale.launcher.state import HostState, RunState
from flagscale.status import RUN_ID_VARIABLE

_TIMEOUT_SECONDS = 60.0
# Maximum bytes of one file per probe; the next probe continues.
_MAX_CHUNK_BYTES = 16 << 20
_TAIL_BYTES = 256 << 10
# Suffixes of files that are overwritten, and therefore always sent whole.
_OVERWRITTEN_SUFFIXES = (".json", ".place")

_BODY = Path(__file__).with_name("probe_run.sh")


@dataclass(frozen=True)
class ProbeResult(HostObservation):
    """Result of probing a run on one host.

    ``alive`` is ``script``, ``orphans`` (only other processes of the run) or empty.

    Attributes:
        ranks: Number of rank processes, if requested.
        more: True if there is more to fetch.
        error: Reason why the probe failed.
    """

    ranks: int | None = None
    more: bool = False
    error: FlagscaleError | None = None

    @classmethod
    def failed(cls, error: FlagscaleError) -> ProbeResult:
        return cls(trouble=str(getattr(error, "summary", error.message)), error=error)


@dataclass(frozen=True)
class ProbeRequest:
    """Optional parts of a probe.

    Attributes:
        fetch: Fetch the files of the run.
        output: Fetch the output of the host's script, too.
        count: Count the rank processes.
        last_line: Return the last line of output.
        await_start: Wait until no start is in progress on the host.
    """

    fetch: bool = False
    output: bool = False
    count: bool = False
    last_line: bool = False
    await_start: bool = False


def probe_run(
    connection: HostConnection, state: RunState, host: HostState, request: ProbeRequest
) -> ProbeResult:
    """Probe one host, and store the fetched chunks."""
    output = run_program(connection, render_probe(state, host, request), _TIMEOUT_SECONDS)
    store_chunks(output.chunks, host)
    return ProbeResult(
        alive=output.get("alive"),
        ranks=output.get_int("ranks"),
        more=output.get("more") == "yes",
        last_line=output.get("last_line"),
    )


def render_probe(state: RunState, host: HostState, request: ProbeRequest) -> str:
    """Return the program for one host."""
    offsets = {str(path): str(size) for path, size in _local_sizes(host)} if request.fetch else {}
    return build_program(
        _BODY,
        {
            "expected_boot": host.boot_id or "",
            "pid": str(host.pid or 0),
            "start_ticks": str(host.start_ticks or 0),
            "entry": f"{RUN_ID_VARIABLE}={state.run_id}",
            "start_lock": str(start_lock_path(host)) if request.await_start else "",
            "count_ranks": "yes" if request.count else "",
            "output_file": str(host.output) if request.last_line else "",
            "run_dir": str(host.run_dir),
            "status": STATUS_DIRECTORY,
            "agent_file": AGENT_FILE,
            "exit_file": EXIT_FILE,
            "ranks_directory": RANKS_DIRECTORY,
            "max_bytes": str(_MAX_CHUNK_BYTES),
            "tail_bytes": str(_TAIL_BYTES),
            "fetch": "yes" if request.fetch else "",
            "offsets": offsets,
            "followed_files": [str(host.output)] if request.output else [],
        },
    )


def _local_sizes(host: HostState) -> Iterable[tuple[Path, int]]:
    """Yield the followed files that exist on this machine, with their sizes."""
    for path in (host.output, *host.run_dir.glob(f"{STATUS_DIRECTORY}*/*.jsonl")):
        try:
            yield path, path.stat().st_size
        except FileNotFoundError:
            continue


def store_chunks(chunks: Iterable[FileChunk], host: HostState) -> None:
    """Write fetched chunks to their files; paths outside of the run's files are ignored."""
    for chunk in chunks:
        path = Path(chunk.path)
        if path != host.output and (not path.is_relative_to(host.run_dir) or ".." in path.parts):
            continue
        make_private_directory(path.parent)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(descriptor, chunk.data, chunk.offset)
            if path.suffix in _OVERWRITTEN_SUFFIXES:
                os.ftruncate(descriptor, len(chunk.data))
        finally:
            os.close(descriptor)
