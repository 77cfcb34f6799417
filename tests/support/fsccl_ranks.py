"""Pools of ranks: real processes that stay while many tests use them."""

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

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests" / "integration" / "fsccl" / "fsccl_worker.py"


SLACK = 25.0
"""Seconds that a busy machine may take: less than the operations' own limits where it is used, and
a hang is far longer."""


def build_extension() -> None:
    """Ranks then only load it."""
    program = "import flagscale.comm.fsccl as f; f.load_extension()"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


class RankFailedError(AssertionError):
    """A case raised on a rank."""


class Rank:
    """One worker process; ``prefix`` is a command that starts it elsewhere, such as nsenter."""

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
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._ready = False
        self._owed = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def busy(self) -> bool:
        """It has been asked for what it has not answered, or its answer was not taken."""
        return self._owed > 0

    def ask(self, case: str, **arguments: Any) -> None:
        if not self._ready:  # importing torch takes seconds, which the start need not wait for
            self.answer(60)
            self._ready = True
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"case": case, "arguments": arguments}) + "\n")
        self.process.stdin.flush()
        self._owed += 1

    def answer(self, timeout: float) -> dict[str, Any]:
        """Of the case asked for last.

        Raises:
            queue.Empty: none within ``timeout`` seconds.
            AssertionError: the process ended without one.
        """
        end = time.monotonic() + timeout
        while True:
            ended = self.process.poll() is not None and not self._reader.is_alive()
            try:
                reply = self._answers.get(timeout=min(0.5, max(0.0, end - time.monotonic())))
                self._owed -= "ready" not in reply
                return reply
            except queue.Empty:
                if ended:
                    code = self.process.returncode
                    raise AssertionError(f"the rank ended with code {code}, unprobed") from None
                if time.monotonic() >= end:
                    raise

    def end(self) -> None:
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
            self._answers.put(json.loads(line))


class Ranks:
    """Processes that can join in groups, over a store that this process keeps."""

    def __init__(self, count: int) -> None:
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks = [Rank() for _ in range(count)]
        self._joins = 0

    def __getitem__(self, index: int) -> Rank:
        return self._ranks[index]

    @property
    def port(self) -> int:
        """Of the store."""
        return self._store.port

    def kill(self, index: int) -> None:
        """kill -9; another rank takes its place for the next job."""
        self._ranks[index].process.kill()
        self._ranks[index].process.wait()
        self._ranks[index] = Rank()

    def free(self, count: int) -> None:
        """Replace those of the first ``count`` that a failed test has left at work."""
        for i in range(count):
            if self._ranks[i].busy:
                self.kill(i)

    def join(self, count: int, *, timeout: float = 30, **environment: str) -> None:
        """Make the first ``count`` ranks a job, with FSCCL_* variables set."""
        self._joins += 1
        self.free(count)
        for i in range(count):
            self._ranks[i].ask(
                "join",
                rank=i,
                size=count,
                port=self._store.port,
                key=f"job{self._joins}",
                timeout=timeout,
                environment={"FSCCL_SOCKET_IFNAME": "lo", **environment},
            )
        self.answers(range(count))

    def leave(self, members: Sequence[int]) -> None:
        self.call(members, "leave")

    def call(
        self, members: Sequence[int], case: str, *, limit: float = 60, **args: Any
    ) -> list[Any]:
        """Run a case on ``members`` at once; their results.

        Raises:
            RankFailedError: with every rank's error.
        """
        for i in members:
            self._ranks[i].ask(case, **args)
        return self.answers(members, limit)

    def answers(self, members: Sequence[int], limit: float = 60) -> list[Any]:
        return results(self.replies(members, limit))

    def replies(self, members: Sequence[int], limit: float = 60) -> dict[int, dict[str, Any]]:
        """What each rank says, errors included.

        Raises:
            AssertionError: a rank says nothing within ``limit`` seconds.
        """
        return replies({i: self._ranks[i] for i in members}, limit)

    def end(self) -> None:
        for rank in self._ranks:
            rank.end()


def results(found: Mapping[int, dict[str, Any]]) -> list[Any]:
    """The results among ranks' replies.

    Raises:
        RankFailedError: with every rank's error.
    """
    failed = {i: reply["trace"] for i, reply in found.items() if "error" in reply}
    if failed:
        raise RankFailedError("\n".join(f"rank {i}: {t}" for i, t in failed.items()))
    return [reply["result"] for reply in found.values()]


def replies(ranks: Mapping[int, Rank], limit: float) -> dict[int, dict[str, Any]]:
    """What each rank says, errors included.

    Raises:
        AssertionError: a rank says nothing within ``limit`` seconds.
    """
    end = time.monotonic() + limit
    out: dict[int, dict[str, Any]] = {}
    for i, rank in ranks.items():
        try:
            out[i] = rank.answer(max(0.0, end - time.monotonic()))
        except queue.Empty:
            raise AssertionError(f"rank {i} hangs; so far: {out}") from None
    return out


def survivors_say(pool: Any, members: Sequence[int], limit: float) -> dict[int, str]:
    """The error of each of these ranks of a pool.

    Raises:
        AssertionError: a rank has none, or says nothing within ``limit`` seconds.
    """
    found = pool.replies(members, limit)
    for i, reply in found.items():
        assert "error" in reply, f"rank {i} got {reply}"
    return {i: reply["error"] for i, reply in found.items()}
