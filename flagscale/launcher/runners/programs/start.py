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
from flagscale.launcher.layout import OLD_OUTPUT_FILE, START_LOCK_FILE
from flagscale.launcher.planning.model import HostPlan
from flagscale.launcher.state import HostState
from flagscale.status import RUN_ID_VARIABLE, STATUS_DIR_VARIABLE

START_TIMEOUT_SECONDS = 60.0
# Exit codes of the program.
_CANNOT_WRITE_CODE = 73
_ALREADY_RUNNING_CODE = 75

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

    ``already_running`` is True if a run of the same experiment is alive there, ``cannot_write`` if
    the files of the run cannot be written there.
    """

    def __init__(
        self,
        host: str,
        reason: str,
        *,
        already_running: bool = False,
        cannot_write: bool = False,
    ) -> None:
        super().__init__(f"{host}: the script could not be started: {reason}")
        self.already_running = already_running
        self.cannot_write = cannot_write


def parse_result(name: str, result: CommandResult) -> ScriptProcess:
    """Parse the result of the program of :func:`render_start`.

    Raises:
        StartError: If nothing was started, for example because the previous run is alive.
    """
    output = parse_output(result.stdout)
    pid, ticks = output.get_int("pid"), output.get_int("start_ticks")
    if not result.ok or pid is None or ticks is None:
        lines = result.error_text.strip().splitlines()
        reason = "; ".join(lines[-2:]) or f"exit code {result.exit_status}"
        raise StartError(
            name,
            reason,
            already_running=result.exit_status == _ALREADY_RUNNING_CODE,
            cannot_write=result.exit_status == _CANNOT_WRITE_CODE,
        )
    return ScriptProcess(pid, ticks, output.get("boot_id"))


def start_lock_path(host: HostPlan | HostState) -> Path:
    """Return the file whose lock a host holds while it checks for live runs and starts one."""
    return host.run_dir.parent / START_LOCK_FILE


def render_start(
    host: HostPlan,
    run_id: str,
    files: Mapping[Path, str],
    *,
    previous: HostState | None = None,
    previous_run_id: str = "",
    claim_file: Path | None = None,
    tied: bool = False,
) -> str:
    """Return the program that writes ``files``, including the script, and starts the script.

    Args:
        previous: This host in the previous run, if it took part. Its output is preserved, and
            nothing starts while processes of that run are alive.
        previous_run_id: Id of the previous run, whether this host took part or not.
        claim_file: File with the id of the run that may start; the program does nothing if it
            names another one. None if this host does not share the launcher's file system.
        tied: Replace the program's own process with the script.
    """
    details = host.run_dir.parent.parent
    # Several experiments may share a `runner.log_dir`.
    owns_details = details.is_relative_to(host.script.parent.parent)
    same_output = previous is not None and previous.output == host.output
    exported = {**host.secrets, RUN_ID_VARIABLE: run_id}
    return build_program(
        _BODY,
        {
            "run_dir": str(host.run_dir),
            "script": str(host.script),
            "output": str(host.output),
            "pid_file": str(host.pid_file),
            "old_output": (
                str(previous.run_dir / OLD_OUTPUT_FILE) if previous and same_output else ""
            ),
            "old_pid": str(previous.pid or 0) if previous else "0",
            "old_ticks": str(previous.start_ticks or "none") if previous else "none",
            "old_boot": (previous.boot_id or "") if previous else "",
            "old_entry": f"{RUN_ID_VARIABLE}={previous_run_id}" if previous_run_id else "",
            "new_entry": f"{RUN_ID_VARIABLE}={run_id}",
            "run_id": run_id,
            "status_dir_prefix": f"{STATUS_DIR_VARIABLE}={details}/" if owns_details else "",
            "start_lock": str(start_lock_path(host)),
            "claim_file": str(claim_file or ""),
            "paths": [str(path) for path in files],
            "texts": list(files.values()),
            "tied": "yes" if tied else "",
        },
        *(f"export {shell_assignment(name, value)}" for name, value in exported.items()),
        end="",
    )
