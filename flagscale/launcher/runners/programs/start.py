"""Start of a host's script, detached from the connection.

The text of the script is part of the program, and is written on the host itself: on a shared file
system a host may otherwise still see an older script of the same name. Secrets are part of the
program as well, and go into the environment of the script, never into a file or a command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flagscale.errors import RunStateError
from flagscale.hosts.connection import CommandResult
from flagscale.hosts.program import build_program, parse_output, shell_assignment
from flagscale.launcher.layout import OLD_OUTPUT_FILE
from flagscale.launcher.planning.model import HostPlan
from flagscale.launcher.state import HostState
from flagscale.status import RUN_ID_VARIABLE

SECONDS = 60.0
_ALREADY_RUNNING = 75

_BODY = Path(__file__).with_name("start.sh")


@dataclass(frozen=True)
class ScriptProcess:
    """Unambiguous identity of a script's process on its host.

    The field names are those of :class:`flagscale.launcher.state.HostState`.
    """

    pid: int
    start_ticks: int
    boot_id: str


class StartError(RunStateError):
    """Failure to write or start the script on a host that was reached.

    ``beside`` is True if the previous run is still alive there.
    """

    def __init__(self, host: str, reason: str, *, beside: bool = False) -> None:
        super().__init__(f"{host}: the script could not be started: {reason}")
        self.already_running = beside


def parse_result(name: str, result: CommandResult) -> ScriptProcess:
    """Parse the result of the program of :func:`text`.

    Raises:
        StartError: If nothing was started, for example because the previous run is alive.
    """
    output = parse_output(result.stdout)
    pid, ticks = output.number("pid"), output.number("start_ticks")
    if not result.ok or pid is None or ticks is None:
        lines = result.error_text.strip().splitlines()
        reason = "; ".join(lines[-2:]) or f"exit code {result.exit_status}"
        raise StartError(name, reason, beside=result.exit_status == _ALREADY_RUNNING)
    return ScriptProcess(pid, ticks, output.get("boot_id"))


def render_start(
    host: HostPlan,
    run_id: str,
    files: Mapping[Path, str],
    *,
    previous: HostState | None = None,
    tied: bool = False,
) -> str:
    """Return the program that writes ``files``, including the script, and starts the script.

    Args:
        previous: This host in the previous run, if it took part. Its output is preserved, and
            nothing starts while its script is alive.
        tied: Replace the program's own process with the script.
    """
    same_output = previous is not None and previous.output == host.output
    exported = {**host.secrets, RUN_ID_VARIABLE: run_id}
    return build_program(
        _BODY,
        {
            "run_dir": str(host.run_dir),
            "script": str(host.script),
            "output": str(host.output),
            "old_output": (
                str(previous.run_dir / OLD_OUTPUT_FILE) if previous and same_output else ""
            ),
            "old_pid": str(previous.pid or 0) if previous else "0",
            "old_ticks": str(previous.start_ticks or "none") if previous else "none",
            "old_boot": (previous.boot_id or "") if previous else "",
            "paths": [str(path) for path in files],
            "texts": list(files.values()),
            "tied": "yes" if tied else "",
        },
        *(f"export {shell_assignment(name, value)}" for name, value in exported.items()),
        end="",
    )
