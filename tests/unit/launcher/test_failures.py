from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flagscale.files import to_plain
from flagscale.launcher.failures import (
    find_first_failure,
    is_settled,
    list_earlier_failures,
)
from flagscale.launcher.layout import EXIT_FILE, LIVENESS_FILE
from flagscale.launcher.liveness.diagnosis import (
    Failure,
    FailureKind,
    TableEntry,
    TorchrunExit,
    describe_code,
    diagnose_host,
    find_first_failed_rank,
    last_traceback,
    parse_failure_table,
)
from flagscale.launcher.planning.model import RunnerHandle
from flagscale.launcher.state import HostState, RunState
from flagscale.status import Event

TABLE = """\
some output
E1120 06:50:24.375000 25864 torch/…/api.py:1002] failed (exitcode: 3) local_rank: 1
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
/x y/toy.py FAILED
------------------------------------------------------------
Failures:
[0]:
  time      : 2026-11-20_06:50:31
  host      : node
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 25866) (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 25866
------------------------------------------------------------
Root Cause (first observed failure):
[1]:
  time      : 2026-11-20_06:50:24
  host      : node
  rank      : 1 (local_rank: 1)
  exitcode  : 3 (pid: 25867)\x20
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""

KILL, TERM, ABRT = -signal.SIGKILL, -signal.SIGTERM, -signal.SIGABRT


def table_entry(rank: int, code: int, moment: float = 100.0) -> TableEntry:
    return TableEntry(rank, code, moment)


def failed_event(rank: int, moment: float, message: str = "boom") -> Event:
    return Event(rank, moment, "failed", {"kind": "RuntimeError", "message": message})


def test_table_of_torchrun() -> None:
    first, second = parse_failure_table(TABLE)
    assert (first.rank, first.exit_code) == (1, 3)
    assert (second.rank, second.exit_code) == (0, -15)
    assert second.time - first.time == 7


@pytest.mark.parametrize(
    ("late", "rank", "kind"),
    [
        pytest.param(set(), 1, FailureKind.RANK_FAILED, id="a-cause"),
        pytest.param({1}, 0, FailureKind.CONSEQUENCE, id="after-the-order-to-end"),
        pytest.param({0, 1}, None, FailureKind.UNEXPLAINED, id="all-after-it"),
    ],
)
def test_late_failure_is_not_the_cause(
    state: RunState, late: set[int], rank: int | None, kind: FailureKind
) -> None:
    """torchrun's table does not distinguish it from a rank that ended first."""
    host = state.hosts[0]
    host.output.write_text(TABLE, encoding="utf-8")
    report = diagnose_host(host, {}, TorchrunExit(1, 200.0, late_ranks=late))
    assert report is not None
    assert (report.failure.rank, report.kind) == (rank, kind)


@pytest.mark.parametrize(
    ("rank", "reason"),
    [
        (1, "ended with exit code 3; position: stage 1 of 2, mesh 1 (dp2)"),
        (0, "failed: RuntimeError: bad; position: stage 0 of 2, mesh 0 (tp2)\nand more"),
    ],
    ids=["ended", "raised"],
)
def test_a_rank_is_named_with_its_stage(rank: int, reason: str, state: RunState) -> None:
    host = state.hosts[0]
    places = ("stage 0 of 2, mesh 0 (tp2)", "stage 1 of 2, mesh 1 (dp2)")
    rows = {r: [Event(r, 1.0, "joined", {"place": position})] for r, position in enumerate(places)}
    if rank == 0:
        rows[0].append(failed_event(0, 100.0, "bad\nand more"))
    else:
        host.output.write_text(TABLE, encoding="utf-8")
    report = diagnose_host(host, rows, TorchrunExit(3, 200.0))
    assert report is not None
    assert report.failure.rank == rank
    assert report.failure.reason == reason


@pytest.mark.parametrize("text", ["", "Failures:\n", "\nFailures:\nnothing\n"])
def test_no_table(text: str) -> None:
    assert parse_failure_table(text) == []


@pytest.mark.parametrize(
    ("table", "events", "expected"),
    [
        pytest.param([], [], None, id="nothing"),
        pytest.param([], [failed_event(1, 5), failed_event(0, 4)], 0, id="first-exception"),
        pytest.param([table_entry(0, TERM), table_entry(1, 3)], [], 1, id="not-the-terminated"),
        pytest.param([table_entry(0, TERM)], [], 0, id="only-terminated"),
        pytest.param(
            [table_entry(0, 1), table_entry(1, KILL)],
            [failed_event(0, 99, "connection reset")],
            1,
            id="killed-rank",
        ),
        pytest.param(
            [table_entry(0, 1), table_entry(1, KILL, 130)],
            [failed_event(0, 99)],
            0,
            id="killed-after-the-grace",
        ),
        pytest.param(
            [table_entry(0, ABRT), table_entry(1, 1)],
            [failed_event(1, 99)],
            1,
            id="abort-is-a-consequence",
        ),
        pytest.param(
            [table_entry(2, -signal.SIGSEGV), table_entry(1, 1)],
            [failed_event(1, 99)],
            2,
            id="segfault",
        ),
        pytest.param([table_entry(1, 7, 101), table_entry(0, 5, 100)], [], 1, id="as-sorted"),
    ],
)
def test_which_rank_failed_first(
    table: list[TableEntry], events: list[Event], expected: int | None
) -> None:
    assert find_first_failed_rank(table, {event.rank: event for event in events}) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "signal 9 (SIGKILL)"),
        (137, "signal 9 (SIGKILL)"),
        (200, "exit code 200"),
    ],
)
def test_describe_code(code: int, expected: str) -> None:
    assert describe_code(code) == expected


DDP_PROGRAM = """\
import sys
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
def train():
    try:
        {}["loss"]
    except KeyError as error:
        raise RuntimeError("boom") from error
train()
"""


@pytest.mark.torch
def test_traceback_that_torch_prefixes_is_whole(state: RunState, tmp_path: Path) -> None:
    command = [sys.executable, "-c", DDP_PROGRAM, str(tmp_path / "store")]
    program = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "[rank0]: RuntimeError: boom" in program.stderr
    host = state.hosts[0]
    host.output.write_text(program.stderr + TABLE, encoding="utf-8")
    end = {"code": 1, "ended": 200.0, "phase": "job"}
    (host.run_dir / EXIT_FILE).write_text(json.dumps(end), encoding="utf-8")
    failure = find_first_failure(state, {})
    assert failure is not None
    assert failure.traceback.splitlines()[-1] == "RuntimeError: boom"
    assert "[rank" not in failure.describe()


PREFIXED = (
    "[rank3]:[W1126 ProcessGroup.cpp:1] a warning\n[rank3]: Traceback (most recent call last):\n"
    '[rank3]:   File "a.py", line 1, in <module>\n[rank3]:     f()\n[rank3]: ValueError: bad\n'
    "[rank3]:[W1126 ProcessGroup.cpp:1] destroy_process_group() was not called\n"
)


@pytest.mark.parametrize(
    ("log", "lines"),
    [
        pytest.param(
            PREFIXED,
            [
                "Traceback (most recent call last):",
                '  File "a.py", line 1, in <module>',
                "    f()",
                "ValueError: bad",
            ],
            id="traceback",
        ),
        pytest.param("[rank3]: bad\nTraceback:\n[rank3]: Other: x", [], id="no-traceback"),
        pytest.param("", [], id="empty"),
    ],
)
def test_prefix_of_a_rank_is_removed(log: str, lines: list[str]) -> None:
    assert last_traceback(log).splitlines() == lines


def test_prefix_of_a_rank_is_removed_from_last_lines(state: RunState) -> None:
    host = state.hosts[0]
    host.output.write_text(f"[rank1]: Other: x\n{TABLE}", encoding="utf-8")
    log = host.run_dir / "ranks" / "r" / "attempt_0" / "1" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("[rank1]: Other: x\n", encoding="utf-8")
    end = {"code": 1, "ended": 200.0, "phase": "job"}
    (host.run_dir / EXIT_FILE).write_text(json.dumps(end), encoding="utf-8")
    failure = find_first_failure(state, {})
    assert failure is not None
    assert failure.traceback == "Other: x"


def test_last_traceback_without_following_lines() -> None:
    text = (
        "Traceback (most recent call last):\n  old\nOldError\n"
        "noise\nTraceback (most recent call last):\n"
        '  File "a.py", line 1, in <module>\nValueError: x\nmore noise\n'
    )
    expected = (
        'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: x'
    )
    assert last_traceback(text) == expected
    assert last_traceback("nothing") == ""


@pytest.fixture
def state(tmp_path: Path) -> RunState:
    host = HostState(
        node_rank=0,
        name="node",
        nproc=2,
        first_rank=0,
        run_dir=tmp_path / "run",
        script=tmp_path / "s.sh",
        output=tmp_path / "output",
        pid_file=tmp_path / "pid",
    )
    host.run_dir.mkdir()
    return RunState(
        "r",
        name="n",
        exp_dir=tmp_path,
        started=time.time(),
        world_size=2,
        external=True,
        stop_grace=1.0,
        runner=RunnerHandle("local"),
        hosts=(host,),
    )


def write_exit_record(state: RunState, **record: Any) -> None:
    fields = {"code": 1, "phase": "job", "signal": None, "ended": 1.0, **record}
    (state.hosts[0].run_dir / EXIT_FILE).write_text(json.dumps(fields), encoding="utf-8")


def test_log_keywords_are_ignored(state: RunState) -> None:
    state.hosts[0].output.write_text(
        f"epoch 1 completed successfully\nCUDA out of memory\nFAILED\n{TABLE}", encoding="utf-8"
    )
    assert find_first_failure(state, {}) is None
    write_exit_record(state, code=0)
    assert find_first_failure(state, {}) is None


def test_rank_code_and_traceback_of_a_program_that_reports_nothing(state: RunState) -> None:
    state.hosts[0].output.write_text(TABLE, encoding="utf-8")
    log = state.hosts[0].run_dir / "ranks/x/attempt_0/1/stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text(
        "noise\nTraceback (most recent call last):\n  f\nKeyError: 1\n", encoding="utf-8"
    )
    write_exit_record(state)
    failure = find_first_failure(state, {})
    assert failure is not None
    assert (failure.rank, failure.exit_code, failure.log) == (1, 3, log)
    assert failure.traceback.endswith("KeyError: 1")
    assert "node: rank 1 ended with exit code 3" in failure.describe()


@pytest.mark.parametrize(
    ("kills", "expected"),
    [
        (2, "the kernel killed 2 process(es) for lack of memory"),
        (0, "counted no kill"),
        (None, "often the kernel"),
    ],
)
def test_a_kill_is_explained(state: RunState, kills: int | None, expected: str) -> None:
    table = TABLE.replace("exitcode  : 3 (pid: 25867) ", "exitcode  : -9 (pid: 25867) (SIGKILL)")
    state.hosts[0].output.write_text(table, encoding="utf-8")
    write_exit_record(state, out_of_memory_kills=kills)
    events = {0: [failed_event(0, 1.0, "Connection reset by peer")]}
    failure = find_first_failure(state, events)
    assert failure is not None
    assert (failure.rank, failure.exit_code) == (1, -9)
    assert expected in failure.reason


RAISED = {"kind": "ValueError", "message": "bad data"}


@pytest.mark.parametrize(
    ("agreed", "code", "reason", "expected"),
    [
        pytest.param(
            (None, "stalled: it is behind"), KILL, None, (None, "stalled: it is behind"), id="stall"
        ),
        pytest.param(
            (None, "stalled: it is behind"),
            1,
            RAISED,
            (None, "stalled: it is behind"),
            id="stall-whose-end-is-an-exception",
        ),
        pytest.param(
            (None, "failed: ValueError: bad data"),
            3,
            RAISED,
            (3, "failed: ValueError: bad data (exit code 3)"),
            id="exit-code-of-an-exception",
        ),
        pytest.param(
            (None, "failed: ValueError: bad data"),
            KILL,
            RAISED,
            (-9, "failed: ValueError: bad data (signal 9 (SIGKILL))"),
            id="killed-as-it-raised",
        ),
        pytest.param(
            (None, "failed: KeyError: another"),
            3,
            RAISED,
            (None, "failed: KeyError: another"),
            id="another-exception",
        ),
        pytest.param(
            (None, "failed: ValueError: bad data\nbefore that, rank 3 ended"),
            3,
            {**RAISED, "message": "bad data\na hint"},
            (
                3,
                "failed: ValueError: bad data (exit code 3)\na hint\nbefore that, rank 3 ended",
            ),
            id="with-an-early-exit",
        ),
        pytest.param(
            (7, "ended with exit code 7"), 3, None, (7, "ended with exit code 7"), id="all"
        ),
    ],
)
def test_a_verdict_is_completed_and_never_replaced(
    state: RunState,
    agreed: tuple[int | None, str],
    code: int,
    reason: dict[str, Any] | None,
    expected: tuple[int | None, str],
) -> None:
    table = TABLE.replace("exitcode  : 3 (pid: 25867)", f"exitcode  : {code} (pid: 25867)")
    state.hosts[0].output.write_text(table, encoding="utf-8")
    verdict = Failure("node", 1, *agreed, "", state.hosts[0].output)
    write_exit_record(state, failure=to_plain(verdict))
    failure = find_first_failure(state, {1: [Event(1, 5.0, "failed", reason)]} if reason else {})
    assert failure is not None
    assert (failure.rank, failure.exit_code, failure.reason) == (1, *expected)


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("agent", "lost its agent, which ended with signal 9"),
        ("before_start", "before_start failed with exit code 137"),
        ("job", "was lost: no word"),
    ],
)
def test_end_of_the_agent_of_a_lost_host(state: RunState, phase: str, expected: str) -> None:
    first = state.hosts[0]
    second = replace(
        first, node_rank=1, name="other", first_rank=2, run_dir=first.run_dir / "other"
    )
    second.run_dir.mkdir()
    hosts = replace(state, hosts=(first, second))
    loss_failure = Failure(
        "other", None, None, "was lost: no word from its agent", "", first.output
    )
    record = {"code": 137, "phase": phase, "signal": None, "ended": 2.0}
    (second.run_dir / EXIT_FILE).write_text(json.dumps(record), encoding="utf-8")
    live = {"phase": "ending", "failure": to_plain(loss_failure)}
    (first.run_dir / LIVENESS_FILE).write_text(json.dumps(live), encoding="utf-8")
    failure = find_first_failure(hosts, {})
    assert failure is not None
    assert (failure.host, failure.rank) == ("other", None)
    assert failure.reason.startswith(expected)


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        pytest.param(None, False, id="nothing-said"),
        pytest.param({"phase": "running"}, False, id="not-heard-of"),
        pytest.param({"phase": "running", "state": "running"}, False, id="left-and-running"),
        pytest.param({"phase": "running", "state": "ending"}, False, id="left-and-ending"),
        pytest.param({"phase": "running", "state": "failed"}, True, id="left-and-ended"),
        pytest.param({"phase": "running", "state": "lost"}, True, id="left-and-lost"),
        pytest.param({"phase": "ending", "state": "failed"}, False, id="others-are-ending"),
        pytest.param({"phase": "waiting", "state": "failed"}, True, id="to-be-restarted"),
        pytest.param({"phase": "stopping", "state": "ending"}, True, id="stopped"),
        pytest.param({"phase": "over", "state": "failed"}, True, id="over"),
    ],
)
def test_when_the_agents_have_agreed(
    state: RunState, job: dict[str, str] | None, expected: bool
) -> None:
    if job is not None:
        failure = to_plain(Failure("node", 1, None, "boom", "", state.hosts[0].output))
        record = {"phase": job["phase"], "failure": failure if "state" in job else None}
        record["hosts"] = {"0": job.get("state", "running")}
        (state.hosts[0].run_dir / LIVENESS_FILE).write_text(json.dumps(record), encoding="utf-8")
    assert is_settled(state.hosts) is expected
    write_exit_record(state)
    assert is_settled(state.hosts)


def test_failures_of_earlier_attempts(state: RunState) -> None:
    assert list_earlier_failures(()) == list_earlier_failures(state.hosts) == ()
    failure = Failure("node", 1, 3, "boom", "", state.hosts[0].output)
    restarts = [{"attempt": n, "failure": f} for n, f in enumerate((to_plain(failure), None))]
    record = {"phase": "running", "attempt": 3, "failure": None, "restarts": restarts}
    (state.hosts[0].run_dir / LIVENESS_FILE).write_text(json.dumps(record), encoding="utf-8")
    assert list_earlier_failures(state.hosts) == ((1, failure),)


def test_message_with_undecodable_text_is_printable(state: RunState) -> None:
    """Example: a file whose name is not valid UTF-8."""
    event = Event(
        1, 5.0, "failed", {"kind": "OSError", "message": "no \udcff", "traceback": "\udcfe"}
    )
    failure = find_first_failure(state, {1: [event]})
    assert failure is not None
    failure.describe().encode()
    assert "no \\udcff" in failure.reason
    assert failure.traceback == "\\udcfe"


def test_before_start(state: RunState) -> None:
    state.hosts[0].output.write_text("no such module\n", encoding="utf-8")
    write_exit_record(state, code=7, phase="before_start")
    failure = find_first_failure(state, {})
    assert failure is not None
    assert failure.rank is None
    assert "before_start failed with exit code 7" in failure.reason
    assert "no such module" in failure.traceback


def test_torchrun_itself(state: RunState) -> None:
    state.hosts[0].output.write_text("torchrun: error: unrecognized\n", encoding="utf-8")
    write_exit_record(state, code=2)
    failure = find_first_failure(state, {})
    assert failure is not None
    assert failure.reason.startswith("torchrun ended with exit code 2")


def test_a_stopped_run_has_not_failed(state: RunState) -> None:
    write_exit_record(state, code=143, signal=15)
    assert find_first_failure(state, {}) is None


def test_explained_error_has_no_traceback_and_a_separate_hint(state: RunState) -> None:
    fields = {"kind": "DataError", "message": "too many words\n  hint: use fewer", "traceback": "T"}
    state.hosts[0].output.write_text(TABLE, encoding="utf-8")
    write_exit_record(state)
    failure = find_first_failure(
        state, {1: [Event(1, 5.0, "failed", {**fields, "explained": True})]}
    )
    assert failure is not None
    assert failure.headline() == "node: rank 1 failed: DataError: too many words (exit code 3)"
    assert failure.describe().splitlines()[1] == "  hint: use fewer"
    assert failure.traceback == ""
    unexplained = find_first_failure(state, {1: [Event(1, 5.0, "failed", fields)]})
    assert unexplained is not None
    assert unexplained.traceback == "T"
