"""Tests of the delivery of metrics: sinks that fail, hang or are slow neither stop nor slow it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from support.waiting import PATIENCE_SECONDS, wait_for

from flagscale.sinks import delivery
from flagscale.sinks.base import MetricsRecord, MetricsSink, Outcome, TrainingRun
from flagscale.sinks.delivery import MetricsDelivery, close_running_deliveries


class ListSink(MetricsSink):
    """Sink that keeps what it receives. Methods raise the errors in ``failures``, one each call."""

    name = "list"
    title = "List"

    def __init__(self, max_waiting: int = 1000) -> None:
        self.steps: list[int] = []
        self.calls: list[str] = []
        self.failures: list[BaseException | None] = []
        self.gate = threading.Event()
        self.gate.set()
        self._max_waiting = max_waiting

    def max_waiting_records(self, arguments: object) -> int:
        return self._max_waiting

    def open(self, run: TrainingRun) -> None:
        self._call("open")

    def log_batch(self, records: Sequence[MetricsRecord]) -> None:
        self._call("log")
        self.gate.wait(PATIENCE_SECONDS)
        self.steps += [record.step for record in records]

    def close(self, outcome: Outcome) -> None:
        self._call(outcome)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.failures and (error := self.failures.pop(0)) is not None:
            raise error


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(delivery, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(delivery, "MAX_RETRY_SECONDS", 0.02)
    _set_close_seconds(monkeypatch, PATIENCE_SECONDS)
    yield
    assert close_running_deliveries() in (True, False)


def _set_close_seconds(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    limits = dict.fromkeys(delivery.CLOSE_SECONDS, seconds)
    monkeypatch.setattr(delivery, "CLOSE_SECONDS", limits)


def _start(*sinks: MetricsSink) -> MetricsDelivery:
    started = MetricsDelivery(sinks, {})
    started.start(0, {})
    return started


@pytest.fixture(autouse=True)
def own_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the threads of each test a name of their own: sinks of others may never answer."""
    monkeypatch.setattr(delivery, "_THREAD_PREFIX", f"{request.node.name}-")


def _texts(started: MetricsDelivery) -> list[str]:
    return [message.text for message in started.pop_messages()]


def test_records_arrive_in_order_and_the_sink_is_closed() -> None:
    sinks = ListSink(2000), ListSink(2000)
    started = _start(*sinks)
    for step in range(1200):
        started.log(step, {"loss": 1.0})
    started.close("finished")
    for sink in sinks:
        assert sink.steps == list(range(1200))
        assert sink.calls[-1] == "finished"
    assert not close_running_deliveries()


@pytest.mark.parametrize(
    "failures",
    [
        pytest.param([ConnectionError("refused\nmore")], id="open"),
        pytest.param([None, ConnectionError("refused")], id="log"),
        pytest.param([None, ConnectionError("refused"), ConnectionError("x"), None], id="reopen"),
        pytest.param([SystemExit("refused")], id="exit"),
    ],
)
def test_a_failing_sink_is_reported_once_and_gets_everything_later(
    failures: list[BaseException | None],
) -> None:
    sink = ListSink()
    sink.failures = failures
    started = _start(sink)
    for step in range(5):
        started.log(step, {"loss": 1.0})
    wait_for(lambda: len(sink.steps) == 5)
    started.close("finished")
    assert sink.steps == [0, 1, 2, 3, 4]
    failure, recovery = started.pop_messages()
    assert failure.is_warning
    assert failure.text.startswith("List: refused; its metrics wait")
    assert not recovery.is_warning
    assert recovery.text == "List: takes metrics again, from step 0 on"


def test_logins_in_errors_are_hidden() -> None:
    sink = ListSink()
    sink.failures = [ConnectionError("API request to https://me:s3cr3t@host/api failed")]
    started = _start(sink)
    wait_for(lambda: len(sink.calls) > 1)
    started.close("finished")
    assert _texts(started)[0].startswith("List: API request to https://host/api failed;")


def test_rejected_records_are_dropped() -> None:
    sink = ListSink()
    sink.failures = [None, ValueError("bad name")]
    started = _start(sink)
    started.log(1, {"": 1.0})
    wait_for(lambda: "log" in sink.calls)
    started.log(2, {"loss": 1.0})
    started.close("finished")
    assert sink.steps == [2]
    assert _texts(started) == ["List: rejects metrics, which are dropped: bad name"]


def test_the_oldest_records_are_dropped_if_too_many_wait() -> None:
    sink = ListSink(max_waiting=3)
    sink.gate.clear()
    started = _start(sink)
    started.log(0, {"loss": 1.0})
    wait_for(lambda: "log" in sink.calls)
    for step in range(1, 10):
        started.log(step, {"loss": 1.0})
    sink.gate.set()
    started.close("finished")
    assert sink.steps == [0, 7, 8, 9]
    warning, recovery = _texts(started)
    assert "more than 3 records wait for it; the oldest are dropped" in warning
    assert "6 records that waited too long were dropped" in recovery


def test_a_hanging_sink_delays_neither_steps_nor_others_nor_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery, "SILENCE_SECONDS", 0.05)
    _set_close_seconds(monkeypatch, 0.3)
    hanging, healthy = ListSink(), ListSink()
    hanging.title = "Hanging"
    hanging.gate.clear()
    started = _start(hanging, healthy)
    begin = time.monotonic()
    for step in range(500):
        started.log(step, {"loss": 1.0})
    wait_for(lambda: len(healthy.steps) == 500)
    texts: list[str] = []

    def is_reported() -> bool:
        texts.extend(text for text in _texts(started) if text.startswith("Hanging: "))
        return bool(texts)

    wait_for(is_reported)
    is_reported()
    (report,) = texts
    assert "has not answered for" in report
    started.close("stopped")
    assert time.monotonic() - begin < PATIENCE_SECONDS, "it has waited for the sink"
    assert healthy.steps == list(range(500))
    texts.clear()
    assert is_reported()
    assert "does not answer at the end of the run" in texts[-1]
    assert close_running_deliveries(), "its client may hang at exit"
    hanging.gate.set()
    wait_for(lambda: hanging.calls[-1] == "stopped")


def test_a_sink_that_is_down_until_the_end_loses_its_records() -> None:
    sink = ListSink()
    sink.failures = [ConnectionError("refused")] * 1000
    started = _start(sink)
    started.log(1, {"loss": 1.0})
    started.close("finished")
    assert _texts(started)[-1] == "List: 1 records were not delivered"
    assert sink.steps == []


def test_a_failed_run_delivers_what_waits() -> None:
    sink = ListSink()
    started = _start(sink)
    started.log(1, {"loss": float("nan")})
    assert not close_running_deliveries()
    assert (sink.steps, sink.calls[-1]) == ([1], "failed")
