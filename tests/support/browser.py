"""A real browser that tests look at pages with, told what to do by the DevTools protocol."""

from __future__ import annotations

import base64
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

from support.needs import SYSTEM, leave_out

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome", "chromium-browser")
_SECONDS = 60.0
# It keeps its files in a profile of its own, and asks nobody for news.
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--hide-scrollbars", "--remote-debugging-pipe"),
)


class Browser:
    """A browser with one page. ``trouble`` is what its console says is wrong, ``asked`` the
    addresses that the page wanted something from, its own among them."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.trouble: list[str] = []
        self.asked: list[str] = []
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        attached = self.do("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")

    def open(self, page: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load a file in a window of this size, in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.do("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.do("Emulation.setEmulatedMedia", features=[scheme])
        self.do("Page.navigate", url=page.absolute().as_uri())
        self.until("document.readyState === 'complete' && location.protocol === 'file:'")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression is, as JSON."""
        found = self.do("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        deadline = time.monotonic() + _SECONDS
        while not self.value(expression):
            assert time.monotonic() < deadline, f"never: {expression}"
            time.sleep(0.02)

    def point(self, selector: str, share: float) -> None:
        """Move the pointer over an element, to this share of its width."""
        box = self.value(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            "one.scrollIntoView({block: 'center'}); const b = one.getBoundingClientRect();"
            "return [b.left, b.top, b.width, b.height] })()"
        )
        at = {"x": box[0] + share * box[2], "y": box[1] + box[3] / 3}
        self.do("Input.dispatchMouseEvent", type="mouseMoved", **at)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.do("Input.dispatchKeyEvent", type=kind, key=key)

    def picture(self, path: Path) -> None:
        """Keep what the window shows as a PNG."""
        path.write_bytes(base64.b64decode(self.do("Page.captureScreenshot", format="png")["data"]))

    def do(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol; its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._hear(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _hear(self, event: dict[str, Any]) -> None:
        what, told = event.get("method"), event.get("params", {})
        if what == "Runtime.exceptionThrown":
            self.trouble.append(json.dumps(told["exceptionDetails"]))
        elif what == "Runtime.consoleAPICalled":
            self.trouble.append(json.dumps(told["args"]))
        elif what == "Log.entryAdded":
            self.trouble.append(told["entry"]["text"])
        elif what == "Network.requestWillBeSent":
            self.asked.append(told["request"]["url"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], _SECONDS)
            more = os.read(self._answers, 1 << 16) if ready else b""
            assert more, "the browser says nothing any more"
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def opened(profile: Path) -> Iterator[Browser]:
    """A browser that keeps its files below ``profile``; the running test is left out where no
    browser is installed."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        leave_out("browser", f"no chromium on this machine ({SYSTEM})")
    (commands_in, commands), (answers, answers_out) = os.pipe(), os.pipe()
    # It reads commands from descriptor 3 and writes to 4, which a shell can give it.
    script = f'exec "$@" 3<&{commands_in} 4>&{answers_out}'
    words = [program, *_FLAGS, f"--user-data-dir={profile / 'profile'}", "about:blank"]
    running = subprocess.Popen(
        ["bash", "-c", script, "-", *words],
        pass_fds=(commands_in, answers_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile)},
    )
    os.close(commands_in)
    os.close(answers_out)
    try:
        yield Browser(commands, answers)
    finally:
        os.close(commands)
        os.close(answers)
        try:
            running.wait(10)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
