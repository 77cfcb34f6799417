"""Delivery of metrics to sinks, each from its own thread, so that none can stop or slow training.

Training only appends records to bounded queues. A sink that is down is opened again after a while,
first one second, then up to a minute; its records wait, and are sent in batches. If more than
:meth:`~.base.MetricsSink.max_waiting_records` wait, the oldest are dropped. The log of the run
reports when a sink fails, does not answer or drops records, once until it works again.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flagscale.errors import FlagscaleError
from flagscale.sinks.base import MetricsRecord, MetricsSink, Outcome, TrainingRun
from flagscale.sinks.logins import remove_logins

FIRST_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0
SILENCE_SECONDS = 60.0
"""Time after which a call that has not returned is reported."""
CLOSE_SECONDS: Mapping[Outcome, float] = {"finished": 60.0, "stopped": 20.0, "failed": 5.0}
"""Time in which sinks have to take the last records, by the end of the run. A stopped run is killed
after a grace period of a minute, and the other hosts of a failed one wait for its end."""
_MAX_BATCH = 500
_THREAD_PREFIX = "metrics-"
_MAX_REASON_CHARACTERS = 300


class Message(NamedTuple):
    """Message of a sink for the log of the run."""

    text: str
    is_warning: bool


class SinkWorker:
    """Thread of one sink, with the queue of its records."""

    def __init__(self, sink: MetricsSink, arguments: Mapping[str, Any]) -> None:
        self.sink = sink
        self._max_waiting = sink.max_waiting_records(arguments)
        self._condition = threading.Condition()
        # All of these are guarded by the condition.
        self._waiting: deque[MetricsRecord] = deque()
        self._messages: deque[Message] = deque()
        self._outcome: Outcome | None = None
        self._dropped = 0
        # These belong to the thread.
        self._batch: Sequence[MetricsRecord] = ()
        self._is_open = self._is_failing = self._rejected = False
        self._retry_seconds = FIRST_RETRY_SECONDS
        # Written by the thread, read by the others.
        self._call_start: float | None = None
        self._reported_silence = False
        self._thread: threading.Thread | None = None

    def start(self, run: TrainingRun) -> None:
        """Start the thread, which opens the sink."""
        self._thread = threading.Thread(
            target=self._run, name=f"{_THREAD_PREFIX}{self.sink.name}", daemon=True, args=(run,)
        )
        self._thread.start()

    def submit(self, record: MetricsRecord) -> None:
        """Append a record to the queue. Never waits for the sink."""
        with self._condition:
            if len(self._waiting) >= self._max_waiting:
                self._waiting.popleft()
                self._dropped += 1
                if self._dropped == 1:
                    self._report_locked(
                        f"more than {self._max_waiting:,} records wait for it; the oldest are "
                        "dropped"
                    )
            self._waiting.append(record)
            self._condition.notify()

    def pop_messages(self) -> list[Message]:
        """Return the messages since the last call."""
        start = self._call_start
        with self._condition:
            is_silent = start is not None and time.monotonic() - start > SILENCE_SECONDS
            if is_silent and not self._reported_silence:
                self._reported_silence = True
                self._report_locked(
                    f"has not answered for {SILENCE_SECONDS:.0f} s; its metrics wait meanwhile"
                )
            messages = list(self._messages)
            self._messages.clear()
        return messages

    def request_end(self, outcome: Outcome) -> None:
        """Let the thread deliver what waits, close the sink and end."""
        with self._condition:
            self._outcome = self._outcome or outcome
            self._condition.notify()

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread; report the loss if it does not end."""
        if self._thread is None:
            return
        self._thread.join(max(0.0, seconds))
        if not self._thread.is_alive():
            return
        with self._condition:
            count = len(self._waiting) + len(self._batch)
            lost = f"; {count:,} records were not delivered" if count else ""
            self._report_locked(f"does not answer at the end of the run{lost}")

    # -- the thread ------------------------------------------------------------------------

    def _run(self, run: TrainingRun) -> None:
        while True:
            if not self._is_open and not self._open(run):
                if self._wait_for_retry():
                    continue
                break
            if not self._batch and not self._take_batch():
                break
            if not self._log_batch():
                if self._wait_for_retry():
                    continue
                break
        self._end()

    def _open(self, run: TrainingRun) -> bool:
        try:
            self._call_start = time.monotonic()
            self.sink.open(run)
        # A client may raise anything, even SystemExit.
        except BaseException as error:  # noqa: BLE001
            self._report_failure(error)
            return False
        finally:
            self._finish_call()
        self._is_open = True
        return True

    def _take_batch(self) -> bool:
        """Wait for records, and take some; return False at the end of the run."""
        with self._condition:
            while not self._waiting and self._outcome is None:
                self._condition.wait()
            self._batch = [
                self._waiting.popleft() for _ in range(min(len(self._waiting), _MAX_BATCH))
            ]
        return bool(self._batch)

    def _log_batch(self) -> bool:
        try:
            self._call_start = time.monotonic()
            self.sink.log_batch(self._batch)
        except (ValueError, TypeError) as error:
            if not self._rejected:
                self._rejected = True
                self._report(f"rejects metrics, which are dropped: {_describe_error(error)}")
        except BaseException as error:  # noqa: BLE001 - as above
            self._is_open = False
            self._report_failure(error)
            return False
        else:
            self._report_recovery()
        finally:
            self._finish_call()
        self._batch = ()
        return True

    def _wait_for_retry(self) -> bool:
        """Wait before the next attempt; return False if the run had ended before this one."""
        with self._condition:
            if self._outcome is not None:
                return False
            self._condition.wait_for(lambda: self._outcome is not None, self._retry_seconds)
        self._retry_seconds = min(2 * self._retry_seconds, MAX_RETRY_SECONDS)
        return True

    def _end(self) -> None:
        with self._condition:
            outcome = self._outcome or "failed"
            lost = len(self._batch) + len(self._waiting)
        if lost:
            self._report(f"{lost:,} records were not delivered")
        if self._is_open:
            try:
                self._call_start = time.monotonic()
                self.sink.close(outcome)
            except BaseException as error:  # noqa: BLE001 - as above
                self._report(f"could not be closed: {_describe_error(error)}")
            finally:
                self._finish_call()

    def _finish_call(self) -> None:
        self._call_start = None
        if self._reported_silence:
            self._reported_silence = False
            self._report("answers again", is_warning=False)

    # -- messages --------------------------------------------------------------------------

    def _report_failure(self, error: BaseException) -> None:
        if not self._is_failing:
            self._is_failing = True
            self._report(
                f"{_describe_error(error)}; its metrics wait, and it is tried again until it takes "
                "them"
            )

    def _report_recovery(self) -> None:
        with self._condition:
            dropped, self._dropped = self._dropped, 0
        if self._is_failing or dropped:
            lost = f"; {dropped:,} records that waited too long were dropped" if dropped else ""
            self._report(
                f"takes metrics again, from step {self._batch[0].step} on{lost}", is_warning=False
            )
        self._is_failing, self._retry_seconds = False, FIRST_RETRY_SECONDS

    def _report(self, text: str, *, is_warning: bool = True) -> None:
        with self._condition:
            self._report_locked(text, is_warning=is_warning)

    def _report_locked(self, text: str, *, is_warning: bool = True) -> None:
        # Errors of clients may contain addresses with passwords.
        line = remove_logins(f"{self.sink.display_name}: {text}")
        self._messages.append(Message(line, is_warning))

    def note(self, text: str) -> None:
        """Report a line that is no warning, from any thread."""
        with self._condition:
            self._messages.append(Message(remove_logins(text), is_warning=False))


class MetricsDelivery:
    """Delivery of the metrics of a training run to all sinks."""

    def __init__(self, sinks: Sequence[MetricsSink], arguments: Mapping[str, Any]) -> None:
        """Create the delivery; :meth:`start` opens the sinks.

        Args:
            sinks: sinks of the run.
            arguments: resolved arguments of the training program.
        """
        self._arguments = arguments
        self._workers = [SinkWorker(sink, arguments) for sink in sinks]
        self._is_closed = False

    def start(self, iteration: int, environment: Mapping[str, str]) -> None:
        """Open the sinks, each in its thread.

        Args:
            iteration: number of the step that training continues after; 0 for a new training.
            environment: environment of this process.
        """
        for worker in self._workers:
            run = TrainingRun(self._arguments, iteration, environment, worker.note)
            worker.start(run)
        if self._workers:
            _RUNNING.add(self)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the metrics of a step for all sinks."""
        record = MetricsRecord(step, time.time(), dict(values))
        for worker in self._workers:
            worker.submit(record)

    def pop_messages(self) -> list[Message]:
        """Return the messages of all sinks since the last call."""
        return [message for worker in self._workers for message in worker.pop_messages()]

    def close(self, outcome: Outcome) -> None:
        """Deliver what waits, and close the sinks, within :data:`CLOSE_SECONDS` in total."""
        if self._is_closed:
            return
        self._is_closed = True
        _RUNNING.discard(self)
        deadline = time.monotonic() + CLOSE_SECONDS[outcome]
        for worker in self._workers:
            worker.request_end(outcome)
        for worker in self._workers:
            worker.join(deadline - time.monotonic())


_RUNNING: weakref.WeakSet[MetricsDelivery] = weakref.WeakSet()


def close_running_deliveries() -> bool:
    """Close the deliveries of a training run that has failed.

    Returns:
        True if a sink of this process has not answered at the end of its run. Exit handlers of its
        client may hang, too.
    """
    for delivery in list(_RUNNING):
        delivery.close("failed")
    return any(thread.name.startswith(_THREAD_PREFIX) for thread in threading.enumerate())


def _describe_error(error: BaseException) -> str:
    """Return the first line of an error's message, not too long."""
    message = error.message if isinstance(error, FlagscaleError) else str(error)
    if isinstance(error, OSError) and error.strerror:
        message = error.strerror
    first_line = next((line.strip() for line in message.splitlines() if line.strip()), "")
    text = first_line or type(error).__name__
    if len(text) > _MAX_REASON_CHARACTERS:
        text = text[: _MAX_REASON_CHARACTERS - 1] + "…"
    return text
