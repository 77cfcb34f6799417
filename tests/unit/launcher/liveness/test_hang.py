"""Tests of the explanation of hangs from the flight records and stacks of ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.flight_records import (
    FlightRecord,
    RecordedGroup,
    RecordedOperation,
    format_ranks,
    parse_ranks,
)
from flagscale.launcher.liveness.hang import (
    describe_group,
    describe_ranks,
    explain_hang,
    find_user_frame,
)
from flagscale.launcher.liveness.messages import RankProgress

CLOCK = 1_800_000_000.0
SINCE = time.strftime("%H:%M:%S", time.localtime(CLOCK))
WORLD = RecordedGroup("0", "gloo", "default_pg", "0-3")
DATA = RecordedGroup("1", "gloo", "DATA_PARALLEL_GROUP", "0-3")
PAIR = RecordedGroup("2", "gloo", "pair", "1,3")
IN_COLLECTIVE = '  File "/v/lib/python3.11/site-packages/torch/distributed/c10d.py", line 9 in x'


@dataclass(frozen=True)
class Op:
    """An operation of a rank; pending unless ``ended``."""

    group: RecordedGroup
    sequence: int
    name: str = "all_reduce"
    inputs: str = "[4] Float"
    ended: bool = False
    started: bool = False
    peer: int | None = None
    sends: bool = False


def done(group: RecordedGroup, sequence: int, name: str = "all_reduce") -> Op:
    return Op(group, sequence, name, ended=True)


def rank_progress(rank: int, ops: Sequence[Op] | None, **fields: Any) -> RankProgress:
    """Return the progress of a rank; ``ops`` is None if it has no record."""
    groups = list({id(op.group): op.group for op in ops or ()}.values())
    operations = tuple(
        RecordedOperation(
            group=groups.index(op.group),
            sequence=op.sequence,
            name=op.name,
            inputs=op.inputs,
            elements=len(op.inputs),
            started=op.started,
            ended=op.ended,
            time=CLOCK,
            timeout=600.0,
            peer=op.peer,
            sends=op.sends,
        )
        for op in ops or ()
    )
    record = FlightRecord(rank, "", len(operations), tuple(groups), operations)
    waits = any(not op.ended for op in ops or ())
    values: dict[str, Any] = {
        "step": 5,
        "doing": "in training",
        "stopped": False,
        "answered": True,
        "stack": IN_COLLECTIVE if waits else "  elsewhere",
        "place": "`step()` at train.py:7" if waits else "`next(loader)` at data.py:88",
        "record": record if ops is not None else None,
        "log": Path("log"),
    }
    return RankProgress(host=f"h{rank}", rank=rank, **{**values, **fields})


WAITING = [done(WORLD, 1), Op(WORLD, 2)]
BEHIND = [done(WORLD, 1)]
GONE = "its process has ended"


@pytest.mark.parametrize(
    ("operations", "expected"),
    [
        pytest.param(
            {0: WAITING, 1: WAITING, 2: BEHIND, 3: WAITING},
            "rank 2 (h2) never entered all_reduce #2 of the default group; ranks 0, 1 and 3 "
            f"have waited in it since {SINCE}; it is in `next(loader)` at data.py:88",
            id="asleep",
        ),
        pytest.param(
            {0: WAITING, 1: WAITING, 2: None, 3: WAITING},
            "rank 2 (h2) never entered all_reduce #2 of the default group; ranks 0, 1 and 3 "
            f"have waited in it since {SINCE}; it is in `next(loader)` at data.py:88",
            id="no-record",
        ),
        pytest.param(
            {0: WAITING, 1: WAITING, 3: WAITING},
            "rank 2 never entered all_reduce #2 of the default group; ranks 0, 1 and 3 have "
            f"waited in it since {SINCE}; its process has ended",
            id="ended",
        ),
        pytest.param(
            {0: WAITING, 1: BEHIND, 2: BEHIND, 3: WAITING},
            "rank 1 (h1) never entered all_reduce #2 of the default group; ranks 0 and 3 have "
            f"waited in it since {SINCE}; it is in `next(loader)` at data.py:88; the same holds "
            "for rank 2",
            id="two-asleep",
        ),
        pytest.param(
            {0: WAITING, 1: [done(WORLD, 1), Op(PAIR, 1)], 2: WAITING, 3: BEHIND},
            "rank 3 (h3) never entered all_reduce #2 of the default group; ranks 0 and 2 have "
            f"waited in it since {SINCE}; it is in `next(loader)` at data.py:88",
            id="chain",
        ),
        pytest.param(
            {r: [Op(WORLD, 2, "all_gather" if r == 2 else "all_reduce")] for r in range(4)},
            "rank 2 (h2) called all_gather as #2 of the default group, where ranks 0, 1 and 3 "
            f"called all_reduce, since {SINCE}; it is in `step()` at train.py:7",
            id="operation",
        ),
        pytest.param(
            {
                r: [
                    Op(DATA, 2, "broadcast" if r == 2 else "all_reduce"),
                    Op(DATA, 3, "all_reduce" if r == 2 else "broadcast"),
                ]
                for r in range(4)
            },
            "rank 2 (h2) called broadcast as #2 of the data-parallel group of ranks 0-3, where "
            "ranks 0, 1 and 3 called all_reduce: the same operations in another order, since "
            f"{SINCE}; it is in `step()` at train.py:7",
            id="order",
        ),
        pytest.param(
            {r: [Op(WORLD, 2, inputs="[4] Half" if r == 1 else "[4] Float")] for r in range(4)},
            "rank 1 (h1) called all_reduce #2 of the default group with [4] Half, where ranks "
            f"0, 2 and 3 passed [4] Float, since {SINCE}; it is in `step()` at train.py:7",
            id="type",
        ),
        pytest.param(
            {r: [Op(WORLD, 2, inputs="[14] Float" if r == 0 else "[4] Float")] for r in range(4)},
            "rank 0 (h0) called all_reduce #2 of the default group with [14] Float, where "
            f"ranks 1-3 passed [4] Float, since {SINCE}; it is in `step()` at train.py:7",
            id="shape",
        ),
        pytest.param(
            {r: [Op(WORLD, 2, "all_to_all", "[4] Float" if r else "[14] Float")] for r in range(4)},
            f"rank 0 (h0) has been in all_to_all #2 of the default group since {SINCE}, which all "
            "4 ranks have entered: a connection or a device fails; it is in `step()` at "
            "train.py:7; the same holds for ranks 1-3",
            id="sizes-that-may-differ",
        ),
        pytest.param(
            {r: [Op(DATA if r == 2 else WORLD, 2), done(WORLD, 1)] for r in range(4)},
            "rank 2 (h2) waits in all_reduce #2 of the data-parallel group of ranks 0-3 for "
            "ranks 0, 1 and 3, which wait in all_reduce #2 of the default group for it, since "
            f"{SINCE}; it is in `step()` at train.py:7",
            id="wrong-group",
        ),
        pytest.param(
            {
                0: [Op(WORLD, 2, started=True)],
                1: [Op(WORLD, 2, started=True)],
                2: [Op(WORLD, 2)],
                3: [Op(WORLD, 2, started=True)],
            },
            "rank 2 (h2) called all_reduce #2 of the default group, but its device has not "
            f"started it: earlier work still runs; ranks 0, 1 and 3 have started it, since "
            f"{SINCE}; it is in `step()` at train.py:7",
            id="device",
        ),
        pytest.param(
            {r: [Op(WORLD, 2) if r in (1, 2) else done(WORLD, 2)] for r in range(4)},
            f"rank 1 (h1) has been in all_reduce #2 of the default group since {SINCE}, which 2 of "
            "4 ranks have finished: a connection or a device fails; it is in `step()` at "
            "train.py:7; the same holds for rank 2",
            id="partly-finished",
        ),
        pytest.param(
            {0: [Op(WORLD, 1, "recv", peer=2)], 1: [], 2: [], 3: []},
            "rank 2 (h2) never entered the send for recv #1 of the default group; rank 0 has "
            f"waited in it since {SINCE}; it is in `next(loader)` at data.py:88",
            id="message",
        ),
        pytest.param(
            {r: [Op(WORLD, 1, "recv", peer=1 - r)] for r in range(2)},
            "rank 1 (h1) waits in recv #1 of the default group for rank 0, which waits in recv "
            f"#1 of the default group for it, since {SINCE}; it is in `step()` at train.py:7",
            id="both-receive",
        ),
        pytest.param(dict.fromkeys(range(4), BEHIND), None, id="nothing-pending"),
        pytest.param({}, None, id="no-ranks"),
    ],
)
def test_cause_is_explained(
    operations: Mapping[int, Sequence[Op] | None], expected: str | None
) -> None:
    finding = explain_hang([rank_progress(rank, ops) for rank, ops in operations.items()])
    assert (finding.describe() if finding is not None else None) == expected


def test_kernel_cannot_be_told_from_a_connection_without_timing() -> None:
    group = replace(WORLD, backend="nccl")
    finding = explain_hang([rank_progress(r, [Op(group, 2)]) for r in range(4)])
    assert finding is not None
    assert "which all 4 ranks have entered: a connection fails, or a kernel" in finding.reason
    assert "TORCH_NCCL_ENABLE_TIMING=1" in finding.reason


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        pytest.param({"stopped": True}, "its process is stopped (SIGSTOP)", id="stopped"),
        pytest.param(
            {"doing": "saving a checkpoint"},
            "it is in `next(loader)` at data.py:88 (saving a checkpoint)",
            id="busy",
        ),
        pytest.param({"place": ""}, "it did not report its stack", id="silent"),
    ],
)
def test_place_of_the_blamed_rank(fields: Mapping[str, Any], place: str) -> None:
    ranks = [rank_progress(r, WAITING if r != 2 else BEHIND) for r in range(4)]
    ranks[2] = replace(ranks[2], **fields)
    finding = explain_hang(ranks)
    assert finding is not None
    assert finding.reason.endswith(f"; {place}")


def test_rank_that_only_waits_for_a_message_is_not_blamed() -> None:
    """gloo records no messages: the stack shows that rank 0 receives one."""
    ranks = [rank_progress(r, WAITING if r in (1, 3) else BEHIND) for r in range(4)]
    ranks[0] = replace(ranks[0], stack=IN_COLLECTIVE)
    finding = explain_hang(ranks)
    assert finding is not None
    assert finding.rank == 2
    assert "the same holds" not in finding.reason


def test_busy_rank_is_blamed_although_an_earlier_operation_of_it_is_pending() -> None:
    """Rank 1 began all_reduce #2, which rank 3 has not entered: rank 3 waits for it elsewhere."""
    ranks = [
        rank_progress(0, WAITING),
        rank_progress(1, [Op(WORLD, 2)], stack="  in f", place="`time.sleep(9)` at data.py:3"),
        rank_progress(2, WAITING),
        rank_progress(3, [*BEHIND, Op(PAIR, 1)]),
    ]
    finding = explain_hang(ranks)
    assert finding is not None
    assert (finding.rank, finding.in_collective) == (1, False)
    assert "never entered all_reduce #1 of group 'pair'" in finding.reason


# -- generated programs --------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A collective that the members of a group call."""

    group: RecordedGroup
    sequence: int


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, list[Step]]:
    """Return a number of ranks and the collectives of a program, with groups of random members."""
    world = draw(st.integers(3, 8))
    members = st.sets(st.integers(0, world - 1), min_size=2).map(sorted)
    groups = [
        RecordedGroup(str(number), "gloo", f"g{number}", format_ranks(ranks))
        for number, ranks in enumerate(draw(st.lists(members, min_size=1, max_size=4)))
    ]
    counts = dict.fromkeys(range(len(groups)), 0)
    steps = []
    for index in draw(st.lists(st.integers(0, len(groups) - 1), min_size=1, max_size=20)):
        counts[index] += 1
        steps.append(Step(groups[index], counts[index]))
    return world, steps


def run_program(world: int, steps: Sequence[Step], stopped_rank: int, after: int) -> list[list[Op]]:
    """Return the records once no rank advances. ``stopped_rank`` leaves after ``after`` calls."""
    members = {step.group.name: parse_ranks(step.group.ranks) for step in steps}
    calls = [[step for step in steps if rank in members[step.group.name]] for rank in range(world)]
    calls[stopped_rank] = calls[stopped_rank][:after]
    records: list[list[Op]] = [[] for _ in range(world)]
    entered: dict[Step, set[int]] = {}
    advances = True
    while advances:
        advances = False
        for rank, record in enumerate(records):
            if record and not record[-1].ended:
                step = Step(record[-1].group, record[-1].sequence)
                if len(entered[step]) == len(members[step.group.name]):
                    record[-1] = replace(record[-1], ended=True)
                    advances = True
            elif len(record) < len(calls[rank]):
                step = calls[rank][len(record)]
                entered.setdefault(step, set()).add(rank)
                record.append(Op(step.group, step.sequence))
                advances = True
    return records


@given(programs(), st.data())
def test_rank_that_leaves_a_program_is_blamed(
    program: tuple[int, list[Step]], data: st.DataObject
) -> None:
    world, steps = program
    stopped_rank = data.draw(st.integers(0, world - 1))
    after = data.draw(st.integers(0, len(steps)))
    records = run_program(world, steps, stopped_rank, after)
    finding = explain_hang([rank_progress(rank, ops) for rank, ops in enumerate(records)])
    is_hung = any(not op.ended for record in records for op in record)
    if not is_hung:
        assert finding is None
    else:
        assert finding is not None
        assert (finding.rank, finding.in_collective) == (stopped_rank, False)


@given(programs(), st.data())
def test_rank_with_another_operation_is_blamed(
    program: tuple[int, list[Step]], data: st.DataObject
) -> None:
    world, steps = program
    number = data.draw(st.integers(0, len(steps) - 1))
    ranks = parse_ranks(steps[number].group.ranks)
    if len(ranks) < 3:
        return
    # All ranks call the first ones, and hang in the last.
    records = run_program(world, steps[: number + 1], 0, len(steps))
    blamed = data.draw(st.sampled_from(ranks))
    for rank in ranks:
        name = "broadcast" if rank == blamed else "all_reduce"
        records[rank][-1] = replace(records[rank][-1], ended=False, name=name)
    finding = explain_hang([rank_progress(rank, ops) for rank, ops in enumerate(records)])
    assert finding is not None
    assert (finding.rank, finding.in_collective) == (blamed, True)
    assert f"called broadcast as #{steps[number].sequence}" in finding.reason


# -- words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        pytest.param((3,), "rank 3", id="one"),
        pytest.param((3, 5), "ranks 3 and 5", id="two"),
        pytest.param(range(7), "ranks 0-6", id="range"),
        pytest.param(range(0, 64, 8), "ranks 0-56/8", id="stride"),
        pytest.param((0, 1, 5, 9, 11, 17, 40), "7 ranks", id="many"),
    ],
)
def test_ranks_are_described(ranks: Sequence[int], text: str) -> None:
    assert describe_ranks(ranks) == text


@given(st.sets(st.integers(0, 300)))
def test_formatted_ranks_are_parsed(ranks: set[int]) -> None:
    assert sorted(parse_ranks(format_ranks(sorted(ranks)))) == sorted(ranks)


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "0-99999999999", "4-2", "1/0", "0-4/x", ","])
def test_malformed_ranks_are_left_out(text: str) -> None:
    assert set(parse_ranks(text)) <= {1, 4}


@pytest.mark.parametrize(
    ("description", "text"),
    [
        pytest.param("default_pg", "the default group", id="default"),
        pytest.param(
            "TENSOR_MODEL_PARALLEL_GROUP",
            "the tensor-parallel group of ranks 0-3",
            id="megatron",
        ),
        pytest.param(
            "DATA_PARALLEL_GROUP_WITH_CP",
            "the data-parallel group with cp of ranks 0-3",
            id="megatron-with",
        ),
        pytest.param("mesh_dp", "group 'mesh_dp' of ranks 0-3", id="named"),
        pytest.param("undefined", "group '7' of ranks 0-3", id="undefined"),
    ],
)
def test_groups_are_described(description: str, text: str) -> None:
    assert describe_group(RecordedGroup("7", "nccl", description, "0-3")) == text


def test_place_is_the_innermost_frame_of_the_program(tmp_path: Path) -> None:
    program = tmp_path / "data.py"
    program.write_text("import x\n    batch = next(loader)\n")
    stack = (
        "Current thread 0x1 (most recent call first):\n"
        '  File "/v/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 2 in get\n'
        '  File "/v/lib/python3.11/threading.py", line 3 in wait\n'
        f'  File "{program}", line 2 in load\n'
        '  File "/nowhere/train.py", line 9 in main\n'
    )
    assert find_user_frame(stack) == "`batch = next(loader)` at data.py:2"
    program.unlink()
    assert find_user_frame(stack) == "`load` at data.py:2"
    assert (
        find_user_frame('  File "/v/lib/python3.11/queue.py", line 3 in get')
        == "`get` at queue.py:3"
    )
    assert find_user_frame("") == ""
