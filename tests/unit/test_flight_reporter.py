"""Tests of the digest of torch's flight recorder. Entries are as torch 2.11 and 2.13 write them."""

from __future__ import annotations

from typing import Any

import pytest

from flagscale.flight_records import RecordedGroup, RecordedOperation, format_ranks
from flagscale.flight_reporter import build_record

RANKS = (2, 5, 7)
GROUPS = {"0": (RecordedGroup("0", "", "default_pg", format_ranks(RANKS)), RANKS)}


def entry(name: str, sequence: int = 1, p2p: int = 0, **fields: Any) -> dict[str, Any]:
    """Return an entry of a pending operation; ``fields`` replace others."""
    return {
        **{"profiling_name": name, "process_group": ("0", "default_pg"), "record_id": 0},
        **{"collective_seq_id": sequence, "p2p_seq_id": p2p, "is_p2p": p2p > 0},
        **{"input_sizes": [[4, 2]], "input_dtypes": ["Float"], "state": "scheduled"},
        **{"retired": False, "time_created_ns": 1_500_000_000, "timeout_ms": 600_000, **fields},
    }


def operations(*entries: dict[str, Any]) -> tuple[RecordedOperation, ...]:
    return build_record(5, "x", entries, GROUPS).operations


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        pytest.param({}, (False, False), id="scheduled"),
        pytest.param({"retired": True}, (False, True), id="gloo-after-its-end"),
        pytest.param({"state": "started"}, (True, False), id="started"),
        pytest.param({"state": "completed", "retired": True}, (True, True), id="completed"),
    ],
)
def test_state(fields: dict[str, Any], state: tuple[bool, bool]) -> None:
    (operation,) = operations(entry("gloo:all_reduce", 3, **fields))
    assert (operation.started, operation.ended) == state
    assert (operation.name, operation.sequence, operation.peer) == ("all_reduce", 3, None)
    assert (operation.inputs, operation.elements) == ("[4, 2] Float", 8)
    assert (operation.time, operation.timeout) == (1.5, 600.0)


def test_messages_name_the_global_rank_of_their_peer() -> None:
    sent, received = operations(
        entry("nccl:send 1->0", 1, 1), entry("nccl:recv 1<-2", 1, 2, time_created_ns=2 * 10**9)
    )
    assert (sent.peer, sent.sends, sent.sequence) == (2, True, 1)
    assert (received.peer, received.sends, received.sequence) == (7, False, 2)


def test_coalesced_messages_have_the_state_of_their_batch() -> None:
    done = {"state": "completed", "retired": True}
    batch = [entry("nccl:send 1->0", 1, 1), entry("nccl:recv 1<-0", 1, 1)]
    pending = [entry("nccl:send 1->0", 1, 2), entry("nccl:coalesced", 1, 2, input_sizes=[])]
    result = operations(*batch, entry("nccl:coalesced", 1, 1, **done), *pending)
    assert [(o.name, o.sequence, o.ended) for o in result] == [
        ("send", 1, True),
        ("recv", 1, True),
        ("send", 2, False),
    ]


def test_latest_operations_of_every_group_are_kept() -> None:
    other = [entry("gloo:barrier", n, process_group=("1", "x"), retired=True) for n in range(1, 5)]
    many = [entry("gloo:all_reduce", n, retired=True, record_id=n) for n in range(1, 2000)]
    pending = entry("gloo:all_reduce", 2000, record_id=2000)
    record = build_record(5, "x", [*other, *many, pending], GROUPS)
    assert [group.name for group in record.groups] == ["1", "0"]
    assert [o.sequence for o in record.operations if o.group == 0] == [3, 4]
    assert [o.sequence for o in record.operations if o.group == 1][-1] == 2000
    assert not record.operations[-1].ended
    assert len(record.operations) <= 32
    assert record.count == 2001
