"""Messages survive the wire as they are; nothing else becomes one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.launcher.liveness.diagnosis import Failure, Report, Severity
from flagscale.launcher.liveness.messages import (
    MAX_MESSAGE_BYTES,
    Beat,
    DumpStacks,
    EndAttempt,
    Ended,
    FinishJob,
    FromHost,
    Hello,
    HostStatus,
    KeepAlive,
    Order,
    Position,
    RankProgress,
    Reported,
    Stacks,
    StartAttempt,
    StopJob,
    Stopping,
    decode,
    encode,
)
from flagscale.launcher.liveness.protocol import MAX_FRAME_BYTES

FAILURE = Failure("h1", 3, -9, "ended 'so'\n\u2028", "trace", Path("/a b/stderr.log"))
REPORT = Report(FAILURE, 1.5, Severity.KILLED)
POSITION = Position(HostStatus.RUNNING, 1, 8, 7, False, True, None, None)
HEAD = (3, 0, 1234.5)
FROM_HOST = (
    Hello(*HEAD, replace(POSITION, ended=1, report=REPORT)),
    Beat(*HEAD, POSITION),
    Ended(*HEAD, replace(POSITION, ended=0)),
    Reported(*HEAD, REPORT),
    Stacks(*HEAD, (RankProgress("h", 0, None, "", True, False, "", Path("l")),) * 2),
    Stacks(*HEAD, ()),
    Stopping(*HEAD, 15, None),
    Stopping(*HEAD, 2, FAILURE),
)
ORDERS = (
    KeepAlive(),
    StartAttempt(2),
    EndAttempt(0, FAILURE),
    DumpStacks(1),
    StopJob(15, None),
    FinishJob(FAILURE),
)


@pytest.mark.parametrize("message", FROM_HOST, ids=lambda message: type(message).__name__)
def test_a_host_s_message_survives_the_wire(message: FromHost) -> None:
    assert decode(FromHost, encode(message)) == message
    assert decode(Order, encode(message)) is None


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_order_survives_the_wire(order: Order) -> None:
    assert decode(Order, encode(order)) == order
    assert decode(FromHost, encode(order)) is None


def test_every_kind_is_tried() -> None:
    assert {type(message) for message in FROM_HOST} == set(FromHost.__subclasses__())
    assert {type(order) for order in ORDERS} == set(Order.__subclasses__())


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


def _spots(record: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value of a record."""
    items = record.items() if isinstance(record, dict) else ()
    items = enumerate(record) if isinstance(record, list) else items
    return [way, *(spot for key, value in items for spot in _spots(value, (*way, key)))]


@given(st.sampled_from([*FROM_HOST, *ORDERS]), st.data())
def test_whatever_is_altered_is_a_message_again_or_nothing(
    message: FromHost | Order, data: st.DataObject
) -> None:
    record = json.loads(encode(message))
    way = data.draw(st.sampled_from(_spots(record)[1:]))
    inner = record
    for key in way[:-1]:
        inner = inner[key]
    if isinstance(inner, dict) and data.draw(st.booleans()):
        del inner[way[-1]]
    else:
        inner[way[-1]] = data.draw(VALUES)
    payload = json.dumps(record).encode()
    for found in (decode(FromHost, payload), decode(Order, payload)):
        # What is taken for a message is one, whole and printable, and can be passed on.
        if found is not None:
            assert json.loads(encode(found)).keys() <= record.keys()
            str(found).encode()
            assert decode(FromHost if isinstance(found, FromHost) else Order, encode(found))


@given(st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_other_bytes_are_no_message(payload: bytes) -> None:
    assert decode(FromHost, payload) is None
    assert decode(Order, payload) is None


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b'{"kind":"KeepAlive","x":' + b"1" * 5000 + b"}", id="a-long-number"),
        pytest.param(b'{"kind":"Order"}', id="the-family-itself"),
        pytest.param(b'{"kind":["KeepAlive"]}', id="no-name"),
        pytest.param(encode(Stopping(0, 0, 0.0, 15, None)).replace(b"0.0", b"NaN"), id="no-time"),
        pytest.param(encode(Stopping(0, 0, 0.0, 15, None)).replace(b"15", b"true"), id="no-int"),
        pytest.param(encode(StartAttempt(7)).replace(b"7", b"7.0"), id="no-whole-number"),
    ],
)
def test_what_is_odd_is_passed_over(payload: bytes) -> None:
    assert decode(Order, payload) is None
    assert decode(FromHost, payload) is None


def test_the_longest_failure_can_be_passed_on_to_all() -> None:
    """Written as shortly as can be by the host, and by us as long as it gets."""
    empty = Reported(0, 0, 0.0, replace(REPORT, failure=replace(FAILURE, traceback="")))
    left = MAX_MESSAGE_BYTES - len(encode(empty))
    failure = replace(FAILURE, traceback="\U0001f600" * (left // 4))
    payload = json.dumps(json.loads(encode(empty)), ensure_ascii=False, separators=(",", ":"))
    payload = payload.replace('"traceback":""', f'"traceback":"{failure.traceback}"')
    found = decode(FromHost, payload.encode())
    assert isinstance(found, Reported)
    assert found.report.failure == failure
    assert len(encode(EndAttempt(0, found.report.failure))) <= MAX_FRAME_BYTES
    assert decode(FromHost, (payload + " " * 100).encode()) is None


def test_text_that_is_no_text_is_spelled_out() -> None:
    """A file's name may be no UTF-8."""
    found = decode(Order, encode(FinishJob(replace(FAILURE, reason="no file \udcff"))))
    assert isinstance(found, FinishJob)
    assert found.failure is not None
    assert found.failure.reason == "no file \\udcff"
