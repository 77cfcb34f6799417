"""What the ranks of one host report in one attempt, how far each is, and their stacks."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flagscale.hosts import kernel, processes
from flagscale.hosts.processes import Process
from flagscale.launcher.layout import HostFiles
from flagscale.launcher.liveness.diagnosis import rank_log
from flagscale.launcher.liveness.messages import RankProgress
from flagscale.status import BUSY, Event, Progress, read_events, read_progress, status_files

STACK_SIGNAL = signal.SIGUSR2
"""What makes the training program write its stacks to stderr."""
MAX_STACK_CHARACTERS = 4000
_SETTLED_SECONDS = 0.5
_MOVING = frozenset({"joined", "ready", "progress", "evaluation", "checkpoint", "finished"})


@dataclass
class RankWatch:
    """Reads the status files of an attempt from where the last look ended."""

    directory: Path
    events: dict[int, list[Event]] = field(default_factory=dict)
    moves: int = 0
    """Grows whenever any rank has got on."""
    progress: dict[int, Progress] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    failed: bool = False
    _offsets: dict[Path, int] = field(default_factory=dict)
    _steps: dict[int, int] = field(default_factory=dict)
    """Of programs that tell of no more than events: the others' steps are not known."""

    def look(self) -> None:
        """Read what is new."""
        for path in status_files(self.directory):
            new, self._offsets[path] = read_events(path, self._offsets.get(path, 0))
            for event in new:
                self._take(event)
            rank = int(path.stem.removeprefix("rank_"))
            progress = read_progress(self.directory, rank)
            if progress is not None and self.progress.get(rank) != progress:
                self.progress[rank] = progress
                self.moves += 1

    def _take(self, event: Event) -> None:
        self.moves += event.event in _MOVING
        self.failed |= event.event == "failed"
        step = event.get("step")
        if event.event == "joined":
            self.joined.add(event.rank)
        elif event.event == "progress" and isinstance(step, int):
            self._steps[event.rank] = step
        # A job of months has many events of progress: none of them tells of a failure.
        if event.event in ("started", "joined", "failed", "finished"):
            self.events.setdefault(event.rank, []).append(event)

    @property
    def busy(self) -> bool:
        """Whether some rank does what moves no step."""
        return any(progress.doing in BUSY for progress in self.progress.values())

    def step(self, rank: int) -> int | None:
        """The step a rank is at, where it says."""
        progress = self.progress.get(rank)
        return progress.step if progress is not None else self._steps.get(rank)

    def doing(self, rank: int) -> str:
        progress = self.progress.get(rank)
        return progress.doing if progress is not None else ""


class StackCall:
    """Asks every rank of a host for its stacks, which land in its log."""

    def __init__(self, host: HostFiles, watch: RankWatch, ranks: Mapping[int, Process]) -> None:
        self._host = host
        self._watch = watch
        self._ranks = dict(ranks)
        self._stopped = {rank: kernel.is_stopped(p.pid) for rank, p in self._ranks.items()}
        self._logs = {rank: rank_log(host, rank) for rank in self._ranks}
        self._starts = {rank: size_of(log) for rank, log in self._logs.items()}
        self._asked: set[int] = set()
        self._seen: dict[int, str] = {}
        self._changed = 0.0  # when what they have written was last seen to change
        for rank, process in self._ranks.items():
            # To a process without a handler the signal would be the end.
            if not self._stopped[rank] and kernel.catches(process.pid, STACK_SIGNAL):
                self._asked |= {rank} if processes.send(process, STACK_SIGNAL) else set()

    def answers(self) -> dict[int, str]:
        """The stacks so far, by rank."""
        texts = {rank: self._stack(rank) for rank in self._asked}
        return {rank: text for rank, text in texts.items() if text}

    def complete(self, now: float) -> bool:
        """Whether all have answered, and have written no more for a moment.

        A rank writes its stacks word by word, and may be held up between two of them.

        Args:
            now: of ``time.monotonic()``; to be asked again and again.
        """
        answers = self.answers()
        if answers != self._seen:
            self._seen, self._changed = answers, now
        return len(answers) == len(self._asked) and now - self._changed >= _SETTLED_SECONDS

    def ranks(self) -> tuple[RankProgress, ...]:
        """How far every rank of the host is."""
        answers = self.answers()
        return tuple(
            RankProgress(
                host=self._host.name,
                rank=rank,
                step=self._watch.step(rank),
                doing=self._watch.doing(rank),
                stopped=self._stopped[rank],
                # Who cannot be asked is not to be blamed for its silence.
                answered=rank in answers or (rank not in self._asked and not self._stopped[rank]),
                stack=answers.get(rank, ""),
                log=self._logs[rank],
            )
            for rank in sorted(self._ranks)
        )

    def _stack(self, rank: int) -> str:
        """The main thread's part of what faulthandler wrote."""
        try:
            with self._logs[rank].open("rb") as file:
                file.seek(self._starts[rank])
                text = file.read(1 << 18).decode("utf-8", "replace")
        except OSError:
            return ""
        _, found, rest = text.rpartition("Current thread ")
        return (found + rest).rstrip()[:MAX_STACK_CHARACTERS] if found else ""


def size_of(path: Path) -> int:
    """Bytes of a file; 0 where there is none."""
    try:
        return os.stat(path).st_size  # noqa: PTH116 - once a rank
    except OSError:
        return 0
