"""What Slurm's answers are taken for."""

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
from flagscale.launcher.runners.slurm.reasons import meaning
from flagscale.launcher.runners.slurm.scheduler import Job
from flagscale.launcher.runners.slurm.watch import _end_of, waiting
from flagscale.launcher.state import RunState


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "RUNNING|None|2026-01-02T03:04:05|x.1\n",
            Job("RUNNING", "", "2026-01-02T03:04:05"),
            id="running",
        ),
        pytest.param("PENDING|Priority|N/A|x.1\n", Job("PENDING", "Priority", ""), id="pending"),
        pytest.param(
            "PENDING|ReqNodeNotAvail, May be reserved for other job|N/A|x.1\n",
            Job("PENDING", "ReqNodeNotAvail, May be reserved for other job", ""),
            id="comma",
        ),
        pytest.param("RUNNING|None|N/A|other.1\n", Job(), id="id-that-came-again"),
        pytest.param(
            "PENDING|Resources|2026-01-02T03:04:05|x.1\nPENDING|Priority|N/A|x.1\n",
            Job("PENDING", "Priority", ""),
            id="component-that-comes-last",
        ),
        pytest.param(
            "RUNNING|None|2026-01-02T03:04:05|x.1\nPENDING|Resources|2026-01-03T00:00:00|x.1\n",
            Job("PENDING", "Resources", "2026-01-03T00:00:00"),
            id="component-that-waits",
        ),
        pytest.param(
            "COMPLETED|None|2026-01-02T03:04:05|x.1\nRUNNING|None|2026-01-02T03:04:05|x.1\n",
            Job("RUNNING", "", "2026-01-02T03:04:05"),
            id="component-that-runs",
        ),
        pytest.param("", Job(), id="silence"),
        pytest.param("slurm_load_jobs error\n", Job(), id="no-answer"),
    ],
)
def test_squeue(text: str, expected: Job) -> None:
    assert scheduler.parse(text, "x.1") == expected


@given(st.text(max_size=60))
def test_no_answer_breaks_it(text: str) -> None:
    assert isinstance(scheduler.parse(text, "x.1"), Job)
    assert isinstance(scheduler.parse_account(text, "x.1"), Job)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param("CANCELLED by 0|0:0|x.1\n", "was cancelled by root", id="cancelled"),
        pytest.param(
            "CANCELLED by 4000000|0:15|x.1\n", "was cancelled by user 4000000", id="by-a-stranger"
        ),
        pytest.param("TIMEOUT|0:0|x.1\n", "came to its time limit", id="time"),
        pytest.param("FAILED|3:0|x.1\n", "ended as FAILED (exit code 3:0)", id="code"),
        pytest.param("COMPLETED|0:0|x.1\n", "ended as COMPLETED", id="completed"),
        pytest.param(
            "FAILED|1:0|other\nNODE_FAIL|0:0|x.1\n", "lost a node", id="id-that-came-again"
        ),
        pytest.param("", "is not known to Slurm any more and has left no word", id="silence"),
    ],
)
def test_sacct(text: str, told: str) -> None:
    assert _end_of(scheduler.parse_account(text, "x.1")) == told


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("QOSMaxNodePerJobLimit", "more nodes than the QOS gives a job, and will never start"),
        ("AssocMaxWallDurationPerJobLimit", "more time than the account gives a job, and will"),
        ("AssocMaxCpuMinutesPerJobLimit", "more minutes of CPUs than the account gives a job"),
        ("QOSMaxGRESPerNode", "more GPUs (or other GRES) than the QOS gives a node, and will"),
        ("QOSMaxJobsPerUserLimit", "the user's jobs have all the jobs at once that the QOS allows"),
        ("AssocMaxJobsLimit", "all the jobs at once that the account allows; it waits"),
        ("MaxMemoryPerAccount", "the account's jobs have all the memory that the QOS allows"),
        ("AssocGrpCpuLimit", "the jobs of the account would have more CPUs than they may have"),
        ("AssocGrpGRESMinutes", "the account have used up the minutes of GPUs (or other GRES)"),
        ("AssocGrpCPURunMinutesLimit", "would have more minutes of CPUs than they may have"),
        ("QOSGrpWallLimit", "the jobs of the QOS have used up the time"),
        ("QOSMinCpuNotSatisfied", "less CPUs than the QOS wants of a job, and will never start"),
        ("ReqNodeNotAvail, UnavailableNodes:h01", "a node that it needs is down"),
        ("AssocGrpSomethingNew", "more what Slurm limits than they may have"),
    ],
)
def test_what_a_reason_means(reason: str, expected: str) -> None:
    assert expected in meaning(reason)


@pytest.mark.parametrize("reason", ["", "SomethingNew", "Groups", "QOSX"])
def test_a_reason_that_nobody_knows(reason: str) -> None:
    assert meaning(reason) == ""


@pytest.mark.parametrize(
    ("days", "expected"), [(0, False), (300, False), (365, True), (700_000, True)]
)
def test_a_start_that_slurm_does_not_foresee(days: int, expected: bool) -> None:
    start = datetime.now() + timedelta(days=days)
    assert scheduler.endless(start.isoformat(timespec="seconds")) is expected


@pytest.mark.parametrize(
    ("state", "waits", "over"),
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
def test_states(state: str, waits: bool, over: bool) -> None:
    job = Job(state)
    assert (job.waits, job.over) == (waits, over)


def test_what_slurm_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "SLURM_NTASKS", "SBATCH_ARRAY_INX", "SQUEUE_FORMAT", "SCANCEL_QUIET"):
        monkeypatch.setenv(name, "x")
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SBATCH_PARTITION": "gpu", "MINE": "y"}
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    found = scheduler.environment()
    assert kept.items() <= found.items()
    assert not {"HF_TOKEN", "SLURM_NTASKS", "SBATCH_ARRAY_INX", "SQUEUE_FORMAT"} & set(found)


def test_complaints_in_one_line() -> None:
    stderr = "sbatch: error: Batch job submission failed: Invalid qos\nsbatch: error: a\n"
    done = subprocess.CompletedProcess(["sbatch"], 1, "", stderr)
    assert scheduler.said(done) == "Batch job submission failed: Invalid qos; a"
    assert (
        scheduler.said(subprocess.CompletedProcess(["sbatch"], 1, "", "")) == "sbatch ended with 1"
    )


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (Job("PENDING"), "job 7 is pending"),
        (
            Job("PENDING", "Resources", "2026-01-02T03:04:05"),
            "job 7 is pending (Resources: it is the next one, and waits for nodes to get free); "
            "it may start at 2026-01-02T03:04:05",
        ),
        (Job("PENDING", "SomethingNew"), "job 7 is pending (SomethingNew)"),
    ],
)
def test_why_a_job_waits(job: Job, said: str) -> None:
    handle = RunnerHandle("slurm", {"job": "7"})
    state = RunState("id", "x", Path("/x"), 0.0, 1, False, 1.0, handle)
    assert waiting(state, job) == said


def test_a_command_that_this_user_may_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "squeue").touch(mode=0o600)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnreachableError, match="there is no squeue"):
        scheduler.call("squeue")


@pytest.mark.parametrize(
    ("job", "most"), [(Job("PENDING"), 6), (Job("RUNNING"), 6), (Job("PENDING", "Priority"), 2)]
)
def test_slurm_is_asked_less_and_less(
    job: Job, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a job that does not say why it waits, or runs and has not begun, as of any other."""
    now = 0.0
    asked: list[float] = []
    monkeypatch.setattr(watch.time, "monotonic", lambda: now)

    def ask(_state: RunState) -> Job:
        asked.append(now)
        return job

    monkeypatch.setattr(watch, "ask", ask)
    handle = RunnerHandle("slurm", {"job": "7", "name": "x"})
    state = RunState("id", "x", tmp_path, 0.0, 1, False, 1.0, handle)
    looker = watch.Watch()
    for second in range(600):
        now = float(second)
        assert not looker.standing(state).over
    assert sum(at < 60 for at in asked) <= most
    assert sum(at >= 60 for at in asked) <= 18
