"""Snapshots of a device's memory (``record_memory_history``), for https://pytorch.org/memory_viz.

Allocations and their stacks are recorded from the start. A snapshot with them is written after a
step, and by a rank that runs out of memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from flagscale.train.device import Device


class MemoryHistory:
    """Recorder of a rank's allocations, if the arguments ask for it."""

    def __init__(self, args: argparse.Namespace, rank: int, device: Device) -> None:
        """Start to record, before the rank allocates anything."""
        self._device = device
        self._rank = rank
        self._step = args.memory_snapshot_step
        self._writes_step = rank in (args.profile_ranks or (0,))
        self._path = Path(args.memory_snapshot_path or _default_path(args))
        is_requested = bool(args.record_memory_history)
        self._is_recording = is_requested and device.accelerator.record_memory_history()
        self.lacks_support = is_requested and not self._is_recording
        """True if recording is requested, but not supported by the device."""
        self.log: Callable[[str], None] = lambda line: print(line, flush=True)
        """Prints a line."""

    def after_step(self, step: int) -> None:
        """Write a snapshot if it is due after this step."""
        if step == self._step and self._writes_step:
            self.dump(f"step{step}")

    def dump(self, moment: str) -> Path | None:
        """Write a snapshot; return its path, or None if nothing is recorded or it cannot be
        written.
        """
        if not self._is_recording:
            return None
        path = self._path.with_name(
            f"{self._path.stem}_rank{self._rank}_{moment}{self._path.suffix or '.pickle'}"
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._device.accelerator.dump_memory_history(path)
            path.chmod(0o600)
        except (OSError, RuntimeError) as error:
            self.log(f"memory snapshot: {path} cannot be written: {error}")
            return None
        self.log(f"memory snapshot of rank {self._rank}: {path}")
        return path


def _default_path(args: argparse.Namespace) -> str:
    return str(Path(args.profile_dir or args.tensorboard_dir or ".") / "memory.pickle")
