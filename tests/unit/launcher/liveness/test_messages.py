"""Tests that messages survive encoding unchanged, and that other bytes are never decoded to one."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.accelerators.health import DeviceReading, Rate
from flagscale.flight_records import FlightRecord, RecordedGroup, RecordedOperation
from flagscale.health.messages import DeviceMeasurement, HealthCommand, HealthEvent, PairRound
from flagscale.launcher.liveness.diagnosis import Failure, FailureKind, FailureReport
from flagscale.launcher.liveness.messages import (
    MAX_MESSAGE_BYTES,
    AttemptEnded,
    Departure,
    DumpStacks,
    EndAttempt,
    EndHealthCheck,
    FinishJob,
    HandOver,
    HealthReply,
    Heartbeat,
    Hello,
    HostMessage,
    HostProgress,
    HostStatus,
    JobState,
    JobStateAccepted,
    KeepAlive,
    LastRecords,
    MeasureHealth,
    Order,
    PauseAttempt,
    RankExit,
    RankFailed,
    RankProgress,
    RankStacks,
    ShareJobState,
    StartAttempt,
    StopJob,
    StopSignalled,
    decode,
    encode,
)
from flagscale.launcher.liveness.protocol import MAX_FRAME_BYTES

FAILURE = Failure("h1", 3, -9, "ended 'so'\n\u2028", "trace", Path("/a b/stderr.log"))
REPORT = FailureReport(FAILURE, 1.5, FailureKind.PROCESS_KILLED)
PROGRESS = HostProgress(
    HostStatus.RUNNING,
    joined=1,
    nproc=8,
    progress_count=7,
    in_busy_activity=False,
    has_run_long=True,
    exit_code=None,
    failure_report=None,
    ended_ranks=2,
    early_exits=(RankExit(3, 1234.5),),
)
HEAD = (3, 0, 1234.5)
RANK_FIELDS: dict[str, Any] = {
    **{"host": "h", "rank": 0, "step": None, "doing": "", "stopped": True, "answered": False},
    **{"stack": "", "log": Path("l")},
}
RECORD = FlightRecord(
    rank=0,
    request="raw-1",
    count=7,
    groups=(RecordedGroup("0", "gloo", "default_pg", "0-3"),),
    operations=(
        RecordedOperation(0, 1, "all_reduce", "[4] Float", 4, False, True, 1.5, 600.0),
        RecordedOperation(0, 1, "send", "[] Float", 1, True, False, 1.5, 0.0, peer=3, sends=True),
    ),
)
DEVICE = DeviceMeasurement(
    "GPU 0",
    "H200",
    rates=(Rate("matrix product", 672.0, "TFLOP/s"),),
    reading=DeviceReading(faults={"ecc": "2 errors"}, widths={"links": 18.0}),
)
JOB_STATE = JobState(
    term=1,
    revision=7,
    coordinator=2,
    electorates=((0, 1, 2), (1, 2)),
    attempt=3,
    places=(2, 1),
    departures=(Departure(0, FAILURE), Departure(3, FAILURE, "sick: its memory is broken")),
    successors=((0, 2),),
    restarts=((0, FAILURE), (1, None)),
    replacements=1,
    ranks_have_joined=True,
)
FROM_HOST = (
    Hello(*HEAD, replace(PROGRESS, exit_code=1, failure_report=REPORT)),
    Heartbeat(*HEAD, PROGRESS),
    AttemptEnded(*HEAD, replace(PROGRESS, exit_code=0)),
    RankFailed(*HEAD, REPORT),
    RankStacks(
        *HEAD,
        (RankProgress(**RANK_FIELDS),) * 2,
        1,
    ),
    RankStacks(*HEAD, (), 3),
    LastRecords(*HEAD, (RankProgress(**RANK_FIELDS, place="`f` at x.py:1", record=RECORD),)),
    HealthReply(*HEAD, 7, None, "no torch"),
    HealthReply(*HEAD, 8, HealthEvent("measured", devices=(DEVICE,))),
    StopSignalled(*HEAD, 15, None),
    StopSignalled(*HEAD, 2, FAILURE),
    Hello(*HEAD, PROGRESS, JOB_STATE),
    JobStateAccepted(*HEAD, *JOB_STATE.version),
)
ORDERS = (
    KeepAlive(),
    ShareJobState(JOB_STATE),
    HandOver(FAILURE),
    StartAttempt(2),
    StartAttempt(2, (0, 3, 2)),
    EndAttempt(0, FAILURE),
    PauseAttempt(1),
    DumpStacks(1, 3),
    MeasureHealth(1, None),
    MeasureHealth(2, HealthCommand(0.3)),
    MeasureHealth(3, HealthCommand(0.15, PairRound("0/0/1", 2, "10.0.0.1", 4711, True, 8))),
    EndHealthCheck(),
    StopJob(signal.SIGTERM, None),
    FinishJob(FAILURE),
)


@pytest.mark.parametrize("message", FROM_HOST, ids=lambda message: type(message).__name__)
def test_a_host_s_message_survives_the_wire(message: HostMessage) -> None:
    assert decode(HostMessage, encode(message)) == message
    assert decode(Order, encode(message)) is None


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_order_survives_the_wire(order: Order) -> None:
    assert decode(Order, encode(order)) == order
    assert decode(HostMessage, encode(order)) is None


def test_every_kind_is_tried() -> None:
    assert {type(message) for message in FROM_HOST} == set(HostMessage.__subclasses__())
    assert {type(order) for order in ORDERS} == set(Order.__subclasses__())


def test_renamed_fields_keep_their_names_on_the_wire() -> None:
    """Agents of other versions must be able to read the messages."""
    record = json.loads(encode(replace(FROM_HOST[0], progress=replace(PROGRESS, exit_code=1))))
    assert record.keys() == {"kind", "host", "attempt", "sent", "position", "job_state"}
    assert list(record["position"]) == [
        *("status", "joined", "nproc", "moves", "busy", "lived", "ended", "report"),
        *("ended_ranks", "early_exits", "overdue_since"),
    ]
    record = json.loads(encode(RankFailed(*HEAD, REPORT)))
    assert record.keys() == {"kind", "host", "attempt", "sent", "report"}
    assert record["report"].keys() == {"failure", "time", "severity"}


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=5)
    | st.sampled_from(["running", "\ud800", 1 << 80, 10**400, 15]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


def _value_paths(record: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Yield the path to every value of a record."""
    items = record.items() if isinstance(record, dict) else ()
    items = enumerate(record) if isinstance(record, list) else items
    return [path, *(spot for key, value in items for spot in _value_paths(value, (*path, key)))]


@given(st.sampled_from([*FROM_HOST, *ORDERS]), st.data())
def test_altered_message_is_valid_or_ignored(
    message: HostMessage | Order, data: st.DataObject
) -> None:
    record = json.loads(encode(message))
    path = data.draw(st.sampled_from(_value_paths(record)[1:]))
    inner = record
    for key in path[:-1]:
        inner = inner[key]
    if isinstance(inner, dict) and data.draw(st.booleans()):
        del inner[path[-1]]
    else:
        inner[path[-1]] = data.draw(VALUES)
    payload = json.dumps(record).encode()
    for decoded in (decode(HostMessage, payload), decode(Order, payload)):
        # A decoded message is valid and printable, and can be forwarded.
        if decoded is not None:
            assert json.loads(encode(decoded)).keys() <= record.keys()
            str(decoded).encode()
            assert decode(
                HostMessage if isinstance(decoded, HostMessage) else Order, encode(decoded)
            )


@given(st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_arbitrary_bytes_are_ignored(payload: bytes) -> None:
    assert decode(HostMessage, payload) is None
    assert decode(Order, payload) is None


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b'{"kind":"KeepAlive","x":' + b"1" * 5000 + b"}", id="a-long-number"),
        pytest.param(b'{"kind":"Order"}', id="the-family-itself"),
        pytest.param(b'{"kind":["KeepAlive"]}', id="no-name"),
        pytest.param(
            encode(StopSignalled(0, 0, 0.0, 15, None)).replace(b"0.0", b"NaN"), id="no-time"
        ),
        pytest.param(
            encode(StopSignalled(0, 0, 0.0, 15, None)).replace(b"15", b"true"), id="no-int"
        ),
        pytest.param(encode(StartAttempt(7)).replace(b"7", b"7.0"), id="no-whole-number"),
    ],
)
def test_malformed_messages_are_ignored(payload: bytes) -> None:
    assert decode(Order, payload) is None
    assert decode(HostMessage, payload) is None


def test_longest_failure_can_be_forwarded() -> None:
    """The host encodes it as compactly as possible, the coordinator at its maximum length."""
    empty = RankFailed(0, 0, 0.0, replace(REPORT, failure=replace(FAILURE, traceback="")))
    remaining = MAX_MESSAGE_BYTES - len(encode(empty))
    failure = replace(FAILURE, traceback="\U0001f600" * (remaining // 4))
    payload = json.dumps(json.loads(encode(empty)), ensure_ascii=False, separators=(",", ":"))
    payload = payload.replace('"traceback":""', f'"traceback":"{failure.traceback}"')
    decoded = decode(HostMessage, payload.encode())
    assert isinstance(decoded, RankFailed)
    assert decoded.failure_report.failure == failure
    assert len(encode(EndAttempt(0, decoded.failure_report.failure))) <= MAX_FRAME_BYTES
    assert decode(HostMessage, (payload + " " * 100).encode()) is None


def test_undecodable_text_is_escaped() -> None:
    """A file name may not be valid UTF-8."""
    decoded = decode(Order, encode(FinishJob(replace(FAILURE, reason="no file \udcff"))))
    assert isinstance(decoded, FinishJob)
    assert decoded.failure is not None
    assert decoded.failure.reason == "no file \\udcff"
