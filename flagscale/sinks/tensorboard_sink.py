"""TensorBoard: event files in ``tensorboard_dir``."""

from __future__ import annotations

import itertools
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

from flagscale.errors import FlagscaleError
from flagscale.sinks.base import MetricsRecord, MetricsSink, Outcome, TrainingRun

_MIN_QUEUE_SIZE = 100
"""Records that wait at least, so that short steps are not dropped before the thread runs."""
_FILE_VERSION = "brain.Event:2"
_REQUIRED_FREE_BYTES = 256 * 1024
"""Free space required before a new event file is started."""


class TensorBoardSink(MetricsSink):
    """Writer of event files. After an error, a new file continues with the records that wait.

    The writer of TensorBoard's own package has another thread, whose errors arrive late and
    with unknown losses. So only its format of records is used.
    """

    name = "tensorboard"
    title = "TensorBoard"
    key = "tensorboard_dir"
    package = "tensorboard"
    _file_numbers: ClassVar[itertools.count[int]] = itertools.count()
    _descriptor: int | None = None

    def explain_unusable(
        self, arguments: Mapping[str, Any], environment: Mapping[str, str]
    ) -> tuple[str, str] | None:
        directory = Path(arguments["tensorboard_dir"])
        try:
            directory.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=directory).close()
        except OSError as error:
            return (
                f"{directory} cannot be written: {error.strerror}",
                "set tensorboard_dir to a directory that can be written, or to null to do without",
            )
        return None

    def max_waiting_records(self, arguments: Mapping[str, Any]) -> int:
        return max(_MIN_QUEUE_SIZE, int(arguments["tensorboard_queue_size"]))

    def open(self, run: TrainingRun) -> None:
        self.close("failed")
        self._directory = Path(run.arguments["tensorboard_dir"])
        with self._explained_errors():
            self._check_free_space()

    def _check_free_space(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._directory) as file:
            file.write(bytes(_REQUIRED_FREE_BYTES))
            file.flush()
            os.fsync(file.fileno())

    def log_batch(self, records: Sequence[MetricsRecord]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        buffer = BytesIO()
        writer = RecordWriter(buffer)
        if self._descriptor is None:
            header = Event(wall_time=time.time(), file_version=_FILE_VERSION)
            writer.write(header.SerializeToString())
        for record in records:
            values = [
                Summary.Value(tag=tag, simple_value=value) for tag, value in record.values.items()
            ]
            event = Event(wall_time=record.time, step=record.step, summary=Summary(value=values))
            writer.write(event.SerializeToString())
        with self._explained_errors():
            self._write(buffer.getvalue())

    def close(self, outcome: Outcome) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _write(self, data: bytes) -> None:
        """Append to the event file. Start one if there is none; it is removed if it stays empty."""
        path = None
        if self._descriptor is None:
            number = next(self._file_numbers)
            name = f"{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.{number}"
            path = self._directory / f"events.out.tfevents.{name}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o644)
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            if path is not None:
                with suppress(OSError):
                    path.unlink()
            raise

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        """Name the directory in errors."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            message = f"tensorboard_dir: {self._directory} cannot be written: {reason}"
            raise FlagscaleError(message) from error
