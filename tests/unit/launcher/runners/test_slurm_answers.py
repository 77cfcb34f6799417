"""Tests of the parsing and interpretation of Slurm's output."""

from __future__ import annotations

import subprocess
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.errors import UnreachableError
from flagscale.launcher.planning.model import RunnerHandle
from flagscale.launcher.runners.slurm import files, scheduler, watch
from flagscale.launcher.runners.slurm.reasons import explain_reason
from flagscale.launcher.runners.slurm.scheduler import SlurmJob
from flagscale.launcher.runners.slurm.watch import _describe_end, describe_pending_job
from flagscale.launcher.state import RunState


@pytest.mark.parametrize(
    ("text", "expected"),
    # STATE|REASON|START_TIME|JOB_NAME; a heterogeneous job has one line per component. Slurm reuses
    # job ids, so a line with another job's name is ignored.
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
            id="reason-with-comma",
        ),
        pytest.param("RUNNING|None|N/A|other.1\n", SlurmJob(), id="other-job-name"),
        pytest.param(
            "PENDING|Resources|2026-01-02T03:04:05|x.1\nPENDING|Priority|N/A|x.1\n",
            SlurmJob("PENDING", "Priority", ""),
            id="heterogeneous-job-latest-start-unknown",
        ),
        pytest.param(
            "RUNNING|None|2026-01-02T03:04:05|x.1\nPENDING|Resources|2026-01-03T00:00:00|x.1\n",
            SlurmJob("PENDING", "Resources", "2026-01-03T00:00:00"),
            id="heterogeneous-job-one-component-pending",
        ),
        pytest.param(
            "COMPLETED|None|2026-01-02T03:04:05|x.1\nRUNNING|None|2026-01-02T03:04:05|x.1\n",
            SlurmJob("RUNNING", "", "2026-01-02T03:04:05"),
            id="heterogeneous-job-one-component-running",
        ),
        pytest.param("", SlurmJob(), id="no-output"),
        pytest.param("slurm_load_jobs error\n", SlurmJob(), id="error-message"),
    ],
)
def test_parse_squeue_output(text: str, expected: SlurmJob) -> None:
    assert scheduler.parse_queue(text, "x.1") == expected


# Output of `scontrol show node` for a job that started on 2026-01-02 at 03:00. These nodes count as
# failed: h01 has booted since then, h02 did not respond, h03 has rebooted. These do not: on h00
# only slurmd has restarted, h04 failed a day earlier, an administrator has drained h05, and h06 has
# no times.
NODES = """\
NodeName=h00 Arch=x86_64 State=IDLE BootTime=2026-01-01T00:00:00 SlurmdStartTime=2026-01-02T04:00:00
NodeName=h01 State=IDLE BootTime=2026-01-02T03:30:00 SlurmdStartTime=2026-01-02T03:31:00
NodeName=h02 BootTime=2026-01-01T00:00:00 Reason=Not responding [slurm@2026-01-02T03:20:00]
NodeName=h03 BootTime=Unknown Reason=Node unexpectedly rebooted [root@2026-01-02T03:21:00]
NodeName=h04 BootTime=2026-01-01T00:00:00 Reason=Not responding [slurm@2026-01-01T03:20:00]
NodeName=h05 BootTime=2026-01-01T00:00:00 Reason=new disks [root@2026-01-02T03:22:00]
NodeName=h06 BootTime=None Reason=Not responding [slurm@Unknown]
"""


def test_nodes_that_failed_since_the_start_of_a_job() -> None:
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
        pytest.param("CANCELLED by 0|0:0|x.1\n", "was cancelled by root", id="cancelled-by-root"),
        pytest.param(
            "CANCELLED by 4000000|0:15|x.1\n",
            "was cancelled by user 4000000",
            id="cancelled-by-user-without-passwd-entry",
        ),
        pytest.param("TIMEOUT|0:0|x.1\n", "reached its time limit", id="time-limit"),
        pytest.param("FAILED|3:0|x.1\n", "ended as FAILED (exit code 3:0)", id="exit-code"),
        pytest.param("COMPLETED|0:0|x.1\n", "ended as COMPLETED", id="completed"),
        pytest.param("FAILED|1:0|other\nNODE_FAIL|0:0|x.1\n", "lost a node", id="other-job-name"),
        pytest.param("", "is unknown to Slurm and left no record of its end", id="no-output"),
    ],
)
def test_parse_sacct_output(text: str, description: str) -> None:
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
def test_pending_and_ended_states(state: str, is_pending: bool, is_over: bool) -> None:
    job = SlurmJob(state)
    assert (job.is_pending, job.over) == (is_pending, is_over)


def test_variables_hidden_from_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = {"HF_TOKEN", "SLURM_NTASKS", "SBATCH_ARRAY_INX", "SQUEUE_FORMAT", "SCANCEL_QUIET"}
    for name in hidden:
        monkeypatch.setenv(name, "x")
    fields = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_PARTITION": "gpu", "MINE": "y"}
    for name, value in fields.items():
        monkeypatch.setenv(name, value)
    environment = scheduler.command_environment()
    assert fields.items() <= environment.items()
    assert not hidden & environment.keys()


def test_error_summary_is_one_line() -> None:
    stderr = "sbatch: error: Batch job submission failed: Invalid qos\nsbatch: error: a\n"
    result = subprocess.CompletedProcess(["sbatch"], 1, "", stderr)
    assert scheduler.error_summary(result) == "Batch job submission failed: Invalid qos; a"
    assert (
        scheduler.error_summary(subprocess.CompletedProcess(["sbatch"], 1, "", ""))
        == "sbatch ended with 1"
    )


def state_of_job_7(exp_dir: Path, **properties: Any) -> RunState:
    return RunState(
        "id",
        name="x",
        exp_dir=exp_dir,
        started=0.0,
        world_size=1,
        external=False,
        stop_grace=1.0,
        runner=RunnerHandle("slurm", {"job": "7", "name": "x", **properties}),
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
def test_description_of_a_pending_job(job: SlurmJob, description: str) -> None:
    assert describe_pending_job(state_of_job_7(Path("/x")), job) == description


def test_command_without_execute_permission_counts_as_missing(
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

    def record_query(_state: RunState) -> SlurmJob:
        query_times.append(now)
        return job

    monkeypatch.setattr(watch, "query_job", record_query)
    state = state_of_job_7(tmp_path)
    monitor = watch.JobMonitor()
    for second in range(600):
        now = float(second)
        assert not monitor.status(state).over
    assert sum(at < 60 for at in query_times) <= max_queries
    assert sum(at >= 60 for at in query_times) <= 18


@pytest.mark.parametrize(
    ("reason", "slurm_state", "expected"),
    [
        # The job had requeued itself, and was cancelled while it was pending.
        ("requeued_at_time_limit", "CANCELLED", ("job 7 was cancelled", True)),
        ("requeued_after_loss", "NODE_FAIL", ("job 7 lost a node", False)),
        ("again", "CANCELLED", ("job 7 was cancelled", True)),
        (
            "too_many_requeues",
            "FAILED",
            ("job 7 was started by Slurm more often than slurm.requeue allows", False),
        ),
        (
            "requeued",
            "FAILED",
            ("job 7 was started by Slurm more often than slurm.requeue allows", False),
        ),
    ],
)
def test_end_of_a_job_that_was_requeued(
    reason: str,
    slurm_state: str,
    expected: tuple[str, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "query_job", lambda _state: SlurmJob(slurm_state))
    monkeypatch.setattr(scheduler, "query_accounting", lambda *_: SlurmJob())
    state = state_of_job_7(tmp_path, requeue=1)
    directory = files.job_directory(state.exp_dir, state.run_id)
    directory.mkdir(parents=True)
    (directory / "nodes").write_text("job=7\nstart=0\nnodes=h0\nmaster=h0:1\n")
    (directory / "ended").write_text(f"start=0\ncode=0\nwhy={reason}\n")
    status = watch.JobMonitor().status(state)
    assert (status.end, status.cancelled) == expected
