from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.waiting import wait_for

from flagscale.files import to_plain
from flagscale.hosts import processes
from flagscale.launcher import snapshot as snapshots
from flagscale.launcher.layout import EXIT_FILE, LIVENESS_FILE, STATUS_DIRECTORY
from flagscale.launcher.liveness.diagnosis import Failure
from flagscale.launcher.planning.model import RunnerHandle
from flagscale.launcher.runners.hosts import HostRunner
from flagscale.launcher.runners.programs.probe_run import ProbeResult
from flagscale.launcher.show import view
from flagscale.launcher.snapshot import HostRow, Phase, Snapshot
from flagscale.launcher.state import HostState, RunState
from flagscale.status import RUN_ID_VARIABLE, StatusWriter

RUN_ID = "r-none"
FAILED_RANK = to_plain(Failure("other", 3, 1, "failed: ValueError: no", "", Path("/log")))
LOST_PEER = to_plain(
    Failure("other", None, None, "was lost: no word from its agent for 60 s", "", Path("/log"))
)


@pytest.fixture
def script() -> Iterator[subprocess.Popen[bytes]]:
    """The script of a live run, here ``sleep``."""
    environment = {**os.environ, RUN_ID_VARIABLE: RUN_ID}
    with subprocess.Popen(["sleep", "600"], env=environment) as process:
        # A new program is visible a moment before its environment can be read.
        wait_for(lambda: processes.read_environment(process.pid))
        yield process
        process.kill()


@pytest.fixture
def state(tmp_path: Path, script: subprocess.Popen[bytes]) -> RunState:
    """A live run."""
    identity = processes.identify_process(script.pid)
    assert identity is not None
    host = HostState(
        node_rank=0,
        name="node",
        nproc=2,
        first_rank=0,
        run_dir=tmp_path / "run",
        script=tmp_path / "s.sh",
        output=tmp_path / "output",
        pid_file=tmp_path / "pid",
        pid=identity.pid,
        start_ticks=identity.start_ticks,
        boot_id=processes.read_boot_id(),
    )
    host.run_dir.mkdir()
    runner = RunnerHandle("local")
    return RunState(
        RUN_ID,
        name="n",
        exp_dir=tmp_path,
        started=time.time(),
        world_size=2,
        external=False,
        stop_grace=1.0,
        runner=runner,
        hosts=(host,),
    )


def query(state: RunState) -> Snapshot:
    """Return the snapshot of a run on this machine."""
    return HostRunner().query(state)


def write_status(state: RunState, rank: int, event: str, **fields: Any) -> None:
    StatusWriter(state.hosts[0].run_dir / STATUS_DIRECTORY, rank).write(event, **fields)


def write_exit_record(state: RunState, **record: Any) -> None:
    fields = {"code": 0, "phase": "job", "signal": None, "ended": 5.0, **record}
    (state.hosts[0].run_dir / EXIT_FILE).write_text(json.dumps(fields), encoding="utf-8")


def test_starting_until_every_rank_has_joined(state: RunState) -> None:
    write_status(state, 0, "joined", backend="gloo")
    assert query(state).phase is Phase.STARTING
    assert query(state).joined == 1
    write_status(state, 1, "joined", backend="gloo")
    assert query(state).phase is Phase.RUNNING


def test_program_without_status_reports_runs_while_alive(state: RunState) -> None:
    assert query(replace(state, external=True)).phase is Phase.RUNNING


@pytest.mark.parametrize(
    ("exit_record", "stop_requested", "expected"),
    [
        pytest.param({"code": 0}, None, Phase.COMPLETED, id="completed"),
        pytest.param({"code": 3}, None, Phase.FAILED, id="failed"),
        pytest.param({"code": 143, "signal": 15}, None, Phase.STOPPED, id="stopped"),
        pytest.param({"code": 137, "phase": "agent"}, None, Phase.FAILED, id="agent-killed"),
        pytest.param({"code": 137, "phase": "agent"}, 4.0, Phase.STOPPED, id="stopped-hard"),
        pytest.param({"code": 7, "phase": "before_start"}, None, Phase.FAILED, id="before-start"),
        pytest.param({"code": 0}, 6.0, Phase.COMPLETED, id="stopped-after-the-end"),
        pytest.param({"code": 1, "failure": LOST_PEER}, 4.0, Phase.STOPPED, id="was-cut-off"),
        pytest.param({"code": 1, "failure": LOST_PEER}, None, Phase.FAILED, id="lost-its-peer"),
        pytest.param(
            {"code": 1, "failure": LOST_PEER}, 6.0, Phase.FAILED, id="stopped-after-the-loss"
        ),
        pytest.param({"code": 1, "failure": FAILED_RANK}, 4.0, Phase.FAILED, id="failed-anyway"),
        pytest.param(None, None, Phase.LOST, id="lost"),
        pytest.param(None, 4.0, Phase.STOPPED, id="killed-by-stop"),
    ],
)
def test_ends(
    state: RunState,
    script: subprocess.Popen[bytes],
    exit_record: dict[str, Any] | None,
    stop_requested: float | None,
    expected: Phase,
) -> None:
    script.kill()
    script.wait()
    if exit_record is not None:
        write_exit_record(state, **exit_record)
    assert query(replace(state, stop_requested=stop_requested)).phase is expected


def test_host_of_a_requeued_job_is_pending(state: RunState) -> None:
    """Although its earlier start has recorded how it ended."""
    write_exit_record(state, code=0, signal=15)
    observations = dict.fromkeys(
        range(len(state.hosts)), snapshots.HostObservation(waits="job 7 is pending")
    )
    snapshot = snapshots.take_snapshot(state, observations)
    assert (snapshot.phase, snapshot.phase.ended) == (Phase.PENDING, False)
    assert snapshot.to_json()["hosts"][0]["waits"] == "job 7 is pending"


def test_run_is_lost_after_a_reboot(state: RunState) -> None:
    host = replace(state.hosts[0], boot_id="another")
    assert query(replace(state, hosts=(host,))).phase is Phase.LOST


def test_progress_and_remaining_time(state: RunState) -> None:
    for rank in (0, 1):
        write_status(state, rank, "joined")
    path = state.hosts[0].run_dir / STATUS_DIRECTORY / "rank_1.jsonl"
    with path.open("a", encoding="utf-8") as file:
        for step in range(10, 60, 10):
            record = {"time": 1000.0 + step, "event": "progress", "step": step, "train_steps": 100}
            file.write(json.dumps({**record, "loss": 10 / step, "tokens_per_second": 512}) + "\n")
    snapshot = query(state)
    assert (snapshot.step, snapshot.train_steps, snapshot.loss) == (50, 100, 0.2)
    assert snapshot.eta_seconds == 50
    record = snapshot.to_json()
    assert record["state"] == "running"
    assert json.loads(json.dumps(record))["hosts"] == [
        {"host": "node", "state": "running", "ranks": 2, "joined": 2}
    ]


def test_best_checkpoint_and_early_end_are_shown(
    state: RunState, capsys: pytest.CaptureFixture[str]
) -> None:
    for step, loss in ((100, 5.5), (300, 5.25)):
        path = f"/c/iter_{step:07d}"
        write_status(state, 0, "checkpoint", step=step, path=path, best=True, valid_loss=loss)
    write_status(state, 0, "checkpoint", step=400, path="/c/iter_0000400")
    write_status(state, 1, "finished", step=400, reason="completed", detail="no improvement")
    view.print_run(query(state))
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "training ended early: no improvement",
        "best checkpoint: step 300, validation loss 5.2500: /c/iter_0000300",
    ]
    record = json.loads(json.dumps(query(state).to_json()))
    assert (record["best_step"], record["best_loss"]) == (300, 5.25)


def test_scores_on_tasks_are_shown(state: RunState, capsys: pytest.CaptureFixture[str]) -> None:
    for step, accuracy in ((100, 0.25), (200, 0.5)):
        scores = {"arc/acc": accuracy, "broken": None}
        write_status(state, 0, "tasks", step=step, seconds=1.5, scores=scores)
    best = {"best": True, "best_metric": "arc/acc", "best_value": 0.5}
    write_status(state, 0, "checkpoint", step=200, path="/c/iter_0000200", **best)
    view.print_run(query(state))
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "tasks: arc/acc 0.5000",
        "best checkpoint: step 200, arc/acc 0.5000: /c/iter_0000200",
    ]
    record = json.loads(json.dumps(query(state).to_json()))
    assert record["task_scores"] == {"arc/acc": 0.5}
    assert (record["best_metric"], record["best_value"]) == ("arc/acc", 0.5)


def test_warnings_are_reported_once(state: RunState) -> None:
    write_status(state, 0, "warning", message="loss spike")
    write_status(state, 1, "warning", message="loss spike")
    assert query(state).warnings == ("loss spike",)


def test_current_stragglers_are_warnings(state: RunState) -> None:
    write_status(state, 0, "stragglers", step=1, messages=["rank 1", "rank 2"])
    assert query(state).warnings == ("rank 1", "rank 2")
    write_status(state, 0, "stragglers", step=5, messages=["rank 2"])
    assert query(state).warnings == ("rank 2",)
    write_status(state, 0, "stragglers", step=9, messages=[])
    assert query(state).warnings == ()


RESET = "node: rank 1 failed: RuntimeError: Connection reset by peer"
UNSETTLED = f"{RESET}; the hosts are still determining the first failure"


def fail_with_consequence(state: RunState, phase: str) -> None:
    """Record a rank that lost a peer, and the coordinator's decision."""
    for rank in (0, 1):
        write_status(state, rank, "joined")
    write_status(state, 1, "failed", kind="RuntimeError", message="Connection reset by peer")
    host = state.hosts[0]
    rank, code = (0, -9) if phase == "over" else (1, None)
    reason = "ended with signal 9" if code else RESET.partition("rank 1 ")[2]
    verdict = to_plain(Failure(host.name, rank, code, reason, "", host.output))
    record = {"phase": phase, "failure": None if phase == "running" else verdict}
    (host.run_dir / LIVENESS_FILE).write_text(json.dumps(record), encoding="utf-8")


@pytest.mark.parametrize(
    ("phase", "alive", "rank"),
    [
        pytest.param("running", None, None, id="the-agents-have-not-heard-of-it"),
        pytest.param("ending", None, None, id="the-agents-have-not-agreed"),
        pytest.param("over", None, 0, id="they-have"),
        pytest.param("ending", "script", None, id="not-agreed-on-another-machine"),
        pytest.param("ending", "orphans", 1, id="nobody-there-will-agree"),
    ],
)
def test_consequence_is_not_the_first_failure(
    state: RunState, phase: str, alive: str | None, rank: int | None
) -> None:
    fail_with_consequence(state, phase)
    observations = {} if alive is None else {0: ProbeResult(alive=alive)}
    snapshot = snapshots.take_snapshot(state, observations) if observations else query(state)
    record = json.loads(json.dumps(snapshot.to_json()))
    assert record["state"] == "running"
    assert (record["failure"] or {}).get("rank") == rank
    assert record["warnings"] == ([UNSETTLED] if rank is None else [])
    write_exit_record(state, code=1, failure=record["failure"])
    final_snapshot = query(state)
    assert (final_snapshot.phase, final_snapshot.warnings) == (Phase.FAILED, ())
    assert final_snapshot.failure is not None


def test_reported_failure_is_used_without_an_agent(
    state: RunState, script: subprocess.Popen[bytes]
) -> None:
    """Agent and script were killed, and a rank is still alive."""
    fail_with_consequence(state, "ending")
    script.kill()
    script.wait()
    environment = {**os.environ, RUN_ID_VARIABLE: state.run_id}
    with subprocess.Popen(["sleep", "60"], env=environment) as rank:
        # A process that has just become another program shows no environment for a moment.
        wait_for(lambda: processes.find_run_processes(state.run_id))
        snapshot = query(state)
        rank.kill()
    assert (snapshot.phase, snapshot.warnings) == (Phase.RUNNING, ())
    assert snapshot.failure is not None
    assert snapshot.failure.headline() == RESET


def test_why_earlier_attempts_failed_is_shown(
    state: RunState, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = Failure("node", 1, 3, "failed: ValueError: bad data\nmore", "", Path("/x/e.log"))
    restarts = [{"attempt": 0, "failure": to_plain(failure)}]
    record = {"phase": "running", "attempt": 2, "attempts": 3, "restarts": restarts}
    (state.hosts[0].run_dir / LIVENESS_FILE).write_text(json.dumps(record), encoding="utf-8")
    snapshot = query(state)
    assert (snapshot.attempt, snapshot.earlier) == (2, ((1, failure),))
    output = json.loads(json.dumps(snapshot.to_json()))["earlier"]
    assert output == [{"attempt": 1, **to_plain(failure)}]
    view.print_run(snapshot)
    text = capsys.readouterr().out.splitlines()[-1]
    assert text == "attempt 1 failed: node: rank 1 failed: ValueError: bad data"


def test_early_exit_is_a_warning(
    state: RunState, script: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    text = "rank 1 ended with exit code 0 at 14:02:11 while 1 rank is still running"
    record = {"phase": "running", "early_exit": text}
    (state.hosts[0].run_dir / LIVENESS_FILE).write_text(json.dumps(record), encoding="utf-8")
    snapshot = query(state)
    assert snapshot.warnings == (text,)
    view.print_run(snapshot)
    assert capsys.readouterr().out.splitlines()[-1] == f"warning: {text}"
    script.kill()
    script.wait()
    assert query(state).warnings == ()


def test_names_are_not_interpreted_as_markup() -> None:
    """Example: a name with square brackets."""
    snapshot = Snapshot("r", "[red]n[/red]", Phase.RUNNING, time.time(), 2, 2)
    snapshot = replace(snapshot, hosts=(HostRow("h", Phase.RUNNING, 2, 2),), warnings=("[bold]x",))
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    console.print(view.run_table(snapshot))
    text = console.export_text()
    assert "[red]n[/red]" in text
    assert "[bold]x" in text


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0, "0:00"), (61, "1:01"), (3661, "1:01:01"), (90061, "1d 01:01:01")]
)
def test_duration(seconds: float, expected: str) -> None:
    assert view.format_duration(seconds) == expected


def test_values_that_are_not_numbers(state: RunState, capsys: pytest.CaptureFixture[str]) -> None:
    """NaN is not valid JSON, and a program may report any value."""
    writer = StatusWriter(state.hosts[0].run_dir / STATUS_DIRECTORY, 0)
    writer.write("started")
    writer.write("progress", step=3, loss=float("nan"), tokens_per_second="fast")
    view.show_snapshots(lambda: query(state), follow=False, as_json=True, interval_seconds=1)
    record = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (record["step"], record["loss"], record["tokens_per_second"]) == (3, None, None)
    view.show_snapshots(lambda: query(state), follow=False, as_json=False, interval_seconds=1)
    assert " nan" in capsys.readouterr().out


def test_last_validation_loss_is_the_mean_over_the_sets(state: RunState) -> None:
    assert query(state).validation_loss is None
    for step, data, loss in ((5, "a", 9.0), (10, "a", 4.0), (10, "b", 6.0), (10, "c", "x")):
        write_status(state, 0, "evaluation", step=step, data=data, loss=loss)
    assert query(state).validation_loss == 5.0
    assert query(state).to_json()["validation_loss"] == 5.0


def test_job_of_a_scheduler_is_shown(state: RunState) -> None:
    snapshot = snapshots.take_snapshot(replace(state, runner=RunnerHandle("x", {"job": 4711})), {})
    assert snapshot.to_json()["job"] == "4711"
    console = Console(width=100)
    with console.capture() as capture:
        console.print(view.run_table(snapshot))
    assert "n · run r-none · job 4711 · " in capture.get()
