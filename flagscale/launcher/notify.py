"""Notifications about a run: a command with JSON on its stdin, or an HTTP POST.

The agent of host 0 starts one process per event, so a hanging command or an unresponsive server
delays nothing. A notification times out after :data:`NOTIFICATION_TIMEOUT_SECONDS`. A failed one is
reported as a line in the host's output. The webhook's address may contain a token, so it is passed
in the environment and never printed. Standard library only.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

from flagscale.files import to_plain
from flagscale.hosts.kernel import signal_on_parent_death
from flagscale.launcher.liveness.agent_log import log_line
from flagscale.launcher.liveness.job import Notice
from flagscale.launcher.liveness.options import NOTIFY_COMMAND_VARIABLE, NOTIFY_WEBHOOK_VARIABLE
from flagscale.module_command import python_arguments
from flagscale.status import RUN_ID_VARIABLE

NOTIFICATION_TIMEOUT_SECONDS = 10.0
_KILL_MARGIN_SECONDS = 2.0
# Each of them ends a run, so `finished` includes it.
_END_EVENTS = ("finished", "stopped", "failed")


def build_payload(notice: Notice, *, run: str, name: str, attempts: int) -> dict[str, Any]:
    """Return the JSON that is sent.

    ``event`` (failed, stalled, restarted, finished, stopped), ``run``, ``name``, ``time`` (Unix
    seconds), ``attempt`` from 1 and ``attempts``; the first failure's ``host``, ``rank``,
    ``exit_code``, ``reason``, ``traceback`` and ``log``; and ``text``, a summary in one or two
    lines under the name that chat services expect.
    """
    number = f" (attempt {notice.attempt + 1} of {attempts})" if attempts > 1 else ""
    text = f"{name}: run {run} {notice.event}{number}"
    record: dict[str, Any] = {
        "event": notice.event,
        "run": run,
        "name": name,
        "time": round(time.time(), 3),
        "attempt": notice.attempt + 1,
        "attempts": attempts,
    }
    if notice.failure is not None:
        text += f"\n{notice.failure.headline()}"
        record |= to_plain(notice.failure)
    return {**record, "text": text}


class Notifier:
    """Starts notifications without waiting for them."""

    def __init__(self, subscribed: Collection[str], run: str, name: str, attempts: int) -> None:
        self._secrets = {
            name: os.environ.pop(name, "")
            for name in (NOTIFY_COMMAND_VARIABLE, NOTIFY_WEBHOOK_VARIABLE)
        }
        self._subscribed = subscribed if any(self._secrets.values()) else ()
        self._payload = partial(build_payload, run=run, name=name, attempts=attempts)
        self._running: dict[int, tuple[subprocess.Popen[bytes], float]] = {}

    def notify(self, notice: Notice) -> None:
        """Start the notification of an event, if it is subscribed to."""
        event_names = {notice.event, "finished"} if notice.event in _END_EVENTS else {notice.event}
        if event_names.isdisjoint(self._subscribed):
            return
        # Long texts are cut.
        payload = self._payload(notice)
        record = {k: v[-8000:] if isinstance(v, str) else v for k, v in payload.items()}
        # The run's id is removed: the notification must survive the end of the attempt.
        environment = {k: v for k, v in os.environ.items() if k != RUN_ID_VARIABLE}
        try:
            process = subprocess.Popen(
                [sys.executable, *python_arguments(__name__)],
                stdin=subprocess.PIPE,
                env={**environment, **self._secrets},
                start_new_session=True,
                preexec_fn=signal_on_parent_death(os.getpid(), signal.SIGTERM),  # noqa: PLW1509 - one thread
            )
        except OSError as error:
            log_line(f"cannot notify: {error.strerror}")
            return
        if process.stdin is not None:
            # The record is smaller than a pipe's buffer, so writing does not block.
            with suppress(OSError):
                process.stdin.write(json.dumps(record).encode())
            with suppress(OSError):
                process.stdin.close()
        self._running[process.pid] = (process, time.monotonic())

    @property
    def pids(self) -> Collection[int]:
        """Pids of the notifications that are running."""
        return self._running.keys()

    def record_exit(self, pid: int, status: int) -> None:
        """Record the exit of a child process, if it is a notification."""
        entry = self._running.pop(pid, None)
        if entry is not None:
            entry[0].returncode = os.waitstatus_to_exitcode(status)

    def kill_overdue(self, now: float) -> bool:
        """Kill notifications that take too long; return whether any is still running."""
        for process, since in self._running.values():
            if now - since > NOTIFICATION_TIMEOUT_SECONDS + _KILL_MARGIN_SECONDS:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        return bool(self._running)


def main() -> int:
    """Send the JSON on stdin to the command and the webhook in the environment."""
    data = sys.stdin.buffer.read()
    command, webhook = (
        os.environ.pop(name, "") for name in (NOTIFY_COMMAND_VARIABLE, NOTIFY_WEBHOOK_VARIABLE)
    )
    errors = [
        _post_webhook(webhook, data) if webhook else "",
        _run_notify_command(command, data) if command else "",
    ]
    for fault in filter(None, errors):
        log_line(f"a notification failed: {fault}")
    return 1 if any(errors) else 0


def _post_webhook(address: str, data: bytes) -> str:
    """POST the JSON. Return the error without the address, or an empty string."""
    if not address.startswith(("https://", "http://")):
        return "the webhook's address begins with neither https:// nor http://"
    try:
        headers = {"Content-Type": "application/json", "User-Agent": "flagscale"}
        request = urllib.request.Request(address, data=data, headers=headers, method="POST")
        with urllib.request.urlopen(request, timeout=NOTIFICATION_TIMEOUT_SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        return f"the webhook answered with HTTP status {error.code}"
    except urllib.error.URLError as error:
        return f"the webhook: {type(error.reason).__name__}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        # The exception's text could contain the address.
        return f"the webhook: {type(error).__name__}"


def _run_notify_command(command: str, data: bytes) -> str:
    """Run the user's command with the JSON on its stdin, and end everything that it started.

    Return the error, or an empty string.
    """
    process = subprocess.Popen(
        ["bash", "-c", command],
        stdin=subprocess.PIPE,
        stdout=sys.stderr,
        start_new_session=True,
        preexec_fn=signal_on_parent_death(os.getpid(), signal.SIGKILL),  # noqa: PLW1509 - one thread
    )

    def end(*_: int | FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    try:
        process.communicate(data, timeout=NOTIFICATION_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"the command did not end within {NOTIFICATION_TIMEOUT_SECONDS:g} s"
    finally:
        end()
        process.wait()
    return f"the command ended with exit code {process.returncode}" if process.returncode else ""
