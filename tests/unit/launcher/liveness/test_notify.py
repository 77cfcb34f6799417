"""Notifications, by a real command and a real server."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flagscale.launcher.liveness.diagnosis import Failure
from flagscale.launcher.liveness.job import Notice
from flagscale.launcher.liveness.options import COMMAND, WEBHOOK
from flagscale.launcher.notify import Notifier, payload
from flagscale.modules import started

FAILURE = Failure("h1", 3, -9, "ended with signal 9", "trace", Path("/x/stderr.log"))


class Chat(http.server.BaseHTTPRequestHandler):
    """Answers with the status that the path names and keeps what it got."""

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
        [sys.executable, *started("flagscale.launcher.notify")],
        input=json.dumps({"event": "failed", "text": 'it\'s "over" $HOME'}),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_what_is_told() -> None:
    told = payload(Notice("failed", 1, FAILURE), run="r-1", name="tiny", attempts=3)
    assert told["text"] == ("tiny: run r-1 failed (attempt 2 of 3)\nh1: rank 3 ended with signal 9")
    wanted = {"event": "failed", "attempt": 2, "rank": 3, "exit_code": -9, "log": "/x/stderr.log"}
    assert {key: told[key] for key in wanted} == wanted
    plain = payload(Notice("finished", 0), run="r-1", name="tiny", attempts=1)
    assert plain["text"] == "tiny: run r-1 finished"


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        pytest.param({"finished"}, ["failed", "finished", "stopped"], id="every-end"),
        pytest.param({"failed"}, ["failed"], id="failures-alone"),
        pytest.param({"finished", "failed"}, ["failed", "finished", "stopped"], id="each-once"),
        pytest.param({"stalled", "restarted"}, ["restarted", "stalled"], id="no-end"),
    ],
)
def test_who_asks_for_the_end_is_told_how_it_came(
    wanted: set[str], told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COMMAND, f"cat > {tmp_path}/$$")
    notifier = Notifier(wanted, "r-1", "tiny", 1)
    for event in ("failed", "stalled", "restarted", "finished", "stopped"):
        notifier.tell(Notice(event, 0))
    while notifier.step(0.0):
        notifier.reaped(*os.waitpid(-1, 0))
    got = [json.loads(path.read_text())["event"] for path in tmp_path.iterdir()]
    assert sorted(got) == told


def test_a_command_and_a_webhook(chat: str, tmp_path: Path) -> None:
    place = tmp_path / "a 'b' $c"
    done = send(
        **{COMMAND: 'cat > "$PLACE"', WEBHOOK: f"{chat}/200/t0ken"},
        PLACE=str(place),
    )
    assert (done.returncode, done.stderr) == (0, "")
    expected = {"event": "failed", "text": 'it\'s "over" $HOME'}
    assert json.loads(place.read_text()) == expected
    assert Chat.got == [("application/json", expected)]


@pytest.mark.parametrize(
    ("address", "said"),
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
    chat: str, address: str, said: str
) -> None:
    done = send(**{WEBHOOK: chat + address if address.startswith("/") else address})
    assert done.returncode == 1
    assert said in done.stderr
    assert "t0ken" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_a_command_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    done = send(**{COMMAND: f"sleep 600 & echo $! > {tmp_path}/pid; exit 3"})
    assert "exit code 3" in done.stderr
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()
