"""Tests of the parsing and interpretation of Slurm's output."""

from __future__ import annotations

import subprocess
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.errors import UnreachableError
from flagscale.launcher.planning.model import RunnerHandle
from flagscale.launcher.runners.slurm import scheduler, watch
from flagscale.launcher.runners.slurm.reasons import explain_reason
from flagscale.launcher.runners.slurm.scheduler import SlurmJob
from flagscale.launcher.runners.slurm.watch import _describe_end, describe_pending_job
from flagscale.launcher.state import RunState


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "RUNNING|None|2026-01-02T03:04:05|x.1\n",
            SlurmJob("RUNNING", "", "2026-01-02T03:04:05"),
            id="running",
        ),
        pytest.param(
            "PENDING|Priority|N/A|x.1\n", SlurmJob("PENDING", "Priority", ""), id="pending"
        ),
        pytest.param(
            "PENDING|ReqNodeNotAvail, May be reserved for other job|N/A|x.1\n",
            SlurmJob("PENDING", "ReqNodeNotAvail, May be reserved for other job", ""),
            id="comma",
        ),
        pytest.param("RUNNING|None|N/A|other.1\n", SlurmJob(), id="id-that-came-again"),
        pytest.param(
            "PENDING|Resources|2026-01-02T03:04:05|x.1\nPENDING|Priority|N/A|x.1\n",
            SlurmJob("PENDING", "Priority", ""),
            id="component-that-comes-last",
        ),
        pytest.param(
            "RUNNING|None|2026-01-02T03:04:05|x.1\nPENDING|Resources|2026-01-03T00:00:00|x.1\n",
            SlurmJob("PENDING", "Resources", "2026-01-03T00:00:00"),
            id="component-that-waits",
        ),
        pytest.param(
            "COMPLETED|None|2026-01-02T03:04:05|x.1\nRUNNING|None|2026-01-02T03:04:05|x.1\n",
            SlurmJob("RUNNING", "", "2026-01-02T03:04:05"),
            id="component-that-runs",
        ),
        pytest.param("", SlurmJob(), id="silence"),
        pytest.param("slurm_load_jobs error\n", SlurmJob(), id="no-answer"),
    ],
)
def test_squeue(text: str, expected: SlurmJob) -> None:
    assert scheduler.parse_queue(text, "x.1") == expected


NODES = """\
NodeName=h00 Arch=x86_64 State=IDLE BootTime=2026-01-01T00:00:00 SlurmdStartTime=2026-01-02T04:00:00
NodeName=h01 State=IDLE BootTime=2026-01-02T03:30:00 SlurmdStartTime=2026-01-02T03:31:00
NodeName=h02 BootTime=2026-01-01T00:00:00 Reason=Not responding [slurm@2026-01-02T03:20:00]
NodeName=h03 BootTime=Unknown Reason=Node unexpectedly rebooted [root@2026-01-02T03:21:00]
NodeName=h04 BootTime=2026-01-01T00:00:00 Reason=Not responding [slurm@2026-01-01T03:20:00]
NodeName=h05 BootTime=2026-01-01T00:00:00 Reason=new disks [root@2026-01-02T03:22:00]
NodeName=h06 BootTime=None Reason=Not responding [slurm@Unknown]
"""


def test_nodes_that_failed_during_a_job_are_found_although_they_are_up_again() -> None:
    start = datetime.fromisoformat("2026-01-02T03:00:00").timestamp()
    assert scheduler.parse_failed_nodes(NODES, start) == ["h01", "h02", "h03"]
    assert scheduler.parse_failed_nodes(NODES, start + 7200) == []
    assert scheduler.parse_failed_nodes("", start) == []


@given(st.text(max_size=60))
def test_arbitrary_output_raises_no_error(text: str) -> None:
    assert isinstance(scheduler.parse_queue(text, "x.1"), SlurmJob)
    assert isinstance(scheduler.parse_accounting(text, "x.1"), SlurmJob)


@pytest.mark.parametrize(
    ("text", "description"),
    [
        pytest.param("CANCELLED by 0|0:0|x.1\n", "was cancelled by root", id="cancelled"),
        pytest.param(
            "CANCELLED by 4000000|0:15|x.1\n", "was cancelled by user 4000000", id="by-a-stranger"
        ),
        pytest.param("TIMEOUT|0:0|x.1\n", "reached its time limit", id="time"),
        pytest.param("FAILED|3:0|x.1\n", "ended as FAILED (exit code 3:0)", id="code"),
        pytest.param("COMPLETED|0:0|x.1\n", "ended as COMPLETED", id="completed"),
        pytest.param(
            "FAILED|1:0|other\nNODE_FAIL|0:0|x.1\n", "lost a node", id="id-that-came-again"
        ),
        pytest.param("", "is unknown to Slurm and left no record of its end", id="silence"),
    ],
)
def test_sacct(text: str, description: str) -> None:
    assert _describe_end(scheduler.parse_accounting(text, "x.1")) == description


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("QOSMaxNodePerJobLimit", "more nodes than the QOS allows per job, and will never start"),
        ("AssocMaxWallDurationPerJobLimit", "more time than the account allows per job, and will"),
        ("AssocMaxCpuMinutesPerJobLimit", "more CPU minutes than the account allows per job"),
        ("QOSMaxGRESPerNode", "more GPUs (or other GRES) than the QOS allows per node, and will"),
        (
            "QOSMaxJobsPerUserLimit",
            "with it the user's jobs would use more jobs at once than the QOS allows",
        ),
        (
            "AssocMaxJobsLimit",
            "more jobs at once than the account allows; it waits for other jobs to end",
        ),
        (
            "MaxMemoryPerAccount",
            "the account's jobs would use more memory than the QOS allows; it waits",
        ),
        ("AssocGrpCpuLimit", "the jobs of the account would exceed their total of CPUs"),
        (
            "AssocGrpGRESMinutes",
            "the account have used up their total of GPU minutes (or minutes of other GRES)",
        ),
        ("AssocGrpCPURunMinutesLimit", "would exceed their total of CPU minutes"),
        ("QOSGrpWallLimit", "the jobs of the QOS have used up their total of time"),
        (
            "QOSMinCpuNotSatisfied",
            "fewer CPUs than the QOS requires of a job, and will never start",
        ),
        ("ReqNodeNotAvail, UnavailableNodes:h01", "a node that it needs is down"),
        ("AssocGrpSomethingNew", "would exceed their total of a limited resource"),
    ],
)
def test_explained_reasons(reason: str, expected: str) -> None:
    assert expected in explain_reason(reason)


@pytest.mark.parametrize("reason", ["", "SomethingNew", "Groups", "QOSX"])
def test_unrecognized_reason_has_no_explanation(reason: str) -> None:
    assert explain_reason(reason) == ""


@pytest.mark.parametrize(
    ("days", "expected"), [(0, False), (300, False), (365, True), (700_000, True)]
)
def test_unpredictable_start_time(days: int, expected: bool) -> None:
    start = datetime.now() + timedelta(days=days)
    assert scheduler.is_unpredictable(start.isoformat(timespec="seconds")) is expected


@pytest.mark.parametrize(
    ("state", "is_pending", "is_over"),
    [
        ("PENDING", True, False),
        ("REQUEUE_HOLD", True, False),
        ("RUNNING", False, False),
        ("COMPLETING", False, False),
        ("SUSPENDED", False, False),
        ("NODE_FAIL", False, True),
        ("", False, True),
    ],
)
def test_states(state: str, is_pending: bool, is_over: bool) -> None:
    job = SlurmJob(state)
    assert (job.is_pending, job.over) == (is_pending, is_over)


def test_variables_hidden_from_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "SLURM_NTASKS", "SBATCH_ARRAY_INX", "SQUEUE_FORMAT", "SCANCEL_QUIET"):
        monkeypatch.setenv(name, "x")
    fields = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_PARTITION": "gpu", "MINE": "y"}
    for name, value in fields.items():
        monkeypatch.setenv(name, value)
    environment = scheduler.command_environment()
    assert fields.items() <= environment.items()
    assert not {"HF_TOKEN", "SLURM_NTASKS", "SBATCH_ARRAY_INX", "SQUEUE_FORMAT"} & set(environment)


def test_complaints_in_one_line() -> None:
    stderr = "sbatch: error: Batch job submission failed: Invalid qos\nsbatch: error: a\n"
    result = subprocess.CompletedProcess(["sbatch"], 1, "", stderr)
    assert scheduler.error_summary(result) == "Batch job submission failed: Invalid qos; a"
    assert (
        scheduler.error_summary(subprocess.CompletedProcess(["sbatch"], 1, "", ""))
        == "sbatch ended with 1"
    )


@pytest.mark.parametrize(
    ("job", "description"),
    [
        (SlurmJob("PENDING"), "job 7 is pending"),
        (
            SlurmJob("PENDING", "Resources", "2026-01-02T03:04:05"),
            "job 7 is pending (Resources: it is the next one, and waits for nodes to become free); "
            "it may start at 2026-01-02T03:04:05",
        ),
        (SlurmJob("PENDING", "SomethingNew"), "job 7 is pending (SomethingNew)"),
    ],
)
def test_why_a_job_waits(job: SlurmJob, description: str) -> None:
    handle = RunnerHandle("slurm", {"job": "7"})
    state = RunState(
        "id",
        name="x",
        exp_dir=Path("/x"),
        started=0.0,
        world_size=1,
        external=False,
        stop_grace=1.0,
        runner=handle,
    )
    assert describe_pending_job(state, job) == description


def test_a_command_that_this_user_may_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "squeue").touch(mode=0o600)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnreachableError, match="there is no squeue"):
        scheduler.run_command("squeue")


@pytest.mark.parametrize(
    ("job", "max_queries"),
    [(SlurmJob("PENDING"), 6), (SlurmJob("RUNNING"), 6), (SlurmJob("PENDING", "Priority"), 2)],
)
def test_query_interval_grows(
    job: SlurmJob, max_queries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pending jobs without a reason, running jobs without a recorded start, and any other job."""
    now = 0.0
    query_times: list[float] = []
    monkeypatch.setattr(watch.time, "monotonic", lambda: now)

    def ask(_state: RunState) -> SlurmJob:
        query_times.append(now)
        return job

    monkeypatch.setattr(watch, "query_job", ask)
    handle = RunnerHandle("slurm", {"job": "7", "name": "x"})
    state = RunState(
        "id",
        name="x",
        exp_dir=tmp_path,
        started=0.0,
        world_size=1,
        external=False,
        stop_grace=1.0,
        runner=handle,
    )
    looker = watch.JobMonitor()
    for second in range(600):
        now = float(second)
        assert not looker.status(state).over
    assert sum(at < 60 for at in query_times) <= max_queries
    assert sum(at >= 60 for at in query_times) <= 18
