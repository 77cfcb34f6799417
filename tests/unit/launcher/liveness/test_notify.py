"""Tests of notifications, with a real command and a real server."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.waiting import PATIENCE_SECONDS, wait_for

from flagscale.launcher.liveness.diagnosis import Failure
from flagscale.launcher.liveness.job import Notice
from flagscale.launcher.liveness.options import NOTIFY_COMMAND_VARIABLE, NOTIFY_WEBHOOK_VARIABLE
from flagscale.launcher.notify import Notifier, build_payload
from flagscale.module_command import python_arguments

FAILURE = Failure("h1", 3, -9, "ended with signal 9", "trace", Path("/x/stderr.log"))


class Chat(http.server.BaseHTTPRequestHandler):
    """HTTP server that answers with the status in the path and records the requests."""

    got: list[Any] = []  # noqa: RUF012 - one list for all requests

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.got.append((self.headers["Content-Type"], json.loads(body)))
        self.send_response(int(self.path.split("/")[1]))
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def chat() -> Iterator[str]:
    Chat.got.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def send(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *python_arguments("flagscale.launcher.notify")],
        input=json.dumps({"event": "failed", "text": 'it\'s "over" $HOME'}),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )


def test_notified_events() -> None:
    payload = build_payload(Notice("failed", 1, FAILURE), run="r-1", name="tiny", attempts=3)
    assert payload["text"] == (
        "tiny: run r-1 failed (attempt 2 of 3)\nh1: rank 3 ended with signal 9"
    )
    fields = {"event": "failed", "attempt": 2, "rank": 3, "exit_code": -9, "log": "/x/stderr.log"}
    assert {key: payload[key] for key in fields} == fields
    finished_payload = build_payload(Notice("finished", 0), run="r-1", name="tiny", attempts=1)
    assert finished_payload["text"] == "tiny: run r-1 finished"


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param({"finished"}, ["failed", "finished", "stopped"], id="every-end"),
        pytest.param({"failed"}, ["failed"], id="failures-alone"),
        pytest.param({"finished", "failed"}, ["failed", "finished", "stopped"], id="each-once"),
        pytest.param({"stalled", "restarted"}, ["restarted", "stalled"], id="no-end"),
    ],
)
def test_finished_includes_every_kind_of_end(
    events: set[str], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NOTIFY_COMMAND_VARIABLE, f"cat > {tmp_path}/$$")
    notifier = Notifier(events, "r-1", "tiny", 1)
    for event in ("failed", "stalled", "restarted", "finished", "stopped"):
        notifier.notify(Notice(event, 0))
    while notifier.kill_overdue(0.0):
        notifier.record_exit(*os.waitpid(-1, 0))
    got = [json.loads(path.read_text())["event"] for path in tmp_path.iterdir()]
    assert sorted(got) == expected


def test_a_command_and_a_webhook(chat: str, tmp_path: Path) -> None:
    directory = tmp_path / "a 'b' $c"
    result = send(
        **{NOTIFY_COMMAND_VARIABLE: 'cat > "$PLACE"', NOTIFY_WEBHOOK_VARIABLE: f"{chat}/200/t0ken"},
        PLACE=str(directory),
    )
    assert (result.returncode, result.stderr) == (0, "")
    expected = {"event": "failed", "text": 'it\'s "over" $HOME'}
    assert json.loads(directory.read_text()) == expected
    assert Chat.got == [("application/json", expected)]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("/500/t0ken", "HTTP status 500"),
        ("http://127.0.0.1:9/t0ken", "ConnectionRefusedError"),
        ("http://nowhere.invalid/t0ken", "gaierror"),
        ("file:///etc/t0ken", "neither https"),
        ("http://[t0ken", "ValueError"),
        ("http://a b/t0ken", "InvalidURL"),
    ],
)
def test_a_webhook_that_fails_is_a_line_without_its_address(
    chat: str, address: str, message: str
) -> None:
    result = send(
        **{NOTIFY_WEBHOOK_VARIABLE: chat + address if address.startswith("/") else address}
    )
    assert result.returncode == 1
    assert message in result.stderr
    assert "t0ken" not in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_processes_started_by_a_command_end_with_it(tmp_path: Path) -> None:
    result = send(**{NOTIFY_COMMAND_VARIABLE: f"sleep 600 & echo $! > {tmp_path}/pid; exit 3"})
    assert "exit code 3" in result.stderr
    pid = int((tmp_path / "pid").read_text())

    def has_ended() -> bool:
        with suppress(OSError):
            return ") Z " in Path(f"/proc/{pid}/stat").read_text()
        return True

    wait_for(has_ended)
