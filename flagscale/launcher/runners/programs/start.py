"""Starting a host's script, detached from the connection that brought it.

The script's text comes with the program and is written on the host itself: where files are
shared, a host may otherwise still see an older script of the same name. Secrets come with the
program too and go into the environment of the script, never into a file or a command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flagscale.errors import RunStateError
from flagscale.hosts.executor import Result
from flagscale.hosts.program import assignment, parse, program
from flagscale.launcher.layout import OLD_OUTPUT_FILE
from flagscale.launcher.planning.model import HostPlan
from flagscale.launcher.state import HostState
from flagscale.status import RUN_ID_VARIABLE

SECONDS = 60.0
_BESIDE = 75

_BODY = Path(__file__).with_name("start.sh")


@dataclass(frozen=True)
class Started:
    """The script's process on its host, as it cannot be confused with another: what a run's state
    keeps of it, by the same names."""

    pid: int
    start_ticks: int
    boot_id: str


class StartError(RunStateError):
    """A host was reached, but its script could not be written or started. ``beside``: because the
    run before is alive there."""

    def __init__(self, host: str, reason: str, *, beside: bool = False) -> None:
        super().__init__(f"{host}: the script could not be started: {reason}")
        self.beside = beside


def read(name: str, result: Result) -> Started:
    """What the program of :func:`text` answered on a host. Raises :class:`StartError` with the
    reason why nothing was started; a run of the same directory that is alive there is one."""
    answer = parse(result.stdout)
    pid, ticks = answer.number("pid"), answer.number("start_ticks")
    if not result.ok or pid is None or ticks is None:
        lines = result.error_text.strip().splitlines()
        reason = "; ".join(lines[-2:]) or f"exit code {result.exit_status}"
        raise StartError(name, reason, beside=result.exit_status == _BESIDE)
    return Started(pid, ticks, answer.get("boot_id"))


def text(
    host: HostPlan,
    run_id: str,
    files: Mapping[Path, str],
    *,
    previous: HostState | None = None,
    tied: bool = False,
) -> str:
    """The program that writes ``files``, the script among them, and starts the script: ``tied``, in
    its own place.

    ``previous`` is this host in the run before, if it was one: its output is kept, and while its
    script lives nothing starts.
    """
    kept = previous is not None and previous.output == host.output
    carried = {**host.secrets, RUN_ID_VARIABLE: run_id}
    return program(
        _BODY,
        {
            "run_dir": str(host.run_dir),
            "script": str(host.script),
            "output": str(host.output),
            "old_output": str(previous.run_dir / OLD_OUTPUT_FILE) if previous and kept else "",
            "old_pid": str(previous.pid or 0) if previous else "0",
            "old_ticks": str(previous.start_ticks or "none") if previous else "none",
            "old_boot": (previous.boot_id or "") if previous else "",
            "paths": [str(path) for path in files],
            "texts": list(files.values()),
            "tied": "yes" if tied else "",
        },
        *(f"export {assignment(name, value)}" for name, value in carried.items()),
        end="",
    )
