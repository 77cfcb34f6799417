"""Export of each checkpoint for transformers and peft (``export_each_checkpoint``).

Rank 0 starts a process that reads the complete checkpoint tensor by tensor and writes the exports,
while training continues. An export gets its name when it is complete, and is deleted together with
its checkpoint.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from flagscale.train.checkpoint.collective_errors import describe_error
from flagscale.train.checkpoint.formats.export import EXPORT_ARGUMENTS
from flagscale.train.checkpoint.store import CheckpointStore

_MODULE = "flagscale.train.checkpoint.formats.export"


class CheckpointExporter:
    """Exports checkpoints of a run, one at a time. Only rank 0 has one."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._settings = {name: getattr(args, name) for name in EXPORT_ARGUMENTS}
        self._checkpoints = CheckpointStore(Path(args.save))
        roots = (args.export_huggingface, args.export_peft)
        self._targets = [CheckpointStore(Path(root)) for root in roots if root]
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile("a+")  # noqa: SIM115 - open as long as the run
        self._iteration = 0
        self._messages: list[str] = []

    @property
    def source(self) -> Path | None:
        """Checkpoint that is being read, which must not be deleted."""
        is_running = self._process is not None and self._process.poll() is None
        return self._checkpoints.path(self._iteration) if is_running else None

    def start(self, iteration: int) -> None:
        """Export a complete checkpoint, unless an earlier export is still under way."""
        self._collect()
        if self._process is not None:
            self._messages.append(
                f"the checkpoint of iteration {iteration} is not exported now, because the export "
                f"of iteration {self._iteration} is still under way. The last checkpoint of a "
                f"completed run is exported at its end; {self._describe_convert(iteration)} "
                "exports any"
            )
            return
        self._iteration = iteration
        try:
            self._start_process()
        except OSError as error:  # the checkpoint itself is complete
            self._add_failure(describe_error(error))

    def _start_process(self) -> None:
        # The run went back to an earlier checkpoint and reached this iteration again.
        self.remove([self._checkpoints.path(self._iteration)])
        for target in self._targets:
            target.remove_leftovers()
        self._errors.truncate(0)
        settings = {**self._settings, "iteration": self._iteration}
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, json.dumps(settings)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )

    def remove(self, checkpoints: Iterable[Path]) -> None:
        """Delete the exports of checkpoints."""
        names = [path.name for path in checkpoints]
        for target in self._targets:
            target.remove(target.root / name for name in names)

    def pop_messages(self) -> list[str]:
        """Return what has happened since the last call, one line for each export."""
        self._collect()
        messages, self._messages = self._messages, []
        return messages

    def close(self, *, finish: bool) -> None:
        """Wait for the export under way, or end it if ``finish`` is false."""
        if self._process is None:
            return
        if finish:
            self._finish(self._process)
            return
        self._process.kill()
        self._process.wait()
        self._process = None
        self._messages.append(
            f"the export of iteration {self._iteration} was ended; "
            f"{self._describe_convert(self._iteration)} does it"
        )

    def _collect(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            self._finish(self._process)

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for a process and record its result."""
        process.wait()
        self._process = None
        if process.returncode:
            self._errors.seek(0)
            errors = self._errors.read().strip()
            reason = errors.rpartition("\n")[2] or f"exit code {process.returncode}"
            self._add_failure(reason.strip())
            return
        name = self._checkpoints.path(self._iteration).name
        is_best = self._checkpoints.best_iteration() == self._iteration
        for target in self._targets:
            if (target.root / name).is_dir():
                self._messages.append(f"exported to {target.root / name}")
                if is_best:
                    self._mark_best(target)

    def _mark_best(self, target: CheckpointStore) -> None:
        try:
            target.mark_best(self._iteration)
        except OSError as error:
            name = self._checkpoints.path(self._iteration).name
            reason = describe_error(error)
            self._messages.append(f"{target.root / name} cannot be marked as the best: {reason}")

    def _add_failure(self, reason: str) -> None:
        self._messages.append(f"the export of iteration {self._iteration} failed: {reason}")

    def _describe_convert(self, iteration: int) -> str:
        return f"`flagscale convert {self._checkpoints.path(iteration)} DIR`"
