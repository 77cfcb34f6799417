"""Pools of rank processes that many tests share."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests" / "integration" / "fsccl" / "fsccl_worker.py"


MAX_DELAY_SECONDS = 25.0
"""Seconds of delay allowed on a busy machine.

It is less than the timeouts of the operations in the tests that use it. A hang takes far longer.
"""


def build_extension() -> None:
    """Build the extension in a subprocess, so that ranks only have to load it."""
    program = "import flagscale.comm.fsccl as f; f.load_extension()"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


class RankFailedError(AssertionError):
    """A case raised on at least one rank."""


class RankWorker:
    """Worker process of one rank. ``prefix`` is a command that starts it elsewhere, such as
    nsenter.
    """

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        *,
        prefix: Sequence[str] = (),
        stderr: Path | None = None,
    ) -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if stderr is None else stderr.open("wb"),
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
            text=True,
        )
        self._replies: queue.Queue[dict[str, Any]] = queue.Queue()
        self._ready = False
        self._pending_replies = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_busy(self) -> bool:
        """True if a case is running, or its reply has not been received."""
        return self._pending_replies > 0

    def wait_until_ready(self) -> None:
        """Wait until the process has imported torch, for which the constructor does not wait."""
        if not self._ready:
            self.receive_reply(PATIENCE_SECONDS)
            self._ready = True

    def start_case(self, case: str, **arguments: Any) -> None:
        """Start a case. :meth:`receive_reply` returns its result."""
        self.wait_until_ready()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"case": case, "arguments": arguments}) + "\n")
        self.process.stdin.flush()
        self._pending_replies += 1

    def receive_reply(self, timeout: float) -> dict[str, Any]:
        """Return the reply of the case started last.

        Raises:
            queue.Empty: No reply within ``timeout`` seconds.
            AssertionError: The process exited without a reply.
        """
        deadline = time.monotonic() + timeout
        while True:
            has_exited = self.process.poll() is not None and not self._reader.is_alive()
            try:
                reply = self._replies.get(timeout=min(0.5, max(0.0, deadline - time.monotonic())))
                self._pending_replies -= "ready" not in reply
                return reply
            except queue.Empty:
                if has_exited:
                    code = self.process.returncode
                    raise AssertionError(f"the rank exited with code {code} and no reply") from None
                if time.monotonic() >= deadline:
                    raise

    def stop(self) -> None:
        """Close the worker's input and wait until it exits; kill it after 20 s."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(20)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self.process.kill()
            self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._replies.put(json.loads(line))


class RankPool:
    """Rank processes that can join groups over a store in this process."""

    def __init__(self, count: int) -> None:
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks = [RankWorker() for _ in range(count)]
        self._joins = 0

    def __getitem__(self, index: int) -> RankWorker:
        return self._ranks[index]

    @property
    def port(self) -> int:
        """Port of the store."""
        return self._store.port

    def kill(self, index: int) -> None:
        """Kill a rank with SIGKILL and start a new process for it."""
        self._ranks[index].process.kill()
        self._ranks[index].process.wait()
        self._ranks[index] = RankWorker()

    def prepare(self, count: int) -> None:
        """Replace those of the first ``count`` ranks that a failed test has left busy, and wait
        until all can start cases at once: the ranks of a job wait for each other for a limited
        time.
        """
        for i in range(count):
            if self._ranks[i].is_busy:
                self.kill(i)
        for i in range(count):
            self._ranks[i].wait_until_ready()

    def join(
        self,
        count: int,
        *,
        timeout: float = 30,
        **environment: str,
    ) -> None:
        """Initialize a job on the first ``count`` ranks, with FSCCL_* variables set.

        ``timeout`` is the number of seconds that ranks wait for each other when they join, and in
        operations unless :meth:`set_operation_timeout` changes it.
        """
        self._joins += 1
        self.prepare(count)
        for i in range(count):
            self._ranks[i].start_case(
                "join",
                rank=i,
                size=count,
                port=self._store.port,
                key=f"job{self._joins}",
                timeout=timeout,
                environment={"FSCCL_SOCKET_IFNAME": "lo", **environment},
            )
        self.wait_for_results(range(count))

    def set_operation_timeout(self, members: Sequence[int], seconds: float) -> None:
        """Set how long operations wait. Call it after the operations that are to succeed."""
        self.call(members, "set_operation_timeout", seconds=seconds)

    def leave(self, members: Sequence[int]) -> None:
        self.call(members, "leave")

    def call(
        self, members: Sequence[int], case: str, *, limit: float = PATIENCE_SECONDS, **args: Any
    ) -> list[Any]:
        """Run a case on ``members`` concurrently. Return their results.

        Raises:
            RankFailedError: The case raised on a rank. Contains every rank's error.
        """
        for i in members:
            self._ranks[i].start_case(case, **args)
        return self.wait_for_results(members, limit)

    def wait_for_results(
        self, members: Sequence[int], limit: float = PATIENCE_SECONDS
    ) -> list[Any]:
        """Wait for the running case of ``members``. Return their results.

        Raises:
            RankFailedError: The case raised on a rank. Contains every rank's error.
        """
        return unwrap_results(self.wait_for_replies(members, limit))

    def wait_for_replies(
        self, members: Sequence[int], limit: float = PATIENCE_SECONDS
    ) -> dict[int, dict[str, Any]]:
        """Return the reply of each rank, including errors.

        Raises:
            AssertionError: A rank does not reply within ``limit`` seconds.
        """
        return wait_for_replies({i: self._ranks[i] for i in members}, limit)

    def stop(self) -> None:
        for rank in self._ranks:
            rank.stop()


def unwrap_results(replies: Mapping[int, dict[str, Any]]) -> list[Any]:
    """Return the results from the ranks' replies.

    Raises:
        RankFailedError: The case raised on a rank. Contains every rank's error.
    """
    traces = {i: reply["trace"] for i, reply in replies.items() if "error" in reply}
    if traces:
        raise RankFailedError("\n".join(f"rank {i}: {t}" for i, t in traces.items()))
    return [reply["result"] for reply in replies.values()]


def wait_for_replies(ranks: Mapping[int, RankWorker], limit: float) -> dict[int, dict[str, Any]]:
    """Return the reply of each rank, including errors.

    Raises:
        AssertionError: A rank does not reply within ``limit`` seconds.
    """
    deadline = time.monotonic() + limit
    replies: dict[int, dict[str, Any]] = {}
    for i, rank in ranks.items():
        try:
            replies[i] = rank.receive_reply(max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise AssertionError(f"rank {i} hangs; so far: {replies}") from None
    return replies


def wait_for_errors(pool: Any, members: Sequence[int], limit: float) -> dict[int, str]:
    """Return the error of each of these ranks of a pool.

    Raises:
        AssertionError: A rank has no error, or does not reply within ``limit`` seconds.
    """
    replies = pool.wait_for_replies(members, limit)
    for i, reply in replies.items():
        assert "error" in reply, f"rank {i} got {reply}"
    return {i: reply["error"] for i, reply in replies.items()}
