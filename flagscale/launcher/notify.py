"""Tells people what became of a run: a command with JSON on its stdin, or an HTTP POST.

The agent of host 0 starts this as a process for each event, so that a command
that hangs or a server that does not answer holds up nothing: a notification has
:data:`TIMEOUT_SECONDS`, and one that fails is a line in the host's output and no more. The address
of the webhook may hold a token, so it comes in the environment and is never printed. Standard
library alone.
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

from flagscale.files import plain
from flagscale.hosts.kernel import die_with
from flagscale.launcher.liveness.agent_log import say
from flagscale.launcher.liveness.job import Notice
from flagscale.launcher.liveness.options import COMMAND, WEBHOOK
from flagscale.modules import started
from flagscale.status import RUN_ID_VARIABLE

TIMEOUT_SECONDS = 10.0
_MARGIN_SECONDS = 2.0
# Each is the end of a run: whoever asks for `finished` is told of it.
_ENDS = ("finished", "stopped", "failed")


def payload(notice: Notice, *, run: str, name: str, attempts: int) -> dict[str, Any]:
    """What is sent: ``event`` (failed, stalled, restarted, finished, stopped), ``run``, ``name``,
    ``time`` (Unix seconds), ``attempt`` from 1 and ``attempts``, the first failure's ``host``,
    ``rank``, ``exit_code``, ``reason``, ``traceback``, ``log``, and ``text``, all of it in a line
    or two, by the name that chat services expect."""
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
        record |= plain(notice.failure)
    return {**record, "text": text}


class Notifier:
    """Starts notifications and never waits for one."""

    def __init__(self, wanted: Collection[str], run: str, name: str, attempts: int) -> None:
        self._secrets = {name: os.environ.pop(name, "") for name in (COMMAND, WEBHOOK)}
        self._wanted = wanted if any(self._secrets.values()) else ()
        self._about = partial(payload, run=run, name=name, attempts=attempts)
        self._running: dict[int, tuple[subprocess.Popen[bytes], float]] = {}

    def tell(self, notice: Notice) -> None:
        """Start the notification of an event, if people want to be told of it."""
        wanted = {notice.event, "finished"} if notice.event in _ENDS else {notice.event}
        if wanted.isdisjoint(self._wanted):
            return
        # Texts are cut to what is worth sending.
        about = self._about(notice)
        record = {k: v[-8000:] if isinstance(v, str) else v for k, v in about.items()}
        # Without the run's identity: this must survive the end of the attempt that it tells of.
        environment = {k: v for k, v in os.environ.items() if k != RUN_ID_VARIABLE}
        try:
            process = subprocess.Popen(
                [sys.executable, *started(__name__)],
                stdin=subprocess.PIPE,
                env={**environment, **self._secrets},
                start_new_session=True,
                preexec_fn=die_with(os.getpid(), signal.SIGTERM),  # noqa: PLW1509 - one thread
            )
        except OSError as error:
            say(f"cannot notify: {error.strerror}")
            return
        if process.stdin is not None:
            # Less than a pipe holds, so that this does not wait.
            with suppress(OSError):
                process.stdin.write(json.dumps(record).encode())
            with suppress(OSError):
                process.stdin.close()
        self._running[process.pid] = (process, time.monotonic())

    def reaped(self, pid: int, status: int) -> None:
        """A child of this process has ended; it may be a notification."""
        found = self._running.pop(pid, None)
        if found is not None:
            found[0].returncode = os.waitstatus_to_exitcode(status)

    def step(self, now: float) -> bool:
        """End what takes too long; whether any notification is still under way."""
        for process, since in self._running.values():
            if now - since > TIMEOUT_SECONDS + _MARGIN_SECONDS:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        return bool(self._running)


def main() -> int:
    """Send what stdin holds to where the environment says."""
    data = sys.stdin.buffer.read()
    command, webhook = (os.environ.pop(name, "") for name in (COMMAND, WEBHOOK))
    faults = [_post(webhook, data) if webhook else "", _call(command, data) if command else ""]
    for fault in filter(None, faults):
        say(f"a notification failed: {fault}")
    return 1 if any(faults) else 0


def _post(address: str, data: bytes) -> str:
    """POST the JSON; what went wrong, without the address, or nothing."""
    if not address.startswith(("https://", "http://")):
        return "the webhook's address begins with neither https:// nor http://"
    try:
        headers = {"Content-Type": "application/json", "User-Agent": "flagscale"}
        request = urllib.request.Request(address, data=data, headers=headers, method="POST")
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        return f"the webhook answered with HTTP status {error.code}"
    except urllib.error.URLError as error:
        return f"the webhook: {type(error.reason).__name__}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        # The text of an invalid address would show it.
        return f"the webhook: {type(error).__name__}"


def _call(command: str, data: bytes) -> str:
    """Run the user's command with the JSON on its stdin; what went wrong, or nothing. Whatever it
    has started ends with it."""
    process = subprocess.Popen(
        ["bash", "-c", command],
        stdin=subprocess.PIPE,
        stdout=sys.stderr,
        start_new_session=True,
        preexec_fn=die_with(os.getpid(), signal.SIGKILL),  # noqa: PLW1509 - one thread
    )

    def end(*_: int | FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    try:
        process.communicate(data, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"the command did not end within {TIMEOUT_SECONDS:g} s"
    finally:
        end()
        process.wait()
    return f"the command ended with exit code {process.returncode}" if process.returncode else ""
