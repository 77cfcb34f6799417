"""A headless Chromium for tests, controlled over the DevTools protocol."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.needs import INSTALL_COMMAND, skip_or_fail
from support.waiting import PATIENCE_SECONDS

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome", "chromium-browser")
# Without a window, first-run pages, or network access in the background.
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Browser:
    """A browser with one page.

    ``console_errors`` are the errors and messages of its console, ``requested_urls`` the URLs that
    the page requested, including its own.
    """

    def __init__(self, commands: int, replies: int) -> None:
        self._commands, self._replies = commands, replies
        self._buffer = b""
        self._last_message_id = 0
        self._session: str | None = None
        self.console_errors: list[str] = []
        self.requested_urls: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, page: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load a file in a window of this size in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.absolute().as_uri())
        self.wait_until("document.readyState === 'complete' && location.protocol === 'file:'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def wait_until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"never: {expression}"
            time.sleep(0.02)

    def move_pointer(self, selector: str, fraction: float) -> None:
        """Move the pointer over an element, to this fraction of its width."""
        box = self.evaluate(
            f"(() => {{ const element = document.querySelector({json.dumps(selector)});"
            "element.scrollIntoView({block: 'center'}); const b = element.getBoundingClientRect();"
            "return [b.left, b.top, b.width, b.height] })()"
        )
        position = {"x": box[0] + fraction * box[2], "y": box[1] + box[3] / 3}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **position)

    def press_key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol and return its result."""
        self._last_message_id += 1
        message: dict[str, Any] = {
            "id": self._last_message_id,
            "method": method,
            "params": parameters,
        }
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (reply := self._read_message()).get("id") != self._last_message_id:
            self._handle_event(reply)
        assert "error" not in reply, (method, reply["error"])
        return reply["result"]

    def _handle_event(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.console_errors.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.console_errors.append(json.dumps(parameters["args"]))
        elif method == "Log.entryAdded":
            self.console_errors.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requested_urls.append(parameters["request"]["url"])

    def _read_message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._replies], [], [], PATIENCE_SECONDS)
            chunk = os.read(self._replies, 1 << 16) if ready else b""
            assert chunk, "the browser does not answer any more"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """Start a browser with its profile below ``profile``. Skips the running test if no browser is
    installed.
    """
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        skip_or_fail("browser", f"no chromium on this machine ({INSTALL_COMMAND})")
    (commands_in, commands), (replies, replies_out) = os.pipe(), os.pipe()
    # The browser reads commands from descriptor 3 and writes to 4; a shell sets them up.
    script = f'exec "$@" 3<&{commands_in} 4>&{replies_out}'
    command = [program, *_FLAGS, f"--user-data-dir={profile / 'profile'}", "about:blank"]
    process = subprocess.Popen(
        ["bash", "-c", script, "-", *command],
        pass_fds=(commands_in, replies_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile)},
    )
    os.close(commands_in)
    os.close(replies_out)
    try:
        yield Browser(commands, replies)
    finally:
        os.close(commands)
        os.close(replies)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
